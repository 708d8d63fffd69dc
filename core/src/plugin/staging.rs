//! Staging memory for scheduled calls of bindings whose callers keep their tensors: C programs and NumPy.
//!
//! The caller's tensors are copied in before the call returns, and the result is copied out. In between the allreduce
//! runs on the staging buffer. A pool reuses the buffers.
//! Thread rule: plain data, protected by the pool's lock.

use std::any::Any;
use std::sync::{Arc, Mutex};

use super::schedule_state::ResultBuffer;
use crate::buffer::{Buffer, Tensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::transport::memory::Aligned;
use crate::wire_layout::ALIGN;

/// Maximum number of unused buffers; a call uses at most three.
const MAX_UNUSED: usize = 3;

/// A pool of unused buffers.
#[derive(Default)]
pub struct StagingPool(Mutex<Vec<Aligned>>);

impl StagingPool {
    fn take(&self, len: usize) -> Aligned {
        let mut unused = lock(&self.0);
        match unused.iter().position(|memory| memory.len() == len) {
            Some(index) => unused.swap_remove(index),
            None => Aligned::new(len),
        }
    }

    fn give(&self, memory: Aligned) {
        let mut unused = lock(&self.0);
        unused.push(memory);
        if unused.len() > MAX_UNUSED {
            unused.remove(0);
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
    /// Memory for `tensors`, without copying.
    fn like(tensors: Vec<(usize, usize, DType)>, pool: &Arc<StagingPool>) -> StagingBuffer {
        let len = tensors.last().map_or(0, |&(offset, len, dtype)| offset + len * dtype.size());
        StagingBuffer { memory: Some(pool.take(len)), tensors, pool: Arc::clone(pool) }
    }

    /// Copies `towers`. Returns the buffer and the tensors in it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid memory.
    ///
    /// # Safety
    /// The memory of `towers` is valid.
    pub unsafe fn of(
        towers: &[Vec<Tensor>],
        pool: &Arc<StagingPool>,
    ) -> Result<(Arc<StagingBuffer>, Vec<Vec<Tensor>>)> {
        let mut offset = 0;
        let mut layout = Vec::new();
        for (index, tensor) in towers.iter().flat_map(|tower| tower.iter().enumerate()) {
            let buffer = tensor.buffer;
            buffer.check().map_err(|error| Error::Invalid(format!("tensor {index}: {error}")))?;
            layout.push((offset, buffer.len(), buffer.dtype()));
            offset = (offset + buffer.len() * buffer.dtype().size()).next_multiple_of(ALIGN);
        }
        let staging = StagingBuffer::like(layout, pool);
        let mut copied = staging.buffers();
        let copies = towers.iter().map(|tower| {
            let copy = |tensor: &Tensor| {
                let buffer = copied.next().unwrap_or(tensor.buffer);
                // SAFETY: guaranteed by the caller; the staging buffer is new.
                unsafe { buffer.bytes_mut(0, buffer.len()).copy_from_slice(tensor.buffer.bytes(0, buffer.len())) };
                Tensor::new(buffer, tensor.shape())
            };
            tower.iter().map(copy).collect()
        });
        let copies = copies.collect();
        drop(copied);
        Ok((Arc::new(staging), copies))
    }

    /// The tensors in the buffer.
    fn buffers(&self) -> impl Iterator<Item = Buffer> {
        let start = self.memory.as_ref().map_or(std::ptr::null_mut(), Aligned::as_ptr);
        self.tensors.iter().map(move |&(offset, len, dtype)| Buffer::in_place(start.wrapping_add(offset), len, dtype))
    }

    /// Copies the tensors to those of `towers`, which have the shapes of the original ones.
    ///
    /// # Safety
    /// The memory of `towers` is valid and not accessed by others; no allreduce runs on the buffer.
    pub unsafe fn copy_to(&self, towers: &[Vec<Tensor>]) {
        for (buffer, tensor) in self.buffers().zip(towers.iter().flatten()) {
            // SAFETY: guaranteed by the caller.
            unsafe { tensor.buffer.bytes_mut(0, buffer.len()).copy_from_slice(buffer.bytes(0, buffer.len())) };
        }
    }

    /// Downcasts a result buffer.
    ///
    /// # Errors
    /// [`Error::Internal`] for another kind of buffer.
    pub fn from_results(results: Arc<dyn ResultBuffer>) -> Result<Arc<StagingBuffer>> {
        let any: Arc<dyn Any + Send + Sync> = results;
        any.downcast().map_err(|_| Error::Internal("a mean is in the memory of another binding".into()))
    }
}

impl ResultBuffer for StagingBuffer {
    fn owner_type(&self) -> usize {
        0
    }

    fn zeros_like(&self) -> Result<(Arc<dyn ResultBuffer>, Vec<usize>)> {
        let mut zeros = StagingBuffer::like(self.tensors.clone(), &self.pool);
        zeros.memory.as_mut().map(Aligned::as_mut_slice).unwrap_or_default().fill(0);
        let addresses = zeros.buffers().map(|buffer| buffer.dst().addr()).collect();
        Ok((Arc::new(zeros), addresses))
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.give(memory);
        }
    }
}
