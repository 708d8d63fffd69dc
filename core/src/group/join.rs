//! The end of a rank's data: it contributes zeros to the calls of the others until all ranks have joined.
//!
//! A rank joins by a call of its own, an all-gather of numbers, which matches once all ranks have made it. Until then it
//! meets the calls of the others, and the reconciliation lets it take part in them ([`super::reconcile`]). The numbers
//! give the rank that was the last.
//! Thread rule: any thread.

use std::sync::Arc;

use super::callers::Caller;
use super::handle::CallHandle;
use super::join_state::{JoinState, last};
use super::submit::Group;
use super::work::{CallOptions, Role, Timeout};
use crate::buffer::{Buffer, Tensor};
use crate::collective::Op;
use crate::dtype::DType;
use crate::error::Result;
use crate::timeline;

/// A started join.
pub struct Join {
    /// The call.
    pub handle: CallHandle,
    state: Arc<JoinState>,
}

impl Join {
    /// After the end of the call: the rank that was the last to join.
    pub fn last(&self) -> usize {
        last(&self.state.positions())
    }

    /// The number of calls of others to which this rank has contributed zeros.
    pub fn contributions(&self) -> u64 {
        self.state.contributions()
    }
}

impl Group {
    /// Starts to contribute zeros to the sums and means of the other ranks, until all have joined, and returns. The call
    /// fails with [`crate::error::Error::Mismatch`] if another rank ends without joining.
    ///
    /// # Errors
    /// Those of a call that is refused.
    pub fn start_join(&self, timeout: Timeout) -> Result<Join> {
        let state = Arc::new(JoinState::new(self.call_config().ranks, timeline::now()));
        let (own, all) = state.memory();
        let buffer = Buffer::new(own.cast(), all.cast(), 2, DType::I64);
        let mut options = CallOptions { name: "join".into(), timeout, ..CallOptions::default() };
        let tensors = vec![vec![Tensor::new(buffer, &[])]];
        let call = self.new_call(Op::ALLGATHER, tensors, &mut options)?.into_join();
        let (handle, done) = CallHandle::new(None);
        // The call owns the state, too.
        let role = Role::Join(Arc::clone(&state));
        self.run(self.accept(self.work(call, role, Caller::GoesOn, timeout, done, None), false));
        Ok(Join { handle, state })
    }
}
