//! Loads the kernels of `kernels/` into a context, and launches them.
//!
//! Thread rule: any thread, with their context current.

use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::result::{launch_kernel, module};
use cudarc::driver::sys;

use super::compiler::{c_string, load_module};
use super::driver::{Address, Handle, check};
use super::kernel_table::{Kernel, KernelSet, SOURCES, kernel_of};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::reduce::ReduceOp;

/// Threads per block; `memory.cuh` allows no more.
const THREADS: u32 = 256;
/// Blocks per multiprocessor that run at a time, limited by registers.
const BLOCKS: u32 = 3;

/// Elements `first .. first + count` of tensor range `piece`, for one block; at most [`BlockRange::MAX_ELEMENTS`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    /// The first element.
    pub first: u64,
    /// Index of the tensor range in the address lists.
    pub piece: u32,
    /// The number of elements.
    pub count: u32,
}

impl BlockRange {
    /// The maximum of `count`.
    pub const MAX_ELEMENTS: usize = 32 << 10;
}

/// Parameters of a kernel, as `KernelArgs` in `memory.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct KernelArgs {
    /// Device address of the lists; 0: they are in `table`.
    pub lists: Address,
    /// Address of a 32-bit stop flag in pinned host memory, or 0: [`KernelArgs::STOP_COPIES`] of it. Each block checks
    /// its copy before each item and ends if it is set.
    pub stop: Address,
    /// Offset of the [`BlockRange`]s in the lists, in bytes.
    pub items: u32,
    /// Offset of the addresses of each tensor range in each source, in bytes.
    pub sources: u32,
    /// Offset of the addresses of each tensor range in each target, in bytes.
    pub targets: u32,
    /// The number of items.
    pub nitems: u32,
    /// The number of sources.
    pub nsources: u32,
    /// The number of targets.
    pub ntargets: u32,
    /// Divisor of the sum.
    pub divisor: u32,
    /// 1: a stopped launch fills the rest of its targets with ones, NaN in each floating type.
    pub fills: u32,
    /// The factor of each input, of a scaled operator.
    pub pre: f64,
    /// The factor of its result.
    pub post: f64,
    /// Short lists, passed as parameters (at most 4 KiB in all).
    pub table: [u64; KernelArgs::TABLE],
}

impl KernelArgs {
    /// Number of 64-bit entries in `table`.
    pub const TABLE: usize = 448;
    /// Copies of the stop flag, more than blocks run at a time. On an H100, reads of one line of host memory take
    /// 1.04 us each, one after the other.
    pub const STOP_COPIES: usize = 512;
    /// Bytes from one copy to the next: a line of the GPU's L2 cache.
    pub const STOP_STRIDE: usize = 128;
}

/// A launch.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// Its parameters.
    pub args: KernelArgs,
    /// Maximum number of blocks; 0: as many as the GPU runs at a time.
    pub max_blocks: u32,
}

/// The kernels for one compute capability, loaded into a context.
pub struct Kernels {
    capability: (i32, i32),
    /// Maximum number of blocks per launch.
    blocks: u32,
    /// In the order of [`KernelSet`] and of [`KernelSet::names`].
    sets: [OnceLock<Result<Vec<Function>>>; SOURCES.len()],
}

type Function = Handle<sys::CUfunc_st>;

impl Kernels {
    /// Compiles the kernels for `capability` that are always needed, and loads them into the current context.
    pub(super) fn compile(capability: (i32, i32), multiprocessors: u32) -> Result<Kernels> {
        let blocks = multiprocessors.max(1) * BLOCKS;
        let kernels = Kernels { capability, blocks, sets: Default::default() };
        kernels.load(KernelSet::Means)?;
        Ok(kernels)
    }

    /// Writes what `op` makes of the sources of `args` to its targets; `dtype` is that of [`super::kernel_type`]. With `precise`,
    /// accumulators are float64. The first call of an operator may compile kernels.
    ///
    /// # Errors
    /// [`Error::System`]; [`Error::Internal`] for an element type without kernels; see [`super::kernel_set`].
    ///
    /// # Safety
    /// The memory of `args` is valid and not used otherwise until the kernel has finished; the stream's context is current.
    pub unsafe fn reduce(
        &self,
        (op, dtype, precise): (ReduceOp, DType, bool),
        args: &Launch,
        stream: sys::CUstream,
    ) -> Result<()> {
        let kernel = kernel_of(op, dtype, precise).ok_or_else(|| lacking(dtype))?;
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.function(kernel)?, args, stream) }
    }

    /// Writes the undivided sums of the sources of `args` to its one target, with
    /// [`crate::reduce::Reduction::acc_size`] bytes per element. The first call may compile kernels.
    ///
    /// # Errors
    /// As for [`Kernels::reduce`].
    ///
    /// # Safety
    /// As for [`Kernels::reduce`].
    pub unsafe fn sum(&self, dtype: DType, precise: bool, args: &Launch, stream: sys::CUstream) -> Result<()> {
        let mean = kernel_of(ReduceOp::Sum, dtype, precise).ok_or_else(|| lacking(dtype))?;
        let kernel = Kernel { set: KernelSet::Sums, operator: "sum", ..mean };
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.function(kernel)?, args, stream) }
    }

    /// Compiles kernels and loads them into the current context, unless that was done before.
    ///
    /// # Errors
    /// [`Error::System`] without a compiler or memory, each time.
    pub fn ready(&self, set: KernelSet) -> Result<()> {
        self.load(set).map(|_| ())
    }

    fn load(&self, set: KernelSet) -> Result<&[Function]> {
        let kept = &self.sets[set as usize];
        kept.get_or_init(|| load(self.capability, set)).as_deref().map_err(Error::clone)
    }

    fn function(&self, kernel: Kernel) -> Result<Function> {
        let functions = self.load(kernel.set)?;
        let function = kernel.place().and_then(|place| functions.get(place).copied());
        function.ok_or_else(|| Error::Internal(format!("there is no GPU kernel {kernel:?}")))
    }

    /// Copies bytes: `args` counts bytes and has one source, or none if it only fills.
    ///
    /// # Safety
    /// As for [`Kernels::reduce`].
    pub unsafe fn copy(&self, args: &Launch, stream: sys::CUstream) -> Result<()> {
        let copy =
            self.load(KernelSet::Means)?.last().ok_or_else(|| Error::Internal("there are no GPU kernels".into()))?;
        // SAFETY: the caller's promise.
        unsafe { self.launch(*copy, args, stream) }
    }

    /// # Safety
    /// As for [`Kernels::reduce`].
    unsafe fn launch(&self, function: Function, launch: &Launch, stream: sys::CUstream) -> Result<()> {
        let Launch { args, max_blocks } = launch;
        if args.nitems == 0 {
            return Ok(());
        }
        let max_blocks = if *max_blocks == 0 { u32::MAX } else { *max_blocks };
        let blocks = args.nitems.min(max_blocks).min(self.blocks);
        let mut parameters = [ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's promise; the driver copies the parameter before it returns.
        let started = unsafe { launch_kernel(function.0, (blocks, 1, 1), (THREADS, 1, 1), 0, stream, &mut parameters) };
        check("starting a kernel", started)
    }
}

fn lacking(dtype: DType) -> Error {
    Error::Internal(format!("there is no GPU kernel for {}", dtype.name()))
}

/// Compiles a set for GPUs of a capability and loads it into the current context. Returns its kernels in their order.
fn load((major, minor): (i32, i32), set: KernelSet) -> Result<Vec<Function>> {
    let module = load_module(SOURCES[set as usize].text, major * 10 + minor)?;
    let find = |name: String| {
        let name = c_string(&name)?;
        // SAFETY: the module is loaded and is never unloaded.
        check("finding a kernel", unsafe { module::get_function(module, name) }).map(Handle)
    };
    set.names().into_iter().map(find).collect()
}
