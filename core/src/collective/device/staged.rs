//! Collectives on device memory through host memory. For each chunk: download from the GPU, run it as a call on host
//! memory, upload. Other chunks move in both directions meanwhile.
//!
//! The host memory is pinned and shared with the other ranks of the host, so the collective copies nothing. If a chunk
//! has many small tensors, a kernel packs them in device memory first: a separate copy for each would cost more.
//! Thread rule: used by one thread.

use std::sync::Arc;

use super::batch::Launcher;
use super::settings::DeviceSettings;
use super::streams::{
    TEARDOWN_TIMEOUT, is_idle, poll_until, producer, signal_outputs, wait_event, wait_inputs, wait_taken,
};
use crate::collective::call::Call;
use crate::collective::channel::Channel;
use crate::error::{Error, Result};
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, Context, DeviceBuffer, Event, Handle, PinnedHostBuffer, Stream};
use crate::transport::peer_memory::PeerMemory;

/// Number of chunks that are downloaded ahead.
const PREFETCH_CHUNKS: usize = 2;
/// Number of chunk buffers; as many chunks may be in upload.
const NUM_BUFFERS: usize = 2 * PREFETCH_CHUNKS;

/// Chunks of more ranges are packed.
const MIN_TO_PACK: usize = 4;

/// The direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    DeviceToHost,
    HostToDevice,
}

/// Packs a thread's chunks in device memory.
struct Packer {
    memory: DeviceBuffer,
    launcher: Launcher,
}

/// Pinned host memory, shared with the other ranks if possible. The order of the fields unpins it before it is freed.
struct PinnedBuffer {
    pinned: PinnedHostBuffer,
    _shared: Option<SharedAllocation>,
}

/// Memory of the rank's arena, freed on drop.
struct SharedAllocation {
    arena: Arc<dyn PeerMemory>,
    memory: Handle<u8>,
}

impl PinnedBuffer {
    fn new(channel: &Channel, context: &Arc<Context>, len: usize) -> Result<PinnedBuffer> {
        let own = || Ok(PinnedBuffer { pinned: PinnedHostBuffer::new(context, len)?, _shared: None });
        PinnedBuffer::shared(channel, context, len).map_or_else(own, Ok)
    }

    /// `None` if there is no shared memory or it cannot be pinned, as in files outside tmpfs. The collective then
    /// copies.
    fn shared(channel: &Channel, context: &Arc<Context>, len: usize) -> Option<PinnedBuffer> {
        let arena = channel.region().shared_peer_memory()?;
        // Whole pages: smaller allocations would share one.
        let len = len.max(4096);
        let memory = arena.alloc_zeroed(len).ok()?;
        let shared = SharedAllocation { arena, memory: Handle(memory) };
        // SAFETY: freed only after it is unpinned.
        let pinned = unsafe { PinnedHostBuffer::register(context, memory, len) }.ok()?;
        Some(PinnedBuffer { pinned, _shared: Some(shared) })
    }
}

impl Drop for SharedAllocation {
    fn drop(&mut self) {
        // SAFETY: allocated by `arena`, and not used again.
        unsafe { self.arena.free_zeroed(self.memory.0) };
    }
}

/// A thread's pipeline between a GPU and host memory.
pub struct StagingPipeline {
    context: Arc<Context>,
    settings: DeviceSettings,
    memory: PinnedBuffer,
    /// By buffer: the upload that still reads it.
    busy_until: [Option<Event>; NUM_BUFFERS],
    download_streams: Vec<Stream>,
    upload_streams: Vec<Stream>,
    /// Created when there is something to pack and the kernels are available.
    packer: Option<Packer>,
}

impl StagingPipeline {
    /// A pipeline for calls on the GPU of `context`, over `channel`.
    pub fn new(channel: &Channel, context: &Arc<Context>, settings: DeviceSettings) -> Result<StagingPipeline> {
        let _guard = context.push()?;
        let streams = || (0..settings.streams).map(|_| Stream::new(context)).collect::<Result<Vec<_>>>();
        Ok(StagingPipeline {
            context: Arc::clone(context),
            settings,
            memory: PinnedBuffer::new(channel, context, NUM_BUFFERS * settings.chunk)?,
            busy_until: Default::default(),
            download_streams: streams()?,
            upload_streams: streams()?,
            packer: None,
        })
    }

    /// Runs these chunks of a call on which all ranks agree.
    pub fn run(
        &mut self,
        channel: &mut Channel,
        call: &Call,
        chunks: impl Iterator<Item = usize>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        let context = Arc::clone(&self.context);
        let _guard = context.push()?;
        let done = self.run_all(channel, call, chunks.collect(), wait_ctx);
        // Also after a failure: copies may still access tensors that the caller then frees.
        let ends: Vec<Event> = self
            .upload_streams
            .iter()
            .chain(&self.download_streams)
            .map(|stream| signal_outputs(call, stream))
            .collect::<Result<_>>()?;
        if done.is_ok() && producer(call)?.blocks_host() {
            return ends.iter().try_for_each(|end| wait_event(end, wait_ctx));
        }
        done
    }

    /// After a failure: waits for the copies, at most `TEARDOWN_TIMEOUT` per stream.
    pub fn drain(&self) {
        if let Ok(_guard) = self.context.push() {
            let _or_not = self.upload_streams.iter().chain(&self.download_streams).all(is_idle);
        }
    }

    fn run_all(
        &mut self,
        channel: &mut Channel,
        call: &Call,
        chunks: Vec<usize>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        // Uploads overwrite tensors that earlier kernels may still read.
        self.download_streams.iter().chain(&self.upload_streams).try_for_each(|stream| wait_inputs(call, stream))?;
        let rank = channel.topology.rank();
        let has_input = call.op.has_input(rank);
        let needs_result = !call.op.is_broadcast() || !has_input || !call.is_in_place();
        let mut downloaded: [Option<Event>; NUM_BUFFERS] = Default::default();
        let mut started = 0;
        for (index, &chunk) in chunks.iter().enumerate() {
            while started < chunks.len() && started < index + PREFETCH_CHUNKS {
                let buffer = started % NUM_BUFFERS;
                wait_taken(&mut self.busy_until[buffer], wait_ctx)?;
                if has_input {
                    downloaded[buffer] =
                        Some(self.start_copy(call, chunks[started], started, Direction::DeviceToHost, wait_ctx)?);
                }
                started += 1;
            }
            let buffer = index % NUM_BUFFERS;
            wait_taken(&mut downloaded[buffer], wait_ctx)?;
            let host_call = call.chunk_call(chunk, self.buffer(index));
            if !channel.run_first_chunk(&host_call, wait_ctx)? {
                return Err(Error::Internal(format!("ranks out of sync in chunk {chunk} of {}", call.full_name())));
            }
            // A chunk may be longer than a slot, unless the first round has moved all of it in place.
            let plan = channel.plan();
            if plan.chunks(&host_call) > 1 {
                channel.run_chunks(&host_call, 1..plan.chunks(&host_call), plan, wait_ctx)?;
            }
            if needs_result {
                self.busy_until[buffer] =
                    Some(self.start_copy(call, chunk, index, Direction::HostToDevice, wait_ctx)?);
            }
        }
        Ok(())
    }

    fn buffer(&self, index: usize) -> *mut u8 {
        self.memory.pinned.memory().wrapping_add(index % NUM_BUFFERS * self.settings.chunk)
    }

    /// Whether kernels for packing are available; allocates the memory for it.
    fn can_pack(&mut self) -> Result<bool> {
        if self.packer.is_none() && self.context.kernels().is_ok() {
            let memory = DeviceBuffer::new(&self.context, NUM_BUFFERS * self.settings.chunk)?;
            self.packer = Some(Packer { memory, launcher: Launcher::new(&self.context) });
        }
        Ok(self.packer.is_some())
    }

    /// Starts the copy of a chunk in this direction.
    fn start_copy(
        &mut self,
        call: &Call,
        chunk: usize,
        index: usize,
        direction: Direction,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Event> {
        let (buffer, len) = (self.buffer(index), call.layout.chunk_len(chunk));
        let pieces = || call.layout.ranges(chunk, 0..len);
        let use_packer = pieces().nth(MIN_TO_PACK).is_some() && self.can_pack()?;
        let streams = if direction == Direction::DeviceToHost { &self.download_streams } else { &self.upload_streams };
        let stream = &streams[index % streams.len()];
        let copy = |at: usize, address: Address, len: usize| {
            let memory = buffer.wrapping_add(at);
            // SAFETY: the call owns the tensors. Download: nothing reads the buffer any more. Upload: the buffer is
            // rewritten only after the copy has completed.
            unsafe {
                match direction {
                    Direction::DeviceToHost => stream.download(memory, address, len),
                    Direction::HostToDevice => stream.upload(address, memory, len),
                }
            }
        };
        match &mut self.packer {
            Some(Packer { memory, launcher }) if use_packer => {
                let packed = memory.address() + (index % NUM_BUFFERS * self.settings.chunk) as Address;
                launcher.batch.copies(pieces(), call.tensors(0), len, packed, direction == Direction::HostToDevice);
                // SAFETY: as above; the packed chunk belongs to this chunk, as its buffer does.
                let mut pack = || unsafe { launcher.copy(stream, wait_ctx) };
                match direction {
                    Direction::DeviceToHost => pack().and_then(|()| copy(0, packed, len))?,
                    Direction::HostToDevice => copy(0, packed, len).and_then(|()| pack())?,
                }
            }
            _ => {
                for piece in pieces() {
                    let buffer = &call.tensors(0)[piece.tensor].buffer;
                    let size = buffer.dtype().size();
                    let (read, written) = buffer.byte_ranges();
                    let start = if direction == Direction::DeviceToHost { read.start } else { written.start };
                    copy(piece.offset, (start + piece.first * size) as Address, piece.count * size)?;
                }
            }
        }
        stream.record()
    }
}

impl Drop for StagingPipeline {
    /// Pending uploads still read the memory, which is about to be freed.
    fn drop(&mut self) {
        let Ok(_guard) = self.context.push() else { return };
        poll_until(TEARDOWN_TIMEOUT, || {
            self.busy_until.iter().flatten().all(|event| event.is_complete().unwrap_or(true))
        });
    }
}
