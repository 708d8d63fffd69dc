//! Starts MPI in a job whose ranks share a [`Store`], for messages between hosts: the launcher's way if it has started
//! these ranks, else as their process manager ([`super::pmi_server`]).
//!
//! MPI starts once in a process. Later jobs of the same processes and ranks use it again. Thread rule: any thread, one
//! start at a time.

use std::ffi::OsString;
use std::fs;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::Builder;
use std::time::Duration;

use mpi::Threading;
use mpi::environment::{is_finalized, threading_support};

use super::bootstrap::MpiNetwork;
use super::comm::Comm;
use super::pmi_server::PmiServer;
use super::startup::{Others, StartupWatch};
use super::ways::{Library, Way, Ways};
use super::{launcher, lifetime};
use crate::config::Config;
use crate::error::{Error, Result, guard};
use crate::lock::lock;
use crate::topology::Topology;
use crate::transport::WaitContext;
use crate::transport::bootstrap::{Members, Network};
use crate::transport::detector_links::FAILURE_CHECK;
use crate::transport::interval::Interval;
use crate::transport::shm_region::Liveness;
use crate::transport::start_links::StartLinks;
use crate::transport::store::{POLL_INTERVAL, Store};
use crate::transport::wait_context::with_limits;

/// The name of the job in which this process has started MPI as its own process manager.
static STARTED_BY: Mutex<Option<String>> = Mutex::new(None);

/// The key with a rank that has ended while MPI started.
const LOST: &str = "pmi/lost";
/// Time limit of a look into the store for [`LOST`].
const LOOK: Duration = Duration::from_secs(1);

/// Whether somebody else has started MPI in this process.
pub fn is_started_by_others() -> bool {
    lifetime::is_started() && lock(&STARTED_BY).is_none()
}

/// The prepared start of MPI in this process: everything that can fail on one rank only.
pub struct PreparedStart {
    ways: Ways,
    /// For [`Way::Store`], with the descriptor for the library.
    server: Option<(PmiServer, OwnedFd)>,
    watch: StartupWatch,
    /// The connections with other hosts, on the first rank of a host.
    links: Arc<OnceLock<StartLinks>>,
    /// See [`lost`].
    lost: Arc<dyn Fn() -> Option<String> + Send + Sync>,
}

impl PreparedStart {
    /// The ways of this process.
    pub fn ways(&self) -> &Ways {
        &self.ways
    }

    /// Watches these connections with other hosts.
    pub fn watch_links(&self, links: StartLinks) {
        // Set once: a start is prepared for one network.
        let _set = self.links.set(links);
    }

    /// Describes a rank that has ended, on this host, at the other end of the connections, or known to another host.
    pub fn lost(&self) -> Option<String> {
        (self.lost)()
    }

    /// As [`PreparedStart::lost`], also after the start.
    pub fn watch(&self) -> Arc<dyn Fn() -> Option<String> + Send + Sync> {
        Arc::clone(&self.lost)
    }
}

fn lookup(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Prepares the start of MPI in job `name`, whose keys are in `store`. Local: the ranks must then choose a way
/// ([`Ways::choose`]) before they go on.
///
/// # Errors
/// [`Error::Network`] if MPI cannot be started or used with this rank and size; [`Error::State`] after its end;
/// [`Error::System`].
pub fn prepare_start(name: &str, members: &Members<'_>, store: &Arc<dyn Store>) -> Result<PreparedStart> {
    let topology = &**members.topology;
    let world = || {
        let world = Comm::world();
        Ok((world.rank()?, world.size()?))
    };
    let library = Library {
        version: &lifetime::library_info().library_version,
        running: (lifetime::is_started() && !is_finalized()).then(world).transpose()?,
        is_finalized: is_finalized(),
        started_by: lock(&STARTED_BY).clone(),
    };
    let ways = Ways::find((topology.rank(), topology.size()), &library, lookup)?;
    let start = || PmiServer::start(name, topology, Arc::clone(store));
    let server = ways.may_use_store().then(start).transpose()?;
    let links = Arc::default();
    let lost: Arc<dyn Fn() -> Option<String> + Send + Sync> = Arc::new(lost(members, store, &links));
    let mut others = Others { lost: Arc::clone(&lost), ..Others::default() };
    if let Some((server, _)) = &server {
        others.missing = Box::new(server.missing());
    }
    Ok(PreparedStart { ways, server, watch: lifetime::prepare(members.config, others)?, links, lost })
}

/// A function that describes a rank that has ended: one of this host or at the other end of `links`, of which it informs
/// the other hosts, or one of which another host has informed this one.
fn lost(
    members: &Members<'_>,
    store: &Arc<dyn Store>,
    links: &Arc<OnceLock<StartLinks>>,
) -> impl Fn() -> Option<String> + Send + Sync + use<> {
    let (topology, processes) = (Arc::clone(members.topology), Arc::clone(members.processes));
    let links = Arc::clone(links);
    let (names, store) = (Arc::clone(members.names), Arc::clone(store));
    let ended = move |(local, &rank): (usize, &usize)| Some(format!("{} {}", names[rank], processes.lost(local)?));
    move || {
        let local = topology.local_ranks().iter().enumerate().find_map(&ended);
        // A rank at the other end may have ended because of another one, of which it has informed all before.
        let linked = if local.is_some() { None } else { links.get().and_then(StartLinks::lost) };
        let exchange = |ctx: &WaitContext<'_>| {
            let reported = if local.is_some() { None } else { store.try_get(LOST, ctx)? };
            match (reported, &local, &linked) {
                (Some(text), ..) => Ok(Some(String::from_utf8_lossy(&text).into_owned())),
                (None, Some(text), _) | (None, None, Some(text)) => {
                    store.set(LOST, text.as_bytes(), ctx).map(|()| Some(text.clone()))
                }
                (None, None, None) => Ok(None),
            }
        };
        let here = || local.clone().or_else(|| linked.clone());
        match with_limits("", Some(LOOK), None, &|| None, exchange) {
            Ok(found) => found,
            Err(Error::Timeout(_)) => here(),
            // The store has ended with its process.
            Err(error) => here().or_else(|| Some(error.detail().to_owned())),
        }
    }
}

/// MPI as the network of a job with a store.
pub struct StartedNetwork {
    comm: Arc<Comm>,
    /// For send and receive, until they are taken.
    messages: Mutex<Option<Comm>>,
    left: AtomicBool,
    links: Arc<OnceLock<StartLinks>>,
    lost: Arc<dyn Fn() -> Option<String> + Send + Sync>,
}

/// Starts MPI as prepared, in job `name`, in the way that all ranks have chosen. Collective.
///
/// # Errors
/// [`Error::Network`], and those of the wait context. Where MPI_Init itself waits for a rank that does not come, the
/// process ends with status 1: at the deadline, or when that rank is known to have ended.
pub fn start_network(
    prepared: PreparedStart,
    way: Way,
    name: &str,
    members: &Members<'_>,
    wait_ctx: &WaitContext<'_>,
) -> Result<StartedNetwork> {
    let (topology, config) = (&**members.topology, members.config);
    let PreparedStart { server, watch, links, lost, .. } = prepared;
    let threading = match (way, server) {
        (Way::Running { .. }, _) => threading_support(),
        (Way::Launcher, _) => lifetime::start(config, &watch)?,
        (Way::Store, Some((server, descriptor))) => start_by_store(name, server, descriptor, topology, config, &watch)?,
        (Way::Store, None) => return Err(Error::Internal("no process manager is prepared".into())),
    };
    drop(watch);
    let (comm, messages) = duplicate_world(&*lost, wait_ctx).inspect_err(|_| lifetime::leak())?;
    let (comm, messages) = (Arc::new(comm), Mutex::new(Some(messages)));
    if !matches!(way, Way::Running { .. }) {
        // All ranks have left MPI_Init.
        launcher::remove_segments();
        launcher::reclaim_segments(Path::new("/dev/shm"));
        // Child processes must not use the launcher.
        launcher::leave_launcher();
    }
    let (rank, size) = (comm.rank()?, comm.size()?);
    if (rank, size) != (topology.rank(), topology.size()) {
        return Err(Error::Network(format!(
            "MPI has started this process as rank {rank} of {size}, but it is rank {} of {}: its library does not \
             understand the launcher that has set the variables of this process. Start the processes without them \
             (such as PMI_RANK), or build dl_comm for the launcher's MPI: MPICC=/path/to/mpicc pip install ...",
            topology.rank(),
            topology.size()
        )));
    }
    // Its owner may call it at any time, so serializing our own threads is not enough.
    let by_others = way == Way::Running { by_others: true };
    let needed = if by_others { Threading::Multiple } else { Threading::Serialized };
    if threading < needed {
        return Err(Error::Network(format!(
            "MPI was started with {threading:?} threads, but a job on several hosts needs {needed:?}; start dl_comm before \
             whoever starts MPI, or ask that one for MPI_THREAD_MULTIPLE"
        )));
    }
    Ok(StartedNetwork { comm, messages, left: AtomicBool::new(false), links, lost })
}

/// The communicators of collectives and of send and receive. MPICH makes them by steps that block, without a limit, while
/// a rank is missing. So a thread makes them, which is left behind if a rank has ended or the deadline has passed; MPI
/// cannot be used then.
fn duplicate_world(lost: &dyn Fn() -> Option<String>, wait_ctx: &WaitContext<'_>) -> Result<(Comm, Comm)> {
    let duplicate = || {
        with_limits("", None, None, &|| None, |ctx| {
            let world = Comm::world();
            Ok((world.duplicate(ctx)?, world.duplicate(ctx)?))
        })
    };
    let (sender, receiver) = channel();
    // Nobody receives it if the start has failed before.
    let run = move || drop(sender.send(guard(duplicate)));
    let thread = Builder::new().name("dlcomm-mpi".into()).spawn(run);
    let thread = thread.map_err(Error::no_thread)?;
    let looks = Interval::new(FAILURE_CHECK);
    loop {
        match receiver.recv_timeout(POLL_INTERVAL) {
            Ok(result) => {
                // It ends after it has sent.
                let _ended = thread.join();
                return result;
            }
            Err(RecvTimeoutError::Disconnected) => return Err(Error::Internal("a thread ended without a word".into())),
            Err(RecvTimeoutError::Timeout) => wait_ctx.check(Duration::ZERO, &|| "the other ranks, in MPI".into())?,
        }
        if let Some(lost) = looks.run(lost) {
            return Err(Error::PeerLost(lost));
        }
    }
}

fn start_by_store(
    name: &str,
    server: PmiServer,
    descriptor: OwnedFd,
    topology: &Topology,
    config: &Config,
    watch: &StartupWatch,
) -> Result<Threading> {
    // Variables of a launcher that has started something else, such as the agent of torchrun.
    launcher::leave_launcher();
    let numbers = [
        ("PMI_FD", descriptor.as_raw_fd().to_string()),
        ("PMI_RANK", topology.rank().to_string()),
        ("PMI_SIZE", topology.size().to_string()),
        // That of the server, whatever a site has set.
        ("MPIR_CVAR_PMI_VERSION", "1".to_owned()),
    ];
    let interface = interface_variables(&config.interface, Path::new("/sys/class/net"), lookup);
    // MPI reads them while it starts. Child processes must not use them.
    let variables = Variables::set(numbers.into_iter().chain(interface));
    let threading = lifetime::start(config, watch)?;
    drop(variables);
    // The library closes it.
    let _descriptor = descriptor.into_raw_fd();
    *lock(&STARTED_BY) = Some(name.to_owned());
    // Nobody waits for MPI_Finalize, and the ranks of a later job need MPI.
    lifetime::leak();
    server.started();
    Ok(threading)
}

/// Environment variables that have values while it lives, and their earlier values.
struct Variables(Vec<(&'static str, Option<OsString>)>);

impl Variables {
    fn set(values: impl Iterator<Item = (&'static str, String)>) -> Variables {
        let set = |(name, value): (&'static str, String)| {
            let before = std::env::var_os(name);
            // SAFETY: std's functions have a lock. C code on another thread must not read the environment meanwhile; as
            // with MPI_Init, which sets variables too, the program ensures that.
            unsafe { std::env::set_var(name, value) };
            (name, before)
        };
        Variables(values.map(set).collect())
    }
}

impl Drop for Variables {
    fn drop(&mut self) {
        for (name, before) in self.0.drain(..) {
            match before {
                // SAFETY: as above.
                Some(value) => unsafe { std::env::set_var(name, value) },
                // SAFETY: as above.
                None => unsafe { std::env::remove_var(name) },
            }
        }
    }
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
        Ok(Arc::new(MpiNetwork::new(Arc::clone(&self.comm), lock(&self.messages).take())?))
    }

    /// Describes a rank that has ended, until the start is over.
    pub fn lost(&self) -> Option<String> {
        (self.lost)()
    }

    /// The start is over on this rank.
    pub fn finish_start(&self) {
        self.links.get().into_iter().for_each(StartLinks::finish);
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
        std::mem::forget(lock(&self.messages).take());
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

    #[test]
    fn variables_get_their_earlier_values_back() {
        let [outer, inner] = ["DL_COMM_TEST_OUTER", "DL_COMM_TEST_INNER"];
        let set =
            |names: &[&'static str], value: &str| Variables::set(names.iter().map(|name| (*name, value.to_owned())));
        let values = || [outer, inner].map(|name| lookup(name).unwrap_or_default());
        let first = set(&[outer], "1");
        let second = set(&[outer, inner], "2");
        assert_eq!(values(), ["2", "2"]);
        drop(second);
        assert_eq!(values(), ["1", ""]);
        drop(first);
        assert_eq!(values(), ["", ""]);
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
