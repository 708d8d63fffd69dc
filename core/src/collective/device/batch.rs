//! The work of kernels: pieces of tensors cut into items, and the memory in which a GPU finds them.
//!
//! Short lists travel with the kernels, as parameters. Others are made in host memory that stays, and uploaded before the
//! kernels that read them; a few places are used in turn, so that the host need not wait for the GPU.
//! Thread rule: one user at a time.

use std::sync::Arc;

use super::poll::wait_event;
use crate::buffer::Tensor;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, BlockRange, Context, DeviceBuffer, Event, KernelArgs, PinnedHostBuffer, Stream};
use crate::wire_layout::TensorRange;

/// Elements of one type that one kernel takes.
struct LaunchGroup {
    dtype: DType,
    items: std::ops::Range<usize>,
}

/// Work for kernels, of equally many sources and targets in each piece.
#[derive(Default)]
pub(super) struct Batch {
    items: Vec<BlockRange>,
    sources: Vec<Address>,
    targets: Vec<Address>,
    groups: Vec<LaunchGroup>,
    pieces: u32,
    /// How many sources and targets a piece has.
    shape: (usize, usize),
    /// The most bytes of an item.
    item: usize,
}

/// What a block moves at least at a time, in bytes: two vectors for each of its threads.
const MIN_ITEM_BYTES: usize = 8 << 10;
/// As many items as keep a GPU busy: for 132 multiprocessors with three blocks each, nearly four items for every block, so that
/// none waits long for the last ones.
const TARGET_ITEMS: usize = 1536;

impl Batch {
    /// Starts anew, for pieces with so many sources and targets, of `bytes` together.
    pub fn start(&mut self, sources: usize, targets: usize, bytes: usize) {
        self.shape = (sources, targets);
        self.item = (bytes / TARGET_ITEMS).next_multiple_of(MIN_ITEM_BYTES).max(MIN_ITEM_BYTES);
        self.items.clear();
        self.sources.clear();
        self.targets.clear();
        self.groups.clear();
        self.pieces = 0;
    }

    /// Adds `count` elements of `dtype` that begin at these addresses.
    pub fn add(
        &mut self,
        dtype: DType,
        count: usize,
        sources: impl IntoIterator<Item = Address>,
        targets: impl IntoIterator<Item = Address>,
    ) {
        self.sources.extend(sources);
        self.targets.extend(targets);
        let start = self.items.len();
        let longest = (self.item / dtype.size()).min(BlockRange::MAX_ELEMENTS);
        for first in (0..count).step_by(longest) {
            let count = (count - first).min(longest) as u32;
            self.items.push(BlockRange { first: first as u64, piece: self.pieces, count });
        }
        self.pieces += 1;
        let end = self.items.len();
        match self.groups.last_mut() {
            Some(group) if group.dtype == dtype => group.items.end = end,
            _ => self.groups.push(LaunchGroup { dtype, items: start..end }),
        }
    }

    /// Starts anew with copies of `pieces` of `tensors`, of `bytes` together, to `memory`, where they lie as on the wire, or,
    /// `back`, from there.
    pub fn copies(
        &mut self,
        pieces: impl Iterator<Item = TensorRange>,
        tensors: &[Tensor],
        bytes: usize,
        memory: Address,
        back: bool,
    ) {
        self.start(1, 1, bytes);
        for piece in pieces {
            let buffer = &tensors[piece.tensor].buffer;
            let size = buffer.dtype().size();
            let (read, written) = buffer.byte_ranges();
            let start = if back { written.start } else { read.start };
            let (tensor, there) = ((start + piece.first * size) as Address, memory + piece.offset as Address);
            let (from, to) = if back { (there, tensor) } else { (tensor, there) };
            self.add(DType::U8, piece.count * size, [from], [to]);
        }
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    fn bytes(&self) -> usize {
        self.items.len() * size_of::<BlockRange>() + (self.sources.len() + self.targets.len()) * size_of::<Address>()
    }

    /// Where each list begins, in bytes, when one comes after the other.
    fn starts(&self) -> [usize; 3] {
        let sources = self.items.len() * size_of::<BlockRange>();
        [0, sources, sources + self.sources.len() * size_of::<Address>()]
    }

    /// Writes the lists, one after the other.
    ///
    /// # Safety
    /// There is room for [`Batch::bytes`] at `to`, and nobody else looks there.
    unsafe fn write(&self, to: *mut u8) {
        let lists: [(*const u8, usize); 3] = [
            (self.items.as_ptr().cast(), size_of_val(&self.items[..])),
            (self.sources.as_ptr().cast(), size_of_val(&self.sources[..])),
            (self.targets.as_ptr().cast(), size_of_val(&self.targets[..])),
        ];
        for (start, (list, len)) in self.starts().into_iter().zip(lists) {
            // SAFETY: the caller's promise.
            unsafe { to.add(start).copy_from_nonoverlapping(list, len) };
        }
    }

    /// What all its kernels are given, but for their items; with the lists, where they fit.
    fn work(&self, divisor: u32, stop: Address, blocks: u32) -> Result<KernelArgs> {
        let number = |value: usize| {
            u32::try_from(value).map_err(|_| Error::Internal("the lists of a call are too long for a kernel".into()))
        };
        let [_, sources, targets] = self.starts();
        let mut work = KernelArgs {
            lists: 0,
            stop,
            items: 0,
            sources: number(sources)?,
            targets: number(targets)?,
            nitems: 0,
            nsources: number(self.shape.0)?,
            ntargets: number(self.shape.1)?,
            divisor,
            blocks,
            table: [0; KernelArgs::TABLE],
        };
        number(self.bytes())?;
        if self.fits() {
            // SAFETY: the table is as long, and this function's.
            unsafe { self.write(work.table.as_mut_ptr().cast()) };
        }
        Ok(work)
    }

    /// Whether the lists can travel with a kernel.
    fn fits(&self) -> bool {
        self.bytes() <= KernelArgs::TABLE * size_of::<u64>()
    }
}

/// Places of the table, used in turn.
const NUM_BUFFERS: usize = 4;
/// What a place has at least.
const MIN_BUFFER_BYTES: usize = 64 << 10;

/// A place for the lists of a batch.
struct UploadBuffer {
    host: PinnedHostBuffer,
    device: DeviceBuffer,
    /// When the kernels that read it are done.
    free: Option<Event>,
}

/// Where GPUs find batches.
pub(super) struct UploadRing {
    context: Arc<Context>,
    buffers: Vec<UploadBuffer>,
    next: usize,
    /// See [`UploadRing::stopped_by`]; 0 without.
    stop: Address,
    /// See [`UploadRing::limited_to`]; 0 without.
    blocks: u32,
}

impl UploadRing {
    /// A table that takes memory when it is used.
    pub fn new(context: &Arc<Context>) -> UploadRing {
        UploadRing { context: Arc::clone(context), buffers: Vec::new(), next: 0, stop: 0, blocks: 0 }
    }

    /// Lets the kernels that are started from now on end, between two items, once the 32-bit word at `word` is not 0; those
    /// that start when it is set touch no tensor. It is in pinned host memory, as the device sees it, and outlives the kernels.
    pub fn stopped_by(&mut self, word: Address) {
        self.stop = word;
    }

    /// Lets the kernels that are started from now on have so many blocks at most, however many the GPU could run: where links
    /// between GPUs are what holds them up, more would only keep other kernels from its multiprocessors.
    pub fn limited_to(&mut self, blocks: u32) {
        self.blocks = blocks;
    }

    /// The bytes of device memory that it has.
    pub fn held(&self) -> usize {
        self.buffers.iter().map(|place| place.device.bytes()).sum()
    }

    /// Uploads `batch`, unless it is short, and calls `launch` with each part of the work.
    ///
    /// # Errors
    /// Those of the driver and of `launch`, and when the wait context ends.
    pub fn run(
        &mut self,
        batch: &Batch,
        divisor: u32,
        stream: &Stream,
        wait_ctx: &WaitContext<'_>,
        mut launch: impl FnMut(DType, &KernelArgs) -> Result<()>,
    ) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let mut work = batch.work(divisor, self.stop, self.blocks)?;
        let place = if batch.fits() { None } else { Some(self.place(batch.bytes(), wait_ctx)?) };
        if let Some(place) = &place {
            // SAFETY: the place is as long as all lists, and no kernel reads it any more.
            unsafe { batch.write(place.host.memory()) };
            // SAFETY: both have so many bytes, and stay until the event below has come.
            unsafe { stream.upload(place.device.address(), place.host.memory(), batch.bytes()) }?;
            work.lists = place.device.address();
        }
        for group in &batch.groups {
            // Both are numbers of 32 bits, as `work` has found.
            work.items = (group.items.start * size_of::<BlockRange>()) as u32;
            work.nitems = group.items.len() as u32;
            launch(group.dtype, &work)?;
        }
        if let Some(place) = place {
            place.free = Some(stream.record()?);
        }
        Ok(())
    }

    /// Uploads a batch of copies, and starts them.
    ///
    /// # Errors
    /// Those of the driver, and when the wait context ends.
    ///
    /// # Safety
    /// The memory is valid until the copies are done, and nobody else's.
    pub unsafe fn copy(&mut self, batch: &Batch, stream: &Stream, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let context = Arc::clone(&self.context);
        let kernels = context.kernels()?;
        // SAFETY: the caller's promise.
        self.run(batch, 1, stream, wait_ctx, |_, work| unsafe { kernels.copy(work, stream.raw()) })
    }

    fn place(&mut self, bytes: usize, wait_ctx: &WaitContext<'_>) -> Result<&mut UploadBuffer> {
        let index = self.next % NUM_BUFFERS;
        self.next = index + 1;
        if let Some(event) = self.buffers.get_mut(index).and_then(|place| place.free.take()) {
            wait_event(&event, wait_ctx)?;
        }
        if self.buffers.get(index).is_none_or(|place| place.host.bytes() < bytes) {
            let len = bytes.max(MIN_BUFFER_BYTES).next_power_of_two();
            let host = PinnedHostBuffer::new(&self.context, len)?;
            let place = UploadBuffer { host, device: DeviceBuffer::new(&self.context, len)?, free: None };
            if index < self.buffers.len() {
                self.buffers[index] = place;
            } else {
                self.buffers.push(place);
            }
        }
        Ok(&mut self.buffers[index])
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn short_lists_travel_with_the_kernel() {
        let mut batch = Batch::default();
        batch.start(2, 1, 100);
        batch.add(DType::F32, 5, [10, 20], [30]);
        batch.add(DType::I8, 7, [11, 21], [31]);
        let work = batch.work(2, 99, 48).unwrap();
        assert_eq!((work.lists, work.stop, work.blocks, work.divisor), (0, 99, 48, 2));
        assert_eq!((work.items, work.sources, work.targets), (0, 32, 64));
        assert_eq!(work.table[..10], [0, 5 << 32, 0, 7 << 32 | 1, 10, 20, 11, 21, 30, 31]);
        assert!(work.table[10..].iter().all(|word| *word == 0) && batch.fits());
        // The longest that fits, and one item more.
        batch.start(1, 1, 0);
        batch.add(DType::U8, 223 * MIN_ITEM_BYTES, [1], [2]);
        assert_eq!((batch.bytes(), batch.fits()), (KernelArgs::TABLE * 8, true));
        assert_eq!(batch.work(1, 0, 0).unwrap().table[446..], [1, 2]);
        batch.add(DType::U8, 1, [1], [2]);
        let work = batch.work(1, 0, 0).unwrap();
        assert!(!batch.fits() && work.table == [0; KernelArgs::TABLE] && work.sources == 224 * 16);
        assert!(size_of::<KernelArgs>() <= 4096);
    }

    #[test]
    fn long_pieces_become_items_and_types_become_groups() {
        let mut batch = Batch::default();
        batch.start(2, 1, 1 << 30);
        batch.add(DType::F32, 2 * BlockRange::MAX_ELEMENTS + 1, [1, 2], [3]);
        batch.add(DType::F32, 5, [4, 5], [6]);
        batch.add(DType::I8, 1, [7, 8], [9]);
        let items: Vec<(u64, u32, u32)> = batch.items.iter().map(|item| (item.first, item.piece, item.count)).collect();
        let long = BlockRange::MAX_ELEMENTS as u32;
        assert_eq!(items, [(0, 0, long), (long.into(), 0, long), (2 * u64::from(long), 0, 1), (0, 1, 5), (0, 2, 1)]);
        assert_eq!(batch.groups.iter().map(|group| group.items.clone()).collect::<Vec<_>>(), [0..4, 4..5]);
        assert_eq!((&batch.sources[..], &batch.targets[..]), (&[1, 2, 4, 5, 7, 8][..], &[3, 6, 9][..]));
        // A short call is cut up too, so that it has blocks.
        batch.start(1, 1, 64 << 10);
        batch.add(DType::BF16, 32 << 10, [1], [3]);
        batch.add(DType::U8, 1, [1], [3]);
        assert_eq!(
            batch.items.iter().map(|item| item.count).collect::<Vec<_>>(),
            [[4096; 8].as_slice(), &[1]].concat()
        );
        batch.start(1, 1, 0);
        assert!(batch.is_empty() && batch.bytes() == 0);
    }
}
