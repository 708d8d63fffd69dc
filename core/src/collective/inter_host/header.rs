//! The header of every message between hosts.

use std::array;

use crate::collective::call::Call;
use crate::collective::lookahead::Lookahead;
use crate::error::{Error, Result};
use crate::wire_layout::HEADER;

/// The header; it takes [`crate::wire_layout::HEADER`] bytes.
pub(super) struct SliceHeader {
    /// Signature of the sender's call.
    pub signature: u64,
    /// Number of the round.
    pub round: u32,
    /// Index of the message in its round.
    pub message_kind: u32,
    /// Whether all calls that the sender has seen match.
    pub agreed: bool,
    /// Whether data follows.
    pub has_data: bool,
    /// What the ranks that the sender has heard of have behind this call.
    pub lookahead: Lookahead,
}

/// Where the words of the lookahead start.
const LOOKAHEAD: usize = 24;

const _: () = assert!(LOOKAHEAD + size_of::<Lookahead>() <= HEADER);

impl SliceHeader {
    /// Whether the sender has `call`, as have all that it has heard of.
    pub fn agrees_with(&self, call: &Call) -> bool {
        self.agreed && self.signature == call.signature
    }

    pub fn write(&self, message: &mut [u8]) {
        message[0..8].copy_from_slice(&self.signature.to_le_bytes());
        message[8..12].copy_from_slice(&self.round.to_le_bytes());
        message[12..16].copy_from_slice(&self.message_kind.to_le_bytes());
        message[16] = u8::from(self.agreed);
        message[17] = u8::from(self.has_data);
        for (bytes, word) in message[LOOKAHEAD..].chunks_exact_mut(8).zip(self.lookahead.0) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Reads the header of a message, which must be of this round and kind.
    pub fn read(message: &[u8], round: u32, kind: u32, call: &Call) -> Result<SliceHeader> {
        if message[8..12] != round.to_le_bytes() || message[12..16] != kind.to_le_bytes() {
            return Err(Error::Internal(format!("a message of another round arrived in {}", call.full_name())));
        }
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&message[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        Ok(SliceHeader {
            signature: word(0),
            round,
            message_kind: kind,
            agreed: message[16] == 1,
            has_data: message[17] == 1,
            lookahead: Lookahead(array::from_fn(|index| word(LOOKAHEAD + 8 * index))),
        })
    }
}

/// The error for hosts that differ after they agreed.
pub(super) fn out_of_sync(call: &Call) -> Error {
    Error::Internal(format!("hosts out of sync in {}", call.full_name()))
}
