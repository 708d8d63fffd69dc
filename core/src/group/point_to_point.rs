//! Send and receive between the ranks of a group.
//!
//! Thread rule: any thread.

use std::sync::Arc;

use super::messenger::Messenger;
use super::submit::Group;
use super::work::Timeout;
use crate::error::{Error, Result};
use crate::p2p::{Endpoint, Message};

/// A send or receive, beside its tensors.
#[derive(Debug, Clone, Copy, Default)]
pub struct MessageOptions<'a> {
    /// The other rank of the group; `None` for any (receives only).
    pub peer: Option<usize>,
    /// The tag; `None` for any (receives only).
    pub tag: Option<u32>,
    /// For error messages; may be empty.
    pub name: &'a str,
    /// The deadline.
    pub timeout: Timeout,
    /// Whether a received message must be as long as the tensors.
    pub exact: bool,
}

impl<'a> MessageOptions<'a> {
    /// The options of a send, or of a receive, whose `peer` and `tag` may be `DL_COMM_ANY_SOURCE` and `DL_COMM_ANY_TAG`
    /// of `dl_comm.h`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a negative rank or tag.
    #[inline(always)]
    pub fn from_codes(sends: bool, peer: i32, tag: i32, name: &'a str, timeout: Timeout) -> Result<Self> {
        let peer = or_any(peer, sends, "rank")?.map(|peer| peer as usize);
        Ok(MessageOptions { peer, tag: or_any(tag, sends, "tag")?, name, timeout, exact: false })
    }
}

/// A rank or tag; `None` for any (receives only).
#[inline(always)]
fn or_any(value: i32, sends: bool, name: &str) -> Result<Option<u32>> {
    const ANY: i32 = -1;
    match u32::try_from(value) {
        Ok(value) => Ok(Some(value)),
        Err(_) if value == ANY && !sends => Ok(None),
        Err(_) => Err(negative(value, name)),
    }
}

#[cold]
fn negative(value: i32, name: &str) -> Error {
    Error::Invalid(format!("{name} {value} is negative"))
}

impl Group {
    /// The group's way to send and receive; `endpoint` gives the end of this process's mailboxes at the first use.
    ///
    /// # Errors
    /// Those of `endpoint`.
    pub fn messenger(&self, endpoint: impl FnOnce() -> Result<Arc<Endpoint>>) -> Result<&Messenger> {
        if let Some(messenger) = self.messenger.get() {
            return Ok(messenger);
        }
        let made = Messenger::new(endpoint()?, &self.shared);
        Ok(self.messenger.get_or_init(|| made))
    }

    /// Notes that this thread waits for messages of its own, as it may do again while another thread waits for a call.
    #[inline]
    pub fn note_waiting_for_messages(&self) {
        self.shared.process_groups.note_waiting_for_messages();
    }

    /// What the endpoint is given of a send or receive.
    #[inline(always)]
    pub fn message<'a>(&self, messenger: &'a Messenger, options: &MessageOptions<'a>) -> Message<'a> {
        let &MessageOptions { peer, tag, name, timeout, exact } = options;
        Message { group: messenger.routes(), peer, tag, name, deadline: self.shared.deadline.of(timeout), exact }
    }
}
