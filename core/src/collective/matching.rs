//! After ranks met with different calls: what each of them waits to carry out, laid side by side, and what follows from it.
//!
//! Every rank tells the calls that it was given and has not carried out, in their order; all ranks draw the same conclusion
//! from the same lists ([`decide`]). When the first few calls are the same on all ranks but for their order, they are
//! carried out in the order of rank 0: ranks that submit the same calls in different order lose nothing but a round.
//! Nothing is skipped: a call that not all ranks make would let the calls after it meet those of another step, which look
//! the same. So what has no counterpart waits for one to be submitted, until that is out of the question; then every rank
//! gives up a call, with an error that says who called what:
//! - soon, when all ranks have a call of one name, but not of one content ([`Age::Conflicting`]);
//! - when no rank expects a further call ([`Outlook::Settled`]), or one has waited long enough ([`Age::Expired`]): the oldest.
//!
//! A rank that waits in another team takes part with an empty list: ranks that wait for each other in different teams find
//! out here. Then nothing is given up while a rank waits nowhere or computes: it may be slow. That a team's own callers
//! wait ([`List::quiet`]) is enough only among lists that all have calls.
//!
//! The optimistic way, in which equal signatures cost nothing and only different ones bring ranks here, is ours (the
//! design's section 3.2); Horovod's coordinator (Sergeev and Del Balso, 2018) negotiates every tensor instead.
//! Pure; no I/O.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// A call that a rank has not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCall {
    /// Equal for calls that match.
    pub signature: u64,
    /// Equal for calls of one operation and name, whatever their content; 0 for calls without a name.
    pub key: u32,
    /// How long it has waited for a counterpart.
    pub age: Age,
}

/// How long a call has waited for its counterpart, by the measure of its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Age {
    /// Not long.
    New,
    /// So long that a call of the same name and another content is taken for what should be its counterpart.
    Conflicting,
    /// Too long, whatever may still come.
    Expired,
}

/// What a rank tells of its calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCalls {
    /// Its calls, oldest first.
    pub calls: Vec<PendingCall>,
    /// What more it expects.
    pub outlook: Outlook,
    /// Whether every thread that has called this team waits for one of these calls.
    pub quiet: bool,
}

/// What further calls a rank expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outlook {
    /// It computes, or waits nowhere, and may submit a call at any time.
    Busy,
    /// It waits, here or in another team, and may submit more.
    Open,
    /// None before one of those that it waits for has ended.
    Settled,
    /// None at all: it has ended its team.
    Closed,
}

/// What a rank that waits in vain is told of each rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankStatus {
    /// Whether the rank waits in calls of this team.
    pub calls: bool,
    /// What more it expects.
    pub outlook: Outlook,
}

impl RankStatus {
    fn of(list: &PendingCalls) -> RankStatus {
        RankStatus { calls: !list.calls.is_empty(), outlook: list.outlook }
    }

    /// What the rank does, in words.
    pub fn describe(self) -> &'static str {
        match self {
            RankStatus { calls: true, .. } => "waits in a different call",
            RankStatus { outlook: Outlook::Busy, .. } => "has made no such call and computes",
            RankStatus { outlook: Outlook::Open | Outlook::Settled, .. } => {
                "has made no such call and waits in another team"
            }
            RankStatus { outlook: Outlook::Closed, .. } => "has made no such call and has called finalize",
        }
    }
}

/// What all ranks do next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reconciliation {
    /// Carry out the calls with these signatures, in this order; a signature stands as often as it is to be carried out.
    Run(Vec<u64>),
    /// By rank, the position of the call that it gives up, if it gives one up: these do not match.
    Fail(Vec<Option<usize>>),
    /// Look again when something new may have been submitted. By rank, what there is now.
    Wait(Vec<RankStatus>),
}

/// What follows from `lists`, by rank.
pub fn decide(lists: &[PendingCalls]) -> Reconciliation {
    if let Some(count) = same_first(lists) {
        return Reconciliation::Run(lists[0].calls[..count].iter().map(|call| call.signature).collect());
    }
    if let Some(conflict) = conflict(lists) {
        return Reconciliation::Fail(conflict);
    }
    let gone = |list: &PendingCalls| list.calls.is_empty() && list.outlook == Outlook::Closed;
    let stale = |list: &PendingCalls| list.calls.iter().any(|call| call.age == Age::Expired);
    let several_teams = lists.iter().any(|list| list.calls.is_empty());
    let settled = |list: &PendingCalls| {
        matches!(list.outlook, Outlook::Settled | Outlook::Closed) || !several_teams && list.quiet
    };
    let busy = several_teams && lists.iter().any(|list| list.outlook == Outlook::Busy);
    if lists.iter().any(gone) || !busy && (lists.iter().any(stale) || lists.iter().all(settled)) {
        return Reconciliation::Fail(lists.iter().map(|list| (!list.calls.is_empty()).then_some(0)).collect());
    }
    Reconciliation::Wait(lists.iter().map(RankStatus::of).collect())
}

/// How many calls, at least, all ranks have to take from the front of their lists to have the same ones.
fn same_first(lists: &[PendingCalls]) -> Option<usize> {
    let (first, others) = lists.split_first()?;
    // By other rank, how much more often it has a signature than the first rank has; what is even is left out.
    let mut surplus: Vec<HashMap<u64, i64>> = vec![HashMap::new(); others.len()];
    let count = |surplus: &mut HashMap<u64, i64>, signature: u64, by: i64| {
        let entry = surplus.entry(signature).or_insert(0);
        *entry += by;
        if *entry == 0 {
            surplus.remove(&signature);
        }
    };
    for (place, call) in first.calls.iter().enumerate() {
        for (surplus, other) in surplus.iter_mut().zip(others) {
            count(surplus, other.calls.get(place)?.signature, 1);
            count(surplus, call.signature, -1);
        }
        if surplus.iter().all(HashMap::is_empty) {
            return Some(place + 1);
        }
    }
    None
}

/// By rank, the position of a call of a name that all ranks have had a call of for a while, and not the same.
fn conflict(lists: &[PendingCalls]) -> Option<Vec<Option<usize>>> {
    let find =
        |list: &PendingCalls, key: u32| list.calls.iter().position(|call| call.key == key && call.age != Age::New);
    let named = lists.first()?.calls.iter().map(|call| call.key).filter(|&key| key != 0);
    let places = |key: u32| lists.iter().map(|list| find(list, key)).collect::<Option<Vec<usize>>>();
    let differ = |places: &Vec<usize>| {
        let mut signatures = lists.iter().zip(places).map(|(list, &place)| list.calls[place].signature);
        let first = signatures.next();
        signatures.any(|signature| Some(signature) != first)
    };
    let places = named.into_iter().filter_map(places).find(differ)?;
    Some(places.into_iter().map(Some).collect())
}

/// The most encoded bytes of a call: a signature, a key and an age.
const MAX_CALL_BYTES: usize = 16;
/// The most encoded bytes of a list without its calls, and of a decision without its entries.
const MAX_HEADER_BYTES: usize = 16;

impl PendingCalls {
    /// The list in parts of at most `max_bytes` encoded bytes; at least one.
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
    /// The decision in about `max_bytes` encoded bytes. Signatures that do not fit are at the front of all lists
    /// then, and follow in the next decision; the status of the last of very many ranks is left out.
    pub fn truncated(mut self, max_bytes: usize) -> Reconciliation {
        let room = max_bytes.saturating_sub(MAX_HEADER_BYTES);
        match &mut self {
            Reconciliation::Run(order) => order.truncate((room / 10).max(1)),
            Reconciliation::Wait(ranks) => ranks.truncate(room / 2),
            Reconciliation::Fail(_) => {}
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
        let call = |&signature: &u64| PendingCall { signature, key: 0, age: Age::New };
        let outlook = if settled { Outlook::Settled } else { Outlook::Open };
        PendingCalls { calls: calls.iter().map(call).collect(), outlook, quiet: settled }
    }

    fn waits(lists: &[PendingCalls]) -> bool {
        matches!(decide(lists), Reconciliation::Wait(_))
    }

    #[test]
    fn who_waits_in_vain_hears_what_the_others_do() {
        let with = |outlook| PendingCalls { outlook, ..list(&[], false) };
        let lists = [list(&[1], true), list(&[2], false), with(Outlook::Busy), with(Outlook::Open)];
        let decision = decide(&lists).truncated(100);
        let Reconciliation::Wait(ranks) = decision else { panic!("{decision:?}") };
        let words: Vec<_> = ranks.iter().map(|rank| rank.describe()).collect();
        assert_eq!(words[0], "waits in a different call");
        assert_eq!(words[1], words[0]);
        assert_eq!(words[2], "has made no such call and computes");
        assert_eq!(words[3], "has made no such call and waits in another team");
    }

    #[test]
    fn a_rank_that_waits_elsewhere_is_a_mismatch_and_one_that_is_slow_is_not() {
        let with = |outlook| PendingCalls { outlook, ..list(&[], false) };
        let given_up = Reconciliation::Fail(vec![Some(0), None]);
        assert_eq!(decide(&[list(&[1], true), with(Outlook::Settled)]), given_up);
        assert_eq!(decide(&[list(&[1], false), with(Outlook::Closed)]), given_up);
        assert!(waits(&[list(&[1], true), with(Outlook::Open)]));
        assert!(waits(&[list(&[1], true), with(Outlook::Busy)]));
        let mut old = list(&[1], false);
        old.calls[0].age = Age::Expired;
        assert!(waits(&[old.clone(), with(Outlook::Busy)]));
        assert_eq!(decide(&[old.clone(), with(Outlook::Open)]), given_up);
        let quiet = PendingCalls { outlook: Outlook::Open, ..list(&[1], true) };
        assert!(waits(&[quiet.clone(), with(Outlook::Settled)]), "a thread that calls other teams may call");
        assert_eq!(decide(&[quiet, list(&[2], true)]), Reconciliation::Fail(vec![Some(0), Some(0)]));
        let computes = PendingCalls { outlook: Outlook::Busy, ..old };
        assert!(waits(&[computes.clone(), with(Outlook::Open)]));
        assert_eq!(decide(&[computes, list(&[2], false)]), Reconciliation::Fail(vec![Some(0), Some(0)]), "of one team");
    }

    #[test]
    fn what_all_have_goes_first_in_the_order_of_rank_0() {
        let lists = [list(&[5, 1, 2, 1], false), list(&[1, 2, 5], false), list(&[2, 1, 5, 1, 7], false)];
        assert_eq!(decide(&lists), Reconciliation::Run(vec![5, 1, 2]));
        let lists = [list(&[1, 1, 2], false), list(&[1, 2, 1], false)];
        assert_eq!(decide(&lists), Reconciliation::Run(vec![1]), "no more than must be");
    }

    #[test]
    fn nothing_is_skipped() {
        assert!(waits(&[list(&[1, 1], false), list(&[9, 1], false)]));
        assert!(waits(&[list(&[1], false), list(&[9, 1], false)]));
        assert!(waits(&[list(&[1, 1, 9], false), list(&[9, 1], false)]));
        assert_eq!(decide(&[list(&[1, 1, 9], false), list(&[9, 1, 1], false)]), Reconciliation::Run(vec![1, 1, 9]));
    }

    #[test]
    fn what_lacks_a_counterpart_waits_until_nothing_more_is_expected() {
        assert!(waits(&[list(&[1, 2], true), list(&[2], false)]));
        assert_eq!(decide(&[list(&[1, 2], true), list(&[2], true)]), Reconciliation::Fail(vec![Some(0), Some(0)]));
        let mut lists = [list(&[9], false), list(&[1], false)];
        lists[0].calls[0].age = Age::Expired;
        assert_eq!(decide(&lists), Reconciliation::Fail(vec![Some(0), Some(0)]));
    }

    #[test]
    fn one_name_with_two_contents_is_given_up_soon() {
        let call = |signature, key| PendingCall { signature, key, age: Age::Conflicting };
        let mut lists = [
            PendingCalls { calls: vec![call(1, 10), call(2, 20)], outlook: Outlook::Open, quiet: false },
            PendingCalls { calls: vec![call(3, 20)], outlook: Outlook::Open, quiet: false },
        ];
        assert_eq!(decide(&lists), Reconciliation::Fail(vec![Some(1), Some(0)]));
        lists[1].calls[0].age = Age::New;
        assert!(waits(&lists));
    }

    fn any_list() -> impl Strategy<Value = PendingCalls> {
        let age = prop::sample::select(vec![Age::New, Age::New, Age::New, Age::Conflicting, Age::Expired]);
        let call = (0u64..6, 0u32..3, age).prop_map(|(signature, key, age)| PendingCall { signature, key, age });
        let outlook = prop::sample::select(vec![Outlook::Busy, Outlook::Open, Outlook::Settled, Outlook::Closed]);
        (prop::collection::vec(call, 0..6), outlook, any::<bool>()).prop_map(|(calls, outlook, quiet)| PendingCalls {
            calls,
            outlook,
            quiet,
        })
    }

    proptest! {
        #[test]
        fn pages_fit_and_make_the_list_again(list in any_list(), max_bytes in 32usize..80) {
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
        fn every_decision_can_be_carried_out(lists in prop::collection::vec(any_list(), 2..5)) {
            let decision = decide(&lists);
            prop_assert_eq!(decode::<Reconciliation>(&encode(&decision).unwrap()).unwrap(), decision.clone());
            match decision {
                Reconciliation::Run(mut order) => {
                    prop_assert!(!order.is_empty());
                    order.sort_unstable();
                    for list in &lists {
                        let mut first: Vec<u64> =
                            list.calls[..order.len()].iter().map(|call| call.signature).collect();
                        first.sort_unstable();
                        prop_assert_eq!(&first, &order);
                    }
                }
                Reconciliation::Fail(places) => {
                    prop_assert_eq!(places.len(), lists.len());
                    prop_assert!(places.iter().any(Option::is_some) || lists.iter().all(|list| list.calls.is_empty()));
                    for (list, place) in lists.iter().zip(places) {
                        prop_assert!(place.is_none_or(|place| place < list.calls.len()));
                    }
                }
                Reconciliation::Wait(ranks) => {
                    prop_assert!(same_first(&lists).is_none());
                    prop_assert_eq!(ranks.len(), lists.len());
                }
            }
        }
    }
}
