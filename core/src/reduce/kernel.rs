//! The reduction loop, compiled for each instruction set, and its extension to any number of sources.

use std::mem::MaybeUninit;
use std::sync::LazyLock;

use smallvec::SmallVec;

use super::epilogue::{Epilogue, Identity};
use super::half_tiles::TiledType;
#[cfg(target_arch = "x86_64")]
use super::isa::x86::{Avx2, Avx512};
use super::isa::{Baseline, Isa};
use super::operator::{Keep, Operator};
use super::storage::{AsAccumulator, AsElement, StorageFormat};
use super::types::{Plain, ReduceType};

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
/// One loop reduces two sources, of a hot operator up to four. Everything else takes a block at a time through a loop
/// for each step, which operators, formats and epilogues share: widen, combine, finish. The block stays in the L1 cache.
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
            return compiled::<S, In, Out, O, E, $n>(kernel, $sources, outs, count, operator, epilogue)
        };
    }
    // Conditions of constants, so that loops that are never called are not compiled.
    // SAFETY: guaranteed by the caller; a block is read from all sources before it is written.
    unsafe {
        if const { In::NATIVE && O::IS_HOT } {
            match *sources {
                [a] => compiled!([a], 1),
                [a, b] => compiled!([a, b], 2),
                [a, b, c] => compiled!([a, b, c], 3),
                [a, b, c, d] => compiled!([a, b, c, d], 4),
                _ => {}
            }
        } else if const { In::NATIVE && !O::LIFTS }
            && let [a, b] = *sources
        {
            compiled!([a, b], 2);
        }
        let widen = |[source]: [*const u8; 1], acc: *mut u8, count| {
            let lift = operator.lift_alone();
            compiled::<S, In, AsAccumulator, _, _, 1>(kernel, [source], &[acc], count, lift, Identity);
        };
        let combine = |accs: [*const u8; 2], acc: *mut u8, count| {
            let operator = O::OnAccs::default();
            compiled::<Plain<S::Acc>, AsElement, AsElement, _, _, 2>(kernel, accs, &[acc], count, operator, Identity);
        };
        let finish = |acc: *const u8, outs: &[*mut u8], count| {
            compiled::<S, AsAccumulator, Out, _, E, 1>(kernel, [acc], outs, count, Keep, epilogue);
        };
        let steps = Steps {
            source: size_of::<In::Stored>(),
            out: size_of::<Out::Stored>(),
            widen: if const { In::NATIVE && (O::LIFTS || !S::PLAIN) } { Some(&widen) } else { None },
            combine: &combine,
            finish: &finish,
        };
        steps.reduce(sources, outs, count);
    }
}

/// A reduction as loops over blocks.
struct Steps<'a> {
    /// The size of a stored element of a source.
    source: usize,
    /// The size of a stored element of an out.
    out: usize,
    /// Makes accumulators of elements; `None` if the sources have accumulators.
    widen: Option<&'a dyn Fn([*const u8; 1], *mut u8, usize)>,
    /// Combines accumulators.
    combine: &'a dyn Fn([*const u8; 2], *mut u8, usize),
    /// Stores accumulators.
    finish: &'a dyn Fn(*const u8, &[*mut u8], usize),
}

impl Steps<'_> {
    /// Reduces block by block.
    ///
    /// # Safety
    /// As for [`reduce`]; there is a source, and the steps are of its types.
    unsafe fn reduce(&self, sources: &[*const u8], outs: &[*mut u8], count: usize) {
        // An accumulator has at most 16 bytes.
        let mut partial = [MaybeUninit::<u128>::uninit(); BLOCK];
        let mut widened = [MaybeUninit::<u128>::uninit(); BLOCK];
        let (partial, widened) = (partial.as_mut_ptr().cast::<u8>(), widened.as_mut_ptr().cast::<u8>());
        let mut outs = SmallVec::<[*mut u8; 16]>::from_slice(outs);
        for position in (0..count).step_by(BLOCK) {
            let count = BLOCK.min(count - position);
            let accs = |source: *const u8, block: *mut u8| {
                // SAFETY: guaranteed by the caller.
                let source = unsafe { source.add(position * self.source) };
                let Some(widen) = self.widen else { return source };
                widen([source], block, count);
                block.cast_const()
            };
            let mut result = accs(sources[0], partial);
            for &next in &sources[1..] {
                (self.combine)([result, accs(next, widened)], partial, count);
                result = partial;
            }
            (self.finish)(result, &outs, count);
            for out in &mut outs {
                // SAFETY: guaranteed by the caller.
                *out = unsafe { out.add(count * self.out) };
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
                unsafe { blocks::<$isa, S, In, Out, O, E, N>(sources, outs, count, operator, epilogue) }
            }
            // SAFETY: guaranteed by the caller.
            unsafe { loops::<S, In, Out, O, E, N>(sources, outs, count, operator, epilogue) }
        }};
    }
    match kernel {
        Kernel::Baseline => compile!(Baseline),
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx512 if O::IS_HOT => compile!(Avx512, "avx512f,avx512bw,avx512dq,avx512vl"),
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx2 | Kernel::Avx512 => compile!(Avx2, "avx2,f16c"),
    }
}

/// The loop.
///
/// N is a constant, so accumulators stay in registers. Results are written to a local block and copied from there: an
/// out may equal a source, and LLVM vectorizes a loop only if its stores cannot alias its loads.
///
/// # Safety
/// The pointers are valid for `count` elements in their storage format. An out equals a source or overlaps none.
#[inline(always)]
pub(super) unsafe fn blocks<I, S, In, Out, O, E, const N: usize>(
    sources: [*const u8; N],
    outs: &[*mut u8],
    count: usize,
    operator: O,
    epilogue: E,
) where
    I: Isa,
    S: TiledType,
    In: StorageFormat<S>,
    Out: StorageFormat<S>,
    O: Operator<S::Acc>,
    E: Epilogue<S::Acc>,
{
    // SAFETY: guaranteed by the caller; position + i < count, and a block is read from all sources before it is
    // written.
    unsafe {
        let mut results = [MaybeUninit::<Out::Stored>::uninit(); BLOCK];
        let mut position = S::start::<I, In, Out, O, E, N>(sources, outs, count, operator, epilogue);
        while position < count {
            let len = BLOCK.min(count - position);
            for (i, result) in results[..len].iter_mut().enumerate() {
                let mut acc = load::<S, In, O>(sources[0], position + i, operator);
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
