//! Reductions of elements: every operator and element type. Pure arithmetic on raw memory, no threads.
//!
//! Sources are combined in the given order. Sums and products have a wider accumulator: float32 for float16 and
//! bfloat16, the next wider integer for means of integers, and float64 for all floating point with `acc_f64`. The
//! result is rounded to the element type once, to nearest even, integers toward zero. Minima, maxima, bit operations,
//! and sums and products of integers need no wider accumulator than an element. The bits depend only on the order of
//! the sources, not on the processor, on addresses or on the floating-point state of the thread.
//!
//! The wire carries elements. With several replicas per process (`wire_is_acc`) it carries accumulators, the partial
//! results of the replicas.
//!
//! There is one loop (`kernel.rs`), for a whole reduction or for a step of it, generic over types (`types.rs`), operators (`operator.rs`, with the arithmetic of
//! `number.rs` and `ordered.rs`), storage formats (`storage.rs`) and instruction sets (`isa.rs`); `op.rs` has the table
//! of those that exist. LLVM vectorizes the loop: it has blocks of fixed size, no branches, and no aliasing. It is
//! compiled for the target's minimum, on x86-64 also for AVX2 and AVX-512, and selected once per process. Only float16
//! needs intrinsics there. On AArch64, NEON is part of the minimum, and float16 and bfloat16 conversions vectorize from
//! integer operations (`convert.rs`).

pub(crate) mod adasum;
mod bound;
mod convert;
mod epilogue;
mod half_tiles;
mod isa;
mod kernel;
mod number;
mod op;
mod operator;
#[cfg(test)]
mod oracle;
mod ordered;
mod pair;
#[cfg(test)]
mod reference;
mod storage;
#[cfg(test)]
mod tests;
pub(crate) mod types;

use std::ptr;

use crate::dtype::DType;
use crate::float_state::DefaultFloatState;
pub use bound::BoundReduction;
use epilogue::{Epilogue, Identity};
use half_tiles::TiledType;
pub use kernel::Kernel;
use kernel::reduce;
pub use op::ReduceOp;
use op::Visitor;
use operator::Operator;
use storage::{AsAccumulator, AsElement, AsRoundedAccumulator, StorageFormat};

/// An operator on elements of a type. The operator exists for the type ([`ReduceOp::check`]), except where only sizes
/// are used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reduction {
    /// The operator.
    pub op: ReduceOp,
    /// The element type.
    pub dtype: DType,
    /// Whether floating point accumulates in float64.
    pub acc_f64: bool,
    /// Whether the wire holds accumulators.
    pub wire_is_acc: bool,
    /// The number of inputs on all ranks, by which [`ReduceOp::Mean`] divides; from 1 to `i32::MAX`.
    pub divisor: u32,
}

/// A part of a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// [`Reduction::combine`]
    Combine,
    /// [`Reduction::partial`]
    Partial,
    /// [`Reduction::finish`]
    Finish,
    /// [`Reduction::narrow`]
    Narrow,
}

/// The bytes of `factor` as an element of `dtype`: float32 and float64 rounded as in a scaled sum, float16 and bfloat16
/// only if they hold it exactly, because a scaled sum has it in float32. `None` for other types too.
pub fn factor_bytes(dtype: DType, factor: f64) -> Option<Vec<u8>> {
    let single = factor as f32;
    let half = |bits: u16, back: f32| (f64::from(back) == factor).then(|| bits.to_ne_bytes().to_vec());
    match dtype {
        DType::F64 => Some(factor.to_ne_bytes().to_vec()),
        DType::F32 => Some(single.to_ne_bytes().to_vec()),
        DType::F16 => half(convert::f32_to_f16(single), convert::f16_to_f32(convert::f32_to_f16(single))),
        DType::BF16 => half(convert::f32_to_bf16(single), convert::bf16_to_f32(convert::f32_to_bf16(single))),
        _ => None,
    }
}

impl Reduction {
    /// Size of an accumulator in bytes.
    pub fn acc_size(self) -> usize {
        struct AccSize(DType);
        impl Visitor for AccSize {
            type Output = usize;
            fn visit<S: TiledType, In: StorageFormat<S>, O: Operator<S::Acc>, E: Epilogue<S::Acc>>(
                &self,
                _: O,
                _: E,
            ) -> usize {
                self.0.size() / size_of::<S::Element>() * size_of::<S::Acc>()
            }
        }
        self.visit(Step::Partial, &AccSize(self.dtype)).unwrap_or(self.dtype.size())
    }

    /// Size of an element on the wire in bytes.
    pub fn wire_size(self) -> usize {
        if self.wire_is_acc { self.acc_size() } else { self.dtype.size() }
    }

    /// Whether an accumulator is wider than an element on the wire.
    pub fn widens(self) -> bool {
        self.acc_size() > self.wire_size()
    }

    /// The result of the sources in every out, all in wire format. For a mean:
    /// `out[i] = round((sources[0][i] + sources[1][i] + …) / divisor)`.
    ///
    /// # Safety
    /// There is a source and an out. Every pointer is valid for `count` wire elements, at any alignment, without
    /// concurrent writes. An out may be one of the sources, and overlaps nothing else.
    pub unsafe fn combine(self, sources: &[*const u8], outs: &[*mut u8], count: usize) {
        // SAFETY: guaranteed by the caller; `best` returns an available kernel.
        unsafe { self.run(Kernel::best(), Step::Combine, sources, outs, count) }
    }

    /// The partial result of the sources, from wire elements to accumulators. For a mean:
    /// `acc[i] = sources[0][i] + sources[1][i] + …`.
    ///
    /// # Safety
    /// As for [`Reduction::combine`]; `acc` is valid for `count` accumulators, and is a source only if wire elements
    /// are accumulators.
    pub unsafe fn partial(self, sources: &[*const u8], acc: *mut u8, count: usize) {
        // SAFETY: as in `combine`.
        unsafe { self.run(Kernel::best(), Step::Partial, sources, &[acc], count) }
    }

    /// The result of partial results in every out, from accumulators to wire elements. For a mean:
    /// `out[i] = round((accs[0][i] + accs[1][i] + …) / divisor)`.
    ///
    /// # Safety
    /// As for [`Reduction::combine`]; `accs` are valid for `count` accumulators each, and an out is one of them only if
    /// wire elements are accumulators.
    pub unsafe fn finish(self, accs: &[*const u8], outs: &[*mut u8], count: usize) {
        // SAFETY: as in `combine`.
        unsafe { self.run(Kernel::best(), Step::Finish, accs, outs, count) }
    }

    /// Converts rounded accumulators (a result on a wire of accumulators) to elements.
    ///
    /// # Safety
    /// As for [`Reduction::combine`]; `acc` is valid for `count` accumulators and `out` for `count` elements.
    pub unsafe fn narrow(self, acc: *const u8, out: *mut u8, count: usize) {
        // SAFETY: as in `combine`.
        unsafe { self.run(Kernel::best(), Step::Narrow, &[acc], &[out], count) }
    }

    /// Runs any of the above on a given kernel: for tests and benchmarks.
    ///
    /// # Safety
    /// As for the method of `step`; `kernel` is one of [`Kernel::available`].
    pub unsafe fn run(self, kernel: Kernel, step: Step, sources: &[*const u8], outs: &[*mut u8], count: usize) {
        if step == Step::Narrow {
            // SAFETY: guaranteed by the caller.
            return unsafe { self.run_narrow(kernel, sources, outs, count) };
        }
        let _default = DefaultFloatState::enter();
        let found = self.visit(step, &Run { reduction: self, kernel, step, sources, outs, count });
        debug_assert!(found.is_some(), "{self:?} does not exist");
    }

    /// # Safety
    /// As for [`Reduction::narrow`]; `kernel` is available.
    unsafe fn run_narrow(self, kernel: Kernel, accs: &[*const u8], outs: &[*mut u8], count: usize) {
        let size = self.dtype.size();
        if self.acc_size() == size {
            for (acc, out) in accs.iter().zip(outs) {
                // SAFETY: guaranteed by the caller.
                unsafe { ptr::copy(*acc, *out, count * size) };
            }
        } else {
            // All operators with a wider accumulator have the one of the mean.
            let convert = Reduction { op: ReduceOp::Mean, divisor: 1, wire_is_acc: false, ..self };
            // SAFETY: guaranteed by the caller.
            unsafe { convert.run(kernel, Step::Finish, accs, outs, count) };
        }
    }
}

/// The arguments of [`Reduction::run`], which vouches for them.
struct Run<'a> {
    reduction: Reduction,
    kernel: Kernel,
    step: Step,
    sources: &'a [*const u8],
    outs: &'a [*mut u8],
    count: usize,
}

impl Visitor for Run<'_> {
    type Output = ();
    fn visit<S: TiledType, In: StorageFormat<S>, O: Operator<S::Acc>, E: Epilogue<S::Acc>>(
        &self,
        operator: O,
        epilogue: E,
    ) {
        let Run { reduction, kernel, step, sources, outs, count } = *self;
        // SAFETY: guaranteed by the caller of `run`.
        unsafe { run_kernel::<S, In, O, E>(reduction, kernel, step, sources, outs, count, operator, epilogue) };
    }
}

/// Runs the kernel of `step` for these types.
///
/// # Safety
/// As for [`Reduction::run`].
#[inline(always)]
#[allow(clippy::too_many_arguments)] // the arguments of a kernel
unsafe fn run_kernel<S: TiledType, In: StorageFormat<S>, O: Operator<S::Acc>, E: Epilogue<S::Acc>>(
    reduction: Reduction,
    kernel: Kernel,
    step: Step,
    sources: &[*const u8],
    outs: &[*mut u8],
    count: usize,
    operator: O,
    epilogue: E,
) {
    let bytes = count * reduction.dtype.size();
    let count = bytes / size_of::<S::Element>();
    // SAFETY: guaranteed by the caller.
    unsafe {
        if step == Step::Partial && S::PLAIN {
            reduce::<S, In, AsElement, O, Identity>(kernel, sources, outs, count, operator, Identity);
        } else if step == Step::Partial {
            reduce::<S, In, AsAccumulator, O, Identity>(kernel, sources, outs, count, operator, Identity);
        } else if !In::NATIVE && !S::PLAIN && reduction.wire_is_acc {
            reduce::<S, In, AsRoundedAccumulator, O, E>(kernel, sources, outs, count, operator, epilogue);
        } else {
            reduce::<S, In, AsElement, O, E>(kernel, sources, outs, count, operator, epilogue);
            if S::IS_PAIR && !bytes.is_multiple_of(size_of::<S::Element>()) {
                let half = bytes - count * size_of::<S::Element>();
                reduce_half::<S, O, E>(kernel, sources, outs, bytes - half..bytes, operator, epilogue);
            }
        }
    }
}

/// Reduces the bytes `range`, less than an element of `S`: the last of an odd number of tensor elements.
///
/// # Safety
/// As for [`reduce`], for these bytes.
unsafe fn reduce_half<S: TiledType, O: Operator<S::Acc>, E: Epilogue<S::Acc>>(
    kernel: Kernel,
    sources: &[*const u8],
    outs: &[*mut u8],
    range: std::ops::Range<usize>,
    operator: O,
    epilogue: E,
) {
    let pad = |source: &*const u8| {
        let mut element = S::Element::default();
        // SAFETY: guaranteed by the caller; the range is shorter than an element.
        unsafe { source.add(range.start).copy_to_nonoverlapping((&raw mut element).cast(), range.len()) };
        element
    };
    let padded: Vec<S::Element> = sources.iter().map(pad).collect();
    let pointers: Vec<*const u8> = padded.iter().map(|element| ptr::from_ref(element).cast()).collect();
    let mut result = S::Element::default();
    let result: *mut u8 = (&raw mut result).cast();
    // SAFETY: one element each; then as above.
    unsafe {
        reduce::<S, AsElement, AsElement, O, E>(kernel, &pointers, &[result], 1, operator, epilogue);
        for out in outs {
            out.add(range.start).copy_from_nonoverlapping(result, range.len());
        }
    }
}
