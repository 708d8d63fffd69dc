//! The operators of reductions, and the table of the kernels: operator by element type.

use super::epilogue::{Divide, DividePow2, Epilogue, Identity, Scale, ScaleAndDivide};
use super::half_tiles::TiledType;
use super::number::{Divisible, Scalable};
use super::operator::{Add, And, Greater, Lesser, Multiply, OfScaled, Operator, Or, Xor};
use super::ordered::{BF16Bits, F16Bits};
use super::pair::BF16Pair;
use super::storage::{AsAccumulator, AsElement, StorageFormat};
use super::types::{self, Plain};
use super::{Reduction, Step};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// What to do with the types, the operator and the epilogue of a reduction. Sources are in format `In`.
pub(super) trait Visitor {
    type Output;
    fn visit<S: TiledType, In: StorageFormat<S>, O: Operator<S::Acc>, E: Epilogue<S::Acc>>(
        &self,
        operator: O,
        epilogue: E,
    ) -> Self::Output;
}

/// `Some` of `$body`, with `$S` as the [`types::ReduceType`] of the key `(dtype, acc_f64, pairs)`; `None` if the family
/// lacks the element type.
macro_rules! family {
    // Floating point in a wider accumulator.
    (floats, $key:expr, $S:ident => $body:expr) => {
        family!(@ $key, $S, $body,
            (DType::F16, false, _) => types::F16, (DType::F16, true, _) => types::F16AccF64,
            (DType::BF16, false, false) => types::BF16, (DType::BF16, false, true) => BF16Pair,
            (DType::BF16, true, _) => types::BF16AccF64,
            (DType::F32, false, _) => Plain<f32>, (DType::F32, true, _) => types::F32AccF64,
            (DType::F64, ..) => Plain<f64>)
    };
    // Real and imaginary parts as separate elements.
    (complex, $key:expr, $S:ident => $body:expr) => {
        family!(@ $key, $S, $body,
            (DType::Complex64, false, _) => Plain<f32>, (DType::Complex64, true, _) => types::F32AccF64,
            (DType::Complex128, ..) => Plain<f64>)
    };
    // Integers in a wider accumulator.
    (wide_integers, $key:expr, $S:ident => $body:expr) => {
        family!(@ $key, $S, $body,
            (DType::I8, ..) => types::I8, (DType::U8, ..) => types::U8,
            (DType::I16, ..) => types::I16, (DType::U16, ..) => types::U16,
            (DType::I32, ..) => types::I32, (DType::U32, ..) => types::U32,
            (DType::I64, ..) => types::I64, (DType::U64, ..) => types::U64)
    };
    // Integers modulo a power of two, where signs make no difference.
    (residues, $key:expr, $S:ident => $body:expr) => {
        family!(@ $key, $S, $body,
            (DType::I8 | DType::U8, ..) => Plain<u8>, (DType::I16 | DType::U16, ..) => Plain<u16>,
            (DType::I32 | DType::U32, ..) => Plain<u32>, (DType::I64 | DType::U64, ..) => Plain<u64>)
    };
    // Floating point that is only compared.
    (ordered_floats, $key:expr, $S:ident => $body:expr) => {
        family!(@ $key, $S, $body,
            (DType::F16, ..) => Plain<F16Bits>, (DType::BF16, ..) => Plain<BF16Bits>,
            (DType::F32, ..) => Plain<f32>, (DType::F64, ..) => Plain<f64>)
    };
    // Integers with their signs.
    (integers, $key:expr, $S:ident => $body:expr) => {
        family!(@ $key, $S, $body,
            (DType::I8, ..) => Plain<i8>, (DType::U8, ..) => Plain<u8>,
            (DType::I16, ..) => Plain<i16>, (DType::U16, ..) => Plain<u16>,
            (DType::I32, ..) => Plain<i32>, (DType::U32, ..) => Plain<u32>,
            (DType::I64, ..) => Plain<i64>, (DType::U64, ..) => Plain<u64>)
    };
    // Integers and bool as bytes.
    (bits, $key:expr, $S:ident => $body:expr) => {
        family!(@ $key, $S, $body,
            (DType::I8 | DType::U8 | DType::I16 | DType::U16 | DType::I32 | DType::U32 | DType::I64 | DType::U64
                | DType::Bool, ..) => Plain<u8>)
    };
    (@ $key:expr, $S:ident, $body:expr, $($pattern:pat => $type:ty),*) => {
        match $key {
            $($pattern => {
                type $S = $type;
                Some($body)
            })*
            _ => None,
        }
    };
}

/// Defines [`ReduceOp`] and the selection of kernels from the table.
macro_rules! operators {
    ($kernels:ident, $S:ident; $(
        $(#[$doc:meta])*
        $op:ident $({ $($(#[$field_doc:meta])* $field:ident),+ })? = $code:literal, $name:literal:
            $($family:ident => $body:expr),+;
    )*) => {
        /// The operation of a reduction.
        #[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
        pub enum ReduceOp {
            $($(#[$doc])* $op $({ $($(#[$field_doc])* $field: f64),+ })?,)*
        }

        impl ReduceOp {
            /// One of each operator; factors are 1.
            pub const ALL: [ReduceOp; [$($code),*].len()] = [$(ReduceOp::$op $({ $($field: 1.0),+ })?),*];

            /// The name in messages.
            pub fn name(self) -> &'static str {
                match self {
                    $(ReduceOp::$op { .. } => $name,)*
                }
            }

            /// The code in signatures and interfaces; it never changes.
            pub fn code(self) -> u8 {
                match self {
                    $(ReduceOp::$op { .. } => $code,)*
                }
            }

            /// The operator with this code; factors are 1.
            #[inline(always)]
            pub fn from_code(code: i32) -> Option<ReduceOp> {
                match code {
                    $($code => Some(ReduceOp::$op $({ $($field: 1.0),+ })?),)*
                    _ => None,
                }
            }
        }

        impl Reduction {
            /// Calls `visitor` with the kernel of `step`. `None` if the operator has none for the element type.
            pub(super) fn visit<V: Visitor>(self, step: Step, visitor: &V) -> Option<V::Output> {
                let from_elements = !self.wire_is_acc && matches!(step, Step::Combine | Step::Partial);
                let key = (self.dtype, self.acc_f64, from_elements && step == Step::Combine);
                let $kernels = Kernels { from_elements, divisor: self.divisor, visitor };
                match self.op {
                    $(ReduceOp::$op $({ $($field),+ })? => {
                        None$(.or_else(|| family!($family, key, $S => $body)))+
                    })*
                }
            }
        }
    };
}

operators! { kernels, S;
    /// The sum. Integers wrap around.
    Sum = 0, "sum":
        floats => kernels.divided::<S>(1), complex => kernels.divided::<S>(1), residues => kernels.combined::<S, _>(Add);
    /// The mean over all ranks and towers. Integers round toward zero.
    Mean = 1, "mean":
        floats => kernels.mean::<S>(), complex => kernels.mean::<S>(), wide_integers => kernels.mean::<S>();
    /// The minimum. -0.0 is less than +0.0. If an input is NaN, so is the result.
    Min = 2, "min":
        ordered_floats => kernels.combined::<S, _>(Lesser), integers => kernels.combined::<S, _>(Lesser);
    /// The maximum, with the rules of [`ReduceOp::Min`].
    Max = 3, "max":
        ordered_floats => kernels.combined::<S, _>(Greater), integers => kernels.combined::<S, _>(Greater);
    /// The product. Integers wrap around.
    Product = 4, "product": floats => kernels.combined::<S, _>(Multiply), residues => kernels.combined::<S, _>(Multiply);
    /// The bitwise and; of bool, the logical one.
    BitAnd = 5, "bit_and": bits => kernels.combined::<S, _>(And);
    /// The bitwise or; of bool, the logical one.
    BitOr = 6, "bit_or": bits => kernels.combined::<S, _>(Or);
    /// The bitwise exclusive or; of bool, the logical one.
    BitXor = 7, "bit_xor": bits => kernels.combined::<S, _>(Xor);
    /// `post` times the sum of `pre` times each input: as all scaled operators, see [`ReduceOp::factors`].
    ScaledSum {
        /// The factor of each input.
        pre,
        /// The factor of the sum.
        post
    } = 8, "scaled_sum":
        floats => kernels.scaled::<S, Add>(pre, post), complex => kernels.scaled::<S, Add>(pre, post),
        wide_integers => kernels.scaled::<S, Add>(pre, post);
    /// `post` times the mean of `pre` times each input.
    ScaledMean {
        /// The factor of each input.
        pre,
        /// The factor of the mean.
        post
    } = 10, "scaled_mean":
        floats => kernels.scaled_mean::<S>(pre, post), complex => kernels.scaled_mean::<S>(pre, post),
        wide_integers => kernels.scaled_mean::<S>(pre, post);
    /// `post` times the minimum of `pre` times each input.
    ScaledMin {
        /// The factor of each input.
        pre,
        /// The factor of the minimum.
        post
    } = 11, "scaled_min":
        floats => kernels.scaled::<S, Lesser>(pre, post), integers => kernels.scaled::<S, Lesser>(pre, post);
    /// `post` times the maximum of `pre` times each input.
    ScaledMax {
        /// The factor of each input.
        pre,
        /// The factor of the maximum.
        post
    } = 12, "scaled_max":
        floats => kernels.scaled::<S, Greater>(pre, post), integers => kernels.scaled::<S, Greater>(pre, post);
    /// `post` times the product of `pre` times each input.
    ScaledProduct {
        /// The factor of each input.
        pre,
        /// The factor of the product.
        post
    } = 13, "scaled_product":
        floats => kernels.scaled::<S, Multiply>(pre, post), integers => kernels.scaled::<S, Multiply>(pre, post);
}

impl ReduceOp {
    /// Checks that the operator exists for `dtype`.
    ///
    /// # Errors
    /// [`Error::DType`], which names the operators that exist.
    pub fn check(self, dtype: DType) -> Result<()> {
        if self.exists_for(dtype) {
            return Ok(());
        }
        let others: Vec<&str> =
            ReduceOp::ALL.into_iter().filter(|op| op.exists_for(dtype)).map(ReduceOp::name).collect();
        let (dtype, name, others) = (dtype.name(), self.name(), others.join(", "));
        Err(Error::DType(format!("{dtype} has no {name}; convert it first, or use one of {others}")))
    }

    /// The factors of each input and of the result, of a scaled operator.
    ///
    /// For floating point they are rounded to the accumulator's type, and the result is rounded to the element type once.
    /// Integers are multiplied in float64 and rounded toward zero. What exceeds the accumulator becomes its limit.
    pub fn factors(self) -> Option<(f64, f64)> {
        match self {
            ReduceOp::ScaledSum { pre, post }
            | ReduceOp::ScaledMean { pre, post }
            | ReduceOp::ScaledMin { pre, post }
            | ReduceOp::ScaledMax { pre, post }
            | ReduceOp::ScaledProduct { pre, post } => Some((pre, post)),
            _ => None,
        }
    }

    /// The operator that the factors surround.
    pub fn without_factors(self) -> ReduceOp {
        match self {
            ReduceOp::ScaledSum { .. } => ReduceOp::Sum,
            ReduceOp::ScaledMean { .. } => ReduceOp::Mean,
            ReduceOp::ScaledMin { .. } => ReduceOp::Min,
            ReduceOp::ScaledMax { .. } => ReduceOp::Max,
            ReduceOp::ScaledProduct { .. } => ReduceOp::Product,
            other => other,
        }
    }

    /// The same operator with these factors; one without factors ignores them.
    #[inline(always)]
    pub fn with_factors(self, pre: f64, post: f64) -> ReduceOp {
        match self {
            ReduceOp::ScaledSum { .. } => ReduceOp::ScaledSum { pre, post },
            ReduceOp::ScaledMean { .. } => ReduceOp::ScaledMean { pre, post },
            ReduceOp::ScaledMin { .. } => ReduceOp::ScaledMin { pre, post },
            ReduceOp::ScaledMax { .. } => ReduceOp::ScaledMax { pre, post },
            ReduceOp::ScaledProduct { .. } => ReduceOp::ScaledProduct { pre, post },
            other => other,
        }
    }

    /// Whether an input of zeros leaves the others' result as it is, except for the divisor of a mean.
    pub fn adds(self) -> bool {
        matches!(self.without_factors(), ReduceOp::Sum | ReduceOp::Mean)
    }

    /// Whether the result of a single input is that input.
    pub fn keeps_single_input(self) -> bool {
        self.factors().is_none()
    }

    fn exists_for(self, dtype: DType) -> bool {
        struct Exists;
        impl Visitor for Exists {
            type Output = ();
            fn visit<S: TiledType, In: StorageFormat<S>, O: Operator<S::Acc>, E: Epilogue<S::Acc>>(&self, _: O, _: E) {}
        }
        let reduction = Reduction { op: self, dtype, acc_f64: false, wire_is_acc: false, divisor: 1 };
        reduction.visit(Step::Combine, &Exists).is_some()
    }
}

/// Calls a visitor with the operator and epilogue of a row of the table.
struct Kernels<'a, V> {
    /// Whether the sources are elements, not accumulators.
    from_elements: bool,
    divisor: u32,
    visitor: &'a V,
}

impl<V: Visitor> Kernels<'_, V> {
    /// Chooses the format of the sources.
    #[inline(always)]
    fn visit<S: TiledType, O: Operator<S::Acc>, E: Epilogue<S::Acc>>(&self, operator: O, epilogue: E) -> V::Output {
        if S::PLAIN || self.from_elements {
            self.visitor.visit::<S, AsElement, O, E>(operator, epilogue)
        } else {
            self.visitor.visit::<S, AsAccumulator, O, E>(operator, epilogue)
        }
    }

    #[inline(always)]
    fn combined<S: TiledType, O: Operator<S::Acc>>(&self, operator: O) -> V::Output {
        self.visit::<S, O, Identity>(operator, Identity)
    }

    #[inline(always)]
    fn mean<S: TiledType<Acc: Divisible>>(&self) -> V::Output {
        self.divided::<S>(self.divisor)
    }

    /// The sum divided by `divisor`, with the fastest epilogue that gives the bits of a division.
    #[inline(always)]
    fn divided<S: TiledType<Acc: Divisible>>(&self, divisor: u32) -> V::Output {
        if divisor.is_power_of_two() {
            self.visit::<S, Add, DividePow2<S::Acc>>(Add, DividePow2::new(divisor.ilog2() as u8))
        } else {
            self.visit::<S, Add, Divide<S::Acc>>(Add, Divide::new(divisor))
        }
    }

    fn scaled<S: TiledType<Acc: Scalable>, O: Operator<S::Acc> + Default>(&self, pre: f64, post: f64) -> V::Output {
        self.lifted::<S, O, _>(pre, Scale::new(post))
    }

    fn scaled_mean<S: TiledType<Acc: Divisible + Scalable>>(&self, pre: f64, post: f64) -> V::Output {
        self.lifted::<S, Add, _>(pre, ScaleAndDivide::new(post, self.divisor))
    }

    /// Elements are multiplied by `pre`; accumulators contain it.
    fn lifted<S: TiledType<Acc: Scalable>, O: Operator<S::Acc> + Default, E: Epilogue<S::Acc>>(
        &self,
        pre: f64,
        epilogue: E,
    ) -> V::Output {
        if self.from_elements {
            self.visitor.visit::<S, AsElement, _, _>(OfScaled::<O, _>::new(pre), epilogue)
        } else {
            self.visitor.visit::<S, AsAccumulator, _, _>(O::default(), epilogue)
        }
    }
}
