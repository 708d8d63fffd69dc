//! The job: what its ranks share, made at start through a [`Bootstrap`]. [`super::group_creation`] makes its groups.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::NetworkModel;
use super::arenas::Arenas;
use super::bootstrap::{Bootstrap, Exchanges, Network};
use super::creations::{Creation, Creations, LOOK_EVERY};
use super::detector_links::{FAILURE_CHECK, HostAddress, Listener};
use super::failure_detector::{FailureDetector, HostGroups, MonitoredProcess};
use super::group_memory::GroupMemory;
use super::hello::Admission;
use super::interval::Interval;
use super::mailbox::memory::arena_header;
use super::mailbox::process_memory;
use super::messages::MessageNetwork;
use super::ranks::Ranks;
use super::shm::{self, Name};
use super::store::{MemoryStore, Store};
use super::tcp_store::{ServedStore, TcpStore};
use super::wait_context::WaitContext;
use crate::affinity::{self, CpuBounds};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::group_key::Members;
use crate::lock::lock;
use crate::timeline;
use crate::topology::Topology;

/// The processes of the job.
pub struct Job {
    pub(super) ranks: Ranks,
    /// Through which groups of some ranks are made.
    pub(super) store: Arc<dyn Store>,
    /// The messages between hosts; `None` on one host.
    pub(super) network: Option<Arc<dyn Network>>,
    /// The messages of send and receive between hosts, until they are taken.
    messages: Mutex<Option<Box<dyn MessageNetwork>>>,
    /// That network, measured at start.
    pub(super) network_model: NetworkModel,
    /// The CPUs of the ranks.
    cpu_bounds: Vec<CpuBounds>,
    /// The groups of this host, in its shared memory.
    pub(super) groups: Arc<GroupMemory>,
    /// The groups that this process creates.
    pub(super) creations: Creations,
    /// Until all ranks have come to the end.
    detector: Mutex<Option<FailureDetector>>,
    /// An error that left the ranks out of sync while a group of all ranks was created: no further one can be created.
    poisoned: OnceLock<Error>,
    left: AtomicBool,
}

/// What a job is made of, beside its ranks and their store.
struct Parts {
    network: Option<Arc<dyn Network>>,
    messages: Option<Box<dyn MessageNetwork>>,
    network_model: NetworkModel,
    cpu_bounds: Vec<CpuBounds>,
    store_addresses: Vec<SocketAddr>,
    groups: Arc<GroupMemory>,
    detector: Option<FailureDetector>,
}

/// The store that this rank serves, and its addresses.
type Served = (Arc<dyn Store>, String);

impl Job {
    /// Gathers rank information and creates what the ranks share. Collective: a rank with invalid settings takes part
    /// too, and all ranks get its error. `connect` makes the bootstrap, with the settings or the defaults.
    ///
    /// # Errors
    /// Those of `connect`; invalid settings of any rank; several hosts without a network between them; a rank without
    /// shared memory.
    pub fn start(settings: Result<Config>, connect: impl FnOnce(&Config) -> Result<Arc<dyn Bootstrap>>) -> Result<Job> {
        let config = &settings.clone().unwrap_or_default();
        let (ranks, watches) = Ranks::gather(connect(config)?, config)?;
        if ranks.topology.size() == 1 {
            settings.clone()?;
        }
        let served = settings.and(watches).and_then(|()| serve_store(&ranks));
        let made = Job::make(&ranks, &served);
        let Parts { network, messages, network_model, cpu_bounds, store_addresses, groups, detector } = made
            .inspect_err(|error| {
                // A recoverable error is equal on all ranks; they may retry.
                if !error.is_recoverable() {
                    ranks.bootstrap.leave();
                }
            })?;
        let store: Arc<dyn Store> = match (served?, ranks.bootstrap.store()) {
            (Some((store, _)), _) | (None, Some(store)) => store,
            (None, None) if store_addresses.is_empty() => Arc::new(MemoryStore::default()),
            (None, None) => Arc::new(TcpStore::new(store_addresses, Admission::Key(ranks.key), ranks.topology.rank())),
        };
        let creations = Creations::new(ranks.topology.rank());
        Ok(Job {
            ranks,
            store,
            network,
            messages: Mutex::new(messages),
            network_model,
            cpu_bounds,
            groups,
            creations,
            detector: Mutex::new(detector),
            poisoned: OnceLock::new(),
            left: AtomicBool::new(false),
        })
    }

    fn make(ranks: &Ranks, served: &Result<Option<Served>>) -> Result<Parts> {
        let topology = &ranks.topology;
        let several_hosts = topology.hosts() > 1;
        let members = ranks.members();
        let connect = |wait_ctx: &WaitContext<'_>| ranks.bootstrap.network(&members, wait_ctx);
        let network = several_hosts.then(|| ranks.with_deadline("init_mpi", || None, connect)).transpose()?;
        // A look may ask the store.
        let looks = Interval::new(FAILURE_CHECK);
        let lost = || looks.run(|| ranks.bootstrap.lost());
        let make = |wait_ctx: &WaitContext<'_>| {
            let (cpu_bounds, store_addresses) = agree_on_start(ranks, served, wait_ctx)?;
            let arenas = make_arenas(ranks, wait_ctx)?;
            let groups =
                Arc::new(GroupMemory::new(arenas, topology.local_rank(), topology.local_size(), several_hosts));
            let (mut detector, mut network_model, mut messages) = (None, NetworkModel::UNKNOWN, None);
            if let Some(network) = &network {
                detector = start_detector(ranks, &groups, &**network, wait_ctx)?;
                network_model = measure_network(ranks, &**network, wait_ctx)?;
                messages = Some(network.messages(wait_ctx)?);
            }
            ranks.bootstrap.started(wait_ctx)?;
            Ok(Parts { network: None, messages, cpu_bounds, store_addresses, groups, detector, network_model })
        };
        let parts = ranks.with_deadline("init_mpi", lost, make)?;
        Ok(Parts { network, ..parts })
    }

    /// CPUs per rank of a group with these members, the minimum over its hosts; 0: some ranks share a CPU. Equal on all
    /// ranks.
    pub fn cpus_per_rank(&self, topology: &Topology, members: &Members) -> usize {
        let bounds = |&rank: &usize| self.cpu_bounds.get(members.to_world(rank));
        let share = |host: usize| affinity::share(topology.ranks_of(host).iter().filter_map(bounds));
        (0..topology.hosts()).map(share).min().unwrap_or(1)
    }

    /// The shared memory of this host's ranks.
    pub fn arenas(&self) -> &Arc<Arenas> {
        self.groups.arenas()
    }

    /// The messages of send and receive between hosts; `None` on one host, and once they were taken.
    pub fn take_messages(&self) -> Option<Box<dyn MessageNetwork>> {
        lock(&self.messages).take()
    }

    /// Whether [`Job::take_messages`] has something.
    pub fn has_messages(&self) -> bool {
        lock(&self.messages).is_some()
    }

    /// Whether `rank`, of another host, is lost, as the failure detector has reported.
    pub fn is_lost_elsewhere(&self, rank: usize) -> bool {
        self.groups.lost_ranks().any(|lost| lost == rank)
    }

    /// Whether the library of a launcher is behind the job ([`Bootstrap::uses_launcher`]).
    pub fn uses_launcher(&self) -> bool {
        self.ranks.bootstrap.uses_launcher()
    }

    /// The ranks.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// What the exchanges among all ranks have cost so far.
    pub fn exchanges(&self) -> Exchanges {
        self.ranks.bootstrap.exchanges()
    }

    /// The measured network between the hosts; `None` on one host.
    pub fn network(&self) -> Option<NetworkModel> {
        self.network.as_ref().map(|_| self.network_model)
    }

    /// Returns `outcome` if it is `Ok` on all ranks, else the same error on every rank. `what` names the step in
    /// messages. Collective.
    ///
    /// # Errors
    /// As for [`Job::create_group`] of all ranks.
    pub fn confirm<T>(&self, what: &str, outcome: Result<T>) -> Result<T> {
        let mine = outcome.as_ref().map(|_| ()).map_err(Error::clone);
        self.in_step(what, |wait_ctx| self.ranks.agree_on("", mine, wait_ctx))?;
        outcome
    }

    /// Runs `work`, collective over all ranks. Its failure may leave the ranks out of sync.
    pub(super) fn in_step<T>(&self, what: &str, work: impl FnOnce(&WaitContext<'_>) -> Result<T>) -> Result<T> {
        self.in_step_with(what, &|| {}, work)
    }

    /// As [`Job::in_step`]; waits call `meanwhile` from time to time.
    fn in_step_with<T>(
        &self,
        what: &str,
        meanwhile: &dyn Fn(),
        work: impl FnOnce(&WaitContext<'_>) -> Result<T>,
    ) -> Result<T> {
        if let Some(error) = self.poisoned.get() {
            return Err(error.clone());
        }
        let lost = || {
            meanwhile();
            self.lost_elsewhere()
        };
        let result = self.ranks.with_deadline(what, lost, work);
        if let Err(error @ (Error::Timeout(_) | Error::PeerLost(_) | Error::Network(_))) = &result {
            let _first = self.poisoned.set(error.clone());
        }
        result
    }

    /// The end of the job, as something that waits for all ranks.
    fn ending(&self) -> Creation {
        let (text, members) = ("finalize".to_owned(), (0..self.ranks.topology.size()).collect());
        Creation { hash: 0, first: 0, generation: 0, text, members, on_main_thread: true }
    }

    /// A rank of another host that the failure detector has reported as lost.
    fn lost_elsewhere(&self) -> Option<String> {
        let rank = self.groups.lost_ranks().next()?;
        Some(format!("{} is lost", self.ranks.names.get(rank)?))
    }

    /// Ends without the other ranks, which may never come.
    pub fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
        // Ending it properly could wait for ranks that never come.
        std::mem::forget(self.take_messages());
        self.ranks.bootstrap.leave();
    }

    /// Whether this rank has ended without the others.
    pub fn was_left(&self) -> bool {
        self.left.load(Ordering::Relaxed)
    }

    /// Waits for all ranks, up to the deadline, if the bootstrap needs that; returns whether it did. `failure` is that of
    /// a group. It calls `meanwhile` from time to time.
    ///
    /// # Errors
    /// A rank was lost, or did not come before the deadline; the job is then left.
    pub fn final_barrier(&self, failure: Option<&Error>, meanwhile: &dyn Fn()) -> Result<bool> {
        let bootstrap = &self.ranks.bootstrap;
        if !bootstrap.ends_together() {
            return Ok(false);
        }
        let looks = Interval::new(LOOK_EVERY);
        // Ranks that create a group with this one learn that it does not come.
        let ending = self.creations.start(&*self.store, self.ending());
        let meanwhile = || {
            meanwhile();
            looks.run(|| {
                ending.publish();
                None::<()>
            });
        };
        // From now on, the end of a rank is no failure.
        let all_here = || drop(lock(&self.detector).take());
        // A network may not survive messages to a host with an exited rank.
        let lost = failure.filter(|error| self.network.is_some() && matches!(error, Error::PeerLost(_)));
        let outcome = match self.poisoned.get().or(lost) {
            Some(error) => Err(error.clone()),
            None => self.in_step_with("finalize", &meanwhile, |wait_ctx| bootstrap.finish(&all_here, wait_ctx)),
        };
        outcome.map(|()| true).inspect_err(|_| self.leave())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.left.load(Ordering::Relaxed) {
            lock(&self.detector).iter_mut().for_each(FailureDetector::mark_aborted);
        }
    }
}

/// Rank 0 serves a store, unless there is one. Returns the store and its addresses. It starts now, because later on not
/// all ranks need it at the same time; it costs a thread that sleeps, and the others connect when they need it.
fn serve_store(ranks: &Ranks) -> Result<Option<Served>> {
    let topology = &ranks.topology;
    if topology.hosts() == 1 && !ranks.config.interface.is_empty() {
        // Nothing needs it here, but a wrong name would fail on several hosts only.
        Listener::open(&ranks.config.interface)?;
    }
    if topology.rank() != 0 || topology.size() == 1 || ranks.bootstrap.store().is_some() {
        return Ok(None);
    }
    let listener = if topology.hosts() > 1 { Listener::open(&ranks.config.interface)? } else { Listener::loopback()? };
    let address = listener.address();
    Ok(Some((Arc::new(ServedStore::start(listener.sockets, topology.size(), Admission::Key(ranks.key))?), address)))
}

/// The CPUs of the ranks, and the addresses of the store that rank 0 has `served`. Fails on all
/// ranks unless all have succeeded.
fn agree_on_start(
    ranks: &Ranks,
    served: &Result<Option<Served>>,
    wait_ctx: &WaitContext<'_>,
) -> Result<(Vec<CpuBounds>, Vec<SocketAddr>)> {
    let mine = served.as_ref().map_err(Error::clone).and_then(|served| {
        let address = served.as_ref().map_or(String::new(), |(_, address)| address.clone());
        Ok((CpuBounds::of(&affinity::allowed()?.0), address))
    });
    let (bounds, addresses): (Vec<CpuBounds>, Vec<String>) = ranks.agree("", mine, wait_ctx)?.into_iter().unzip();
    Ok((bounds, addresses[0].split(',').filter_map(|address| address.parse().ok()).collect()))
}

/// Creates this rank's arena and opens those of the host's other ranks. Succeeds on all ranks or on none. The only rank
/// of a host shares nothing, and needs no folder.
fn make_arenas(ranks: &Ranks, wait_ctx: &WaitContext<'_>) -> Result<Arc<Arenas>> {
    let topology = &ranks.topology;
    let is_alone = topology.local_size() == 1;
    let private = || shm::create_private().map(|(file, max_len)| (file, None, max_len));
    let created = shm::create(&ranks.config.shm_dir, topology.local_size());
    let created = match created.map(|(file, name, max_len)| (file, Some(name), max_len)) {
        Err(_) if is_alone => private(),
        created => created,
    };
    let path_of =
        |name: &Option<Name>| name.as_ref().map_or(String::new(), |name| name.path().to_string_lossy().into());
    let mine = created.as_ref().map(|(_, name, max_len)| (path_of(name), *max_len)).map_err(Error::clone);
    let all = ranks.agree("", mine, wait_ctx)?;
    let (file, name, _) = created?;
    let me = topology.local_rank();
    // Each rank can map what another has allocated.
    let max_len = topology.local_ranks().iter().map(|&rank| all[rank].1).min().unwrap_or(0);
    let mut mine = Some(file);
    let open = |(local, &rank): (usize, &usize)| match mine.take_if(|_| local == me) {
        Some(mine) => Ok(mine),
        None => shm::open(Path::new(&all[rank].0)),
    };
    let files: Result<Vec<_>> = topology.local_ranks().iter().enumerate().map(open).collect();
    let arenas = match files.and_then(|files| Arenas::new(files, me, max_len)) {
        Err(_) if is_alone => private().and_then(|(file, _, max_len)| Arenas::new(vec![file], 0, max_len)),
        arenas => arenas,
    };
    if let (Ok(arenas), false) = (&arenas, is_alone) {
        process_memory::show(arena_header(arenas, me));
    }
    let made = arenas.as_ref().map(|_| ()).map_err(Error::clone);
    ranks.agree_on("", made, wait_ctx)?;
    drop::<Option<Name>>(name);
    arenas.map(Arc::new)
}

/// Measures the clock offset, and starts the failure detector on the first rank of each host.
fn start_detector(
    ranks: &Ranks,
    groups: &Arc<GroupMemory>,
    network: &dyn Network,
    wait_ctx: &WaitContext<'_>,
) -> Result<Option<FailureDetector>> {
    let topology = &ranks.topology;
    let is_leader = topology.local_rank() == 0;
    let listener = if is_leader { Listener::open(&ranks.config.interface).map(Some) } else { Ok(None) };
    let address = listener.as_ref().map(|found| found.as_ref().map_or(String::new(), Listener::address));
    let leaders: Vec<usize> = (0..topology.hosts()).map(|host| topology.ranks_of(host)[0]).collect();
    let offset = if is_leader { network.clock_offset(&leaders, topology.host(), wait_ctx)? } else { 0 };
    let mine = address.map(|text| (offset, text)).map_err(Error::clone);
    let all = ranks.agree("", mine, wait_ctx)?;
    timeline::set_offset(all[leaders[topology.host()]].0);
    let Some(listener) = listener? else { return Ok(None) };
    let host = |(host, &leader): (usize, &usize)| HostAddress {
        name: ranks.rank_info[leader].display_name(leader),
        ranks: topology.ranks_of(host).to_vec(),
        addresses: all[leader].1.split(',').filter_map(|address| address.parse().ok()).collect(),
    };
    let hosts: Vec<HostAddress> = leaders.iter().enumerate().map(host).collect();
    let process = |(local, &rank): (usize, &usize)| {
        let process = ranks.local_processes.process(local)?;
        Some(MonitoredProcess { rank, name: ranks.names[rank].clone(), process })
    };
    let processes = topology.local_ranks().iter().enumerate().filter_map(process).collect();
    let groups = Arc::clone(groups) as Arc<dyn HostGroups>;
    FailureDetector::start(listener, topology.host(), &hosts, ranks.key, processes, groups).map(Some)
}

/// Measures the network between neighbouring hosts. Returns the slowest values on all ranks.
fn measure_network(ranks: &Ranks, network: &dyn Network, wait_ctx: &WaitContext<'_>) -> Result<NetworkModel> {
    let topology = &ranks.topology;
    let neighbour = topology.host() ^ 1;
    let measured = if topology.local_rank() == 0 && neighbour < topology.hosts() {
        Some(network.measure(topology.ranks_of(neighbour)[0], wait_ctx)?)
    } else {
        None
    };
    let [latency, gap, byte, _] = measured.map_or([0; 4], NetworkModel::to_bits);
    Ok(NetworkModel::from_bits(ranks.bootstrap.allreduce_max([latency, gap, byte, 0], wait_ctx)?))
}
