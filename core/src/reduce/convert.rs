//! Conversions between floating-point types, an element at a time, in integer operations and selections only.
//!
//! There is no branch and no table in them, so LLVM turns a loop over them into vector code wherever integers have
//! vectors (SSE2, AVX2, AVX-512, NEON). All but the last round to nearest even; all keep infinities, the sign of zero and
//! NaN. The subnormals of float16 are not those of float32, and come out right in a thread that flushes the latter to zero.

const F32_SIGN: u32 = 1 << 31;
const F32_INFINITY: u32 = 0xff << 23;

/// float16 to float32, exactly.
#[inline(always)]
pub(super) fn f16_to_f32(half: u16) -> f32 {
    /// 2^-14, the smallest normal float16, as float32.
    const SMALLEST: u32 = (127 - 14) << 23;
    let magnitude = u32::from(half & 0x7fff) << 13;
    // The exponents differ by 112; that of infinities and NaN by as much again. A subnormal is its fraction in units of
    // 2^-24: set below a leading one at 2^-14, and that one taken away.
    let rebiased = magnitude + (112 << 23);
    let special = rebiased + (112 << 23);
    let subnormal = (f32::from_bits(magnitude + SMALLEST) - f32::from_bits(SMALLEST)).to_bits();
    let finite = if magnitude < 0x400 << 13 { subnormal } else { rebiased };
    let bits = if magnitude >= 0x7c00 << 13 { special } else { finite };
    f32::from_bits(bits | u32::from(half & 0x8000) << 16)
}

/// float32 to the nearest float16.
#[inline(always)]
pub(super) fn f32_to_f16(single: f32) -> u16 {
    /// 2^-14: what is smaller is subnormal in float16.
    const SMALLEST: u32 = (127 - 14) << 23;
    /// 2^16: what is not smaller is infinite in float16, whatever the rounding.
    const TOO_LARGE: u32 = (127 + 16) << 23;
    let sign = single.to_bits() & F32_SIGN;
    let magnitude = single.to_bits() ^ sign;
    // Half of the last place that stays, less one when that place is even: what is carried is the rounding. A carry out
    // of the fraction raises the exponent, up to infinity.
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + (magnitude >> 13 & 1)) >> 13;
    // In 0.5 + x the last place is 2^-24, the unit of subnormals: the addition does the rounding.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
    let finite = if magnitude < SMALLEST { subnormal } else { normal };
    let special = if magnitude > F32_INFINITY { nan } else { 0x7c00 };
    (if magnitude >= TOO_LARGE { special } else { finite } | sign >> 16) as u16
}

/// bfloat16 to float32, exactly.
#[inline(always)]
pub(super) fn bf16_to_f32(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// float32 to the nearest bfloat16. (The conversion of AVX-512 BF16 will not do: it flushes subnormals.)
#[inline(always)]
pub(super) fn f32_to_bf16(single: f32) -> u16 {
    (rounded_to_bf16(single) >> 16) as u16
}

/// The bits of the nearest bfloat16 in the upper half of the result; the lower half is left over.
#[inline(always)]
pub(super) fn rounded_to_bf16(single: f32) -> u32 {
    let bits = single.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    if single.is_nan() { f32::NAN.to_bits() } else { rounded }
}

/// float64 to float32, rounded to odd: an inexact result is that of the two neighbours whose last bit is one.
///
/// Rounding that to a type with two bits less or fewer gives what rounding the float64 to it at once gives (Boldo and
/// Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
#[inline(always)]
pub(super) fn f64_to_odd_f32(double: f64) -> f32 {
    let nearest = double as f32;
    let back = f64::from(nearest);
    let bits = nearest.to_bits();
    let toward_zero = bits.wrapping_sub(u32::from(back.abs() > double.abs()));
    f32::from_bits(if back == double { bits } else { toward_zero | 1 })
}
