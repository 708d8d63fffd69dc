//! After ranks met with different calls: what each of them waits to carry out, laid side by side, and what follows from it.
//!
//! Every rank tells the calls that it was given and has not carried out, in their order; all ranks draw the same conclusion
//! from the same lists ([`decide`]). When the first few calls are the same on all ranks but for their order, they are
//! carried out in the order of rank 0: ranks that submit the same calls in different order lose nothing but a round.
//! Nothing is skipped: a call that not all ranks make would let the calls after it meet those of another step, which look
//! the same. So what has no counterpart waits for one to be submitted, until that is out of the question; then every rank
//! gives up a call, with an error that says who called what:
//! - soon, when all ranks have a call of one name, but not of one content ([`Age::Ripe`]);
//! - when no rank expects a further call ([`List::settled`]), or one has waited long enough ([`Age::Stale`]): the oldest.
//!
//! The optimistic way, in which equal signatures cost nothing and only different ones bring ranks here, is ours (the
//! design's section 3.2); Horovod's coordinator (Sergeev and Del Balso, 2018) negotiates every tensor instead.
//! Pure; no I/O.

use std::collections::HashMap;

/// A call that a rank has not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pending {
    /// Equal for calls that match.
    pub signature: u64,
    /// Equal for calls of one operation and name, whatever their content; 0 for calls without a name.
    pub key: u32,
    /// How long it has waited for a counterpart.
    pub age: Age,
}

/// How long a call has waited for its counterpart, by the measure of its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Age {
    /// Not long.
    Fresh,
    /// So long that a call of the same name and another content is taken for what should be its counterpart.
    Ripe,
    /// Too long, whatever may still come.
    Stale,
}

/// What a rank tells of its calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List {
    /// Its calls, oldest first.
    pub calls: Vec<Pending>,
    /// The rank expects no further call before one of these has ended.
    pub settled: bool,
}

/// What all ranks do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Carry out the calls with these signatures, in this order; a signature stands as often as it is to be carried out.
    Run(Vec<u64>),
    /// By rank, the position of the call that it gives up, if it gives one up: these do not match.
    GiveUp(Vec<Option<usize>>),
    /// Look again when something new may have been submitted.
    Wait,
}

/// What follows from `lists`, by rank.
pub fn decide(lists: &[List]) -> Decision {
    if let Some(count) = same_first(lists) {
        return Decision::Run(lists[0].calls[..count].iter().map(|call| call.signature).collect());
    }
    if let Some(conflict) = conflict(lists) {
        return Decision::GiveUp(conflict);
    }
    let stale = |list: &List| list.calls.iter().any(|call| call.age == Age::Stale);
    if lists.iter().any(stale) || lists.iter().all(|list| list.settled) {
        return Decision::GiveUp(lists.iter().map(|list| (!list.calls.is_empty()).then_some(0)).collect());
    }
    Decision::Wait
}

/// How many calls, at least, all ranks have to take from the front of their lists to have the same ones.
fn same_first(lists: &[List]) -> Option<usize> {
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
fn conflict(lists: &[List]) -> Option<Vec<Option<usize>>> {
    let find = |list: &List, key: u32| list.calls.iter().position(|call| call.key == key && call.age != Age::Fresh);
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

/// Letters of a call in a text: signature, key and age.
const ENTRY: usize = 16 + 8 + 1;

/// `list` as a text.
pub fn encode(list: &List) -> String {
    let mut text = String::from(if list.settled { "s" } else { "o" });
    for call in &list.calls {
        let mark = match call.age {
            Age::Fresh => '.',
            Age::Ripe => ':',
            Age::Stale => '!',
        };
        text += &format!("{:016x}{:08x}{mark}", call.signature, call.key);
    }
    text
}

/// The list that `text` tells; `None` when it tells none.
pub fn decode(text: &str) -> Option<List> {
    let rest = text.strip_prefix(['s', 'o'])?;
    if !rest.is_ascii() || !rest.len().is_multiple_of(ENTRY) {
        return None;
    }
    let entry = |entry: &[u8]| {
        let entry = str::from_utf8(entry).ok()?;
        Some(Pending {
            signature: u64::from_str_radix(entry.get(..16)?, 16).ok()?,
            key: u32::from_str_radix(entry.get(16..24)?, 16).ok()?,
            age: match entry.get(24..)? {
                "." => Age::Fresh,
                ":" => Age::Ripe,
                "!" => Age::Stale,
                _ => return None,
            },
        })
    };
    let calls = rest.as_bytes().chunks(ENTRY).map(entry).collect::<Option<Vec<_>>>()?;
    Some(List { calls, settled: text.starts_with('s') })
}

impl Decision {
    /// The decision as a text of at most `limit` bytes, as far as what is to be carried out goes: what does not fit is at the
    /// front of all lists then, and follows next time.
    pub fn encode_within(mut self, limit: usize) -> String {
        if let Decision::Run(order) = &mut self {
            order.truncate((limit - 1) / 16);
        }
        self.encode()
    }

    /// The decision as a text.
    pub fn encode(&self) -> String {
        match self {
            Decision::Run(order) => format!("r{}", order.iter().map(|call| format!("{call:016x}")).collect::<String>()),
            Decision::GiveUp(places) => {
                let word = |place: &Option<usize>| place.map_or("-".to_owned(), |place| place.to_string());
                format!("g{}", places.iter().map(word).collect::<Vec<_>>().join(" "))
            }
            Decision::Wait => "w".to_owned(),
        }
    }

    /// The decision that `text` tells; `None` when it tells none.
    pub fn decode(text: &str) -> Option<Decision> {
        if text == "w" {
            return Some(Decision::Wait);
        }
        if let Some(order) = text.strip_prefix('r') {
            let signature = |entry| u64::from_str_radix(str::from_utf8(entry).ok()?, 16).ok();
            return order.as_bytes().chunks(16).map(signature).collect::<Option<Vec<_>>>().map(Decision::Run);
        }
        let place = |word: &str| if word == "-" { Some(None) } else { word.parse().ok().map(Some) };
        text.strip_prefix('g')?.split(' ').map(place).collect::<Option<Vec<_>>>().map(Decision::GiveUp)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(calls: &[u64], settled: bool) -> List {
        let call = |&signature: &u64| Pending { signature, key: 0, age: Age::Fresh };
        List { calls: calls.iter().map(call).collect(), settled }
    }

    #[test]
    fn what_all_have_goes_first_in_the_order_of_rank_0() {
        let lists = [list(&[5, 1, 2, 1], false), list(&[1, 2, 5], false), list(&[2, 1, 5, 1, 7], false)];
        assert_eq!(decide(&lists), Decision::Run(vec![5, 1, 2]));
        let lists = [list(&[1, 1, 2], false), list(&[1, 2, 1], false)];
        assert_eq!(decide(&lists), Decision::Run(vec![1]), "no more than must be");
    }

    #[test]
    fn nothing_is_skipped() {
        assert_eq!(decide(&[list(&[1, 1], false), list(&[9, 1], false)]), Decision::Wait);
        assert_eq!(decide(&[list(&[1], false), list(&[9, 1], false)]), Decision::Wait);
        assert_eq!(decide(&[list(&[1, 1, 9], false), list(&[9, 1], false)]), Decision::Wait);
        assert_eq!(decide(&[list(&[1, 1, 9], false), list(&[9, 1, 1], false)]), Decision::Run(vec![1, 1, 9]));
    }

    #[test]
    fn what_lacks_a_counterpart_waits_until_nothing_more_is_expected() {
        assert_eq!(decide(&[list(&[1, 2], true), list(&[2], false)]), Decision::Wait);
        assert_eq!(decide(&[list(&[1, 2], true), list(&[2], true)]), Decision::GiveUp(vec![Some(0), Some(0)]));
        let mut lists = [list(&[9], false), list(&[1], false)];
        lists[0].calls[0].age = Age::Stale;
        assert_eq!(decide(&lists), Decision::GiveUp(vec![Some(0), Some(0)]));
    }

    #[test]
    fn one_name_with_two_contents_is_given_up_soon() {
        let call = |signature, key| Pending { signature, key, age: Age::Ripe };
        let mut lists = [
            List { calls: vec![call(1, 10), call(2, 20)], settled: false },
            List { calls: vec![call(3, 20)], settled: false },
        ];
        assert_eq!(decide(&lists), Decision::GiveUp(vec![Some(1), Some(0)]));
        lists[1].calls[0].age = Age::Fresh;
        assert_eq!(decide(&lists), Decision::Wait);
    }

    fn any_list() -> impl Strategy<Value = List> {
        let age = prop::sample::select(vec![Age::Fresh, Age::Fresh, Age::Fresh, Age::Ripe, Age::Stale]);
        let call = (0u64..6, 0u32..3, age).prop_map(|(signature, key, age)| Pending { signature, key, age });
        (prop::collection::vec(call, 1..6), any::<bool>()).prop_map(|(calls, settled)| List { calls, settled })
    }

    proptest! {
        #[test]
        fn texts_go_there_and_back(list in any_list()) {
            prop_assert_eq!(decode(&encode(&list)).unwrap(), list);
        }

        #[test]
        fn no_text_panics(text in "[rgwso0-9a-f!. é-]{0,60}") {
            let _list = decode(&text);
            let _decision = Decision::decode(&text);
        }

        #[test]
        fn every_decision_can_be_carried_out(lists in prop::collection::vec(any_list(), 2..5)) {
            let decision = decide(&lists);
            prop_assert_eq!(Decision::decode(&decision.encode()).unwrap(), decision.clone());
            match decision {
                Decision::Run(mut order) => {
                    prop_assert!(!order.is_empty());
                    order.sort_unstable();
                    for list in &lists {
                        let mut first: Vec<u64> =
                            list.calls[..order.len()].iter().map(|call| call.signature).collect();
                        first.sort_unstable();
                        prop_assert_eq!(&first, &order);
                    }
                }
                Decision::GiveUp(places) => {
                    prop_assert_eq!(places.len(), lists.len());
                    prop_assert!(places.iter().any(Option::is_some));
                    for (list, place) in lists.iter().zip(places) {
                        prop_assert!(place.is_none_or(|place| place < list.calls.len()));
                    }
                }
                Decision::Wait => prop_assert!(same_first(&lists).is_none()),
            }
        }
    }
}
