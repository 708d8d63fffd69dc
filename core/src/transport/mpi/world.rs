//! The job: MPI brought up or adopted, the ranks' places, and the making of teams' endpoints.

use std::fs;
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Instant;

use mpi::Threading;
use mpi::environment::{Universe, initialize_with_threading, is_finalized, threading_support};

use super::comm::Comm;
use super::launcher;
use super::link::MpiLink;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::plan::message_bytes;
use crate::say::say;
use crate::topology::Topology;
use crate::transport::memory::Aligned;
use crate::transport::node::{Geometry, Memory, Node};
use crate::transport::shm::{Name, ProcessWatch, Segment};
use crate::transport::{Endpoint, Link, Patience};

/// The bytes of the records that ranks tell each other at start; longer texts are cut.
const RECORD: usize = 512;

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
    config: Config,
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
        let (comm, places) = match places(config) {
            Ok(found) => found,
            Err(error) => {
                // The other ranks may never come to the end of MPI.
                mem::forget(universe);
                return Err(error);
            }
        };
        let rank = comm.rank()?;
        if places.len() == 1 && !adopted {
            launcher::check_alone(|name| std::env::var(name).ok())?;
        }
        let keys: Vec<&str> = places.iter().map(|place| place.key.as_str()).collect();
        let topology = Topology::new(rank, &keys);
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
        let names = places.iter().enumerate().map(|(rank, place)| format!("rank {rank} on {}", place.host)).collect();
        let pids =
            places.iter().map(|place| (place.pid_space == places[rank].pid_space).then_some(place.pid)).collect();
        Ok(World {
            universe,
            comm: Some(comm),
            topology: Arc::new(topology),
            names,
            hosts,
            pids,
            config: config.clone(),
            broken: OnceLock::new(),
            leaves: AtomicBool::new(false),
        })
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
        let made = patiently(&self.config, &format!("the creation of team {}", shape.id), |patience| {
            self.make_endpoint(shape, patience)
        });
        if let Err(error @ (Error::Timeout(_) | Error::Mpi(_))) = &made {
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

        let names = topology.local_ranks().iter().map(|&rank| self.names[rank].clone()).collect();
        let pids: Vec<Option<i32>> = topology.local_ranks().iter().map(|&rank| self.pids[rank]).collect();
        let watch = Box::new(ProcessWatch::new(&pids));
        let node = Node::new(memory?, geometry, topology.local_rank(), names, watch, spins(ranks))?;
        let links = (0..shape.threads).map(|channel| self.link(&comm, channel, shape.slot)).collect();
        Ok(Endpoint { topology: Arc::clone(topology), node: Arc::new(node), links })
    }

    /// The link of this rank's lane in `channel`, if there are other hosts and it drives one.
    fn link(&self, comm: &Arc<Comm>, channel: usize, slot: usize) -> Option<Box<dyn Link>> {
        let topology = &self.topology;
        let lane = topology.lane().filter(|_| topology.hosts() > 1)?;
        let drivers: Vec<usize> = (0..topology.hosts()).map(|host| topology.ranks_of(host)[lane]).collect();
        let others = self.hosts.iter().enumerate().filter(|(host, _)| *host != topology.host());
        let late = others.map(|(_, name)| name.as_str()).collect::<Vec<_>>().join(" or ");
        let capacity = message_bytes(slot, topology.lanes(), topology.hosts());
        Some(Box::new(MpiLink::new(Arc::clone(comm), channel, topology.host(), drivers, late, capacity)))
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
        patiently(&self.config, "finalize", |patience| comm.barrier(patience))
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
            launcher::remove_segments();
        }
        drop(self.comm.take());
    }
}

/// Runs `work` with the patience that the settings give it; `what` names it in messages.
fn patiently<T>(config: &Config, what: &str, work: impl FnOnce(&Patience<'_>) -> Result<T>) -> Result<T> {
    let describe = || what.to_owned();
    let interrupted = || None;
    let warned = AtomicBool::new(false);
    work(&Patience::new(Instant::now(), config.timeout, config.stall_warn, &warned, &describe, &interrupted))
}

/// Where a rank lives.
struct Place {
    host: String,
    key: String,
    pid: i32,
    pid_space: String,
}

/// A communicator of our own, and every rank's place. Two ranks are on one host when host name, boot and the file system
/// behind the segments are the same.
fn places(config: &Config) -> Result<(Comm, Vec<Place>)> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let device = fs::metadata(&config.shm_dir).map(|folder| folder.dev()).unwrap_or_default();
    let pid_space = fs::read_link("/proc/self/ns/pid").map(|link| text_of(&link)).unwrap_or_default();
    let key = format!("{} {device}", boot.trim());
    let pid = std::process::id().to_string();
    let (comm, records) = patiently(config, "init_mpi", |patience| {
        let comm = Comm::world().duplicate(patience)?;
        let records = comm.allgather(&record(&[&host, &key, &pid, &pid_space]), patience)?;
        Ok((comm, records))
    })?;
    let place = |bytes: &Vec<u8>| {
        let [host, key, pid, pid_space] = fields(bytes);
        Place { key: format!("{host} {key}"), host, pid: pid.parse().unwrap_or(0), pid_space }
    };
    Ok((comm, records.iter().map(place).collect()))
}

/// How long waits look before they sleep: not at all worth it when ranks outnumber the processors.
fn spins(local_ranks: usize) -> u32 {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if local_ranks <= cores { 2000 } else { 64 }
}

fn text_of(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// `fields`, a NUL after each, cut and padded to [`RECORD`] bytes.
fn record(fields: &[&str]) -> Vec<u8> {
    let mut bytes = fields.join("\0").into_bytes();
    bytes.resize(RECORD, 0);
    bytes
}

/// The first N fields of a record.
fn fields<const N: usize>(record: &[u8]) -> [String; N] {
    let mut parts = record.split(|&byte| byte == 0).map(|part| String::from_utf8_lossy(part).into_owned());
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_go_there_and_back() {
        let bytes = record(&["host", "", "x y"]);
        assert_eq!(bytes.len(), RECORD);
        assert_eq!(fields::<3>(&bytes), ["host", "", "x y"]);
        let long = "l".repeat(2 * RECORD);
        assert_eq!(fields::<2>(&record(&["a", &long]))[1].len(), RECORD - 2);
    }
}
