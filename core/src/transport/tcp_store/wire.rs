//! The messages between a store's server and its clients: frames of a length and a postcard value.
//!
//! Thread rule: plain data.

use std::io::{self, ErrorKind, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::codec::{decode, encode};

/// The most bytes of a frame.
pub const MAX_FRAME: usize = 64 << 20;
/// Bytes read at a time.
const READ: usize = 16 << 10;

/// A request, which a client numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Stores a value.
    Set(String, Vec<u8>),
    /// Asks for a value now.
    TryGet(String),
    /// Asks for a value once it is there.
    Wait(String),
    /// Ends the request [`Request::Wait`] of this number; both get no answer.
    Cancel(u64),
    /// Adds to a number.
    Add(String, i64),
    /// Removes a key.
    Delete(String),
    /// The client's end fails the waits for keys with this prefix, with this text; without a text it does not.
    FailAtEnd(String, Option<String>),
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// It was carried out.
    Done,
    /// The value, if there is one.
    Value(Option<Vec<u8>>),
    /// The sum.
    Sum(i64),
    /// It failed, with this code and text.
    Failed(i32, String),
}

/// The frames of a non-blocking connection.
#[derive(Default)]
pub struct Frames {
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
}

impl Frames {
    /// Adds a message to those that [`Frames::flush`] sends.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`] for a message that is too long.
    pub fn push<T: Serialize>(&mut self, message: &T) -> io::Result<()> {
        let bytes = encode(message).map_err(io::Error::other)?;
        if bytes.len() > MAX_FRAME {
            return Err(io::Error::new(ErrorKind::InvalidData, format!("a message of {} bytes", bytes.len())));
        }
        self.outgoing.extend((bytes.len() as u32).to_le_bytes());
        self.outgoing.extend(bytes);
        Ok(())
    }

    /// Whether messages remain to be sent.
    pub fn has_unsent(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// The number of bytes that remain to be sent.
    pub fn unsent_bytes(&self) -> usize {
        self.outgoing.len()
    }

    /// Sends as much as `stream` takes.
    ///
    /// # Errors
    /// System errors.
    pub fn flush(&mut self, mut stream: impl Write) -> io::Result<()> {
        let mut sent = 0;
        let result = loop {
            if sent == self.outgoing.len() {
                break Ok(());
            }
            match stream.write(&self.outgoing[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        self.outgoing.drain(..sent);
        result
    }

    /// Reads what `stream` has, up to a limit.
    ///
    /// # Errors
    /// [`ErrorKind::UnexpectedEof`] when it was closed; system errors.
    pub fn fill(&mut self, mut stream: impl Read) -> io::Result<()> {
        let len = self.incoming.len();
        self.incoming.resize(len + READ, 0);
        let result = stream.read(&mut self.incoming[len..]);
        self.incoming.truncate(len + *result.as_ref().unwrap_or(&0));
        match result {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(()),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The next received message, once it is complete.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`]
    pub fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let Some((len, rest)) = self.incoming.split_first_chunk() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        if len > MAX_FRAME {
            return Err(ErrorKind::InvalidData.into());
        }
        let Some(bytes) = rest.get(..len) else { return Ok(None) };
        let message = decode(bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error));
        self.incoming.drain(..4 + len);
        message.map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_arrive_in_any_pieces(
            values in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20),
            cuts in prop::collection::vec(1usize..200, 1..20),
        ) {
            let (mut sender, mut bytes) = (Frames::default(), Vec::new());
            for value in &values {
                sender.push(&Request::Set("key".into(), value.clone())).unwrap();
            }
            sender.flush(&mut bytes).unwrap();
            prop_assert!(!sender.has_unsent());
            let (mut receiver, mut received, mut cuts) = (Frames::default(), Vec::new(), cuts.iter().cycle());
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(*cuts.next().unwrap().min(&rest.len()));
                receiver.fill(piece).unwrap();
                while let Some(Request::Set(_, value)) = receiver.next().unwrap() {
                    received.push(value);
                }
                rest = after;
            }
            prop_assert_eq!(received, values);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 1..100)) {
            let mut frames = Frames::default();
            frames.fill(&bytes[..]).unwrap();
            while let Ok(Some(_)) = frames.next::<(u64, Request)>() {}
        }
    }
}
