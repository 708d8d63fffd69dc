//! Copies of the tensors of a call in host memory, for collectives that no path of a GPU has: the call runs on them.
//!
//! All copies of a group are on one stream, so a pinned buffer that was used before needs no further order.
//! Thread rule: any thread.

use std::sync::{Arc, Mutex};

use super::streams::is_idle;
use crate::buffer::{Buffer, Tensor};
use crate::collective::call::Call;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::transport::gpu::{Address, CallerStream, Context, Event, PinnedHostBuffer, Stream};
use crate::wire_layout::ALIGN;

/// Pinned buffers that are kept for later calls.
const MAX_KEPT: usize = 4;

/// The stream and the pinned memory of a group's copies.
pub struct HostCopies {
    context: Arc<Context>,
    stream: Stream,
    kept: Mutex<Vec<PinnedHostBuffer>>,
}

impl HostCopies {
    /// For the GPU of `context`.
    ///
    /// # Errors
    /// [`Error::System`] if the driver refuses a stream.
    pub fn new(context: &Arc<Context>) -> Result<HostCopies> {
        Ok(HostCopies { context: Arc::clone(context), stream: Stream::new(context)?, kept: Mutex::default() })
    }

    /// The GPU's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// A pinned buffer of at least `len` bytes; the shortest that fits.
    fn take(&self, len: usize) -> Result<PinnedHostBuffer> {
        let mut kept = lock(&self.kept);
        let fits = kept.iter().enumerate().filter(|(_, buffer)| buffer.bytes() >= len);
        let found = fits.min_by_key(|(_, buffer)| buffer.bytes()).map(|(index, _)| index);
        match found {
            Some(index) => Ok(kept.swap_remove(index)),
            None => PinnedHostBuffer::new(&self.context, len.max(1).next_power_of_two()),
        }
    }

    /// Starts to copy what `call`, whose addresses are those of the GPU, reads; `producer` is the caller's stream.
    ///
    /// # Errors
    /// [`Error::System`] of the driver.
    ///
    /// # Safety
    /// The tensors stay valid until [`HostCopy::upload`] has completed on the caller's stream, or the call has failed.
    pub unsafe fn download(self: &Arc<Self>, call: &Call, producer: CallerStream) -> Result<HostCopy> {
        let tensors = call.tensors(0);
        let sizes = |index: usize| {
            let ((read, written), size) = (call.extents(index), tensors[index].buffer.dtype().size());
            (read * size, written * size)
        };
        let total: usize = (0..tensors.len())
            .map(|index| sizes(index).0.next_multiple_of(ALIGN) + sizes(index).1.next_multiple_of(ALIGN))
            .sum();
        let _guard = self.context.push()?;
        let memory = self.take(total)?;
        self.stream.wait(producer.ready())?;
        let mut at = memory.memory();
        let mut next = |len: usize| {
            let place = at;
            at = at.wrapping_add(len.next_multiple_of(ALIGN));
            place
        };
        let (mut copies, mut outputs) = (Vec::with_capacity(tensors.len()), Vec::new());
        for (index, tensor) in tensors.iter().enumerate() {
            let (read, written) = sizes(index);
            let (from, to) = (next(read), next(written));
            if read > 0 {
                // SAFETY: the caller's promise; the buffer is this call's, and its earlier copies are on this stream.
                unsafe { self.stream.download(from, tensor.buffer.source_at(0).addr() as Address, read) }?;
            }
            if written > 0 {
                outputs.push((tensor.buffer.dst().addr() as Address, to.addr(), written));
            }
            let buffer = Buffer::new(from, to, tensor.buffer.len(), tensor.buffer.dtype());
            copies.push(Tensor::new(buffer, tensor.shape()));
        }
        let ready = self.stream.record()?;
        // Whatever becomes of the call, the caller's next work may change what is copied now.
        producer.make_caller_wait(&ready)?;
        Ok(HostCopy {
            home: Arc::clone(self),
            memory: Some(memory),
            producer,
            tensors: copies,
            outputs,
            ready: Some(ready),
        })
    }
}

impl Drop for HostCopies {
    fn drop(&mut self) {
        if let Ok(_guard) = self.context.push() {
            let _or_not = is_idle(&self.stream);
        }
    }
}

/// The copies of one call.
pub struct HostCopy {
    home: Arc<HostCopies>,
    memory: Option<PinnedHostBuffer>,
    producer: CallerStream,
    /// The tensors in host memory.
    pub tensors: Vec<Tensor>,
    /// Places on the GPU and on the host, and bytes.
    outputs: Vec<(Address, usize, usize)>,
    ready: Option<Event>,
}

impl HostCopy {
    /// The event after which the copies are complete; once.
    ///
    /// # Errors
    /// [`Error::Internal`] the second time.
    pub fn take_ready(&mut self) -> Result<Event> {
        self.ready.take().ok_or_else(|| Error::Internal("a copy was waited for twice".into()))
    }

    /// After the call: copies the results to the GPU. The caller's stream waits for that; if the call blocks the host,
    /// returns the event for which the host has to wait.
    ///
    /// # Errors
    /// [`Error::System`] of the driver.
    pub fn upload(&self) -> Result<Option<Event>> {
        let _guard = self.home.context.push()?;
        for &(to, from, len) in &self.outputs {
            // SAFETY: the tensors are valid until then, as `download` requires; the buffer is this call's.
            unsafe { self.home.stream.upload(to, from as *const u8, len) }?;
        }
        let end = self.home.stream.record()?;
        self.producer.make_caller_wait(&end)?;
        Ok(self.producer.blocks_host().then_some(end))
    }
}

impl Drop for HostCopy {
    fn drop(&mut self) {
        let mut kept = lock(&self.home.kept);
        if kept.len() < MAX_KEPT {
            kept.extend(self.memory.take());
        }
        drop(kept);
        if self.memory.is_some()
            && let Ok(_guard) = self.home.context.push()
        {
            // The driver may still copy to or from it.
            let _or_not = is_idle(&self.home.stream);
        }
    }
}
