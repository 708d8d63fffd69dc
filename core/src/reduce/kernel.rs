//! The reduction loop, compiled for each instruction set, and its extension to any number of sources.

use std::marker::PhantomData;
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
    /// Whether [`Kernel::Baseline`] has loops for whole reductions. On x86-64 only processors without AVX2 need it: there it
    /// has only loops for steps, which take twice as long and a third of the code.
    const BASELINE_IS_WHOLE: bool = cfg!(not(target_arch = "x86_64"));

    /// Whether it has loops for whole reductions.
    fn is_whole(self) -> bool {
        Kernel::BASELINE_IS_WHOLE || self != Kernel::Baseline
    }

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

/// A loop for a whole reduction, or for a step of one.
const WHOLE: bool = true;
const STEP: bool = false;

/// Combines the sources in order, applies `epilogue`, and stores the result to every out.
///
/// One loop reduces two sources of elements, of a hot operator up to four. Everything else takes a block at a time through
/// a loop for each step, which operators, formats and epilogues share: widen, combine, finish. The block stays in the L1
/// cache.
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
            return compiled::<S, In, Out, O, E, $n, WHOLE>(kernel, $sources, outs, count, operator, epilogue)
        };
    }
    // Conditions of constants, so that loops that are never called are not compiled.
    // SAFETY: guaranteed by the caller; a block is read from all sources before it is written.
    unsafe {
        if const { In::NATIVE && O::IS_HOT } {
            match *sources {
                _ if !kernel.is_whole() => {}
                [a] => compiled!([a], 1),
                [a, b] => compiled!([a, b], 2),
                [a, b, c] => compiled!([a, b, c], 3),
                [a, b, c, d] => compiled!([a, b, c, d], 4),
                _ => {}
            }
        } else if const { In::NATIVE && !O::LIFTS }
            && kernel.is_whole()
            && let [a, b] = *sources
        {
            compiled!([a, b], 2);
        }
        let lift = operator.lift_alone();
        let widen = Loop::<S, In, AsAccumulator, _, _, 1>::new(kernel, lift, Identity);
        let combine = Loop::<Plain<S::Acc>, AsElement, AsElement, _, _, 2>::new(kernel, O::OnAccs::default(), Identity);
        let finish = Loop::<S, AsAccumulator, Out, _, E, 1>::new(kernel, Keep, epilogue);
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

/// A step of a reduction: a loop over one or two sources.
trait StepLoop {
    /// Runs it.
    ///
    /// # Safety
    /// As for [`blocks`]; the sources are as many as the loop has.
    unsafe fn run(&self, sources: &[*const u8], outs: &[*mut u8], count: usize);
}

/// The loop of these types over `N` sources. It is no closure, because each of those would compile as four functions.
struct Loop<S, In, Out, O, E, const N: usize> {
    kernel: Kernel,
    operator: O,
    epilogue: E,
    types: PhantomData<(S, In, Out)>,
}

impl<S, In, Out, O, E, const N: usize> Loop<S, In, Out, O, E, N> {
    fn new(kernel: Kernel, operator: O, epilogue: E) -> Self {
        Loop { kernel, operator, epilogue, types: PhantomData }
    }
}

impl<S, In, Out, O, E, const N: usize> StepLoop for Loop<S, In, Out, O, E, N>
where
    S: TiledType,
    In: StorageFormat<S>,
    Out: StorageFormat<S>,
    O: Operator<S::Acc>,
    E: Epilogue<S::Acc>,
{
    unsafe fn run(&self, sources: &[*const u8], outs: &[*mut u8], count: usize) {
        let Loop { kernel, operator, epilogue, .. } = *self;
        debug_assert_eq!(sources.len(), N);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let sources = *sources.as_ptr().cast::<[*const u8; N]>();
            compiled::<S, In, Out, O, E, N, STEP>(kernel, sources, outs, count, operator, epilogue);
        }
    }
}

/// A reduction as loops over blocks.
struct Steps<'a> {
    /// The size of a stored element of a source.
    source: usize,
    /// The size of a stored element of an out.
    out: usize,
    /// Makes accumulators of elements; `None` if the sources have accumulators.
    widen: Option<&'a dyn StepLoop>,
    /// Combines accumulators.
    combine: &'a dyn StepLoop,
    /// Stores accumulators.
    finish: &'a dyn StepLoop,
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
                // SAFETY: guaranteed by the caller; the block has room.
                unsafe { widen.run(&[source], &[block], count) };
                block.cast_const()
            };
            let mut result = accs(sources[0], partial);
            // SAFETY: guaranteed by the caller; the blocks have room.
            unsafe {
                for &next in &sources[1..] {
                    self.combine.run(&[result, accs(next, widened)], &[partial], count);
                    result = partial;
                }
                self.finish.run(&[result], &outs, count);
                for out in &mut outs {
                    *out = out.add(count * self.out);
                }
            }
        }
    }
}

/// [`blocks`] compiled for `kernel`. `IS_WHOLE`: [`WHOLE`] or [`STEP`].
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
    const IS_WHOLE: bool,
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
        Kernel::Baseline => match const { !IS_WHOLE || Kernel::BASELINE_IS_WHOLE } {
            true => compile!(Baseline),
            // Rather than results that nobody has written.
            false => unreachable!("the kernel has loops for steps only"),
        },
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
            // Copied as bytes, which need no alignment.
            let (results, size) = (results.as_ptr().cast::<u8>(), size_of::<Out::Stored>());
            match outs {
                // A loop over one costs a short call more than the copy.
                [out] => out.add(position * size).copy_from_nonoverlapping(results, len * size),
                outs => copy_to_each(results, outs, position * size, len * size),
            }
            position += len;
        }
    }
}

/// Copies a block to `offset` in each out. One function for all types.
///
/// # Safety
/// The pointers are valid for these bytes.
#[inline(never)]
unsafe fn copy_to_each(block: *const u8, outs: &[*mut u8], offset: usize, bytes: usize) {
    for out in outs {
        // SAFETY: guaranteed by the caller.
        unsafe { out.add(offset).copy_from_nonoverlapping(block, bytes) };
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
