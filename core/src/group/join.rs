//! The end of a rank's data: it contributes zeros to the calls of the others until all ranks have joined.
//!
//! A rank joins by a call of its own, the maximum of a number, which matches once all ranks have made it. Until then it
//! meets the calls of the others, and the reconciliation lets it take part in them ([`super::reconcile`]). The numbers
//! give the rank that was the last.
//! Thread rule: any thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use super::submit::Group;
use super::work::{CallOptions, Role, Timeout, wait_for_result};
use crate::buffer::{Buffer, Tensor};
use crate::collective::Op;
use crate::dtype::DType;
use crate::error::Result;
use crate::reduce::ReduceOp;

/// More than the calls of any job.
const START: i64 = 1 << 62;

impl Group {
    /// Contributes zeros to the sums and means of the other ranks until all have joined, and waits for that. Returns the
    /// rank that was the last to join: it has contributed to all calls itself; of several, the highest. Calls
    /// `interrupt` when a signal should end the wait.
    ///
    /// # Errors
    /// Those of a call; [`crate::error::Error::Mismatch`] if the others make a call that zeros do not suit, or end without joining.
    pub fn join(&self, timeout: Timeout, interrupt: impl Fn()) -> Result<usize> {
        let last = Arc::new(AtomicI64::new(START | self.rank() as i64));
        let buffer = Buffer::in_place(last.as_ptr().cast(), 1, DType::I64);
        let mut options = CallOptions { name: "join".into(), caller_blocks: true, timeout, ..CallOptions::default() };
        let tensors = vec![vec![Tensor::new(buffer, &[])]];
        let call = self.new_call(Op::allreduce(ReduceOp::Max), tensors, &mut options)?.into_join();
        // Owned by the call: it goes on if this thread stops waiting.
        let role = Role::Join(Arc::clone(&last));
        wait_for_result(interrupt, |done| {
            self.run(self.accept(self.work(call, role, true, timeout, done), true));
        })?;
        Ok((last.load(Ordering::Relaxed) & i64::from(u32::MAX)) as usize)
    }
}
