//! The float16 loop for instruction sets with float16 conversions. LLVM does not generate these instructions from
//! `convert.rs`, which takes about ten operations per element. LLVM still vectorizes the arithmetic.

use super::epilogue::Epilogue;
use super::isa::{Isa, TILE_ELEMENTS};
use super::operator::Operator;
use super::pair::BF16Pair;
use super::storage::StorageFormat;
use super::types::{
    BF16, BF16AccF64, F16, F16AccF64, F32AccF64, I8, I16, I32, I64, Plain, ReduceType, U8, U16, U32, U64,
};

/// Element types for which an instruction set may have a special loop.
pub(super) trait TiledType: ReduceType {
    /// Reduces the first elements with the special loop, if any. Returns their number.
    ///
    /// # Safety
    /// As for [`super::kernel::blocks`].
    #[inline(always)]
    unsafe fn start<
        I: Isa,
        In: StorageFormat<Self>,
        Out: StorageFormat<Self>,
        O: Operator<Self::Acc>,
        E: Epilogue<Self::Acc>,
        const N: usize,
    >(
        _sources: [*const u8; N],
        _outs: &[*mut u8],
        _count: usize,
        _operator: O,
        _epilogue: E,
    ) -> usize {
        0
    }
}

macro_rules! untiled {
    ($($name:ty),*) => { $(impl TiledType for $name {})* };
}
untiled!(F16AccF64, BF16, BF16AccF64, BF16Pair, F32AccF64, I8, U8, I16, U16, I32, U32, I64, U64);
impl<T: Copy + Default + 'static> TiledType for Plain<T> {}

impl TiledType for F16 {
    #[inline(always)]
    unsafe fn start<
        I: Isa,
        In: StorageFormat<F16>,
        Out: StorageFormat<F16>,
        O: Operator<f32>,
        E: Epilogue<f32>,
        const N: usize,
    >(
        sources: [*const u8; N],
        outs: &[*mut u8],
        count: usize,
        operator: O,
        epilogue: E,
    ) -> usize {
        // SAFETY: guaranteed by the caller.
        unsafe { half_tiles::<I, In, Out, O, E, N>(sources, outs, count, operator, epilogue) }
    }
}

/// Reduces the whole tiles among the first `count` elements, if the instruction set converts float16. Returns the
/// number of reduced elements.
///
/// # Safety
/// As for [`super::kernel::blocks`].
#[inline(always)]
unsafe fn half_tiles<I, In, Out, O, E, const N: usize>(
    sources: [*const u8; N],
    outs: &[*mut u8],
    count: usize,
    operator: O,
    epilogue: E,
) -> usize
where
    I: Isa,
    In: StorageFormat<F16>,
    Out: StorageFormat<F16>,
    O: Operator<f32>,
    E: Epilogue<f32>,
{
    let tiles = if I::HAS_F16_CONVERT { count / TILE_ELEMENTS } else { 0 };
    for tile in 0..tiles {
        // SAFETY: guaranteed by the caller; a tile is read from all sources before it is written.
        unsafe {
            let mut accs = load::<I, O>(sources[0], tile, In::NATIVE, operator);
            for source in &sources[1..] {
                let next = load::<I, O>(*source, tile, In::NATIVE, operator);
                for (acc, next) in accs.iter_mut().zip(next) {
                    *acc = O::combine(*acc, next);
                }
            }
            for acc in &mut accs {
                *acc = epilogue.apply(*acc);
            }
            let results = I::f32_to_f16(accs);
            if Out::ROUNDS && !Out::NATIVE {
                accs = I::f16_to_f32(results);
            }
            for out in outs {
                if Out::NATIVE {
                    out.cast::<[u16; TILE_ELEMENTS]>().add(tile).write_unaligned(results);
                } else {
                    out.cast::<[f32; TILE_ELEMENTS]>().add(tile).write_unaligned(accs);
                }
            }
        }
    }
    tiles * TILE_ELEMENTS
}

/// Loads a tile as accumulators.
///
/// # Safety
/// The source is valid for tile `tile`.
#[inline(always)]
unsafe fn load<I: Isa, O: Operator<f32>>(
    source: *const u8,
    tile: usize,
    native: bool,
    operator: O,
) -> [f32; TILE_ELEMENTS] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if native {
            let mut elements = I::f16_to_f32(source.cast::<[u16; TILE_ELEMENTS]>().add(tile).read_unaligned());
            for element in &mut elements {
                *element = operator.lift(*element);
            }
            elements
        } else {
            source.cast::<[f32; TILE_ELEMENTS]>().add(tile).read_unaligned()
        }
    }
}
