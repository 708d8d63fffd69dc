//! The progress of a handshake between hosts.

use std::ops::Range;

/// What rides along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Payload {
    Empty,
    Whole,
    Halves,
}

/// A host's part on its way through the rounds.
#[derive(Debug)]
pub(super) struct HandshakeState {
    pub payload: Payload,
    /// Whether, as far as is known, all called the same.
    pub agreed: bool,
    /// What of the slice it still is.
    pub range: Range<usize>,
    /// Where it is: in halves, in the own memory; whole, in the message that is sent next.
    pub at: usize,
    /// Whether there is anything.
    pub has_data: bool,
}

impl HandshakeState {
    pub fn has_payload(&self) -> bool {
        self.agreed && self.payload != Payload::Empty
    }
}
