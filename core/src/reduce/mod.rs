//! Sums and means of elements, for every type. Pure arithmetic on raw memory, no threads.
//!
//! Sources are added in the given order, in a wider accumulator: float32 for float16 and bfloat16, the next wider
//! integer for integers, and float64 for all floating point with `acc_f64`. The result is rounded to the element type
//! once, to nearest even, integers toward zero. The bits depend only on the order of the sources, not on the processor
//! or on addresses.
//!
//! The wire carries elements. With several replicas per process (`wire_is_acc`) it carries accumulators with the sum of
//! the replicas.
//!
//! There is one loop (`kernel.rs`), generic over types (`types.rs`), storage formats (`storage.rs`) and instruction
//! sets (`isa.rs`). LLVM vectorizes it: it has blocks of fixed size, no branches, and no aliasing. It is compiled for
//! the target's minimum, on x86-64 also for AVX2 and AVX-512, and selected once per process. Only float16 needs
//! intrinsics there. On AArch64, NEON is part of the minimum, and float16 and bfloat16 conversions vectorize from
//! integer operations (`convert.rs`).

mod convert;
mod epilogue;
mod half_tiles;
mod isa;
mod kernel;
#[cfg(test)]
mod oracle;
mod pair;
mod storage;
#[cfg(test)]
mod tests;
pub(crate) mod types;

use crate::dtype::DType;
use epilogue::{Divide, DividePow2, Identity};
pub use kernel::Kernel;
use kernel::reduce;
use pair::BF16Pair;
use storage::{AsAccumulator, AsElement, AsRoundedAccumulator};
use types::ReduceType;

/// The types of a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    /// The element type. [`DType::Bool`] is valid only for sizes.
    pub dtype: DType,
    /// Whether floating point accumulates in float64.
    pub acc_f64: bool,
    /// Whether the wire holds accumulators.
    pub wire_is_acc: bool,
}

/// An operation on elements, with its divisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelOp {
    /// [`Reduction::mean`]
    Mean(u32),
    /// [`Reduction::sum`]
    Sum,
    /// [`Reduction::finish`]
    Finish(u32),
    /// [`Reduction::narrow`]
    Narrow,
}

/// Calls `$body` with `$S` as the [`ReduceType`] of `$reduction`.
macro_rules! with_type {
    ($reduction:expr, $S:ident => $body:expr) => {
        with_type!(@match ($reduction.dtype, $reduction.acc_f64), $S, $body,
            (DType::F16, false) => F16, (DType::F16, true) => F16AccF64,
            (DType::BF16, false) => BF16, (DType::BF16, true) => BF16AccF64,
            (DType::F32, false) => F32, (DType::F32, true) => F32AccF64,
            (DType::F64, _) => F64,
            (DType::I8, _) => I8, (DType::U8 | DType::Bool, _) => U8, (DType::I32, _) => I32, (DType::I64, _) => I64)
    };
    (@match $value:expr, $S:ident, $body:expr, $($pattern:pat => $type:ident),*) => {
        match $value {
            $($pattern => {
                type $S = types::$type;
                $body
            })*
        }
    };
}

impl Reduction {
    /// Size of an accumulator in bytes.
    pub fn acc_size(self) -> usize {
        with_type!(self, S => size_of::<<S as ReduceType>::Acc>())
    }

    /// Size of an element on the wire in bytes.
    pub fn wire_size(self) -> usize {
        if self.wire_is_acc { self.acc_size() } else { self.dtype.size() }
    }

    /// `out[i] = round((sources[0][i] + sources[1][i] + …) / divisor)` for every out, all in wire format.
    ///
    /// # Safety
    /// There is a source and an out. Every pointer is valid for `count` wire elements, at any alignment, without
    /// concurrent writes. An out may be one of the sources, and overlaps nothing else. The divisor is from 1 to
    /// `i32::MAX`.
    pub unsafe fn mean(self, sources: &[*const u8], outs: &[*mut u8], count: usize, divisor: u32) {
        // SAFETY: guaranteed by the caller; `best` returns an available kernel.
        unsafe { self.run(Kernel::best(), KernelOp::Mean(divisor), sources, outs, count) }
    }

    /// `acc[i] = sources[0][i] + sources[1][i] + …`: from wire elements to accumulators.
    ///
    /// # Safety
    /// As for [`Reduction::mean`]; `acc` is valid for `count` accumulators, and is a source only if wire elements are
    /// accumulators.
    pub unsafe fn sum(self, sources: &[*const u8], acc: *mut u8, count: usize) {
        // SAFETY: as in `mean`.
        unsafe { self.run(Kernel::best(), KernelOp::Sum, sources, &[acc], count) }
    }

    /// `out[i] = round((accs[0][i] + accs[1][i] + …) / divisor)` for every out: from accumulators to wire elements.
    ///
    /// # Safety
    /// As for [`Reduction::mean`]; `accs` are valid for `count` accumulators each, and an out is one of them only if
    /// wire elements are accumulators.
    pub unsafe fn finish(self, accs: &[*const u8], outs: &[*mut u8], count: usize, divisor: u32) {
        // SAFETY: as in `mean`.
        unsafe { self.run(Kernel::best(), KernelOp::Finish(divisor), accs, outs, count) }
    }

    /// Converts rounded accumulators (a result on a wire of accumulators) to elements.
    ///
    /// # Safety
    /// As for [`Reduction::mean`]; `acc` is valid for `count` accumulators and `out` for `count` elements.
    pub unsafe fn narrow(self, acc: *const u8, out: *mut u8, count: usize) {
        // SAFETY: as in `mean`.
        unsafe { self.run(Kernel::best(), KernelOp::Narrow, &[acc], &[out], count) }
    }

    /// Runs any of the above on a given kernel: for tests and benchmarks.
    ///
    /// # Safety
    /// As for the method of `op`; `kernel` is one of [`Kernel::available`].
    pub unsafe fn run(self, kernel: Kernel, op: KernelOp, sources: &[*const u8], outs: &[*mut u8], count: usize) {
        /// Calls `reduce` with the fastest epilogue that gives the bits of a division by `$divisor`.
        macro_rules! divided {
            ($S:ty, $In:ty, $Out:ty, $divisor:expr, $count:expr) => {
                if $divisor.is_power_of_two() {
                    let power = DividePow2::new($divisor.ilog2() as u8);
                    reduce::<$S, $In, $Out, DividePow2<$S>>(kernel, sources, outs, $count, power)
                } else {
                    reduce::<$S, $In, $Out, Divide<$S>>(kernel, sources, outs, $count, Divide::new($divisor))
                }
            };
        }
        if let (DType::BF16, false, false, KernelOp::Mean(divisor), 2..) =
            (self.dtype, self.acc_f64, self.wire_is_acc, op, count)
        {
            // SAFETY: guaranteed by the caller.
            unsafe {
                divided!(BF16Pair, AsElement, AsElement, divisor, count / 2);
                if count % 2 == 1 {
                    let last = (count - 1) * self.dtype.size();
                    let sources: Vec<*const u8> = sources.iter().map(|source| source.add(last)).collect();
                    let outs: Vec<*mut u8> = outs.iter().map(|out| out.add(last)).collect();
                    self.run(kernel, op, &sources, &outs, 1);
                }
            }
            return;
        }
        // SAFETY: guaranteed by the caller.
        with_type!(self, S => unsafe {
            match (op, self.wire_is_acc) {
                (KernelOp::Mean(divisor), false) => divided!(S, AsElement, AsElement, divisor, count),
                (KernelOp::Mean(divisor) | KernelOp::Finish(divisor), true) => divided!(S, AsAccumulator, AsRoundedAccumulator, divisor, count),
                (KernelOp::Finish(divisor), false) => divided!(S, AsAccumulator, AsElement, divisor, count),
                (KernelOp::Sum, false) => reduce::<S, AsElement, AsAccumulator, Identity>(kernel, sources, outs, count, Identity),
                (KernelOp::Sum, true) => reduce::<S, AsAccumulator, AsAccumulator, Identity>(kernel, sources, outs, count, Identity),
                (KernelOp::Narrow, _) => divided!(S, AsAccumulator, AsElement, 1u32, count),
            }
        });
    }
}
