//! Transports: shared memory of a host ([`shm_region`] and its channels, created by [`shm`]), messages
//! between hosts ([`HostLink`], by [`launcher`]), and GPUs ([`gpu`]). A [`job::Job`] is made of them.
//! Collectives do not depend on the transport of host memory.
//!
//! Every wait spins briefly, then sleeps, and regularly checks its [`WaitContext`] for a deadline or an abort.

mod arena;
pub mod arenas;
pub mod backoff;
pub mod bootstrap;
pub mod close_on_fork;
pub mod counter;
mod creations;
mod cuda;
pub mod detector_links;
mod detector_thread;
pub mod failure_detector;
pub mod flag;
mod flag_tree;
mod group_agreement;
mod group_arenas;
mod group_creation;
pub mod group_memory;
pub mod hello;
mod host_link;
mod host_wait;
#[cfg(any(test, feature = "in-process"))]
pub mod in_process;
mod interval;
pub mod job;
pub mod mailbox;
pub mod memory;
pub mod messages;
mod mpi;
pub mod network_model;
mod notices;
pub mod peer_memory;
mod peer_user;
pub mod process;
mod range_allocator;
pub mod rank0_address;
mod rank_flags;
pub mod rank_info;
mod rank_memory;
pub mod ranks;
pub mod region_control;
mod region_layout;
pub mod rounds;
pub mod shm;
pub mod shm_channel;
pub mod shm_region;
pub mod spin;
pub mod start_links;
pub mod store;
pub mod store_bootstrap;
mod store_job;
#[cfg_attr(loom, path = "loom_sync.rs")]
pub mod sync;
pub mod tcp_store;
pub mod wait_context;
mod window;

pub use creations::Calls;
pub use host_link::{ExchangeBuffers, ExchangeMemory, HostLink, HostMessage, MAX_EXCHANGES};
pub use host_wait::{HostWait, check_hosts, finish_exchange};
pub use network_model::NetworkModel;
pub use rank_flags::{LOOKAHEAD_WORDS, common_words};
pub use region_layout::{MAX_DEFAULT_SLOT, RegionLayout, max_channels};
pub use shm_channel::{Phase, ShmChannel, SlotContent};
pub use shm_region::ShmRegion;
pub use wait_context::WaitContext;
pub use window::{HOST_WINDOW, MAX_WINDOW, NETWORK_WINDOW, SMALL_WINDOW};

/// The launcher of the job's processes and its library: a [`bootstrap`], and what only it knows.
pub mod launcher {
    pub use super::mpi::*;
}

/// Driver, streams, memory and kernels of GPUs.
pub mod gpu {
    pub use super::cuda::*;
}

use std::sync::Arc;

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
    /// For each channel, the links of this rank's shards; none on one host.
    pub links: Vec<Vec<Box<dyn HostLink>>>,
    /// Cost model of the network between hosts; equal on all ranks.
    pub network: NetworkModel,
    /// CPUs per rank, the minimum over all hosts; 0: some ranks share a CPU. Equal on all ranks.
    pub cpus_per_rank: usize,
}
