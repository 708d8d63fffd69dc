//! What the copies of a group's calls on device memory use ([`super::copied_call`]).
//!
//! Thread rule: any thread.

use std::sync::{Arc, Mutex};

use crate::collective::device::HostCopies;
use crate::error::Result;
use crate::lock::lock;
use crate::transport::gpu::Context;

/// The streams and the pinned memory of a group's copies, made by the first.
#[derive(Default)]
pub(super) struct GroupCopies(Mutex<Option<Arc<HostCopies>>>);

impl GroupCopies {
    /// The copies for the GPU of `context`.
    ///
    /// # Errors
    /// [`crate::error::Error::System`] if the driver refuses a stream.
    pub fn get(&self, context: &Arc<Context>) -> Result<Arc<HostCopies>> {
        let mut copies = lock(&self.0);
        match &*copies {
            Some(copies) if Arc::ptr_eq(copies.context(), context) => Ok(Arc::clone(copies)),
            _ => Ok(Arc::clone(copies.insert(Arc::new(HostCopies::new(context)?)))),
        }
    }

    /// Frees them after the calls that use them.
    pub fn release(&self) {
        drop(lock(&self.0).take());
    }
}
