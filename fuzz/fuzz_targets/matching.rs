//! Ranks with any calls in any order follow the reconciliation. Every decision can be executed, all ranks run the same
//! calls in the same order, and the process ends.
#![no_main]

use arbitrary::Arbitrary;
use dl_comm_core::collective::matching::{
    Age, FurtherCalls, PendingCall, PendingCalls, PendingKind, Reconciliation, decide,
};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input {
    /// Calls that fit into a message.
    message_calls: u8,
    /// By rank, the signature and name of each call that it will make, and how many are made at once.
    ranks: Vec<(Vec<(u8, u8)>, u8)>,
    /// Changes of the calls' ages in each round.
    ages: Vec<u8>,
}

struct Rank {
    future: Vec<PendingCall>,
    waiting: Vec<PendingCall>,
    calls_per_round: usize,
    done: Vec<u64>,
}

impl Rank {
    fn submit(&mut self) {
        let count = self.calls_per_round.min(self.future.len());
        self.waiting.extend(self.future.drain(..count));
    }

    /// The list that the other ranks receive.
    fn list(&self) -> PendingCalls {
        let further_calls = if self.future.is_empty() { FurtherCalls::Settled } else { FurtherCalls::Open };
        PendingCalls { calls: self.waiting.clone(), further_calls, quiet: self.future.is_empty(), refused: false }
    }

    /// Runs the calls in `order`.
    fn run(&mut self, order: &[u64]) {
        for signature in order {
            let position =
                self.waiting.iter().position(|call| call.signature == *signature).expect("a call to run is there");
            let (before, call) = (&self.waiting[..position], self.waiting[position]);
            assert!(!call.stays_behind || before.iter().all(|other| other.memory != call.memory), "it stays behind");
            let is_of_name = |other: &PendingCall| other.by_name && other.key == call.key;
            assert!(!call.by_name || !before.iter().any(is_of_name), "calls of one name keep their order");
            self.waiting.remove(position);
            self.done.push(*signature);
        }
    }
}

fuzz_target!(|input: Input| {
    if !(2..=5).contains(&input.ranks.len()) {
        return;
    }
    let limit = 1 + 39 * (1 + usize::from(input.message_calls));
    let call = |&(signature, bits): &(u8, u8)| {
        let (key, by_name) = (u64::from(bits % 4), bits % 4 != 0 && bits % 8 >= 4);
        PendingCall {
            signature: u64::from(signature % 8) + if by_name { 100 * key } else { 0 },
            by_pairs: 0,
            key,
            by_name,
            age: Age::New,
            kind: PendingKind::TakesZeros,
            memory: u32::from(bits / 8 % 3),
            stays_behind: bits / 8 % 3 != 0 && bits >= 128,
        }
    };
    let mut ranks: Vec<Rank> = input
        .ranks
        .iter()
        .map(|(calls, calls_per_round)| Rank {
            future: calls.iter().take(40).map(call).collect(),
            waiting: Vec::new(),
            calls_per_round: usize::from(calls_per_round % 4) + 1,
            done: Vec::new(),
        })
        .collect();
    let calls: usize = ranks.iter().map(|rank| rank.future.len()).sum();
    let mut ages = input.ages.iter();
    for _round in 0..=2 * calls {
        ranks.iter_mut().for_each(Rank::submit);
        if ranks.iter().all(|rank| rank.waiting.is_empty() && rank.future.is_empty()) {
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
        // The calls that do not fit into a message follow in the next decision.
        match decision.truncated(limit) {
            Reconciliation::Run(order) => {
                assert!(!order.is_empty());
                ranks.iter_mut().for_each(|rank| rank.run(&order));
            }
            Reconciliation::Fail(positions) | Reconciliation::Contrary(positions) => {
                assert_eq!(positions.len(), ranks.len());
                assert!(positions.iter().any(Option::is_some), "something is given up");
                for (rank, position) in ranks.iter_mut().zip(positions) {
                    position.map(|position| rank.waiting.remove(position));
                }
            }
            Reconciliation::Refused(_) => panic!("no rank has refused a call"),
            Reconciliation::StandIn(_) => panic!("no rank has joined"),
            Reconciliation::ByPairs(_) => panic!("no call has that form"),
            Reconciliation::Wait(_) => {}
        }
    }
    assert!(ranks.iter().all(|rank| rank.waiting.is_empty() && rank.future.is_empty()), "it ends");
    assert!(ranks.windows(2).all(|pair| pair[0].done == pair[1].done), "all carry out the same");
});
