//! Starts MPI in a job whose ranks share a [`Store`], for messages between hosts: the launcher's way if it has started
//! these ranks, else as their process manager ([`super::pmi_server`]).
//!
//! MPI starts once in a process. Later jobs of the same processes and ranks use it again. Thread rule: any thread, one
//! start at a time.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use mpi::Threading;
use mpi::environment::{is_finalized, threading_support};

use super::bootstrap::MpiNetwork;
use super::comm::Comm;
use super::pmi_server::PmiServer;
use super::{launcher, lifetime};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::topology::Topology;
use crate::transport::WaitContext;
use crate::transport::bootstrap::Network;
use crate::transport::store::Store;

/// The name of the job in which this process has started MPI as its own process manager.
static STARTED_BY: Mutex<Option<String>> = Mutex::new(None);

/// Whether somebody else has started MPI in this process.
pub fn is_started_by_others() -> bool {
    lifetime::is_started() && lock(&STARTED_BY).is_none()
}

/// How this process can become a rank of MPI; see [`plan`].
#[derive(Debug, Clone, PartialEq, Eq)]
enum Plan {
    /// MPI runs, started by the job of this name, or by somebody else (empty), with the same rank and size.
    Running(String),
    /// The launcher of this process knows it by the same rank and size.
    Launcher,
    /// It is its own process manager.
    Store,
}

/// The prepared start of MPI in this process.
pub struct PreparedStart(Plan);

impl PreparedStart {
    /// A text that must be equal on all ranks.
    pub fn way(&self) -> String {
        format!("{:?}", self.0)
    }
}

fn lookup(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Decides how to start MPI. Local: the ranks must then agree before they go on.
///
/// # Errors
/// [`Error::Network`] if MPI cannot be started or used with this topology; [`Error::State`] after its end.
pub fn prepare_start(topology: &Topology) -> Result<PreparedStart> {
    let world = || {
        let world = Comm::world();
        Ok((world.rank()?, world.size()?))
    };
    let running = (lifetime::is_started() && !is_finalized()).then(world).transpose()?;
    let version = lifetime::library_info().library_version;
    let started_by = lock(&STARTED_BY).clone();
    let plan = plan((topology.rank(), topology.size()), is_finalized(), running, &started_by, &version, lookup)?;
    Ok(PreparedStart(plan))
}

fn plan(
    me: (usize, usize),
    is_finalized: bool,
    running: Option<(usize, usize)>,
    started_by: &Option<String>,
    version: &str,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<Plan> {
    let (rank, size) = me;
    if is_finalized {
        return Err(Error::State(
            "MPI is finalized already and cannot be started again in this process, but the ranks are on several hosts"
                .into(),
        ));
    }
    match running {
        Some(found) if found == me => return Ok(Plan::Running(started_by.clone().unwrap_or_default())),
        Some((other, others)) => {
            return Err(Error::Network(format!(
                "MPI runs in this process already, as rank {other} of {others}, and cannot be rank {rank} of {size}: on \
                 several hosts a process has the same rank in all its jobs; start new processes"
            )));
        }
        None => {}
    }
    if launcher::position(lookup) == Some(me) {
        return Ok(Plan::Launcher);
    }
    if version.contains("Open MPI") {
        return Err(Error::Network(
            "the ranks are on several hosts, and dl_comm was built with Open MPI, which only its own launcher can start: \
             use Open MPI's mpiexec, or install dl_comm with MPICH"
                .into(),
        ));
    }
    Ok(Plan::Store)
}

/// MPI as the network of a job with a store.
pub struct StartedNetwork {
    comm: Arc<Comm>,
    left: AtomicBool,
}

/// Starts MPI as prepared, in job `name`, whose keys are in `store`. All ranks have the same way. Collective.
///
/// # Errors
/// [`Error::Network`], [`Error::System`], and those of the wait context. Where MPI_Init itself waits for a rank that
/// does not come, the process ends at the deadline with status 1.
pub fn start_network(
    prepared: PreparedStart,
    name: &str,
    topology: &Topology,
    store: Arc<dyn Store>,
    config: &Config,
    wait_ctx: &WaitContext<'_>,
) -> Result<StartedNetwork> {
    let threading = match prepared.0 {
        Plan::Running(_) => threading_support(),
        Plan::Launcher => {
            launcher::check_connection(lookup)?;
            lifetime::start(config, None)?
        }
        Plan::Store => start_by_store(name, topology, store, config)?,
    };
    let comm = Arc::new(Comm::world().duplicate(wait_ctx)?);
    launcher::remove_segments();
    launcher::reclaim_segments(Path::new("/dev/shm"));
    // Child processes must not use it.
    launcher::leave_launcher();
    let (rank, size) = (comm.rank()?, comm.size()?);
    if (rank, size) != (topology.rank(), topology.size()) {
        return Err(Error::Network(format!(
            "MPI has started this process as rank {rank} of {size}, but it is rank {} of {}",
            topology.rank(),
            topology.size()
        )));
    }
    if threading < Threading::Serialized {
        return Err(Error::Network(format!(
            "MPI was started with {threading:?} threads, but a job on several hosts needs {:?}",
            Threading::Serialized
        )));
    }
    Ok(StartedNetwork { comm, left: AtomicBool::new(false) })
}

fn start_by_store(name: &str, topology: &Topology, store: Arc<dyn Store>, config: &Config) -> Result<Threading> {
    let (server, descriptor) = PmiServer::start(name, topology, store)?;
    // Variables of a launcher that has started something else, such as the agent of torchrun.
    launcher::leave_launcher();
    let numbers = [("PMI_FD", descriptor as usize), ("PMI_RANK", topology.rank()), ("PMI_SIZE", topology.size())];
    let numbers = numbers.map(|(name, value)| (name, value.to_string()));
    let interface = interface_variables(&config.interface, Path::new("/sys/class/net"), lookup);
    for (name, value) in numbers.into_iter().chain(interface) {
        // SAFETY: no other thread accesses the environment: this is a part of the process's start, and MPI's changes
        // it too.
        unsafe { std::env::set_var(name, value) };
    }
    *lock(&STARTED_BY) = Some(name.to_owned());
    let threading = lifetime::start(config, Some(Box::new(server.missing())))?;
    // Nobody waits for MPI_Finalize, and the ranks of a later job need MPI.
    lifetime::leak();
    server.started();
    Ok(threading)
}

/// The variables that restrict libfabric and UCX to `interface` (empty: any), unless they are set. For an InfiniBand
/// interface UCX needs the device's name too.
fn interface_variables(
    interface: &str,
    devices: &Path,
    lookup: impl Fn(&str) -> Option<String>,
) -> Vec<(&'static str, String)> {
    if interface.is_empty() {
        return Vec::new();
    }
    let folder = devices.join(interface);
    let port = fs::read_to_string(folder.join("dev_port")).ok().and_then(|text| text.trim().parse::<u32>().ok());
    let behind = fs::read_dir(folder.join("device/infiniband")).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        behind.map(|device| format!("{}:{}", device.file_name().to_string_lossy(), port.unwrap_or(0) + 1)).collect();
    names.sort_unstable();
    names.push(interface.to_owned());
    let variables = [("FI_TCP_IFACE", interface.to_owned()), ("UCX_NET_DEVICES", names.join(","))];
    variables.into_iter().filter(|(name, _)| lookup(name).is_none()).collect()
}

impl StartedNetwork {
    /// The messages between hosts.
    ///
    /// # Errors
    /// A failure of MPI.
    pub fn network(&self) -> Result<Arc<dyn Network>> {
        Ok(Arc::new(MpiNetwork::new(Arc::clone(&self.comm))?))
    }

    /// Waits for all ranks, so that nobody awaits a message afterwards. Collective.
    ///
    /// # Errors
    /// Those of the wait context, or a failure of MPI.
    pub fn barrier(&self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.comm.barrier(wait_ctx)
    }

    /// Moves messages along that are sent already. A failure is that of a message that nobody waits for.
    pub fn progress(&self) {
        let _progressed = self.comm.progress();
    }

    /// Ends without the other ranks; messages may still be under way.
    pub fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
        lifetime::leak();
    }
}

impl Drop for StartedNetwork {
    fn drop(&mut self) {
        if self.left.load(Ordering::Relaxed) {
            std::mem::forget(Arc::clone(&self.comm));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MPICH: &str = "MPICH Version: 5.0.2";

    #[test]
    fn mpi_is_used_again_by_the_same_rank_only() {
        let job = Some("job".to_owned());
        let running = |found| plan((1, 3), false, found, &job, MPICH, |_| None);
        assert_eq!(running(Some((1, 3))), Ok(Plan::Running("job".into())));
        assert_eq!(running(None), Ok(Plan::Store));
        for other in [(0, 3), (1, 2)] {
            assert!(matches!(running(Some(other)), Err(Error::Network(text)) if text.contains("start new processes")));
        }
        assert!(matches!(plan((1, 3), true, None, &job, MPICH, |_| None), Err(Error::State(_))));
    }

    #[test]
    fn the_launcher_of_these_ranks_is_used_and_that_of_others_is_not() {
        let under = |variables: &[(&str, &str)], version| {
            let set = |name: &str| variables.iter().find(|entry| entry.0 == name).map(|entry| entry.1.to_owned());
            plan((1, 4), false, None, &None, version, set)
        };
        assert_eq!(under(&[("PMI_RANK", "1"), ("PMI_SIZE", "4")], MPICH), Ok(Plan::Launcher));
        assert_eq!(under(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")], MPICH), Ok(Plan::Store), "srun of a torchrun");
        let open_mpi = "Open MPI v5.0.11";
        let ranks = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")];
        assert_eq!(under(&ranks, open_mpi), Ok(Plan::Launcher));
        assert!(matches!(under(&[], open_mpi), Err(Error::Network(text)) if text.contains("Open MPI's mpiexec")));
    }

    #[test]
    fn the_interface_selects_devices() {
        let folder = tempfile::tempdir().unwrap();
        let variables = |name: &str, kept: &'static str| {
            interface_variables(name, folder.path(), |asked| (asked == kept).then(String::new))
        };
        assert_eq!(variables("", ""), []);
        let eth0 = |name| (name, "eth0".to_owned());
        assert_eq!(variables("eth0", ""), [eth0("FI_TCP_IFACE"), eth0("UCX_NET_DEVICES")]);
        assert_eq!(variables("eth0", "FI_TCP_IFACE"), [eth0("UCX_NET_DEVICES")]);
        let device = folder.path().join("ib1/device/infiniband/mlx5_0");
        fs::create_dir_all(&device).unwrap();
        fs::write(folder.path().join("ib1/dev_port"), "1\n").unwrap();
        assert_eq!(variables("ib1", "FI_TCP_IFACE"), [("UCX_NET_DEVICES", "mlx5_0:2,ib1".to_owned())]);
    }
}
