//! The job: MPI brought up or adopted, the ranks' places, and the making of teams' endpoints.

use std::cell::Cell;
use std::mem;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::{Universe, initialize_with_threading, is_finalized, threading_support};

use super::comm::Comm;
use super::launcher;
use super::link::MpiLink;
use super::places::{self, RankPlace, fields, record};
use super::probe;
use crate::affinity::{self, Bounds};
use crate::collective::Choice;
use crate::collective::device::Wanted;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::plan::mail_bytes;
use crate::say::say;
use crate::timeline;
use crate::topology::Topology;
use crate::trace::Log;
use crate::transport::alert::Alert;
use crate::transport::arena::{Arenas, Shared};
use crate::transport::hosts::{HostAddress, Listener};
use crate::transport::memory::Aligned;
use crate::transport::node::{Geometry, Memory, Node, Peer, Watch};
use crate::transport::patience::Asked;
use crate::transport::process::ProcessWatch;
use crate::transport::shm::{self, Name, Segment};
use crate::transport::{Endpoint, Link, Network, Patience};

/// How long what an ended process has sent may take to arrive.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What all ranks must agree on when a team is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TeamShape {
    /// The team's number; -1 is the control team.
    pub id: i32,
    /// Its threads, each with a channel of its own.
    pub threads: usize,
    /// 1 accumulates in float64.
    pub prec_level: u8,
    /// Bytes of a slot.
    pub slot: usize,
    /// How it averages between hosts.
    pub algorithm: Choice,
    /// The way that was asked for calls on device memory.
    pub gpu_path: Wanted,
    /// Bytes of a chunk of such calls.
    pub gpu_chunk: usize,
}

/// The processes of the job.
pub struct World {
    universe: Option<Universe>,
    /// A duplicate, so that nothing of ours meets the program's own messages. Gone first when all ends.
    comm: Option<Comm>,
    topology: Arc<Topology>,
    names: Vec<String>,
    hosts: Vec<String>,
    pids: Vec<Option<i32>>,
    places: Arc<[RankPlace]>,
    /// The other processes of this host.
    neighbours: ProcessWatch,
    /// A random number that all ranks have, and nobody else.
    key: u128,
    config: Config,
    alert: Option<Alert>,
    /// Of the hosts of the job, measured when it started; for all teams.
    network: Network,
    /// For each rank; the fewest of any host.
    processors: usize,
    /// Memory that the ranks of this host see in each other, or why there is none.
    arenas: Result<Arc<Arenas>>,
    /// What left the ranks out of step while a team was made: they cannot make another.
    broken: OnceLock<Error>,
    leaves: AtomicBool,
}

impl World {
    /// Brings MPI up, or adopts one that is up, and learns where the ranks are. Collective.
    ///
    /// # Errors
    /// When MPI is finalized already, or grants too few threads for a job on several hosts.
    pub fn start(config: &Config) -> Result<World> {
        if is_finalized() {
            return Err(Error::State("MPI is finalized already and cannot be started again in this process".into()));
        }
        let (universe, threading) = match initialize_with_threading(Threading::Multiple) {
            Some((universe, granted)) => (Some(universe), granted),
            None => (None, threading_support()),
        };
        let adopted = universe.is_none();
        let found = patiently(config, "init_mpi", &|| None, |patience| {
            let comm = Comm::world().duplicate(patience)?;
            let places = places::tell(&comm, &config.shm_dir, patience)?;
            Ok((comm, places))
        });
        let (comm, (places, key)) = match found {
            Ok(found) => found,
            Err(error) => {
                // The other ranks may never come to the end of MPI.
                mem::forget(universe);
                return Err(error);
            }
        };
        if !adopted {
            // All ranks are through with MPI's start.
            launcher::remove_segments();
        }
        let rank = comm.rank()?;
        if places.len() == 1 && !adopted {
            launcher::check_alone(|name| std::env::var(name).ok())?;
        }
        let homes: Vec<_> = places.iter().map(RankPlace::home).collect();
        let topology = Topology::new(rank, &homes);
        // Who started MPI may call it at any time, so that taking turns among our threads is not enough.
        let needed = if adopted { Threading::Multiple } else { Threading::Serialized };
        if topology.hosts() > 1 && threading < needed {
            return Err(Error::Mpi(format!(
                "MPI was started with {threading:?} threads, but a job on {} hosts needs {needed:?}; call \
                 dl_comm.init_mpi() before whoever starts MPI, or ask that one for MPI_THREAD_MULTIPLE",
                topology.hosts()
            )));
        }
        let host_name = |host: usize| {
            let ranks: Vec<String> = topology.ranks_of(host).iter().map(usize::to_string).collect();
            format!("{} (ranks {})", places[topology.ranks_of(host)[0]].host, ranks.join(", "))
        };
        let hosts = (0..topology.hosts()).map(host_name).collect();
        let names: Vec<String> =
            places.iter().enumerate().map(|(rank, place)| format!("rank {rank} on {}", place.host)).collect();
        let pids: Vec<Option<i32>> =
            places.iter().map(|place| (place.pid_space == places[rank].pid_space).then_some(place.pid)).collect();
        let others: Vec<Option<i32>> =
            topology.local_ranks().iter().map(|&other| pids[other].filter(|_| other != rank)).collect();
        let mut world = World {
            universe,
            comm: Some(comm),
            topology: Arc::new(topology),
            names,
            hosts,
            pids,
            places: places.into(),
            neighbours: ProcessWatch::new(&others),
            key,
            config: config.clone(),
            alert: None,
            network: Network::UNKNOWN,
            processors: 1,
            arenas: Err(Error::State("there is no shared memory yet".into())),
            broken: OnceLock::new(),
            leaves: AtomicBool::new(false),
        };
        if world.topology.hosts() > 1 {
            let joined = world
                .patiently("init_mpi", |patience| Ok((world.join_hosts(patience)?, world.measure_network(patience)?)));
            match joined {
                Ok((alert, network)) => (world.alert, world.network) = (alert, network),
                Err(error) => {
                    world.leave();
                    return Err(error);
                }
            }
        }
        let counted = world.patiently("init_mpi", |patience| world.count_processors(patience));
        world.processors = counted.inspect_err(|_| world.leave())?;
        let arenas = world.patiently("init_mpi", |patience| Ok(world.make_arenas(patience)))?;
        if let Err(error @ (Error::Timeout(_) | Error::PeerLost(_) | Error::Mpi(_))) = arenas {
            world.leave();
            return Err(error);
        }
        world.arenas = arenas;
        Ok(world)
    }

    /// The processors for each rank; the fewest of any host.
    fn count_processors(&self, patience: &Patience<'_>) -> Result<usize> {
        let own = self.comm.as_ref().ok_or_else(|| Error::Internal("MPI is gone".into()))?;
        let mine = affinity::allowed().map(|(allowed, _)| Bounds::of(&allowed).encode());
        let told = self.agree(own, "", mine, patience)?;
        let bounds: Vec<Bounds> = told.iter().filter_map(|text| Bounds::decode(text)).collect();
        let of_host =
            |host: usize| affinity::share(self.topology.ranks_of(host).iter().filter_map(|&rank| bounds.get(rank)));
        Ok((0..self.topology.hosts()).map(of_host).min().unwrap_or(1))
    }

    /// Makes this rank's arena and maps those of the host's other ranks; the outcome is good on all ranks or on none.
    fn make_arenas(&self, patience: &Patience<'_>) -> Result<Arc<Arenas>> {
        let own = self.comm.as_ref().ok_or_else(|| Error::Internal("MPI is gone".into()))?;
        let topology = &self.topology;
        let created = shm::create_sparse(&self.config.shm_dir, topology.local_size());
        let path = created.as_ref().map(|(.., name)| text_of(name.path())).map_err(Error::clone);
        let told = self.agree(own, "", path, patience)?;
        let (mine, file, name) = created?;
        let me = topology.local_rank();
        let mut mine = Some(mine);
        let map = |(local, &rank): (usize, &usize)| match mine.take_if(|_| local == me) {
            Some(mine) => Ok(mine),
            None => shm::open(Path::new(&told[rank])),
        };
        let maps: Result<Vec<_>> = topology.local_ranks().iter().enumerate().map(map).collect();
        let mapped = maps.as_ref().map(|_| String::new()).map_err(Error::clone);
        self.agree(own, "", mapped, patience)?;
        drop::<Name>(name);
        Ok(Arc::new(Arenas::new(maps?, me, file)))
    }

    /// Memory that the ranks of this host see in each other, or why there is none.
    pub fn arenas(&self) -> &Result<Arc<Arenas>> {
        &self.arenas
    }

    /// Measures this host's clock, and starts the alert between hosts on the first rank of each.
    fn join_hosts(&self, patience: &Patience<'_>) -> Result<Option<Alert>> {
        let own = self.comm.as_ref().ok_or_else(|| Error::Internal("MPI is gone".into()))?;
        let topology = &self.topology;
        let leads = topology.local_rank() == 0;
        let listener = if leads { Listener::open(&self.config.network).map(Some) } else { Ok(None) };
        let address = listener.as_ref().map(|found| found.as_ref().map_or(String::new(), Listener::address));
        let leaders: Vec<usize> = (0..topology.hosts()).map(|host| topology.ranks_of(host)[0]).collect();
        let offset = if leads { places::clock_offset(own, &leaders, topology.host(), patience)? } else { 0 };
        let told =
            self.agree(own, "", address.map(|text| format!("{offset} {text}")).map_err(Error::clone), patience)?;
        let parts = |rank: usize| told[rank].split_once(' ').unwrap_or(("0", ""));
        timeline::set_offset(parts(leaders[topology.host()]).0.parse().unwrap_or(0));
        let Some(listener) = listener? else { return Ok(None) };
        let host = |&leader: &usize| HostAddress {
            name: self.places[leader].title(leader),
            addresses: parts(leader).1.split(',').filter_map(|address| address.parse().ok()).collect(),
        };
        let hosts: Vec<HostAddress> = leaders.iter().map(host).collect();
        let others = topology.local_ranks().iter().filter(|&&rank| rank != topology.rank());
        let pids = others.filter_map(|&rank| Some((self.names[rank].clone(), self.pids[rank]?))).collect();
        Alert::start(listener, topology.host(), &hosts, self.key, pids).map(Some)
    }

    /// Measures the network between neighbouring hosts; the slowest figures, on all ranks.
    fn measure_network(&self, patience: &Patience<'_>) -> Result<Network> {
        let own = self.comm.as_ref().ok_or_else(|| Error::Internal("MPI is gone".into()))?;
        let topology = &self.topology;
        let neighbour = topology.host() ^ 1;
        let measured = if topology.local_rank() == 0 && neighbour < topology.hosts() {
            Some(probe::measure(own, topology.ranks_of(neighbour)[0], patience)?)
        } else {
            None
        };
        let told = self.agree(own, "", Ok(measured.map_or(String::new(), |network| network.encode())), patience)?;
        Ok(Network::slowest(told.iter().filter_map(|text| Network::decode(text))))
    }

    /// What the network between the hosts was measured to be; none on one host.
    pub fn network(&self) -> Option<Network> {
        (self.topology.hosts() > 1).then_some(self.network)
    }

    /// Every rank's place, by rank.
    pub fn places(&self) -> &Arc<[RankPlace]> {
        &self.places
    }

    /// A random number that all ranks of the job have, and nobody else.
    pub fn key(&self) -> u128 {
        self.key
    }

    /// Runs `work` with the patience that the settings give it, or until a process of this host, or one of which the alert
    /// has told, has ended; `what` names it in messages.
    fn patiently<T>(&self, what: &str, work: impl FnOnce(&Patience<'_>) -> Result<T>) -> Result<T> {
        let seen = Cell::new(None);
        let lost = || {
            let ranks = self.topology.local_ranks();
            let ended = |local: usize| Some(format!("{} {}", self.names[ranks[local]], self.neighbours.lost(local)?));
            let elsewhere = || Some(self.alert.as_ref()?.lost()?.detail().to_owned());
            let words = (0..ranks.len()).find_map(ended).or_else(elsewhere)?;
            // What it did just before may still be on its way.
            let since: Instant = seen.get().unwrap_or_else(Instant::now);
            seen.set(Some(since));
            (since.elapsed() > LAST_WORDS).then(|| Error::PeerLost(format!("{words}, in {what}")))
        };
        patiently(&self.config, what, &lost, work)
    }

    /// Where the ranks are.
    pub fn topology(&self) -> &Arc<Topology> {
        &self.topology
    }

    /// Makes what one team needs: a communicator of its own, shared memory on every host, links between the hosts.
    /// Collective.
    ///
    /// # Errors
    /// The same on every rank: when the ranks disagree on the shape, or one of them cannot get its memory. A passed deadline
    /// leaves the ranks out of step: then no further team can be made.
    pub fn endpoint(&self, shape: TeamShape) -> Result<Endpoint> {
        if let Some(error) = self.broken.get() {
            return Err(error.clone());
        }
        let made = self
            .patiently(&format!("the creation of team {}", shape.id), |patience| self.make_endpoint(shape, patience));
        if let Err(error @ (Error::Timeout(_) | Error::PeerLost(_) | Error::Mpi(_))) = &made {
            let _first = self.broken.set(error.clone());
        }
        made
    }

    fn make_endpoint(&self, shape: TeamShape, patience: &Patience<'_>) -> Result<Endpoint> {
        let own = self.comm.as_ref().ok_or_else(|| Error::Internal("MPI is gone".into()))?;
        let comm = Arc::new(own.duplicate(patience)?);
        let topology = &self.topology;
        let ranks = topology.local_size();
        let geometry = Geometry { ranks, channels: shape.threads, slot: shape.slot };
        let leads = topology.local_rank() == 0;
        let created = if leads && ranks > 1 {
            Segment::create(&self.config.shm_dir, geometry.bytes()).map(Some)
        } else {
            Ok(None)
        };
        let path = created.as_ref().map(|made| made.as_ref().map_or(String::new(), |(_, name)| text_of(name.path())));
        let told = self.agree(&comm, &format!("{shape:?}"), path.map_err(Error::clone), patience)?;

        let (memory, name) = match created? {
            Some((segment, name)) => (Ok(Box::new(segment) as Box<dyn Memory>), Some(name)),
            None if ranks == 1 => (Ok(Box::new(Aligned::new(geometry.bytes())) as Box<dyn Memory>), None),
            None => {
                let path = &told[topology.local_ranks()[0]];
                (Segment::open(Path::new(path)).map(|segment| Box::new(segment) as Box<dyn Memory>), None)
            }
        };
        let mapped = memory.as_ref().map(|_| String::new()).map_err(Error::clone);
        self.agree(&comm, "", mapped, patience)?;
        drop::<Option<Name>>(name);

        let peer = |&rank: &usize| Peer { rank, name: self.names[rank].clone() };
        let peers = topology.local_ranks().iter().map(peer).collect();
        let pids: Vec<Option<i32>> = topology.local_ranks().iter().map(|&rank| self.pids[rank]).collect();
        let watch = Box::new(ProcessWatch::new(&pids));
        let shared = self.arenas.as_ref().ok().map(|arenas| Arc::clone(arenas) as Arc<dyn Shared>);
        let node = Node::new(memory?, geometry, topology.local_rank(), peers, watch, spins(ranks))?.sharing(shared);
        let links = (0..shape.threads).map(|channel| self.link(&comm, channel, shape.slot)).collect();
        let node = Arc::new(node);
        if let Some(alert) = &self.alert {
            alert.watch(shape.id, &node);
        }
        let crowded = shape.threads > self.processors;
        Ok(Endpoint { topology: Arc::clone(topology), node, links, network: self.network, crowded })
    }

    /// The link of this rank's lane in `channel`, if there are other hosts and it drives one.
    fn link(&self, comm: &Arc<Comm>, channel: usize, slot: usize) -> Option<Box<dyn Link>> {
        let topology = &self.topology;
        let lane = topology.lane().filter(|_| topology.hosts() > 1)?;
        let drivers: Vec<usize> = (0..topology.hosts()).map(|host| topology.ranks_of(host)[lane]).collect();
        let capacity = mail_bytes(slot, topology.lanes(), topology.hosts());
        Some(Box::new(MpiLink::new(Arc::clone(comm), channel, drivers, self.hosts.clone(), capacity)))
    }

    /// Tells all ranks `shape` and this rank's outcome; returns all outcomes when they are good and the shapes equal.
    fn agree(&self, comm: &Comm, shape: &str, outcome: Result<String>, patience: &Patience<'_>) -> Result<Vec<String>> {
        let (code, text) = match &outcome {
            Ok(text) => (0, text.clone()),
            Err(error) => (error.code(), error.detail().to_owned()),
        };
        let records = comm.allgather(&record(&[shape, &code.to_string(), &text]), patience)?;
        let mut texts = Vec::with_capacity(records.len());
        let mut shapes = Vec::with_capacity(records.len());
        for (rank, bytes) in records.iter().enumerate() {
            let [shape, code, text] = fields(bytes);
            let code = code.parse().unwrap_or(-9);
            if code != 0 {
                return Err(Error::from_code(code, format!("{}: {text}", self.names[rank])));
            }
            shapes.push(shape);
            texts.push(text);
        }
        match shapes.iter().position(|shape| *shape != shapes[0]) {
            None => Ok(texts),
            Some(rank) => Err(Error::Mismatch(format!("  rank 0: {}\n  rank {rank}: {}", shapes[0], shapes[rank]))),
        }
    }

    /// Lets the end of this world leave MPI as it is, because other ranks may never come to its end.
    pub fn leave(&self) {
        self.leaves.store(true, Ordering::Relaxed);
    }

    /// Waits, up to the deadline, until all ranks are here.
    fn meet(&self) -> Result<()> {
        let Some(comm) = &self.comm else { return Ok(()) };
        self.patiently("finalize", |patience| comm.barrier(patience))
    }
}

/// Ends MPI if this world started it, once all ranks are here.
impl Drop for World {
    fn drop(&mut self) {
        let mut leaves = self.leaves.load(Ordering::Relaxed) || self.broken.get().is_some();
        if self.universe.is_some() && !leaves {
            // MPI_Finalize itself has no deadline.
            if let Err(error) = self.meet() {
                say(&error.to_string());
                leaves = true;
            }
        }
        if leaves {
            mem::forget(self.universe.take());
            mem::forget(self.comm.take());
            self.alert.iter_mut().for_each(Alert::leave);
        }
        drop(self.comm.take());
    }
}

/// Runs `work` with the patience that the settings give it; `what` names it in messages.
fn patiently<T>(
    config: &Config,
    what: &str,
    interrupted: &dyn Fn() -> Option<Error>,
    work: impl FnOnce(&Patience<'_>) -> Result<T>,
) -> Result<T> {
    let asked = Asked { describe: &|| what.to_owned(), interrupted, stalled: &say };
    let (warned, log) = (AtomicBool::new(false), Log::default());
    work(&Patience::new(Instant::now(), config.timeout, config.stall_warn, &warned, &log, &asked))
}

/// How long waits look before they sleep: not at all worth it when ranks outnumber the processors.
fn spins(local_ranks: usize) -> u32 {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if local_ranks <= cores { 2000 } else { 64 }
}

fn text_of(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
