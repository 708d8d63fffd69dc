//! Adding up and dividing elements, for every type. Pure arithmetic on raw memory, no threads.
//!
//! Sources are added in the order given, in an accumulator that is wider than the element (float16 and bfloat16 in
//! float32, integers in the next wider integer; all but float64 in float64 when `precise`), and the result is rounded to
//! the element type once, to nearest even, integers toward zero. The order, and so the bits, depend on nothing but the
//! order of the sources: not on the processor, and not on where in memory the elements lie.
//!
//! On the wire an element stands as itself, or, when a process contributes several replicas (`wide`), as the accumulator
//! that already holds their sum.
//!
//! There is one loop (`kernel.rs`), generic over the types (`scheme.rs`), their forms in memory (`form.rs`) and the
//! instruction set (`isa.rs`), and written so that LLVM makes vector code of it: tiles of a fixed number of elements, no
//! branch in any of them, no memory that might overlap. It is compiled for the target's baseline, on x86-64 also for AVX2
//! and AVX-512; which one runs is decided once per process. Only float16 needs intrinsics there. On AArch64 the baseline
//! has NEON, and the conversions of float16 and bfloat16 become vector code from integer operations (`convert.rs`).

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

/// How elements of one type are averaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    /// The element type; not [`DType::Bool`] for anything but sizes.
    pub dtype: DType,
    /// Accumulate floating point in float64.
    pub acc_f64: bool,
    /// The wire holds accumulators.
    pub wire_is_acc: bool,
}

/// One of the things that are done with elements: what is read, what is written, and the divisor.
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

/// Calls `$body` with `$S` as the scheme of `$reduction`.
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
    /// Bytes of an accumulator.
    pub fn acc_size(self) -> usize {
        with_type!(self, S => size_of::<<S as ReduceType>::Acc>())
    }

    /// Bytes of an element on the wire.
    pub fn wire_size(self) -> usize {
        if self.wire_is_acc { self.acc_size() } else { self.dtype.size() }
    }

    /// `out[i] = round((sources[0][i] + sources[1][i] + …) / divisor)` for every out, all in wire form.
    ///
    /// # Safety
    /// There is a source and an out. Every pointer is valid for `count` wire elements, at any alignment; nobody else writes
    /// there. An out may be one of the sources, and overlaps nothing otherwise. The divisor is from 1 to `i32::MAX`.
    pub unsafe fn mean(self, sources: &[*const u8], outs: &[*mut u8], count: usize, divisor: u32) {
        // SAFETY: the caller's promise; the best kernel is one that is available.
        unsafe { self.run(Kernel::best(), KernelOp::Mean(divisor), sources, outs, count) }
    }

    /// `acc[i] = sources[0][i] + sources[1][i] + …`: wire elements into accumulators.
    ///
    /// # Safety
    /// As for [`Reduction::mean`], `acc` being valid for `count` accumulators; it may be a source only where these are, too.
    pub unsafe fn sum(self, sources: &[*const u8], acc: *mut u8, count: usize) {
        // SAFETY: as in `mean`.
        unsafe { self.run(Kernel::best(), KernelOp::Sum, sources, &[acc], count) }
    }

    /// `out[i] = round((accs[0][i] + accs[1][i] + …) / divisor)` for every out: accumulators into wire elements.
    ///
    /// # Safety
    /// As for [`Reduction::mean`], `accs` being valid for `count` accumulators each; an out may be one of them only where
    /// wire elements are accumulators.
    pub unsafe fn finish(self, accs: &[*const u8], outs: &[*mut u8], count: usize, divisor: u32) {
        // SAFETY: as in `mean`.
        unsafe { self.run(Kernel::best(), KernelOp::Finish(divisor), accs, outs, count) }
    }

    /// Turns rounded accumulators (the wide wire form of a result) into elements.
    ///
    /// # Safety
    /// As for [`Reduction::mean`], `acc` being valid for `count` accumulators and `out` for as many elements.
    pub unsafe fn narrow(self, acc: *const u8, out: *mut u8, count: usize) {
        // SAFETY: as in `mean`.
        unsafe { self.run(Kernel::best(), KernelOp::Narrow, &[acc], &[out], count) }
    }

    /// Any of the above, on a kernel of one's choice: for tests and benchmarks.
    ///
    /// # Safety
    /// As for the method that `step` names; the kernel is one of [`Kernel::available`].
    pub unsafe fn run(self, kernel: Kernel, step: KernelOp, sources: &[*const u8], outs: &[*mut u8], count: usize) {
        /// Calls `reduce` for the forms, with the cheapest way that gives the bits of a division by `$divisor`.
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
            (self.dtype, self.acc_f64, self.wire_is_acc, step, count)
        {
            // SAFETY: the caller's promise.
            unsafe {
                divided!(BF16Pair, AsElement, AsElement, divisor, count / 2);
                if count % 2 == 1 {
                    let last = (count - 1) * self.dtype.size();
                    let sources: Vec<*const u8> = sources.iter().map(|source| source.add(last)).collect();
                    let outs: Vec<*mut u8> = outs.iter().map(|out| out.add(last)).collect();
                    self.run(kernel, step, &sources, &outs, 1);
                }
            }
            return;
        }
        // SAFETY: the caller's promise.
        with_type!(self, S => unsafe {
            match (step, self.wire_is_acc) {
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
