//! Short calls as one, so that a message between hosts carries all of them.

use super::{Call, lengths};
use crate::collective::tensor_names::TensorNames;
use crate::wire_layout::{ALIGN, WireLayout};

impl Call {
    /// The bytes that it adds to a fused call; `None` if it runs alone. The same on all ranks with the same call, as the
    /// number of towers of other collectives is not.
    pub fn fused_bytes(&self) -> Option<usize> {
        let fuses = self.op.is_allreduce() && self.towers() == 1;
        let bytes = self.layout.total().next_multiple_of(ALIGN);
        (fuses && bytes <= self.max_fused_bytes()).then_some(bytes)
    }

    /// The most bytes of a fused call.
    pub fn max_fused_bytes(&self) -> usize {
        self.config.limits.fused.min(self.compartment())
    }

    /// This call and those `behind` it, of the same operation, as one of one chunk. No bit changes: an algorithm whose sums
    /// depend on the position of an element has no limit for fused calls.
    pub fn fused<'a>(&'a self, behind: impl Iterator<Item = &'a Call>) -> Call {
        let tensors: Vec<_> = [self].into_iter().chain(behind).flat_map(|call| call.tensors(0)).cloned().collect();
        let wire_size = |dtype| self.reduction(dtype).wire_size();
        let layout = WireLayout::new(&lengths(&tensors), wire_size, self.compartment());
        let (names, name) = (TensorNames::default(), String::new());
        let mut call = Call { layout, names, name, replicas: vec![tensors], ..self.clone() };
        call.signature = call.hash_call();
        call
    }
}
