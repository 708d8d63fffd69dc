//! A reduction whose kernel was found once, for calls so short that to find it counts.

use std::marker::PhantomData;

use super::epilogue::Epilogue;
use super::half_tiles::TiledType;
use super::kernel::Kernel;
use super::op::Visitor;
use super::operator::Operator;
use super::storage::StorageFormat;
use super::{Reduction, Step, run_kernel};
use crate::float_state::DefaultFloatState;

/// [`Reduction::combine`] for one operator and element type.
pub struct BoundReduction(Box<dyn Combine>);

impl BoundReduction {
    /// As [`Reduction::combine`].
    ///
    /// # Safety
    /// As there.
    #[inline]
    pub unsafe fn combine(&self, sources: &[*const u8], outs: &[*mut u8], count: usize) {
        let _default = DefaultFloatState::enter();
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.combine(sources, outs, count) }
    }
}

impl Reduction {
    /// Finds the kernel of [`Reduction::combine`]; `None` if the operator has none for the element type.
    pub fn bind(self) -> Option<BoundReduction> {
        self.visit(Step::Combine, &Bind(self))
    }
}

trait Combine: Send {
    unsafe fn combine(&self, sources: &[*const u8], outs: &[*mut u8], count: usize);
}

/// The kernel of the types `S` and `In`.
struct Bound<S, In, O, E> {
    reduction: Reduction,
    kernel: Kernel,
    operator: O,
    epilogue: E,
    types: PhantomData<fn() -> (S, In)>,
}

impl<S: TiledType, In: StorageFormat<S>, O: Operator<S::Acc>, E: Epilogue<S::Acc>> Combine for Bound<S, In, O, E> {
    unsafe fn combine(&self, sources: &[*const u8], outs: &[*mut u8], count: usize) {
        let Bound { reduction, kernel, operator, epilogue, .. } = *self;
        // SAFETY: guaranteed by the caller; `best` returns an available kernel.
        unsafe {
            run_kernel::<S, In, O, E>(reduction, kernel, Step::Combine, sources, outs, count, operator, epilogue);
        }
    }
}

struct Bind(Reduction);

impl Visitor for Bind {
    type Output = BoundReduction;
    fn visit<S: TiledType, In: StorageFormat<S>, O: Operator<S::Acc>, E: Epilogue<S::Acc>>(
        &self,
        operator: O,
        epilogue: E,
    ) -> BoundReduction {
        let (reduction, kernel, types) = (self.0, Kernel::best(), PhantomData::<fn() -> (S, In)>);
        BoundReduction(Box::new(Bound { reduction, kernel, operator, epilogue, types }))
    }
}
