//! Averages over hosts whose ranks see each other's GPU memory: within a host on the GPUs, between hosts in slices through
//! host memory, so that of each tensor every byte leaves the GPUs of a host once and comes back once, however many there are.
//!
//! A chunk goes like this. Every rank packs what it brings into its bounce. Each rank that drives a lane adds its slice up
//! from the bounces of all, with a kernel that writes the sums to pinned host memory; brings them to an end with the same
//! lane of the other hosts, as calls on host memory do; and has the means copied into the bounces of all, from which every
//! rank unpacks them. Some chunks are under way at a time: while the network carries one, the GPU adds up the next ones. The
//! additions are those of the host, in the same order: same bits.
//! Thread rule: used by one thread; the closure of [`Across::rescue`] may run on any.

use std::ops::Range;
use std::sync::Arc;

use smallvec::smallvec;

use super::super::average::{Average, parts};
use super::super::channel::lane_slice;
use super::super::cluster::{Flight, Slice};
use super::super::{Between, Channel, Job, Lane, Op, Part, PerRank};
use super::batch::{Batch, Table};
use super::neighbours::Neighbours;
use super::path::Wait;
use super::{Carried, await_event, begin, end, root};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::{slice, widest};
use crate::topology::Topology;
use crate::transport::Patience;
use crate::transport::cuda::{Address, Context, Event, HostMemory, Stream, Work};

/// Chunks that are added up before their turn on the network, at most.
const AHEAD: usize = 3;
/// Places for chunks; a chunk's is free when it has been unpacked.
pub(super) const PLACES: usize = AHEAD + 1;

/// One kind of step: what its kernels work on.
struct Stage {
    batch: Batch,
    table: Table,
}

/// What the driver of a lane has.
pub(super) struct Driver {
    lane: usize,
    /// The sums of this host, `room` bytes for each place.
    sums: HostMemory,
    room: usize,
    /// The means, a chunk (of so many bytes) for each place.
    means: HostMemory,
    chunk: usize,
    /// When nothing reads the means of a place any more.
    free: [Option<Event>; PLACES],
    /// When the sums of a place are there.
    summed: [Option<Event>; PLACES],
    /// What is on the network, by place.
    flights: [Option<Flight>; PLACES],
}

/// What a rank has for such calls.
pub(super) struct Across {
    near: Neighbours,
    driver: Option<Driver>,
    /// The bytes of a place of the bounce.
    chunk: usize,
    pack: Stage,
    add: Stage,
    spread: Stage,
    unpack: Stage,
}

impl Across {
    /// For ranks whose memory is open to each other, each with a bounce of [`PLACES`] chunks of `chunk` bytes.
    pub fn new(near: Neighbours, driver: Option<Driver>, chunk: usize) -> Across {
        let stage = || {
            let mut table = Table::new(&near.context);
            table.stopped_by(near.stop_address());
            Stage { batch: Batch::default(), table }
        };
        let [pack, add, spread, unpack] = [(); 4].map(|()| stage());
        Across { near, driver, chunk, pack, add, spread, unpack }
    }

    /// Who waits for the other ranks of the host.
    pub fn wait(&self) -> Wait {
        self.near.wait()
    }

    /// What everything is enqueued on.
    pub fn stream(&self) -> &Stream {
        &self.near.stream
    }

    /// The bytes of device memory that this rank has taken.
    pub fn held(&self) -> usize {
        let stages = [&self.pack, &self.add, &self.spread, &self.unpack];
        self.near.held() + stages.map(|stage| stage.table.held()).iter().sum::<usize>()
    }

    /// Lets the streams of all ranks of the host go on after one was lost.
    pub fn rescue(&self) -> Arc<dyn Fn() + Send + Sync> {
        self.near.rescue()
    }

    /// Carries out a call on which all ranks agree.
    ///
    /// # Errors
    /// Those of the driver and of the transports; the ranks are then out of step.
    pub fn carry(&mut self, channel: &mut Channel, job: &Job, patience: &Patience<'_>) -> Result<Carried> {
        begin(job, &self.near.stream)?;
        if job.plan.total() > 0 {
            self.carry_chunks(channel, job, patience)?;
        }
        end(job, &self.near.stream).map(Carried::Enqueued)
    }

    fn carry_chunks(&mut self, channel: &mut Channel, job: &Job, patience: &Patience<'_>) -> Result<()> {
        let chunks = job.plan.chunks();
        let ahead = AHEAD.min(chunks);
        let topology = Arc::clone(&channel.topology);
        let call =
            Call { job, topology: &topology, root: root(job, &topology), first_step: channel.step.wrapping_add(1) };
        for turn in 0..chunks + ahead {
            let (comes, goes) = (Some(turn).filter(|&turn| turn < chunks), turn.checked_sub(ahead));
            if let Some(chunk) = goes {
                self.exchange(channel, &call, chunk, patience)?;
                self.spread(&call, chunk, patience)?;
            }
            if let Some(chunk) = comes {
                self.pack(&call, chunk, patience)?;
            }
            self.near.meet(channel, patience)?;
            if let Some(chunk) = comes {
                self.add_up(&call, chunk, patience)?;
            }
            if let Some(chunk) = goes {
                self.unpack(&call, chunk, patience)?;
            }
        }
        Ok(())
    }

    /// Where a chunk is in the bounce of each rank.
    fn places(&self, chunk: usize) -> PerRank<Address> {
        let at = (chunk % PLACES * self.chunk) as Address;
        self.near.bounces.iter().map(|bounce| bounce + at).collect()
    }

    /// From the tensors to the own bounce.
    fn pack(&mut self, call: &Call<'_>, chunk: usize, patience: &Patience<'_>) -> Result<()> {
        if !call.brings(self.near.me) {
            return Ok(());
        }
        let place = self.places(chunk)[self.near.me];
        self.pack.batch.copies(call.pieces(chunk), call.job.tensors(0), self.chunk, place, false);
        // SAFETY: the tensors are the call's; the place is this rank's until the ranks meet.
        unsafe { self.pack.table.copy(&self.pack.batch, &self.near.stream, patience) }
    }

    /// From the own bounce to the tensors.
    fn unpack(&mut self, call: &Call<'_>, chunk: usize, patience: &Patience<'_>) -> Result<()> {
        if call.is_here(self.near.me) && call.job.is_in_place() {
            return Ok(());
        }
        let place = self.places(chunk)[self.near.me];
        self.unpack.batch.copies(call.pieces(chunk), call.job.tensors(0), self.chunk, place, true);
        // SAFETY: as for `pack`; all lanes have written the place before the ranks met.
        unsafe { self.unpack.table.copy(&self.unpack.batch, &self.near.stream, patience) }
    }

    /// The own slice, from the bounces of all ranks to the host.
    fn add_up(&mut self, call: &Call<'_>, chunk: usize, patience: &Patience<'_>) -> Result<()> {
        let places = self.places(chunk);
        let Some(driver) = &mut self.driver else { return Ok(()) };
        let (slice, stream) = (call.slice(chunk, driver.lane), &self.near.stream);
        let Stage { batch, table } = &mut self.add;
        match call.job.op {
            Op::Average => {
                let to = driver.sums_address(chunk);
                batch.start(self.near.bounces.len(), 1, slice.len());
                for part in parts(call.job, chunk, slice) {
                    let sources = places.iter().map(|place| place + part.wire as Address);
                    batch.add(part.reduction.dtype, part.count, sources, [to + part.at as Address]);
                }
                let kernels = self.near.context.kernels()?;
                let precise = call.job.is_precise();
                // SAFETY: all have packed, and nobody writes to this slice of the bounces before the ranks meet again; the
                // host has done with what was in the sums' place.
                let add = |dtype, work: &Work| unsafe { kernels.sum(dtype, precise, work, stream) };
                table.run(batch, 1, stream, patience, add)?;
            }
            Op::Broadcast { .. } | Op::Barrier => {
                let Some(root) = call.root else { return Ok(()) };
                let to = driver.means_address(chunk);
                let start = slice.start as Address;
                batch.start(1, 1, slice.len());
                batch.add(DType::U8, slice.len(), [places[root] + start], [to + start]);
                // SAFETY: as above; what was in the means' place has been read, by this stream.
                unsafe { table.copy(batch, stream, patience) }?;
            }
        }
        driver.summed[chunk % PLACES] = Some(stream.record()?);
        Ok(())
    }

    /// Between the hosts: the own slice of `chunk`; that of the next chunk is on its way then.
    fn exchange(
        &mut self,
        channel: &mut Channel,
        call: &Call<'_>,
        chunk: usize,
        patience: &Patience<'_>,
    ) -> Result<()> {
        let (Some(driver), Some(cluster)) = (&mut self.driver, &mut channel.cluster) else { return Ok(()) };
        for next in (chunk..call.job.plan.chunks()).take(2) {
            let place = next % PLACES;
            if driver.flights[place].is_some() {
                continue;
            }
            for event in [driver.summed[place].take(), driver.free[place].take()].into_iter().flatten() {
                await_event(&event, patience)?;
            }
            let flight = driver.with_slice(call, next, |slice| cluster.start(slice, true, true, patience))?;
            driver.flights[place] = Some(flight);
        }
        let lost = || Error::Internal(format!("the hosts lost step in chunk {chunk} of {}", call.job.title()));
        let flight = driver.flights[chunk % PLACES].take().ok_or_else(lost)?;
        let agreed = driver.with_slice(call, chunk, |slice| cluster.finish(slice, flight, patience))?;
        if agreed { Ok(()) } else { Err(lost()) }
    }

    /// The own slice, from the host to the bounces of all ranks.
    fn spread(&mut self, call: &Call<'_>, chunk: usize, patience: &Patience<'_>) -> Result<()> {
        let places = self.places(chunk);
        let Some(driver) = &mut self.driver else { return Ok(()) };
        let slice = call.slice(chunk, driver.lane);
        let start = slice.start as Address;
        let from = driver.means_address(chunk);
        let Stage { batch, table } = &mut self.spread;
        batch.start(1, self.near.bounces.len(), slice.len());
        batch.add(DType::U8, slice.len(), [from + start], places.iter().map(|place| place + start));
        // SAFETY: this slice of the bounces is this lane's between the meetings.
        unsafe { table.copy(batch, &self.near.stream, patience) }?;
        driver.free[chunk % PLACES] = Some(self.near.stream.record()?);
        Ok(())
    }
}

impl Driver {
    /// For calls in chunks of `chunk` bytes, which may be averages of all types; `None` for a rank that drives no lane.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn new(context: &Arc<Context>, topology: &Topology, chunk: usize) -> Result<Option<Driver>> {
        let Some(lane) = topology.lane() else { return Ok(None) };
        let _entered = context.enter()?;
        context.kernels()?.load_sums()?;
        let room = widest(slice(0..chunk, topology.lanes() - 1, topology.lanes()).len());
        let (sums, means) = (HostMemory::new(context, PLACES * room)?, HostMemory::new(context, PLACES * chunk)?);
        let (free, summed, flights) = Default::default();
        Ok(Some(Driver { lane, sums, room, means, chunk, free, summed, flights }))
    }

    fn sums_address(&self, chunk: usize) -> Address {
        self.sums.address() + (chunk % PLACES * self.room) as Address
    }

    fn means_address(&self, chunk: usize) -> Address {
        self.means.address() + (chunk % PLACES * self.chunk) as Address
    }

    /// Calls `work` with what the network is to do with the own slice of `chunk`.
    fn with_slice<T>(&self, call: &Call<'_>, chunk: usize, work: impl FnOnce(&Slice<'_>) -> Result<T>) -> Result<T> {
        let place = chunk % PLACES;
        let bytes = call.slice(chunk, self.lane);
        // Everything that a lane looks for in a slot, its own or another's, is with the means.
        let means = self.means.memory().wrapping_add(place * self.chunk);
        let slots: PerRank<*mut u8> = smallvec![means; call.topology.local_size()];
        let lane = Lane { topology: call.topology, chunk, slots: &slots };
        let sums = self.sums.memory().wrapping_add(place * self.room);
        let summed = Summed { sums, slice: bytes.clone() };
        let collective: &dyn Between = match call.job.op {
            Op::Average => &summed,
            op => op.collective(),
        };
        // The same on all hosts, and another one for each chunk under way.
        let step = call.first_step.wrapping_add(chunk as u32);
        work(&Slice { collective, job: call.job, lane, bytes, step })
    }
}

/// A call under way.
struct Call<'a> {
    job: &'a Job,
    topology: &'a Topology,
    /// The local rank on this host that a broadcast is from.
    root: Option<usize>,
    first_step: u32,
}

impl Call<'_> {
    fn pieces(&self, chunk: usize) -> impl Iterator<Item = crate::plan::Piece> {
        self.job.plan.pieces(chunk, 0..self.job.plan.chunk_len(chunk))
    }

    fn slice(&self, chunk: usize, lane: usize) -> Range<usize> {
        lane_slice(self.topology, self.job, chunk, lane)
    }

    /// Whether local rank `me` is where the values of a broadcast come from.
    fn is_here(&self, me: usize) -> bool {
        self.root == Some(me)
    }

    fn brings(&self, me: usize) -> bool {
        self.job.op == Op::Average || self.is_here(me)
    }
}

/// An average whose sums over the ranks of this host are there.
struct Summed {
    /// Of the slice, as [`parts`] lays them out.
    sums: *const u8,
    slice: Range<usize>,
}

// SAFETY: an address in memory that may be used from any thread.
unsafe impl Sync for Summed {}

impl Between for Summed {
    fn carried(&self, job: &Job, chunk: usize, piece: Range<usize>) -> usize {
        Average.carried(job, chunk, piece)
    }

    unsafe fn contribute(&self, job: &Job, lane: &Lane<'_>, piece: Range<usize>, out: &mut [u8]) -> bool {
        let skipped = Average.carried(job, lane.chunk, self.slice.start..piece.start);
        let out = &mut out[..Average.carried(job, lane.chunk, piece)];
        // SAFETY: the sums of the whole slice are there, and nobody writes to them; those of pieces lie side by side.
        unsafe { self.sums.add(skipped).copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
        true
    }

    unsafe fn merge(&self, job: &Job, lane: &Lane<'_>, piece: Range<usize>, low: Part, high: Part, out: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { Average.merge(job, lane, piece, low, high, out) };
    }

    unsafe fn complete(&self, job: &Job, lane: &Lane<'_>, piece: Range<usize>, low: Part, high: Part) {
        // SAFETY: the caller's promise; the means are this lane's slot.
        unsafe { Average.complete(job, lane, piece, low, high) };
    }
}
