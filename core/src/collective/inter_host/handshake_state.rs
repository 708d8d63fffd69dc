//! The state of a handshake between hosts.

use std::ops::Range;

use super::stage::Next;

/// The data that travels with the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Payload {
    Empty,
    Whole,
    Halves,
}

/// Progress of one host.
#[derive(Debug)]
pub(super) struct HandshakeState {
    pub payload: Payload,
    /// Whether all calls seen so far match.
    pub agreed: bool,
    /// The part of the slice that this host still reduces.
    pub range: Range<usize>,
    /// Offset of the data: in the local buffer for halves, in the send buffer for the whole slice.
    pub at: usize,
    /// Whether this host has data.
    pub has_data: bool,
}

impl HandshakeState {
    /// The start of a handshake about a slice.
    pub fn new(payload: Payload, agreed: bool, range: Range<usize>) -> HandshakeState {
        HandshakeState { payload, agreed, range, at: 0, has_data: false }
    }

    pub fn has_payload(&self) -> bool {
        self.agreed && self.payload != Payload::Empty
    }

    /// What follows the handshake.
    pub fn outcome(&self) -> Next {
        if self.agreed && self.payload == Payload::Empty { Next::StartData } else { Next::Done(self.agreed) }
    }
}
