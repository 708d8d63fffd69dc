//! Matching of calls after a mismatch of signatures: decides from all ranks' pending calls what to run next.
//!
//! Each rank sends its pending calls in submission order, and all ranks decide the same from the same lists
//! ([`decide`]). If the first calls are the same on all ranks except for their order, they run in the order of rank 0, but
//! a call that shares memory with one before it on any rank stays behind that one. So submitting the same calls in
//! different order costs only this exchange. Calls fail if the ranks need contrary orders.
//!
//! Calls that differ only in whether they name a length for each pair of ranks take the form that does
//! ([`Reconciliation::ByPairs`]). That form has one signature for all lengths, so it is the second choice.
//!
//! No call is skipped: later calls would match those of another training step. A call without a counterpart waits until
//! none can come. Then every rank fails a call, with an error that lists each rank's call:
//! - early, if all ranks have a call of one name but with different contents ([`Age::Conflicting`]);
//! - if no rank expects further calls ([`Outlook::Settled`]), or a call has waited too long ([`Age::Expired`]): the
//!   oldest.
//!
//! A rank that waits in another group participates with an empty list, which detects ranks that wait for each other in
//! different groups. Then nothing fails while any rank computes, because that rank may just be slow.
//! [`PendingCalls::quiet`] covers only this group's callers, so it counts only if all lists have calls.
//!
//! A rank may have joined ([`Kind::Join`]): it has no more data. The common calls of the other ranks then run one by one,
//! and it contributes zeros to them ([`Reconciliation::StandIn`]), until all have joined. So did Horovod's `join`.
//!
//! The protocol is optimistic: only different signatures start it. Horovod's coordinator (Sergeev and Del Balso, 2018)
//! negotiates every tensor instead. Pure; no I/O.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

/// A submitted call that has not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCall {
    /// Equal for matching calls.
    pub signature: u64,
    /// The signature of the call in the form in which the ranks know only their own lengths; 0 if it has none.
    pub by_pairs: u64,
    /// Equal for calls of one operation and name, with any content; 0 for calls without a name.
    pub key: u32,
    /// How long it has waited for its counterpart.
    pub age: Age,
    /// What ranks that have joined do about it.
    pub kind: Kind,
    /// Its memory conflicts with that of a call before it in the list. It stays behind all that are.
    pub stays_behind: bool,
}

/// What ranks that have joined do about a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// They contribute zeros.
    TakesZeros,
    /// They cannot take part.
    NeedsAll,
    /// The call of a rank that has joined.
    Join,
}

/// How long a call has waited for its counterpart, by its rank's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Age {
    /// Less than the other limits.
    New,
    /// Long enough to treat a call of the same name and other content as a conflict.
    Conflicting,
    /// Too long, even if a counterpart may still come.
    Expired,
}

/// The calls of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCalls {
    /// Oldest first.
    pub calls: Vec<PendingCall>,
    /// Whether more calls can come.
    pub outlook: Outlook,
    /// Whether every thread that has called this group waits for one of these calls.
    pub quiet: bool,
}

/// Whether a rank may submit further calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outlook {
    /// It computes or is not blocked, and may submit a call at any time.
    Busy,
    /// It is blocked, in this or another group, and may submit more.
    Open,
    /// No call before one of those that it waits for has ended.
    Settled,
    /// No call at all: it has freed its group.
    Closed,
}

/// The status of a rank, reported to ranks that wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankStatus {
    /// Whether it has joined.
    pub joined: bool,
    /// Whether the rank waits for calls of this group.
    pub calls: bool,
    /// Whether more calls can come.
    pub outlook: Outlook,
}

impl RankStatus {
    fn of(list: &PendingCalls) -> RankStatus {
        RankStatus { joined: list.has_joined(), calls: !list.calls.is_empty(), outlook: list.outlook }
    }

    /// The status as text for messages.
    pub fn describe(self) -> &'static str {
        match self {
            RankStatus { joined: true, .. } => "has joined",
            RankStatus { calls: true, .. } => "waits in a different call",
            RankStatus { outlook: Outlook::Busy, .. } => "has made no such call and computes",
            RankStatus { outlook: Outlook::Open | Outlook::Settled, .. } => {
                "has made no such call and waits in another team"
            }
            RankStatus { outlook: Outlook::Closed, .. } => "has made no such call and has called finalize",
        }
    }
}

/// The common decision of all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reconciliation {
    /// Run the calls with these signatures in this order; a repeated signature runs that often.
    Run(Vec<u64>),
    /// Run the call with this signature; the ranks that have joined contribute zeros.
    StandIn(u64),
    /// Give the calls that have this signature by pairs that form, and decide again.
    ByPairs(u64),
    /// Fail the calls at these positions, by rank: they do not match.
    Fail(Vec<Option<usize>>),
    /// Decide again after new calls; the current status by rank.
    Wait(Vec<RankStatus>),
}

/// The decision for `lists`, by rank.
pub fn decide(lists: &[PendingCalls]) -> Reconciliation {
    let all: Vec<&PendingCalls> = lists.iter().collect();
    if let Some(count) = common_prefix(&all) {
        return match order(&all, count) {
            Ok(order) => Reconciliation::Run(order),
            Err(positions) => Reconciliation::Fail(positions.into_iter().map(Some).collect()),
        };
    }
    if let Some(signature) = common_by_pairs(lists) {
        return Reconciliation::ByPairs(signature);
    }
    if let Some(conflict) = conflict(&all) {
        return Reconciliation::Fail(conflict);
    }
    if let Some(decision) = decide_for_joined(lists) {
        return decision;
    }
    let closed = |list: &PendingCalls| list.calls.is_empty() && list.outlook == Outlook::Closed;
    let expired = |list: &PendingCalls| list.calls.iter().any(|call| call.age == Age::Expired);
    let several_groups = lists.iter().any(|list| list.calls.is_empty());
    let settled = |list: &PendingCalls| {
        matches!(list.outlook, Outlook::Settled | Outlook::Closed) || !several_groups && list.quiet
    };
    let busy = several_groups && lists.iter().any(|list| list.outlook == Outlook::Busy);
    if lists.iter().any(closed) || !busy && (lists.iter().any(expired) || lists.iter().all(settled)) {
        // A rank that has joined stays while others have calls: these fail, and those that follow may match.
        let others_call = lists.iter().any(|list| !list.calls.is_empty() && !list.has_joined());
        let stays = |list: &PendingCalls| list.calls.is_empty() || others_call && list.has_joined();
        return Reconciliation::Fail(lists.iter().map(|list| (!stays(list)).then_some(0)).collect());
    }
    Reconciliation::Wait(lists.iter().map(RankStatus::of).collect())
}

/// The decision for the ranks that have not joined, if others have and these have a common call or a conflict.
fn decide_for_joined(lists: &[PendingCalls]) -> Option<Reconciliation> {
    let (joined, active): (Vec<&PendingCalls>, Vec<&PendingCalls>) = lists.iter().partition(|list| list.has_joined());
    if joined.is_empty() || active.is_empty() {
        return None;
    }
    let positions = match common_prefix(&active).map(|count| order(&active, count)) {
        Some(Ok(order)) => {
            let first = order[0];
            let find = |list: &&PendingCalls| list.calls.iter().position(|call| call.signature == first);
            let positions: Vec<Option<usize>> = active.iter().map(find).collect();
            if positions[0].is_some_and(|position| active[0].calls[position].kind == Kind::TakesZeros) {
                return Some(Reconciliation::StandIn(first));
            }
            positions
        }
        Some(Err(positions)) => positions.into_iter().map(Some).collect(),
        None => conflict(&active)?,
    };
    let mut positions = positions.into_iter();
    let position = |list: &PendingCalls| if list.has_joined() { None } else { positions.next().flatten() };
    Some(Reconciliation::Fail(lists.iter().map(position).collect()))
}

/// The smallest number of calls at the front of all lists that are the same up to order.
fn common_prefix(lists: &[&PendingCalls]) -> Option<usize> {
    let (first, others) = lists.split_first()?;
    // For each other rank: by signature, its count minus that of the first rank, without zeros.
    let mut surplus: Vec<HashMap<u64, i64>> = vec![HashMap::new(); others.len()];
    let count = |surplus: &mut HashMap<u64, i64>, signature: u64, by: i64| {
        let entry = surplus.entry(signature).or_insert(0);
        *entry += by;
        if *entry == 0 {
            surplus.remove(&signature);
        }
    };
    for (position, call) in first.calls.iter().enumerate() {
        for (surplus, other) in surplus.iter_mut().zip(others) {
            count(surplus, other.calls.get(position)?.signature, 1);
            count(surplus, call.signature, -1);
        }
        if surplus.iter().all(HashMap::is_empty) {
            return Some(position + 1);
        }
    }
    None
}

/// The order in which the first `count` calls run, which are the same on all ranks: that of rank 0, as far as calls need
/// not stay behind others. The positions of the calls that are in each other's way, if there is none.
fn order(lists: &[&PendingCalls], count: usize) -> Result<Vec<u64>, Vec<usize>> {
    let first: Vec<u64> = lists[0].calls[..count].iter().map(|call| call.signature).collect();
    if !lists.iter().any(|list| list.calls[..count].iter().any(|call| call.stays_behind)) {
        return Ok(first);
    }
    // By rank, the calls that have not been chosen, in the rank's order.
    let mut left: Vec<Vec<usize>> = vec![(0..count).collect(); lists.len()];
    let mut chosen = Vec::with_capacity(count);
    while chosen.len() < count {
        // Where each rank has the call, if that may be next there.
        let places = |signature: u64| {
            let place = |(list, left): (&&PendingCalls, &Vec<usize>)| {
                let place = left.iter().position(|&position| list.calls[position].signature == signature)?;
                (place == 0 || !list.calls[left[place]].stays_behind).then_some(place)
            };
            lists.iter().zip(&left).map(place).collect::<Option<Vec<usize>>>()
        };
        let next = left[0].iter().find_map(|&position| Some((first[position], places(first[position])?)));
        let Some((signature, places)) = next else {
            return Err(left.iter().map(|left| left[0]).collect());
        };
        chosen.push(signature);
        for (left, place) in left.iter_mut().zip(places) {
            left.remove(place);
        }
    }
    Ok(chosen)
}

/// The signature of a call by pairs that another call could have.
fn common_by_pairs(lists: &[PendingCalls]) -> Option<u64> {
    let calls = || lists.iter().flat_map(|list| &list.calls);
    let forms: HashSet<u64> = calls().map(|call| call.by_pairs).filter(|&form| form != 0).collect();
    if forms.is_empty() {
        return None;
    }
    calls().map(|call| call.signature).find(|signature| forms.contains(signature))
}

/// By rank, the position of a call whose name all ranks have had for a while, with different signatures.
fn conflict(lists: &[&PendingCalls]) -> Option<Vec<Option<usize>>> {
    let find =
        |list: &PendingCalls, key: u32| list.calls.iter().position(|call| call.key == key && call.age != Age::New);
    let keys = lists.first()?.calls.iter().map(|call| call.key).filter(|&key| key != 0);
    let positions = |key: u32| lists.iter().map(|list| find(list, key)).collect::<Option<Vec<usize>>>();
    let differ = |positions: &Vec<usize>| {
        let mut signatures = lists.iter().zip(positions).map(|(list, &position)| list.calls[position].signature);
        let first = signatures.next();
        signatures.any(|signature| Some(signature) != first)
    };
    let positions = keys.into_iter().filter_map(positions).find(differ)?;
    Some(positions.into_iter().map(Some).collect())
}

/// Maximum encoded bytes of a call: two signatures, a key, an age, a kind and a flag.
const MAX_CALL_BYTES: usize = 28;
/// Maximum encoded bytes of a list without its calls, and of a decision without its entries.
const MAX_HEADER_BYTES: usize = 16;

impl PendingCalls {
    /// Whether the rank has joined, and its earlier calls have run.
    fn has_joined(&self) -> bool {
        self.calls.first().is_some_and(|call| call.kind == Kind::Join)
    }

    /// Splits the list into parts of at most `max_bytes` encoded bytes; at least one part.
    pub fn pages(&self, max_bytes: usize) -> impl ExactSizeIterator<Item = PendingCalls> {
        let per_page = (max_bytes.saturating_sub(MAX_HEADER_BYTES) / MAX_CALL_BYTES).max(1);
        let count = self.calls.len().div_ceil(per_page).max(1);
        (0..count).map(move |page| {
            let calls = self.calls.iter().skip(page * per_page).take(per_page).copied().collect();
            PendingCalls { calls, outlook: self.outlook, quiet: self.quiet }
        })
    }
}

impl Reconciliation {
    /// The decision in about `max_bytes` encoded bytes. Signatures that do not fit are then at the front of all lists
    /// and follow in the next decision. With very many ranks the status of the last ranks is dropped.
    pub fn truncated(mut self, max_bytes: usize) -> Reconciliation {
        let capacity = max_bytes.saturating_sub(MAX_HEADER_BYTES);
        match &mut self {
            Reconciliation::Run(order) => order.truncate((capacity / 10).max(1)),
            Reconciliation::Wait(ranks) => ranks.truncate(capacity / 3),
            Reconciliation::Fail(_) | Reconciliation::StandIn(_) | Reconciliation::ByPairs(_) => {}
        }
        self
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::codec::{decode, encode};
    use proptest::prelude::*;

    fn list(calls: &[u64], settled: bool) -> PendingCalls {
        let call = |&signature: &u64| PendingCall {
            signature,
            by_pairs: 0,
            key: 0,
            age: Age::New,
            kind: Kind::TakesZeros,
            stays_behind: false,
        };
        let outlook = if settled { Outlook::Settled } else { Outlook::Open };
        PendingCalls { calls: calls.iter().map(call).collect(), outlook, quiet: settled }
    }

    fn waits(lists: &[PendingCalls]) -> bool {
        matches!(decide(lists), Reconciliation::Wait(_))
    }

    #[test]
    fn waiting_ranks_get_the_status_of_all_ranks() {
        let with = |outlook| PendingCalls { outlook, ..list(&[], false) };
        let lists = [list(&[1], true), list(&[2], false), with(Outlook::Busy), with(Outlook::Open)];
        let decision = decide(&lists).truncated(100);
        let Reconciliation::Wait(ranks) = decision else { panic!("{decision:?}") };
        let texts: Vec<_> = ranks.iter().map(|rank| rank.describe()).collect();
        assert_eq!(texts[0], "waits in a different call");
        assert_eq!(texts[1], texts[0]);
        assert_eq!(texts[2], "has made no such call and computes");
        assert_eq!(texts[3], "has made no such call and waits in another team");
    }

    #[test]
    fn rank_waiting_in_another_group_is_a_mismatch_but_a_slow_rank_is_not() {
        let with = |outlook| PendingCalls { outlook, ..list(&[], false) };
        let failed = Reconciliation::Fail(vec![Some(0), None]);
        assert_eq!(decide(&[list(&[1], true), with(Outlook::Settled)]), failed);
        assert_eq!(decide(&[list(&[1], false), with(Outlook::Closed)]), failed);
        assert!(waits(&[list(&[1], true), with(Outlook::Open)]));
        assert!(waits(&[list(&[1], true), with(Outlook::Busy)]));
        let mut old = list(&[1], false);
        old.calls[0].age = Age::Expired;
        assert!(waits(&[old.clone(), with(Outlook::Busy)]));
        assert_eq!(decide(&[old.clone(), with(Outlook::Open)]), failed);
        let quiet = PendingCalls { outlook: Outlook::Open, ..list(&[1], true) };
        assert!(waits(&[quiet.clone(), with(Outlook::Settled)]), "a thread that calls other teams may call");
        assert_eq!(decide(&[quiet, list(&[2], true)]), Reconciliation::Fail(vec![Some(0), Some(0)]));
        let computes = PendingCalls { outlook: Outlook::Busy, ..old };
        assert!(waits(&[computes.clone(), with(Outlook::Open)]));
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
            kind: Kind::NeedsAll,
            ..list(&[signature], false).calls[0]
        };
        let mut lists = [
            PendingCalls { calls: vec![call(1, 10), call(2, 20)], outlook: Outlook::Open, quiet: false },
            PendingCalls { calls: vec![call(3, 20)], outlook: Outlook::Open, quiet: false },
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
        let join = || kind(list(&[7], true), Kind::Join);
        assert_eq!(decide(&[list(&[1, 2], false), join(), list(&[2, 1], false)]), Reconciliation::StandIn(1));
        assert_eq!(decide(&[join(), join()]), Reconciliation::Run(vec![7]), "all have joined");
        assert!(waits(&[list(&[1], false), join(), list(&[], false)]), "a straggler");
        assert!(waits(&[list(&[1], false), kind(list(&[3, 7], false), Kind::TakesZeros)]), "a call before its join");
        let broadcast = kind(list(&[1], false), Kind::NeedsAll);
        assert_eq!(decide(&[broadcast, join()]), Reconciliation::Fail(vec![Some(0), None]));
        let different = decide(&[list(&[1], true), list(&[2], true), join()]);
        assert_eq!(different, Reconciliation::Fail(vec![Some(0), Some(0), None]));
        let closed = PendingCalls { outlook: Outlook::Closed, ..list(&[], false) };
        assert_eq!(decide(&[closed, join()]), Reconciliation::Fail(vec![None, Some(0)]), "a rank that never joins");
        let blocked = PendingCalls { outlook: Outlook::Settled, ..list(&[], false) };
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
            list.calls.iter_mut().for_each(|call| call.stays_behind = call.signature == which);
            list
        };
        let run = |order: &[u64]| Reconciliation::Run(order.to_vec());
        assert_eq!(decide(&[list(&[2, 1, 3], false), behind(&[1, 3, 2], 2)]), run(&[1, 3, 2]));
        assert_eq!(decide(&[list(&[2, 1, 3], false), behind(&[3, 1, 2], 1)]), run(&[2, 3, 1]));
        let contrary = decide(&[behind(&[1, 2], 2), behind(&[2, 1], 1)]);
        assert_eq!(contrary, Reconciliation::Fail(vec![Some(0), Some(0)]));
        let after = decide(&[behind(&[3, 1, 2], 2), behind(&[3, 2, 1], 1)]);
        assert_eq!(after, run(&[3]), "the common call in front");
        let joined = {
            let mut list = list(&[7], true);
            list.calls[0].kind = Kind::Join;
            list
        };
        assert_eq!(decide(&[list(&[2, 1], false), joined, behind(&[1, 2], 2)]), Reconciliation::StandIn(1));
    }

    fn any_list() -> impl Strategy<Value = PendingCalls> {
        let age = prop::sample::select(vec![Age::New, Age::New, Age::New, Age::Conflicting, Age::Expired]);
        let kind = prop::sample::select(vec![Kind::TakesZeros, Kind::TakesZeros, Kind::NeedsAll, Kind::Join]);
        let by_pairs = prop::sample::select(vec![0, 0, 0, 4, 5]);
        let stays_behind = prop::sample::select(vec![false, false, false, true]);
        let call = (0u64..6, by_pairs, 0u32..3, age, kind, stays_behind).prop_map(
            |(signature, by_pairs, key, age, kind, stays_behind)| PendingCall {
                signature,
                by_pairs,
                key,
                age,
                kind,
                stays_behind,
            },
        );
        let outlook = prop::sample::select(vec![Outlook::Busy, Outlook::Open, Outlook::Settled, Outlook::Closed]);
        (prop::collection::vec(call, 0..6), outlook, any::<bool>()).prop_map(|(calls, outlook, quiet)| PendingCalls {
            calls,
            outlook,
            quiet,
        })
    }

    proptest! {
        #[test]
        fn pages_fit_and_restore_the_list(list in any_list(), max_bytes in 44usize..120) {
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

        #[test]
        fn every_decision_is_valid(lists in prop::collection::vec(any_list(), 2..5)) {
            let decision = decide(&lists);
            prop_assert_eq!(decode::<Reconciliation>(&encode(&decision).unwrap()).unwrap(), decision.clone());
            match decision {
                Reconciliation::Run(mut order) => {
                    prop_assert!(!order.is_empty());
                    for list in &lists {
                        let mut left = list.calls[..order.len()].to_vec();
                        for signature in &order {
                            let place = left.iter().position(|call| call.signature == *signature).unwrap();
                            prop_assert!(place == 0 || !left[place].stays_behind);
                            left.remove(place);
                        }
                    }
                    order.sort_unstable();
                    for list in &lists {
                        let mut first: Vec<u64> =
                            list.calls[..order.len()].iter().map(|call| call.signature).collect();
                        first.sort_unstable();
                        prop_assert_eq!(&first, &order);
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
                    prop_assert!(signature != 0 && common_prefix(&lists.iter().collect::<Vec<_>>()).is_none());
                    prop_assert!(calls().any(|call| call.by_pairs == signature));
                    prop_assert!(calls().any(|call| call.signature == signature));
                }
                Reconciliation::Fail(positions) => {
                    prop_assert_eq!(positions.len(), lists.len());
                    let no_calls = lists.iter().all(|list| list.calls.is_empty());
                    prop_assert!(positions.iter().any(Option::is_some) || no_calls);
                    for (list, position) in lists.iter().zip(positions) {
                        prop_assert!(position.is_none_or(|position| position < list.calls.len()));
                    }
                }
                Reconciliation::Wait(ranks) => {
                    prop_assert!(common_prefix(&lists.iter().collect::<Vec<_>>()).is_none());
                    prop_assert_eq!(ranks.len(), lists.len());
                }
            }
        }
    }
}
