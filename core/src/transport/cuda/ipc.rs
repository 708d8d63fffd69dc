//! CUDA IPC: device memory that other processes open by handle.
//!
//! A process exports an allocation once, and each peer process opens it once, for all of its groups. The driver's
//! buffer id identifies an allocation. Ids are never reused: an allocation at a reused address is a new export.
//! The owner checks for freed exports in each call that exchanges addresses of tensors, and its peers then close them: those
//! that the call uses, and a few others in turn, as each check is a call of the driver.
//! CUDA leaves freeing memory that is open elsewhere undefined; drivers free it after the last close.
//! The driver refuses to open memory that overlaps an open allocation of the same owner (UCX, issue 2738). The owner
//! has freed such an allocation, so it is closed first.
//! Thread rule: each GPU has one [`IpcExports`] and one [`IpcImports`], behind locks of its context.
//! [`ReportedExports`] and [`PeerImports`](super::PeerImports) belong to a group and have one user at a time.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use cudarc::driver::sys;

use super::driver::{Address, attribute_of, check};
use crate::error::{Error, Result};

/// An allocation with its IPC handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportedAllocation {
    /// The driver's buffer id in the owner's process.
    pub id: u64,
    /// The first address in the owner's process.
    pub start: Address,
    /// Length in bytes.
    pub len: u64,
    /// The driver's IPC handle.
    pub handle: [u8; 64],
}

impl ExportedAllocation {
    fn range(&self) -> Range<Address> {
        self.start..self.start + self.len
    }
}

/// Exported allocations of this process.
#[derive(Default)]
pub struct IpcExports {
    /// By start address.
    known: BTreeMap<Address, ExportedAllocation>,
    /// Where [`IpcExports::sweep`] goes on.
    next: Address,
    /// The ranks of the job to which some group has reported an id, of freed allocations too.
    reported: BTreeMap<u64, BTreeSet<usize>>,
}

impl IpcExports {
    /// Removes allocations that were freed.
    pub fn forget_freed(&mut self) {
        self.known.retain(|_, export| is_alive(export));
    }

    /// As [`IpcExports::forget_freed`], for the next `count` allocations only.
    pub fn sweep(&mut self, count: usize) {
        for _ in 0..count.min(self.known.len()) {
            let next = self.known.range(self.next..).next().or_else(|| self.known.iter().next());
            let Some((start, export)) = next.map(|(start, export)| (*start, *export)) else { return };
            if !is_alive(&export) {
                self.known.remove(&start);
            }
            self.next = start + 1;
        }
    }

    /// Updates for a group of the ranks `peers` of the job, at most `max_updates` of each kind, before a call that uses
    /// `used`: exports that are new to the group, and ids of freed allocations, whichever group used them with a peer.
    pub fn take_updates(
        &mut self,
        posted: &mut ReportedExports,
        used: &BTreeMap<u64, ExportedAllocation>,
        max_updates: usize,
        peers: &[usize],
    ) -> ExportUpdates {
        let alive: BTreeSet<u64> = self.known.values().map(|export| export.id).collect();
        posted.reported.retain(|id| alive.contains(id));
        let removed = self.freed(peers, max_updates);
        self.forget_reported(&removed, peers);
        let mut added: Vec<ExportedAllocation> =
            used.values().filter(|export| !posted.reported.contains(&export.id)).copied().collect();
        let complete = added.len() <= max_updates;
        added.truncate(max_updates);
        posted.reported.extend(added.iter().map(|export| export.id));
        self.note(added.iter().map(|export| export.id), peers);
        ExportUpdates { added, removed, complete }
    }

    /// At most `max` ids of freed allocations that were reported to one of the ranks `peers` of the job.
    pub fn freed(&self, peers: &[usize], max: usize) -> Vec<u64> {
        let alive: BTreeSet<u64> = self.known.values().map(|export| export.id).collect();
        let is_known = |(id, ranks): &(&u64, &BTreeSet<usize>)| {
            !alive.contains(id) && peers.iter().any(|peer| ranks.contains(peer))
        };
        self.reported.iter().filter(is_known).map(|(&id, _)| id).take(max).collect()
    }

    /// The ranks `peers` of the job get to know these ids.
    pub fn note(&mut self, ids: impl Iterator<Item = u64>, peers: &[usize]) {
        ids.for_each(|id| self.reported.entry(id).or_default().extend(peers));
    }

    /// The ranks `peers` of the job know that these are freed.
    pub fn forget_reported(&mut self, ids: &[u64], peers: &[usize]) {
        for id in ids {
            if let Some(ranks) = self.reported.get_mut(id) {
                ranks.retain(|rank| !peers.contains(rank));
            }
        }
        self.reported.retain(|_, ranks| !ranks.is_empty());
    }

    /// The export that contains the `len` bytes at `address`; creates it if necessary. `None` if CUDA IPC cannot export
    /// the memory, which is so for memory pools and for the virtual memory functions. Exports with an id in `alive` are
    /// known not to be freed; others are checked, and added.
    ///
    /// # Errors
    /// [`Error::System`] if `address` is no device memory.
    pub fn locate(
        &mut self,
        address: Address,
        len: u64,
        alive: &mut BTreeSet<u64>,
    ) -> Result<Option<ExportedAllocation>> {
        let export = match self.known_at(address, alive) {
            Some(export) => export,
            None => match self.export(address)? {
                Some(export) => export,
                None => return Ok(None),
            },
        };
        alive.insert(export.id);
        if address + len > export.range().end {
            return Err(Error::System("a tensor is longer than the memory that it is in".into()));
        }
        Ok(Some(export))
    }

    /// The known export that contains `address`. Removes those before it that were freed.
    fn known_at(&mut self, address: Address, alive: &BTreeSet<u64>) -> Option<ExportedAllocation> {
        loop {
            let (&start, &export) = self.known.range(..=address).next_back()?;
            if !export.range().contains(&address) {
                return None;
            }
            if alive.contains(&export.id) || is_alive(&export) {
                return Some(export);
            }
            self.known.remove(&start);
        }
    }

    fn export(&mut self, address: Address) -> Result<Option<ExportedAllocation>> {
        let id = id_of(address)?;
        type Attribute = sys::CUpointer_attribute;
        // SAFETY: the attribute is a `u32`.
        let capable: std::result::Result<u32, _> =
            unsafe { attribute_of(address, Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) };
        if capable == Ok(0) {
            return Ok(None);
        }
        let (mut start, mut len) = (0, 0);
        // SAFETY: the out pointers are valid.
        let code = unsafe { sys::cuMemGetAddressRange_v2(&raw mut start, &raw mut len, address) };
        check("asking for the extent of memory", code.result())?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the out pointer is valid.
        if unsafe { sys::cuIpcGetMemHandle(&raw mut handle, start) }.result().is_err() {
            return Ok(None);
        }
        let handle = handle.reserved.map(|byte| byte.to_ne_bytes()[0]);
        let export = ExportedAllocation { id, start, len: len as u64, handle };
        self.known.insert(start, export);
        Ok(Some(export))
    }
}

/// Whether the allocation of an export has not been freed.
fn is_alive(export: &ExportedAllocation) -> bool {
    id_of(export.start).ok() == Some(export.id)
}

/// The driver's id of the allocation that contains `address`.
fn id_of(address: Address) -> Result<u64> {
    // SAFETY: the attribute is a `u64`.
    let id = unsafe { attribute_of(address, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID) };
    check("asking whose memory a tensor is in", id)
}

/// Ids of exports that the other ranks of a group know.
#[derive(Default)]
pub struct ReportedExports {
    reported: BTreeSet<u64>,
}

impl ReportedExports {
    /// Reports `added` again: the other ranks could not open all of them.
    pub fn forget(&mut self, added: &[ExportedAllocation]) {
        added.iter().for_each(|export| {
            self.reported.remove(&export.id);
        });
    }
}

/// See [`IpcExports::take_updates`].
#[derive(Debug, PartialEq, Eq)]
pub struct ExportUpdates {
    /// Exports that are new to the other ranks.
    pub added: Vec<ExportedAllocation>,
    /// Ids of exports that were freed.
    pub removed: Vec<u64>,
    /// Whether `added` has all exports in use that are new to the other ranks.
    pub complete: bool,
}

struct Open {
    address: Address,
    /// The addresses in the owner's process.
    range: Range<Address>,
    /// The number of groups that use it.
    groups: usize,
}

/// Open allocations of other processes, by rank and id.
#[derive(Default)]
pub struct IpcImports {
    open: BTreeMap<(usize, u64), Open>,
}

impl IpcImports {
    /// Opens an export of rank `rank` for one more group.
    pub fn open(&mut self, rank: usize, export: &ExportedAllocation) -> Result<Address> {
        // The owner has freed its earlier allocations at these addresses.
        let stale: Vec<u64> = (self.open.range((rank, 0)..=(rank, u64::MAX)))
            .filter(|((_, id), open)| {
                *id != export.id && open.range.start < export.range().end && export.start < open.range.end
            })
            .map(|((_, id), _)| *id)
            .collect();
        stale.into_iter().try_for_each(|id| self.close(rank, id))?;
        match self.open.entry((rank, export.id)) {
            Entry::Occupied(mut known) => {
                known.get_mut().groups += 1;
                Ok(known.get().address)
            }
            Entry::Vacant(slot) => {
                let handle = sys::CUipcMemHandle { reserved: export.handle.map(|byte| byte as std::ffi::c_char) };
                let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
                let mut address = 0;
                // SAFETY: the handle is of another process on this host; the out pointer is valid.
                let code = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) };
                check("opening the memory of another process", code.result())?;
                slot.insert(Open { address, range: export.range(), groups: 1 });
                Ok(address)
            }
        }
    }

    /// Closes memory that its owner has freed, for all groups. No enqueued work uses it any more.
    pub fn close(&mut self, rank: usize, id: u64) -> Result<()> {
        let Some(open) = self.open.remove(&(rank, id)) else { return Ok(()) };
        // SAFETY: `open` opened it, and it is no longer in the table.
        check("closing the memory of another process", unsafe { sys::cuIpcCloseMemHandle(open.address) }.result())
    }

    /// Whether the export `id` of `rank` is open.
    pub fn is_open(&self, rank: usize, id: u64) -> bool {
        self.open.contains_key(&(rank, id))
    }

    /// Ends the use by one group; the last one closes the memory.
    pub fn release(&mut self, rank: usize, id: u64) {
        let Entry::Occupied(mut open) = self.open.entry((rank, id)) else { return };
        open.get_mut().groups -= 1;
        if open.get().groups == 0 {
            let open = open.remove();
            // SAFETY: opened here; the group has waited for the work that uses it.
            unsafe { sys::cuIpcCloseMemHandle(open.address) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_export_and_each_freed_one_is_reported_once_to_a_group() {
        let export = |id: u64| ExportedAllocation { id, start: id << 20, len: 1 << 20, handle: [0; 64] };
        let used = |ids: &[u64]| ids.iter().map(|&id| (id, export(id))).collect();
        let mut exports = IpcExports::default();
        let live = |exports: &mut IpcExports, ids: &[u64]| {
            exports.known = ids.iter().map(|&id| (id << 20, export(id))).collect();
        };
        let (mut one, mut other) = (ReportedExports::default(), ReportedExports::default());
        let updates = |added: &[u64], removed: &[u64], complete| ExportUpdates {
            added: added.iter().map(|&id| export(id)).collect(),
            removed: removed.to_vec(),
            complete,
        };
        live(&mut exports, &[1, 2, 3, 9]);
        assert_eq!(exports.take_updates(&mut one, &used(&[1, 2, 3]), 2, &[0, 1]), updates(&[1, 2], &[], false));
        assert_eq!(exports.take_updates(&mut one, &used(&[1, 2, 3]), 2, &[0, 1]), updates(&[3], &[], true));
        assert_eq!(exports.take_updates(&mut other, &used(&[3]), 2, &[0, 1]), updates(&[3], &[], true));
        live(&mut exports, &[1, 9]);
        assert_eq!(
            exports.take_updates(&mut other, &used(&[]), 1, &[0, 1]),
            updates(&[], &[2], true),
            "whichever team has reported it"
        );
        assert_eq!(exports.take_updates(&mut one, &used(&[1]), 2, &[0, 1]), updates(&[], &[3], true));
        assert_eq!(exports.take_updates(&mut one, &used(&[9]), 2, &[0, 1]), updates(&[9], &[], true));
        one.forget(&[export(9)]);
        live(&mut exports, &[9]);
        assert_eq!(exports.take_updates(&mut one, &used(&[9]), 2, &[0, 1]), updates(&[9], &[1], true));
    }

    #[test]
    fn a_freed_export_is_reported_to_all_who_knew_it() {
        let export = |id: u64| ExportedAllocation { id, start: id << 20, len: 1 << 20, handle: [0; 64] };
        let mut exports = IpcExports { known: [(1 << 20, export(1))].into(), ..IpcExports::default() };
        let (mut pair, mut all) = (ReportedExports::default(), ReportedExports::default());
        let used: BTreeMap<u64, ExportedAllocation> = [(1, export(1))].into();
        let none = BTreeMap::new();
        assert_eq!(exports.take_updates(&mut pair, &used, 9, &[0, 2]).added, [export(1)]);
        assert_eq!(exports.take_updates(&mut all, &used, 9, &[0, 1, 2]).added, [export(1)]);
        exports.known.clear();
        assert_eq!(exports.take_updates(&mut pair, &none, 9, &[0, 2]).removed, [1]);
        assert_eq!(exports.take_updates(&mut pair, &none, 9, &[0, 2]).removed, Vec::<u64>::new());
        assert_eq!(exports.take_updates(&mut all, &none, 9, &[0, 1, 2]).removed, [1], "rank 1 has not heard of it");
        assert_eq!(exports.take_updates(&mut all, &none, 9, &[0, 1, 2]).removed, Vec::<u64>::new());
    }
}
