//! One channel of a team: carries chunks of calls through the steps of the node and the exchanges between hosts.
//!
//! Every chunk, of whatever collective, begins with the same step, so that ranks that called different things still meet, see
//! each other's signatures, and can say so.
//! Thread rule: used by one thread.

use std::collections::BTreeMap;
use std::mem;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use super::cluster::{Cluster, Flight, Slice};
use super::lineup::{self, Decision, List};
use super::rounds::{self, Told};
use super::{Account, Job, Lane, direct, explain};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::plan::slice;
use crate::stream_copy::stream_copy;
use crate::topology::Topology;
use crate::trace::{Activity, Lap};
use crate::transport::arena::Shared;
use crate::transport::step::{REFRESH, START, reached};
use crate::transport::sync;
use crate::transport::{NodeChannel, Patience, Phase};

/// More bytes than the caches of a processor hold for one process.
const CACHES: usize = 32 << 20;

/// What a part of a list of calls starts with when another part follows.
const MORE: &str = "+";

/// A channel; see the module's text.
pub struct Channel {
    pub(super) topology: Arc<Topology>,
    pub(super) node: NodeChannel,
    /// The way to the other hosts, for a rank that drives a lane where there are any.
    pub(super) cluster: Option<Cluster>,
    /// The last step.
    pub(super) step: u32,
    /// All ranks of the host are known to have unpacked this step.
    pub(super) free: u32,
    /// This rank has unpacked this step, whether or not it has raised its flag for it.
    pub(super) unpacked: u32,
    /// This rank has raised all its flags for this step or a later one.
    refreshed: u32,
    /// Whether the last call's tensors are visible to all ranks, and its chunks hold their places.
    direct: bool,
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Met {
    /// All called the same, and it is done.
    Agreed,
    /// All called the same, but not all brought places.
    Mixed,
    /// They called different things.
    Differ,
}

/// A step under way: this rank has packed chunk `chunk`.
struct Step {
    number: u32,
    chunk: usize,
    /// The lane's slice, where it is on its way to other hosts.
    flight: Option<Flight>,
}

impl Channel {
    /// A channel over `node`, for the ranks of one host.
    pub fn new(topology: Arc<Topology>, node: NodeChannel) -> Channel {
        Channel {
            topology,
            node,
            cluster: None,
            step: START,
            free: START,
            unpacked: START,
            refreshed: START,
            direct: false,
        }
    }

    /// The same channel with the way to the other hosts, where there are any and this rank drives a lane.
    pub(crate) fn with(self, cluster: Option<Cluster>) -> Channel {
        Channel { cluster, ..self }
    }

    /// Lets go of the way to the other hosts; the channel carries no more calls. After a failure it stays as it is: to free a
    /// communicator takes all ranks, of which some may not come.
    pub(crate) fn leave_hosts(&mut self, failed: bool) {
        let cluster = self.cluster.take();
        if failed {
            mem::forget(cluster);
        }
    }

    /// Carries out the first chunk of `job`, and with it finds out whether all ranks called the same; false, on every rank
    /// and with nothing written, when they did not.
    ///
    /// # Errors
    /// Those of the transports; the channel can then not be used any more.
    pub fn first(&mut self, job: &Job, patience: &Patience<'_>) -> Result<bool> {
        self.direct = false;
        self.refresh();
        if job.is_short() {
            return self.exchange(job, patience);
        }
        self.direct = self.shared().is_some_and(|shared| direct::is_possible(job, shared));
        let mut step = self.pack(job, 0, patience)?;
        self.depart(job, &mut step, false, patience)?;
        let mut met = self.settle(job, step, patience)?;
        if met == Met::Mixed {
            self.direct = false;
            let step = self.pack(job, 0, patience)?;
            met = self.settle(job, step, patience)?;
        }
        if met == Met::Agreed && self.direct && job.plan.chunks() == 1 {
            self.written(patience)?;
        }
        Ok(met == Met::Agreed)
    }

    /// Memory that the ranks see in each other, if there are no others than those of this host.
    fn shared(&self) -> Option<&dyn Shared> {
        if self.topology.hosts() == 1 { self.node.node().shared() } else { None }
    }

    /// Whether the first chunk of the last call held places, so that its other chunks do.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// After different calls: tells all ranks `list`, the calls that wait here, and returns what all do next.
    ///
    /// # Errors
    /// As for [`Channel::first`].
    pub fn line_up(&mut self, list: &List, patience: &Patience<'_>) -> Result<Decision> {
        let limit = rounds::limit(self);
        let text = lineup::encode(list);
        let mut pages = text.as_bytes().chunks(limit - MORE.len());
        // By rank, on the ranks that decide.
        let mut so_far: BTreeMap<usize, String> = BTreeMap::new();
        let mut decide = |told: &Told| {
            for (rank, page) in told {
                so_far.entry(*rank).or_default().push_str(page.trim_start_matches(MORE));
            }
            if told.iter().any(|(_, page)| page.starts_with(MORE)) {
                return MORE.to_owned();
            }
            let lists: Option<Vec<List>> = so_far.values().map(|text| lineup::decode(text)).collect();
            lists.map_or(String::new(), |lists| lineup::decide(&lists).encode_within(limit))
        };
        let text = loop {
            let page = String::from_utf8_lossy(pages.next().unwrap_or_default());
            let mark = if pages.len() > 0 { MORE } else { "" };
            let text = rounds::round(self, &format!("{mark}{page}"), patience, &mut decide)?;
            if text != MORE {
                break text;
            }
        };
        let ranks = self.topology.size();
        match Decision::decode(&text) {
            Some(Decision::GiveUp(places)) if places.len() != ranks => None,
            decision => decision,
        }
        .ok_or_else(|| Error::Internal("what the ranks told of their calls is not legible".into()))
    }

    /// The error of calls that do not match, the same on every rank, where every rank gives its account.
    pub fn explain(&mut self, account: &Account<'_>, patience: &Patience<'_>) -> Error {
        explain::explain(self, account, patience)
    }

    /// Carries out further chunks of `job`, one packed and on its way to the other hosts ahead; `direct` is what
    /// [`Channel::is_direct`] told of the first.
    ///
    /// # Errors
    /// Those of the transports; the channel can then not be used any more.
    pub fn rest(
        &mut self,
        job: &Job,
        chunks: impl Iterator<Item = usize>,
        direct: bool,
        patience: &Patience<'_>,
    ) -> Result<()> {
        self.direct = direct;
        if direct {
            return self.rest_directly(job, chunks, patience);
        }
        let mut ahead: Option<Step> = None;
        for chunk in chunks {
            let mut next = self.pack(job, chunk, patience)?;
            self.depart(job, &mut next, true, patience)?;
            if let Some(step) = ahead.replace(next) {
                self.settle_matched(job, step, patience)?;
            }
        }
        ahead.map_or(Ok(()), |step| self.settle_matched(job, step, patience))
    }

    /// The same where the slots hold places: in one step.
    fn rest_directly(&mut self, job: &Job, chunks: impl Iterator<Item = usize>, patience: &Patience<'_>) -> Result<()> {
        let mut chunks = chunks.peekable();
        if let Some(&first) = chunks.peek() {
            let step = self.pack(job, first, patience)?;
            self.node.wait(Phase::Packed, step.number, self.topology.local_size(), patience)?;
            if !self.node.same_signatures(step.number) {
                return Err(lost(job, first));
            }
            self.combine_directly(job, step.number, chunks, patience)?;
        }
        self.written(patience)
    }

    fn settle_matched(&mut self, job: &Job, step: Step, patience: &Patience<'_>) -> Result<()> {
        let chunk = step.chunk;
        match self.settle(job, step, patience)? {
            Met::Agreed => Ok(()),
            _ => Err(lost(job, chunk)),
        }
    }

    /// Waits until the other ranks have written what they write to this rank's tensors.
    fn written(&mut self, patience: &Patience<'_>) -> Result<()> {
        self.node.wait(Phase::Reduced, self.step, self.topology.lanes(), patience)
    }

    /// The number of the next step, once its slot is free. Also tells the other ranks what this one has unpacked: they may
    /// wait for it before they come to what this rank will wait for.
    pub(super) fn begin(&mut self, patience: &Patience<'_>) -> Result<u32> {
        if self.node.own(Phase::Unpacked) != self.unpacked {
            self.node.raise(Phase::Unpacked, self.unpacked);
            patience.log().flag();
        }
        self.advance(patience)
    }

    /// Raises the flags that short calls and calls that differ leave alone, before they fall so far behind that they seem to
    /// be ahead. To be called between calls, when this rank has done with all steps so far.
    #[inline]
    pub(super) fn refresh(&mut self) {
        if self.step.wrapping_sub(self.refreshed) >= REFRESH {
            self.node.raise(Phase::Reduced, self.step);
            self.node.raise(Phase::Unpacked, self.unpacked);
            self.refreshed = self.step;
        }
    }

    pub(super) fn advance(&mut self, patience: &Patience<'_>) -> Result<u32> {
        let number = self.step.wrapping_add(1);
        if !self.is_free(number) {
            let before = number.wrapping_sub(2);
            self.node.wait(Phase::Unpacked, before, self.topology.local_size(), patience)?;
            self.free = before;
        }
        self.step = number;
        Ok(number)
    }

    /// Whether all ranks are known to have done with the slot of step `number`.
    pub(super) fn is_free(&self, number: u32) -> bool {
        reached(self.free, number.wrapping_sub(2))
    }

    /// This rank has taken what it wanted from step `number`.
    pub(super) fn end(&mut self, number: u32) {
        self.unpacked = number;
        self.node.raise(Phase::Unpacked, number);
    }

    /// Copies `part` of a chunk into the slot of step `number`.
    pub(super) fn put(&self, job: &Job, chunk: usize, part: Range<usize>, number: u32) {
        let slot = self.node.slot(self.topology.local_rank(), number);
        sync::writes(slot.wrapping_add(part.start), part.len());
        // SAFETY: `begin` waited until the slot is this rank's; a chunk is no longer than a slot.
        unsafe { job.op.collective().pack(job, &self.topology, chunk, part, slot) };
    }

    /// The slice of a chunk that this rank's tensors and nobody's slot hold, before and after the reduction.
    fn staying(&self, job: &Job, chunk: usize) -> Range<usize> {
        match self.topology.lane() {
            Some(lane) if self.topology.hosts() == 1 && job.op.collective().stays(job) => {
                lane_slice(&self.topology, job, chunk, lane)
            }
            _ => 0..0,
        }
    }

    fn pack(&mut self, job: &Job, chunk: usize, patience: &Patience<'_>) -> Result<Step> {
        let number = self.begin(patience)?;
        let len = job.plan.chunk_len(chunk);
        let mut lap = Lap::start(patience.log(), len);
        if let Some(shared) = self.shared().filter(|_| self.direct) {
            // SAFETY: `begin` waited until the slot is this rank's.
            unsafe { direct::tell(job, self.node.slot(self.topology.local_rank(), number), shared) }?;
        } else {
            let staying = self.staying(job, chunk);
            [0..staying.start, staying.end..len].into_iter().for_each(|part| self.put(job, chunk, part, number));
        }
        self.node.sign(number, job.signature, self.direct);
        self.node.raise(Phase::Packed, number);
        lap.end(Activity::Copy);
        patience.log().step();
        patience.log().flag();
        Ok(Step { number, chunk, flight: None })
    }

    /// Between hosts: sends the first messages of this lane's slice of a packed step, once all ranks of the host have packed
    /// it. `matched` where all hosts are known to have called the same.
    fn depart(&mut self, job: &Job, step: &mut Step, matched: bool, patience: &Patience<'_>) -> Result<()> {
        let (Some(_), Some(lane)) = (&self.cluster, self.topology.lane()) else { return Ok(()) };
        self.node.wait(Phase::Packed, step.number, self.topology.local_size(), patience)?;
        let agreed = self.node.same_signatures(step.number);
        let slots = self.node.slots(step.number);
        let slice = slice_of(&self.topology, job, step.number, step.chunk, lane, slots);
        let cluster = self.cluster.as_mut();
        step.flight = cluster.map(|cluster| cluster.start(&slice, matched, agreed, patience)).transpose()?;
        Ok(())
    }

    /// Brings a packed step to its end. Nothing is written unless the ranks agree.
    fn settle(&mut self, job: &Job, step: Step, patience: &Patience<'_>) -> Result<Met> {
        let log = patience.log();
        self.node.wait(Phase::Packed, step.number, self.topology.local_size(), patience)?;
        let mut lap = Lap::start(log, job.plan.chunk_len(step.chunk));
        // On one host every rank sees at once whether all agree; else the lanes find out.
        let agreed_here = self.node.same_signatures(step.number);
        if self.topology.hosts() == 1 && !agreed_here {
            self.end(step.number);
            return Ok(Met::Differ);
        }
        match self.node.direct(step.number) {
            0 => {}
            all if all == self.topology.local_size() => {
                self.combine_directly(job, step.number, [step.chunk], patience)?;
                return Ok(Met::Agreed);
            }
            _ => {
                self.end(step.number);
                return Ok(Met::Mixed);
            }
        }
        let Step { number, chunk, flight } = step;
        if let Some(lane) = self.topology.lane() {
            let slots = self.node.slots(number);
            let slice = slice_of(&self.topology, job, number, chunk, lane, slots);
            let agreed = match (flight, &mut self.cluster) {
                (Some(flight), Some(cluster)) => cluster.finish(&slice, flight, patience)?,
                _ => {
                    if agreed_here {
                        combine(&slice);
                    }
                    agreed_here
                }
            };
            self.node.agree(number, agreed);
            self.node.raise(Phase::Reduced, number);
            log.flag();
            // Between hosts the lane itself has told its parts apart.
            if self.cluster.is_none() {
                lap.end(Activity::Reduce);
            }
        }
        self.node.wait(Phase::Reduced, number, self.topology.lanes(), patience)?;
        lap.skip();
        let agreed = self.node.all_agreed(number, self.topology.lanes());
        if agreed {
            self.unpack(job, number, chunk);
        }
        self.end(number);
        log.flag();
        lap.end(Activity::Copy);
        Ok(if agreed { Met::Agreed } else { Met::Differ })
    }

    /// A lane's work on a step whose slots hold places, for these chunks; ends the step.
    fn combine_directly(
        &mut self,
        job: &Job,
        number: u32,
        chunks: impl IntoIterator<Item = usize>,
        patience: &Patience<'_>,
    ) -> Result<()> {
        if let (Some(shared), Some(lane_index)) = (self.shared(), self.topology.lane()) {
            for chunk in chunks {
                let mut lap = Lap::start(patience.log(), job.plan.chunk_len(chunk));
                let lane = Lane { topology: &self.topology, chunk, slots: self.node.slots(number) };
                // SAFETY: all have packed places, so the slice of all their tensors is this lane's.
                unsafe { direct::combine(job, &lane, lane_slice(&self.topology, job, chunk, lane_index), shared) }?;
                lap.end(Activity::Reduce);
            }
        }
        self.node.raise(Phase::Reduced, number);
        self.end(number);
        Ok(())
    }

    /// Copies the results from the lanes' slots to the tensors of every tower.
    fn unpack(&self, job: &Job, number: u32, chunk: usize) {
        let staying = self.staying(job, chunk);
        // A long result that is not where the argument was, and so in no cache, need not go through them.
        let streams = |buffer: &Buffer| !buffer.is_in_place() && job.plan.total() > CACHES;
        for lane in 0..self.topology.lanes() {
            let slot = self.node.slot(lane, number).cast_const();
            let slice = lane_slice(&self.topology, job, chunk, lane);
            if slice == staying {
                continue;
            }
            sync::reads(slot.wrapping_add(slice.start), slice.len());
            for piece in job.plan.pieces(chunk, slice) {
                for buffer in job.replicas(piece.tensor) {
                    // SAFETY: all lanes have reduced, so the slots are read-only; the tensor's memory is the call's.
                    unsafe {
                        let from = slot.add(piece.offset);
                        let to = buffer.bytes_mut(piece.first, piece.count);
                        if job.is_wide() {
                            job.reduction(buffer.dtype()).narrow(from, to.as_mut_ptr(), piece.count);
                        } else if streams(buffer) {
                            stream_copy(from, to.as_mut_ptr(), to.len());
                        } else {
                            ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len());
                        }
                    }
                }
            }
        }
    }
}

fn lost(job: &Job, chunk: usize) -> Error {
    Error::Internal(format!("the ranks lost step in chunk {chunk} of {}", job.title()))
}

/// The bytes of a chunk that a lane brings to an end.
pub(super) fn lane_slice(topology: &Topology, job: &Job, chunk: usize, lane: usize) -> Range<usize> {
    slice(0..job.plan.chunk_len(chunk), lane, topology.lanes())
}

/// What a lane does on the step `step`, which has these slots.
fn slice_of<'a>(
    topology: &'a Topology,
    job: &'a Job,
    step: u32,
    chunk: usize,
    lane: usize,
    slots: &'a [*mut u8],
) -> Slice<'a> {
    let bytes = lane_slice(topology, job, chunk, lane);
    Slice { collective: job.op.collective(), job, lane: Lane { topology, chunk, slots }, bytes, step }
}

/// A lane's work on one host, once all have packed: completes its slice in its own slot.
fn combine(Slice { job, lane, bytes, .. }: &Slice<'_>) {
    lane.slots.iter().for_each(|&slot| sync::reads(slot.wrapping_add(bytes.start), bytes.len()));
    sync::writes(lane.own().wrapping_add(bytes.start), bytes.len());
    // SAFETY: all have packed, so this lane's slice is this thread's in all slots.
    unsafe { job.op.collective().combine(job, lane, bytes.clone()) };
}
