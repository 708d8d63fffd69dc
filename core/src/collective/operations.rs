//! The collective of each operation.

use super::allreduce::Allreduce;
use super::barrier::Barrier;
use super::broadcast::Broadcast;
use super::call::Op;
use super::phases::Collective;

impl Op {
    /// The implementation of this operation.
    pub(super) fn collective(self) -> &'static dyn Collective {
        match self {
            Op::Allreduce => &Allreduce,
            Op::Broadcast { .. } => &Broadcast,
            Op::Barrier => &Barrier,
        }
    }
}
