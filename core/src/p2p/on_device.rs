//! The memory of a message that is on a device: its copies to and from host memory, and between ranks.
//!
//! Thread rule: used under the lock of the endpoint.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::device::{DeviceMemory, Span};
use super::message::{OnDevice, Spans};
use crate::error::Result;
use crate::transport::mailbox::ring::CELL_BYTES;

/// How long an end waits for a copy under way.
const SETTLE: Duration = Duration::from_secs(5);

impl Spans {
    /// The spans are on a device.
    pub fn set_device(&mut self, memory: Box<dyn DeviceMemory>) {
        let pieces = std::mem::take(&mut self.spans);
        self.device = Some(Box::new(OnDevice { memory, pieces, exported: Vec::new(), copies: false, is_open: false }));
    }

    /// Whether they are on a device.
    #[inline]
    pub fn is_on_device(&self) -> bool {
        self.device.is_some()
    }

    /// For a send: whether the work before it is done.
    pub(super) fn is_ready(&mut self) -> Result<bool> {
        self.device.as_mut().map_or(Ok(true), |device| device.memory.is_ready())
    }

    /// For a send that is ready: whether its data is in host memory. The first call starts to copy it there.
    pub(super) fn in_host_memory(&mut self) -> Result<bool> {
        let Some(device) = &mut self.device else { return Ok(true) };
        if !device.copies {
            let start = device.memory.host(self.len)?;
            device.memory.download(&device.pieces)?;
            device.copies = true;
            self.spans.push(Span { start, len: self.len });
        }
        device.memory.is_ready()
    }

    /// For a long send: lets rank `to` of the job open the memory, if it can.
    pub(super) fn export(&mut self, to: usize) {
        if let Some(device) = &mut self.device {
            device.exported = device.memory.export(&device.pieces, to, CELL_BYTES);
        }
    }

    /// What the receiver needs to open the memory.
    pub(super) fn exported(&self) -> &[u8] {
        self.device.as_ref().map_or(&[], |device| &device.exported)
    }

    /// For a send that has ended.
    pub(super) fn sent(&mut self) {
        if let Some(device) = &mut self.device
            && !device.copies
            && !device.exported.is_empty()
        {
            device.memory.opened();
        }
    }

    /// For a receive: gives it host memory for a message of `len` bytes, which [`Spans::delivered`] copies from there.
    pub(super) fn make_host_memory(&mut self, len: usize) -> Result<()> {
        if let Some(device) = &mut self.device
            && len > 0
        {
            self.spans = SmallVec::from_slice(&[Span { start: device.memory.host(len)?, len }]);
        }
        Ok(())
    }

    /// For a receive: whether the `len` bytes in its host memory are on the device. The first calls start to copy them there.
    pub(super) fn delivered(&mut self, len: usize) -> Result<bool> {
        let has_host_memory = !self.spans.is_empty();
        self.run(|memory, pieces| if has_host_memory { memory.upload(pieces, len) } else { Ok(()) })
    }

    /// For a receive: opens what the sender, rank `from` of the job, has exported for a message of `len` bytes.
    pub(super) fn open(&mut self, from: usize, exported: &[u8], len: usize) -> bool {
        if let Some(device) = &mut self.device {
            device.is_open = !exported.is_empty() && device.memory.open(from, exported, len);
        }
        self.is_open()
    }

    /// For a receive: whether the sender's memory is open.
    pub(super) fn is_open(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.is_open)
    }

    /// For a receive: whether what is open has been copied. The first calls start that.
    pub(super) fn copied(&mut self) -> Result<bool> {
        self.run(|memory, pieces| memory.copy(pieces))
    }

    /// Whether the copy that `start` starts, once the memory is ready, is done.
    fn run(&mut self, start: impl FnOnce(&mut dyn DeviceMemory, &[Span]) -> Result<()>) -> Result<bool> {
        let Some(device) = &mut self.device else { return Ok(true) };
        if !device.memory.is_ready()? {
            return Ok(false);
        }
        if !device.copies {
            start(&mut *device.memory, &device.pieces)?;
            device.copies = true;
            return device.memory.is_ready();
        }
        Ok(true)
    }

    /// Whether a copy may be under way, which nobody can give up.
    pub(super) fn is_copying(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.copies)
    }

    /// Waits until no copy is under way, before the memory is given back.
    pub(super) fn settle(&mut self) {
        let since = Instant::now();
        while self.is_copying() && self.is_ready() == Ok(false) && since.elapsed() < SETTLE {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}
