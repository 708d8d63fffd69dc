//! Kernel launches: tensor ranges divided into items, and the memory from which a GPU reads them.
//!
//! Short lists are passed as kernel parameters. Longer ones are written to pinned host memory and uploaded before the
//! kernels that read them. A few buffers are used in turn, so that the host does not wait for the GPU.
//! Thread rule: one user at a time.

use std::sync::Arc;

use super::streams::wait_taken;
use crate::buffer::Tensor;
use crate::collective::call::Call;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::transport::WaitContext;
use crate::transport::gpu::{
    Address, BlockRange, Context, DeviceBuffer, Event, KernelArgs, Kernels, Launch, PinnedHostBuffer, Stream,
};
use crate::wire_layout::TensorRange;

/// Items of one element type, for one kernel launch.
struct LaunchGroup {
    dtype: DType,
    /// Whether the launch fills its targets with NaN when it is stopped.
    fills: bool,
    items: std::ops::Range<usize>,
}

/// Work for kernels, run by a [`Launcher`]; all tensor ranges have equally many sources and targets.
#[derive(Default)]
pub(super) struct Batch {
    items: Vec<BlockRange>,
    sources: Vec<Address>,
    targets: Vec<Address>,
    groups: Vec<LaunchGroup>,
    pieces: u32,
    /// The number of sources and targets of each range.
    shape: (usize, usize),
    /// Maximum bytes of an item.
    item_bytes: usize,
    /// Whether the targets of the ranges that are added now are outputs of this rank that can hold NaN: a stopped launch
    /// fills them.
    pub fills: bool,
}

/// The numbers of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scalars {
    /// Of means.
    pub divisor: u32,
    /// The factor of each input, of a scaled operator.
    pub pre: f64,
    /// The factor of its result.
    pub post: f64,
}

impl Scalars {
    /// Those of other operators.
    pub const NONE: Scalars = Scalars { divisor: 1, pre: 1.0, post: 1.0 };
}

/// Minimum bytes of an item: two vectors for each thread of a block.
const MIN_ITEM_BYTES: usize = 8 << 10;
/// About as many items fit the parameters, with the addresses of some tensors: up to twice the minimum, items are so long
/// that they do, as an upload costs more.
const ITEMS_IN_PARAMETERS: usize = 160;
/// Maximum elements of an item without sources.
const MAX_FILLED: usize = 1 << 30;
/// Number of items that keeps a GPU busy: nearly four for each block of 132 multiprocessors with three blocks each,
/// which keeps the tail short.
const TARGET_ITEMS: usize = 1536;

impl Batch {
    /// Clears the batch, for ranges with these numbers of sources and targets and `bytes` in all.
    pub fn start(&mut self, sources: usize, targets: usize, bytes: usize) {
        self.shape = (sources, targets);
        let fitting = (bytes / ITEMS_IN_PARAMETERS).min(2 * MIN_ITEM_BYTES);
        self.item_bytes = (bytes / TARGET_ITEMS).max(fitting).next_multiple_of(MIN_ITEM_BYTES).max(MIN_ITEM_BYTES);
        self.items.clear();
        self.sources.clear();
        self.targets.clear();
        self.groups.clear();
        self.pieces = 0;
        self.fills = false;
    }

    /// Adds a range of `count` elements of `dtype` at these addresses.
    pub fn add(
        &mut self,
        dtype: DType,
        count: usize,
        sources: impl IntoIterator<Item = Address>,
        targets: impl IntoIterator<Item = Address>,
    ) {
        self.sources.extend(sources);
        self.targets.extend(targets);
        let max_count = (self.item_bytes / dtype.size()).min(BlockRange::MAX_ELEMENTS);
        self.add_items(dtype, count, max_count);
    }

    /// Adds the items of a range whose addresses are in the lists.
    fn add_items(&mut self, dtype: DType, count: usize, max_count: usize) {
        let start = self.items.len();
        for first in (0..count).step_by(max_count) {
            let count = (count - first).min(max_count) as u32;
            self.items.push(BlockRange { first: first as u64, piece: self.pieces, count });
        }
        self.pieces += 1;
        let end = self.items.len();
        match self.groups.last_mut() {
            Some(group) if (group.dtype, group.fills) == (dtype, self.fills) => group.items.end = end,
            _ => self.groups.push(LaunchGroup { dtype, fills: self.fills, items: start..end }),
        }
    }

    /// Clears the batch and adds outputs of `call` that can hold NaN, from tensor `first` on, for a launch that fills them
    /// if it is stopped and does nothing otherwise. As many as fit the parameters; returns the tensor that is next. Few
    /// items: only a lost call is slow by that.
    pub fn guard_outputs(&mut self, call: &Call, first: usize) -> usize {
        self.start(0, 1, 0);
        self.fills = true;
        let tensors = call.tensors(0);
        for (index, tensor) in tensors.iter().enumerate().skip(first) {
            let output = tensor.buffer.destination_bytes(0..call.extents(index).1);
            if !tensor.buffer.dtype().has_nan() || output.is_empty() {
                continue;
            }
            let items = output.len().div_ceil(MAX_FILLED) * size_of::<BlockRange>() + size_of::<Address>();
            if !self.is_empty() && self.bytes() + items > KernelArgs::TABLE * size_of::<u64>() {
                return index;
            }
            self.targets.push(output.start as Address);
            self.add_items(DType::U8, output.len(), MAX_FILLED);
        }
        tensors.len()
    }

    /// Clears the batch and adds copies of `pieces` of `tensors`, `bytes` in all, to `memory` in wire layout, or, with
    /// `unpack`, from there.
    pub fn copies(
        &mut self,
        pieces: impl Iterator<Item = TensorRange>,
        tensors: &[Tensor],
        bytes: usize,
        memory: Address,
        unpack: bool,
    ) {
        self.start(1, 1, bytes);
        for piece in pieces {
            let buffer = &tensors[piece.tensor].buffer;
            let size = buffer.dtype().size();
            let (read, written) = buffer.byte_ranges();
            let start = if unpack { written.start } else { read.start };
            let (tensor, packed) = ((start + piece.first * size) as Address, memory + piece.offset as Address);
            let (from, to) = if unpack { (packed, tensor) } else { (tensor, packed) };
            self.fills = unpack && buffer.dtype().has_nan();
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

    /// Offset of each list in bytes, one after the other.
    fn starts(&self) -> [usize; 3] {
        let sources = self.items.len() * size_of::<BlockRange>();
        [0, sources, sources + self.sources.len() * size_of::<Address>()]
    }

    /// Writes the lists, one after the other.
    ///
    /// # Safety
    /// `to` has room for [`Batch::bytes`], and nothing else accesses it.
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

    /// Parameters for all kernels of the batch, without their items; with the lists if they fit.
    fn args(&self, scalars: Scalars, stop: Address) -> Result<KernelArgs> {
        let number = |value: usize| {
            u32::try_from(value).map_err(|_| Error::Internal("the lists of a call are too long for a kernel".into()))
        };
        let [_, sources, targets] = self.starts();
        let mut args = KernelArgs {
            lists: 0,
            stop,
            items: 0,
            sources: number(sources)?,
            targets: number(targets)?,
            nitems: 0,
            nsources: number(self.shape.0)?,
            ntargets: number(self.shape.1)?,
            divisor: scalars.divisor,
            fills: 0,
            pre: scalars.pre,
            post: scalars.post,
            table: [0; KernelArgs::TABLE],
        };
        number(self.bytes())?;
        if self.fits() {
            // SAFETY: `fits` has checked the length, and only this function uses the table.
            unsafe { self.write(args.table.as_mut_ptr().cast()) };
        }
        Ok(args)
    }

    /// Whether the lists fit the kernel parameters.
    fn fits(&self) -> bool {
        self.bytes() <= KernelArgs::TABLE * size_of::<u64>()
    }
}

/// Number of upload buffers.
const NUM_BUFFERS: usize = 4;
/// Minimum size of an upload buffer.
const MIN_BUFFER_BYTES: usize = 64 << 10;

/// A buffer for the lists of a batch.
struct UploadBuffer {
    host: PinnedHostBuffer,
    device: DeviceBuffer,
    /// Completes after the kernels that read the buffer.
    free: Option<Event>,
}

/// A batch, and the buffers that upload it, used in turn.
pub(super) struct Launcher {
    context: Arc<Context>,
    pub batch: Batch,
    buffers: Vec<UploadBuffer>,
    next: usize,
    /// Device address of a 32-bit stop flag in pinned host memory that outlives the kernels; 0: none. Once it is set,
    /// kernels end after their current items, and new ones only fill.
    pub stop: Address,
    /// Maximum blocks of a kernel; 0: as many as the GPU runs at a time.
    pub blocks: u32,
}

impl Launcher {
    /// An empty batch; buffers are allocated at first use.
    pub fn new(context: &Arc<Context>) -> Launcher {
        let (context, batch) = (Arc::clone(context), Batch::default());
        Launcher { context, batch, buffers: Vec::new(), next: 0, stop: 0, blocks: 0 }
    }

    /// Bytes of device memory in use.
    pub fn device_bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.device.bytes()).sum()
    }

    /// Uploads the batch, unless it fits the parameters, and calls `launch` for each kernel.
    pub fn run(
        &mut self,
        scalars: Scalars,
        stream: &Stream,
        wait_ctx: &WaitContext<'_>,
        mut launch: impl FnMut(&Kernels, DType, &Launch) -> Result<()>,
    ) -> Result<()> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let args = self.batch.args(scalars, self.stop)?;
        let mut next = Launch { args, max_blocks: self.blocks };
        let index = if self.batch.fits() { None } else { Some(self.free_buffer(wait_ctx)?) };
        if let Some(UploadBuffer { host, device, .. }) = index.map(|index| &self.buffers[index]) {
            // SAFETY: the buffer has room for all lists, and no kernel reads it.
            unsafe { self.batch.write(host.memory()) };
            // SAFETY: both have room for these bytes and live until the event below completes.
            unsafe { stream.upload(device.address(), host.memory(), self.batch.bytes()) }?;
            next.args.lists = device.address();
        }
        let kernels = self.context.kernels()?;
        for group in &self.batch.groups {
            // Both fit 32 bits, as `args` has checked.
            next.args.items = (group.items.start * size_of::<BlockRange>()) as u32;
            next.args.nitems = group.items.len() as u32;
            next.args.fills = u32::from(group.fills);
            launch(kernels, group.dtype, &next)?;
        }
        if let Some(index) = index {
            self.buffers[index].free = Some(stream.record()?);
        }
        Ok(())
    }

    /// Runs a batch of copies.
    ///
    /// # Safety
    /// The memory is valid and not used otherwise until the copies have completed.
    pub unsafe fn copy(&mut self, stream: &Stream, wait_ctx: &WaitContext<'_>) -> Result<()> {
        // SAFETY: the caller's promise.
        self.run(Scalars::NONE, stream, wait_ctx, |kernels, _, args| unsafe { kernels.copy(args, stream.raw()) })
    }

    /// Runs batches that only fill, whose lists are in the parameters, after all other work of `call` on `stream`.
    ///
    /// # Safety
    /// The outputs of `call` are valid and not used otherwise until the launch has completed.
    pub unsafe fn guard_outputs(&mut self, call: &Call, stream: &Stream, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let mut next = 0;
        while next < call.tensors(0).len() {
            next = self.batch.guard_outputs(call, next);
            // SAFETY: the caller's promise.
            unsafe { self.copy(stream, wait_ctx) }?;
        }
        Ok(())
    }

    /// The index of a buffer for the batch that no kernel reads.
    fn free_buffer(&mut self, wait_ctx: &WaitContext<'_>) -> Result<usize> {
        let (index, bytes) = (self.next % NUM_BUFFERS, self.batch.bytes());
        self.next = index + 1;
        if let Some(buffer) = self.buffers.get_mut(index) {
            wait_taken(&mut buffer.free, wait_ctx)?;
        }
        if self.buffers.get(index).is_none_or(|buffer| buffer.host.bytes() < bytes) {
            let len = bytes.max(MIN_BUFFER_BYTES).next_power_of_two();
            let host = PinnedHostBuffer::new(&self.context, len)?;
            let buffer = UploadBuffer { host, device: DeviceBuffer::new(&self.context, len)?, free: None };
            if index < self.buffers.len() {
                self.buffers[index] = buffer;
            } else {
                self.buffers.push(buffer);
            }
        }
        Ok(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_lists_are_passed_as_parameters() {
        let mut batch = Batch::default();
        batch.start(2, 1, 100);
        batch.add(DType::F32, 5, [10, 20], [30]);
        batch.add(DType::I8, 7, [11, 21], [31]);
        let args = batch.args(Scalars { divisor: 2, ..Scalars::NONE }, 99).unwrap();
        assert_eq!((args.lists, args.stop, args.divisor), (0, 99, 2));
        assert_eq!((args.items, args.sources, args.targets), (0, 32, 64));
        assert_eq!(args.table[..10], [0, 5 << 32, 0, 7 << 32 | 1, 10, 20, 11, 21, 30, 31]);
        assert!(args.table[10..].iter().all(|word| *word == 0) && batch.fits());
        // The longest list that fits, then one item more.
        batch.start(1, 1, 0);
        batch.add(DType::U8, 223 * MIN_ITEM_BYTES, [1], [2]);
        assert_eq!((batch.bytes(), batch.fits()), (KernelArgs::TABLE * 8, true));
        assert_eq!(batch.args(Scalars::NONE, 0).unwrap().table[446..], [1, 2]);
        batch.add(DType::U8, 1, [1], [2]);
        let args = batch.args(Scalars::NONE, 0).unwrap();
        assert!(!batch.fits() && args.table == [0; KernelArgs::TABLE] && args.sources == 224 * 16);
        assert!(size_of::<KernelArgs>() <= 4096);
    }

    #[test]
    fn long_ranges_are_divided_and_grouped_by_type() {
        let mut batch = Batch::default();
        batch.start(2, 1, 1 << 30);
        batch.add(DType::F32, 2 * BlockRange::MAX_ELEMENTS + 1, [1, 2], [3]);
        batch.add(DType::F32, 5, [4, 5], [6]);
        batch.add(DType::I8, 1, [7, 8], [9]);
        let items: Vec<(u64, u32, u32)> = batch.items.iter().map(|item| (item.first, item.piece, item.count)).collect();
        let max_elements = BlockRange::MAX_ELEMENTS as u32;
        assert_eq!(
            items,
            [
                (0, 0, max_elements),
                (max_elements.into(), 0, max_elements),
                (2 * u64::from(max_elements), 0, 1),
                (0, 1, 5),
                (0, 2, 1)
            ]
        );
        assert_eq!(batch.groups.iter().map(|group| group.items.clone()).collect::<Vec<_>>(), [0..4, 4..5]);
        assert_eq!((&batch.sources[..], &batch.targets[..]), (&[1, 2, 4, 5, 7, 8][..], &[3, 6, 9][..]));
        // A small call is divided too, to use several blocks.
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
