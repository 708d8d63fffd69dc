//! The memory of a device as messages see it. The device copies it; nobody waits for that under the lock of the endpoint.

use crate::error::Result;

/// Memory in one piece.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// Its first address.
    pub start: *mut u8,
    /// Its length in bytes.
    pub len: usize,
}

/// The memory of one message on a device, in pieces that have addresses of the device. Nothing here blocks.
pub trait DeviceMemory: std::marker::Send {
    /// Whether the work on it before the message, and the copies that were started, are done.
    ///
    /// # Errors
    /// The copy, or the work before, has failed.
    fn is_ready(&mut self) -> Result<bool>;

    /// Host memory of `len` bytes, as long as this lives.
    ///
    /// # Errors
    /// There is none.
    fn host(&mut self, len: usize) -> Result<*mut u8>;

    /// Starts to copy the pieces to the host memory. It is ready.
    ///
    /// # Errors
    /// Those of the device.
    fn download(&mut self, pieces: &[Span]) -> Result<()>;

    /// Starts to copy the first `len` bytes of the host memory to the pieces. It is ready.
    ///
    /// # Errors
    /// Those of the device.
    fn upload(&mut self, pieces: &[Span], len: usize) -> Result<()>;

    /// What rank `to` of the job, on this host, needs to open the pieces, in at most `room` bytes; empty if it cannot.
    fn export(&mut self, pieces: &[Span], to: usize, room: usize) -> Vec<u8>;

    /// The receiver has opened what was exported.
    fn opened(&mut self);

    /// Opens `len` bytes that rank `from` of the job has exported; false if that is impossible.
    fn open(&mut self, from: usize, exported: &[u8], len: usize) -> bool;

    /// Starts to copy what is open to the pieces. It is ready.
    ///
    /// # Errors
    /// Those of the device.
    fn copy(&mut self, pieces: &[Span]) -> Result<()>;
}
