//! Collectives on device memory through whole copies in host memory: those that the group's path lacks.
//!
//! The copies are made when the ranks have matched the call; earlier, by the submitting thread, if the path is known.
//! The thread that runs the call waits for them, and enqueues the upload after the call.
//! Thread rule: any thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::state::GroupState;
use super::work::Work;
use super::worker::Worker;
use crate::collective::Call;
use crate::collective::device::{HostCopy, poll_until, producer, unrecoverable};
use crate::error::{Error, Result, guard};

/// How long an upload may take.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(300);

impl GroupState {
    /// Starts to copy what `call` reads.
    ///
    /// # Safety
    /// The tensors stay valid until the copies have been uploaded, or the call has failed.
    unsafe fn download(&self, call: &Call) -> Result<HostCopy> {
        let context = producer(call)?.context();
        // SAFETY: the caller's promise.
        guard(|| unsafe { self.gpu.copies(context)?.download(call) })
    }

    /// Starts the copies of a call that is submitted now, if the group's path is known and lacks it.
    pub fn download_early(&self, work: &Work) {
        let call = &work.call;
        let is_copied = self.gpu.copies_others.load(Ordering::Relaxed) && !call.op.runs_in_device_chunks();
        if call.producer().is_none() || !is_copied {
            return;
        }
        // SAFETY: the tensors belong to the call until it ends.
        match unsafe { self.download(call) } {
            Ok(copy) => work.set_host_copy(copy),
            // The other ranks make the call.
            Err(error) => self.fail(&error),
        }
    }
}

impl Worker {
    /// Replaces a call on device memory, on which the ranks agree, by one on copies in host memory.
    pub fn copy_to_host(&mut self, work: &Arc<Work>) -> Result<Arc<Work>> {
        let shared = Arc::clone(&self.shared);
        if work.call.producer().is_some_and(|producer| producer.is_captured()) {
            let reason = "it is captured into a GPU graph and would go through host memory, as a rank waits in join";
            return Err(unrecoverable(Error::State(format!("{}: {reason}", work.call.full_name()))))
                .inspect_err(|error| shared.fail(error));
        }
        let (mut copy, call, ready) = self.run_checked(work, |_, work, _| {
            let copied = || {
                let copy = match work.take_host_copy() {
                    Some(copy) => copy,
                    // SAFETY: the tensors belong to the call until it ends.
                    None => unsafe { shared.download(&work.call) }?,
                };
                Ok((copy.tensors(&work.call), copy))
            };
            let (tensors, mut copy) = copied().map_err(unrecoverable)?;
            let call = work.call.on_host(tensors).map_err(unrecoverable)?;
            let ready = copy.take_ready()?;
            Ok((copy, call, ready))
        })?;
        let upload = move || {
            // The other ranks have their results, so an error of this GPU ends the group.
            finish(&mut copy).inspect_err(|error| shared.fail(error))
        };
        Ok(Arc::new(work.copied(call, ready, upload)))
    }
}

fn finish(copy: &mut HostCopy) -> Result<()> {
    let Some(end) = copy.upload()? else { return Ok(()) };
    let _guard = end.context().push()?;
    // An error of the driver ends the wait too.
    if !poll_until(UPLOAD_TIMEOUT, || end.is_complete().unwrap_or(true)) {
        return Err(Error::Timeout(format!("the GPU has not copied the result within {UPLOAD_TIMEOUT:?}")));
    }
    end.is_complete().map(drop)
}
