//! Adasum on ranks that are threads, against the tree of pairs computed in float64.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use common::{Element, groups, tensor};
use dl_comm_core::buffer::Tensor;
use dl_comm_core::cases::cases;
use dl_comm_core::error::{Error, Result};
use dl_comm_core::group::{CallOptions, Group, start_adasum};
use proptest::prelude::*;

fn value(rank: usize, tensor: usize, index: usize) -> f64 {
    let hash = (rank * 7919 + tensor * 104_729 + index * 31) % 1000;
    hash as f64 / 250.0 - 2.0
}

/// The Adasum of the vectors, as a tree of neighbours.
fn reference(mut vectors: Vec<Vec<f64>>) -> Vec<f64> {
    while vectors.len() > 1 {
        let combine = |pair: &[Vec<f64>]| match pair {
            [a, b] => {
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let (aa, bb, ab) = (dot(a, a), dot(b, b), dot(a, b));
                let factor = |square: f64| if square == 0.0 { 1.0 } else { 1.0 - ab / (2.0 * square) };
                a.iter().zip(b).map(|(a, b)| factor(aa) * a + factor(bb) * b).collect()
            }
            _ => pair[0].clone(),
        };
        vectors = vectors.chunks(2).map(combine).collect();
    }
    vectors.remove(0)
}

/// Runs Adasum of tensors with the lengths `lens` on each rank; returns the ranks' results.
fn adasum<T: Element>(hosts: &[usize], lens: &[usize], of: fn(f64) -> T) -> Vec<Vec<Vec<T>>> {
    let all = groups(hosts, &[(0..hosts.len()).collect()], Duration::from_secs(60));
    let rank = |(rank, mut groups): (usize, Vec<Option<Group>>)| {
        let group: Arc<Group> = Arc::new(groups.remove(0).unwrap());
        let fill = |(tensor, &len): (usize, &usize)| (0..len).map(|index| of(value(rank, tensor, index))).collect();
        let mut data: Vec<Vec<T>> = lens.iter().enumerate().map(fill).collect();
        let tensors: Vec<Tensor> = data.iter_mut().map(|data| tensor(data)).collect();
        let (sender, receiver) = channel();
        let done = Box::new(move |result: Result<()>| sender.send(result).unwrap());
        let options = CallOptions { name: "gradients".into(), ..CallOptions::default() };
        // SAFETY: the data lives until the call has ended.
        unsafe { start_adasum(&group, tensors, options, done) };
        receiver.recv().unwrap().unwrap();
        data
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = all.into_iter().enumerate().map(|groups| scope.spawn(move || rank(groups))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn check<T: Element>(hosts: &[usize], lens: &[usize], of: fn(f64) -> T, wide: fn(T) -> f64, tolerance: f64) {
    let results = adasum(hosts, lens, of);
    for (index, &len) in lens.iter().enumerate() {
        let vector = |rank: usize| (0..len).map(|at| wide(of(value(rank, index, at)))).collect();
        let expected = reference((0..hosts.len()).map(vector).collect());
        for result in &results {
            assert!(result[index] == results[0][index], "all ranks get the same bits");
            for (got, expected) in result[index].iter().zip(&expected) {
                let got = wide(*got);
                assert!((got - expected).abs() <= tolerance * (1.0 + expected.abs()), "{got} {expected}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24)))]

    #[test]
    fn every_rank_gets_the_tree_of_adasums(
        hosts in prop::sample::select(vec![
            vec![0], vec![0; 2], vec![0; 3], vec![0, 0, 1, 1], vec![0; 5], vec![0, 1, 1, 2, 2, 2], vec![0; 7],
        ]),
        lens in prop::collection::vec(prop::sample::select(vec![0usize, 1, 2, 17, 700, 3000]), 0..5),
    ) {
        check(&hosts, &lens, |value| value as f32, f64::from, 1e-5);
        check(&hosts, &lens, |value| value, |value| value, 1e-12);
        check(&hosts, &lens, half::bf16::from_f64, |value| value.to_f64(), 1e-2);
    }
}

#[test]
fn integers_are_refused() {
    let group = Arc::new(groups(&[0], &[vec![0]], Duration::from_secs(60)).remove(0).remove(0).unwrap());
    let (sender, receiver) = channel();
    let done = Box::new(move |result: Result<()>| sender.send(result).unwrap());
    let mut data = [1i32; 4];
    // SAFETY: the call is refused at once.
    unsafe { start_adasum(&group, vec![tensor(&mut data)], CallOptions::default(), done) };
    assert!(matches!(receiver.recv().unwrap(), Err(Error::Invalid(text)) if text.contains("int32")));
}

/// The ranks compare the names of the tensors, and say them.
#[test]
fn lists_with_other_names_or_shapes_do_not_match() {
    let lists = [("a\nb\u{1f}", 2), ("b\na\u{1f}", 2), ("a\nb\u{1f}", 3)];
    for (zero, one) in [(0, 1), (0, 2), (0, 0)] {
        let all = groups(&[0, 0], &[vec![0, 1]], Duration::from_secs(60));
        thread::scope(|scope| {
            for (mut groups, (names, len)) in all.into_iter().zip([lists[zero], lists[one]]) {
                scope.spawn(move || {
                    let group = Arc::new(groups.remove(0).unwrap());
                    let mut data = [vec![1f32; len], vec![1f32; 4 - len]];
                    let tensors = data.iter_mut().map(|data| tensor(data)).collect();
                    let (sender, receiver) = channel();
                    let done = Box::new(move |result: Result<()>| sender.send(result).unwrap());
                    let options =
                        CallOptions { name: "gradients".into(), tensor_names: names.into(), ..CallOptions::default() };
                    // SAFETY: the data lives until the call has ended.
                    unsafe { start_adasum(&group, tensors, options, done) };
                    match receiver.recv().unwrap() {
                        Ok(()) => assert_eq!(zero, one),
                        Err(Error::Mismatch(text)) => {
                            assert!(text.contains("'a: float32[2], b: float32[2]") && zero != one, "{text}");
                        }
                        Err(error) => panic!("{error}"),
                    }
                });
            }
        });
    }
}
