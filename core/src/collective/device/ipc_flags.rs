//! What the ranks of a host show each other for calls on device memory: their allocations, and the numbers by which their
//! streams meet.
//!
//! Thread rule: [`StreamFlags`] may be used from any thread; the rest is plain data.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::poll::{TEARDOWN_TIMEOUT, poll_until};
use super::settings::SyncMode;
use crate::collective::channel::Channel;
use crate::error::{Error, Result};
use crate::transport::arena::PeerMemory;
use crate::transport::gpu::{
    Address, Context, DeviceBuffer, ExportedAllocation, HostRegistration, PinnedHostBuffer, Stream,
};

/// A page, in which a rank's number is.
pub(super) const PAGE: usize = 4096;

/// The page of a rank, in memory that all ranks of the host see.
pub(super) struct Page {
    memory: *mut u8,
    /// `None` where the file system's pages cannot be pinned: then no GPU sees it.
    pinned: Option<HostRegistration>,
}

// SAFETY: an address in memory that may be used from any thread.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// # Safety
    /// There are [`PAGE`] bytes, on a page of their own, which outlive this.
    pub unsafe fn new(context: &Arc<Context>, memory: *mut u8) -> Page {
        // SAFETY: the caller's promise.
        Page { memory, pinned: unsafe { HostRegistration::new(context, memory, PAGE) }.ok() }
    }

    /// Where the GPU sees it.
    ///
    /// # Errors
    /// [`Error::System`] where it does not.
    pub fn address(&self) -> Result<Address> {
        let unseen = || Error::System("the GPU does not see the host memory that the ranks share".into());
        self.pinned.as_ref().map(HostRegistration::address).ok_or_else(unseen)
    }
}

/// The numbers that the ranks of a host have come to, in memory that all of them and, where it can be pinned, their GPUs see.
/// The own page is not given back when the team ends: another rank may look at it later than that.
pub(super) struct StreamFlags {
    /// By local rank.
    pub pages: Vec<Page>,
    /// The number of the last meeting of this rank.
    pub seq: AtomicU32,
    released: AtomicBool,
    /// Not 0 when kernels of this rank are to end: after a rank was lost, the memory of others may not be there any more.
    stop: PinnedHostBuffer,
}

impl StreamFlags {
    pub fn new(context: &Arc<Context>, pages: Vec<Page>) -> Result<StreamFlags> {
        let stop = PinnedHostBuffer::new(context, PAGE)?;
        // SAFETY: the page is this one's alone, and no GPU knows of it yet.
        unsafe { stop.memory().cast::<u32>().write(0) };
        Ok(StreamFlags { pages, seq: AtomicU32::new(0), released: AtomicBool::new(false), stop })
    }

    fn number(&self, rank: usize) -> &AtomicU32 {
        // SAFETY: the page is mapped as long as this lives, and holds nothing else.
        unsafe { &*self.pages[rank].memory.cast::<AtomicU32>() }
    }

    /// Where the GPU finds the number that ends kernels.
    pub fn stop_address(&self) -> Address {
        self.stop.address()
    }

    /// Raises the number of this rank, `me`, when its stream has ended.
    pub fn raise(&self, me: usize, step: u32) {
        self.number(me).store(step, Ordering::Release);
    }

    /// Whether all ranks have come to `step`.
    pub fn all_reached(&self, step: u32) -> bool {
        let has = |rank| self.number(rank).load(Ordering::Acquire).wrapping_sub(step).cast_signed() >= 0;
        (0..self.pages.len()).all(has)
    }

    /// Lets everybody's streams go on, whoever has not come: of a rank that has ended nothing comes any more. Numbers are far
    /// ahead of this rank's meetings then, however many ranks do this. To be repeated as long as a stream may wait: those of
    /// other ranks that go on set their numbers back to what they have come to.
    pub fn release_all(&self) {
        self.released.store(true, Ordering::Relaxed);
        // SAFETY: the number is in memory of its own, which GPUs only read.
        unsafe { &*self.stop.memory().cast::<AtomicU32>() }.store(1, Ordering::SeqCst);
        let far = self.seq.load(Ordering::Relaxed).wrapping_add(1 << 30);
        (0..self.pages.len()).for_each(|rank| self.number(rank).store(far, Ordering::Release));
    }

    /// Whether a rank was lost.
    pub fn is_released(&self) -> bool {
        self.released.load(Ordering::Relaxed)
    }
}

/// Whether other processes can see this one's memory, and who can wait for them.
pub(super) fn probe(context: &Arc<Context>) -> Result<SyncMode> {
    let _entered = context.push()?;
    context.kernels()?;
    let memory = DeviceBuffer::new(context, PAGE)?;
    if context.exports().locate(memory.address(), 1)?.is_none() {
        return Err(Error::System("cannot export memory to other ranks (cuIpcGetMemHandle)".into()));
    }
    let stream = Stream::new(context)?;
    let flag = PinnedHostBuffer::new(context, PAGE)?;
    // SAFETY: the number is in pinned memory, which stays until the stream has ended.
    let waited =
        unsafe { stream.write_value32(flag.address(), 1).and_then(|()| stream.wait_value32_ge(flag.address(), 1)) };
    let done = waited.and_then(|()| stream.record());
    let came = done.is_ok_and(|event| poll_until(TEARDOWN_TIMEOUT, || event.is_complete().unwrap_or(false)));
    Ok(if came { SyncMode::Stream } else { SyncMode::Host })
}

/// The numbers that an export takes.
pub(super) const EXPORT: usize = 3 + 8;

/// An export in numbers, as ranks tell it.
pub(super) fn export_words(export: &ExportedAllocation) -> impl Iterator<Item = u64> {
    let handle = export.handle.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    [export.id, export.start, export.len].into_iter().chain(handle)
}

/// The export that these are the numbers of.
pub(super) fn export(words: &[u64]) -> Option<ExportedAllocation> {
    let (&[id, start, len], words) = words.split_first_chunk::<3>()?;
    start.checked_add(len)?;
    let mut handle = [0; 64];
    let words = words.get(..8)?;
    handle.as_chunks_mut::<8>().0.iter_mut().zip(words).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
    Some(ExportedAllocation { id, start, len, handle })
}

/// What is the rank's own before the others come in.
pub(super) struct LocalIpc {
    /// Of its page, for the others.
    pub place: u64,
    pub shared: Arc<dyn PeerMemory>,
    /// Memory that the others may read.
    pub bounce: DeviceBuffer,
    pub export: ExportedAllocation,
}

impl LocalIpc {
    /// Takes `bytes` of the GPU, and a page that the other ranks see.
    pub fn new(channel: &Channel, context: &Arc<Context>, bytes: usize) -> Result<LocalIpc> {
        let none = || Error::System("the ranks of the host share no memory".into());
        let shared = channel.shm.region().peer_memory_arc().ok_or_else(none)?;
        let (bounce, export) = exported(context, bytes)?;
        let start = shared.alloc_zeroed(PAGE)?.addr();
        let place = shared.offset_of(start..start + PAGE).ok_or_else(none)?;
        Ok(LocalIpc { place, shared, bounce, export })
    }
}

/// Takes `bytes` of the GPU that other processes can see.
pub(super) fn exported(context: &Arc<Context>, bytes: usize) -> Result<(DeviceBuffer, ExportedAllocation)> {
    let memory = DeviceBuffer::new(context, bytes)?;
    let mut exports = context.exports();
    exports.forget_freed();
    let none = || Error::System("GPU memory cannot be exported".into());
    let export = exports.locate(memory.address(), bytes as u64)?.ok_or_else(none)?;
    Ok((memory, export))
}

/// Bits of a tensor's place that tell how far it is from the start of its export.
const OFFSET_BITS: u32 = 44;

/// Where tensors are: an export of their rank each, and how far from its start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Places {
    /// The exports.
    ids: Vec<u64>,
    /// For each tensor the index of an export, and the offset: [`OFFSET_BITS`] bits.
    places: Vec<u64>,
}

impl Places {
    /// Adds the place `address` in `export`; false when there is no number for it.
    #[must_use]
    pub fn push(&mut self, address: Address, export: &ExportedAllocation) -> bool {
        let index = match self.ids.iter().rposition(|&id| id == export.id) {
            Some(index) => index,
            None => {
                self.ids.push(export.id);
                self.ids.len() - 1
            }
        };
        let offset = address - export.start;
        self.places.push((index as u64) << OFFSET_BITS | offset);
        index >> (u64::BITS - OFFSET_BITS) == 0 && offset >> OFFSET_BITS == 0
    }

    /// The export and the offset of place `index`.
    ///
    /// # Errors
    /// [`Error::Internal`] when there is none.
    pub fn at(&self, index: usize) -> Result<(u64, u64)> {
        let find = || {
            let place = *self.places.get(index)?;
            let id = *self.ids.get(usize::try_from(place >> OFFSET_BITS).ok()?)?;
            Some((id, place & ((1 << OFFSET_BITS) - 1)))
        };
        find().ok_or_else(|| Error::Internal("a place is missing".into()))
    }
}

/// What a rank tells before a call of two shots: which exports are new and which were freed, and, if the others can see all of
/// its tensors, two places for each: read and written.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct IpcUpdate {
    pub added: Vec<ExportedAllocation>,
    pub removed: Vec<u64>,
    pub places: Option<Places>,
}

impl IpcUpdate {
    /// In numbers, at most `most` of them: places that do not fit are left out. `fresh` and `gone` have to fit.
    pub fn write(&self, most: usize) -> Vec<u64> {
        let mut words = vec![0, self.added.len() as u64, self.removed.len() as u64, 0];
        words.extend(self.added.iter().flat_map(export_words));
        words.extend(&self.removed);
        if let Some(Places { ids, places }) = &self.places
            && words.len() + ids.len() + places.len() <= most
        {
            words[0] = 1;
            words[3] = ids.len() as u64;
            words.extend(ids);
            words.extend(places);
        }
        words
    }

    pub fn read(words: &[u64]) -> Result<IpcUpdate> {
        let parse = || {
            let (&[visible, fresh, gone, ids], rest) = words.split_first_chunk::<4>()?;
            let number = |number: u64| usize::try_from(number).ok();
            let (news, rest) = rest.split_at_checked(number(fresh)?.checked_mul(EXPORT)?)?;
            let (gone, rest) = rest.split_at_checked(number(gone)?)?;
            let (ids, places) = rest.split_at_checked(number(ids)?)?;
            Some(IpcUpdate {
                added: news.chunks_exact(EXPORT).map(export).collect::<Option<_>>()?,
                removed: gone.to_vec(),
                places: (visible == 1).then(|| Places { ids: ids.to_vec(), places: places.to_vec() }),
            })
        };
        parse().ok_or_else(|| Error::Internal("what a rank told of its memory is not legible".into()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn note() -> IpcUpdate {
        let mut handle = [0; 64];
        handle.iter_mut().zip(0..).for_each(|(byte, index)| *byte = index);
        let export = ExportedAllocation { id: u64::MAX, start: 1 << 40, len: 1 << 30, handle };
        let other = ExportedAllocation { id: 7, start: 4096, len: 1 << 43, handle };
        let mut places = Places::default();
        assert!(places.push((1 << 40) + 5, &export));
        assert!(places.push(4096 + (1 << 43) - 1, &other));
        assert!(places.push(1 << 40, &export));
        IpcUpdate { added: vec![export], removed: vec![3, 4], places: Some(places) }
    }

    #[test]
    fn notes_are_read_as_they_were_written_and_cut_ones_refused() {
        let note = note();
        let words = note.write(1000);
        let read = IpcUpdate::read(&words).unwrap();
        assert_eq!(read, note);
        let places = read.places.unwrap();
        let found: Vec<_> = (0..3).map(|index| places.at(index).unwrap()).collect();
        assert_eq!(found, [(u64::MAX, 5), (7, (1 << 43) - 1), (u64::MAX, 0)]);
        assert!(places.at(3).is_err());
        for len in 0..4 + EXPORT + 2 + 2 {
            assert!(IpcUpdate::read(&words[..len]).is_err(), "{len}");
        }
    }

    #[test]
    fn places_that_do_not_fit_are_left_out() {
        let note = note();
        let whole = note.write(1000).len();
        assert_eq!(IpcUpdate::read(&note.write(whole)).unwrap(), note);
        let cut = note.write(whole - 1);
        assert!(cut.len() < whole);
        assert_eq!(IpcUpdate::read(&cut).unwrap(), IpcUpdate { places: None, ..note });
    }
}
