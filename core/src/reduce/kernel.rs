//! The reduction loop, compiled for each instruction set, and its extension to any number of sources.

use std::mem::MaybeUninit;
use std::sync::LazyLock;

use super::epilogue::{Epilogue, Identity};
use super::half_tiles::TiledType;
#[cfg(target_arch = "x86_64")]
use super::isa::x86::{Avx2, Avx512};
use super::isa::{Baseline, Isa};
use super::operator::Operator;
use super::storage::{AsAccumulator, StorageFormat};
use super::types::ReduceType;

/// The loop compiled for one instruction set. All kernels give the same bits, except for the sign and
/// payload of a NaN of arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// For the target's minimum: SSE2 on x86-64, NEON on AArch64.
    Baseline,
    /// For AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// For AVX-512 F, BW, DQ and VL for the commonest operators and types, else as `Avx2`.
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
            if kernels.len() > 1
                && is_x86_feature_detected!("avx512f")
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

/// Combines the sources in order, applies `epilogue`, and stores the result to every out.
///
/// # Safety
/// The processor supports `kernel`. `sources` is not empty. The pointers are valid for `count` elements in their
/// storage format, at any alignment. An out equals a source or overlaps none.
pub(super) unsafe fn reduce<
    S: TiledType,
    In: StorageFormat<S>,
    Out: StorageFormat<S>,
    O: Operator<S::Acc>,
    E: Epilogue<S::Acc>,
>(
    kernel: Kernel,
    sources: &[*const u8],
    outs: &[*mut u8],
    count: usize,
    operator: O,
    epilogue: E,
) {
    /// Calls `compiled` for `$n` sources.
    macro_rules! compiled {
        ($sources:expr, $n:literal) => {
            compiled::<S, In, In, Out, O, E, $n>(kernel, $sources, outs, count, operator, epilogue)
        };
    }
    // SAFETY: guaranteed by the caller; a block is read from all sources before it is written.
    unsafe {
        match *sources {
            [] => debug_assert!(false, "nothing to reduce"),
            [a] => compiled!([a], 1),
            [a, b] if In::NATIVE => compiled!([a, b], 2),
            [a, b, c] if In::NATIVE && O::IS_HOT => compiled!([a, b, c], 3),
            [a, b, c, d] if In::NATIVE && O::IS_HOT => compiled!([a, b, c, d], 4),
            [a, b, ref others @ ..] => {
                let mut block = [MaybeUninit::<S::Acc>::uninit(); BLOCK];
                let partial = block.as_mut_ptr().cast::<u8>();
                let mut outs = outs.to_vec();
                for position in (0..count).step_by(BLOCK) {
                    let count = BLOCK.min(count - position);
                    let source = |source: *const u8| source.add(position * size_of::<In::Stored>());
                    compiled::<S, In, In, AsAccumulator, O, Identity, 2>(
                        kernel,
                        [source(a), source(b)],
                        &[partial],
                        count,
                        operator,
                        Identity,
                    );
                    for &next in others {
                        compiled::<S, AsAccumulator, In, AsAccumulator, O, Identity, 2>(
                            kernel,
                            [partial, source(next)],
                            &[partial],
                            count,
                            operator,
                            Identity,
                        );
                    }
                    compiled::<S, AsAccumulator, AsAccumulator, Out, O, E, 1>(
                        kernel,
                        [partial],
                        &outs,
                        count,
                        operator,
                        epilogue,
                    );
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
    O: Operator<S::Acc>,
    E: Epilogue<S::Acc>,
    const N: usize,
>(
    kernel: Kernel,
    sources: [*const u8; N],
    outs: &[*mut u8],
    count: usize,
    operator: O,
    epilogue: E,
) {
    macro_rules! compile {
        ($isa:ty $(, $features:literal)?) => {{
            $(#[target_feature(enable = $features)])?
            // Not inlined, so that equal loops of different types are merged.
            #[inline(never)]
            unsafe fn loops<
                S: TiledType,
                First: StorageFormat<S>,
                In: StorageFormat<S>,
                Out: StorageFormat<S>,
                O: Operator<S::Acc>,
                E: Epilogue<S::Acc>,
                const N: usize,
            >(
                sources: [*const u8; N],
                outs: &[*mut u8],
                count: usize,
                operator: O,
                epilogue: E,
            ) {
                // SAFETY: guaranteed by the caller.
                unsafe { blocks::<$isa, S, First, In, Out, O, E, N>(sources, outs, count, operator, epilogue) }
            }
            // SAFETY: guaranteed by the caller.
            unsafe { loops::<S, First, In, Out, O, E, N>(sources, outs, count, operator, epilogue) }
        }};
    }
    match kernel {
        Kernel::Baseline => compile!(Baseline),
        _ if O::IS_RARE => compile!(Baseline),
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx512 if O::IS_HOT => compile!(Avx512, "avx512f,avx512bw,avx512dq,avx512vl"),
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx2 | Kernel::Avx512 => compile!(Avx2, "avx2,f16c"),
    }
}

/// The loop. The first source may have its own storage format.
///
/// N is a constant, so accumulators stay in registers. Results are written to a local block and copied from there: an
/// out may equal a source, and LLVM vectorizes a loop only if its stores cannot alias its loads.
///
/// # Safety
/// The pointers are valid for `count` elements in their storage format. An out equals a source or overlaps none.
#[inline(always)]
pub(super) unsafe fn blocks<I, S, First, In, Out, O, E, const N: usize>(
    sources: [*const u8; N],
    outs: &[*mut u8],
    count: usize,
    operator: O,
    epilogue: E,
) where
    I: Isa,
    S: TiledType,
    First: StorageFormat<S>,
    In: StorageFormat<S>,
    Out: StorageFormat<S>,
    O: Operator<S::Acc>,
    E: Epilogue<S::Acc>,
{
    // SAFETY: guaranteed by the caller; position + i < count, and a block is read from all sources before it is
    // written.
    unsafe {
        let mut results = [MaybeUninit::<Out::Stored>::uninit(); BLOCK];
        let mut position = S::start::<I, First, In, Out, O, E, N>(sources, outs, count, operator, epilogue);
        while position < count {
            let len = BLOCK.min(count - position);
            for (i, result) in results[..len].iter_mut().enumerate() {
                let mut acc = load::<S, First, O>(sources[0], position + i, operator);
                for source in &sources[1..] {
                    acc = O::combine(acc, load::<S, In, O>(*source, position + i, operator));
                }
                result.write(Out::store(epilogue.apply(acc)));
            }
            let size = size_of::<Out::Stored>();
            // Copied as bytes, which need no alignment.
            let copy =
                |out: *mut u8| out.add(position * size).copy_from_nonoverlapping(results.as_ptr().cast(), len * size);
            match outs {
                // A loop over one costs a short call more than the copy.
                &[out] => copy(out),
                outs => outs.iter().copied().for_each(copy),
            }
            position += len;
        }
    }
}

/// The accumulator of element `index` of a source.
///
/// # Safety
/// The source has that element.
#[inline(always)]
unsafe fn load<S: ReduceType, F: StorageFormat<S>, O: Operator<S::Acc>>(
    source: *const u8,
    index: usize,
    operator: O,
) -> S::Acc {
    // SAFETY: guaranteed by the caller.
    let acc = F::load(unsafe { source.cast::<F::Stored>().add(index).read_unaligned() });
    if F::NATIVE { operator.lift(acc) } else { acc }
}
