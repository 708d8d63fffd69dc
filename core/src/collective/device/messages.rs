//! Messages in GPU memory: the copies of a process's sends and receives, and what ranks of a host open of each other.
//!
//! A message waits on the host for the earlier work on its stream, so that no stream of the core waits for one of the caller.
//! Thread rule: any thread may use [`DeviceMessages`]; a [`MessageMemory`] belongs to the lock of the endpoint.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::host_copy::{HostCopies, Lease};
use super::ipc_flags::{IpcUpdate, Located, TensorAddresses};
use super::settings::PathSetting;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::p2p::{DeviceMemory, Span};
use crate::transport::gpu::{Address, CallerStream, Context, Event, PeerImports, Stream};

/// Exports that a message does not use, and that it checks: each costs a call of the driver.
const SWEPT_EXPORTS: usize = 2;
/// Most ids of freed allocations in an announcement.
const MAX_FREED: usize = 16;

/// What a process's messages on one GPU use.
pub struct DeviceMessages {
    copies: Arc<HostCopies>,
    /// For copies between ranks.
    stream: Stream,
    /// Of the ranks of the job from which something was received.
    imports: Mutex<BTreeMap<usize, PeerImports>>,
    /// Whether other ranks may open this rank's memory, and this rank theirs.
    opens: bool,
}

impl DeviceMessages {
    /// For the GPU of `context`. `path`: [`PathSetting::Staged`] demands host memory.
    ///
    /// # Errors
    /// [`Error::System`] if the driver refuses a stream.
    pub fn new(context: &Arc<Context>, path: PathSetting) -> Result<DeviceMessages> {
        Ok(DeviceMessages {
            copies: Arc::new(HostCopies::new(context)?),
            stream: Stream::new(context)?,
            imports: Mutex::default(),
            opens: path != PathSetting::Staged,
        })
    }

    fn context(&self) -> &Arc<Context> {
        self.copies.context()
    }

    /// The memory of a message that starts now on `device`, a stream of this GPU.
    ///
    /// # Errors
    /// [`Error::State`] if the stream is captured; those of [`CallerStream::new`].
    pub fn memory(self: &Arc<Self>, device: Device) -> Result<MessageMemory> {
        let caller = CallerStream::new(device)?;
        if caller.is_captured() {
            let text = "a message cannot be captured into a GPU graph: it needs the host; end the capture before it";
            return Err(Error::State(text.into()));
        }
        Ok(MessageMemory {
            home: Arc::clone(self),
            step: Some(Step::Before(caller)),
            lease: None,
            open: Vec::new(),
            reported: None,
        })
    }
}

/// What is awaited.
enum Step {
    /// The work before the message.
    Before(CallerStream),
    /// A copy.
    Copy(Event),
}

/// The memory of one message.
pub struct MessageMemory {
    home: Arc<DeviceMessages>,
    step: Option<Step>,
    lease: Option<Lease>,
    /// The pieces of another rank: addresses in this process, and lengths.
    open: Vec<(Address, usize)>,
    /// The receiver, and the ids of freed allocations that are reported to it.
    reported: Option<(usize, Vec<u64>)>,
}

impl MessageMemory {
    /// Enqueues copies on a stream, and awaits them.
    fn enqueue(&mut self, stream: &Stream, copies: impl FnOnce(&Stream) -> Result<()>) -> Result<()> {
        let _guard = stream.context().push()?;
        let enqueued = copies(stream);
        if let Some(lease) = &mut self.lease {
            lease.set_busy_until(stream.record());
        }
        enqueued?;
        self.step = Some(Step::Copy(stream.record()?));
        Ok(())
    }

    fn host_memory(&self) -> Result<*mut u8> {
        self.lease.as_ref().ok_or_else(|| Error::Internal("a message has no host memory".into()))?.memory()
    }

    /// What rank `to` needs to open the pieces; `None` if it cannot.
    fn update(&mut self, pieces: &[Span], to: usize) -> Result<Option<IpcUpdate>> {
        let _guard = self.home.context().push()?;
        let mut exports = self.home.context().exports();
        exports.sweep(SWEPT_EXPORTS);
        let spans = pieces.iter().map(|piece| (piece.start.addr() as Address, piece.len as u64));
        let Located { addresses, used, visible } = TensorAddresses::locate(&mut exports, spans)?;
        if !visible {
            return Ok(None);
        }
        let removed = exports.freed(&[to], MAX_FREED);
        exports.note(used.keys().copied(), &[to]);
        self.reported = Some((to, removed.clone()));
        Ok(Some(IpcUpdate { added: used.into_values().collect(), removed, addresses: Some(addresses) }))
    }

    fn try_open(&mut self, from: usize, exported: &[u8], len: usize) -> Result<()> {
        let broken = || Error::Internal("the announcement of a message cannot be decoded".into());
        let words: Vec<u64> = exported.as_chunks::<8>().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
        let (&count, words) = words.split_first().ok_or_else(broken)?;
        let (lengths, words) =
            words.split_at_checked(usize::try_from(count).unwrap_or(usize::MAX)).ok_or_else(broken)?;
        let IpcUpdate { added, removed, addresses } = IpcUpdate::read(words)?;
        let addresses = addresses.ok_or_else(broken)?;
        let context = self.home.context();
        let _guard = context.push()?;
        let mut all = lock(&self.home.imports);
        let imports = all.entry(from).or_insert_with(|| PeerImports::new(context, from));
        imports.apply(&added, &removed)?;
        let mut open = Vec::with_capacity(lengths.len());
        for (index, &length) in lengths.iter().enumerate() {
            let (id, offset) = addresses.at(index)?;
            let export = added.iter().find(|export| export.id == id).ok_or_else(broken)?;
            offset.checked_add(length).filter(|&end| end <= export.len).ok_or_else(broken)?;
            open.push((imports.at(id)? + offset, length as usize));
        }
        if open.iter().map(|(_, length)| length).sum::<usize>() != len {
            return Err(broken());
        }
        self.open = open;
        Ok(())
    }
}

impl DeviceMemory for MessageMemory {
    fn is_ready(&mut self) -> Result<bool> {
        let event = match &self.step {
            None => return Ok(true),
            Some(Step::Before(caller)) => caller.ready(),
            Some(Step::Copy(end)) => end,
        };
        let is_complete = {
            let _guard = event.context().push()?;
            event.is_complete()?
        };
        if is_complete {
            self.step = None;
        }
        Ok(is_complete)
    }

    fn host(&mut self, len: usize) -> Result<*mut u8> {
        let _guard = self.home.context().push()?;
        self.lease = Some(self.home.copies.take_free(len)?);
        self.host_memory()
    }

    fn download(&mut self, pieces: &[Span]) -> Result<()> {
        let (mut to, home) = (self.host_memory()?, Arc::clone(&self.home));
        self.enqueue(home.copies.downloads(), |stream| {
            for piece in pieces {
                // SAFETY: the host memory is this message's; the caller keeps the pieces until the message has ended, and the
                // driver until what is enqueued has.
                unsafe { stream.download(to, piece.start.addr() as Address, piece.len) }?;
                to = to.wrapping_add(piece.len);
            }
            Ok(())
        })
    }

    fn upload(&mut self, pieces: &[Span], len: usize) -> Result<()> {
        let (mut from, home, mut rest) = (self.host_memory()?.cast_const(), Arc::clone(&self.home), len);
        self.enqueue(home.copies.uploads(), |stream| {
            for piece in pieces {
                let count = piece.len.min(rest);
                if count > 0 {
                    // SAFETY: as in `download`.
                    unsafe { stream.upload(piece.start.addr() as Address, from, count) }?;
                }
                (from, rest) = (from.wrapping_add(count), rest - count);
            }
            Ok(())
        })
    }

    fn export(&mut self, pieces: &[Span], to: usize, room: usize) -> Vec<u8> {
        // What cannot be exported goes through host memory.
        let Some(update) = self.home.opens.then(|| self.update(pieces, to).ok().flatten()).flatten() else {
            return Vec::new();
        };
        let lengths = std::iter::once(pieces.len() as u64).chain(pieces.iter().map(|piece| piece.len as u64));
        let words = lengths.chain(update.write(usize::MAX));
        let exported: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
        if exported.len() <= room { exported } else { Vec::new() }
    }

    fn opened(&mut self) {
        if let Some((to, freed)) = self.reported.take() {
            self.home.context().exports().forget_reported(&freed, &[to]);
        }
    }

    fn open(&mut self, from: usize, exported: &[u8], len: usize) -> bool {
        // What cannot be opened comes through host memory.
        self.home.opens && self.try_open(from, exported, len).is_ok()
    }

    fn copy(&mut self, pieces: &[Span]) -> Result<()> {
        let (home, open) = (Arc::clone(&self.home), std::mem::take(&mut self.open));
        self.enqueue(&home.stream, |stream| {
            let mut pieces = pieces.iter().map(|piece| (piece.start.addr() as Address, piece.len));
            let (mut to, mut room) = (0, 0);
            for (mut from, mut len) in open {
                while len > 0 {
                    if room == 0 {
                        let full = || Error::Internal("a message is longer than its receive".into());
                        (to, room) = pieces.next().ok_or_else(full)?;
                    }
                    let count = len.min(room);
                    // SAFETY: the sender keeps its memory until the message has ended, this rank's caller the pieces.
                    unsafe { stream.copy(to, from, count) }?;
                    (to, room, from, len) = (to + count as Address, room - count, from + count as Address, len - count);
                }
            }
            Ok(())
        })
    }
}
