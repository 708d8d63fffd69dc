//! Streams of the core's own, events between them and the frameworks' streams, and copies.
//!
//! The work of a call is ordered by events: an event on the caller's stream when the call is made, for which the core's
//! stream waits, and one on the core's stream when its work is enqueued, for which the caller's stream waits. The host waits
//! for neither.
//! Thread rule: streams and events may be used from any thread in whose context they are ([`Context::enter`]).

use std::ptr;
use std::sync::{Arc, PoisonError};

use cudarc::driver::sys::{self, CUresult};

use super::context::Context;
use super::driver::{Address, check};
use crate::device::Device;
use crate::error::{Error, Result};

/// A stream of a framework, as the driver knows it; 0 is the context's default.
pub type RawStream = usize;

/// The driver's handle for the calling thread's default stream, `CU_STREAM_PER_THREAD`.
const PER_THREAD: RawStream = 2;

/// A stream of the core's own, which nothing else waits for.
pub struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that goes before others where the GPU lets it: who averages holds up everybody.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        let _entered = context.push()?;
        let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut raw = ptr::null_mut();
        // SAFETY: the place is valid; a priority out of range is taken as the nearest.
        check("making a stream", unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, non_blocking, -5) })?;
        Ok(Stream { context: Arc::clone(context), raw })
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The driver's handle.
    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// An event that comes when all that is enqueued so far is done.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn record(&self) -> Result<Event> {
        record(&self.context, self.raw)
    }

    /// Lets what is enqueued from now on wait for `event`.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn wait(&self, event: &Event) -> Result<()> {
        wait(self.raw, event)
    }

    /// Copies `len` bytes of device memory to the host.
    ///
    /// # Errors
    /// [`Error::System`]
    ///
    /// # Safety
    /// Both are valid for `len` bytes until the copy is done, and `to` is nobody else's until then.
    pub unsafe fn download(&self, to: *mut u8, from: Address, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        check("copying from a GPU", unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, len, self.raw) })
    }

    /// Copies `len` bytes of the host to device memory.
    ///
    /// # Errors
    /// [`Error::System`]
    ///
    /// # Safety
    /// As for [`Stream::download`].
    pub unsafe fn upload(&self, to: Address, from: *const u8, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        check("copying to a GPU", unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), len, self.raw) })
    }

    /// Copies `len` bytes of device memory.
    ///
    /// # Errors
    /// [`Error::System`]
    ///
    /// # Safety
    /// As for [`Stream::download`].
    pub unsafe fn copy(&self, to: Address, from: Address, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        check("copying on a GPU", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, len, self.raw) })
    }

    /// Writes `value` to a number in pinned host memory when all before it is done and can be seen.
    ///
    /// # Errors
    /// [`Error::System`]; also where the driver has no such operation.
    ///
    /// # Safety
    /// `at` is the device's address of an aligned number that stays valid until then.
    pub unsafe fn write_value32(&self, at: Address, value: u32) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuStreamWriteValue32_v2(self.raw, at, value, 0) };
        check("writing a flag from a stream", code)
    }

    /// Lets what is enqueued from now on wait until the number at `at`, in pinned host memory, has reached `value`.
    ///
    /// # Errors
    /// As for [`Stream::write_number`].
    ///
    /// # Safety
    /// As for [`Stream::write_number`].
    pub unsafe fn wait_value32_ge(&self, at: Address, value: u32) -> Result<()> {
        let reached = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuStreamWaitValue32_v2(self.raw, at, value, reached) };
        check("waiting for a flag on a stream", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.push() {
            // SAFETY: the driver ends a stream when its work is done; nobody uses the handle any more.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A point on a stream. It goes back to its context's store when it is dropped: who waits for it does so for what it
/// stood for at that time.
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    fn new(context: &Arc<Context>) -> Result<Event> {
        let spare = context.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let raw = match spare {
            Some(raw) => raw,
            None => {
                let mut raw = ptr::null_mut();
                let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
                // SAFETY: the place is valid.
                check("making an event", unsafe { sys::cuEventCreate(&raw mut raw, flags) })?;
                raw
            }
        };
        Ok(Event { context: Arc::clone(context), raw })
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether all before it is done.
    ///
    /// # Errors
    /// [`Error::System`] when something before it has failed.
    pub fn is_complete(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("what was enqueued on a GPU", code).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.context.events.lock().unwrap_or_else(PoisonError::into_inner).push(self.raw);
    }
}

fn record(context: &Arc<Context>, stream: sys::CUstream) -> Result<Event> {
    let event = Event::new(context)?;
    // SAFETY: both are alive, and of one context, as the caller of the binding promises of its stream.
    check("recording an event on a stream", unsafe { sys::cuEventRecord(event.raw, stream) })?;
    Ok(event)
}

fn wait(stream: sys::CUstream, event: &Event) -> Result<()> {
    // SAFETY: both are alive.
    check("letting a stream wait", unsafe { sys::cuStreamWaitEvent(stream, event.raw, 0) })
}

/// The stream on which a call's tensors were made and will be used, and the point on it when the call was made.
pub struct CallerStream {
    context: Arc<Context>,
    stream: RawStream,
    blocks_host: bool,
    ready_event: Event,
}

impl CallerStream {
    /// Notes what is enqueued on `device`'s stream now.
    ///
    /// # Errors
    /// [`Error::State`] while the stream is captured into a CUDA graph; [`Error::Invalid`] for the per-thread default stream;
    /// [`Error::System`].
    pub fn new(device: Device) -> Result<CallerStream> {
        let context = Context::for_device(device.ordinal)?;
        let _entered = context.push()?;
        let raw = device.stream as sys::CUstream;
        if device.stream == PER_THREAD {
            return Err(Error::Invalid(
                "the tensors are on the per-thread default stream, which is another one on each thread; use a stream of your own"
                    .into(),
            ));
        }
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the place is valid; the stream is the caller's.
        check("asking about a stream", unsafe { sys::cuStreamIsCapturing(raw, &raw mut status) })?;
        if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Err(Error::State(
                "the stream is being captured into a CUDA graph; every rank must take part in each collective, so end the capture \
                 before it and start another one after it"
                    .into(),
            ));
        }
        let ready = record(&context, raw)?;
        Ok(CallerStream {
            context: Arc::clone(&context),
            stream: device.stream,
            blocks_host: device.block_host,
            ready_event: ready,
        })
    }

    /// The context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Comes when the tensors hold what the call is made on.
    pub fn ready(&self) -> &Event {
        &self.ready_event
    }

    /// Whether the call ends with the result, for which the stream does not wait.
    pub fn blocks_host(&self) -> bool {
        self.blocks_host
    }

    /// Lets the caller's stream wait for `event`, after which the tensors hold the result; nothing for a call that waits itself.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn make_caller_wait(&self, event: &Event) -> Result<()> {
        if self.blocks_host {
            return Ok(());
        }
        wait(self.stream as sys::CUstream, event)
    }
}

/// Lets stream `later` of GPU `ordinal` wait for all that is enqueued on `stream` now.
///
/// # Errors
/// [`Error::System`]
pub fn order_streams(ordinal: i32, stream: RawStream, later: RawStream) -> Result<()> {
    if stream == later {
        return Ok(());
    }
    let context = Context::for_device(ordinal)?;
    let _entered = context.push()?;
    let event = record(&context, stream as sys::CUstream)?;
    wait(later as sys::CUstream, &event)
}
