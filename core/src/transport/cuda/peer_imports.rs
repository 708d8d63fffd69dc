//! The memory of one other rank, opened for a group.
//!
//! Thread rule: used by one thread at a time.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use super::context::Context;
use super::driver::Address;
use super::ipc::ExportedAllocation;
use crate::error::{Error, Result};

/// The allocations of one other rank that a team sees.
pub struct PeerImports {
    context: Arc<Context>,
    rank: usize,
    open: BTreeMap<u64, Address>,
}

impl PeerImports {
    /// Nothing of `rank` yet.
    pub fn new(context: &Arc<Context>, rank: usize) -> PeerImports {
        PeerImports { context: Arc::clone(context), rank, open: BTreeMap::new() }
    }

    /// Opens what is new and closes what was freed.
    ///
    /// # Errors
    /// [`Error::System`]: what could not be opened is not seen; the rest is.
    pub fn apply(&mut self, fresh: &[ExportedAllocation], gone: &[u64]) -> Result<()> {
        let mut imports = self.context.imports();
        for &id in gone {
            self.open.remove(&id);
            imports.close(self.rank, id)?;
        }
        if !fresh.is_empty() {
            // What another team has heard of.
            self.open.retain(|&id, _| imports.is_open(self.rank, id));
        }
        let mut failed = Ok(());
        for export in fresh {
            if let Entry::Vacant(place) = self.open.entry(export.id) {
                match imports.open(self.rank, export) {
                    Ok(address) => {
                        place.insert(address);
                    }
                    Err(error) => failed = Err(error),
                }
            }
        }
        failed
    }

    /// Where this process sees the export `id`.
    ///
    /// # Errors
    /// [`Error::Internal`] when it does not.
    pub fn at(&self, id: u64) -> Result<Address> {
        let unknown = || Error::Internal("a tensor is in memory that nobody exported".into());
        self.open.get(&id).copied().ok_or_else(unknown)
    }
}

impl Drop for PeerImports {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.push() {
            let mut imports = self.context.imports();
            self.open.keys().for_each(|&id| imports.release(self.rank, id));
        }
    }
}
