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

/// The source of a set, the first part of its kernels' names, and the last parts, as in `types.cuh`.
pub(super) struct Source {
    pub text: &'static str,
    pub what: &'static str,
    pub types: &'static [&'static str],
}

const FREQUENT: &[&str] =
    &["f32", "f64", "f16", "bf16", "i8", "u8", "i32", "i64", "f32_precise", "f16_precise", "bf16_precise", COPY];
const ORDERED: &[&str] = &["f32", "f64", "f16", "bf16", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"];
const INTEGERS: [DType; 8] =
    [DType::I8, DType::U8, DType::I16, DType::U16, DType::I32, DType::U32, DType::I64, DType::U64];
/// Means, minima, maxima and products, each of [`INTEGERS`].
const SCALED_INTEGERS: &[&str] = &[
    "average_i8",
    "average_u8",
    "average_i16",
    "average_u16",
    "average_i32",
    "average_u32",
    "average_i64",
    "average_u64",
    "min_i8",
    "min_u8",
    "min_i16",
    "min_u16",
    "min_i32",
    "min_u32",
    "min_i64",
    "min_u64",
    "max_i8",
    "max_u8",
    "max_i16",
    "max_u16",
    "max_i32",
    "max_u32",
    "max_i64",
    "max_u64",
    "product_i8",
    "product_u8",
    "product_i16",
    "product_u16",
    "product_i32",
    "product_u32",
    "product_i64",
    "product_u64",
];
const FLOATS: &[&str] = &["f32", "f64", "f16", "bf16", "f32_precise", "f16_precise", "bf16_precise"];
/// The kernel that copies, at the end of [`KernelSet::Means`].
pub(super) const COPY: &str = "copy_bytes";

/// In the order of [`KernelSet`].
pub(super) const SOURCES: [Source; 12] = [
    Source { text: include_str!("kernels/allreduce_mean.cu"), what: "average_", types: FREQUENT },
    Source {
        text: include_str!("kernels/allreduce_integers.cu"),
        what: "average_",
        types: &["i16", "u16", "u32", "u64"],
    },
    Source { text: include_str!("kernels/allreduce_min.cu"), what: "min_", types: ORDERED },
    Source { text: include_str!("kernels/allreduce_max.cu"), what: "max_", types: ORDERED },
    Source {
        text: include_str!("kernels/allreduce_product.cu"),
        what: "product_",
        types: &[
            "f32",
            "f64",
            "f16",
            "bf16",
            "f32_precise",
            "f16_precise",
            "bf16_precise",
            "bits8",
            "bits16",
            "bits32",
            "bits64",
        ],
    },
    Source { text: include_str!("kernels/allreduce_bits.cu"), what: "bit_", types: &["and", "or", "xor"] },
    Source { text: include_str!("kernels/allreduce_scaled_mean.cu"), what: "scaled_average_", types: FLOATS },
    Source { text: include_str!("kernels/allreduce_scaled_min.cu"), what: "scaled_min_", types: FLOATS },
    Source { text: include_str!("kernels/allreduce_scaled_max.cu"), what: "scaled_max_", types: FLOATS },
    Source { text: include_str!("kernels/allreduce_scaled_product.cu"), what: "scaled_product_", types: FLOATS },
    Source { text: include_str!("kernels/allreduce_scaled_integers.cu"), what: "scaled_", types: SCALED_INTEGERS },
    Source {
        text: include_str!("kernels/reduce_sum.cu"),
        what: "sum_",
        types: FREQUENT.split_at(FREQUENT.len() - 1).0,
    },
];

/// The last part of the names of kernels for a floating type; with `precise`, accumulators are float64.
fn float_name(dtype: DType, precise: bool) -> Option<&'static str> {
    Some(match (dtype, precise) {
        (DType::F32, false) => "f32",
        (DType::F64, _) => "f64",
        (DType::F16, false) => "f16",
        (DType::BF16, false) => "bf16",
        (DType::F32, true) => "f32_precise",
        (DType::F16, true) => "f16_precise",
        (DType::BF16, true) => "bf16_precise",
        _ => return None,
    })
}

/// Its place in [`INTEGERS`], the order of all lists of their names.
fn integer_index(dtype: DType) -> Option<usize> {
    INTEGERS.iter().position(|integer| *integer == dtype)
}

fn integer_name(dtype: DType) -> Option<&'static str> {
    integer_index(dtype).map(|index| ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"][index])
}

/// The kernel of an operator on elements of [`kernel_type`], as its set and the last part of its name.
pub(super) fn kernel_of(op: ReduceOp, dtype: DType, precise: bool) -> Option<(KernelSet, &'static str)> {
    let number = |precise| float_name(dtype, precise).or_else(|| integer_name(dtype));
    let scaled = |set, index: usize| match float_name(dtype, precise) {
        Some(name) => Some((set, name)),
        None => {
            let name = SCALED_INTEGERS[index * INTEGERS.len() + integer_index(dtype)?];
            Some((KernelSet::ScaledIntegers, name))
        }
    };
    match op {
        ReduceOp::Sum | ReduceOp::Mean => number(precise)
            .map(|name| (if FREQUENT.contains(&name) { KernelSet::Means } else { KernelSet::Integers }, name)),
        ReduceOp::Min => number(false).map(|name| (KernelSet::Minima, name)),
        ReduceOp::Max => number(false).map(|name| (KernelSet::Maxima, name)),
        ReduceOp::Product => float_name(dtype, precise)
            .or_else(|| integer_index(dtype).map(|index| ["bits8", "bits16", "bits32", "bits64"][index / 2]))
            .map(|name| (KernelSet::Products, name)),
        ReduceOp::BitAnd => Some((KernelSet::Bits, "and")),
        ReduceOp::BitOr => Some((KernelSet::Bits, "or")),
        ReduceOp::BitXor => Some((KernelSet::Bits, "xor")),
        ReduceOp::ScaledSum { .. } | ReduceOp::ScaledMean { .. } => scaled(KernelSet::ScaledMeans, 0),
        ReduceOp::ScaledMin { .. } => scaled(KernelSet::ScaledMinima, 1),
        ReduceOp::ScaledMax { .. } => scaled(KernelSet::ScaledMaxima, 2),
        ReduceOp::ScaledProduct { .. } => scaled(KernelSet::ScaledProducts, 3),
    }
}

/// The set of the kernel for `reduction`: sums are means with the divisor 1. Without one, it must run on the host.
pub fn kernel_set(reduction: Reduction) -> Option<KernelSet> {
    let Reduction { op, dtype, acc_f64, .. } = reduction;
    kernel_of(op, kernel_type(op, dtype), acc_f64).map(|(set, _)| set)
}

/// Whether there are kernels for the undivided sums of `reduction` that the host goes on with. It has other accumulators
/// for sums of integers.
pub fn has_partial_kernel(reduction: Reduction) -> bool {
    let Reduction { op, dtype, acc_f64, .. } = reduction;
    let is_sum = op == ReduceOp::Mean || op == ReduceOp::Sum && dtype.is_float();
    is_sum && kernel_of(op, dtype, acc_f64).is_some_and(|(set, _)| set == KernelSet::Means)
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
        let all = [
            KernelSet::Means,
            KernelSet::Integers,
            KernelSet::Minima,
            KernelSet::Maxima,
            KernelSet::Products,
            KernelSet::Bits,
            KernelSet::ScaledMeans,
            KernelSet::ScaledMinima,
            KernelSet::ScaledMaxima,
            KernelSet::ScaledProducts,
            KernelSet::ScaledIntegers,
        ];
        for (set, source) in all.into_iter().zip(&SOURCES) {
            let known = |name: &&str| *name == COPY || kernels.contains(&(set, name));
            assert!(source.types.iter().all(known), "{set:?}");
            assert!(
                kernels.iter().filter(|(of, _)| *of == set).all(|(_, name)| source.types.contains(name)),
                "{set:?}"
            );
        }
        assert_eq!(SOURCES[KernelSet::Sums as usize].what, "sum_");
    }
}
