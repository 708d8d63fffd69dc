//! Messages between the owners of one shard on all hosts. Definitions.

use std::ops::Range;

use super::window::MAX_WINDOW;
use crate::error::Result;

/// A message of an exchange: a byte range of [`ExchangeBuffers`] to or from `host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMessage {
    /// The other host.
    pub host: usize,
    /// The bytes in the buffer. On reception the maximum; a message may be shorter.
    pub bytes: Range<usize>,
}

/// The memory of one exchange, aligned to [`crate::wire_layout::ALIGN`] bytes.
pub struct ExchangeBuffers<'a> {
    /// Messages to send.
    pub send: &'a mut [u8],
    /// Received messages.
    pub recv: &'a mut [u8],
}

/// Maximum number of overlapping exchanges on a link.
pub const MAX_EXCHANGES: usize = MAX_WINDOW;

/// The messages between the owners of one shard on all hosts, which are numbered as in the topology.
/// [`MAX_EXCHANGES`] exchanges may overlap. Messages of one exchange from one host to another arrive in order.
///
/// The link owns the buffers, so a transfer that outlives an aborted call never accesses freed memory. After an error
/// the link is unusable.
/// Thread rule: used by one thread at a time.
pub trait HostLink: Send {
    /// The buffers of `exchange`; not accessed while that exchange is in flight.
    fn buffers(&mut self, exchange: usize) -> ExchangeBuffers<'_>;

    /// Starts to send and to receive messages. Their byte ranges do not overlap.
    ///
    /// # Errors
    /// A failure of the transport.
    fn start(&mut self, exchange: usize, sends: &[HostMessage], receives: &[HostMessage]) -> Result<()>;

    /// Moves the messages of all exchanges along, without waiting. `completed` gets the host of each message that has
    /// completed.
    ///
    /// # Errors
    /// A failure of the transport.
    fn poll(&mut self, completed: &mut dyn FnMut(usize)) -> Result<()>;

    /// The number of messages of `exchange` in flight.
    fn in_flight(&self, exchange: usize) -> usize;

    /// The hosts whose messages are in flight, ascending.
    fn awaited(&self) -> Vec<usize>;

    /// The display name of a host.
    fn host_name(&self, host: usize) -> String;
}
