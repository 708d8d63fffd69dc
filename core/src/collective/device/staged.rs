//! Averages of device memory through host memory: a chunk comes down from the GPU, the ranks average it as any call on host
//! memory, and it goes up again, while other chunks are on their way in both directions.
//!
//! The host memory is pinned, and the other ranks of the host see it, so the average copies nothing. Where a chunk is made of many
//! small tensors, a kernel packs them in device memory first: a copy of its own for each would cost more.
//! Thread rule: used by one thread.

use std::sync::Arc;

use super::batch::{Batch, UploadRing};
use super::poll::{TEARDOWN_TIMEOUT, is_idle, poll_until, wait_event};
use super::settings::DeviceSettings;
use super::streams::{producer, signal_outputs, wait_inputs};
use crate::collective::call::{Call, Op};
use crate::collective::channel::Channel;
use crate::error::{Error, Result};
use crate::transport::WaitContext;
use crate::transport::arena::PeerMemory;
use crate::transport::gpu::{Address, Context, DeviceBuffer, Event, HostRegistration, PinnedHostBuffer, Stream};

/// Chunks that are on their way down before their turn.
const PREFETCH_CHUNKS: usize = 2;
/// Places for chunks: as many again may be on their way up.
const NUM_BUFFERS: usize = 2 * PREFETCH_CHUNKS;

/// Chunks of more pieces are packed.
const MIN_TO_PACK: usize = 4;

/// From the GPU to the host, and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    DeviceToHost,
    HostToDevice,
}

/// What packs a thread's chunks in device memory.
struct Packer {
    memory: DeviceBuffer,
    batch: Batch,
    table: UploadRing,
}

/// Pinned host memory: that which other ranks see, or, where there is none, the rank's own.
enum PinnedBuffer {
    Shared { pinned: Option<HostRegistration>, memory: *mut u8, shared: Arc<dyn PeerMemory> },
    Own(PinnedHostBuffer),
}

// SAFETY: addresses; the memory may be used from any thread.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    fn new(channel: &Channel, context: &Arc<Context>, len: usize) -> Result<PinnedBuffer> {
        match PinnedBuffer::shared(channel, context, len) {
            Some(shared) => Ok(shared),
            None => PinnedHostBuffer::new(context, len).map(PinnedBuffer::Own),
        }
    }

    /// `None` where there is none, or it cannot be pinned (memory of a file system that is none of memory, say): the average
    /// copies then.
    fn shared(channel: &Channel, context: &Arc<Context>, len: usize) -> Option<PinnedBuffer> {
        let shared = channel.shm.region().peer_memory_arc()?;
        // Pages, of which pieces that are too small for one would share some.
        let len = len.max(4096);
        let memory = shared.alloc_zeroed(len).ok()?;
        // SAFETY: it is given back when it is not pinned any more.
        let pinned = unsafe { HostRegistration::new(context, memory, len) }.ok();
        let pins = pinned.is_some();
        // Without a pin it is given back here.
        Some(PinnedBuffer::Shared { pinned, memory, shared }).filter(|_| pins)
    }

    fn start(&self) -> *mut u8 {
        match self {
            PinnedBuffer::Shared { memory, .. } => *memory,
            PinnedBuffer::Own(own) => own.memory(),
        }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let PinnedBuffer::Shared { pinned, memory, shared } = self {
            *pinned = None;
            // SAFETY: taken by `new`, and used no more.
            unsafe { shared.free_zeroed(*memory) };
        }
    }
}

/// A thread's way between a GPU and host memory.
pub struct StagingPipeline {
    context: Arc<Context>,
    settings: DeviceSettings,
    memory: PinnedBuffer,
    /// What still reads a place, by place.
    busy_until: [Option<Event>; NUM_BUFFERS],
    down: Vec<Stream>,
    up: Vec<Stream>,
    /// Once there was something to pack, and kernels to do it with.
    packer: Option<Packer>,
}

impl StagingPipeline {
    /// A way for calls on the GPU of `context`, over `channel`.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn new(channel: &Channel, context: &Arc<Context>, settings: DeviceSettings) -> Result<StagingPipeline> {
        let _entered = context.push()?;
        let streams = || (0..settings.streams).map(|_| Stream::new(context)).collect::<Result<Vec<_>>>();
        Ok(StagingPipeline {
            context: Arc::clone(context),
            settings,
            memory: PinnedBuffer::new(channel, context, NUM_BUFFERS * settings.chunk)?,
            busy_until: Default::default(),
            down: streams()?,
            up: streams()?,
            packer: None,
        })
    }

    /// Carries these chunks of a call on which all ranks agree.
    ///
    /// # Errors
    /// Those of the driver and of the transports; the ranks are then out of step.
    pub fn run(
        &mut self,
        channel: &mut Channel,
        call: &Call,
        chunks: impl Iterator<Item = usize>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        let context = Arc::clone(&self.context);
        let _entered = context.push()?;
        let done = self.run_all(channel, call, chunks.collect(), wait_ctx);
        // After a failure too: copies may be on their way to tensors that the caller then frees.
        let ends: Vec<Event> =
            self.up.iter().chain(&self.down).map(|stream| signal_outputs(call, stream)).collect::<Result<_>>()?;
        if done.is_ok() && producer(call)?.blocks_host() {
            return ends.iter().try_for_each(|end| wait_event(end, wait_ctx));
        }
        done
    }

    /// After a failure: waits a while until nothing is on its way.
    pub fn drain(&self) {
        if let Ok(_entered) = self.context.push() {
            let _or_not = self.up.iter().chain(&self.down).all(is_idle);
        }
    }

    fn run_all(
        &mut self,
        channel: &mut Channel,
        call: &Call,
        chunks: Vec<usize>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        // What goes up overwrites what the tensors' makers may still read.
        self.down.iter().chain(&self.up).try_for_each(|stream| wait_inputs(call, stream))?;
        let rank = channel.topology.rank();
        let (brings, takes) = match call.op {
            Op::Broadcast { root } => (root == rank, root != rank || !call.is_in_place()),
            Op::Allreduce | Op::Barrier => (true, true),
        };
        let mut arrived: [Option<Event>; NUM_BUFFERS] = Default::default();
        let mut fetched = 0;
        for (turn, &chunk) in chunks.iter().enumerate() {
            while fetched < chunks.len() && fetched < turn + PREFETCH_CHUNKS {
                let place = fetched % NUM_BUFFERS;
                if let Some(event) = self.busy_until[place].take() {
                    wait_event(&event, wait_ctx)?;
                }
                if brings {
                    arrived[place] =
                        Some(self.send(call, chunks[fetched], fetched, Direction::DeviceToHost, wait_ctx)?);
                }
                fetched += 1;
            }
            let place = turn % NUM_BUFFERS;
            if let Some(event) = arrived[place].take() {
                wait_event(&event, wait_ctx)?;
            }
            let part = call.chunk_call(chunk, self.place(turn));
            if !channel.run_first_chunk(&part, wait_ctx)? {
                return Err(Error::Internal(format!("ranks out of sync in chunk {chunk} of {}", call.full_name())));
            }
            if part.layout.chunks() > 1 {
                // A chunk may be longer than a slot.
                channel.run_chunks(&part, 1..part.layout.chunks(), channel.is_zero_copy(), wait_ctx)?;
            }
            if takes {
                self.busy_until[place] = Some(self.send(call, chunk, turn, Direction::HostToDevice, wait_ctx)?);
            }
        }
        Ok(())
    }

    fn place(&self, turn: usize) -> *mut u8 {
        self.memory.start().wrapping_add(turn % NUM_BUFFERS * self.settings.chunk)
    }

    /// Whether there are kernels to pack with; takes the memory for it.
    fn can_pack(&mut self) -> Result<bool> {
        if self.packer.is_none() && self.context.kernels().is_ok() {
            let memory = DeviceBuffer::new(&self.context, NUM_BUFFERS * self.settings.chunk)?;
            self.packer = Some(Packer { memory, batch: Batch::default(), table: UploadRing::new(&self.context) });
        }
        Ok(self.packer.is_some())
    }

    /// Starts a chunk's way in this direction.
    fn send(
        &mut self,
        call: &Call,
        chunk: usize,
        turn: usize,
        way: Direction,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Event> {
        let (place, len) = (self.place(turn), call.layout.chunk_len(chunk));
        let pieces = || call.layout.ranges(chunk, 0..len);
        let packs = pieces().nth(MIN_TO_PACK).is_some() && self.can_pack()?;
        let streams = if way == Direction::DeviceToHost { &self.down } else { &self.up };
        let stream = &streams[turn % streams.len()];
        let copy = |at: usize, address: Address, len: usize| {
            let memory = place.wrapping_add(at);
            // SAFETY: the tensors are the call's. Down: nothing reads the place any more; up: it is written again when this is
            // done.
            unsafe {
                match way {
                    Direction::DeviceToHost => stream.download(memory, address, len),
                    Direction::HostToDevice => stream.upload(address, memory, len),
                }
            }
        };
        match &mut self.packer {
            Some(Packer { memory, batch, table }) if packs => {
                let packed = memory.address() + (turn % NUM_BUFFERS * self.settings.chunk) as Address;
                batch.copies(pieces(), call.tensors(0), len, packed, way == Direction::HostToDevice);
                // SAFETY: as above; the packed chunk is this turn's, as its place is.
                let pack = |table: &mut UploadRing| unsafe { table.copy(batch, stream, wait_ctx) };
                match way {
                    Direction::DeviceToHost => pack(table).and_then(|()| copy(0, packed, len))?,
                    Direction::HostToDevice => copy(0, packed, len).and_then(|()| pack(table))?,
                }
            }
            _ => {
                for piece in pieces() {
                    let buffer = &call.tensors(0)[piece.tensor].buffer;
                    let size = buffer.dtype().size();
                    let (read, written) = buffer.byte_ranges();
                    let start = if way == Direction::DeviceToHost { read.start } else { written.start };
                    copy(piece.offset, (start + piece.first * size) as Address, piece.count * size)?;
                }
            }
        }
        stream.record()
    }
}

impl Drop for StagingPipeline {
    /// What is on its way up still reads the memory, which goes to others.
    fn drop(&mut self) {
        let Ok(_entered) = self.context.push() else { return };
        poll_until(TEARDOWN_TIMEOUT, || {
            self.busy_until.iter().flatten().all(|event| event.is_complete().unwrap_or(true))
        });
    }
}
