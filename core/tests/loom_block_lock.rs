//! The lock of a block of a parameter server under Loom, as in `loom.rs`: exclusion, order of the writes, no lost wake.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

mod loom_support;

use std::sync::Arc;

use dl_comm_core::parameter_server::block_lock::BlockLock;
use dl_comm_core::transport::sync::{check_write, track};
use loom_support::{explore, spawn};

/// Ranks that use the block once each; Loom has no clock, so a lost wake is a deadlock.
fn ranks(count: usize, spins: u32) {
    let block = Arc::new((BlockLock::default(), Box::new([0u64; 8])));
    let start = block.1.as_ptr().addr();
    track(start..start + 64);
    let threads: Vec<_> = (0..count)
        .map(|_| {
            let block = Arc::clone(&block);
            spawn(move || {
                let _held = block.0.take(spins, &mut || Ok(())).unwrap();
                check_write(block.1.as_ptr().cast_mut().cast(), 64);
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn two_ranks_that_sleep() {
    explore(None, || ranks(2, 0));
}

#[test]
fn three_ranks_that_sleep() {
    explore(Some(3), || ranks(3, 0));
}

#[test]
fn two_ranks_that_spin_first() {
    explore(None, || ranks(2, 1));
}
