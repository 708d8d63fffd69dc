//! The core's streams, events that order them with the frameworks' streams, and copies.
//!
//! Events order the work of a call. The core's stream waits for an event that the call records on the caller's stream.
//! The caller's stream waits for an event after the call's work on the core's stream. The host waits for neither.
//! Thread rule: any thread, with the context current ([`Context::push`]).

use std::sync::Arc;

use cudarc::driver::result::{self, event, stream};
use cudarc::driver::sys::{self, CUresult};

use super::context::Context;
use super::driver::{Address, Handle, check};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::lock::lock;

/// A framework's stream as the driver's handle; 0 is the default stream of the context.
pub type RawStream = usize;

/// The driver's handle for the calling thread's default stream, `CU_STREAM_PER_THREAD`.
const PER_THREAD: RawStream = 2;

/// A stream of the core. It does not synchronize with the default stream.
pub struct Stream {
    context: Arc<Context>,
    raw: Handle<sys::CUstream_st>,
}

impl Stream {
    /// A high-priority stream: a late collective delays every rank.
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        let _guard = context.push()?;
        // The driver clamps the priority.
        let raw = check("making a stream", stream::create_with_priority(stream::StreamKind::NonBlocking, -5))?;
        Ok(Stream { context: Arc::clone(context), raw: Handle(raw) })
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The driver's handle.
    pub fn raw(&self) -> sys::CUstream {
        self.raw.0
    }

    /// An event that completes with the work enqueued so far.
    pub fn record(&self) -> Result<Event> {
        record(&self.context, self.raw.0)
    }

    /// Makes later work on this stream wait for `event`.
    pub fn wait(&self, event: &Event) -> Result<()> {
        wait(self.raw.0, event)
    }

    /// Copies `len` bytes of device memory to the host.
    ///
    /// # Safety
    /// Both ranges are valid for `len` bytes, and nothing else uses `to`, until the copy has completed.
    pub unsafe fn download(&self, to: *mut u8, from: Address, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        check("copying from a GPU", unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, len, self.raw.0) }.result())
    }

    /// Copies `len` bytes of host memory to the device.
    ///
    /// # Safety
    /// As for [`Stream::download`].
    pub unsafe fn upload(&self, to: Address, from: *const u8, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        check("copying to a GPU", unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), len, self.raw.0) }.result())
    }

    /// Copies `len` bytes within device memory.
    ///
    /// # Safety
    /// As for [`Stream::download`].
    pub unsafe fn copy(&self, to: Address, from: Address, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        check("copying on a GPU", unsafe { result::memcpy_dtod_async(to, from, len, self.raw.0) })
    }

    /// Writes `value` to a 32-bit flag in pinned host memory after the earlier work; its results are visible by then.
    ///
    /// # Errors
    /// [`Error::System`]; also if the driver does not support the operation.
    ///
    /// # Safety
    /// `at` is the device address of an aligned flag that stays valid until the write.
    pub unsafe fn write_value32(&self, at: Address, value: u32) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuStreamWriteValue32_v2(self.raw.0, at, value, 0) };
        check("writing a flag from a stream", code.result())
    }

    /// Makes later work wait until the 32-bit flag at `at`, in pinned host memory, is `value` or more.
    ///
    /// # Errors
    /// As for [`Stream::write_value32`].
    ///
    /// # Safety
    /// As for [`Stream::write_value32`].
    pub unsafe fn wait_value32_ge(&self, at: Address, value: u32) -> Result<()> {
        let reached = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuStreamWaitValue32_v2(self.raw.0, at, value, reached) };
        check("waiting for a flag on a stream", code.result())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_guard) = self.context.push() {
            // SAFETY: the driver frees a stream after its work; nobody else has the handle.
            unsafe { sys::cuStreamDestroy_v2(self.raw.0) };
        }
    }
}

/// A point on a stream. Dropping it returns the event to the context's pool; existing waits keep the recorded point.
pub struct Event {
    context: Arc<Context>,
    raw: Handle<sys::CUevent_st>,
}

impl Event {
    fn new(context: &Arc<Context>) -> Result<Event> {
        let spare = lock(&context.events).pop();
        let new = || check("making an event", event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)).map(Handle);
        Ok(Event { context: Arc::clone(context), raw: spare.map_or_else(new, Ok)? })
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether the work before the event has completed.
    ///
    /// # Errors
    /// [`Error::System`] if earlier work failed.
    pub fn is_complete(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        match unsafe { event::query(self.raw.0) } {
            Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            done => check("what was enqueued on a GPU", done).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        lock(&self.context.events).push(self.raw);
    }
}

fn record(context: &Arc<Context>, stream: sys::CUstream) -> Result<Event> {
    let event = Event::new(context)?;
    // SAFETY: both are alive and belong to one context, as the caller promises of its stream.
    check("recording an event on a stream", unsafe { event::record(event.raw.0, stream) })?;
    Ok(event)
}

fn wait(stream: sys::CUstream, event: &Event) -> Result<()> {
    // SAFETY: both are alive.
    check("letting a stream wait", unsafe { sys::cuStreamWaitEvent(stream, event.raw.0, 0) }.result())
}

/// The stream that produces and consumes a call's tensors, and the point on it at the time of the call.
pub struct CallerStream {
    context: Arc<Context>,
    stream: RawStream,
    blocks_host: bool,
    is_captured: bool,
    ready_event: Event,
}

/// Whether a stream is being captured into a CUDA graph.
fn is_captured(stream: sys::CUstream) -> Result<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the out pointer is valid; the stream is the caller's.
    check("asking about a stream", unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) }.result())?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

impl CallerStream {
    /// Records an event on `device`'s stream.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the per-thread default stream; [`Error::System`].
    pub fn new(device: Device) -> Result<CallerStream> {
        let context = Context::for_device(device.ordinal)?;
        let _guard = context.push()?;
        let raw = device.stream as sys::CUstream;
        if device.stream == PER_THREAD {
            return Err(Error::Invalid(
                "the tensors are on the per-thread default stream, which is another one on each thread; use a stream of your own"
                    .into(),
            ));
        }
        let is_captured = is_captured(raw)?;
        let ready_event = record(&context, raw)?;
        let context = Arc::clone(&context);
        Ok(CallerStream { context, stream: device.stream, blocks_host: device.block_host, is_captured, ready_event })
    }

    /// The same stream, at its present point.
    ///
    /// # Errors
    /// [`Error::State`] while it is being captured into a CUDA graph; [`Error::System`].
    pub fn again(&self) -> Result<CallerStream> {
        let _guard = self.context.push()?;
        if is_captured(self.stream as sys::CUstream)? {
            return Err(Error::State(
                "a call of a schedule cannot be captured into a CUDA graph; end the capture before it".into(),
            ));
        }
        let ready_event = record(&self.context, self.stream as sys::CUstream)?;
        Ok(CallerStream { context: Arc::clone(&self.context), ready_event, ..*self })
    }

    /// The context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The event after which the tensors hold the call's input.
    pub fn ready(&self) -> &Event {
        &self.ready_event
    }

    /// Whether it is being captured into a CUDA graph: the events are points of the graph, for which only streams can wait.
    pub fn is_captured(&self) -> bool {
        self.is_captured
    }

    /// Whether the call blocks the host until the result is there; the stream does not wait then.
    pub fn blocks_host(&self) -> bool {
        self.blocks_host
    }

    /// Makes the caller's stream wait for `event`, which completes with the result. Does nothing for a call that blocks
    /// the host.
    pub fn make_caller_wait(&self, event: &Event) -> Result<()> {
        if self.blocks_host {
            return Ok(());
        }
        wait(self.stream as sys::CUstream, event)
    }
}

/// Makes stream `later` of GPU `ordinal` wait for the work enqueued on `stream` so far.
pub fn order_streams(ordinal: i32, stream: RawStream, later: RawStream) -> Result<()> {
    if stream == later {
        return Ok(());
    }
    let context = Context::for_device(ordinal)?;
    let _guard = context.push()?;
    let event = record(&context, stream as sys::CUstream)?;
    wait(later as sys::CUstream, &event)
}
