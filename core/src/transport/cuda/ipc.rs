//! Device memory that other processes see: allocations exported by handle, once for each process, and opened once in each
//! process that uses them, however many teams do.
//!
//! An allocation is known by the driver's number for it, which is never used again: memory that was freed and allocated anew
//! is another export. Every rank looks for exports that it has freed in each call that tells where its tensors are; the others
//! then close them. (Until then the driver keeps the memory; CUDA's documents call freeing what is open elsewhere undefined, what drivers do is to free it when the
//! last process has closed it.) The driver refuses to open memory at addresses of the owner's that overlap those of memory
//! that is still open (UCX, issue 2738): such memory was freed, and is closed first.
//! Thread rule: [`IpcExports`] and [`IpcImports`] are one for each GPU of the process, behind locks of the context; [`Shown`] and
//! [`PeerImports`] are a team's, with one user at a time.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use cudarc::driver::sys;

use super::driver::{Address, attribute_of, check};
use crate::error::{Error, Result};

/// What other processes need to see an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportedAllocation {
    /// The driver's number for it in the process that has it.
    pub id: u64,
    /// Where it begins in the process that has it.
    pub start: Address,
    /// How many bytes it has.
    pub len: u64,
    /// The driver's handle.
    pub handle: [u8; 64],
}

impl ExportedAllocation {
    fn range(&self) -> Range<Address> {
        self.start..self.start + self.len
    }
}

/// The allocations of this process that others know of.
#[derive(Default)]
pub struct IpcExports {
    /// By their start.
    known: BTreeMap<Address, ExportedAllocation>,
    /// Those of them, and of what was freed, that other ranks have open because a team has told them.
    reported: BTreeSet<u64>,
}

impl IpcExports {
    /// Forgets what was freed since the last time.
    pub fn forget_freed(&mut self) {
        self.known.retain(|&start, export| id_of(start).ok() == Some(export.id));
    }

    /// What the others have to be told in a call that uses `used`, at most `most` of each: exports that are new to the team, and
    /// numbers of those that were freed, in whatever team they were used.
    pub fn take_updates(
        &mut self,
        posted: &mut ReportedExports,
        used: &BTreeMap<u64, ExportedAllocation>,
        most: usize,
    ) -> ExportUpdates {
        let alive: BTreeSet<u64> = self.known.values().map(|export| export.id).collect();
        posted.reported.retain(|id| alive.contains(id));
        let removed: Vec<u64> = self.reported.difference(&alive).copied().take(most).collect();
        removed.iter().for_each(|id| {
            self.reported.remove(id);
        });
        let mut added: Vec<ExportedAllocation> =
            used.values().filter(|export| !posted.reported.contains(&export.id)).copied().collect();
        let whole = added.len() <= most;
        added.truncate(most);
        posted.reported.extend(added.iter().map(|export| export.id));
        self.reported.extend(added.iter().map(|export| export.id));
        ExportUpdates { fresh: added, gone: removed, whole }
    }

    /// The export that has the `len` bytes at `address`, which is made if there is none. `None` when other processes cannot see
    /// the memory: that of a pool, or mapped by the virtual memory functions, of which a tensor may span several allocations.
    ///
    /// # Errors
    /// [`Error::System`] for what is no device memory.
    pub fn locate(&mut self, address: Address, len: u64) -> Result<Option<ExportedAllocation>> {
        let found = self.known.range(..=address).next_back().map(|(_, export)| *export);
        let export = match found.filter(|export| export.range().contains(&address)) {
            Some(export) => export,
            None => match self.export(address)? {
                Some(export) => export,
                None => return Ok(None),
            },
        };
        if address + len > export.range().end {
            return Err(Error::System("a tensor is longer than the memory that it is in".into()));
        }
        Ok(Some(export))
    }

    fn export(&mut self, address: Address) -> Result<Option<ExportedAllocation>> {
        let id = id_of(address)?;
        type Attribute = sys::CUpointer_attribute;
        // SAFETY: the attribute is such a number.
        let capable: std::result::Result<u32, _> =
            unsafe { attribute_of(address, Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) };
        if capable == Ok(0) {
            return Ok(None);
        }
        let (mut start, mut len) = (0, 0);
        // SAFETY: the places are valid.
        let code = unsafe { sys::cuMemGetAddressRange_v2(&raw mut start, &raw mut len, address) };
        check("asking for the extent of memory", code)?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the place is valid.
        let exported = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, start) } == sys::CUresult::CUDA_SUCCESS;
        let len = len as u64;
        if !exported {
            return Ok(None);
        }
        let export = ExportedAllocation { id, start, len, handle: handle.reserved.map(|byte| byte as u8) };
        self.known.insert(start, export);
        Ok(Some(export))
    }
}

/// The driver's number for the allocation that has `address`.
fn id_of(address: Address) -> Result<u64> {
    // SAFETY: the attribute is such a number.
    let id = unsafe { attribute_of(address, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID) };
    id.or_else(|code| check("asking whose memory a tensor is in", code).map(|()| 0))
}

/// Which exports of this process the other ranks of a team have been told of.
#[derive(Default)]
pub struct ReportedExports {
    reported: BTreeSet<u64>,
}

impl ReportedExports {
    /// The others could not open all of `fresh`: they are to be told again.
    pub fn forget(&mut self, fresh: &[ExportedAllocation]) {
        fresh.iter().for_each(|export| {
            self.reported.remove(&export.id);
        });
    }
}

/// See [`IpcExports::news`].
#[derive(Debug, PartialEq, Eq)]
pub struct ExportUpdates {
    /// Exports that the others have not been told of.
    pub fresh: Vec<ExportedAllocation>,
    /// Numbers of exports that were freed.
    pub gone: Vec<u64>,
    /// Whether there are no more in use that the others have not been told of.
    pub whole: bool,
}

struct Open {
    address: Address,
    /// Where it is in the process that has it.
    range: Range<Address>,
    /// How many teams use it.
    teams: usize,
}

/// The allocations of other processes that are open in this one, by rank and number.
#[derive(Default)]
pub struct IpcImports {
    open: BTreeMap<(usize, u64), Open>,
}

impl IpcImports {
    /// Opens an export of rank `rank` for one more team.
    pub fn open(&mut self, rank: usize, export: &ExportedAllocation) -> Result<Address> {
        // What the owner has had at these addresses before is freed.
        let stale: Vec<u64> = (self.open.range((rank, 0)..=(rank, u64::MAX)))
            .filter(|((_, id), open)| {
                *id != export.id && open.range.start < export.range().end && export.start < open.range.end
            })
            .map(|((_, id), _)| *id)
            .collect();
        stale.into_iter().try_for_each(|id| self.close(rank, id))?;
        match self.open.entry((rank, export.id)) {
            Entry::Occupied(mut known) => {
                known.get_mut().teams += 1;
                Ok(known.get().address)
            }
            Entry::Vacant(place) => {
                let handle = sys::CUipcMemHandle { reserved: export.handle.map(|byte| byte as std::ffi::c_char) };
                let lazily = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
                let mut address = 0;
                // SAFETY: the handle is another process's of this host, the place valid.
                let code = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, lazily) };
                check("opening the memory of another process", code)?;
                place.insert(Open { address, range: export.range(), teams: 1 });
                Ok(address)
            }
        }
    }

    /// Closes memory that its owner has freed, whichever teams have used it: nothing is enqueued on it any more.
    pub fn close(&mut self, rank: usize, id: u64) -> Result<()> {
        let Some(open) = self.open.remove(&(rank, id)) else { return Ok(()) };
        // SAFETY: opened here, and removed from the table.
        check("closing the memory of another process", unsafe { sys::cuIpcCloseMemHandle(open.address) })
    }

    /// Whether the export `id` of `rank` is open.
    pub fn is_open(&self, rank: usize, id: u64) -> bool {
        self.open.contains_key(&(rank, id))
    }

    /// A team has done with the memory.
    pub fn release(&mut self, rank: usize, id: u64) {
        let Entry::Occupied(mut open) = self.open.entry((rank, id)) else { return };
        open.get_mut().teams -= 1;
        if open.get().teams == 0 {
            let open = open.remove();
            // SAFETY: opened here; the team has waited for what uses it.
            unsafe { sys::cuIpcCloseMemHandle(open.address) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_team_is_told_once_of_what_it_uses_and_of_what_was_freed() {
        let export = |id: u64| ExportedAllocation { id, start: id << 20, len: 1 << 20, handle: [0; 64] };
        let used = |ids: &[u64]| ids.iter().map(|&id| (id, export(id))).collect();
        let mut exports = IpcExports::default();
        let live = |exports: &mut IpcExports, ids: &[u64]| {
            exports.known = ids.iter().map(|&id| (id << 20, export(id))).collect();
        };
        let (mut one, mut other) = (ReportedExports::default(), ReportedExports::default());
        let news = |fresh: &[u64], gone: &[u64], whole| ExportUpdates {
            fresh: fresh.iter().map(|&id| export(id)).collect(),
            gone: gone.to_vec(),
            whole,
        };
        live(&mut exports, &[1, 2, 3, 9]);
        assert_eq!(exports.take_updates(&mut one, &used(&[1, 2, 3]), 2), news(&[1, 2], &[], false));
        assert_eq!(exports.take_updates(&mut one, &used(&[1, 2, 3]), 2), news(&[3], &[], true));
        assert_eq!(exports.take_updates(&mut other, &used(&[3]), 2), news(&[3], &[], true));
        live(&mut exports, &[1, 9]);
        assert_eq!(
            exports.take_updates(&mut other, &used(&[]), 1),
            news(&[], &[2], true),
            "whichever team has told it"
        );
        assert_eq!(exports.take_updates(&mut one, &used(&[1]), 2), news(&[], &[3], true));
        assert_eq!(exports.take_updates(&mut one, &used(&[9]), 2), news(&[9], &[], true));
        one.forget(&[export(9)]);
        live(&mut exports, &[9]);
        assert_eq!(exports.take_updates(&mut one, &used(&[9]), 2), news(&[9], &[1], true));
    }
}
