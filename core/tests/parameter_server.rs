//! The shards of a parameter server, with ranks as threads: random schedules against a model, exact sums, whole blocks.
#![allow(clippy::unwrap_used)]

use std::thread;

use dl_comm_core::dtype::DType;
use dl_comm_core::parameter_server::{Layout, Rule, Shards};
use dl_comm_core::transport::WaitContext;
use dl_comm_core::transport::wait_context::with_limits;
use proptest::prelude::*;

/// The shards of `ranks` ranks of one host, all zero, and their memory.
fn shards(tensors: &[(usize, DType)], ranks: usize) -> (Shards, Vec<Vec<[u64; 8]>>) {
    let layout = Layout::new(tensors, ranks).unwrap();
    let lines = layout.bytes().div_ceil(64) + 1;
    let mut memory: Vec<Vec<[u64; 8]>> = (0..ranks).map(|_| vec![[0; 8]; lines]).collect();
    let start = |rank: &mut Vec<[u64; 8]>| {
        let start: *mut u8 = rank.as_mut_ptr().cast();
        Some(start.wrapping_add(start.align_offset(64)))
    };
    let addresses = memory.iter_mut().map(start).collect();
    // SAFETY: zeros with room for the alignment; they live as long as the shards.
    (unsafe { Shards::new(layout, addresses) }, memory)
}

fn waiting<T>(work: impl FnOnce(&WaitContext<'_>) -> T) -> T {
    with_limits("a test", None, None, &|| None, |wait| Ok(work(wait))).unwrap()
}

/// Sends `values` to all shards of tensor 0.
fn send(shards: &Shards, ranks: usize, rule: Rule, values: &[f32]) {
    waiting(|wait| {
        for owner in 0..ranks {
            let part = shards.shard(0, owner);
            let from = values[part.clone()].as_ptr().cast();
            // SAFETY: the values have these elements.
            unsafe { shards.update(owner, 0, 0..part.len(), rule, from, wait) }.unwrap();
        }
    });
}

fn receive(shards: &Shards, ranks: usize, len: usize) -> Vec<f32> {
    let mut values = vec![f32::NAN; len];
    waiting(|wait| {
        for owner in 0..ranks {
            let part = shards.shard(0, owner);
            let into = values[part.clone()].as_mut_ptr().cast();
            // SAFETY: the values have these elements.
            unsafe { shards.read(owner, 0, 0..part.len(), into, wait) }.unwrap();
        }
    });
    values
}

fn rules() -> impl Strategy<Value = Rule> {
    let factor = prop::sample::select(vec![-2.0, 0.5, 3.0]);
    prop_oneof![Just(Rule::Zero), Just(Rule::Copy), Just(Rule::Add), factor.prop_map(Rule::AddScaled)]
}

proptest! {
    /// One rank after the other: the values are those of the model.
    #[test]
    fn any_sequence_of_rules_gives_the_values_of_the_model(
        ranks in 1usize..5, len in prop::sample::select(vec![5usize, 1000, 40_000]),
        sequence in prop::collection::vec((rules(), -4i8..5), 1..12),
    ) {
        let (shards, _memory) = shards(&[(len, DType::F32)], ranks);
        let mut model = vec![0f32; len];
        for (rule, value) in sequence {
            let update: Vec<f32> = (0..len).map(|at| f32::from(value) + (at % 3) as f32).collect();
            send(&shards, ranks, rule, &update);
            for (own, update) in model.iter_mut().zip(&update) {
                match rule {
                    Rule::Zero => *own = 0.0,
                    Rule::Copy => *own = *update,
                    Rule::Add => *own += update,
                    Rule::AddScaled(factor) => *own += factor as f32 * update,
                }
            }
            prop_assert_eq!(receive(&shards, ranks, len), model.clone());
        }
    }
}

/// Every rank adds and subtracts at once, while others read: nothing is lost or applied twice, and blocks are whole.
#[test]
fn sums_of_concurrent_updates_are_exact_and_blocks_are_read_whole() {
    const LEN: usize = 50_000;
    const BLOCK: usize = (64 << 10) / 4;
    let (shards, _memory) = shards(&[(LEN, DType::F32)], 2);
    let shards = &shards;
    thread::scope(|scope| {
        for rank in 0..4 {
            scope.spawn(move || {
                let update = vec![(rank + 1) as f32; LEN];
                for turn in 0..50 {
                    let rule = if turn % 5 == 4 { Rule::AddScaled(-4.0) } else { Rule::Add };
                    send(shards, 2, if turn < 40 { rule } else { Rule::Add }, &update);
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..100 {
                let values = receive(shards, 2, LEN);
                for owner in 0..2 {
                    for block in values[shards.shard(0, owner)].chunks(BLOCK) {
                        assert!(block.iter().all(|&value| value == block[0]), "a torn block");
                    }
                }
            }
        });
    });
    // 32 additions, 8 times minus 4, and 10 additions, of 1 + 2 + 3 + 4.
    assert!(receive(shards, 2, LEN).iter().all(|&value| value == 100.0));
}

#[test]
fn a_change_of_a_shard_sees_its_blocks_in_order() {
    let (shards, _memory) = shards(&[(40_000, DType::BF16)], 1);
    let mut next = 0;
    waiting(|wait| {
        let mut change = |memory: *mut u8, first: usize, count: usize| {
            assert_eq!(first, next);
            next += count;
            // SAFETY: the block, of float32.
            unsafe { memory.cast::<f32>().add(count - 1).write(first as f32) };
            Ok(())
        };
        shards.modify(0, 0, 0..40_000, wait, &mut change).unwrap();
    });
    assert_eq!(next, 40_000);
}
