//! Which kernel runs a reduction: operator by element type. Plain data; [`super::kernels`] compiles and launches them.

use crate::dtype::DType;
use crate::reduce::{ReduceOp, Reduction};

/// Kernels that are compiled together. [`KernelSet::Means`] are always needed, the others by the first call that needs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum KernelSet {
    /// Frequent means, and copies of bytes.
    Means,
    /// Means of other integers.
    Integers,
    /// Minima.
    Minima,
    /// Maxima.
    Maxima,
    /// Products.
    Products,
    /// Operators on bits.
    Bits,
    /// Means with factors; sums are means.
    ScaledMeans,
    /// Minima with factors.
    ScaledMinima,
    /// Maxima with factors.
    ScaledMaxima,
    /// Products with factors.
    ScaledProducts,
    /// All of these of integers.
    ScaledIntegers,
    /// Undivided sums.
    Sums,
}

/// The source of a set, and the names of its kernels: each operator with each kind of elements, as in `types.cuh`. At the
/// end of [`KernelSet::Means`] comes [`COPY`].
pub(super) struct Source {
    pub text: &'static str,
    pub operators: &'static [&'static str],
    pub elements: &'static [&'static str],
}

impl KernelSet {
    /// The names of its kernels, in their order.
    pub(super) fn names(self) -> Vec<String> {
        let Source { operators, elements, .. } = SOURCES[self as usize];
        let of = |operator| elements.iter().map(move |elements| format!("{operator}_{elements}"));
        let copy = (self == KernelSet::Means).then(|| COPY.to_owned());
        operators.iter().flat_map(of).chain(copy).collect()
    }
}

/// A kernel of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kernel {
    pub set: KernelSet,
    pub operator: &'static str,
    pub elements: &'static str,
}

impl Kernel {
    /// Its place among those of its set.
    pub fn place(self) -> Option<usize> {
        let Source { operators, elements, .. } = SOURCES[self.set as usize];
        let place = |names: &[&str], name: &str| names.iter().position(|of| *of == name);
        Some(place(operators, self.operator)? * elements.len() + place(elements, self.elements)?)
    }
}

const FREQUENT: &[&str] =
    &["f32", "f64", "f16", "bf16", "i8", "u8", "i32", "i64", "f32_precise", "f16_precise", "bf16_precise"];
const ORDERED: &[&str] = &["f32", "f64", "f16", "bf16", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"];
const INTEGERS: &[&str] = ORDERED.split_at(4).1;
const FLOATS: &[&str] = &["f32", "f64", "f16", "bf16", "f32_precise", "f16_precise", "bf16_precise"];
const MULTIPLIED: &[&str] =
    &["f32", "f64", "f16", "bf16", "f32_precise", "f16_precise", "bf16_precise", "bits8", "bits16", "bits32", "bits64"];
/// The kernel that copies, the last of [`KernelSet::Means`].
pub(super) const COPY: &str = "copy_bytes";

/// In the order of [`KernelSet`].
pub(super) const SOURCES: [Source; 12] = [
    Source { text: include_str!("kernels/allreduce_mean.cu"), operators: &["average"], elements: FREQUENT },
    Source {
        text: include_str!("kernels/allreduce_integers.cu"),
        operators: &["average"],
        elements: &["i16", "u16", "u32", "u64"],
    },
    Source { text: include_str!("kernels/allreduce_min.cu"), operators: &["min"], elements: ORDERED },
    Source { text: include_str!("kernels/allreduce_max.cu"), operators: &["max"], elements: ORDERED },
    Source { text: include_str!("kernels/allreduce_product.cu"), operators: &["product"], elements: MULTIPLIED },
    Source { text: include_str!("kernels/allreduce_bits.cu"), operators: &["bit"], elements: &["and", "or", "xor"] },
    Source { text: include_str!("kernels/allreduce_scaled_mean.cu"), operators: &["scaled_average"], elements: FLOATS },
    Source { text: include_str!("kernels/allreduce_scaled_min.cu"), operators: &["scaled_min"], elements: FLOATS },
    Source { text: include_str!("kernels/allreduce_scaled_max.cu"), operators: &["scaled_max"], elements: FLOATS },
    Source {
        text: include_str!("kernels/allreduce_scaled_product.cu"),
        operators: &["scaled_product"],
        elements: FLOATS,
    },
    Source {
        text: include_str!("kernels/allreduce_scaled_integers.cu"),
        operators: &["scaled_average", "scaled_min", "scaled_max", "scaled_product"],
        elements: INTEGERS,
    },
    Source { text: include_str!("kernels/reduce_sum.cu"), operators: &["sum"], elements: FREQUENT },
];

/// What the names of kernels call elements of `dtype`; with `precise`, accumulators are float64.
fn elements_of(dtype: DType, precise: bool) -> Option<&'static str> {
    Some(match (dtype, precise) {
        (DType::F32, true) => "f32_precise",
        (DType::F16, true) => "f16_precise",
        (DType::BF16, true) => "bf16_precise",
        (DType::F32, false) => "f32",
        (DType::F16, false) => "f16",
        (DType::BF16, false) => "bf16",
        (DType::F64, _) => "f64",
        (DType::I8, _) => "i8",
        (DType::U8, _) => "u8",
        (DType::I16, _) => "i16",
        (DType::U16, _) => "u16",
        (DType::I32, _) => "i32",
        (DType::U32, _) => "u32",
        (DType::I64, _) => "i64",
        (DType::U64, _) => "u64",
        (DType::Bool | DType::Complex64 | DType::Complex128, _) => return None,
    })
}

/// The kernel of an operator on elements of [`kernel_type`].
pub(super) fn kernel_of(op: ReduceOp, dtype: DType, precise: bool) -> Option<Kernel> {
    let elements = elements_of(dtype, precise)?;
    let scaled = |set| if dtype.is_float() { set } else { KernelSet::ScaledIntegers };
    let (set, operator, elements) = match op {
        ReduceOp::Sum | ReduceOp::Mean if FREQUENT.contains(&elements) => (KernelSet::Means, "average", elements),
        ReduceOp::Sum | ReduceOp::Mean => (KernelSet::Integers, "average", elements),
        ReduceOp::Min => (KernelSet::Minima, "min", elements_of(dtype, false)?),
        ReduceOp::Max => (KernelSet::Maxima, "max", elements_of(dtype, false)?),
        ReduceOp::Product if dtype.is_float() => (KernelSet::Products, "product", elements),
        ReduceOp::Product => {
            let bits = ["bits8", "bits16", "bits32", "bits64"][dtype.size().ilog2() as usize];
            (KernelSet::Products, "product", bits)
        }
        ReduceOp::BitAnd => (KernelSet::Bits, "bit", "and"),
        ReduceOp::BitOr => (KernelSet::Bits, "bit", "or"),
        ReduceOp::BitXor => (KernelSet::Bits, "bit", "xor"),
        ReduceOp::ScaledSum { .. } | ReduceOp::ScaledMean { .. } => {
            (scaled(KernelSet::ScaledMeans), "scaled_average", elements)
        }
        ReduceOp::ScaledMin { .. } => (scaled(KernelSet::ScaledMinima), "scaled_min", elements),
        ReduceOp::ScaledMax { .. } => (scaled(KernelSet::ScaledMaxima), "scaled_max", elements),
        ReduceOp::ScaledProduct { .. } => (scaled(KernelSet::ScaledProducts), "scaled_product", elements),
    };
    Some(Kernel { set, operator, elements })
}

/// The set of the kernel for `reduction`: sums are means with the divisor 1. Without one, it must run on the host.
pub fn kernel_set(reduction: Reduction) -> Option<KernelSet> {
    let Reduction { op, dtype, acc_f64, .. } = reduction;
    kernel_of(op, kernel_type(op, dtype), acc_f64).map(|kernel| kernel.set)
}

/// Whether there are kernels for the undivided sums of `reduction` that the host goes on with. It has other accumulators
/// for sums of integers.
pub fn has_partial_kernel(reduction: Reduction) -> bool {
    let Reduction { op, dtype, acc_f64, .. } = reduction;
    let is_sum = op == ReduceOp::Mean || op == ReduceOp::Sum && dtype.is_float();
    is_sum && kernel_of(op, dtype, acc_f64).is_some_and(|kernel| kernel.set == KernelSet::Means)
}

/// The type whose kernel runs `op` on elements of `dtype`: sums of integers wrap around, whatever their sign, and complex
/// numbers are two elements. Operators on bits run on bytes.
pub fn kernel_type(op: ReduceOp, dtype: DType) -> DType {
    match (op.without_factors(), dtype) {
        (ReduceOp::Sum, DType::U32) if op == ReduceOp::Sum => DType::I32,
        (ReduceOp::Sum, DType::U64) if op == ReduceOp::Sum => DType::I64,
        (ReduceOp::Sum | ReduceOp::Mean, DType::Complex64) => DType::F32,
        (ReduceOp::Sum | ReduceOp::Mean, DType::Complex128) => DType::F64,
        (ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor, _) => DType::U8,
        _ => dtype,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn all_reductions_have_kernels() {
        const FLOATS: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];
        let mut kernels = Vec::new();
        for op in ReduceOp::ALL {
            for dtype in DType::ALL.into_iter().filter(|dtype| op.check(*dtype).is_ok()) {
                for acc_f64 in [false, true] {
                    let reduction = Reduction { op, dtype, acc_f64, wire_is_acc: false, divisor: 2 };
                    assert!(kernel_set(reduction).is_some(), "{reduction:?}");
                    kernels.extend(kernel_of(op, kernel_type(op, dtype), acc_f64));
                    let frequent = FLOATS.contains(&dtype)
                        || op == ReduceOp::Mean && [DType::I8, DType::U8, DType::I32, DType::I64].contains(&dtype);
                    let partial = frequent && [ReduceOp::Sum, ReduceOp::Mean].contains(&op);
                    assert_eq!(has_partial_kernel(reduction), partial, "{reduction:?}");
                }
            }
        }
        let sets: BTreeSet<KernelSet> = kernels.iter().map(|kernel: &Kernel| kernel.set).collect();
        for set in sets {
            let of_set = kernels.iter().filter(|kernel| kernel.set == set);
            let places: BTreeSet<usize> = of_set.filter_map(|kernel| kernel.place()).collect();
            let count = set.names().len() - usize::from(set == KernelSet::Means);
            assert!(places.into_iter().eq(0..count), "{set:?} has kernels that nothing runs");
        }
        assert!(kernels.iter().all(|kernel| kernel.place().is_some()));
        assert_eq!(SOURCES[KernelSet::Sums as usize].operators, ["sum"]);
        assert_eq!(KernelSet::Means.names().last().map(String::as_str), Some(COPY));
    }
}
