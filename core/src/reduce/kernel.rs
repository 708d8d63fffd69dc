//! The reduction loop, compiled for each instruction set, and its extension to any number of sources.

use std::mem::MaybeUninit;
use std::sync::LazyLock;

use super::epilogue::{Epilogue, Identity};
use super::half_tiles::TiledType;
#[cfg(target_arch = "x86_64")]
use super::isa::x86::{Avx2, Avx512};
use super::isa::{Baseline, Isa};
use super::storage::{AsAccumulator, StorageFormat};

/// The loop compiled for one instruction set. All kernels give the same bits, except for the sign and payload of a NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// For the target's minimum: SSE2 on x86-64, NEON on AArch64.
    Baseline,
    /// For AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// For AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Kernel {
    /// The kernels that this processor supports, fastest last.
    pub fn available() -> Vec<Kernel> {
        #[allow(unused_mut)] // other targets have one kernel only
        let mut kernels = vec![Kernel::Baseline];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
                kernels.push(Kernel::Avx2);
            }
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                kernels.push(Kernel::Avx512);
            }
        }
        kernels
    }

    /// The fastest of [`Kernel::available`]; detected once.
    pub fn best() -> Kernel {
        static BEST: LazyLock<Kernel> = LazyLock::new(|| Kernel::available().pop().unwrap_or(Kernel::Baseline));
        *BEST
    }
}

/// Elements of a block: few enough for the accumulators to stay in the L1 cache, enough for long sequential reads of
/// every source.
const BLOCK: usize = 512;

/// Adds the sources in order, applies `epilogue`, and stores the result to every out.
///
/// # Safety
/// The processor supports `kernel`. `sources` is not empty. The pointers are valid for `count` elements in their
/// storage format, at any alignment. An out equals a source or overlaps none.
pub(super) unsafe fn reduce<S: TiledType, In: StorageFormat<S>, Out: StorageFormat<S>, E: Epilogue<S>>(
    kernel: Kernel,
    sources: &[*const u8],
    outs: &[*mut u8],
    count: usize,
    epilogue: E,
) {
    // SAFETY: guaranteed by the caller; a block is read from all sources before it is written.
    unsafe {
        match *sources {
            [] => debug_assert!(false, "nothing to add up"),
            [a] => compiled::<S, In, In, Out, E, 1>(kernel, [a], outs, count, epilogue),
            [a, b] if In::NATIVE => compiled::<S, In, In, Out, E, 2>(kernel, [a, b], outs, count, epilogue),
            [a, b, c] if In::NATIVE => compiled::<S, In, In, Out, E, 3>(kernel, [a, b, c], outs, count, epilogue),
            [a, b, c, d] if In::NATIVE => compiled::<S, In, In, Out, E, 4>(kernel, [a, b, c, d], outs, count, epilogue),
            [a, b, ref others @ ..] => {
                let mut block = [MaybeUninit::<S::Acc>::uninit(); BLOCK];
                let sum = block.as_mut_ptr().cast::<u8>();
                let mut outs = outs.to_vec();
                for position in (0..count).step_by(BLOCK) {
                    let count = BLOCK.min(count - position);
                    let source = |source: *const u8| source.add(position * size_of::<In::Stored>());
                    compiled::<S, In, In, AsAccumulator, Identity, 2>(
                        kernel,
                        [source(a), source(b)],
                        &[sum],
                        count,
                        Identity,
                    );
                    for &next in others {
                        compiled::<S, AsAccumulator, In, AsAccumulator, Identity, 2>(
                            kernel,
                            [sum, source(next)],
                            &[sum],
                            count,
                            Identity,
                        );
                    }
                    compiled::<S, AsAccumulator, AsAccumulator, Out, E, 1>(kernel, [sum], &outs, count, epilogue);
                    for out in &mut outs {
                        *out = out.add(count * size_of::<Out::Stored>());
                    }
                }
            }
        }
    }
}

/// [`blocks`] compiled for `kernel`.
///
/// # Safety
/// As for [`blocks`]; the processor supports `kernel`.
unsafe fn compiled<
    S: TiledType,
    First: StorageFormat<S>,
    In: StorageFormat<S>,
    Out: StorageFormat<S>,
    E: Epilogue<S>,
    const N: usize,
>(
    kernel: Kernel,
    sources: [*const u8; N],
    outs: &[*mut u8],
    count: usize,
    epilogue: E,
) {
    macro_rules! compile {
        ($isa:ty $(, $features:literal)?) => {{
            $(#[target_feature(enable = $features)])?
            unsafe fn loops<S: TiledType, First: StorageFormat<S>, In: StorageFormat<S>, Out: StorageFormat<S>, E: Epilogue<S>, const N: usize>(
                sources: [*const u8; N],
                outs: &[*mut u8],
                count: usize,
                epilogue: E,
            ) {
                // SAFETY: guaranteed by the caller.
                unsafe { blocks::<$isa, S, First, In, Out, E, N>(sources, outs, count, epilogue) }
            }
            // SAFETY: guaranteed by the caller.
            unsafe { loops::<S, First, In, Out, E, N>(sources, outs, count, epilogue) }
        }};
    }
    match kernel {
        Kernel::Baseline => compile!(Baseline),
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx2 => compile!(Avx2, "avx2,f16c"),
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx512 => compile!(Avx512, "avx512f,avx512bw,avx512dq,avx512vl"),
    }
}

/// The loop. The first source may have its own storage format.
///
/// N is a constant, so sums stay in registers. Results are written to a local block and copied from there: an out may
/// equal a source, and LLVM vectorizes a loop only if its stores cannot alias its loads.
///
/// # Safety
/// The pointers are valid for `count` elements in their storage format. An out equals a source or overlaps none.
#[inline(always)]
pub(super) unsafe fn blocks<I, S, First, In, Out, E, const N: usize>(
    sources: [*const u8; N],
    outs: &[*mut u8],
    count: usize,
    epilogue: E,
) where
    I: Isa,
    S: TiledType,
    First: StorageFormat<S>,
    In: StorageFormat<S>,
    Out: StorageFormat<S>,
    E: Epilogue<S>,
{
    // SAFETY: guaranteed by the caller; position + i < count, and a block is read from all sources before it is
    // written.
    unsafe {
        let mut results = [MaybeUninit::<Out::Stored>::uninit(); BLOCK];
        let mut position = S::start::<I, First, In, Out, E, N>(sources, outs, count, epilogue);
        while position < count {
            let len = BLOCK.min(count - position);
            for (i, result) in results[..len].iter_mut().enumerate() {
                let mut sum = First::load(sources[0].cast::<First::Stored>().add(position + i).read_unaligned());
                for source in &sources[1..] {
                    sum = S::add(sum, In::load(source.cast::<In::Stored>().add(position + i).read_unaligned()));
                }
                result.write(Out::store(epilogue.apply(sum)));
            }
            for out in outs {
                // Copied as bytes, which need no alignment.
                let size = size_of::<Out::Stored>();
                out.add(position * size).copy_from_nonoverlapping(results.as_ptr().cast(), len * size);
            }
            position += len;
        }
    }
}
