//! Memory of the core's own for scheduled calls of bindings whose callers keep their memory: C programs and NumPy.
//!
//! The caller's tensors are copied in before the call returns, and the result is copied out to them; in between the
//! average has the stage to itself. Stages are used again and again.
//! Thread rule: plain data behind the pool's lock.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use super::schedule_state::ResultBuffer;
use crate::buffer::{Buffer, Tensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::transport::memory::Aligned;
use crate::wire_layout::ALIGN;

/// Stages that are not in use; as many as a call can have at a time.
const SPARE: usize = 3;

/// Memory that was used before.
#[derive(Default)]
pub struct StagingPool(Mutex<Vec<Aligned>>);

impl StagingPool {
    fn take(&self, len: usize) -> Aligned {
        let mut spare = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match spare.iter().position(|memory| memory.len() == len) {
            Some(index) => spare.swap_remove(index),
            None => Aligned::new(len),
        }
    }

    fn give(&self, memory: Aligned) {
        let mut spare = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        spare.push(memory);
        if spare.len() > SPARE {
            spare.remove(0);
        }
    }
}

/// A copy of a call's tensors.
pub struct StagingBuffer {
    memory: Option<Aligned>,
    tensors: Vec<(usize, usize, DType)>,
    pool: Arc<StagingPool>,
}

impl StagingBuffer {
    /// Memory for the tensors of `towers`, not yet copied.
    fn like(tensors: Vec<(usize, usize, DType)>, pool: &Arc<StagingPool>) -> StagingBuffer {
        let len = tensors.last().map_or(0, |&(at, len, dtype)| at + len * dtype.size());
        StagingBuffer { memory: Some(pool.take(len)), tensors, pool: Arc::clone(pool) }
    }

    /// A copy of what `towers` hold, and the tensors of the copy.
    ///
    /// # Errors
    /// [`Error::Invalid`] for what cannot be memory.
    ///
    /// # Safety
    /// The memory of `towers` is valid.
    pub unsafe fn of(
        towers: &[Vec<Tensor>],
        pool: &Arc<StagingPool>,
    ) -> Result<(Arc<StagingBuffer>, Vec<Vec<Tensor>>)> {
        let mut at = 0;
        let mut places = Vec::new();
        for (index, tensor) in towers.iter().flat_map(|tower| tower.iter().enumerate()) {
            let buffer = tensor.buffer;
            buffer.check().map_err(|error| Error::Invalid(format!("tensor {index}: {error}")))?;
            places.push((at, buffer.len(), buffer.dtype()));
            at = (at + buffer.len() * buffer.dtype().size()).next_multiple_of(ALIGN);
        }
        let staging = StagingBuffer::like(places, pool);
        let mut places = staging.buffers();
        let copies = towers.iter().map(|tower| {
            let copy = |tensor: &Tensor| {
                let place = places.next().unwrap_or(tensor.buffer);
                // SAFETY: the caller's promise; the stage is new.
                unsafe { place.bytes_mut(0, place.len()).copy_from_slice(tensor.buffer.bytes(0, place.len())) };
                Tensor::new(place, tensor.shape())
            };
            tower.iter().map(copy).collect()
        });
        let copies = copies.collect();
        drop(places);
        Ok((Arc::new(staging), copies))
    }

    /// Where the tensors are.
    fn buffers(&self) -> impl Iterator<Item = Buffer> {
        let start = self.memory.as_ref().map_or(std::ptr::null_mut(), Aligned::as_ptr);
        self.tensors.iter().map(move |&(at, len, dtype)| Buffer::in_place(start.wrapping_add(at), len, dtype))
    }

    /// Copies the tensors to those of `towers`, which are like those that the stage was made for.
    ///
    /// # Safety
    /// The memory of `towers` is valid and nobody else's; no average works on the stage.
    pub unsafe fn copy_to(&self, towers: &[Vec<Tensor>]) {
        for (place, tensor) in self.buffers().zip(towers.iter().flatten()) {
            // SAFETY: the caller's promise.
            unsafe { tensor.buffer.bytes_mut(0, place.len()).copy_from_slice(place.bytes(0, place.len())) };
        }
    }

    /// The stage that a result buffer is.
    ///
    /// # Errors
    /// [`Error::Internal`] when it is not one.
    pub fn from_results(results: Arc<dyn ResultBuffer>) -> Result<Arc<StagingBuffer>> {
        let any: Arc<dyn Any + Send + Sync> = results;
        any.downcast().map_err(|_| Error::Internal("a mean came in memory of another face".into()))
    }
}

impl ResultBuffer for StagingBuffer {
    fn owner_type(&self) -> usize {
        0
    }

    fn zeros_like(&self) -> Result<(Arc<dyn ResultBuffer>, Vec<usize>)> {
        let mut blank = StagingBuffer::like(self.tensors.clone(), &self.pool);
        blank.memory.as_mut().map(Aligned::as_mut_slice).unwrap_or_default().fill(0);
        let addresses = blank.buffers().map(|place| place.dst().addr()).collect();
        Ok((Arc::new(blank), addresses))
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.give(memory);
        }
    }
}
