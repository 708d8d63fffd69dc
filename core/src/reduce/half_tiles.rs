//! The float16 loop for instruction sets with float16 conversions. LLVM does not generate these instructions from
//! `convert.rs`, which takes about ten operations per element. LLVM still vectorizes the arithmetic.

use super::epilogue::Epilogue;
use super::isa::{Isa, TILE_ELEMENTS};
use super::pair::BF16Pair;
use super::storage::StorageFormat;
use super::types::{BF16, BF16AccF64, F16, F16AccF64, F32, F32AccF64, F64, I8, I32, I64, ReduceType, U8};

/// Element types for which an instruction set may have a special loop.
pub(super) trait TiledType: ReduceType {
    /// Reduces the first elements with the special loop, if any. Returns their number.
    ///
    /// # Safety
    /// As for [`super::kernel::blocks`].
    #[inline(always)]
    unsafe fn start<
        I: Isa,
        First: StorageFormat<Self>,
        In: StorageFormat<Self>,
        Out: StorageFormat<Self>,
        E: Epilogue<Self>,
        const N: usize,
    >(
        _sources: [*const u8; N],
        _outs: &[*mut u8],
        _count: usize,
        _finish: E,
    ) -> usize {
        0
    }
}

macro_rules! untiled {
    ($($name:ty),*) => { $(impl TiledType for $name {})* };
}
untiled!(F16AccF64, BF16, BF16AccF64, F32, F32AccF64, F64, I8, U8, I32, I64, BF16Pair);

impl TiledType for F16 {
    #[inline(always)]
    unsafe fn start<
        I: Isa,
        First: StorageFormat<F16>,
        In: StorageFormat<F16>,
        Out: StorageFormat<F16>,
        E: Epilogue<F16>,
        const N: usize,
    >(
        sources: [*const u8; N],
        outs: &[*mut u8],
        count: usize,
        epilogue: E,
    ) -> usize {
        // SAFETY: guaranteed by the caller.
        unsafe { half_tiles::<I, First, In, Out, E, N>(sources, outs, count, epilogue) }
    }
}

/// Reduces the whole tiles among the first `count` elements, if the instruction set converts float16. Returns the
/// number of reduced elements.
///
/// # Safety
/// As for [`super::kernel::blocks`].
#[inline(always)]
unsafe fn half_tiles<I, First, In, Out, E, const N: usize>(
    sources: [*const u8; N],
    outs: &[*mut u8],
    count: usize,
    epilogue: E,
) -> usize
where
    I: Isa,
    First: StorageFormat<F16>,
    In: StorageFormat<F16>,
    Out: StorageFormat<F16>,
    E: Epilogue<F16>,
{
    let tiles = if I::HAS_F16_CONVERT { count / TILE_ELEMENTS } else { 0 };
    for tile in 0..tiles {
        // SAFETY: guaranteed by the caller; a tile is read from all sources before it is written.
        unsafe {
            let mut sums = load::<I>(sources[0], tile, First::NATIVE);
            for source in &sources[1..] {
                let next = load::<I>(*source, tile, In::NATIVE);
                for (sum, next) in sums.iter_mut().zip(next) {
                    *sum = F16::add(*sum, next);
                }
            }
            for sum in &mut sums {
                *sum = epilogue.apply(*sum);
            }
            let results = I::f32_to_f16(sums);
            if Out::ROUNDS && !Out::NATIVE {
                sums = I::f16_to_f32(results);
            }
            for out in outs {
                if Out::NATIVE {
                    out.cast::<[u16; TILE_ELEMENTS]>().add(tile).write_unaligned(results);
                } else {
                    out.cast::<[f32; TILE_ELEMENTS]>().add(tile).write_unaligned(sums);
                }
            }
        }
    }
    tiles * TILE_ELEMENTS
}

/// Loads a tile as float32.
///
/// # Safety
/// The source is valid for tile `tile`.
#[inline(always)]
unsafe fn load<I: Isa>(source: *const u8, tile: usize, native: bool) -> [f32; TILE_ELEMENTS] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if native {
            I::f16_to_f32(source.cast::<[u16; TILE_ELEMENTS]>().add(tile).read_unaligned())
        } else {
            source.cast::<[f32; TILE_ELEMENTS]>().add(tile).read_unaligned()
        }
    }
}
