//! Imported device memory of one peer, for one group.
//!
//! Thread rule: one thread at a time.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use super::context::Context;
use super::driver::Address;
use super::ipc::ExportedAllocation;
use crate::error::{Error, Result};

/// Allocations of one peer that a group has open.
pub struct PeerImports {
    context: Arc<Context>,
    /// The rank of the peer in the job: the process's other groups import from it too.
    rank: usize,
    open: BTreeMap<u64, Address>,
}

impl PeerImports {
    /// No imports from rank `rank` of the job yet.
    pub fn new(context: &Arc<Context>, rank: usize) -> PeerImports {
        PeerImports { context: Arc::clone(context), rank, open: BTreeMap::new() }
    }

    /// The rank of the peer in the job.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Opens the exports `added` and closes the freed ones `removed`.
    ///
    /// # Errors
    /// [`Error::System`] if an export could not be opened; the others are open.
    pub fn apply(&mut self, added: &[ExportedAllocation], removed: &[u64]) -> Result<()> {
        let mut imports = self.context.imports();
        for &id in removed {
            self.open.remove(&id);
            imports.close(self.rank, id)?;
        }
        if !added.is_empty() {
            // Another group has closed these, after a report that this group did not get.
            self.open.retain(|&id, _| imports.is_open(self.rank, id));
        }
        let mut result = Ok(());
        for export in added {
            if let Entry::Vacant(slot) = self.open.entry(export.id) {
                match imports.open(self.rank, export) {
                    Ok(address) => {
                        slot.insert(address);
                    }
                    Err(error) => result = Err(error),
                }
            }
        }
        result
    }

    /// The address of export `id` in this process.
    ///
    /// # Errors
    /// [`Error::Internal`] if the export is not open.
    pub fn at(&self, id: u64) -> Result<Address> {
        let unknown = || Error::Internal("a tensor is in memory that nobody exported".into());
        self.open.get(&id).copied().ok_or_else(unknown)
    }
}

impl Drop for PeerImports {
    fn drop(&mut self) {
        if let Ok(_guard) = self.context.push() {
            let mut imports = self.context.imports();
            self.open.keys().for_each(|&id| imports.release(self.rank, id));
        }
    }
}
