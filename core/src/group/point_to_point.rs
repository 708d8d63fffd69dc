//! Send and receive between the ranks of a group.
//!
//! Thread rule: any thread.

use std::sync::Arc;

use super::messenger::Messenger;
use super::submit::Group;
use super::work::Timeout;
use crate::buffer::View;
use crate::error::{Error, Result};
use crate::p2p::{Endpoint, Message, Request, Spans, Status, Then};

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
    pub fn from_codes(sends: bool, peer: i32, tag: i32, name: &'a str, timeout: Timeout) -> Result<Self> {
        const ANY: i32 = -1;
        let or_any = |value: i32, name: &str| match u32::try_from(value) {
            Ok(value) => Ok(Some(value)),
            Err(_) if value == ANY && !sends => Ok(None),
            Err(_) => Err(Error::Invalid(format!("{name} {value} is negative"))),
        };
        let peer = or_any(peer, "rank")?.map(|peer| peer as usize);
        Ok(MessageOptions { peer, tag: or_any(tag, "tag")?, name, timeout, exact: false })
    }
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

    /// Starts to send the sources of `views`, one after the other, as one message. Does not block.
    ///
    /// # Errors
    /// Invalid arguments, or the failure of the group; nothing was started then.
    ///
    /// # Safety
    /// The memory is valid and not written until the send has ended.
    pub unsafe fn send(
        &self,
        messenger: &Messenger,
        views: &[View<'_>],
        options: MessageOptions<'_>,
        then: Option<Then>,
    ) -> Result<Arc<Request>> {
        // SAFETY: guaranteed by the caller.
        unsafe { messenger.endpoint().send(&self.message(messenger, options), sources(views)?, then) }
    }

    /// Starts to receive a message into the destinations of `views`, one after the other. The message may be shorter,
    /// unless `options.exact` is set. Does not block.
    ///
    /// # Errors
    /// As for [`Group::send`].
    ///
    /// # Safety
    /// The memory is valid and used by nobody else until the receive has ended.
    pub unsafe fn receive(
        &self,
        messenger: &Messenger,
        views: &[View<'_>],
        options: MessageOptions<'_>,
        then: Option<Then>,
    ) -> Result<Arc<Request>> {
        // SAFETY: guaranteed by the caller.
        unsafe { messenger.endpoint().receive(&self.message(messenger, options), destinations(views)?, then) }
    }

    /// Sends and receives, and waits for both; either may be missing. Returns what was received.
    ///
    /// # Errors
    /// Those of the two.
    ///
    /// # Safety
    /// As for [`Group::send`] and [`Group::receive`].
    pub unsafe fn send_receive(
        &self,
        messenger: &Messenger,
        send: Option<(&[View<'_>], MessageOptions<'_>)>,
        receive: Option<(&[View<'_>], MessageOptions<'_>)>,
    ) -> Result<Option<Status>> {
        let endpoint = messenger.endpoint();
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (send, receive) {
                (None, None) => Ok(None),
                (Some((views, options)), None) => {
                    endpoint.send_now(&self.message(messenger, options), sources(views)?)?;
                    Ok(None)
                }
                (None, Some((views, options))) => {
                    endpoint.receive_now(&self.message(messenger, options), destinations(views)?).map(Some)
                }
                (Some((from, send)), Some((into, receive))) => {
                    let (send, receive) = (self.message(messenger, send), self.message(messenger, receive));
                    endpoint.exchange((&send, sources(from)?), (&receive, destinations(into)?)).map(Some)
                }
            }
        }
    }

    fn message<'a>(&self, messenger: &'a Messenger, options: MessageOptions<'a>) -> Message<'a> {
        let MessageOptions { peer, tag, name, timeout, exact } = options;
        Message { group: messenger.routes(), peer, tag, name, deadline: self.shared.deadline(timeout), exact }
    }
}

fn sources(views: &[View<'_>]) -> Result<Spans> {
    let mut spans = Spans::default();
    for View { buffer, .. } in views {
        buffer.check_source()?;
        spans.add(buffer.source_at(0).cast_mut(), buffer.len() * buffer.dtype().size())?;
    }
    Ok(spans)
}

fn destinations(views: &[View<'_>]) -> Result<Spans> {
    let mut spans = Spans::default();
    for View { buffer, .. } in views {
        buffer.check_destination_of(buffer.len())?;
        spans.add(buffer.dst(), buffer.len() * buffer.dtype().size())?;
    }
    Ok(spans)
}
