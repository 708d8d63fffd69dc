//! The job: gathers rank information through a [`Bootstrap`], and creates the resources of groups.

use std::cell::Cell;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::arena::{Arenas, PeerMemory};
use super::bootstrap::{Bootstrap, Network, all_records, shortened};
use super::detector_links::{HostAddress, Listener};
use super::failure_detector::FailureDetector;
use super::memory::Aligned;
use super::process::ProcessLiveness;
use super::rank_info::{RankInfo, exchange_rank_info};
use super::shm::{self, Name, Segment};
use super::shm_region::{Liveness, LocalPeer, RegionLayout, RegionMemory, ShmRegion};
use super::store::{MemoryStore, Store};
use super::tcp_store::{ServedStore, TcpStore};
use super::wait_context::{WaitContext, with_limits};
use super::{GroupResources, HostLink, NetworkModel};
use crate::affinity::{self, CpuBounds};
use crate::codec::decode;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::group_config::GroupConfig;
use crate::signals;
use crate::timeline;
use crate::topology::Topology;
use crate::wire_layout::exchange_buffer_bytes;

/// Grace period for messages from an exited process.
const DRAIN_GRACE: Duration = Duration::from_secs(1);

/// The processes of the job.
pub struct Job {
    bootstrap: Arc<dyn Bootstrap>,
    /// Where ranks find each other later on.
    store: Arc<dyn Store>,
    /// The messages between hosts; `None` on one host.
    network: Option<Arc<dyn Network>>,
    topology: Arc<Topology>,
    names: Arc<[String]>,
    hosts: Vec<String>,
    rank_info: Arc<[RankInfo]>,
    /// Liveness of the other processes of this host.
    local_processes: Arc<ProcessLiveness>,
    /// A random number known only to the ranks of this job.
    key: u128,
    config: Config,
    detector: Option<FailureDetector>,
    /// That network, measured at start.
    network_model: NetworkModel,
    /// CPUs per rank: the minimum over all hosts.
    processors: usize,
    /// The shared memory of this host's ranks, or the reason why there is none.
    arenas: Result<Arc<Arenas>>,
    /// An error that left the ranks out of sync while a group was created: no further group can be created.
    poisoned: OnceLock<Error>,
    left: AtomicBool,
}

impl Job {
    /// Gathers rank information and creates what the ranks share. Collective: a rank with invalid settings takes part
    /// too, and all ranks get its error. `connect` makes the bootstrap, with the settings or the defaults.
    ///
    /// # Errors
    /// Those of `connect`; invalid settings of any rank; several hosts without a network between them.
    pub fn start(settings: Result<Config>, connect: impl FnOnce(&Config) -> Result<Arc<dyn Bootstrap>>) -> Result<Job> {
        let config = &settings.clone().unwrap_or_default();
        let bootstrap = connect(config)?;
        let found = with_limits("init_mpi", config.timeout, config.stall_warn, &|| None, |wait_ctx| {
            exchange_rank_info(&*bootstrap, &config.shm_dir, wait_ctx)
        });
        let (rank_info, key) = found.inspect_err(|_| bootstrap.leave())?;
        let rank = bootstrap.rank();
        if rank_info.len() == 1 {
            settings.clone()?;
        }
        let host_keys: Vec<_> = rank_info.iter().map(RankInfo::host_key).collect();
        let topology = Topology::new(rank, &host_keys);
        let network = (topology.hosts() > 1).then(|| bootstrap.network()).transpose()?;
        let host_name = |host: usize| {
            let ranks: Vec<String> = topology.ranks_of(host).iter().map(usize::to_string).collect();
            format!("{} (ranks {})", rank_info[topology.ranks_of(host)[0]].host, ranks.join(", "))
        };
        let hosts = (0..topology.hosts()).map(host_name).collect();
        let names: Arc<[String]> =
            rank_info.iter().enumerate().map(|(rank, info)| format!("rank {rank} on {}", info.host)).collect();
        let pids: Vec<Option<i32>> = rank_info
            .iter()
            .map(|info| (info.pid_namespace == rank_info[rank].pid_namespace).then_some(info.pid))
            .collect();
        let others: Vec<Option<i32>> =
            topology.local_ranks().iter().map(|&other| pids[other].filter(|_| other != rank)).collect();
        let liveness = ProcessLiveness::new(&others).map(Arc::new);
        let mut job = Job {
            store: bootstrap.store().unwrap_or_else(|| Arc::new(MemoryStore::default())),
            bootstrap,
            network,
            topology: Arc::new(topology),
            names,
            hosts,
            rank_info: rank_info.into(),
            local_processes: liveness.clone().unwrap_or_default(),
            key,
            config: config.clone(),
            detector: None,
            network_model: NetworkModel::UNKNOWN,
            processors: 1,
            arenas: Err(Error::State("there is no shared memory yet".into())),
            poisoned: OnceLock::new(),
            left: AtomicBool::new(false),
        };
        let served = settings.and(liveness).and_then(|_| job.serve_store());
        let agreed = job.with_deadline("init_mpi", |wait_ctx| job.agree_on_start(&served, wait_ctx));
        let (processors, addresses) = agreed.inspect_err(|error| {
            // A recoverable error is equal on all ranks; they may retry.
            if !error.is_recoverable() {
                job.leave();
            }
        })?;
        job.processors = processors;
        if let Some((store, _)) = served? {
            job.store = store;
        } else if !addresses.is_empty() {
            job.store = Arc::new(TcpStore::new(addresses, key, rank));
        }
        if let Some(network) = &job.network {
            let joined = job.with_deadline("init_mpi", |wait_ctx| {
                Ok((job.start_detector(&**network, wait_ctx)?, job.measure_network(&**network, wait_ctx)?))
            });
            match joined {
                Ok((detector, network_model)) => (job.detector, job.network_model) = (detector, network_model),
                Err(error) => {
                    job.leave();
                    return Err(error);
                }
            }
        }
        let arenas = job.with_deadline("init_mpi", |wait_ctx| Ok(job.make_arenas(wait_ctx)))?;
        if let Err(error @ (Error::Timeout(_) | Error::PeerLost(_) | Error::Network(_))) = arenas {
            job.leave();
            return Err(error);
        }
        job.arenas = arenas;
        Ok(job)
    }

    /// Rank 0 serves a store, unless there is one. Returns the store and its addresses. It starts now, because later on
    /// not all ranks need it at the same time; it costs a thread that sleeps, and the others connect when they need it.
    fn serve_store(&self) -> Result<Option<(Arc<dyn Store>, String)>> {
        if self.topology.rank() != 0 || self.topology.size() == 1 || self.bootstrap.store().is_some() {
            return Ok(None);
        }
        let listener =
            if self.topology.hosts() > 1 { Listener::open(&self.config.interface)? } else { Listener::loopback()? };
        let address = listener.address();
        Ok(Some((Arc::new(ServedStore::start(listener.sockets, self.topology.size(), self.key)?), address)))
    }

    /// CPUs per rank, the minimum over all hosts; and the addresses of the store that rank 0 has `served`. Fails on all
    /// ranks unless all have succeeded.
    fn agree_on_start(
        &self,
        served: &Result<Option<(Arc<dyn Store>, String)>>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<(usize, Vec<SocketAddr>)> {
        let mine = served.as_ref().map_err(Error::clone).and_then(|served| {
            let address = served.as_ref().map_or(String::new(), |(_, address)| address.clone());
            Ok((CpuBounds::of(&affinity::allowed()?.0), address))
        });
        let (bounds, addresses): (Vec<CpuBounds>, Vec<String>) =
            self.agree_or_fail("", mine, wait_ctx)?.into_iter().unzip();
        let share_on_host =
            |host: usize| affinity::share(self.topology.ranks_of(host).iter().filter_map(|&rank| bounds.get(rank)));
        let processors = (0..self.topology.hosts()).map(share_on_host).min().unwrap_or(1);
        Ok((processors, addresses[0].split(',').filter_map(|address| address.parse().ok()).collect()))
    }

    /// Creates this rank's arena and maps those of the host's other ranks. Succeeds on all ranks or on none.
    fn make_arenas(&self, wait_ctx: &WaitContext<'_>) -> Result<Arc<Arenas>> {
        let topology = &self.topology;
        let created = shm::create_sparse(&self.config.shm_dir, topology.local_size());
        let path = created.as_ref().map(|(.., name)| text_of(name.path())).map_err(Error::clone);
        let paths = self.agree_or_fail("", path, wait_ctx)?;
        let (mine, file, name) = created?;
        let me = topology.local_rank();
        let mut mine = Some(mine);
        let map = |(local, &rank): (usize, &usize)| match mine.take_if(|_| local == me) {
            Some(mine) => Ok(mine),
            None => shm::open(Path::new(&paths[rank])),
        };
        let maps: Result<Vec<_>> = topology.local_ranks().iter().enumerate().map(map).collect();
        let arenas = maps.and_then(|maps| Arenas::new(maps, me, file));
        let mapped = arenas.as_ref().map(|_| ()).map_err(Error::clone);
        self.agree_or_fail("", mapped, wait_ctx)?;
        drop::<Name>(name);
        arenas.map(Arc::new)
    }

    /// The shared memory of this host's ranks, or the reason why there is none.
    pub fn arenas(&self) -> &Result<Arc<Arenas>> {
        &self.arenas
    }

    /// Measures the clock offset, and starts the failure detector on the first rank of each host.
    fn start_detector(&self, network: &dyn Network, wait_ctx: &WaitContext<'_>) -> Result<Option<FailureDetector>> {
        let topology = &self.topology;
        let is_leader = topology.local_rank() == 0;
        let listener = if is_leader { Listener::open(&self.config.interface).map(Some) } else { Ok(None) };
        let address = listener.as_ref().map(|found| found.as_ref().map_or(String::new(), Listener::address));
        let leaders: Vec<usize> = (0..topology.hosts()).map(|host| topology.ranks_of(host)[0]).collect();
        let offset = if is_leader { network.clock_offset(&leaders, topology.host(), wait_ctx)? } else { 0 };
        let mine = address.map(|text| (offset, text)).map_err(Error::clone);
        let all = self.agree_or_fail("", mine, wait_ctx)?;
        timeline::set_offset(all[leaders[topology.host()]].0);
        let Some(listener) = listener? else { return Ok(None) };
        let host = |&leader: &usize| HostAddress {
            name: self.rank_info[leader].display_name(leader),
            addresses: all[leader].1.split(',').filter_map(|address| address.parse().ok()).collect(),
        };
        let hosts: Vec<HostAddress> = leaders.iter().map(host).collect();
        let process =
            |(local, &rank): (usize, &usize)| Some((self.names[rank].clone(), self.local_processes.process(local)?));
        let processes = topology.local_ranks().iter().enumerate().filter_map(process).collect();
        FailureDetector::start(listener, topology.host(), &hosts, self.key, processes).map(Some)
    }

    /// Measures the network between neighbouring hosts. Returns the slowest values on all ranks.
    fn measure_network(&self, network: &dyn Network, wait_ctx: &WaitContext<'_>) -> Result<NetworkModel> {
        let topology = &self.topology;
        let neighbour = topology.host() ^ 1;
        let measured = if topology.local_rank() == 0 && neighbour < topology.hosts() {
            Some(network.measure(topology.ranks_of(neighbour)[0], wait_ctx)?)
        } else {
            None
        };
        let measured = self.agree_or_fail("", Ok(measured), wait_ctx)?;
        Ok(NetworkModel::slowest(measured.into_iter().flatten()))
    }

    /// The measured network between the hosts; `None` on one host.
    pub fn network(&self) -> Option<NetworkModel> {
        (self.topology.hosts() > 1).then_some(self.network_model)
    }

    /// Host and process of every rank.
    pub fn rank_info(&self) -> &Arc<[RankInfo]> {
        &self.rank_info
    }

    /// A random number known only to the ranks of this job.
    pub fn key(&self) -> u128 {
        self.key
    }

    /// Runs `work` with the deadline of the settings. Also aborts it when a process of this host exits or the failure
    /// detector reports a lost rank. `what` names the work in messages.
    fn with_deadline<T>(&self, what: &str, work: impl FnOnce(&WaitContext<'_>) -> Result<T>) -> Result<T> {
        let seen = Cell::new(None);
        let lost = || {
            if signals::interrupted() {
                return Some(Error::PeerLost(format!("{what} was interrupted by a signal")));
            }
            let ranks = self.topology.local_ranks();
            let ended =
                |local: usize| Some(format!("{} {}", self.names[ranks[local]], self.local_processes.lost(local)?));
            let detected = || Some(self.detector.as_ref()?.lost()?.detail().to_owned());
            let description = (0..ranks.len()).find_map(ended).or_else(detected)?;
            // Messages that the process sent before it exited may still arrive.
            let since: Instant = seen.get().unwrap_or_else(Instant::now);
            seen.set(Some(since));
            (since.elapsed() > DRAIN_GRACE).then(|| Error::PeerLost(format!("{description}, in {what}")))
        };
        with_limits(what, self.config.timeout, self.config.stall_warn, &lost, work)
    }

    /// The store of all ranks, in which ranks find each other: to create groups, for example.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Whether the library of a launcher is behind the job ([`Bootstrap::uses_launcher`]).
    pub fn uses_launcher(&self) -> bool {
        self.bootstrap.uses_launcher()
    }

    /// Settings of this process.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Topology of the job.
    pub fn topology(&self) -> &Arc<Topology> {
        &self.topology
    }

    /// Creates the resources of a group: its communicator, shared memory on every host, and links between the hosts.
    /// Collective: a rank that is not `ready` takes part too, and all ranks get its error.
    ///
    /// # Errors
    /// Equal on all ranks: the settings differ, or a rank is not ready or out of memory. After a passed deadline the
    /// ranks are out of sync, and no further group can be created.
    pub fn endpoint(&self, config: &GroupConfig, ready: Result<()>) -> Result<GroupResources> {
        let what = format!("the creation of team {}", config.id);
        self.in_step(&what, |wait_ctx| self.make_endpoint(config, ready, wait_ctx))
    }

    /// Returns `outcome` if it is `Ok` on all ranks, else the same error on every rank. `what` names the step in
    /// messages. Collective.
    ///
    /// # Errors
    /// As for [`Job::endpoint`].
    pub fn confirm<T>(&self, what: &str, outcome: Result<T>) -> Result<T> {
        let mine = outcome.as_ref().map(|_| ()).map_err(Error::clone);
        self.in_step(what, |wait_ctx| self.agree_or_fail("", mine, wait_ctx))?;
        outcome
    }

    /// Runs collective `work`. Its failure may leave the ranks out of sync.
    fn in_step<T>(&self, what: &str, work: impl FnOnce(&WaitContext<'_>) -> Result<T>) -> Result<T> {
        if let Some(error) = self.poisoned.get() {
            return Err(error.clone());
        }
        let result = self.with_deadline(what, work);
        if let Err(error @ (Error::Timeout(_) | Error::PeerLost(_) | Error::Network(_))) = &result {
            let _first = self.poisoned.set(error.clone());
        }
        result
    }

    fn make_endpoint(
        &self,
        config: &GroupConfig,
        ready: Result<()>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<GroupResources> {
        let network = self.network.as_ref().map(|network| network.duplicate(wait_ctx)).transpose()?;
        if network.is_none() {
            // All ranks are here before there is a name that the kill of a rank would leave behind.
            self.agree_or_fail("", Ok(()), wait_ctx)?;
        }
        let topology = &self.topology;
        let ranks = topology.local_size();
        let layout = RegionLayout { ranks, channels: config.threads, slot: config.slot };
        let is_leader = topology.local_rank() == 0;
        let created = ready.and_then(|()| match is_leader && ranks > 1 {
            true => Segment::create(&self.config.shm_dir, layout.bytes()).map(Some),
            false => Ok(None),
        });
        let path = created.as_ref().map(|made| made.as_ref().map_or(String::new(), |(_, name)| text_of(name.path())));
        let paths = self.agree_or_fail(&config.agreement(), path.map_err(Error::clone), wait_ctx)?;

        let (memory, name) = match created? {
            Some((segment, name)) => (Ok(Box::new(segment) as Box<dyn RegionMemory>), Some(name)),
            None if ranks == 1 => (Ok(Box::new(Aligned::new(layout.bytes())) as Box<dyn RegionMemory>), None),
            None => {
                let path = &paths[topology.local_ranks()[0]];
                (Segment::open(Path::new(path)).map(|segment| Box::new(segment) as Box<dyn RegionMemory>), None)
            }
        };
        let mapped = memory.as_ref().map(|_| ()).map_err(Error::clone);
        self.agree_or_fail("", mapped, wait_ctx)?;
        drop::<Option<Name>>(name);

        let peer = |&rank: &usize| LocalPeer { rank, name: self.names[rank].clone() };
        let peers = topology.local_ranks().iter().map(peer).collect();
        let liveness = Box::new(Arc::clone(&self.local_processes));
        let shared = self.arenas.as_ref().ok().map(|arenas| Arc::clone(arenas) as Arc<dyn PeerMemory>);
        let region = ShmRegion::new(memory?, layout, topology.local_rank(), peers, liveness, spins(ranks))?
            .with_peer_memory(shared);
        let links = (0..config.threads).map(|channel| self.link(network.as_deref(), channel, config.slot)).collect();
        let region = Arc::new(region);
        if let Some(detector) = &self.detector {
            detector.watch(config.id, &region);
        }
        let oversubscribed = config.threads > self.processors;
        let (topology, names) = (Arc::clone(topology), Arc::clone(&self.names));
        Ok(GroupResources { topology, names, region, links, network: self.network_model, oversubscribed })
    }

    /// The link of this rank in `channel`, if there are several hosts and the rank owns a shard.
    fn link(&self, network: Option<&dyn Network>, channel: usize, slot: usize) -> Option<Box<dyn HostLink>> {
        let topology = &self.topology;
        let (network, shard) = (network?, topology.shard()?);
        let owners: Vec<usize> = (0..topology.hosts()).map(|host| topology.ranks_of(host)[shard]).collect();
        let capacity = exchange_buffer_bytes(slot, topology);
        Some(network.link(channel, owners, self.hosts.clone(), capacity))
    }

    /// Gathers `shape` and this rank's outcome from all ranks. Returns all outcomes if they are `Ok` and the shapes are
    /// equal.
    fn agree_or_fail<T: Serialize + DeserializeOwned>(
        &self,
        shape: &str,
        outcome: Result<T>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Vec<T>> {
        let outcome = outcome.map_err(|error| (error.code(), shortened(error.detail())));
        let records = all_records(&*self.bootstrap, &(shape, outcome), wait_ctx)?;
        let mut values = Vec::with_capacity(records.len());
        let mut shapes = Vec::with_capacity(records.len());
        for (rank, bytes) in records.iter().enumerate() {
            let (shape, outcome): (String, std::result::Result<T, (i32, String)>) = decode(bytes)?;
            match outcome {
                Ok(value) => values.push(value),
                Err((code, text)) => {
                    let rank = if records.len() > 1 { format!("{}: ", self.names[rank]) } else { String::new() };
                    return Err(Error::from_code(code, rank + &text));
                }
            }
            shapes.push(shape);
        }
        match shapes.iter().position(|shape| *shape != shapes[0]) {
            None => Ok(values),
            Some(rank) => Err(Error::Mismatch(format!("  rank 0: {}\n  rank {rank}: {}", shapes[0], shapes[rank]))),
        }
    }

    /// Ends without the other ranks, which may never come.
    pub fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
        self.bootstrap.leave();
    }

    /// Waits for all ranks, up to the deadline, if the bootstrap needs that. `failure` is that of a group.
    ///
    /// # Errors
    /// A rank was lost, or did not come before the deadline; the job is then left.
    pub fn final_barrier(&self, failure: Option<&Error>) -> Result<()> {
        if !self.bootstrap.ends_together() {
            return Ok(());
        }
        // A network may not survive messages to a host with an exited rank.
        let lost = failure.filter(|error| self.network.is_some() && matches!(error, Error::PeerLost(_)));
        let outcome = match self.poisoned.get().or(lost) {
            Some(error) => Err(error.clone()),
            None => self.with_deadline("finalize", |wait_ctx| self.bootstrap.finish(wait_ctx)),
        };
        outcome.inspect_err(|_| self.leave())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.left.load(Ordering::Relaxed) {
            self.detector.iter_mut().for_each(FailureDetector::mark_aborted);
        }
    }
}

/// Spins before sleeping; few when ranks outnumber processors.
fn spins(local_ranks: usize) -> u32 {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if local_ranks <= cores { 2000 } else { 64 }
}

fn text_of(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
