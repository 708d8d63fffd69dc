//! Averages by kernels on memory that the ranks of a host see in each other: nothing goes through the host but numbers.
//!
//! A short call takes one shot: every rank copies what it brings into memory of the team's own, which all have open, and
//! makes the whole result for itself. A long one takes two: the ranks tell each other where their tensors are; each reads
//! its slice in all of them and writes the mean to all of them, which is the least traffic there is. Between the two the
//! ranks meet: a stream writes a number to host memory that all ranks share and waits for those of the others, so that no
//! kernel spins on another process, whose kernels may not run at the same time. The additions are those of the host, in the
//! order of ranks: same bits.
//! A stream is made to wait only when what it waits for has been enqueued on every rank: the hosts meet before. So no two
//! teams can wait for each other, whatever the hardware's queues, or functions of the driver that wait for all of them, mix up.
//! Thread rule: used by one thread; the closure of [`Direct::rescue`] may run on any.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::rounds;
use super::super::{Channel, Job, Op};
use super::batch::{Batch, Table};
use super::notes::{most, tell};
use super::path::Wait;
use super::peers::{Flags, Note, Own, PAGE, handle, words};
use super::{Carried, LAST, await_event, begin, end, has_ended, within};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::slice;
use crate::transport::Patience;
use crate::transport::cuda::{Address, Context, DeviceMemory, Event, Export, Exports, Imports, Pinned, Stream, Work};

/// The numbers that an export takes in a note.
const EXPORT: usize = 9;
/// The longest call, in bytes, that takes one shot.
const SHOT: usize = 256 << 10;
/// The memory for two of them; less would share a block of the driver's with what else the process has there, and other
/// processes would see that too.
const BOUNCE: usize = 2 << 20;
/// What a rank has for such calls.
pub(super) struct Direct {
    context: Arc<Context>,
    stream: Stream,
    wait: Wait,
    me: usize,
    flags: Arc<Flags>,
    exports: Exports,
    /// By local rank; nothing is in the own.
    imports: Vec<Imports>,
    bounce: DeviceMemory,
    /// Where the ranks' bounces are, by local rank.
    bounces: Vec<Address>,
    shots: usize,
    batch: Batch,
    table: Table,
}

impl Direct {
    /// Opens the ranks' memory to each other. Where that fails on one of them, all get to know why.
    ///
    /// # Errors
    /// Those of the transports.
    pub fn new(
        channel: &mut Channel,
        context: &Arc<Context>,
        wait: Wait,
        patience: &Patience<'_>,
    ) -> Result<std::result::Result<Direct, String>> {
        let _entered = context.enter()?;
        let own = Own::new(channel, context, BOUNCE);
        let mine: Vec<u64> = match &own {
            Ok(own) => [own.place].into_iter().chain(words(&own.export.handle)).collect(),
            Err(_) => Vec::new(),
        };
        let me = channel.topology.local_rank();
        let made =
            tell(channel, &mine, patience, |told| Ok(own.and_then(|own| Direct::open(context, wait, me, own, told))))?;
        let why = made.as_ref().err().map_or(String::new(), |error| error.detail().to_owned());
        let why = rounds::round(channel, &why, patience, |told| {
            let failed = told.iter().find(|(_, why)| !why.is_empty());
            failed.map_or(String::new(), |(rank, why)| format!("rank {rank}: {why}"))
        })?;
        Ok(match made {
            Ok(direct) if why.is_empty() => Ok(direct),
            _ => Err(why),
        })
    }

    fn open(context: &Arc<Context>, wait: Wait, me: usize, own: Own, told: &[&[u64]]) -> Result<Direct> {
        let Own { shared, bounce, exports, place: _, export: _ } = own;
        let mut flags = Flags::default();
        let mut imports = Vec::new();
        let mut bounces = Vec::new();
        for (rank, words) in told.iter().enumerate() {
            let [place, numbers @ ..] = words else {
                return Err(Error::System("another rank cannot show its memory".into()));
            };
            let mut seen = Imports::new(context);
            if rank == me {
                bounces.push(bounce.address());
            } else {
                let handle = handle(numbers).ok_or_else(|| Error::Internal("a handle is cut off".into()))?;
                seen.hear(&[Export { number: 0, handle }], &[])?;
                bounces.push(seen.at(0)?);
            }
            imports.push(seen);
            let unseen = || Error::Internal("a rank's page of flags is not where the others see it".into());
            let memory = shared.at(rank, *place, PAGE).ok_or_else(unseen)?;
            // SAFETY: the arena stays mapped, and its owner keeps the page until its team ends.
            flags.pages.push(unsafe { Pinned::new(context, memory, PAGE) }?);
        }
        let stream = Stream::new(context)?;
        if wait == Wait::Stream {
            // Here the numbers are in memory that other processes share, which a driver may treat in another way.
            let page = &flags.pages[me];
            // SAFETY: the page is pinned as long as the stream lives.
            unsafe { stream.write_number(page.address(), 0).and_then(|()| stream.wait_for_number(page.address(), 0)) }?;
            let event = stream.record()?;
            if !within(LAST, || event.has_come().unwrap_or(false)) {
                return Err(Error::System("its stream does not see numbers in shared memory".into()));
            }
        }
        Ok(Direct {
            context: Arc::clone(context),
            stream,
            wait,
            me,
            flags: Arc::new(flags),
            exports,
            imports,
            bounce,
            bounces,
            shots: 0,
            batch: Batch::default(),
            table: Table::new(context),
        })
    }

    /// The bytes of device memory that this rank has taken.
    pub fn held(&self) -> usize {
        self.bounce.bytes() + self.table.held()
    }

    /// Lets the streams of all ranks go on after one was lost.
    pub fn rescue(&self) -> Arc<dyn Fn() + Send + Sync> {
        let flags = Arc::clone(&self.flags);
        Arc::new(move || flags.release())
    }

    /// Carries out a call on which all ranks agree.
    ///
    /// # Errors
    /// Those of the driver and of the transports; the ranks are then out of step.
    pub fn carry(&mut self, channel: &mut Channel, job: &Job, patience: &Patience<'_>) -> Result<Carried> {
        let total = job.plan.total();
        if total == 0 {
            begin(job, &self.stream)?;
            return end(job, &self.stream).map(Carried::Enqueued);
        }
        if total <= SHOT {
            return self.one_shot(channel, job, patience).map(Carried::Enqueued);
        }
        self.two_shot(channel, job, patience)
    }

    /// Every rank makes the whole result from what all have put into their bounces. Two of them are used in turn: who has
    /// come to a call has done with what is read in the one before.
    fn one_shot(&mut self, channel: &mut Channel, job: &Job, patience: &Patience<'_>) -> Result<Event> {
        let at = (self.shots % 2 * SHOT) as u64;
        self.shots += 1;
        let total = job.plan.total();
        let root = root(job, channel);
        let brings = root.is_none_or(|root| root == self.me);
        begin(job, &self.stream)?;
        if brings {
            let pieces = job.plan.pieces_of_all(0..total);
            self.batch.copies(pieces, job.tensors(0), self.bounce.address() + at, false);
            // SAFETY: the tensors are the call's, and the bounce is free, as told above.
            unsafe { self.table.copy(&self.batch, &self.stream, patience) }?;
        }
        self.meet(channel, patience)?;
        if root != Some(self.me) || !job.is_in_place() {
            let bounces = match root {
                Some(root) => &self.bounces[root..=root],
                None => &self.bounces[..],
            };
            self.batch.start(bounces.len(), 1);
            for piece in job.plan.pieces_of_all(0..total) {
                let buffer = &job.tensors(0)[piece.tensor].buffer;
                let sources = bounces.iter().map(|bounce| bounce + at + piece.offset as u64);
                let to = buffer.spans().1.start as u64;
                add(&mut self.batch, job.op, buffer.dtype(), piece.count, sources, [to]);
            }
            self.launch(job, patience)?;
        }
        end(job, &self.stream)
    }

    /// Every rank writes its slice of the mean to the tensors of all. False when the tensors of a rank are in memory that
    /// cannot be shown.
    fn two_shot(&mut self, channel: &mut Channel, job: &Job, patience: &Patience<'_>) -> Result<Carried> {
        let places = self.places(job, most(channel))?;
        let imports = &mut self.imports;
        let me = self.me;
        let seen = tell(channel, &places, patience, |told| {
            let mut all = Vec::with_capacity(told.len());
            for (rank, words) in told.iter().enumerate() {
                let note = Note::read(words)?;
                if rank != me {
                    imports[rank].hear(&note.fresh, &note.gone)?;
                }
                all.push(note.places.map(<[u64]>::to_vec));
            }
            // Without those of one rank nobody goes this way.
            Ok(all.into_iter().collect::<Option<Vec<Vec<u64>>>>())
        })?;
        let Some(places) = seen else { return Ok(Carried::ThroughHost) };
        let ranks = self.imports.len();
        let root = root(job, channel);
        let total = job.plan.total();
        let part = match root {
            None => slice(0..total, me, ranks),
            Some(root) if root == me && job.is_in_place() => 0..0,
            Some(_) => 0..total,
        };
        let (sources, targets) = if root.is_some() { (1, 1) } else { (ranks, ranks) };
        self.batch.start(sources, targets);
        for piece in job.plan.pieces_of_all(part) {
            let buffer = &job.tensors(0)[piece.tensor].buffer;
            let skip = (piece.first * buffer.dtype().size()) as u64;
            // Element `piece.first` of the tensor as rank `rank` reads it (0) or writes it (1).
            let at = |rank: usize, which: usize| {
                let (read, written) = buffer.spans();
                let start = match (rank == me, which) {
                    (true, 0) => read.start as u64,
                    (true, _) => written.start as u64,
                    (false, _) => {
                        let place = places[rank].get(2 * piece.place + which);
                        let place = place.ok_or_else(|| Error::Internal("a place is missing".into()))?;
                        self.imports[rank].at(*place)?
                    }
                };
                Ok(start + skip)
            };
            let sources = match root {
                Some(root) => vec![at(root, 0)?],
                None => (0..ranks).map(|rank| at(rank, 0)).collect::<Result<_>>()?,
            };
            let targets = match root {
                Some(_) => vec![at(me, 1)?],
                None => (0..ranks).map(|rank| at(rank, 1)).collect::<Result<_>>()?,
            };
            add(&mut self.batch, job.op, buffer.dtype(), piece.count, sources, targets);
        }
        begin(job, &self.stream)?;
        self.meet(channel, patience)?;
        self.launch(job, patience)?;
        self.meet(channel, patience)?;
        end(job, &self.stream).map(Carried::Enqueued)
    }

    /// Starts the kernels of the batch for `job`.
    fn launch(&mut self, job: &Job, patience: &Patience<'_>) -> Result<()> {
        let (kernels, stream) = (self.context.kernels()?, &self.stream);
        let (precise, copies) = (job.is_precise(), matches!(job.op, Op::Broadcast { .. }));
        // SAFETY: the tensors of all ranks are the call's; between the meetings each slice is one rank's.
        let start = |dtype, work: &Work| unsafe {
            if copies { kernels.copy(work, stream) } else { kernels.average(dtype, precise, work, stream) }
        };
        self.table.run(&self.batch, job.divisor(), stream, patience, start)
    }

    /// What all ranks have enqueued before is done before anything that this one enqueues from here on.
    fn meet(&mut self, channel: &mut Channel, patience: &Patience<'_>) -> Result<()> {
        let step = self.flags.step.load(Ordering::Relaxed).wrapping_add(1);
        self.flags.step.store(step, Ordering::Relaxed);
        match self.wait {
            Wait::Stream => {
                // SAFETY: the page is pinned as long as the stream lives.
                unsafe { self.stream.write_number(self.flags.pages[self.me].address(), step) }?;
                // Now all have enqueued what the others wait for.
                tell(channel, &[], patience, |_| Ok(()))?;
                for (_, page) in self.flags.pages.iter().enumerate().filter(|(rank, _)| *rank != self.me) {
                    // SAFETY: as above.
                    unsafe { self.stream.wait_for_number(page.address(), step) }?;
                }
                Ok(())
            }
            Wait::Host => {
                let event = self.stream.record()?;
                await_event(&event, patience)?;
                tell(channel, &[], patience, |_| Ok(()))
            }
        }
    }

    /// What this rank tells of its tensors: see [`Note`].
    fn places(&mut self, job: &Job, most: usize) -> Result<Vec<u64>> {
        self.exports.begin();
        let mut places = Vec::with_capacity(2 * job.plan.tensors().len());
        let mut visible = true;
        for tensor in job.plan.tensors() {
            let (read, written) = job.tensors(0)[tensor].buffer.spans();
            for span in [read, written] {
                match self.exports.locate(span.start as u64, span.len() as u64)? {
                    Some(place) => places.push(place),
                    None => visible = false,
                }
            }
        }
        // What does not fit is told with a later call, and until then the tensors are not visible.
        let room = (most - 3) / (1 + EXPORT);
        let (fresh, gone) = self.exports.news(room);
        visible &= !self.exports.has_news();
        let mut note: Vec<u64> = vec![0, fresh.len() as u64, gone.len() as u64];
        for export in &fresh {
            note.push(export.number.into());
            note.extend(words(&export.handle));
        }
        note.extend(gone.iter().map(|&number| u64::from(number)));
        if visible && note.len() + places.len() <= most {
            note[0] = 1;
            note.extend(places);
        }
        Ok(note)
    }
}

/// The local rank that a broadcast is from.
fn root(job: &Job, channel: &Channel) -> Option<usize> {
    match job.op {
        Op::Broadcast { root } => channel.topology.place(root).map(|(_, local)| local),
        Op::Average | Op::Barrier => None,
    }
}

/// Adds a piece to a batch: what is broadcast is copied as bytes.
fn add(
    batch: &mut Batch,
    op: Op,
    dtype: DType,
    count: usize,
    sources: impl IntoIterator<Item = Address>,
    targets: impl IntoIterator<Item = Address>,
) {
    match op {
        Op::Average => batch.add(dtype, count, sources, targets),
        Op::Broadcast { .. } | Op::Barrier => batch.add(DType::U8, count * dtype.size(), sources, targets),
    }
}

impl Drop for Direct {
    /// Memory that others have open goes when nobody is at work on it: when this rank's stream has done with theirs, and all
    /// others have come here too, or are gone.
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        if !has_ended(&self.stream) {
            self.flags.release();
            let _or_never = has_ended(&self.stream);
        }
        let last = self.flags.step.load(Ordering::Relaxed).wrapping_add(1);
        // What was released stays far ahead: others may wait for more than the last meeting to which this rank came.
        if !self.flags.is_released() {
            self.flags.raise(self.me, last);
        }
        within(LAST, || self.flags.is_released() || self.flags.all_have(last));
    }
}
