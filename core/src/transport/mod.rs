//! What carries bytes: memory shared by the ranks of a host ([`region`], made by [`shm`] or [`threads`]), messages between
//! hosts ([`HostLink`], by [`bootstrap`] or [`in_process`]), and GPUs ([`gpu`]). Collectives do not know who carries host bytes.
//!
//! Every wait here spins briefly, then sleeps, and asks its [`Patience`] now and then whether to go on.

pub mod arena;
pub mod close_on_fork;
mod cuda;
pub mod detector_links;
pub mod failure_detector;
pub mod flag;
pub mod hello;
pub mod in_process;
pub mod memory;
mod mpi;
pub mod network_model;
pub mod process;
mod range_allocator;
mod region_layout;
pub mod shm;
pub mod shm_region;
pub mod step;
#[cfg_attr(loom, path = "loom_sync.rs")]
pub mod sync;
pub mod wait_context;

pub use network_model::NetworkModel;
pub use shm_region::{Phase, ShmChannel, ShmRegion};
pub use wait_context::WaitContext;

/// How the processes of a job become ranks, and the messages between their hosts.
pub mod bootstrap {
    pub use super::mpi::*;
}

/// The driver, streams, memory and kernels of GPUs.
pub mod gpu {
    pub use super::cuda::*;
}

use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::topology::Topology;

/// What one rank needs to make a team.
pub struct GroupResources {
    /// Where the rank is.
    pub topology: Arc<Topology>,
    /// The names of all ranks of the job, for messages.
    pub names: Arc<[String]>,
    /// Its view of the host's memory.
    pub region: Arc<ShmRegion>,
    /// The link of each channel, for a rank that drives a shard where there are several hosts.
    pub links: Vec<Option<Box<dyn HostLink>>>,
    /// What is known of the network between the hosts; the same on all ranks.
    pub network: NetworkModel,
    /// Whether a host has fewer processors than its ranks have threads of this team; the same on all ranks.
    pub oversubscribed: bool,
}

/// A message of an exchange: that part of a [`ExchangeBuffers`]'s bytes goes to, or comes from, `host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The other host.
    pub host: usize,
    /// Where the message is; on reception the room for it, which it may not fill.
    pub bytes: Range<usize>,
}

/// The memory of one exchange; it starts at a multiple of [`crate::plan::ALIGN`] bytes.
pub struct ExchangeBuffers<'a> {
    /// What messages are sent from.
    pub send: &'a mut [u8],
    /// What they are received into.
    pub recv: &'a mut [u8],
}

/// How many exchanges may be under way at once on a link.
pub const MAX_EXCHANGES: usize = 2;

/// The message channel between one shard's drivers on all hosts, hosts being numbered as in the topology. Two exchanges may
/// be under way at once, one of each turn (0 and 1); the messages of one turn from one host to another arrive in order.
///
/// The link owns the memory, so that a transfer that outlives an aborted call never touches freed memory.
/// Thread rule: used by one thread at a time.
pub trait HostLink: Send {
    /// The memory of `turn`; not to be touched while an exchange of that turn is under way.
    fn buffers(&mut self, turn: usize) -> ExchangeBuffers<'_>;

    /// Starts to send and to receive messages; none of them overlap.
    ///
    /// # Errors
    /// When the transport fails; the link can then not be used any more.
    fn start(&mut self, turn: usize, sends: &[Message], receives: &[Message]) -> Result<()>;

    /// Returns when the exchange of `turn` that was started is done.
    ///
    /// # Errors
    /// When the wait context ends or the transport fails; the link can then not be used any more.
    fn finish(&mut self, turn: usize, wait_ctx: &WaitContext<'_>) -> Result<()>;
}
