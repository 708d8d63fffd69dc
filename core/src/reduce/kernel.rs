//! The loop, compiled for every instruction set, and around it what makes it serve any number of sources.

use std::mem::MaybeUninit;
use std::sync::LazyLock;

use super::epilogue::{Epilogue, Identity};
use super::half_tiles::TiledType;
#[cfg(target_arch = "x86_64")]
use super::isa::x86::{Avx2, Avx512};
use super::isa::{Baseline, Isa};
use super::storage::{AsAccumulator, StorageFormat};

/// The loops, compiled for one instruction set. All give the same bits, but for the sign and payload of a NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// For what the target has at least: SSE2 on x86-64, NEON on AArch64.
    Baseline,
    /// For AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// For AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Kernel {
    /// The kernels that this processor can run, the fastest last.
    pub fn available() -> Vec<Kernel> {
        #[allow(unused_mut)] // where there is one only
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

    /// The fastest of [`Kernel::available`], looked up once.
    pub fn best() -> Kernel {
        static BEST: LazyLock<Kernel> = LazyLock::new(|| Kernel::available().pop().unwrap_or(Kernel::Baseline));
        *BEST
    }
}

/// Elements of a block: few enough that a block of accumulators stays in the first-level cache, and enough to read every
/// source in stretches.
const BLOCK: usize = 512;

/// Adds the sources up, in their order, and stores `finish` of each sum to every out.
///
/// # Safety
/// The processor has the instructions of `kernel`. There is a source. The pointers are valid for `count` elements of their
/// form; their alignment does not matter. An out equals a source or does not overlap it.
pub(super) unsafe fn reduce<S: TiledType, In: StorageFormat<S>, Out: StorageFormat<S>, F: Epilogue<S>>(
    kernel: Kernel,
    sources: &[*const u8],
    outs: &[*mut u8],
    count: usize,
    finish: F,
) {
    // SAFETY: the caller's promise; a block is read from all sources before it is written.
    unsafe {
        match *sources {
            [] => debug_assert!(false, "nothing to add up"),
            [a] => compiled::<S, In, In, Out, F, 1>(kernel, [a], outs, count, finish),
            [a, b] if In::NATIVE => compiled::<S, In, In, Out, F, 2>(kernel, [a, b], outs, count, finish),
            [a, b, c] if In::NATIVE => compiled::<S, In, In, Out, F, 3>(kernel, [a, b, c], outs, count, finish),
            [a, b, c, d] if In::NATIVE => compiled::<S, In, In, Out, F, 4>(kernel, [a, b, c, d], outs, count, finish),
            [a, b, ref others @ ..] => {
                let mut block = [MaybeUninit::<S::Acc>::uninit(); BLOCK];
                let sum = block.as_mut_ptr().cast::<u8>();
                let mut outs = outs.to_vec();
                for at in (0..count).step_by(BLOCK) {
                    let count = BLOCK.min(count - at);
                    let source = |source: *const u8| source.add(at * size_of::<In::Stored>());
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
                    compiled::<S, AsAccumulator, AsAccumulator, Out, F, 1>(kernel, [sum], &outs, count, finish);
                    for out in &mut outs {
                        *out = out.add(count * size_of::<Out::Stored>());
                    }
                }
            }
        }
    }
}

/// [`blocks`], compiled for `kernel`.
///
/// # Safety
/// As for [`blocks`]; the processor has the instructions of `kernel`.
unsafe fn compiled<
    S: TiledType,
    First: StorageFormat<S>,
    In: StorageFormat<S>,
    Out: StorageFormat<S>,
    F: Epilogue<S>,
    const N: usize,
>(
    kernel: Kernel,
    sources: [*const u8; N],
    outs: &[*mut u8],
    count: usize,
    finish: F,
) {
    macro_rules! compile {
        ($isa:ty $(, $features:literal)?) => {{
            $(#[target_feature(enable = $features)])?
            unsafe fn loops<S: TiledType, First: StorageFormat<S>, In: StorageFormat<S>, Out: StorageFormat<S>, F: Epilogue<S>, const N: usize>(
                sources: [*const u8; N],
                outs: &[*mut u8],
                count: usize,
                finish: F,
            ) {
                // SAFETY: the caller's promise.
                unsafe { blocks::<$isa, S, First, In, Out, F, N>(sources, outs, count, finish) }
            }
            // SAFETY: the caller's promise.
            unsafe { loops::<S, First, In, Out, F, N>(sources, outs, count, finish) }
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

/// The loop. The first source may have a form of its own.
///
/// N is known, so sums stay in registers. A block of results is made in memory that nothing else points to and copied
/// from there: an out may be a source, and LLVM makes vector code of a loop only when its stores cannot change what it
/// loads.
///
/// # Safety
/// The pointers are valid for `count` elements of their form. An out equals a source or does not overlap it.
#[inline(always)]
pub(super) unsafe fn blocks<I, S, First, In, Out, F, const N: usize>(
    sources: [*const u8; N],
    outs: &[*mut u8],
    count: usize,
    finish: F,
) where
    I: Isa,
    S: TiledType,
    First: StorageFormat<S>,
    In: StorageFormat<S>,
    Out: StorageFormat<S>,
    F: Epilogue<S>,
{
    // SAFETY: the caller's promise; at + i < count, and a block is read from all sources before it is written.
    unsafe {
        let mut results = [MaybeUninit::<Out::Stored>::uninit(); BLOCK];
        let mut at = S::start::<I, First, In, Out, F, N>(sources, outs, count, finish);
        while at < count {
            let len = BLOCK.min(count - at);
            for (i, result) in results[..len].iter_mut().enumerate() {
                let mut sum = First::load(sources[0].cast::<First::Stored>().add(at + i).read_unaligned());
                for source in &sources[1..] {
                    sum = S::add(sum, In::load(source.cast::<In::Stored>().add(at + i).read_unaligned()));
                }
                result.write(Out::store(finish.apply(sum)));
            }
            for out in outs {
                // In bytes, which need no alignment.
                let size = size_of::<Out::Stored>();
                out.add(at * size).copy_from_nonoverlapping(results.as_ptr().cast(), len * size);
            }
            at += len;
        }
    }
}
