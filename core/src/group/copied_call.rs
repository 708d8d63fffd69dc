//! Collectives on device memory through whole copies in host memory: those that no path of a GPU has.
//!
//! The submitting thread enqueues the download. The thread that runs the call waits for it first, and enqueues the
//! upload after the call.
//! Thread rule: any thread.

use std::sync::Arc;
use std::time::Duration;

use super::submit::Group;
use super::work::{CallOptions, OnComplete, Role};
use crate::buffer::Tensor;
use crate::collective::device::{HostCopies, HostCopy, poll_until};
use crate::collective::{Call, Counts, Op};
use crate::device::Device;
use crate::error::{Error, Result, guard};
use crate::lock::lock;
use crate::transport::gpu::{CallerStream, Context, Event};

/// How long an upload may take.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(300);

impl Group {
    /// As [`Group::submit`], of a call on tensors of `device`.
    ///
    /// # Safety
    /// As for [`Group::submit`].
    pub(super) unsafe fn submit_copied(
        &self,
        op: Op,
        replicas: Vec<Vec<Tensor>>,
        mut options: CallOptions,
        device: Device,
        done: OnComplete,
    ) {
        // SAFETY: the caller's promise.
        let copied = unsafe { self.copied(op, replicas, &mut options, device) };
        let (call, ready, mut copy) = match copied {
            Ok(parts) => parts,
            Err(error) => return done(Err(error)),
        };
        let shared = Arc::clone(&self.shared);
        let done = Box::new(move |result: Result<()>| {
            // The other ranks have their results, so an error of this GPU ends the group.
            done(result.and_then(|()| finish(&mut copy).inspect_err(|error| shared.fail(error))));
        });
        let work = self.work(call, Role::Copied(ready), options.caller_blocks, options.timeout, done);
        self.run(self.accept(work, options.caller_blocks));
    }

    /// # Safety
    /// As for [`Group::submit`].
    unsafe fn copied(
        &self,
        op: Op,
        replicas: Vec<Vec<Tensor>>,
        options: &mut CallOptions,
        device: Device,
    ) -> Result<(Call, Event, HostCopy)> {
        self.check_gpu(device)?;
        let (counts, names): (Counts, String) = (options.counts.clone(), options.tensor_names.clone());
        options.device = None;
        let checked = self.new_call(op, replicas, options)?;
        (options.counts, options.tensor_names) = (counts, names);
        let producer = guard(|| CallerStream::new(device))?;
        // SAFETY: the caller's promise.
        let copied = guard(|| unsafe { self.host_copies(producer.context())?.download(&checked, producer) });
        // The other ranks make the call.
        let mut copy = copied.inspect_err(|error| self.fail(error))?;
        let call = self.new_call(op, vec![copy.tensors.clone()], options)?;
        let ready = copy.take_ready()?;
        Ok((call, ready, copy))
    }

    /// The group's copies, made by the first call.
    fn host_copies(&self, context: &Arc<Context>) -> Result<Arc<HostCopies>> {
        let mut copies = lock(&self.host_copies);
        match &*copies {
            Some(copies) if Arc::ptr_eq(copies.context(), context) => Ok(Arc::clone(copies)),
            _ => Ok(Arc::clone(copies.insert(Arc::new(HostCopies::new(context)?)))),
        }
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
