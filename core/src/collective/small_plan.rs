//! What a small call copies and reduces, found once for all calls like it.
//!
//! Thread rule: used by one thread at a time.

use std::ptr;

use smallvec::SmallVec;

use super::call::Call;
use super::parts::{Part, ReducedPart, for_moved, for_packed, for_reduced};
use super::transfer::{pack, reduce, store};
use crate::error::{Error, Result};
use crate::reduce::BoundReduction;
use crate::topology::Topology;

/// What a small call on one host ([`Call::is_small`]) copies and reduces.
pub struct SmallPlan {
    packed: SmallVec<[Part; 2]>,
    moved: SmallVec<[Part; 2]>,
    reduced: SmallVec<[(ReducedPart, BoundReduction); 1]>,
    local_rank: usize,
    /// Scratch memory: to make the list for every call takes a tenth of its time.
    sources: Box<[*const u8]>,
}

// SAFETY: the addresses in `sources` are used only while `take` fills the list and reads it.
unsafe impl Send for SmallPlan {}

impl SmallPlan {
    /// The plan of `call`, a small one.
    ///
    /// # Errors
    /// [`Error::Internal`] without a kernel, which validated calls have.
    pub(super) fn new(call: &Call, topology: &Topology) -> Result<SmallPlan> {
        let (mut packed, mut moved, mut reduced) = (SmallVec::new(), SmallVec::new(), SmallVec::new());
        for_packed(call, topology, 0, |part| packed.push(part));
        let mut all_exist = true;
        if call.op.collective.reduces {
            for_reduced(call, topology, 0, |part| {
                match call.reduction(call.tensors(0)[part.tensor].buffer.dtype()).bind() {
                    Some(reduction) => reduced.push((part, reduction)),
                    None => all_exist = false,
                }
            });
        } else {
            for_moved(call, topology, 0, |part| moved.push(part));
        }
        if !all_exist {
            return Err(Error::Internal(format!("no kernel for {}", call.full_name())));
        }
        let (local_rank, sources) = (topology.local_rank(), vec![ptr::null(); topology.local_size()].into());
        Ok(SmallPlan { packed, moved, reduced, local_rank, sources })
    }

    /// Copies the inputs of `call` to the slots.
    ///
    /// # Safety
    /// The plan is that of a call like this one; this rank owns its slot, or its compartments; the call owns its tensors.
    #[inline]
    pub(super) unsafe fn pack(&self, call: &Call, slots: &[*mut u8]) {
        // SAFETY: the caller's promise.
        self.packed.iter().for_each(|part| unsafe { pack(call, part, slots) });
    }

    /// Takes the results of `call` from the slots.
    ///
    /// # Safety
    /// The plan is that of a call like this one; all ranks have packed; the call owns its tensors.
    #[inline]
    pub(super) unsafe fn take(&mut self, call: &Call, slots: &[*mut u8]) {
        // SAFETY: the caller's promise.
        unsafe {
            for (part, reduction) in &self.reduced {
                reduce(call, part, self.local_rank, slots, &mut self.sources, |sources, outs, count| {
                    reduction.combine(sources, outs, count);
                });
            }
            self.moved.iter().for_each(|part| store(call, part, slots));
        }
    }
}
