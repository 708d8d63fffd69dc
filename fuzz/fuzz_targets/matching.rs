//! Ranks that hold any calls, in any order, and follow the decisions: every decision can be carried out, all calls that
//! are carried out are carried out by all in the same order, and there is an end.
#![no_main]

use arbitrary::Arbitrary;
use dl_comm_core::collective::matching::{Age, Outlook, PendingCall, PendingCalls, Reconciliation, decide};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input {
    /// How much of a list fits into a message.
    fits: u8,
    /// By rank, the signature and key of each call that it will make, and how many are made at once.
    ranks: Vec<(Vec<(u8, u8)>, u8)>,
    /// How the calls age, from round to round.
    ages: Vec<u8>,
}

struct Rank {
    coming: Vec<PendingCall>,
    waiting: Vec<PendingCall>,
    pace: usize,
    done: Vec<u64>,
}

impl Rank {
    fn submit(&mut self) {
        let count = self.pace.min(self.coming.len());
        self.waiting.extend(self.coming.drain(..count));
    }

    /// The list that this rank sends.
    fn list(&self) -> PendingCalls {
        let outlook = if self.coming.is_empty() { Outlook::Settled } else { Outlook::Open };
        PendingCalls { calls: self.waiting.clone(), outlook, quiet: self.coming.is_empty() }
    }

    fn run(&mut self, order: &[u64]) {
        for signature in order {
            let place =
                self.waiting.iter().position(|call| call.signature == *signature).expect("a call to run is there");
            assert!(place < order.len(), "nothing is skipped");
            self.waiting.remove(place);
            self.done.push(*signature);
        }
    }
}

fuzz_target!(|input: Input| {
    if !(2..=5).contains(&input.ranks.len()) {
        return;
    }
    let limit = 1 + 25 * (1 + usize::from(input.fits));
    let call = |&(signature, key): &(u8, u8)| PendingCall {
        signature: u64::from(signature % 8),
        key: u32::from(key % 4),
        age: Age::New,
    };
    let mut ranks: Vec<Rank> = input
        .ranks
        .iter()
        .map(|(calls, pace)| Rank {
            coming: calls.iter().take(40).map(call).collect(),
            waiting: Vec::new(),
            pace: usize::from(pace % 4) + 1,
            done: Vec::new(),
        })
        .collect();
    let calls: usize = ranks.iter().map(|rank| rank.coming.len()).sum();
    let mut ages = input.ages.iter();
    for _round in 0..=2 * calls {
        ranks.iter_mut().for_each(Rank::submit);
        if ranks.iter().all(|rank| rank.waiting.is_empty() && rank.coming.is_empty()) {
            break;
        }
        for call in ranks.iter_mut().flat_map(|rank| &mut rank.waiting) {
            call.age = match (ages.next().copied().unwrap_or(0) % 8, call.age) {
                (1, Age::New) => Age::Conflicting,
                (2, _) => Age::Expired,
                (_, age) => age,
            };
        }
        let lists: Vec<PendingCalls> = ranks.iter().map(Rank::list).collect();
        let decision = decide(&lists);
        match decision.truncated(limit) {
            Reconciliation::Run(order) => {
                assert!(!order.is_empty());
                ranks.iter_mut().for_each(|rank| rank.run(&order));
            }
            Reconciliation::Fail(places) => {
                assert_eq!(places.len(), ranks.len());
                assert!(places.iter().any(Option::is_some), "something is given up");
                for (rank, place) in ranks.iter_mut().zip(places) {
                    place.map(|place| rank.waiting.remove(place));
                }
            }
            Reconciliation::Wait(_) => {}
        }
    }
    assert!(ranks.iter().all(|rank| rank.waiting.is_empty() && rank.coming.is_empty()), "it ends");
    assert!(ranks.windows(2).all(|pair| pair[0].done == pair[1].done), "all carry out the same");
});
