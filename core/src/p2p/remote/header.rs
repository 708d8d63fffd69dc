//! The header of a message between hosts. Pure.

use crate::error::{Error, Result};
#[cfg(doc)]
use crate::transport::mailbox::ring::Envelope;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 40;

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum MessageKind {
    /// A short message; its data follows.
    Data = 1,
    /// The announcement of a long message.
    Long = 2,
    /// The receiver of a long message wants a part of it.
    Want = 3,
    /// The receiver needs no more of a long message, which has ended well.
    Done = 4,
    /// The receiver of a long message gave up.
    Refused = 5,
    /// The sender of a long message gave up.
    Aborted = 6,
    /// Only for [`MessageHeader::taken`].
    Credit = 7,
    /// The last message of a rank.
    Departed = 8,
}

impl MessageKind {
    fn of(value: u16) -> Option<MessageKind> {
        use MessageKind::{Aborted, Credit, Data, Departed, Done, Long, Refused, Want};
        [Data, Long, Want, Done, Refused, Aborted, Credit, Departed].into_iter().find(|&kind| kind as u16 == value)
    }

    /// Whether the receiver may have to keep it: such messages need a credit.
    pub fn needs_credit(self) -> bool {
        matches!(self, MessageKind::Data | MessageKind::Long)
    }
}

/// A header. The numbers wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageHeader {
    /// What the message is.
    pub kind: MessageKind,
    /// Its element types ([`Envelope::types`]).
    pub types: u16,
    /// Its number among those of its sender to its receiver.
    pub sequence: u32,
    /// How many messages that need a credit its sender has taken from its receiver.
    pub taken: u32,
    /// The tag; for [`MessageKind::Want`] the slot of the part.
    pub tag: u32,
    /// The group; for [`MessageKind::Want`] the offset of the part.
    pub context: u64,
    /// The length of the message; for [`MessageKind::Want`] that of the part.
    pub total: u64,
    /// Of a long message: numbers those of its sender.
    pub id: u64,
}

impl MessageHeader {
    /// A header of this kind; the others are 0.
    pub fn new(kind: MessageKind) -> MessageHeader {
        MessageHeader { kind, types: 0, sequence: 0, taken: 0, tag: 0, context: 0, total: 0, id: 0 }
    }

    /// Writes it to the start of `bytes`.
    pub fn write(&self, bytes: &mut [u8]) {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let what = u32::from(self.kind as u16) | u32::from(self.types) << 16;
        let words = [pair(what, self.sequence), pair(self.taken, self.tag), self.context, self.total, self.id];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Reads it from the start of a message of rank `from`.
    ///
    /// # Errors
    /// [`Error::Internal`] if it is none.
    pub fn read(bytes: &[u8], from: usize) -> Result<MessageHeader> {
        let invalid = || Error::Internal(format!("a message of {} bytes from rank {from} has no header", bytes.len()));
        let mut words = [0u64; HEADER_BYTES / 8];
        let header = bytes.get(..HEADER_BYTES).ok_or_else(invalid)?;
        for (word, place) in words.iter_mut().zip(header.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*place);
        }
        let (low, high) = (|word: u64| word as u32, |word: u64| (word >> 32) as u32);
        let header = MessageHeader {
            kind: MessageKind::of(low(words[0]) as u16).ok_or_else(invalid)?,
            types: (low(words[0]) >> 16) as u16,
            sequence: high(words[0]),
            taken: low(words[1]),
            tag: high(words[1]),
            context: words[2],
            total: words[3],
            id: words[4],
        };
        let data = if header.kind == MessageKind::Data { header.total } else { 0 };
        if (bytes.len() - HEADER_BYTES) as u64 != data {
            return Err(invalid());
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_survive_and_other_bytes_are_errors(kind in 1u16..9, types: u16, sequence: u32, taken: u32, tag: u32, context: u64, total in 0u64..50, id: u64, bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let of_kind = MessageHeader::new(MessageKind::of(kind).unwrap());
            let header = MessageHeader { types, sequence, taken, tag, context, total, id, ..of_kind };
            let mut message = vec![0; HEADER_BYTES + if header.kind == MessageKind::Data { total as usize } else { 0 }];
            header.write(&mut message);
            prop_assert_eq!(MessageHeader::read(&message, 0), Ok(header));
            message.push(0);
            prop_assert!(MessageHeader::read(&message, 0).is_err());
            // Any bytes: no panic.
            let _read = MessageHeader::read(&bytes, 1);
        }
    }
}
