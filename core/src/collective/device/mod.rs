//! Calls on device memory: the same team, the same matching, other ways for the data.
//!
//! A call begins as every other does, with a step in which the ranks see each other's signatures; nothing of its data is in
//! it. Then it takes the team's path ([`path`]), on which the ranks agree at the first such call:
//! - each rank its own GPU and NCCL there: NCCL ([`ring`]);
//! - the ranks of one host, by memory that they see in each other ([`direct`]);
//! - the ranks of several hosts the same way within a host, and in slices through host memory between hosts ([`across`]);
//! - else through host memory, in chunks, by the averages of the host ([`staged`]).
//!
//! Where nothing goes through the host, it enqueues and does not wait: a call ends for its caller when the caller's stream will
//! see the result. [`across`] and [`staged`] wait for the GPU to come to each chunk.
//! Thread rule: [`Gpus`] is the lead's; a [`Stager`] is one thread's.

mod across;
mod batch;
mod direct;
mod neighbours;
mod notes;
mod path;
mod peers;
mod ring;
mod staged;

pub use path::{Path, Wait, Wanted};
pub use staged::Stager;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::rounds::{self, Told};
use super::{Channel, Job, Op};
use crate::error::{Error, Result};
use crate::topology::Topology;
use crate::transport::Patience;
use crate::transport::cuda::{Address, Context, Event, Producer, Stream, nccl_version};
use across::{Across, Driver};
use direct::Direct;
use neighbours::Neighbours;
use path::Facts;
use ring::Ring;

/// How calls on device memory are carried, as the environment says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSettings {
    /// `DL_COMM_GPU_PATH`.
    pub path: Wanted,
    /// `DL_COMM_PIPELINE_CHUNK_KB`, in bytes: the most that goes between host and GPU at a time. For a team a multiple of
    /// [`crate::plan::ALIGN`], and, where it has several hosts, no more than a slot has.
    pub chunk: usize,
    /// `DL_COMM_NUM_CUDA_STREAMS`: a thread's streams for each direction.
    pub streams: usize,
}

impl Default for DeviceSettings {
    fn default() -> DeviceSettings {
        DeviceSettings { path: Wanted::Auto, chunk: 2 << 20, streams: 1 }
    }
}

/// What a team has for calls on device memory, once it has had one.
pub struct Gpus {
    context: Arc<Context>,
    path: Path,
    why: String,
    way: Way,
}

enum Way {
    Alone(Stream),
    Ring(Box<Ring>),
    Direct(Box<Direct>),
    Across(Box<Across>),
    Staged,
}

/// What came of a call.
pub enum Carried {
    /// It is enqueued; all is done when the event comes.
    Enqueued(Event),
    /// It has to go through host memory, on all ranks.
    ThroughHost,
}

impl Gpus {
    /// Finds the path of a team with the other ranks, all of which have made `job`.
    ///
    /// # Errors
    /// [`Error::System`], the same on all ranks, when one of them cannot use its GPU, or not in the way that was asked for;
    /// those of the transports.
    pub fn new(channel: &mut Channel, job: &Job, settings: DeviceSettings, patience: &Patience<'_>) -> Result<Gpus> {
        let context = Arc::clone(producer(job)?.context());
        let mut facts = Facts::gather(&context);
        let topology = Arc::clone(&channel.topology);
        let (decision, made) = loop {
            let decide = |told: &Told| path::decide(told, settings.path, &topology).encode();
            let text = rounds::round(channel, &facts.encode(), patience, decide)?;
            let decision = path::Decision::decode(&text)?;
            let made = match decision.path {
                Path::Alone => Ok(Way::Alone(Stream::new(&context)?)),
                Path::Staged => Ok(Way::Staged),
                Path::Nccl => match Ring::new(channel, &context, patience)? {
                    Ok(ring) => Ok(Way::Ring(Box::new(ring))),
                    Err(why) => {
                        // On one rank at least. Without NCCL there is another path, or a refusal.
                        if let Some(why) = why {
                            facts.lacks_nccl(&why);
                        }
                        continue;
                    }
                },
                Path::Ipc(wait) => Neighbours::new(channel, &context, wait, direct::BOUNCE, Ok(()), patience)?
                    .map(|(near, ())| Way::Direct(Box::new(Direct::new(near, decision.own_gpus)))),
                Path::Across(wait) => {
                    let driver = Driver::new(&context, &topology, settings.chunk);
                    let bounce = (across::PLACES * settings.chunk).max(direct::BOUNCE);
                    Neighbours::new(channel, &context, wait, bounce, driver, patience)?
                        .map(|(near, driver)| Way::Across(Box::new(Across::new(near, driver, settings.chunk))))
                }
            };
            break (decision, made);
        };
        let (path, why, way) = match made {
            Ok(Way::Direct(direct)) => (Path::Ipc(direct.wait()), decision.why, Way::Direct(direct)),
            Ok(Way::Across(across)) => (Path::Across(across.wait()), decision.why, Way::Across(across)),
            Ok(way) => (decision.path, decision.why, way),
            // All ranks know of it.
            Err(why) if settings.path == Wanted::Auto => (Path::Staged, why, Way::Staged),
            Err(why) => return Err(Error::Invalid(format!("DL_COMM_GPU_PATH is ipc, but {why}"))),
        };
        Ok(Gpus { context, path, why, way })
    }

    /// What `dl_comm_describe` tells of it.
    pub fn about(&self) -> Value {
        let wait = self.path.wait().map(|wait| match wait {
            Wait::Stream => "stream",
            Wait::Host => "host",
        });
        json!({
            "path": self.path.name(),
            "why": self.why,
            "wait": wait,
            "gpu": self.context.ordinal(),
            "gpu_name": self.context.name(),
            "gpu_uuid": self.context.uuid(),
            "mps": mps(),
            "nccl": nccl_version().ok().filter(|_| self.path == Path::Nccl),
        })
    }

    /// The bytes of device memory that it has taken.
    pub fn held(&self) -> usize {
        match &self.way {
            Way::Direct(direct) => direct.held(),
            Way::Across(across) => across.held(),
            Way::Ring(ring) => ring.held(),
            Way::Alone(_) | Way::Staged => 0,
        }
    }

    /// How many calls went in chunks where the ranks see each other's memory, because that of one of them could not be opened.
    pub fn in_chunks(&self) -> usize {
        match &self.way {
            Way::Direct(direct) => direct.in_chunks(),
            Way::Across(_) | Way::Ring(_) | Way::Alone(_) | Way::Staged => 0,
        }
    }

    /// Carries out `job`, on which the ranks agree, as far as this thread can alone.
    ///
    /// # Errors
    /// Those of the driver and of the transports: the ranks are then out of step.
    pub fn carry(&mut self, channel: &mut Channel, job: &Job, patience: &Patience<'_>) -> Result<Carried> {
        let _entered = self.context.enter()?;
        match &mut self.way {
            Way::Alone(stream) => alone(job, stream).map(Carried::Enqueued),
            Way::Ring(ring) => ring.carry(job, patience),
            Way::Direct(direct) => direct.carry(channel, job, patience),
            Way::Across(across) => across.carry(channel, job, patience),
            Way::Staged => Ok(Carried::ThroughHost),
        }
    }

    /// The end of what this thread has enqueued so far, for which what waits for the tensors of `job` then waits; `None` where
    /// the GPU does not tell any more, and when other threads carry such calls.
    pub fn end(&self, job: &Job) -> Option<Event> {
        let stream = match &self.way {
            Way::Alone(stream) => stream,
            Way::Ring(ring) => ring.stream(),
            Way::Direct(direct) => direct.stream(),
            Way::Across(across) => across.stream(),
            Way::Staged => return None,
        };
        let _entered = self.context.enter().ok()?;
        end(job, stream).ok()
    }

    /// What lets the GPU of this rank go on after a failure of another: a closure for the thread that watches over calls.
    pub fn rescue(&self) -> Arc<dyn Fn() + Send + Sync> {
        match &self.way {
            Way::Ring(ring) => ring.rescue(),
            Way::Direct(direct) => direct.rescue(),
            Way::Across(across) => across.rescue(),
            Way::Alone(_) | Way::Staged => Arc::new(|| {}),
        }
    }
}

/// Whether NVIDIA's Multi-Process Service runs, under which the kernels of ranks that share a GPU run side by side instead of by
/// turns. The ways are the same: no kernel waits for another process.
fn mps() -> bool {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into());
    std::path::Path::new(&folder).join("control").exists()
}

/// The average over one rank.
fn alone(job: &Job, stream: &Stream) -> Result<Event> {
    begin(job, stream)?;
    for tensor in job.tensors(0).iter().filter(|tensor| !tensor.buffer.is_in_place()) {
        let (read, written) = tensor.buffer.spans();
        // SAFETY: the memory is the call's.
        unsafe { stream.copy(written.start as Address, read.start as Address, read.len()) }?;
    }
    end(job, stream)
}

/// Who makes and awaits the tensors of `job`, which is on device memory.
fn producer(job: &Job) -> Result<&Arc<Producer>> {
    job.producer().ok_or_else(|| Error::Internal("a call on host memory has no GPU".into()))
}

/// Lets `stream` wait for what the call's tensors wait for.
fn begin(job: &Job, stream: &Stream) -> Result<()> {
    stream.wait(producer(job)?.ready())
}

/// Lets what waits for the call's tensors wait for what `stream` has been given.
fn end(job: &Job, stream: &Stream) -> Result<Event> {
    let end = stream.record()?;
    producer(job)?.resume_after(&end)?;
    Ok(end)
}

/// The local rank on this host that a broadcast is from.
fn root(job: &Job, topology: &Topology) -> Option<usize> {
    match job.op {
        Op::Broadcast { root } => {
            topology.place(root).filter(|(host, _)| *host == topology.host()).map(|(_, local)| local)
        }
        Op::Average | Op::Barrier => None,
    }
}

/// How long it looks at the GPU, and lets other threads run between two looks, before it sleeps: a sleep takes some 70 us at
/// least, which is as long as a short call.
const AWAKE: Duration = Duration::from_micros(300);
/// The longest sleep between two looks.
const NAP: Duration = Duration::from_millis(1);

/// Waits on the host until `event` has come.
///
/// # Errors
/// Those of the driver, and when the patience ends.
pub(super) fn await_event(event: &Event, patience: &Patience<'_>) -> Result<()> {
    poll(|| event.has_come(), &|| "the GPU".to_owned(), patience)
}

/// Waits until `done` says so, for `whom`.
fn poll(done: impl Fn() -> Result<bool>, whom: &dyn Fn() -> String, patience: &Patience<'_>) -> Result<()> {
    let mut nap = Duration::from_micros(20);
    let since = Instant::now();
    let mut asked = since;
    while !done()? {
        if since.elapsed() < AWAKE {
            std::thread::yield_now();
            continue;
        }
        std::thread::sleep(nap);
        nap = (nap * 2).min(NAP);
        if asked.elapsed() > NAP {
            patience.check(Duration::ZERO, whom)?;
            asked = Instant::now();
        }
    }
    Ok(())
}

/// How long the end of a team, or of a call that has failed, waits for what its GPU is at.
pub(crate) const LAST: Duration = Duration::from_secs(5);

/// Whether `done` says so within `time`.
fn within(time: Duration, done: impl Fn() -> bool) -> bool {
    let since = Instant::now();
    while !done() {
        if since.elapsed() > time {
            return false;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    true
}

/// Whether `stream` has done all that it was given, or does so soon.
fn has_ended(stream: &Stream) -> bool {
    stream.record().is_ok_and(|event| within(LAST, || event.has_come().unwrap_or(true)))
}
