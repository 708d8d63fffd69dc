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
mod finish;
mod form;
mod half_tiles;
mod isa;
mod kernel;
mod pair;
#[cfg(test)]
mod reference;
pub(crate) mod scheme;
#[cfg(test)]
mod tests;

use crate::dtype::DType;
use finish::{Divide, Keep, Power};
use form::{Native, Rounded, Wide};
pub use kernel::Kernel;
use kernel::reduce;
use pair::BF16Pair;
use scheme::Scheme;

/// How elements of one type are averaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    /// The element type; not [`DType::Bool`] for anything but sizes.
    pub dtype: DType,
    /// Accumulate floating point in float64.
    pub precise: bool,
    /// The wire holds accumulators.
    pub wide: bool,
}

/// One of the things that are done with elements: what is read, what is written, and the divisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
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
macro_rules! with_scheme {
    ($reduction:expr, $S:ident => $body:expr) => {
        with_scheme!(@match ($reduction.dtype, $reduction.precise), $S, $body,
            (DType::F16, false) => F16, (DType::F16, true) => F16Precise,
            (DType::BF16, false) => BF16, (DType::BF16, true) => BF16Precise,
            (DType::F32, false) => F32, (DType::F32, true) => F32Precise,
            (DType::F64, _) => F64,
            (DType::I8, _) => I8, (DType::U8 | DType::Bool, _) => U8, (DType::I32, _) => I32, (DType::I64, _) => I64)
    };
    (@match $value:expr, $S:ident, $body:expr, $($pattern:pat => $scheme:ident),*) => {
        match $value {
            $($pattern => {
                type $S = scheme::$scheme;
                $body
            })*
        }
    };
}

impl Reduction {
    /// Bytes of an accumulator.
    pub fn acc_size(self) -> usize {
        with_scheme!(self, S => size_of::<<S as Scheme>::Acc>())
    }

    /// Bytes of an element on the wire.
    pub fn wire_size(self) -> usize {
        if self.wide { self.acc_size() } else { self.dtype.size() }
    }

    /// `out[i] = round((sources[0][i] + sources[1][i] + …) / divisor)` for every out, all in wire form.
    ///
    /// # Safety
    /// There is a source and an out. Every pointer is valid for `count` wire elements, at any alignment; nobody else writes
    /// there. An out may be one of the sources, and overlaps nothing otherwise. The divisor is from 1 to `i32::MAX`.
    pub unsafe fn mean(self, sources: &[*const u8], outs: &[*mut u8], count: usize, divisor: u32) {
        // SAFETY: the caller's promise; the best kernel is one that is available.
        unsafe { self.run(Kernel::best(), Step::Mean(divisor), sources, outs, count) }
    }

    /// `acc[i] = sources[0][i] + sources[1][i] + …`: wire elements into accumulators.
    ///
    /// # Safety
    /// As for [`Reduction::mean`], `acc` being valid for `count` accumulators; it may be a source only where these are, too.
    pub unsafe fn sum(self, sources: &[*const u8], acc: *mut u8, count: usize) {
        // SAFETY: as in `mean`.
        unsafe { self.run(Kernel::best(), Step::Sum, sources, &[acc], count) }
    }

    /// `out[i] = round((accs[0][i] + accs[1][i] + …) / divisor)` for every out: accumulators into wire elements.
    ///
    /// # Safety
    /// As for [`Reduction::mean`], `accs` being valid for `count` accumulators each; an out may be one of them only where
    /// wire elements are accumulators.
    pub unsafe fn finish(self, accs: &[*const u8], outs: &[*mut u8], count: usize, divisor: u32) {
        // SAFETY: as in `mean`.
        unsafe { self.run(Kernel::best(), Step::Finish(divisor), accs, outs, count) }
    }

    /// Turns rounded accumulators (the wide wire form of a result) into elements.
    ///
    /// # Safety
    /// As for [`Reduction::mean`], `acc` being valid for `count` accumulators and `out` for as many elements.
    pub unsafe fn narrow(self, acc: *const u8, out: *mut u8, count: usize) {
        // SAFETY: as in `mean`.
        unsafe { self.run(Kernel::best(), Step::Narrow, &[acc], &[out], count) }
    }

    /// Any of the above, on a kernel of one's choice: for tests and benchmarks.
    ///
    /// # Safety
    /// As for the method that `step` names; the kernel is one of [`Kernel::available`].
    pub unsafe fn run(self, kernel: Kernel, step: Step, sources: &[*const u8], outs: &[*mut u8], count: usize) {
        /// Calls `reduce` for the forms, with the cheapest way that gives the bits of a division by `$divisor`.
        macro_rules! divided {
            ($S:ty, $In:ty, $Out:ty, $divisor:expr, $count:expr) => {
                if $divisor.is_power_of_two() {
                    let power = Power::new($divisor.ilog2() as u8);
                    reduce::<$S, $In, $Out, Power<$S>>(kernel, sources, outs, $count, power)
                } else {
                    reduce::<$S, $In, $Out, Divide<$S>>(kernel, sources, outs, $count, Divide::new($divisor))
                }
            };
        }
        if let (DType::BF16, false, false, Step::Mean(divisor), 2..) =
            (self.dtype, self.precise, self.wide, step, count)
        {
            // SAFETY: the caller's promise.
            unsafe {
                divided!(BF16Pair, Native, Native, divisor, count / 2);
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
        with_scheme!(self, S => unsafe {
            match (step, self.wide) {
                (Step::Mean(divisor), false) => divided!(S, Native, Native, divisor, count),
                (Step::Mean(divisor) | Step::Finish(divisor), true) => divided!(S, Wide, Rounded, divisor, count),
                (Step::Finish(divisor), false) => divided!(S, Wide, Native, divisor, count),
                (Step::Sum, false) => reduce::<S, Native, Wide, Keep>(kernel, sources, outs, count, Keep),
                (Step::Sum, true) => reduce::<S, Wide, Wide, Keep>(kernel, sources, outs, count, Keep),
                (Step::Narrow, _) => divided!(S, Wide, Native, 1u32, count),
            }
        });
    }
}
