//! Device memory that other processes of the host see: allocations exported by handle, once each, and imported once each.
//!
//! A place in such memory is a number: which export of its rank, and how far from its start. An allocation is known by the
//! driver's number for it, which is never used again: memory that was freed and taken anew is another export. Peers close
//! what they hear is gone. (Until then the driver keeps the memory; CUDA's documents call freeing what is open elsewhere
//! undefined, what drivers do is to free it when the last one has closed it.)
//! Thread rule: each of the two has one user at a time.

use std::collections::BTreeMap;
use std::sync::Arc;

use cudarc::driver::sys;

use super::Address;
use super::context::Context;
use super::driver::{attribute_of, check};
use crate::error::{Error, Result};

/// Bits of a place that tell how far it is from the start of its export.
const WITHIN: u32 = 44;

/// The number for byte `offset` of export `export`.
pub fn place_of(export: u32, offset: u64) -> u64 {
    debug_assert!(offset >> WITHIN == 0);
    u64::from(export) << WITHIN | offset
}

/// The export and the offset that [`place_of`] made a number of.
pub fn split_place(place: u64) -> (u32, u64) {
    ((place >> WITHIN) as u32, place & ((1 << WITHIN) - 1))
}

/// What other processes need to see an allocation.
#[derive(Clone, Copy)]
pub struct Export {
    /// Its number on the rank that has it.
    pub number: u32,
    /// The driver's handle.
    pub handle: [u8; 64],
}

#[derive(Clone, Copy)]
struct Known {
    start: Address,
    end: Address,
    /// `None` for memory that cannot be exported.
    number: Option<u32>,
}

/// The allocations of this process that others know of.
#[derive(Default)]
pub struct Exports {
    /// By the driver's number for the allocation.
    known: BTreeMap<u64, Known>,
    next: u32,
    /// What the others have not been told.
    fresh: Vec<Export>,
    gone: Vec<u32>,
    /// The allocation that was found last in this call.
    last: Option<Known>,
}

impl Exports {
    /// Begins a call: what was known of an allocation may not hold any more.
    pub fn begin(&mut self) {
        self.last = None;
    }

    /// The place of the `len` bytes at `address`, exporting their allocation if that has not happened. `None` when it cannot
    /// be: memory of a pool, or mapped by the virtual memory functions, of which a tensor may span several allocations.
    ///
    /// # Errors
    /// [`Error::System`] for what is no device memory.
    pub fn locate(&mut self, address: Address, len: u64) -> Result<Option<u64>> {
        let known = match self.last {
            Some(last) if address >= last.start && address < last.end => last,
            _ => self.look_up(address)?,
        };
        self.last = Some(known);
        let Some(number) = known.number else { return Ok(None) };
        if address + len > known.end {
            return Err(Error::System("a tensor is longer than the memory that it is in".into()));
        }
        Ok(Some(place_of(number, address - known.start)))
    }

    fn look_up(&mut self, address: Address) -> Result<Known> {
        let id = id_of(address)?;
        if let Some(known) = self.known.get(&id).filter(|known| address >= known.start && address < known.end) {
            return Ok(*known);
        }
        let (mut start, mut len) = (0, 0);
        // SAFETY: the places are valid.
        let code = unsafe { sys::cuMemGetAddressRange_v2(&raw mut start, &raw mut len, address) };
        check("asking for the extent of memory", code)?;
        let end = start + len as u64;
        // What was freed is told of now: as long as peers have it open, the driver keeps it.
        let gone =
            self.known.extract_if(.., |&id, old| id_of(old.start).ok() != Some(id)).filter_map(|(_, old)| old.number);
        self.gone.extend(gone);
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the place is valid.
        let exported = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, start) } == sys::CUresult::CUDA_SUCCESS;
        let number = (exported && end - start < 1 << WITHIN).then_some(self.next);
        if let Some(number) = number {
            self.next += 1;
            self.fresh.push(Export { number, handle: handle.reserved.map(|byte| byte as u8) });
        }
        let known = Known { start, end, number };
        self.known.insert(id, known);
        Ok(known)
    }

    /// What the others have to be told, up to `most` of each: exports that are new, and numbers of those that are gone. Once.
    pub fn news(&mut self, most: usize) -> (Vec<Export>, Vec<u32>) {
        let (fresh, gone) = (self.fresh.len().min(most), self.gone.len().min(most));
        (self.fresh.drain(..fresh).collect(), self.gone.drain(..gone).collect())
    }

    /// Whether there is more to tell.
    pub fn has_news(&self) -> bool {
        !self.fresh.is_empty() || !self.gone.is_empty()
    }
}

/// The driver's number for the allocation that has `address`.
fn id_of(address: Address) -> Result<u64> {
    // SAFETY: the attribute is such a number.
    let id = unsafe { attribute_of(address, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID) };
    id.or_else(|code| check("asking whose memory a tensor is in", code).map(|()| 0))
}

/// The allocations of one other process that this one sees.
pub struct Imports {
    context: Arc<Context>,
    open: BTreeMap<u32, Address>,
}

impl Imports {
    /// None yet.
    pub fn new(context: &Arc<Context>) -> Imports {
        Imports { context: Arc::clone(context), open: BTreeMap::new() }
    }

    /// Opens what is new and closes what is gone.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn hear(&mut self, fresh: &[Export], gone: &[u32]) -> Result<()> {
        for number in gone {
            if let Some(address) = self.open.remove(number) {
                // SAFETY: opened here; the owner has freed it, so nothing uses it any more.
                check("closing the memory of another process", unsafe { sys::cuIpcCloseMemHandle(address) })?;
            }
        }
        for export in fresh {
            let handle = sys::CUipcMemHandle { reserved: export.handle.map(|byte| byte as std::ffi::c_char) };
            let lazily = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
            let mut address = 0;
            // SAFETY: the handle is another process's of this host, the place valid.
            let code = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, lazily) };
            check("opening the memory of another process", code)?;
            self.open.insert(export.number, address);
        }
        Ok(())
    }

    /// Where this process sees `place`.
    ///
    /// # Errors
    /// [`Error::Internal`] when it does not.
    pub fn at(&self, place: u64) -> Result<Address> {
        let (number, offset) = split_place(place);
        let start = self.open.get(&number);
        start
            .map(|start| start + offset)
            .ok_or_else(|| Error::Internal("a tensor is in memory that nobody exported".into()))
    }
}

impl Drop for Imports {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            for &address in self.open.values() {
                // SAFETY: opened here; who drops this has waited for what uses it.
                unsafe { sys::cuIpcCloseMemHandle(address) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_come_apart_as_they_were_put_together() {
        for (export, offset) in [(0, 0), (1, 1), (77, (1 << WITHIN) - 1), ((1 << 20) - 1, 12345)] {
            assert_eq!(split_place(place_of(export, offset)), (export, offset));
        }
    }
}
