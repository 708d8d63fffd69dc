//! Instruction sets: conversions that LLVM does not generate by itself.

/// Elements of a tile; a tile is loaded from every source before it is stored.
pub(super) const TILE_ELEMENTS: usize = 32;

/// An instruction set.
pub(crate) trait Isa {
    /// Whether it converts float16; the methods are callable only then.
    const HAS_F16_CONVERT: bool;
    /// Exact conversion.
    fn f16_to_f32(halves: [u16; TILE_ELEMENTS]) -> [f32; TILE_ELEMENTS];
    /// Rounds to nearest, ties to even.
    fn f32_to_f16(singles: [f32; TILE_ELEMENTS]) -> [u16; TILE_ELEMENTS];
}

/// The minimum of the target: SSE2 on x86-64, NEON on AArch64.
pub(super) struct Baseline;

impl Isa for Baseline {
    const HAS_F16_CONVERT: bool = false;
    fn f16_to_f32(_: [u16; TILE_ELEMENTS]) -> [f32; TILE_ELEMENTS] {
        unreachable!("HAS_F16_CONVERT is false")
    }
    fn f32_to_f16(_: [f32; TILE_ELEMENTS]) -> [u16; TILE_ELEMENTS] {
        unreachable!("HAS_F16_CONVERT is false")
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    //! The conversions of F16C and AVX-512. The rounding mode is part of the instruction: nearest even.

    use std::arch::x86_64::{
        __m128i, __m256, __m256i, __m512, _MM_FROUND_TO_NEAREST_INT, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm512_cvtph_ps,
        _mm512_cvtps_ph,
    };
    use std::mem::transmute;

    use super::{Isa, TILE_ELEMENTS};

    /// AVX2 and F16C. Only for functions compiled with both.
    pub(in super::super) struct Avx2;
    /// AVX-512 F, BW, DQ, VL. Only for functions compiled with them.
    pub(in super::super) struct Avx512;

    macro_rules! isa {
        ($name:ident, $singles:ty, $halves:ty, $widen:ident, $narrow:ident) => {
            impl Isa for $name {
                const HAS_F16_CONVERT: bool = true;
                #[inline(always)]
                fn f16_to_f32(halves: [u16; TILE_ELEMENTS]) -> [f32; TILE_ELEMENTS] {
                    // SAFETY: arrays and vectors of numbers with equal sizes; the caller is compiled with the
                    // instructions.
                    unsafe {
                        let halves: [$halves; size_of::<[u16; TILE_ELEMENTS]>() / size_of::<$halves>()] =
                            transmute(halves);
                        transmute(halves.map(|halves| $widen(halves)))
                    }
                }
                #[inline(always)]
                fn f32_to_f16(singles: [f32; TILE_ELEMENTS]) -> [u16; TILE_ELEMENTS] {
                    // SAFETY: as above.
                    unsafe {
                        let singles: [$singles; size_of::<[f32; TILE_ELEMENTS]>() / size_of::<$singles>()] =
                            transmute(singles);
                        transmute(singles.map(|singles| $narrow::<_MM_FROUND_TO_NEAREST_INT>(singles)))
                    }
                }
            }
        };
    }
    isa!(Avx2, __m256, __m128i, _mm256_cvtph_ps, _mm256_cvtps_ph);
    isa!(Avx512, __m512, __m256i, _mm512_cvtph_ps, _mm512_cvtps_ph);
}
