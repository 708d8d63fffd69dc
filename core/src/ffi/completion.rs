//! What reaches the caller of a call: its end, once, and the memory of its results.
//!
//! Thread rule: any thread.

use std::any::Any;
use std::sync::Arc;

use cxx::{SharedPtr, UniquePtr};

use super::bridge::{self, Completion};
use crate::error::{Error, Result};
use crate::p2p::Status;
use crate::plugin::{OnResult, ResultBuffer};

/// The memory of a call, owned by an op library.
pub(super) struct OpLibraryResults(pub(super) SharedPtr<bridge::ResultBuffer>);

// SAFETY: by contract (completion.h), any thread may use and destroy `ResultBuffer`.
unsafe impl Send for OpLibraryResults {}
// SAFETY: as above.
unsafe impl Sync for OpLibraryResults {}

impl ResultBuffer for OpLibraryResults {
    fn owner_type(&self) -> usize {
        self.0.as_ref().map_or(0, bridge::ResultBuffer::owner_type)
    }

    fn set_weights(&self, own: f64, here: f64) {
        if let Some(results) = self.0.as_ref() {
            results.set_weights(own, here);
        }
    }

    fn zeros_like(&self) -> Result<(Arc<dyn ResultBuffer>, Vec<usize>)> {
        let mut addresses = Vec::new();
        let blank = self.0.as_ref().map(|results| results.zeros_like(&mut addresses)).filter(|blank| !blank.is_null());
        let blank = blank.ok_or_else(|| Error::System("there is no memory for a result".into()))?;
        Ok((Arc::new(OpLibraryResults(blank)), addresses))
    }
}

/// The op library's memory of a result.
fn memory(results: Option<Arc<dyn ResultBuffer>>) -> Result<SharedPtr<bridge::ResultBuffer>> {
    let Some(results) = results else { return Ok(SharedPtr::null()) };
    let any: Arc<dyn Any + Send + Sync> = results;
    let memory = any
        .downcast::<OpLibraryResults>()
        .map_err(|_| Error::Internal("a mean is in the memory of another binding".into()))?;
    Ok(memory.0.clone())
}

/// A completion that is called exactly once, even if the call is dropped.
pub(super) struct CompletionGuard(pub(super) UniquePtr<Completion>);

// SAFETY: by contract (completion.h), any thread may call and destroy a `Completion`.
unsafe impl Send for CompletionGuard {}

impl CompletionGuard {
    pub fn finish(mut self, result: Result<SharedPtr<bridge::ResultBuffer>>) {
        self.complete(result);
    }

    pub fn finish_transfer(mut self, result: Result<Status>) {
        if let (Ok(status), Some(completion)) = (&result, self.0.as_ref()) {
            // Ranks and tags of a group are below 2^31.
            let number = |value: usize| i32::try_from(value).unwrap_or(-1);
            completion.received(number(status.source), number(status.tag as usize), status.bytes);
        }
        self.complete(result.map(|_| SharedPtr::null()));
    }

    fn complete(&mut self, result: Result<SharedPtr<bridge::ResultBuffer>>) {
        let completion = std::mem::replace(&mut self.0, UniquePtr::null());
        match (completion.as_ref(), result) {
            (None, _) => {}
            (Some(completion), Ok(results)) => completion.done(0, "", results),
            (Some(completion), Err(error)) => completion.done(error.code(), &error.to_string(), SharedPtr::null()),
        }
    }
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        self.complete(Err(Error::Internal("the call was dropped".into())));
    }
}

/// What passes a mean to its caller.
pub(super) fn on_result(completion: UniquePtr<Completion>) -> OnResult {
    let guard = CompletionGuard(completion);
    Box::new(move |result| guard.finish(result.and_then(memory)))
}
