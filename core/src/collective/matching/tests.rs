//! Decisions for lists of pending calls, some written out and some random.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use super::*;
use crate::codec::{decode, encode};
use proptest::prelude::*;

fn list(calls: &[u64], settled: bool) -> PendingCalls {
    let call = |&signature: &u64| PendingCall {
        signature,
        by_pairs: 0,
        key: 0,
        by_name: false,
        age: Age::New,
        kind: PendingKind::TakesZeros,
        memory: 0,
        stays_behind: false,
    };
    let further_calls = if settled { FurtherCalls::Settled } else { FurtherCalls::Open };
    PendingCalls { calls: calls.iter().map(call).collect(), further_calls, quiet: settled, refused: false }
}

fn waits(lists: &[PendingCalls]) -> bool {
    matches!(decide(lists), Reconciliation::Wait(_))
}

#[test]
fn waiting_ranks_get_the_status_of_all_ranks() {
    let with = |further_calls| PendingCalls { further_calls, ..list(&[], false) };
    let lists = [list(&[1], true), list(&[2], false), with(FurtherCalls::Busy), with(FurtherCalls::Open)];
    let decision = decide(&lists).truncated(100);
    let Reconciliation::Wait(ranks) = decision else { panic!("{decision:?}") };
    let texts: Vec<_> = ranks.iter().map(|rank| rank.describe()).collect();
    assert_eq!(texts[0], "waits in a different call");
    assert_eq!(texts[1], texts[0]);
    assert_eq!(texts[2], "has made no such call and computes");
    assert_eq!(texts[3], "has made no such call and waits in another team");
}

/// The others' calls fail after a while, unless the rank makes its call again, or some other rank has none.
#[test]
fn a_refused_call_fails_those_of_the_others_in_its_place() {
    let aged = |calls: &[u64]| {
        let mut aged = list(calls, false);
        aged.calls.iter_mut().for_each(|call| call.age = Age::Conflicting);
        aged
    };
    let refused = |calls: &[u64]| PendingCalls { refused: true, ..list(calls, false) };
    for calls in [&[][..], &[3]] {
        assert!(waits(&[list(&[1], false), refused(calls)]), "not yet");
        assert_eq!(decide(&[aged(&[1, 2]), refused(calls)]), Reconciliation::Refused(vec![Some(0), None]));
        assert!(waits(&[aged(&[1]), refused(calls), list(&[], false)]), "a rank is slow");
        assert_eq!(
            decide(&[refused(calls), aged(&[1]), refused(&[])]),
            Reconciliation::Refused(vec![None, Some(0), None])
        );
    }
    assert_eq!(decide(&[aged(&[1, 2]), refused(&[1])]), Reconciliation::Run(vec![1]), "made again");
    assert!(waits(&[refused(&[]), refused(&[])]), "nobody waits");
}

#[test]
fn rank_waiting_in_another_group_is_a_mismatch_but_a_slow_rank_is_not() {
    let with = |further_calls| PendingCalls { further_calls, ..list(&[], false) };
    let failed = Reconciliation::Fail(vec![Some(0), None]);
    assert_eq!(decide(&[list(&[1], true), with(FurtherCalls::Settled)]), failed);
    assert_eq!(decide(&[list(&[1], false), with(FurtherCalls::Closed)]), failed);
    assert!(waits(&[list(&[1], true), with(FurtherCalls::Open)]));
    assert!(waits(&[list(&[1], true), with(FurtherCalls::Busy)]));
    let mut old = list(&[1], false);
    old.calls[0].age = Age::Expired;
    assert!(waits(&[old.clone(), with(FurtherCalls::Busy)]));
    assert_eq!(decide(&[old.clone(), with(FurtherCalls::Open)]), failed);
    let quiet = PendingCalls { further_calls: FurtherCalls::Open, ..list(&[1], true) };
    assert!(waits(&[quiet.clone(), with(FurtherCalls::Settled)]), "a thread that calls other teams may call");
    assert_eq!(decide(&[quiet, list(&[2], true)]), Reconciliation::Fail(vec![Some(0), Some(0)]));
    let computes = PendingCalls { further_calls: FurtherCalls::Busy, ..old };
    assert!(waits(&[computes.clone(), with(FurtherCalls::Open)]));
    assert_eq!(decide(&[computes, list(&[2], false)]), Reconciliation::Fail(vec![Some(0), Some(0)]), "of one team");
}

#[test]
fn common_calls_run_first_in_the_order_of_rank_0() {
    let lists = [list(&[5, 1, 2, 1], false), list(&[1, 2, 5], false), list(&[2, 1, 5, 1, 7], false)];
    assert_eq!(decide(&lists), Reconciliation::Run(vec![5, 1, 2]));
    let lists = [list(&[1, 1, 2], false), list(&[1, 2, 1], false)];
    assert_eq!(decide(&lists), Reconciliation::Run(vec![1]), "no more than must be");
}

#[test]
fn no_call_is_skipped() {
    assert!(waits(&[list(&[1, 1], false), list(&[9, 1], false)]));
    assert!(waits(&[list(&[1], false), list(&[9, 1], false)]));
    assert!(waits(&[list(&[1, 1, 9], false), list(&[9, 1], false)]));
    assert_eq!(decide(&[list(&[1, 1, 9], false), list(&[9, 1, 1], false)]), Reconciliation::Run(vec![1, 1, 9]));
}

#[test]
fn unmatched_calls_wait_until_no_more_calls_can_come() {
    assert!(waits(&[list(&[1, 2], true), list(&[2], false)]));
    assert_eq!(decide(&[list(&[1, 2], true), list(&[2], true)]), Reconciliation::Fail(vec![Some(0), Some(0)]));
    let mut lists = [list(&[9], false), list(&[1], false)];
    lists[0].calls[0].age = Age::Expired;
    assert_eq!(decide(&lists), Reconciliation::Fail(vec![Some(0), Some(0)]));
}

#[test]
fn one_name_with_different_contents_fails_early() {
    let call = |signature, key| PendingCall {
        key,
        age: Age::Conflicting,
        kind: PendingKind::NeedsAll,
        ..list(&[signature], false).calls[0]
    };
    let mut lists = [
        PendingCalls {
            calls: vec![call(1, 10), call(2, 20)],
            further_calls: FurtherCalls::Open,
            quiet: false,
            refused: false,
        },
        PendingCalls { calls: vec![call(3, 20)], further_calls: FurtherCalls::Open, quiet: false, refused: false },
    ];
    assert_eq!(decide(&lists), Reconciliation::Fail(vec![Some(1), Some(0)]));
    lists[1].calls[0].age = Age::New;
    assert!(waits(&lists));
}

#[test]
fn ranks_that_have_joined_contribute_zeros() {
    let kind = |list: PendingCalls, kind| {
        let calls = list.calls.into_iter().map(|call| PendingCall { kind, ..call }).collect();
        PendingCalls { calls, ..list }
    };
    let join = || kind(list(&[7], true), PendingKind::Join);
    assert_eq!(decide(&[list(&[1, 2], false), join(), list(&[2, 1], false)]), Reconciliation::StandIn(1));
    assert_eq!(decide(&[join(), join()]), Reconciliation::Run(vec![7]), "all have joined");
    assert!(waits(&[list(&[1], false), join(), list(&[], false)]), "a straggler");
    assert!(waits(&[list(&[1], false), kind(list(&[3, 7], false), PendingKind::TakesZeros)]), "a call before its join");
    let broadcast = kind(list(&[1], false), PendingKind::NeedsAll);
    assert_eq!(decide(&[broadcast, join()]), Reconciliation::Fail(vec![Some(0), None]));
    let different = decide(&[list(&[1], true), list(&[2], true), join()]);
    assert_eq!(different, Reconciliation::Fail(vec![Some(0), Some(0), None]));
    let closed = PendingCalls { further_calls: FurtherCalls::Closed, ..list(&[], false) };
    assert_eq!(decide(&[closed, join()]), Reconciliation::Fail(vec![None, Some(0)]), "a rank that never joins");
    let blocked = PendingCalls { further_calls: FurtherCalls::Settled, ..list(&[], false) };
    assert_eq!(decide(&[blocked, join()]), Reconciliation::Fail(vec![None, Some(0)]), "it waits in another group");
}

#[test]
fn calls_by_pairs_are_found_after_common_calls() {
    let even = |signature: u64, by_pairs: u64| PendingCalls {
        calls: vec![PendingCall { by_pairs, ..list(&[signature], false).calls[0] }],
        ..list(&[], false)
    };
    assert_eq!(decide(&[even(3, 9), even(3, 9)]), Reconciliation::Run(vec![3]), "equal without that form");
    assert_eq!(decide(&[even(3, 9), even(9, 0)]), Reconciliation::ByPairs(9));
    assert_eq!(decide(&[even(9, 0), even(9, 0)]), Reconciliation::Run(vec![9]));
    assert!(matches!(decide(&[even(3, 9), even(5, 9)]), Reconciliation::Wait(_)), "no rank needs that form");
}

#[test]
fn calls_stay_behind_those_whose_memory_they_share() {
    let behind = |signatures: &[u64], which: u64| {
        let mut list = list(signatures, false);
        for call in &mut list.calls {
            (call.memory, call.stays_behind) = (1, call.signature == which);
        }
        list
    };
    let run = |order: &[u64]| Reconciliation::Run(order.to_vec());
    assert_eq!(decide(&[list(&[2, 1, 3], false), behind(&[1, 3, 2], 2)]), run(&[1, 3, 2]));
    assert_eq!(decide(&[list(&[2, 1, 3], false), behind(&[3, 1, 2], 1)]), run(&[2, 3, 1]));
    let contrary = decide(&[behind(&[1, 2], 2), behind(&[2, 1], 1)]);
    assert_eq!(contrary, Reconciliation::Contrary(vec![Some(0), Some(1)]));
    let after = decide(&[behind(&[3, 1, 2], 2), behind(&[3, 2, 1], 1)]);
    assert_eq!(after, run(&[3]), "the common call in front");
    let joined = {
        let mut list = list(&[7], true);
        list.calls[0].kind = PendingKind::Join;
        list
    };
    assert_eq!(decide(&[list(&[2, 1], false), joined, behind(&[1, 2], 2)]), Reconciliation::StandIn(1));
}

/// Calls by name: signature n * 10 + k is of name n.
fn by_name(signatures: &[u64]) -> PendingCalls {
    let mut list = list(signatures, false);
    for call in &mut list.calls {
        (call.by_name, call.key) = (true, call.signature / 10 + 1);
    }
    list
}

#[test]
fn calls_by_name_match_wherever_they_stand() {
    let run = |order: &[u64]| Reconciliation::Run(order.to_vec());
    assert_eq!(decide(&[by_name(&[10, 20, 30]), by_name(&[30]), by_name(&[40, 30, 20])]), run(&[30]));
    assert!(waits(&[by_name(&[10, 20]), by_name(&[30])]));
    assert_eq!(decide(&[by_name(&[10, 11]), by_name(&[10])]), run(&[10]), "the first of one name");
    assert_eq!(decide(&[by_name(&[10, 10, 20]), by_name(&[10, 10])]), run(&[10, 10]));
    // Those without a name to match by keep the places among themselves.
    let mixed = |signatures: &[u64], named: u64| {
        let mut list = by_name(signatures);
        list.calls.iter_mut().for_each(|call| call.by_name = call.signature == named);
        list
    };
    assert_eq!(decide(&[mixed(&[10, 20, 30], 20), mixed(&[30, 20, 40], 20)]), run(&[20]));
    assert_eq!(decide(&[mixed(&[20, 30, 10], 10), mixed(&[30, 20, 40], 10)]), run(&[20, 30]));
    let (one, other) = (mixed(&[20], 20), mixed(&[20], 10));
    assert!(waits(&[one, other]), "both must match by name");
}

#[test]
fn a_conflict_of_a_name_fails_this_name_only() {
    let lists = [by_name(&[20, 10, 30]), by_name(&[10, 40, 21])];
    assert_eq!(decide(&lists), Reconciliation::Fail(vec![Some(0), Some(2)]));
    assert_eq!(decide(&[by_name(&[10, 30]), by_name(&[10, 40])]), Reconciliation::Run(vec![10]));
    let waits_for_a_rank = [by_name(&[20]), by_name(&[21]), by_name(&[30])];
    assert!(waits(&waits_for_a_rank), "the last rank gets the error too");
    // Two forms of one all-to-all.
    let mut even = by_name(&[20]);
    even.calls[0].by_pairs = 21;
    assert_eq!(decide(&[even, by_name(&[21])]), Reconciliation::ByPairs(21));
}

#[test]
fn the_ranks_that_lack_a_call_are_known() {
    let lists = [by_name(&[10, 20, 30]), by_name(&[20]), by_name(&[50, 10, 20])];
    assert_eq!(lacking(&lists, 4096), [(2, vec![1]), (4, vec![1, 2]), (6, vec![0, 1]), (2, vec![1])]);
    assert!(lacking(&lists, 100).is_empty(), "without room");
    let many: Vec<u64> = (0..1000).map(|name| 10 * name).collect();
    let (one, other) = (by_name(&many), list(&[], false));
    for max_bytes in [200, 1000, 5000] {
        let found = encode(&lacking(&[one.clone(), other.clone()], max_bytes)).unwrap();
        assert!((2..=max_bytes).contains(&found.len()), "{max_bytes} {}", found.len());
    }
}

#[test]
fn one_name_fails_if_no_call_can_come() {
    let settled = |signatures: &[u64]| PendingCalls { further_calls: FurtherCalls::Settled, ..by_name(signatures) };
    let decision = decide(&[settled(&[10, 20, 30]), settled(&[40]), settled(&[10, 50])]);
    assert_eq!(decision, Reconciliation::Fail(vec![None, Some(0), None]), "that of the rank with the fewest");
    assert_eq!(decide(&[settled(&[10]), settled(&[20, 30])]), Reconciliation::Fail(vec![Some(0), None]));
    // The last two share memory. Both ranks have both names, but only one has a second call of one of them.
    let chain = |signatures: &[u64]| {
        let mut list = settled(signatures);
        let last = signatures.len() - 1;
        (list.calls[last - 1].memory, list.calls[last].memory, list.calls[last].stays_behind) = (1, 1, true);
        list
    };
    let behind_a_second = decide(&[chain(&[30, 31, 10]), chain(&[10, 30])]);
    assert_eq!(behind_a_second, Reconciliation::Fail(vec![Some(2), Some(0)]));
    let in_order = list(&[7], true);
    assert_eq!(decide(&[settled(&[10]), in_order]), Reconciliation::Fail(vec![None, Some(0)]));
}

#[test]
fn calls_by_name_keep_their_places_on_shared_memory() {
    let shared = |signatures: &[u64], of: &[(u64, bool)]| {
        let mut list = by_name(signatures);
        for call in &mut list.calls {
            if let Some((_, behind)) = of.iter().find(|(signature, _)| *signature == call.signature) {
                (call.memory, call.stays_behind) = (1, *behind);
            }
        }
        list
    };
    let chain = shared(&[10, 20, 30], &[(20, false), (30, true)]);
    assert_eq!(decide(&[by_name(&[30, 20]), chain.clone()]), Reconciliation::Run(vec![20, 30]));
    assert!(waits(&[by_name(&[30]), chain.clone()]), "its rank may still make the call before it");
    assert_eq!(decide(&[by_name(&[30, 10]), chain]), Reconciliation::Run(vec![10]));
    let [one, other] = [&[20, 10, 30], &[30, 10, 20]]
        .map(|signatures: &[u64; 3]| shared(signatures, &[(signatures[0], false), (signatures[2], true)]));
    assert_eq!(decide(&[one, other]), Reconciliation::Contrary(vec![Some(0), Some(2)]));
}

/// The calls of a rank in its order, and how many of them are in flight at most.
#[derive(Debug, Clone)]
struct Script {
    calls: Vec<u64>,
    window: usize,
}

/// The same calls, several of a name, in any order but for those of a name; and how many may be in flight.
fn scripts() -> impl Strategy<Value = Vec<Script>> {
    let of_names = prop::collection::vec(1u64..4, 1..12);
    of_names.prop_flat_map(|counts| {
        let names: Vec<u64> = (0u64..).zip(&counts).flat_map(|(name, &count)| (0..count).map(move |_| name)).collect();
        let script = (Just(names).prop_shuffle(), 0usize..40).prop_map(|(names, window)| {
            let mut made: HashMap<u64, u64> = HashMap::new();
            let call = |name: &u64| {
                let number = made.entry(*name).or_default();
                *number += 1;
                name * 10 + *number - 1
            };
            Script { calls: names.iter().map(call).collect(), window }
        });
        prop::collection::vec(script, 2..5)
    })
}

fn any_list() -> impl Strategy<Value = PendingCalls> {
    let age = prop::sample::select(vec![Age::New, Age::New, Age::New, Age::Conflicting, Age::Expired]);
    let kind = prop::sample::select(vec![
        PendingKind::TakesZeros,
        PendingKind::TakesZeros,
        PendingKind::NeedsAll,
        PendingKind::Join,
    ]);
    let by_pairs = prop::sample::select(vec![0, 0, 0, 4, 5]);
    let memory = (any::<bool>(), 0u32..3, any::<bool>());
    let call = (0u64..6, by_pairs, 0u64..3, age, kind, memory).prop_map(
        |(signature, by_pairs, key, age, kind, (named, memory, conflicts))| {
            let by_name = named && key != 0;
            // Calls of different names or kinds have different signatures.
            let signature = if by_name { 100 * key + signature } else { signature };
            let stays_behind = conflicts && memory != 0;
            PendingCall { signature, by_pairs, key, by_name, age, kind, memory, stays_behind }
        },
    );
    let further_calls =
        prop::sample::select(vec![FurtherCalls::Busy, FurtherCalls::Open, FurtherCalls::Settled, FurtherCalls::Closed]);
    (prop::collection::vec(call, 0..6), further_calls, any::<bool>(), prop::bool::weighted(0.2))
        .prop_map(|(calls, further_calls, quiet, refused)| PendingCalls { calls, further_calls, quiet, refused })
}

proptest! {
    #[test]
    fn pages_fit_and_restore_the_list(list in any_list(), max_bytes in 55usize..160) {
        let pages: Vec<PendingCalls> = list.pages(max_bytes).collect();
        for page in &pages {
            let bytes = encode(&(page, true)).unwrap();
            prop_assert!(bytes.len() <= max_bytes);
            prop_assert_eq!(&decode::<(PendingCalls, bool)>(&bytes).unwrap().0, page);
        }
        let calls: Vec<PendingCall> = pages.into_iter().flat_map(|page| page.calls).collect();
        prop_assert_eq!(calls, list.calls);
    }

    #[test]
    fn truncated_decisions_fit(order in prop::collection::vec(any::<u64>(), 1..40), max_bytes in 40usize..120) {
        let run = Reconciliation::Run(order.clone()).truncated(max_bytes);
        prop_assert!(encode(&Some(&run)).unwrap().len() <= max_bytes);
        let Reconciliation::Run(first) = run else { panic!("{run:?}") };
        prop_assert!(!first.is_empty() && order.starts_with(&first));
    }

    /// Ranks make calls in their own orders. Rank `narrow` has few in flight, the others all.
    #[test]
    fn every_call_by_name_is_paired_once(mut scripts in scripts(), narrow in 0usize..5) {
        let total = scripts[0].calls.len();
        for (rank, script) in scripts.iter_mut().enumerate() {
            script.window = if rank == narrow { 1 + script.window % total } else { total };
        }
        let (mut next, mut lists) = (vec![0; scripts.len()], vec![by_name(&[]); scripts.len()]);
        let mut runs: Vec<Vec<u64>> = vec![Vec::new(); scripts.len()];
        for _ in 0..=4 * total * scripts.len() {
            for (rank, script) in scripts.iter().enumerate() {
                while next[rank] < total && lists[rank].calls.len() < script.window {
                    lists[rank].calls.extend(by_name(&[script.calls[next[rank]]]).calls);
                    next[rank] += 1;
                }
            }
            match decide(&lists) {
                Reconciliation::Run(order) => {
                    for (list, runs) in lists.iter_mut().zip(&mut runs) {
                        for signature in &order {
                            let place = list.calls.iter().position(|call| call.signature == *signature).unwrap();
                            list.calls.remove(place);
                            runs.push(*signature);
                        }
                    }
                }
                decision => {
                    prop_assert!(matches!(decision, Reconciliation::Wait(_)), "{:?}", decision);
                    break;
                }
            }
        }
        for runs in &runs {
            let mut sorted = runs.clone();
            sorted.sort_unstable();
            sorted.dedup();
            prop_assert_eq!(sorted.len(), total, "every call runs once");
            let in_order = |name: u64| runs.iter().filter(move |&&run| run / 10 == name).copied().collect::<Vec<_>>();
            for name in 0..12 {
                prop_assert!(in_order(name).is_sorted());
            }
        }
        prop_assert!(runs.windows(2).all(|pair| pair[0] == pair[1]));
    }

    #[test]
    fn every_decision_is_valid(lists in prop::collection::vec(any_list(), 2..5)) {
        let decision = decide(&lists);
        prop_assert_eq!(decode::<Reconciliation>(&encode(&decision).unwrap()).unwrap(), decision.clone());
        match decision {
            Reconciliation::Run(order) => {
                prop_assert!(!order.is_empty());
                let mut chosen_of_first: Option<Vec<u64>> = None;
                for list in &lists {
                    let mut left = list.calls.clone();
                    for signature in &order {
                        let place = left.iter().position(|call| call.signature == *signature).unwrap();
                        let call = left[place];
                        let before = &left[..place];
                        prop_assert!(!call.stays_behind || before.iter().all(|other| other.memory != call.memory));
                        prop_assert!(!call.by_name || before.iter().all(|other| !other.by_name || other.key != call.key));
                        left.remove(place);
                    }
                    // The others keep their places: what is left of them does not depend on the rank.
                    let others = list.calls.iter().filter(|call| !call.by_name).count();
                    let chosen = others - left.iter().filter(|call| !call.by_name).count();
                    let mut front: Vec<u64> =
                        list.calls.iter().filter(|call| !call.by_name).map(|call| call.signature).collect();
                    front.truncate(chosen);
                    if list.calls.iter().all(|call| !call.stays_behind) {
                        front.sort_unstable();
                        prop_assert_eq!(chosen_of_first.get_or_insert(front.clone()), &front);
                    }
                }
            }
            Reconciliation::StandIn(signature) => {
                prop_assert!(lists.iter().any(PendingCalls::has_joined));
                for list in lists.iter().filter(|list| !list.has_joined()) {
                    prop_assert!(list.calls.iter().any(|call| call.signature == signature));
                }
            }
            Reconciliation::ByPairs(signature) => {
                let calls = || lists.iter().flat_map(|list| &list.calls);
                prop_assert!(signature != 0 && find(&lists.iter().collect::<Vec<_>>()).is_none());
                prop_assert!(calls().any(|call| call.by_pairs == signature));
                prop_assert!(calls().any(|call| call.signature == signature));
            }
            Reconciliation::Fail(positions)
            | Reconciliation::Contrary(positions)
            | Reconciliation::Refused(positions) => {
                prop_assert_eq!(positions.len(), lists.len());
                let no_calls = lists.iter().all(|list| list.calls.is_empty());
                prop_assert!(positions.iter().any(Option::is_some) || no_calls);
                for (list, position) in lists.iter().zip(positions) {
                    prop_assert!(position.is_none_or(|position| position < list.calls.len()));
                }
            }
            Reconciliation::Wait(ranks) => {
                prop_assert!(find(&lists.iter().collect::<Vec<_>>()).is_none());
                prop_assert_eq!(ranks.len(), lists.len());
            }
        }
    }
}
