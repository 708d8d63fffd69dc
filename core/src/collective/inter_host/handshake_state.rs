//! The state of a handshake between hosts.

use std::ops::Range;

use super::stage::Next;
use crate::collective::lookahead::Lookahead;

/// The data that travels with the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Payload {
    Empty,
    Whole,
    Halves,
}

/// What the ranks of some hosts have called.
#[derive(Debug, Clone, Copy)]
pub(in crate::collective) struct HostCalls {
    /// Whether their calls match.
    pub agreed: bool,
    /// What they all have behind the call.
    pub lookahead: Lookahead,
}

impl Default for HostCalls {
    fn default() -> HostCalls {
        HostCalls { agreed: true, lookahead: Lookahead::default() }
    }
}

/// Progress of one host.
#[derive(Debug)]
pub(super) struct HandshakeState {
    pub payload: Payload,
    /// Whether the calls of all hosts heard of so far match.
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
        let agreed = self.agreed;
        if agreed && self.payload == Payload::Empty { Next::StartData } else { Next::Done(agreed) }
    }
}
