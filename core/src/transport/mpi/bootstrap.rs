//! The bootstrap of a job that an MPI launcher has started, and its network between hosts.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use mpi::Threading;

use super::comm::Comm;
use super::link::MpiLink;
use super::messages::MpiMessages;
use super::startup::Others;
use super::{clock_offset, launcher, lifetime, probe};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::transport::bootstrap::{Bootstrap, Exchanges, MAX_RECORD, Members, Network};
use crate::transport::messages::MessageNetwork;
use crate::transport::store::Store;
use crate::transport::wait_context::with_limits;
use crate::transport::{HostLink, MAX_EXCHANGES, NetworkModel, WaitContext};

/// All ranks of an MPI job.
struct MpiBootstrap {
    /// A duplicate, separate from the program's messages.
    comm: Arc<Comm>,
    rank: usize,
    size: usize,
    threading: Threading,
    /// Whether another component has initialized MPI.
    adopted: bool,
    left: AtomicBool,
    exchanges: Mutex<Exchanges>,
}

/// Initializes MPI, or adopts an initialized one. Collective.
///
/// # Errors
/// MPI is already finalized, or sees one process where the launcher started several.
pub fn connect(config: &Config) -> Result<Arc<dyn Bootstrap>> {
    if config.alone {
        launcher::leave_launcher();
    }
    let lookup = |name: &str| std::env::var(name).ok();
    launcher::check_connection(lookup)?;
    let watch = lifetime::prepare(config, Others::default())?;
    let threading = lifetime::start(config, &watch)?;
    drop(watch);
    let adopted = !lifetime::is_owned();
    let duplicated =
        with_limits("init_mpi", config.timeout, config.stall_warn, &|| None, |ctx| Comm::world().duplicate(ctx));
    let comm = duplicated.inspect_err(|_| lifetime::leak())?;
    if !adopted {
        // All ranks have left MPI_Init.
        launcher::remove_segments();
        launcher::reclaim_segments(Path::new("/dev/shm"));
    }
    let (rank, size) = (comm.rank()?, comm.size()?);
    if size == 1 && !config.alone {
        launcher::check_single_rank(lookup)?;
    }
    let (comm, left) = (Arc::new(comm), AtomicBool::new(false));
    Ok(Arc::new(MpiBootstrap { comm, rank, size, threading, adopted, left, exchanges: Mutex::default() }))
}

impl MpiBootstrap {
    fn count(&self, which: impl FnOnce(&mut Exchanges) -> &mut u64, bytes: usize) {
        let mut exchanges = lock(&self.exchanges);
        *which(&mut exchanges) += 1;
        exchanges.bytes += bytes as u64;
    }
}

impl Bootstrap for MpiBootstrap {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn allgather(&self, record: &[u8], longest: usize, wait_ctx: &WaitContext<'_>) -> Result<Vec<Vec<u8>>> {
        let mut bytes = record.to_vec();
        bytes.resize(longest.clamp(1, MAX_RECORD), 0xff);
        self.count(|exchanges| &mut exchanges.allgathers, bytes.len());
        self.comm.allgather(&bytes, wait_ctx)
    }

    fn allreduce_max(&self, values: [u64; 4], wait_ctx: &WaitContext<'_>) -> Result<[u64; 4]> {
        self.count(|exchanges| &mut exchanges.allreduces, size_of_val(&values));
        self.comm.allreduce_max(values, wait_ctx)
    }

    fn exchanges(&self) -> Exchanges {
        *lock(&self.exchanges)
    }

    fn store(&self) -> Option<Arc<dyn Store>> {
        None
    }

    fn network(&self, _members: &Members<'_>, _wait_ctx: &WaitContext<'_>) -> Result<Arc<dyn Network>> {
        // An adopted MPI may be called by its owner at any time, so serializing our own threads is not enough.
        let needed = if self.adopted { Threading::Multiple } else { Threading::Serialized };
        if self.threading < needed {
            return Err(Error::Network(format!(
                "MPI was started with {:?} threads, but a job on several hosts needs {needed:?}; call \
                 dl_comm.init_mpi() before whoever starts MPI, or ask that one for MPI_THREAD_MULTIPLE",
                self.threading
            )));
        }
        Ok(Arc::new(MpiNetwork::new(Arc::clone(&self.comm), None)?))
    }

    fn uses_launcher(&self) -> bool {
        true
    }

    fn ends_together(&self) -> bool {
        // All ranks must call MPI_Finalize, or none.
        lifetime::is_owned()
    }

    fn finish(&self, all_here: &dyn Fn(), wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.comm.barrier(wait_ctx)?;
        // No rank exits before all do.
        all_here();
        Ok(())
    }

    /// Leaves MPI unfinalized, because other ranks may never call MPI_Finalize.
    fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
        lifetime::leak();
    }
}

impl Drop for MpiBootstrap {
    fn drop(&mut self) {
        if self.left.load(Ordering::Relaxed) {
            // Messages may still be under way.
            std::mem::forget(Arc::clone(&self.comm));
        }
    }
}

/// Messages between the ranks of a communicator.
pub(super) struct MpiNetwork {
    comm: Arc<Comm>,
    /// For send and receive, if it is made already.
    messages: Mutex<Option<Comm>>,
    max_tag: usize,
}

impl MpiNetwork {
    /// The network of `comm`, whose ranks are those of the job, and of its duplicate `messages` for send and receive.
    pub(super) fn new(comm: Arc<Comm>, messages: Option<Comm>) -> Result<MpiNetwork> {
        let max_tag = comm.max_tag()?;
        Ok(MpiNetwork { comm, messages: Mutex::new(messages), max_tag })
    }
}

impl Network for MpiNetwork {
    fn max_links(&self) -> usize {
        self.max_tag / MAX_EXCHANGES - 1
    }

    fn link(&self, number: usize, owners: Vec<usize>, hosts: Vec<String>, capacity: usize) -> Box<dyn HostLink> {
        Box::new(MpiLink::new(Arc::clone(&self.comm), number + 1, owners, hosts, capacity))
    }

    fn measure(&self, other: usize, wait_ctx: &WaitContext<'_>) -> Result<NetworkModel> {
        probe::measure(&self.comm, other, wait_ctx)
    }

    fn clock_offset(&self, leaders: &[usize], me: usize, wait_ctx: &WaitContext<'_>) -> Result<i64> {
        clock_offset::clock_offset(&self.comm, leaders, me, wait_ctx)
    }
    fn messages(&self, wait_ctx: &WaitContext<'_>) -> Result<Box<dyn MessageNetwork>> {
        // Its own duplicate: receives from any rank must not see the messages of collectives.
        let made = lock(&self.messages).take();
        let comm = made.map_or_else(|| self.comm.duplicate(wait_ctx), Ok)?;
        Ok(Box::new(MpiMessages::new(Arc::new(comm), self.max_tag)))
    }
}
