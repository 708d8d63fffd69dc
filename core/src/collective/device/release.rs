//! The release of a GPU's streams after a call was lost, and the flag by which kernels learn of it.
//!
//! The flag is set before any stream goes on because of the release, and never cleared. Each call ends with a kernel that
//! writes this rank's outputs: if it finds the flag set, it fills them with NaN, and so nobody takes what is there for
//! the result of the call.
//! Thread rule: any thread.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::Result;
use crate::transport::gpu::{Address, Communicator, Context, Handle, KernelArgs, PinnedHostBuffer};

/// Lets the streams of this rank go on although a call is not complete.
pub trait StreamRelease: Send + Sync {
    /// Releases the streams. To be repeated while a stream may wait.
    fn release(&self);

    /// Whether streams of this rank were released, by this rank or another one.
    fn is_released(&self) -> bool;
}

/// [`KernelArgs::STOP_COPIES`] of a 32-bit flag, in memory that the GPU reads.
pub(super) struct StopFlag(Handle<u8>);

impl StopFlag {
    /// Bytes of all copies.
    pub const BYTES: usize = KernelArgs::STOP_COPIES * KernelArgs::STOP_STRIDE;

    /// The flag at `memory`.
    ///
    /// # Safety
    /// It has [`StopFlag::BYTES`] aligned bytes, is zero at first and outlives this; others only set the flag.
    pub unsafe fn new(memory: *mut u8) -> StopFlag {
        StopFlag(Handle(memory))
    }

    fn copy(&self, index: usize) -> &AtomicU32 {
        // SAFETY: the copy is in the memory, aligned, and everybody accesses it as an atomic.
        unsafe { &*self.0.0.add(index * KernelArgs::STOP_STRIDE).cast::<AtomicU32>() }
    }

    /// Sets all copies.
    pub fn set(&self) {
        (0..KernelArgs::STOP_COPIES).for_each(|index| self.copy(index).store(1, Ordering::SeqCst));
    }

    pub fn is_set(&self) -> bool {
        self.copy(0).load(Ordering::SeqCst) != 0
    }
}

/// A stop flag in memory of this process.
pub(super) struct OwnStopFlag {
    pub flag: StopFlag,
    memory: PinnedHostBuffer,
}

impl OwnStopFlag {
    pub fn new(context: &Arc<Context>) -> Result<OwnStopFlag> {
        let memory = PinnedHostBuffer::new(context, StopFlag::BYTES)?;
        // SAFETY: only this object uses the memory, and no GPU knows it yet.
        unsafe { ptr::write_bytes(memory.memory(), 0, StopFlag::BYTES) };
        // SAFETY: the buffer is zero, has this length, and is a field of this object.
        Ok(OwnStopFlag { flag: unsafe { StopFlag::new(memory.memory()) }, memory })
    }

    /// The GPU's address of the first copy.
    pub fn address(&self) -> Address {
        self.memory.address()
    }
}

/// The release of a rank's streams from NCCL: aborts the communicator.
pub(super) struct NcclRelease {
    pub communicator: Arc<Communicator>,
    pub stop: OwnStopFlag,
}

impl StreamRelease for NcclRelease {
    fn release(&self) {
        self.stop.flag.set();
        self.communicator.abort();
    }

    fn is_released(&self) -> bool {
        self.stop.flag.is_set()
    }
}
