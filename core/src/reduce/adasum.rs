//! The arithmetic of Adasum: a sum of gradients that is their sum where they are orthogonal, and their mean where they
//! are parallel (Maleki et al., 2020, arXiv:2006.02924, equation 4).

use super::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::dtype::DType;

/// A type in which Adasum is computed.
pub(crate) trait Work: Copy + Default + Send + 'static {
    /// The type of elements of the same format.
    const DTYPE: DType;
    /// The element at `from`, of type `dtype`.
    ///
    /// # Safety
    /// The element is valid for reads and aligned.
    unsafe fn load(from: *const u8, dtype: DType) -> Self;
    /// Writes the element at `to`, of type `dtype`.
    ///
    /// # Safety
    /// The element is valid for writes and aligned.
    unsafe fn store(self, to: *mut u8, dtype: DType);
    /// The value.
    fn wide(self) -> f64;
    /// The value, rounded.
    fn narrow(value: f64) -> Self;
}

impl Work for f32 {
    const DTYPE: DType = DType::F32;

    unsafe fn load(from: *const u8, dtype: DType) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            match dtype {
                DType::F16 => f16_to_f32(from.cast::<u16>().read()),
                DType::BF16 => bf16_to_f32(from.cast::<u16>().read()),
                _ => from.cast::<f32>().read(),
            }
        }
    }

    unsafe fn store(self, to: *mut u8, dtype: DType) {
        // SAFETY: the caller's promise.
        unsafe {
            match dtype {
                DType::F16 => to.cast::<u16>().write(f32_to_f16(self)),
                DType::BF16 => to.cast::<u16>().write(f32_to_bf16(self)),
                _ => to.cast::<f32>().write(self),
            }
        }
    }

    fn wide(self) -> f64 {
        f64::from(self)
    }

    fn narrow(value: f64) -> f32 {
        value as f32
    }
}

impl Work for f64 {
    const DTYPE: DType = DType::F64;

    unsafe fn load(from: *const u8, dtype: DType) -> f64 {
        // SAFETY: the caller's promise.
        unsafe {
            match dtype {
                DType::F64 => from.cast::<f64>().read(),
                narrow => f64::from(f32::load(from, narrow)),
            }
        }
    }

    unsafe fn store(self, to: *mut u8, dtype: DType) {
        // SAFETY: the caller's promise.
        unsafe {
            match dtype {
                DType::F64 => to.cast::<f64>().write(self),
                narrow => (self as f32).store(to, narrow),
            }
        }
    }

    fn wide(self) -> f64 {
        self
    }

    fn narrow(value: f64) -> f64 {
        value
    }
}

/// Whether Adasum has a meaning for `dtype`.
pub(crate) fn accepts(dtype: DType) -> bool {
    dtype.is_float()
}

/// The products a·a, b·b and a·b, in float64.
pub(crate) fn dot_products<W: Work>(a: &[W], b: &[W]) -> [f64; 3] {
    let add = |[aa, bb, ab]: [f64; 3], (a, b): (&W, &W)| {
        let (a, b) = (a.wide(), b.wide());
        [aa + a * a, bb + b * b, ab + a * b]
    };
    a.iter().zip(b).fold([0.0; 3], add)
}

/// Replaces `a` by the Adasum of `a` and `b`, whose dot products are `dots`.
pub(crate) fn combine<W: Work>(a: &mut [W], b: &[W], [aa, bb, ab]: [f64; 3]) {
    // A vector of zeros adds nothing, and takes nothing from the other.
    let factor = |square: f64| if square == 0.0 { 1.0 } else { 1.0 - ab / (2.0 * square) };
    let (left, right) = (factor(aa), factor(bb));
    for (a, b) in a.iter_mut().zip(b) {
        *a = W::narrow(left * a.wide() + right * b.wide());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adasum(a: [f32; 3], b: [f32; 3]) -> [f32; 3] {
        let mut sum = a;
        combine(&mut sum, &b, dot_products(&a, &b));
        sum
    }

    #[test]
    fn orthogonal_vectors_are_added_and_parallel_ones_averaged() {
        assert_eq!(adasum([1.0, 0.0, 2.0], [0.0, 5.0, 0.0]), [1.0, 5.0, 2.0]);
        assert_eq!(adasum([1.0, 2.0, 4.0], [1.0, 2.0, 4.0]), [1.0, 2.0, 4.0]);
        assert_eq!(adasum([0.0; 3], [1.0, 2.0, 3.0]), [1.0, 2.0, 3.0]);
        assert_eq!(adasum([3.0, 0.0, 0.0], [1.0, 0.0, 0.0]), [2.0, 0.0, 0.0]);
    }

    #[test]
    fn elements_survive() {
        for dtype in DType::ALL.into_iter().filter(|&dtype| accepts(dtype)) {
            let mut bytes = [0u64; 1];
            let place = bytes.as_mut_ptr().cast::<u8>();
            // SAFETY: eight aligned bytes hold an element of each type.
            unsafe {
                1.5f32.store(place, if dtype == DType::F64 { DType::F32 } else { dtype });
                if dtype != DType::F64 {
                    assert_eq!((f32::load(place, dtype), f64::load(place, dtype)), (1.5, 1.5));
                }
                2.5f64.store(place, dtype);
                assert_eq!(f64::load(place, dtype), 2.5);
            }
        }
    }
}
