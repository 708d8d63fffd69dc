//! Copies of the tensors of a call in host memory, for collectives that the path of a GPU lacks: the call runs on them.
//!
//! A group has a stream for each direction. A pinned buffer is used again after the event at the end of its copies.
//! Thread rule: any thread.

use std::sync::{Arc, Mutex};

use super::streams::{is_idle, producer};
use crate::buffer::{Buffer, Tensor};
use crate::collective::call::Call;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::transport::gpu::{Address, CallerStream, Context, Event, PinnedHostBuffer, Stream};
use crate::wire_layout::ALIGN;

/// Most bytes of pinned buffers that are kept for later calls.
const MAX_KEPT: usize = 256 << 20;
/// Longer buffers have whole pages of this size.
const HUGE_PAGE: usize = 2 << 20;

/// A pinned buffer, and the end of the copies from and to it.
struct Pinned {
    memory: PinnedHostBuffer,
    busy_until: Option<Event>,
}

impl Pinned {
    fn is_free(&self) -> bool {
        self.busy_until.as_ref().is_none_or(|end| end.is_complete().unwrap_or(false))
    }
}

/// The streams and the pinned memory of a group's copies.
pub struct HostCopies {
    context: Arc<Context>,
    download: Stream,
    upload: Stream,
    kept: Mutex<Vec<Pinned>>,
}

impl HostCopies {
    /// For the GPU of `context`.
    ///
    /// # Errors
    /// [`Error::System`] if the driver refuses a stream.
    pub fn new(context: &Arc<Context>) -> Result<HostCopies> {
        let (download, upload) = (Stream::new(context)?, Stream::new(context)?);
        Ok(HostCopies { context: Arc::clone(context), download, upload, kept: Mutex::default() })
    }

    /// The GPU's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The stream of copies to the host.
    pub(super) fn downloads(&self) -> &Stream {
        &self.download
    }

    /// The stream of copies to the GPU.
    pub(super) fn uploads(&self) -> &Stream {
        &self.upload
    }

    /// A pinned buffer of at least `len` bytes for downloads: the shortest that fits, after its copies, or a new one.
    fn take(self: &Arc<Self>, len: usize) -> Result<Lease> {
        let mut lease = self.take_if(len, |_| true)?;
        if let Some(end) = lease.pinned.as_mut().and_then(|pinned| pinned.busy_until.take()) {
            self.download.wait(&end)?;
        }
        Ok(lease)
    }

    /// As [`HostCopies::take`], without copies under way.
    pub(super) fn take_free(self: &Arc<Self>, len: usize) -> Result<Lease> {
        self.take_if(len, Pinned::is_free)
    }

    fn take_if(self: &Arc<Self>, len: usize, fits: impl Fn(&Pinned) -> bool) -> Result<Lease> {
        let mut kept = lock(&self.kept);
        let found = kept.iter().enumerate().filter(|(_, pinned)| pinned.memory.bytes() >= len && fits(pinned));
        let found = found.min_by_key(|(_, pinned)| pinned.memory.bytes()).map(|(index, _)| index);
        let found = found.map(|index| kept.swap_remove(index));
        drop(kept);
        let new = || {
            let len = len.max(1).next_power_of_two().min(len.max(1).next_multiple_of(HUGE_PAGE));
            Ok(Pinned { memory: PinnedHostBuffer::new(&self.context, len)?, busy_until: None })
        };
        Ok(Lease { home: Arc::clone(self), pinned: Some(found.map_or_else(new, Ok)?) })
    }

    /// Keeps a buffer. Frees the shortest ones that are free if there are too many bytes.
    fn keep(&self, pinned: Pinned) {
        let mut kept = lock(&self.kept);
        kept.push(pinned);
        kept.sort_by_key(|pinned| std::cmp::Reverse(pinned.memory.bytes()));
        let mut total: usize = kept.iter().map(|pinned| pinned.memory.bytes()).sum();
        let mut index = kept.len();
        while total > MAX_KEPT && index > 0 {
            index -= 1;
            if kept[index].is_free() {
                total -= kept.remove(index).memory.bytes();
            }
        }
    }

    /// Starts to copy what `call`, on device memory, reads.
    ///
    /// # Errors
    /// [`Error::System`] of the driver.
    ///
    /// # Safety
    /// The tensors stay valid until [`HostCopy::upload`] has completed on the caller's stream, or the call has failed.
    pub unsafe fn download(self: &Arc<Self>, call: &Call) -> Result<HostCopy> {
        let producer = Arc::clone(producer(call)?);
        let tensors = call.tensors(0);
        let sizes = |index: usize| {
            let ((read, written), size) = (call.extents(index), tensors[index].buffer.dtype().size());
            (read * size, written * size)
        };
        let total: usize = (0..tensors.len())
            .map(|index| sizes(index).0.next_multiple_of(ALIGN) + sizes(index).1.next_multiple_of(ALIGN))
            .sum();
        let _guard = self.context.push()?;
        let mut lease = self.take(total)?;
        self.download.wait(producer.ready())?;
        let mut at = lease.memory()?;
        let mut next = |len: usize| {
            let place = at;
            at = at.wrapping_add(len.next_multiple_of(ALIGN));
            place
        };
        let (mut copies, mut outputs) = (Vec::with_capacity(tensors.len()), Vec::new());
        // Should a step fail, the buffer is busy until the copies before it have ended.
        let mut enqueue = || -> Result<()> {
            for (index, tensor) in tensors.iter().enumerate() {
                let (read, written) = sizes(index);
                let (from, to) = (next(read), next(written));
                if read > 0 {
                    // SAFETY: the caller's promise; the buffer is this call's, and its earlier copies come before.
                    unsafe { self.download.download(from, tensor.buffer.source_at(0).addr() as Address, read) }?;
                }
                if written > 0 {
                    outputs.push((tensor.buffer.dst().addr() as Address, to.addr(), written));
                }
                let buffer = Buffer::new(from, to, tensor.buffer.len(), tensor.buffer.dtype());
                copies.push(Tensor::new(buffer, tensor.shape()));
            }
            Ok(())
        };
        let enqueued = enqueue();
        let ready = self.download.record();
        lease.set_busy_until(self.download.record());
        enqueued?;
        let ready = ready?;
        // Whatever becomes of the call, the caller's next work may change what is copied now.
        producer.make_caller_wait(&ready)?;
        Ok(HostCopy { home: Arc::clone(self), lease, producer, tensors: copies, outputs, ready: Some(ready) })
    }
}

impl Drop for HostCopies {
    fn drop(&mut self) {
        let Ok(_guard) = self.context.push() else { return };
        if !is_idle(&self.download) || !is_idle(&self.upload) {
            // The GPU may still use the memory.
            std::mem::forget(std::mem::take(&mut *lock(&self.kept)));
        }
    }
}

/// A buffer in use, which goes back to where it came from.
pub(super) struct Lease {
    home: Arc<HostCopies>,
    pinned: Option<Pinned>,
}

impl Lease {
    pub(super) fn memory(&self) -> Result<*mut u8> {
        let pinned = self.pinned.as_ref().ok_or_else(|| Error::Internal("a pinned buffer is gone".into()))?;
        Ok(pinned.memory.memory())
    }

    /// The buffer is free after this event. Without one nobody can know, and it is never used again.
    pub(super) fn set_busy_until(&mut self, end: Result<Event>) {
        match (end, &mut self.pinned) {
            (Ok(end), Some(pinned)) => pinned.busy_until = Some(end),
            _ => std::mem::forget(self.pinned.take()),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            self.home.keep(pinned);
        }
    }
}

/// The copies of one call.
pub struct HostCopy {
    home: Arc<HostCopies>,
    lease: Lease,
    producer: Arc<CallerStream>,
    /// In host memory, as long as those of the call.
    tensors: Vec<Tensor>,
    /// Places on the GPU and on the host, and bytes.
    outputs: Vec<(Address, usize, usize)>,
    ready: Option<Event>,
}

impl HostCopy {
    /// The tensors of `call`, of which these are the copies, in host memory.
    pub fn tensors(&self, call: &Call) -> Vec<Tensor> {
        let copy = |(copy, tensor): (&Tensor, &Tensor)| {
            let (memory, of) = (&copy.buffer, &tensor.buffer);
            Tensor::new(Buffer::new(memory.source_at(0), memory.dst(), of.len(), of.dtype()), tensor.shape())
        };
        self.tensors.iter().zip(call.tensors(0)).map(copy).collect()
    }

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
    pub fn upload(&mut self) -> Result<Option<Event>> {
        let _guard = self.home.context.push()?;
        let stream = &self.home.upload;
        let enqueued = self.outputs.iter().try_for_each(|&(to, from, len)| {
            // SAFETY: the tensors are valid until then, as `download` requires; the buffer is this call's.
            unsafe { stream.upload(to, from as *const u8, len) }
        });
        self.lease.set_busy_until(stream.record());
        enqueued?;
        let end = stream.record()?;
        self.producer.make_caller_wait(&end)?;
        Ok(self.producer.blocks_host().then_some(end))
    }
}
