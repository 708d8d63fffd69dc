//! The job: MPI brought up or adopted, the ranks' places, and the making of teams' endpoints.

use std::fs;
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use mpi::Threading;
use mpi::environment::{Universe, initialize_with_threading, is_finalized, threading_support};

use super::comm::Comm;
use super::link::MpiLink;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::plan::message_bytes;
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
    comm: Comm,
    topology: Arc<Topology>,
    names: Vec<String>,
    pids: Vec<Option<i32>>,
    threading: Threading,
    config: Config,
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
        let comm = Comm::world();
        let rank = comm.rank()?;
        let places = places(&comm, config)?;
        let keys: Vec<&str> = places.iter().map(|place| place.key.as_str()).collect();
        let topology = Topology::new(rank, &keys);
        if topology.hosts() > 1 && threading < Threading::Serialized {
            return Err(Error::Mpi(format!(
                "MPI was started with {threading:?} threads, but a job on {} hosts needs Serialized at least; call \
                 dl_comm.init_mpi() before whoever starts MPI, or ask that one for MPI_THREAD_MULTIPLE",
                topology.hosts()
            )));
        }
        let names = places.iter().enumerate().map(|(rank, place)| format!("rank {rank} on {}", place.host)).collect();
        let pids =
            places.iter().map(|place| (place.pid_space == places[rank].pid_space).then_some(place.pid)).collect();
        Ok(World { universe, comm, topology: Arc::new(topology), names, pids, threading, config: config.clone() })
    }

    /// Where the ranks are.
    pub fn topology(&self) -> &Arc<Topology> {
        &self.topology
    }

    /// The level of thread support that MPI granted.
    pub fn threading(&self) -> Threading {
        self.threading
    }

    /// Makes what one team needs: a communicator of its own, shared memory on every host, links between the hosts.
    /// Collective.
    ///
    /// # Errors
    /// The same on every rank: when the ranks disagree on the shape, or one of them cannot get its memory.
    pub fn endpoint(&self, shape: TeamShape) -> Result<Endpoint> {
        let describe = || format!("the creation of team {}", shape.id);
        let interrupted = || None;
        let timeout = self.config.timeout;
        let patience = Patience::new(Instant::now(), timeout, self.config.stall_warn, &describe, &interrupted);
        let comm = Arc::new(self.comm.duplicate(&patience)?);

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
        let told = self.agree(&comm, &format!("{shape:?}"), path.map_err(Error::clone), &patience)?;

        let (memory, name) = match created? {
            Some((segment, name)) => (Ok(Box::new(segment) as Box<dyn Memory>), Some(name)),
            None if ranks == 1 => (Ok(Box::new(Aligned::new(geometry.bytes())) as Box<dyn Memory>), None),
            None => {
                let path = &told[topology.local_ranks()[0]];
                (Segment::open(Path::new(path)).map(|segment| Box::new(segment) as Box<dyn Memory>), None)
            }
        };
        let mapped = memory.as_ref().map(|_| String::new()).map_err(Error::clone);
        self.agree(&comm, "", mapped, &patience)?;
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
        let others = drivers.iter().enumerate().filter(|(host, _)| *host != topology.host());
        let late = others.map(|(_, &rank)| self.names[rank].as_str()).collect::<Vec<_>>().join(" or ");
        let capacity = message_bytes(slot, topology.lanes(), topology.hosts());
        Some(Box::new(MpiLink::new(Arc::clone(comm), channel, topology.host(), drivers, late, capacity)))
    }

    /// Tells all ranks `shape` and this rank's outcome; returns all outcomes when they are good and the shapes equal.
    fn agree(&self, comm: &Comm, shape: &str, outcome: Result<String>, patience: &Patience<'_>) -> Result<Vec<String>> {
        let (code, text) = match &outcome {
            Ok(text) => (0, text.clone()),
            Err(error) => (error.code(), error.to_string()),
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

    /// Ends MPI if this world started it. Collective, unless `abandon`, which leaves MPI as it is.
    pub fn finish(self, abandon: bool) {
        let World { universe, comm, .. } = self;
        drop(comm);
        if abandon {
            mem::forget(universe);
        }
    }
}

/// Where a rank lives.
struct Place {
    host: String,
    key: String,
    pid: i32,
    pid_space: String,
}

/// Every rank's place. Two ranks are on one host when host name, boot and the file system behind the segments are the same.
fn places(comm: &Comm, config: &Config) -> Result<Vec<Place>> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let device = fs::metadata(&config.shm_dir).map(|folder| folder.dev()).unwrap_or_default();
    let pid_space = fs::read_link("/proc/self/ns/pid").map(|link| text_of(&link)).unwrap_or_default();
    let key = format!("{} {device}", boot.trim());
    let pid = std::process::id().to_string();

    let describe = || "dl_comm.init_mpi".to_owned();
    let interrupted = || None;
    let patience = Patience::new(Instant::now(), config.timeout, config.stall_warn, &describe, &interrupted);
    let records = comm.allgather(&record(&[&host, &key, &pid, &pid_space]), &patience)?;
    let place = |bytes: &Vec<u8>| {
        let [host, key, pid, pid_space] = fields(bytes);
        Place { key: format!("{host} {key}"), host, pid: pid.parse().unwrap_or(0), pid_space }
    };
    Ok(records.iter().map(place).collect())
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
