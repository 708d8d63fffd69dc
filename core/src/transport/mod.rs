//! Transports: shared memory of a host ([`shm_region`], created by [`shm`] or [`in_process`]), messages between hosts
//! ([`HostLink`], by [`launcher`] or [`in_process`]), and GPUs ([`gpu`]). A
//! [`job::Job`] is made of them. Collectives do not depend on the transport
//! of host memory.
//!
//! Every wait spins briefly, then sleeps, and regularly checks its [`WaitContext`] for a deadline or an abort.

pub mod arena;
pub mod bootstrap;
pub mod close_on_fork;
mod cuda;
pub mod detector_links;
pub mod failure_detector;
pub mod flag;
mod group_arenas;
mod group_creation;
pub mod group_memory;
pub mod hello;
pub mod in_process;
pub mod job;
pub mod mailbox;
pub mod memory;
mod mpi;
pub mod network_model;
pub mod process;
mod range_allocator;
pub mod rank_info;
pub mod ranks;
pub mod region_control;
mod region_layout;
pub mod shm;
pub mod shm_region;
pub mod step;
pub mod store;
pub mod store_bootstrap;
#[cfg_attr(loom, path = "loom_sync.rs")]
pub mod sync;
pub mod tcp_store;
pub mod wait_context;

pub use network_model::NetworkModel;
pub use shm_region::{Phase, ShmChannel, ShmRegion, SlotContent};
pub use wait_context::WaitContext;

/// The launcher of the job's processes and its library: a [`bootstrap`], and what only it knows.
pub mod launcher {
    pub use super::mpi::*;
}

/// Driver, streams, memory and kernels of GPUs.
pub mod gpu {
    pub use super::cuda::*;
}

use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::group_key::{GroupKey, Members};
use crate::topology::Topology;

/// The resources from which a rank creates a group.
pub struct GroupResources {
    /// The key of the group.
    pub key: GroupKey,
    /// Its members.
    pub members: Members,
    /// The rank's position.
    pub topology: Arc<Topology>,
    /// Display names of all ranks of the job, for messages.
    pub names: Arc<[String]>,
    /// This rank's view of the host's shared region.
    pub region: Arc<ShmRegion>,
    /// The link of each channel; `None` on one host or if the rank owns no shard.
    pub links: Vec<Option<Box<dyn HostLink>>>,
    /// Cost model of the network between hosts; equal on all ranks.
    pub network: NetworkModel,
    /// Whether some host has fewer CPUs than group threads; equal on all ranks.
    pub oversubscribed: bool,
}

/// A message of an exchange: a byte range of [`ExchangeBuffers`] to or from `host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
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
pub const MAX_EXCHANGES: usize = 2;

/// The messages between the owners of one shard on all hosts, which are numbered as in the topology. Two exchanges,
/// numbered 0 and 1, may overlap. Messages of one exchange from one host to another arrive in order.
///
/// The link owns the buffers, so a transfer that outlives an aborted call never accesses freed memory.
/// Thread rule: used by one thread at a time.
pub trait HostLink: Send {
    /// The buffers of `exchange`; not accessed while that exchange is in flight.
    fn buffers(&mut self, exchange: usize) -> ExchangeBuffers<'_>;

    /// Starts to send and to receive messages. Their byte ranges do not overlap.
    ///
    /// # Errors
    /// A failure of the transport; the link is unusable afterwards.
    fn start(&mut self, exchange: usize, sends: &[Message], receives: &[Message]) -> Result<()>;

    /// Waits for the exchange started with [`HostLink::start`].
    ///
    /// # Errors
    /// An abort or deadline of the wait context, or a failure of the transport; the link is unusable afterwards.
    fn finish(&mut self, exchange: usize, wait_ctx: &WaitContext<'_>) -> Result<()>;
}
