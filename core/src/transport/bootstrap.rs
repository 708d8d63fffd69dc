//! How the processes of a job become ranks, and what only their launcher can give them. A job ([`super::job`]) is built
//! on this seam. No call on tensors asks it.

use std::sync::Arc;

use serde::Serialize;

use super::messages::MessageNetwork;
use super::process::ProcessLiveness;
use super::store::Store;
use super::wait_context::WaitContext;
use super::{HostLink, NetworkModel};
use crate::codec::encode;
use crate::config::Config;
use crate::error::Result;
use crate::topology::Topology;

/// The most bytes of a record in [`Bootstrap::allgather`].
pub const MAX_RECORD: usize = 2048;
/// The most bytes of a text in a record, which has two at most.
const MAX_TEXT_BYTES: usize = 1000;

/// What the exchanges of a bootstrap have cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Exchanges {
    /// All-reduces, of 32 bytes each.
    pub allreduces: u64,
    /// All-gathers.
    pub allgathers: u64,
    /// Bytes of a rank in all of them.
    pub bytes: u64,
}

/// What the start of a network between hosts has to know about the ranks.
pub struct Members<'a> {
    /// Their positions.
    pub topology: &'a Arc<Topology>,
    /// Their display names.
    pub names: &'a Arc<[String]>,
    /// Liveness of the processes of this host, by local rank.
    pub processes: &'a Arc<ProcessLiveness>,
    /// Settings of this process.
    pub config: &'a Config,
}

/// The connection of this process with the other ranks of its job.
/// Thread rule: any thread; collective functions run one at a time, in the same order on all ranks.
pub trait Bootstrap: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Gathers a record of at most `longest` bytes from every rank, ordered by rank; `longest` is at most [`MAX_RECORD`],
    /// and equal on all ranks. Shorter records may be padded with bytes 0xff, which alone are no record. Collective.
    ///
    /// # Errors
    /// Those of the wait context, and [`crate::error::Error::Network`]. The ranks are out of step then.
    fn allgather(&self, record: &[u8], longest: usize, wait_ctx: &WaitContext<'_>) -> Result<Vec<Vec<u8>>>;

    /// The maximum of each number over all ranks. Collective.
    ///
    /// # Errors
    /// As for [`Bootstrap::allgather`].
    fn allreduce_max(&self, values: [u64; 4], wait_ctx: &WaitContext<'_>) -> Result<[u64; 4]>;

    /// What its exchanges among all ranks have cost so far.
    fn exchanges(&self) -> Exchanges;

    /// The key-value store of all ranks, if there is one already. Otherwise the job serves one.
    fn store(&self) -> Option<Arc<dyn Store>>;

    /// The network between the hosts of its ranks, `members`; asked for only by jobs on several hosts, once. May be
    /// collective.
    ///
    /// # Errors
    /// [`crate::error::Error::Network`] if the ranks cannot use one, and those of the wait context.
    fn network(&self, members: &Members<'_>, wait_ctx: &WaitContext<'_>) -> Result<Arc<dyn Network>>;

    /// The job has started on this rank: it looks for lost ranks itself.
    ///
    /// # Errors
    /// As for [`Bootstrap::allgather`].
    fn started(&self, _wait_ctx: &WaitContext<'_>) -> Result<()> {
        Ok(())
    }

    /// A rank that has ended while the network was started. May look into the store: not for every poll.
    fn lost(&self) -> Option<String> {
        None
    }

    /// Whether the library of a launcher is behind it: it cannot be started again in this process, and child processes
    /// must not inherit its connection.
    fn uses_launcher(&self) -> bool;

    /// Whether this process must call [`Bootstrap::finish`] before it ends.
    fn ends_together(&self) -> bool;

    /// Waits until all ranks have called it; no other function may be called afterwards. On several hosts it calls
    /// `all_here` when all ranks are here, before any of them returns. Collective.
    ///
    /// # Errors
    /// As for [`Bootstrap::allgather`].
    fn finish(&self, all_here: &dyn Fn(), wait_ctx: &WaitContext<'_>) -> Result<()>;

    /// Ends without the other ranks, which may never come.
    fn leave(&self);
}

/// Messages between hosts.
/// Thread rule: any thread.
pub trait Network: Send + Sync {
    /// The number of links that the network can tell apart.
    fn max_links(&self) -> usize;

    /// A link between the ranks `owners` (by host), with `capacity` bytes per exchange and direction. `number`
    /// is below [`Network::max_links`], and other links of these ranks have others; `hosts` are display names.
    fn link(&self, number: usize, owners: Vec<usize>, hosts: Vec<String>, capacity: usize) -> Box<dyn HostLink>;

    /// Measures the network to rank `other`, which calls it at the same time.
    ///
    /// # Errors
    /// As for [`Bootstrap::allgather`].
    fn measure(&self, other: usize, wait_ctx: &WaitContext<'_>) -> Result<NetworkModel>;

    /// The clock of the first host minus this host's clock, in nanoseconds. Called by the first ranks of all hosts,
    /// `leaders`; `me` is the index of this host.
    ///
    /// # Errors
    /// As for [`Bootstrap::allgather`].
    fn clock_offset(&self, leaders: &[usize], me: usize, wait_ctx: &WaitContext<'_>) -> Result<i64>;

    /// The messages of send and receive. Collective over all ranks.
    ///
    /// # Errors
    /// As for [`Bootstrap::allgather`].
    fn messages(&self, wait_ctx: &WaitContext<'_>) -> Result<Box<dyn MessageNetwork>>;
}

/// Gathers records whose lengths the ranks do not know; see [`Bootstrap::allgather`].
///
/// # Errors
/// As for [`Bootstrap::allgather`].
pub(super) fn gather_records(
    bootstrap: &dyn Bootstrap,
    record: &[u8],
    wait_ctx: &WaitContext<'_>,
) -> Result<Vec<Vec<u8>>> {
    let [longest, ..] = bootstrap.allreduce_max([record.len() as u64, 0, 0, 0], wait_ctx)?;
    bootstrap.allgather(record, usize::try_from(longest).unwrap_or(MAX_RECORD), wait_ctx)
}

/// The bytes of a record. A record that is too long becomes an empty one, which no rank can decode: all fail.
pub(super) fn encode_record<T: Serialize>(record: &T) -> Vec<u8> {
    encode(record).ok().filter(|bytes| bytes.len() <= MAX_RECORD).unwrap_or_default()
}

/// The first characters of a text that goes into a record.
pub(super) fn shortened(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT_BYTES)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_fits() {
        let text = shortened(&"ä".repeat(MAX_RECORD));
        assert_eq!(text.len(), MAX_TEXT_BYTES);
        let record = (text, Err::<(), _>((-8, shortened(&"x".repeat(MAX_RECORD)))));
        assert!(encode(&record).is_ok_and(|bytes| bytes.len() <= MAX_RECORD));
    }
}
