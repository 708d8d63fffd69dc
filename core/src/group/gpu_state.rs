//! What a group knows of its calls on device memory.
//!
//! Thread rule: any thread.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use serde_json::Value;

use crate::collective::Call;
use crate::collective::device::{DevicePath, HostCopies, NcclPath};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::transport::gpu::Context;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct GpuState {
    /// The path as JSON, set by the first such call.
    path: OnceLock<Value>,
    /// Bytes of device memory in use.
    pub device_bytes: AtomicUsize,
    /// Whether the path copies the calls that do not run in chunks to host memory; false before the first call.
    pub copies_others: AtomicBool,
    /// Calls that ran in chunks because some rank could not open the memory of another.
    pub calls_in_chunks: AtomicUsize,
    /// The streams and the pinned memory of copies ([`super::copied_call`]), made by the first.
    copies: Mutex<Option<Arc<HostCopies>>>,
}

impl GpuState {
    /// Notes the path, at the first call.
    pub fn set_path(&self, path: &DevicePath) {
        // Only the first call sets it.
        let _first = self.path.set(path.describe());
        self.copies_others.store(path.copies_others(), Ordering::Relaxed);
    }

    /// Refuses a call that is captured into a GPU graph unless NCCL runs it: the replays run without the host.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn check_capture(&self, call: &Call) -> Result<()> {
        let Some(producer) = call.producer().filter(|producer| producer.is_captured()) else { return Ok(()) };
        let reason = match self.path.get().and_then(|path| path["path"].as_str()) {
            None => "the first call of a group chooses its path; make one before the capture".to_owned(),
            Some("nccl") if producer.blocks_host() => "the call blocks the host".to_owned(),
            Some("nccl") if NcclPath::runs(call) => return Ok(()),
            Some("nccl") => "NCCL lacks its operator or element type".to_owned(),
            Some(path) => format!("graphs need the path nccl, and that of this group is {path}"),
        };
        Err(Error::State(format!(
            "{} is captured into a GPU graph, but {reason}. Without it every rank must take part in each call, so end the \
             capture before it and start another one after it",
            call.full_name()
        )))
    }

    /// The number of this rank's GPU, after the first call.
    pub fn ordinal(&self) -> Option<i64> {
        self.path.get()?["gpu"].as_i64()
    }

    /// The path of the calls and what they use as JSON, after the first one.
    pub fn describe(&self) -> Option<Value> {
        let mut path = self.path.get()?.clone();
        path["device_bytes"] = self.device_bytes.load(Ordering::Relaxed).into();
        path["calls_in_chunks"] = self.calls_in_chunks.load(Ordering::Relaxed).into();
        Some(path)
    }

    /// What copies on the GPU of `context` use.
    ///
    /// # Errors
    /// [`crate::error::Error::System`] if the driver refuses a stream.
    pub fn copies(&self, context: &Arc<Context>) -> Result<Arc<HostCopies>> {
        let mut copies = lock(&self.copies);
        match &*copies {
            Some(copies) if Arc::ptr_eq(copies.context(), context) => Ok(Arc::clone(copies)),
            _ => Ok(Arc::clone(copies.insert(Arc::new(HostCopies::new(context)?)))),
        }
    }

    /// Frees what copies use, after the calls that use it.
    pub fn release_copies(&self) {
        drop(lock(&self.copies).take());
    }
}
