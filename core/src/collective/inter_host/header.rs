//! What every message between hosts starts with.

use crate::collective::call::Call;
use crate::error::{Error, Result};

/// The header of a message; [`crate::layout::HEADER`] bytes are kept for it.
pub(super) struct Header {
    /// Of the sender's call.
    pub signature: u64,
    /// The step of the channel.
    pub step: u32,
    /// Which of the step's messages it is.
    pub message_kind: u32,
    /// Whether, as far as the sender knows, all called the same.
    pub agreed: bool,
    /// Whether the sender has something to bring.
    pub has_data: bool,
}

impl Header {
    pub fn write(&self, message: &mut [u8]) {
        message[0..8].copy_from_slice(&self.signature.to_le_bytes());
        message[8..12].copy_from_slice(&self.step.to_le_bytes());
        message[12..16].copy_from_slice(&self.message_kind.to_le_bytes());
        message[16] = u8::from(self.agreed);
        message[17] = u8::from(self.has_data);
    }

    /// The header of a message that must be of that step and stage.
    pub fn read(message: &[u8], step: u32, kind: u32, call: &Call) -> Result<Header> {
        if message[8..12] != step.to_le_bytes() || message[12..16] != kind.to_le_bytes() {
            return Err(Error::Internal(format!("a message of another step arrived in {}", call.full_name())));
        }
        let mut signature = [0; 8];
        signature.copy_from_slice(&message[0..8]);
        let signature = u64::from_le_bytes(signature);
        Ok(Header { signature, step, message_kind: kind, agreed: message[16] == 1, has_data: message[17] == 1 })
    }
}

/// Hosts that had agreed do so no more.
pub(super) fn out_of_sync(call: &Call) -> Error {
    Error::Internal(format!("hosts out of sync in {}", call.full_name()))
}
