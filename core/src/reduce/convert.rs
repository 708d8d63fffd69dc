//! Conversions between floating-point types, one element at a time, with integer operations and selections only.
//!
//! They have no branches and no tables, so LLVM vectorizes loops over them for SSE2, AVX2, AVX-512 and NEON. All except
//! `f64_to_odd_f32` round to nearest even. All keep infinities, NaN and the sign of zero. float16 subnormals are normal
//! in float32, so they convert correctly in a thread that flushes float32 subnormals to zero.

const F32_SIGN: u32 = 1 << 31;
const F32_INFINITY: u32 = 0xff << 23;

/// float16 to float32, exact.
#[inline(always)]
pub(super) fn f16_to_f32(half: u16) -> f32 {
    /// 2^-14, the smallest normal float16, as float32.
    const SMALLEST: u32 = (127 - 14) << 23;
    let magnitude = u32::from(half & 0x7fff) << 13;
    // The exponent biases differ by 112; for infinities and NaN add 112 again. A subnormal is a fraction in units of
    // 2^-24: set it below a leading one at 2^-14, then subtract that one.
    let rebiased = magnitude + (112 << 23);
    let special = rebiased + (112 << 23);
    let subnormal = (f32::from_bits(magnitude + SMALLEST) - f32::from_bits(SMALLEST)).to_bits();
    let finite = if magnitude < 0x400 << 13 { subnormal } else { rebiased };
    let bits = if magnitude >= 0x7c00 << 13 { special } else { finite };
    f32::from_bits(bits | u32::from(half & 0x8000) << 16)
}

/// float32 to float16, to nearest even.
#[inline(always)]
pub(super) fn f32_to_f16(single: f32) -> u16 {
    /// 2^-14; smaller values are subnormal in float16.
    const SMALLEST: u32 = (127 - 14) << 23;
    /// 2^16; values from here on are infinite in float16, whatever the rounding.
    const TOO_LARGE: u32 = (127 + 16) << 23;
    let sign = single.to_bits() & F32_SIGN;
    let magnitude = single.to_bits() ^ sign;
    // Adds half a unit in the last place, minus one if that place is even: the carry does the rounding. A carry out of
    // the fraction increments the exponent, up to infinity.
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + (magnitude >> 13 & 1)) >> 13;
    // In 0.5 + x the last place is 2^-24, the unit of float16 subnormals, so the addition rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
    let finite = if magnitude < SMALLEST { subnormal } else { normal };
    let special = if magnitude > F32_INFINITY { nan } else { 0x7c00 };
    (if magnitude >= TOO_LARGE { special } else { finite } | sign >> 16) as u16
}

/// bfloat16 to float32, exact.
#[inline(always)]
pub(super) fn bf16_to_f32(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// float32 to bfloat16, to nearest even. (AVX-512 BF16's conversion flushes subnormals, so it is unsuitable.)
#[inline(always)]
pub(super) fn f32_to_bf16(single: f32) -> u16 {
    (rounded_to_bf16(single) >> 16) as u16
}

/// The nearest bfloat16 in the upper 16 bits; the lower 16 bits are arbitrary.
#[inline(always)]
pub(super) fn rounded_to_bf16(single: f32) -> u32 {
    let bits = single.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    if single.is_nan() { f32::NAN.to_bits() } else { rounded }
}

/// float64 to float32, rounded to odd: an inexact result is the neighbour whose last bit is one.
///
/// Rounding the result to a type with at least two bits less equals rounding the float64 directly (Boldo and Melquiond,
/// "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
#[inline(always)]
pub(super) fn f64_to_odd_f32(double: f64) -> f32 {
    let nearest = double as f32;
    let back = f64::from(nearest);
    let bits = nearest.to_bits();
    let toward_zero = bits.wrapping_sub(u32::from(back.abs() > double.abs()));
    f32::from_bits(if back == double { bits } else { toward_zero | 1 })
}
