//! Averages by kernels on memory that the ranks of a host see in each other: nothing goes through the host but numbers.
//!
//! A short call takes one shot: every rank copies what it brings into memory of the team's own, which all have open, and
//! makes the whole result for itself. A long one takes two: the ranks tell each other where their tensors are; each reads
//! its slice in all of them and writes the mean to all of them, which is the least traffic there is. Between the two the
//! ranks [meet](super::neighbours). The additions are those of the host, in the order of ranks: same bits.
//! Thread rule: used by one thread; the closure of [`Direct::rescue`] may run on any.

use std::sync::Arc;

use super::super::{Channel, Job, Op};
use super::batch::{Batch, Table};
use super::neighbours::Neighbours;
use super::notes::{most, tell};
use super::peers::{Note, words};
use super::{Carried, begin, end, root};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::slice;
use crate::transport::Patience;
use crate::transport::cuda::{Address, Event, Stream, Work};

/// The numbers that an export takes in a note.
const EXPORT: usize = 9;
/// The longest call, in bytes, that takes one shot.
const SHOT: usize = 256 << 10;
/// The memory for two of them; less would share a block of the driver's with what else the process has there, and other
/// processes would see that too.
pub(super) const BOUNCE: usize = 2 << 20;

/// What a rank has for such calls.
pub(super) struct Direct {
    near: Neighbours,
    shots: usize,
    batch: Batch,
    table: Table,
}

impl Direct {
    /// For ranks whose memory is open to each other, each with a bounce of [`BOUNCE`] bytes.
    pub fn new(near: Neighbours) -> Direct {
        let table = Table::new(&near.context);
        Direct { near, shots: 0, batch: Batch::default(), table }
    }

    /// What everything is enqueued on.
    pub fn stream(&self) -> &Stream {
        &self.near.stream
    }

    /// The bytes of device memory that this rank has taken.
    pub fn held(&self) -> usize {
        self.near.held() + self.table.held()
    }

    /// Lets the streams of all ranks go on after one was lost.
    pub fn rescue(&self) -> Arc<dyn Fn() + Send + Sync> {
        self.near.rescue()
    }

    /// Carries out a call on which all ranks agree.
    ///
    /// # Errors
    /// Those of the driver and of the transports; the ranks are then out of step.
    pub fn carry(&mut self, channel: &mut Channel, job: &Job, patience: &Patience<'_>) -> Result<Carried> {
        let total = job.plan.total();
        if total == 0 {
            begin(job, &self.near.stream)?;
            return end(job, &self.near.stream).map(Carried::Enqueued);
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
        let root = root(job, &channel.topology);
        let brings = root.is_none_or(|root| root == self.near.me);
        begin(job, &self.near.stream)?;
        if brings {
            let pieces = job.plan.pieces_of_all(0..total);
            self.batch.copies(pieces, job.tensors(0), total, self.near.bounces[self.near.me] + at, false);
            // SAFETY: the tensors are the call's, and the bounce is free, as told above.
            unsafe { self.table.copy(&self.batch, &self.near.stream, patience) }?;
        }
        self.near.meet(channel, patience)?;
        if root != Some(self.near.me) || !job.is_in_place() {
            let bounces = match root {
                Some(root) => &self.near.bounces[root..=root],
                None => &self.near.bounces[..],
            };
            self.batch.start(bounces.len(), 1, total);
            for piece in job.plan.pieces_of_all(0..total) {
                let buffer = &job.tensors(0)[piece.tensor].buffer;
                let sources = bounces.iter().map(|bounce| bounce + at + piece.offset as u64);
                let to = buffer.spans().1.start as u64;
                add(&mut self.batch, job.op, buffer.dtype(), piece.count, sources, [to]);
            }
            self.launch(job, patience)?;
        }
        end(job, &self.near.stream)
    }

    /// Every rank writes its slice of the mean to the tensors of all. False when the tensors of a rank are in memory that
    /// cannot be shown.
    fn two_shot(&mut self, channel: &mut Channel, job: &Job, patience: &Patience<'_>) -> Result<Carried> {
        let places = self.places(job, most(channel))?;
        let imports = &mut self.near.imports;
        let me = self.near.me;
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
        let ranks = self.near.imports.len();
        let root = root(job, &channel.topology);
        let total = job.plan.total();
        let part = match root {
            None => slice(0..total, me, ranks),
            Some(root) if root == me && job.is_in_place() => 0..0,
            Some(_) => 0..total,
        };
        let (sources, targets) = if root.is_some() { (1, 1) } else { (ranks, ranks) };
        self.batch.start(sources, targets, part.len());
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
                        self.near.imports[rank].at(*place)?
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
        begin(job, &self.near.stream)?;
        self.near.meet(channel, patience)?;
        self.launch(job, patience)?;
        self.near.meet(channel, patience)?;
        end(job, &self.near.stream).map(Carried::Enqueued)
    }

    /// Starts the kernels of the batch for `job`.
    fn launch(&mut self, job: &Job, patience: &Patience<'_>) -> Result<()> {
        let (kernels, stream) = (self.near.context.kernels()?, &self.near.stream);
        let (precise, copies) = (job.is_precise(), matches!(job.op, Op::Broadcast { .. }));
        // SAFETY: the tensors of all ranks are the call's; between the meetings each slice is one rank's.
        let start = |dtype, work: &Work| unsafe {
            if copies { kernels.copy(work, stream) } else { kernels.average(dtype, precise, work, stream) }
        };
        self.table.run(&self.batch, job.divisor(), stream, patience, start)
    }

    /// What this rank tells of its tensors: see [`Note`].
    fn places(&mut self, job: &Job, most: usize) -> Result<Vec<u64>> {
        self.near.exports.begin();
        let mut places = Vec::with_capacity(2 * job.plan.tensors().len());
        let mut visible = true;
        for tensor in job.plan.tensors() {
            let (read, written) = job.tensors(0)[tensor].buffer.spans();
            for span in [read, written] {
                match self.near.exports.locate(span.start as u64, span.len() as u64)? {
                    Some(place) => places.push(place),
                    None => visible = false,
                }
            }
        }
        // What does not fit is told with a later call, and until then the tensors are not visible.
        let room = (most - 3) / (1 + EXPORT);
        let (fresh, gone) = self.near.exports.news(room);
        visible &= !self.near.exports.has_news();
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
