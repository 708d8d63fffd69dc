//! Shared data of a host's ranks for calls on device memory: allocations, and the flags of stream barriers.
//!
//! Thread rule: any thread may use [`StreamFlags`]; the rest is plain data.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::release::{OwnStopFlag, StopFlag, StreamRelease};
use super::settings::SyncMode;
use super::streams::{TEARDOWN_TIMEOUT, poll_until};
use crate::collective::channel::Channel;
use crate::error::{Error, Result};
use crate::transport::gpu::{
    Address, Context, DeviceBuffer, ExportedAllocation, Handle, IpcExports, PinnedHostBuffer, Stream,
};
use crate::transport::peer_memory::PeerMemory;

/// Bytes before a rank's stop flag, which hold its counter.
const COUNTER_BYTES: usize = 4096;
/// Size of the pages with a rank's flags.
pub(super) const PAGES: usize = COUNTER_BYTES + StopFlag::BYTES;

/// The flags of a rank, in memory shared by all ranks of the host: a counter, and the stop flag of its kernels.
pub(super) struct Page {
    memory: Handle<u8>,
    /// `None` if the file system's pages cannot be pinned; the GPU cannot access the page then.
    pinned: Option<PinnedHostBuffer>,
}

impl Page {
    /// # Safety
    /// `memory` has [`PAGES`] bytes in whole pages, zero at first, that outlive this.
    pub unsafe fn new(context: &Arc<Context>, memory: *mut u8) -> Page {
        // SAFETY: the caller's promise.
        Page { memory: Handle(memory), pinned: unsafe { PinnedHostBuffer::register(context, memory, PAGES) }.ok() }
    }

    fn stop(&self) -> StopFlag {
        // SAFETY: the memory after the counter is the flag's.
        unsafe { StopFlag::new(self.memory.0.add(COUNTER_BYTES)) }
    }

    /// The GPU's address of the counter.
    ///
    /// # Errors
    /// [`Error::System`] if the pages are not pinned.
    pub fn address(&self) -> Result<Address> {
        let not_pinned = || Error::System("the GPU does not see the host memory that the ranks share".into());
        self.pinned.as_ref().map(PinnedHostBuffer::address).ok_or_else(not_pinned)
    }
}

/// Barrier counters of a host's ranks, in memory shared by all of them and, if pinned, by their GPUs. A rank's page is
/// not freed with its group, because a peer may read it later.
pub(super) struct StreamFlags {
    /// By local rank.
    pub pages: Vec<Page>,
    /// The number of this rank's last stream barrier.
    pub seq: AtomicU32,
    /// The rank itself.
    me: usize,
    /// If its pages are not pinned: the stop flag that its kernels read. No stream waits for another rank then.
    own_stop: Option<OwnStopFlag>,
}

impl StreamFlags {
    /// The flags of all ranks of the host, of which this is rank `me`.
    pub fn new(context: &Arc<Context>, pages: Vec<Page>, me: usize) -> Result<StreamFlags> {
        let own_stop = match &pages[me].pinned {
            Some(_) => None,
            None => Some(OwnStopFlag::new(context)?),
        };
        Ok(StreamFlags { pages, seq: AtomicU32::new(0), me, own_stop })
    }

    fn number(&self, rank: usize) -> &AtomicU32 {
        // SAFETY: the page is mapped while this lives, and begins with the counter.
        unsafe { &*self.pages[rank].memory.0.cast::<AtomicU32>() }
    }

    /// The GPU's address of the stop flag of this rank's kernels, which ends them: after a rank was lost, its memory may be
    /// gone.
    ///
    /// # Errors
    /// [`Error::Internal`]: there is none.
    pub fn stop_address(&self) -> Result<Address> {
        match &self.own_stop {
            Some(own_stop) => Ok(own_stop.address()),
            None => self.pages[self.me].address().map(|counter| counter + COUNTER_BYTES as Address),
        }
    }

    /// Sets the counter of this rank when its stream has ended.
    pub fn raise(&self, step: u32) {
        self.number(self.me).store(step, Ordering::Release);
    }

    /// Whether all ranks have reached barrier `step`.
    pub fn all_reached(&self, step: u32) -> bool {
        let reached = |rank| self.number(rank).load(Ordering::Acquire).wrapping_sub(step).cast_signed() >= 0;
        (0..self.pages.len()).all(reached)
    }
}

/// Releases the streams of all ranks of the host: a lost rank never sets its counter.
impl StreamRelease for StreamFlags {
    /// Sets the stop flags of all ranks first: another rank's stream may go on before that rank knows of the loss. The
    /// counters are then far ahead, even if several ranks do this. Streams of other ranks may set their counters back.
    fn release(&self) {
        self.own_stop.iter().for_each(|own_stop| own_stop.flag.set());
        self.pages.iter().for_each(|page| page.stop().set());
        let released = self.seq.load(Ordering::Relaxed).wrapping_add(1 << 30);
        (0..self.pages.len()).for_each(|rank| self.number(rank).store(released, Ordering::Release));
    }

    fn is_released(&self) -> bool {
        self.pages[self.me].stop().is_set()
    }
}

/// Whether other processes can open this process's memory; if so, whether streams or the host wait.
pub(super) fn probe(context: &Arc<Context>) -> Result<SyncMode> {
    let _guard = context.push()?;
    context.kernels()?;
    let memory = DeviceBuffer::new(context, COUNTER_BYTES)?;
    if context.exports().locate(memory.address(), 1, &mut BTreeSet::new())?.is_none() {
        return Err(Error::System("cannot export memory to other ranks (cuIpcGetMemHandle)".into()));
    }
    let stream = Stream::new(context)?;
    let flag = PinnedHostBuffer::new(context, COUNTER_BYTES)?;
    // SAFETY: the flag is in pinned memory that lives until the stream has ended.
    let can_wait = unsafe { can_wait_on(&stream, flag.address(), 1) }.unwrap_or(false);
    Ok(if can_wait { SyncMode::Stream } else { SyncMode::Host })
}

/// Whether the stream can write `value` to a flag and wait for it.
///
/// # Safety
/// `flag` is the device address of an aligned 32-bit flag that outlives the stream.
pub(super) unsafe fn can_wait_on(stream: &Stream, flag: Address, value: u32) -> Result<bool> {
    // SAFETY: the caller's promise.
    unsafe { stream.write_value32(flag, value).and_then(|()| stream.wait_value32_ge(flag, value)) }?;
    let event = stream.record()?;
    Ok(poll_until(TEARDOWN_TIMEOUT, || event.is_complete().unwrap_or(false)))
}

/// Number of words of an export.
pub(super) const EXPORT_WORDS: usize = 3 + 8;

/// Encodes an export as words.
pub(super) fn export_words(export: &ExportedAllocation) -> impl Iterator<Item = u64> {
    let handle = export.handle.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    [export.id, export.start, export.len].into_iter().chain(handle)
}

/// Decodes an export.
pub(super) fn export(words: &[u64]) -> Option<ExportedAllocation> {
    let (&[id, start, len], words) = words.split_first_chunk::<3>()?;
    start.checked_add(len)?;
    let mut handle = [0; 64];
    let words = words.get(..8)?;
    handle.as_chunks_mut::<8>().0.iter_mut().zip(words).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
    Some(ExportedAllocation { id, start, len, handle })
}

/// A rank's IPC resources before the exchange with its peers.
pub(super) struct LocalIpc {
    /// Offset of the flags, for the peers.
    pub page_offset: u64,
    pub shared: Arc<dyn PeerMemory>,
    /// The bounce buffer, which peers may access.
    pub bounce: DeviceBuffer,
    pub export: ExportedAllocation,
}

impl LocalIpc {
    /// Allocates `bytes` of device memory, and flags that the peers can access.
    pub fn new(channel: &Channel, context: &Arc<Context>, bytes: usize) -> Result<LocalIpc> {
        let unavailable = || Error::System("the ranks of the host share no memory".into());
        let shared = channel.region().shared_peer_memory().ok_or_else(unavailable)?;
        let (bounce, export) = exported(context, bytes)?;
        let start = shared.alloc_zeroed(PAGES)?.addr();
        let page_offset = shared.offset_of(start..start + PAGES).ok_or_else(unavailable)?;
        Ok(LocalIpc { page_offset, shared, bounce, export })
    }
}

/// Allocates `bytes` of device memory and exports them.
pub(super) fn exported(context: &Arc<Context>, bytes: usize) -> Result<(DeviceBuffer, ExportedAllocation)> {
    let memory = DeviceBuffer::new(context, bytes)?;
    let mut exports = context.exports();
    exports.forget_freed();
    let unavailable = || Error::System("GPU memory cannot be exported".into());
    let located = exports.locate(memory.address(), bytes as u64, &mut BTreeSet::new())?;
    let export = located.ok_or_else(unavailable)?;
    Ok((memory, export))
}

/// Bits of an encoded tensor address that hold its offset in the export.
const OFFSET_BITS: u32 = 44;

/// Addresses of tensors: for each an export of its rank and an offset.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TensorAddresses {
    /// The ids of the exports.
    ids: Vec<u64>,
    /// For each tensor the index of an export, then [`OFFSET_BITS`] bits of offset.
    addresses: Vec<u64>,
}

impl TensorAddresses {
    /// Adds `address`, which is in `export`; false if it cannot be encoded.
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
        self.addresses.push((index as u64) << OFFSET_BITS | offset);
        index >> (u64::BITS - OFFSET_BITS) == 0 && offset >> OFFSET_BITS == 0
    }

    /// The addresses of `spans`, which are starts and lengths in bytes, in exports of this process.
    ///
    /// # Errors
    /// Those of [`IpcExports::locate`].
    pub fn locate(exports: &mut IpcExports, spans: impl Iterator<Item = (Address, u64)>) -> Result<Located> {
        let mut located = Located { addresses: TensorAddresses::default(), used: BTreeMap::new(), visible: true };
        let mut alive = BTreeSet::new();
        for (start, len) in spans {
            match exports.locate(start, len, &mut alive)? {
                Some(export) => {
                    located.visible &= located.addresses.push(start, &export);
                    located.used.insert(export.id, export);
                }
                None => located.visible = false,
            }
        }
        Ok(located)
    }

    /// The export's id and the offset of entry `index`.
    ///
    /// # Errors
    /// [`Error::Internal`] if there is no such entry.
    pub fn at(&self, index: usize) -> Result<(u64, u64)> {
        let find = || {
            let encoded = *self.addresses.get(index)?;
            let id = *self.ids.get(usize::try_from(encoded >> OFFSET_BITS).ok()?)?;
            Some((id, encoded & ((1 << OFFSET_BITS) - 1)))
        };
        find().ok_or_else(|| Error::Internal("a place is missing".into()))
    }
}

/// See [`TensorAddresses::locate`].
pub(super) struct Located {
    pub addresses: TensorAddresses,
    /// The exports that they are in, by id.
    pub used: BTreeMap<u64, ExportedAllocation>,
    /// Whether other ranks can open all of them.
    pub visible: bool,
}

/// A rank's message before a two-shot call: new exports, freed exports, and, if the peers can open all of its tensors,
/// two addresses for each: source and destination.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct IpcUpdate {
    pub added: Vec<ExportedAllocation>,
    pub removed: Vec<u64>,
    pub addresses: Option<TensorAddresses>,
}

impl IpcUpdate {
    /// Encodes it in at most `max_words` words; omits the addresses if they do not fit. `added` and `removed` must fit.
    pub fn write(&self, max_words: usize) -> Vec<u64> {
        let mut words = vec![0, self.added.len() as u64, self.removed.len() as u64, 0];
        words.extend(self.added.iter().flat_map(export_words));
        words.extend(&self.removed);
        if let Some(TensorAddresses { ids, addresses }) = &self.addresses
            && words.len() + ids.len() + addresses.len() <= max_words
        {
            words[0] = 1;
            words[3] = ids.len() as u64;
            words.extend(ids);
            words.extend(addresses);
        }
        words
    }

    pub fn read(words: &[u64]) -> Result<IpcUpdate> {
        let parse = || {
            let (&[visible, added, removed, ids], rest) = words.split_first_chunk::<4>()?;
            let number = |number: u64| usize::try_from(number).ok();
            let (added, rest) = rest.split_at_checked(number(added)?.checked_mul(EXPORT_WORDS)?)?;
            let (removed, rest) = rest.split_at_checked(number(removed)?)?;
            let (ids, addresses) = rest.split_at_checked(number(ids)?)?;
            Some(IpcUpdate {
                added: added.chunks_exact(EXPORT_WORDS).map(export).collect::<Option<_>>()?,
                removed: removed.to_vec(),
                addresses: (visible == 1).then(|| TensorAddresses { ids: ids.to_vec(), addresses: addresses.to_vec() }),
            })
        };
        parse().ok_or_else(|| Error::Internal("cannot decode the memory handles of a rank".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update() -> IpcUpdate {
        let mut handle = [0; 64];
        handle.iter_mut().zip(0..).for_each(|(byte, index)| *byte = index);
        let export = ExportedAllocation { id: u64::MAX, start: 1 << 40, len: 1 << 30, handle };
        let other = ExportedAllocation { id: 7, start: 4096, len: 1 << 43, handle };
        let mut addresses = TensorAddresses::default();
        assert!(addresses.push((1 << 40) + 5, &export));
        assert!(addresses.push(4096 + (1 << 43) - 1, &other));
        assert!(addresses.push(1 << 40, &export));
        IpcUpdate { added: vec![export], removed: vec![3, 4], addresses: Some(addresses) }
    }

    #[test]
    fn updates_round_trip_and_truncated_ones_are_rejected() {
        let update = update();
        let words = update.write(1000);
        let read = IpcUpdate::read(&words).unwrap();
        assert_eq!(read, update);
        let addresses = read.addresses.unwrap();
        let found: Vec<_> = (0..3).map(|index| addresses.at(index).unwrap()).collect();
        assert_eq!(found, [(u64::MAX, 5), (7, (1 << 43) - 1), (u64::MAX, 0)]);
        assert!(addresses.at(3).is_err());
        for len in 0..4 + EXPORT_WORDS + 2 + 2 {
            assert!(IpcUpdate::read(&words[..len]).is_err(), "{len}");
        }
    }

    #[test]
    fn addresses_that_do_not_fit_are_omitted() {
        let update = update();
        let full_len = update.write(1000).len();
        assert_eq!(IpcUpdate::read(&update.write(full_len)).unwrap(), update);
        let cut = update.write(full_len - 1);
        assert!(cut.len() < full_len);
        assert_eq!(IpcUpdate::read(&cut).unwrap(), IpcUpdate { addresses: None, ..update });
    }
}
