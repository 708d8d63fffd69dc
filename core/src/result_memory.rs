//! Private memory for results, used again.
//!
//! A new large array has new pages, and the system takes longer to make them than an allreduce takes. So the memory of
//! freed results is kept for the next ones: as much as results have had at once. The system may take its pages when it
//! needs memory (`MADV_FREE`).
//!
//! Thread rule: any thread. A forked child gets no memory, and what it frees stays mapped there, because another thread
//! of the parent may have held the lock.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{LazyLock, Mutex};

use memmap2::{Advice, MmapMut, UncheckedAdvice};

use crate::fork;
use crate::lock::lock;

/// Smaller memory comes from malloc, which keeps it.
const MIN_LEN: usize = 1 << 20;
/// From here on NumPy asks for huge pages, and so do we.
const MIN_HUGE: usize = 4 << 20;

static RESULTS: LazyLock<Mutex<Results>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Results {
    used: HashMap<usize, MmapMut>,
    /// The one freed last comes last.
    free: Vec<MmapMut>,
    used_bytes: usize,
    free_bytes: usize,
    most_used_bytes: usize,
}

impl Results {
    fn alloc(&mut self, len: usize) -> Option<NonNull<u8>> {
        let mut map = match self.free.iter().rposition(|map| map.len() == len) {
            Some(index) => {
                self.free_bytes -= len;
                self.free.remove(index)
            }
            None => {
                let map = MmapMut::map_anon(len).ok()?;
                if len >= MIN_HUGE {
                    let _hint = map.advise(Advice::HugePage);
                }
                map
            }
        };
        self.used_bytes += len;
        self.most_used_bytes = self.most_used_bytes.max(self.used_bytes);
        let memory = NonNull::new(map.as_mut_ptr())?;
        self.used.insert(memory.addr().get(), map);
        Some(memory)
    }

    /// Returns memory that is not needed any more.
    fn free(&mut self, memory: usize) -> Vec<MmapMut> {
        let mut excess = Vec::new();
        let Some(map) = self.used.remove(&memory) else { return excess };
        self.used_bytes -= map.len();
        self.free_bytes += map.len();
        // SAFETY: nobody uses the memory; the next user expects no values.
        let _hint = unsafe { map.unchecked_advise(UncheckedAdvice::Free) };
        self.free.push(map);
        while self.free_bytes > self.most_used_bytes {
            let oldest = self.free.remove(0);
            self.free_bytes -= oldest.len();
            excess.push(oldest);
        }
        excess
    }
}

/// Memory for a result of `len` bytes, of unknown values, page-aligned. `None` for less than 1 MiB, which malloc
/// serves faster, in a forked child, and if there is no memory.
pub fn alloc(len: usize) -> Option<NonNull<u8>> {
    fork::install_handler();
    if len < MIN_LEN || fork::is_child() { None } else { lock(&RESULTS).alloc(len) }
}

/// Frees memory from [`alloc`]; ignores other addresses.
///
/// # Safety
/// Nobody uses the memory any more.
pub unsafe fn free(memory: *mut u8) {
    if !fork::is_child() {
        // The lock is not held while the excess is unmapped.
        let excess = lock(&RESULTS).free(memory.addr());
        drop(excess);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_memory_of_the_same_length_is_used_again() {
        let mut results = Results::default();
        let mut alloc = |len| results.alloc(len).unwrap().addr().get();
        let (first, second) = (alloc(MIN_LEN), alloc(2 * MIN_LEN));
        assert!(results.free(first).is_empty());
        assert_eq!(results.alloc(MIN_LEN).unwrap().addr().get(), first);
        assert!(results.free(second).is_empty() && results.free(second).is_empty(), "the second free does nothing");
        assert_ne!(results.alloc(MIN_LEN).unwrap().addr().get(), second, "another length");
        assert_eq!((results.used_bytes, results.free_bytes), (2 * MIN_LEN, 2 * MIN_LEN));
    }

    #[test]
    fn no_more_is_kept_than_was_used_at_once() {
        let mut results = Results::default();
        for megabytes in 1..10 {
            let memory = results.alloc(megabytes * MIN_LEN).unwrap().addr().get();
            drop(results.free(memory));
            assert!(results.free_bytes <= megabytes * MIN_LEN);
        }
        assert_eq!(results.free.len(), 1);
    }

    #[test]
    fn short_results_come_from_elsewhere() {
        assert!(alloc(MIN_LEN - 1).is_none() && alloc(0).is_none());
    }
}
