//! The shards of the ranks of a host, in shared memory: any of its ranks updates and reads any of them.
//!
//! A block is used under its lock only, so an update is applied once and a block is read whole. A rank that has died in a
//! block keeps its lock: the others' waits end with the group.
//! Thread rule: any thread of any rank of the host.

use std::ops::Range;

use super::block_lock::{BlockLock, Held};
use super::layout::{Layout, Place};
use super::rule::{self, Rule, Scratch};
use crate::dtype::DType;
use crate::error::Result;
use crate::transport::WaitContext;

/// Memory that no program reads again soon if it is longer: past the caches it takes less time. As in
/// [`crate::stream_copy`].
const STREAM_BYTES: usize = 8 << 20;

/// Polls of a lock before a sleep: an update of a block takes a few microseconds.
const SPINS: u32 = if cfg!(loom) { 0 } else { 2000 };

/// The memory of all ranks of the group that are on this host.
pub struct Shards {
    layout: Layout,
    /// By rank of the group; `None` on other hosts.
    memory: Vec<Option<*mut u8>>,
}

// SAFETY: every use of the memory is under the lock of its block.
unsafe impl Send for Shards {}
// SAFETY: as above.
unsafe impl Sync for Shards {}

impl Shards {
    /// The shards in `memory`, by rank.
    ///
    /// # Safety
    /// Each has [`Layout::bytes`] bytes at a multiple of 64, zero before their first use, valid while this lives.
    pub unsafe fn new(layout: Layout, memory: Vec<Option<*mut u8>>) -> Shards {
        Shards { layout, memory }
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether `rank` is on this host.
    pub fn is_local(&self, rank: usize) -> bool {
        self.memory.get(rank).copied().flatten().is_some()
    }

    /// The elements of a tensor that `rank` owns.
    pub fn shard(&self, tensor: usize, rank: usize) -> Range<usize> {
        self.layout.tensors()[tensor].shard(rank, self.layout.ranks())
    }

    fn dtype(&self, tensor: usize) -> DType {
        self.layout.tensors()[tensor].dtype
    }

    /// Whether a caller's tensor is longer than the caches.
    fn streams(&self, tensor: usize) -> bool {
        self.layout.tensors()[tensor].len * self.dtype(tensor).size() >= STREAM_BYTES
    }

    /// Calls `each` with the memory of every block of the elements `part` of the shard of `owner`, under its lock, and with
    /// the number of elements before it.
    fn blocks(
        &self,
        owner: usize,
        tensor: usize,
        part: Range<usize>,
        wait: &WaitContext<'_>,
        mut each: impl FnMut(*mut u8, usize, usize) -> Result<()>,
    ) -> Result<()> {
        let Some(memory) = self.memory[owner] else { return Ok(()) };
        let mut done = 0;
        for place in self.layout.blocks(tensor, part) {
            let _held = self.hold(memory, place, owner, wait)?;
            each(memory.wrapping_add(place.data), done, place.len)?;
            done += place.len;
        }
        Ok(())
    }

    fn hold(&self, memory: *mut u8, place: Place, owner: usize, wait: &WaitContext<'_>) -> Result<Held<'_>> {
        // SAFETY: the layout has a lock there, valid when zero; the memory lives as long as `self`.
        let lock = unsafe { &*memory.add(place.lock).cast::<BlockLock>() };
        let waiting_for = || format!("an update of the shard of rank {owner}");
        lock.take(SPINS, &mut || wait.check(std::time::Duration::ZERO, &waiting_for))
    }

    /// Applies an update to the elements `part` of the shard of `owner`, a rank of this host.
    ///
    /// # Errors
    /// Those of the wait.
    ///
    /// # Safety
    /// `update` has these elements, unless the rule takes none.
    pub unsafe fn update(
        &self,
        owner: usize,
        tensor: usize,
        part: Range<usize>,
        rule: Rule,
        update: *const u8,
        wait: &WaitContext<'_>,
    ) -> Result<()> {
        let (dtype, streams, mut scratch) = (self.dtype(tensor), self.streams(tensor), Scratch::default());
        self.blocks(owner, tensor, part, wait, |block, done, count| {
            let from = update.wrapping_add(done * dtype.size());
            // SAFETY: the block is this thread's while its lock is held; the caller's promise.
            unsafe { rule::apply(rule, dtype, block, from, count, streams, &mut scratch) };
            Ok(())
        })
    }

    /// Copies the elements `part` of the shard of `owner`, a rank of this host, to `out`.
    ///
    /// # Errors
    /// Those of the wait.
    ///
    /// # Safety
    /// `out` has room for these elements.
    pub unsafe fn read(
        &self,
        owner: usize,
        tensor: usize,
        part: Range<usize>,
        out: *mut u8,
        wait: &WaitContext<'_>,
    ) -> Result<()> {
        let (dtype, streams) = (self.dtype(tensor), self.streams(tensor));
        self.blocks(owner, tensor, part, wait, |block, done, count| {
            // SAFETY: as in `update`.
            unsafe { rule::read(dtype, block, out.wrapping_add(done * dtype.size()), count, streams) };
            Ok(())
        })
    }

    /// Calls `change` with the memory of the blocks of the elements `part` of the shard of `owner`, in their storage type,
    /// one after the other, with the number of elements before each. The others wait for the block meanwhile.
    ///
    /// # Errors
    /// Those of the wait and of `change`, which ends at its first.
    pub fn modify(
        &self,
        owner: usize,
        tensor: usize,
        part: Range<usize>,
        wait: &WaitContext<'_>,
        change: &mut dyn FnMut(*mut u8, usize, usize) -> Result<()>,
    ) -> Result<()> {
        self.blocks(owner, tensor, part, wait, change)
    }
}
