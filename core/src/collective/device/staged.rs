//! Averages of device memory through host memory: a chunk comes down from the GPU, the ranks average it as any call on host
//! memory, and it goes up again, while other chunks are on their way in both directions.
//!
//! The host memory is pinned, and the other ranks of the host see it, so the average copies nothing. Where a chunk is made of many
//! small tensors, a kernel packs them in device memory first: a copy of its own for each would cost more.
//! Thread rule: used by one thread.

use std::sync::Arc;

use super::super::{Channel, Job, Op};
use super::batch::{Batch, Table};
use super::{DeviceSettings, LAST, await_event, begin, end, has_ended, producer, within};
use crate::error::{Error, Result};
use crate::transport::Patience;
use crate::transport::arena::Shared;
use crate::transport::cuda::{Address, Context, DeviceMemory, Event, HostMemory, Pinned, Stream};

/// Chunks that are on their way down before their turn.
const AHEAD: usize = 2;
/// Places for chunks: as many again may be on their way up.
const PLACES: usize = 2 * AHEAD;

/// Chunks of more pieces are packed.
const FEW: usize = 4;

/// From the GPU to the host, and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Down,
    Up,
}

/// What packs a thread's chunks in device memory.
struct Packer {
    memory: DeviceMemory,
    batch: Batch,
    table: Table,
}

/// Pinned host memory: that which other ranks see, or, where there is none, the rank's own.
enum Memory {
    Shared { pinned: Option<Pinned>, memory: *mut u8, shared: Arc<dyn Shared> },
    Own(HostMemory),
}

// SAFETY: addresses; the memory may be used from any thread.
unsafe impl Send for Memory {}

impl Memory {
    fn new(channel: &Channel, context: &Arc<Context>, len: usize) -> Result<Memory> {
        match Memory::shared(channel, context, len) {
            Some(shared) => Ok(shared),
            None => HostMemory::new(context, len).map(Memory::Own),
        }
    }

    /// `None` where there is none, or it cannot be pinned (memory of a file system that is none of memory, say): the average
    /// copies then.
    fn shared(channel: &Channel, context: &Arc<Context>, len: usize) -> Option<Memory> {
        let shared = channel.node.node().shared_memory()?;
        // Pages, of which pieces that are too small for one would share some.
        let len = len.max(4096);
        let memory = shared.take(len).ok()?;
        // SAFETY: it is given back when it is not pinned any more.
        let pinned = unsafe { Pinned::new(context, memory, len) }.ok();
        let pins = pinned.is_some();
        // Without a pin it is given back here.
        Some(Memory::Shared { pinned, memory, shared }).filter(|_| pins)
    }

    fn start(&self) -> *mut u8 {
        match self {
            Memory::Shared { memory, .. } => *memory,
            Memory::Own(own) => own.memory(),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Memory::Shared { pinned, memory, shared } = self {
            *pinned = None;
            // SAFETY: taken by `new`, and used no more.
            unsafe { shared.give(*memory) };
        }
    }
}

/// A thread's way between a GPU and host memory.
pub struct Stager {
    context: Arc<Context>,
    settings: DeviceSettings,
    memory: Memory,
    /// What still reads a place, by place.
    left: [Option<Event>; PLACES],
    down: Vec<Stream>,
    up: Vec<Stream>,
    /// Once there was something to pack, and kernels to do it with.
    packer: Option<Packer>,
}

impl Stager {
    /// A way for calls on the GPU of `context`, over `channel`.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn new(channel: &Channel, context: &Arc<Context>, settings: DeviceSettings) -> Result<Stager> {
        let _entered = context.enter()?;
        let streams = || (0..settings.streams).map(|_| Stream::new(context)).collect::<Result<Vec<_>>>();
        Ok(Stager {
            context: Arc::clone(context),
            settings,
            memory: Memory::new(channel, context, PLACES * settings.chunk)?,
            left: Default::default(),
            down: streams()?,
            up: streams()?,
            packer: None,
        })
    }

    /// Carries these chunks of a call on which all ranks agree.
    ///
    /// # Errors
    /// Those of the driver and of the transports; the ranks are then out of step.
    pub fn carry(
        &mut self,
        channel: &mut Channel,
        job: &Job,
        chunks: impl Iterator<Item = usize>,
        patience: &Patience<'_>,
    ) -> Result<()> {
        let context = Arc::clone(&self.context);
        let _entered = context.enter()?;
        let done = self.carry_all(channel, job, chunks.collect(), patience);
        // After a failure too: copies may be on their way to tensors that the caller then frees.
        let ends: Vec<Event> =
            self.up.iter().chain(&self.down).map(|stream| end(job, stream)).collect::<Result<_>>()?;
        if done.is_ok() && producer(job)?.waits() {
            return ends.iter().try_for_each(|end| await_event(end, patience));
        }
        done
    }

    /// After a failure: waits a while until nothing is on its way.
    pub fn rest(&self) {
        if let Ok(_entered) = self.context.enter() {
            let _or_not = self.up.iter().chain(&self.down).all(has_ended);
        }
    }

    fn carry_all(
        &mut self,
        channel: &mut Channel,
        job: &Job,
        chunks: Vec<usize>,
        patience: &Patience<'_>,
    ) -> Result<()> {
        // What goes up overwrites what the tensors' makers may still read.
        self.down.iter().chain(&self.up).try_for_each(|stream| begin(job, stream))?;
        let rank = channel.topology.rank();
        let (brings, takes) = match job.op {
            Op::Broadcast { root } => (root == rank, root != rank || !job.is_in_place()),
            Op::Average | Op::Barrier => (true, true),
        };
        let mut arrived: [Option<Event>; PLACES] = Default::default();
        let mut fetched = 0;
        for (turn, &chunk) in chunks.iter().enumerate() {
            while fetched < chunks.len() && fetched < turn + AHEAD {
                let place = fetched % PLACES;
                if let Some(event) = self.left[place].take() {
                    await_event(&event, patience)?;
                }
                if brings {
                    arrived[place] = Some(self.send(job, chunks[fetched], fetched, Way::Down, patience)?);
                }
                fetched += 1;
            }
            let place = turn % PLACES;
            if let Some(event) = arrived[place].take() {
                await_event(&event, patience)?;
            }
            let part = job.staged(chunk, self.place(turn));
            if !channel.first(&part, patience)? {
                return Err(Error::Internal(format!("the ranks lost step in chunk {chunk} of {}", job.title())));
            }
            if part.plan.chunks() > 1 {
                // A chunk may be longer than a slot.
                channel.rest(&part, 1..part.plan.chunks(), channel.is_direct(), patience)?;
            }
            if takes {
                self.left[place] = Some(self.send(job, chunk, turn, Way::Up, patience)?);
            }
        }
        Ok(())
    }

    fn place(&self, turn: usize) -> *mut u8 {
        self.memory.start().wrapping_add(turn % PLACES * self.settings.chunk)
    }

    /// Whether there are kernels to pack with; takes the memory for it.
    fn can_pack(&mut self) -> Result<bool> {
        if self.packer.is_none() && self.context.kernels().is_ok() {
            let memory = DeviceMemory::new(&self.context, PLACES * self.settings.chunk)?;
            self.packer = Some(Packer { memory, batch: Batch::default(), table: Table::new(&self.context) });
        }
        Ok(self.packer.is_some())
    }

    /// Starts a chunk's way in this direction.
    fn send(&mut self, job: &Job, chunk: usize, turn: usize, way: Way, patience: &Patience<'_>) -> Result<Event> {
        let (place, len) = (self.place(turn), job.plan.chunk_len(chunk));
        let pieces = || job.plan.pieces(chunk, 0..len);
        let packs = pieces().nth(FEW).is_some() && self.can_pack()?;
        let streams = if way == Way::Down { &self.down } else { &self.up };
        let stream = &streams[turn % streams.len()];
        let copy = |at: usize, address: Address, len: usize| {
            let memory = place.wrapping_add(at);
            // SAFETY: the tensors are the call's. Down: nothing reads the place any more; up: it is written again when this is
            // done.
            unsafe {
                match way {
                    Way::Down => stream.download(memory, address, len),
                    Way::Up => stream.upload(address, memory, len),
                }
            }
        };
        match &mut self.packer {
            Some(Packer { memory, batch, table }) if packs => {
                let packed = memory.address() + (turn % PLACES * self.settings.chunk) as Address;
                batch.copies(pieces(), job.tensors(0), len, packed, way == Way::Up);
                // SAFETY: as above; the packed chunk is this turn's, as its place is.
                let pack = |table: &mut Table| unsafe { table.copy(batch, stream, patience) };
                match way {
                    Way::Down => pack(table).and_then(|()| copy(0, packed, len))?,
                    Way::Up => copy(0, packed, len).and_then(|()| pack(table))?,
                }
            }
            _ => {
                for piece in pieces() {
                    let buffer = &job.tensors(0)[piece.tensor].buffer;
                    let size = buffer.dtype().size();
                    let (read, written) = buffer.spans();
                    let start = if way == Way::Down { read.start } else { written.start };
                    copy(piece.offset, (start + piece.first * size) as Address, piece.count * size)?;
                }
            }
        }
        stream.record()
    }
}

impl Drop for Stager {
    /// What is on its way up still reads the memory, which goes to others.
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        within(LAST, || self.left.iter().flatten().all(|event| event.has_come().unwrap_or(true)));
    }
}
