//! What the ranks wait in: creations of groups, and the end of the job, in which they may wait for each other.
//!
//! A creation that waits is published in the store, and looks there for what its members create. Ranks wait for each other
//! in a circle if each of them waits, on its main thread, for one that does not come: in the creation of another group, at
//! the end of the job, or in a call. None of them will ever go on. All these groups then fail on all their members, which
//! go on with the next generation.
//!
//! Thread rule: any thread; one for a [`Running`].

use std::any::Any;
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::store::{LOOK, Store};
use super::wait_context::{WaitContext, with_limits};
use crate::codec::{decode, encode};
use crate::error::{Error, Result};
use crate::lock::lock;

/// How often a creation that waits looks at the others, and for a decision that ends it.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Members of a group at which it looks each time, and all ranks at which it looks: the store may have many clients.
const MEMBERS_A_LOOK: usize = 16;
const RANKS_A_LOOK: usize = 64;
/// Ranks in a message.
const MAX_SHOWN: usize = 16;

/// The calls of this process, as the creation of a group and a receive see them, which wait for other ranks, too.
pub trait Calls: Send + Sync {
    /// Tells the other ranks, when they ask, that this thread waits in `what`, until the result is dropped.
    fn wait_in(self: Arc<Self>, what: String) -> Box<dyn Any>;

    /// Lets calls of this rank's other groups notice that this rank waits. Called often.
    fn look(&self);

    /// The ranks of the job that wait, with all their threads, for a call of this rank; and the call, for messages.
    fn waiting_for_this_rank(&self) -> HashMap<usize, String>;

    /// These calls will not be made: the ranks that wait for them, and this one, have waited for each other.
    fn give_up(&self);

    /// Waits a while for the end of what the ranks exchange about such calls: then their errors come first.
    fn settle(&self);
}

/// A creation under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Creation {
    /// Of the group; 0 for the end of the job, which no conflict ends.
    pub hash: u64,
    /// Of the first group with this name and members, and the number among these.
    pub first: u64,
    pub generation: u64,
    /// The name and the members, for messages.
    pub text: String,
    /// World ranks.
    pub members: Vec<usize>,
    /// Whether the process's main thread waits in it: another thread may create more.
    pub on_main_thread: bool,
}

/// What the main thread of a rank waits in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum Wait {
    Creation(Creation),
    /// A call that the rank that looks has not made.
    Call(String),
}

/// Ranks that wait for each other, in order, and what they wait in.
type Conflict = Vec<(usize, Wait)>;

/// A rank that waits.
struct WaitingRank {
    rank: usize,
    wait: Wait,
    /// All its creations.
    creations: Vec<Creation>,
}

/// The creations of this process.
pub(super) struct Creations {
    rank: usize,
    running: Mutex<Vec<Creation>>,
    /// How many groups this process has made, by name and members.
    generations: Mutex<HashMap<u64, u64>>,
    /// Whether the store has what this process creates.
    is_published: AtomicBool,
}

/// A creation of this process, which ends on drop.
pub(super) struct Running<'a> {
    creations: &'a Creations,
    store: &'a dyn Store,
    pub creation: Creation,
    /// Those who waited for each other at the last look.
    last: RefCell<Conflict>,
}

impl Creations {
    /// None yet, on rank `rank` of the job.
    pub fn new(rank: usize) -> Creations {
        Creations {
            rank,
            running: Mutex::default(),
            generations: Mutex::default(),
            is_published: AtomicBool::new(false),
        }
    }

    /// Counts a group with this name and members.
    pub fn next_generation(&self, first: u64) -> u64 {
        let mut generations = lock(&self.generations);
        let generation = generations.entry(first).or_insert(0);
        *generation += 1;
        *generation
    }

    /// Starts a creation.
    pub fn start<'a>(&'a self, store: &'a dyn Store, creation: Creation) -> Running<'a> {
        lock(&self.running).push(creation.clone());
        Running { creations: self, store, creation, last: RefCell::default() }
    }

    fn own(&self) -> Vec<Creation> {
        lock(&self.running).clone()
    }

    fn key(rank: usize) -> String {
        format!("creating/{rank}")
    }
}

impl Running<'_> {
    fn conflict_key(hash: u64) -> String {
        format!("group/{hash:016x}/conflict")
    }

    /// Stores what this process creates, for the others. A store that does not answer is reported by a wait for a key.
    pub fn publish(&self) {
        let _published = with_limits("", Some(LOOK), None, &|| None, |ctx| self.store_own(ctx));
    }

    fn store_own(&self, ctx: &WaitContext<'_>) -> Result<()> {
        self.creations.is_published.store(true, Ordering::Relaxed);
        self.store.set(&Creations::key(self.creations.rank), &encode(&self.creations.own())?, ctx)
    }

    /// The conflict that ends this creation, if there is one. Looks into the store: not for every poll. `looks` counts.
    pub fn conflict(&self, looks: usize, calls: &dyn Calls) -> Option<Error> {
        let waiting = calls.waiting_for_this_rank();
        // A store that does not answer is reported by a wait for a key.
        let found = with_limits("", Some(LOOK), None, &|| None, |ctx| {
            if let Some(conflict) = self.stored_conflict(ctx)? {
                return Ok(Some(conflict));
            }
            self.store_own(ctx)?;
            if !self.creation.on_main_thread {
                return Ok(None);
            }
            let circle = circle(&self.waiters(looks, &waiting, ctx)?);
            // What the store has may be a moment old.
            let is_new = self.last.replace(circle.clone()) != circle;
            if circle.is_empty() || is_new {
                return Ok(None);
            }
            let hashes: BTreeSet<u64> = groups(&circle).map(|creation| creation.hash).collect();
            let keys: Vec<String> = hashes.into_iter().map(Self::conflict_key).collect();
            for key in &keys {
                // A creation of an earlier conflict ends as soon as its rank looks.
                if self.store.try_get(key, ctx)?.is_some() {
                    return Ok(None);
                }
            }
            keys.iter().try_for_each(|key| self.store.set(key, &encode(&circle)?, ctx))?;
            Ok(Some(circle))
        });
        let conflict = found.ok()??;
        self.skip(&conflict);
        if conflict.iter().any(|(rank, wait)| wait.creation().is_none() && waiting.contains_key(rank)) {
            calls.give_up();
            calls.settle();
        }
        Some(Error::Mismatch(describe(&conflict)))
    }

    /// After this creation has failed: whether the other members have given it up because this rank waited in a call, which
    /// has failed too. Then they go on with the next generation.
    pub fn was_given_up(&self) -> bool {
        let found = with_limits("", Some(LOOK), None, &|| None, |ctx| self.stored_conflict(ctx));
        let Ok(Some(conflict)) = found else { return false };
        self.skip(&conflict);
        conflict.iter().any(|(rank, wait)| *rank == self.creations.rank && wait.creation().is_none())
    }

    fn stored_conflict(&self, ctx: &WaitContext<'_>) -> Result<Option<Conflict>> {
        let bytes = self.store.try_get(&Self::conflict_key(self.creation.hash), ctx)?;
        bytes.map(|bytes| decode(&bytes)).transpose()
    }

    /// This rank will not create the groups of a conflict any more.
    fn skip(&self, conflict: &Conflict) {
        let mut generations = lock(&self.creations.generations);
        for creation in groups(conflict).filter(|creation| creation.members.contains(&self.creations.rank)) {
            let generation = generations.entry(creation.first).or_insert(0);
            *generation = creation.generation.max(*generation);
        }
    }

    /// This rank, and the ranks for which it waits, directly or by others.
    fn waiters(&self, looks: usize, calls: &HashMap<usize, String>, ctx: &WaitContext<'_>) -> Result<Vec<WaitingRank>> {
        let own = Wait::Creation(self.creation.clone());
        let mut waiters = vec![WaitingRank { rank: self.creations.rank, wait: own, creations: self.creations.own() }];
        let mut seen = HashSet::from([self.creations.rank]);
        let mut index = 0;
        while let Some(WaitingRank { rank, wait, .. }) = waiters.get(index) {
            index += 1;
            let members = wait.creation().map_or(&[][..], |creation| &creation.members);
            let after = members.iter().position(|member| member == rank).map_or(0, |position| position + 1);
            let first = after + looks * MEMBERS_A_LOOK;
            let others = (0..MEMBERS_A_LOOK.min(members.len())).map(|step| members[(first + step) % members.len()]);
            for member in others.collect::<Vec<_>>() {
                if seen.len() > RANKS_A_LOOK || !seen.insert(member) {
                    continue;
                }
                let bytes = self.store.try_get(&Creations::key(member), ctx)?;
                let creations = bytes.map_or(Ok(Vec::new()), |bytes| decode::<Vec<Creation>>(&bytes))?;
                let on_main_thread = creations.iter().find(|creation| creation.on_main_thread).cloned();
                let wait = calls.get(&member).cloned().map(Wait::Call).or(on_main_thread.map(Wait::Creation));
                waiters.extend(wait.map(|wait| WaitingRank { rank: member, wait, creations }));
            }
        }
        Ok(waiters)
    }
}

impl Wait {
    fn creation(&self) -> Option<&Creation> {
        match self {
            Wait::Creation(creation) => Some(creation),
            Wait::Call(_) => None,
        }
    }
}

/// The groups that fail.
fn groups(conflict: &Conflict) -> impl Iterator<Item = &Creation> {
    conflict.iter().filter_map(|(_, wait)| wait.creation()).filter(|creation| creation.hash != 0)
}

/// The ranks that wait for the first of `waiters`, and it for them, directly or by others; in order.
fn circle(waiters: &[WaitingRank]) -> Conflict {
    let waits_for = |from: usize, to: usize| match &waiters[from].wait {
        Wait::Creation(creation) => {
            let WaitingRank { rank, creations, .. } = &waiters[to];
            creation.members.contains(rank) && creations.iter().all(|other| other.hash != creation.hash)
        }
        Wait::Call(_) => to == 0,
    };
    let all_by = |step: &dyn Fn(usize, usize) -> bool| {
        let mut found = vec![0];
        let mut index = 0;
        while let Some(&from) = found.get(index) {
            let more = (0..waiters.len()).filter(|&to| !found.contains(&to) && step(from, to));
            found.extend(more.collect::<Vec<_>>());
            index += 1;
        }
        found
    };
    let (before, after) = (all_by(&|to, from| waits_for(from, to)), all_by(&waits_for));
    let both = before.into_iter().filter(|index| after.contains(index));
    let mut circle: Conflict = both.map(|index| (waiters[index].rank, waiters[index].wait.clone())).collect();
    circle.sort_by_key(|(rank, _)| *rank);
    if circle.len() > 1 { circle } else { Vec::new() }
}

fn describe(conflict: &Conflict) -> String {
    let text = |(rank, wait): &(usize, Wait)| match wait {
        Wait::Creation(creation) => format!("\n  rank {rank}: {}", creation.text),
        Wait::Call(text) => format!("\n  rank {rank}: {text}"),
    };
    let shown: String = conflict.iter().take(MAX_SHOWN).map(text).collect();
    let more = conflict.len().saturating_sub(MAX_SHOWN);
    let more = if more == 0 { String::new() } else { format!("\n  and {more} more ranks") };
    format!(
        "ranks wait for each other in the creation of different groups, or in calls, and none was created; members create \
         groups with the same name and ranks, and make calls, in the same order:{shown}{more}"
    )
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut running = lock(&self.creations.running);
        running.retain(|creation| creation.hash != self.creation.hash);
        let left = running.clone();
        drop(running);
        if !self.creations.is_published.load(Ordering::Relaxed) {
            return;
        }
        // A store that is gone needs no cleaning.
        let key = Creations::key(self.creations.rank);
        let _published = with_limits("", Some(LOOK), None, &|| None, |ctx| -> Result<()> {
            if left.is_empty() {
                self.creations.is_published.store(false, Ordering::Relaxed);
                return self.store.delete(&key, ctx);
            }
            self.store.set(&key, &encode(&left)?, ctx)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::store::MemoryStore;
    use super::*;

    fn creation(hash: u64, members: &[usize], on_main_thread: bool) -> Creation {
        let text = format!("group '{hash}' of ranks {members:?}");
        Creation { hash, first: hash, generation: 1, text, members: members.to_vec(), on_main_thread }
    }

    /// The ranks that wait for calls, and these calls; and whether they will not be made.
    #[derive(Default)]
    struct Waiting(HashMap<usize, String>, AtomicBool);

    impl Calls for Waiting {
        fn wait_in(self: Arc<Self>, _what: String) -> Box<dyn Any> {
            Box::new(())
        }

        fn look(&self) {}

        fn waiting_for_this_rank(&self) -> HashMap<usize, String> {
            self.0.clone()
        }

        fn give_up(&self) {
            self.1.store(true, Ordering::Relaxed);
        }

        fn settle(&self) {}
    }

    fn look(running: &Running<'_>, looks: usize) -> Option<Error> {
        running.conflict(looks, &Waiting::default())
    }

    #[test]
    fn ranks_that_wait_for_each_other_learn_both_groups() {
        let store = MemoryStore::default();
        let ranks: Vec<Creations> = (0..3).map(Creations::new).collect();
        let [zero, one] =
            [ranks[0].start(&store, creation(7, &[0, 1, 2], true)), ranks[1].start(&store, creation(8, &[1, 0], true))];
        assert_eq!(look(&zero, 0), None, "rank 1 has published nothing yet");
        assert_eq!(look(&one, 0), None, "the first look");
        let Some(Error::Mismatch(text)) = look(&one, 1) else { panic!("no conflict") };
        assert!(
            text.ends_with("\n  rank 0: group '7' of ranks [0, 1, 2]\n  rank 1: group '8' of ranks [1, 0]"),
            "{text}"
        );
        assert_eq!(look(&zero, 1), Some(Error::Mismatch(text.clone())));
        let late = ranks[2].start(&store, creation(7, &[0, 1, 2], true));
        assert_eq!(look(&late, 0), Some(Error::Mismatch(text)), "a member that comes later");
        assert_eq!(ranks[0].next_generation(8), 2, "the first one is over for this rank too");
        drop((zero, one, late));
        assert_eq!(store.value("creating/0"), None);
    }

    #[test]
    fn other_threads_may_create_more() {
        let store = MemoryStore::default();
        let ranks: Vec<Creations> = (0..2).map(Creations::new).collect();
        for (first, second, comes) in [(false, true, false), (true, false, false), (true, true, true)] {
            let zero = ranks[0].start(&store, creation(7, &[0, 1], first));
            let one = ranks[1].start(&store, creation(8, &[0, 1], second));
            let more = comes.then(|| ranks[1].start(&store, creation(7, &[0, 1], false)));
            for looks in 0..3 {
                assert_eq!((look(&zero, looks), look(&one, looks)), (None, None));
            }
            drop((zero, one, more));
        }
    }
    /// Creations by rank, each on the main thread. Returns whose a conflict ends, after three looks of all; 10 is added if the
    /// calls that wait for it, pairs of ranks, end too.
    fn ended(creations: &[(u64, &[usize])], calls: &[(usize, usize)]) -> Vec<usize> {
        let store = MemoryStore::default();
        let ranks: Vec<Creations> = (0..creations.len()).map(Creations::new).collect();
        let mut running = Vec::new();
        for (rank, &(hash, members)) in ranks.iter().zip(creations) {
            running.push((!members.is_empty()).then(|| rank.start(&store, creation(hash, members, true))));
        }
        let mut ended = Vec::new();
        for looks in 0..3 {
            for (rank, running) in running.iter().enumerate().filter_map(|(rank, each)| Some((rank, each.as_ref()?))) {
                let waiting = calls.iter().filter(|(_, callee)| *callee == rank);
                let calls = waiting.map(|(caller, _)| (*caller, format!("a call of rank {caller}")));
                let calls = Waiting(calls.collect(), AtomicBool::default());
                if let Some(Error::Mismatch(text)) = running.conflict(looks, &calls) {
                    assert_eq!(
                        calls.1.load(Ordering::Relaxed),
                        calls.0.values().any(|call| text.contains(call)),
                        "{text}"
                    );
                    ended.push(if calls.1.load(Ordering::Relaxed) { 10 + rank } else { rank });
                }
            }
        }
        ended.sort_unstable();
        ended.dedup();
        ended
    }

    #[test]
    fn circles_of_any_length_end_and_nobody_else() {
        assert_eq!(ended(&[(7, &[0, 1]), (8, &[1, 2]), (9, &[2, 0])], &[]), [0, 1, 2]);
        assert_eq!(ended(&[(7, &[0, 1, 2]), (8, &[0, 1, 2]), (9, &[0, 1, 2])], &[]), [0, 1, 2], "three names");
        assert_eq!(ended(&[(7, &[0, 1]), (8, &[0, 1]), (9, &[2, 0])], &[]), [0, 1], "rank 0 may come to rank 2 later");
        assert_eq!(ended(&[(7, &[0, 1]), (8, &[1, 2]), (8, &[1, 2])], &[]), [0; 0], "rank 1 comes later");
        assert_eq!(ended(&[(7, &[0, 1]), (8, &[1, 2]), (9, &[])], &[]), [0; 0], "rank 2 is slow");
    }

    #[test]
    fn a_rank_whose_call_has_failed_makes_the_next_generation() {
        let store = MemoryStore::default();
        let ranks: Vec<Creations> = (0..2).map(Creations::new).collect();
        let one = ranks[1].start(&store, creation(8, &[0, 1], true));
        let calls = Waiting(HashMap::from([(0, "a call".to_owned())]), AtomicBool::default());
        let found = (0..2).find_map(|looks| one.conflict(looks, &calls));
        assert!(found.is_some() && !one.was_given_up());
        let zero = ranks[0].start(&store, creation(8, &[0, 1], true));
        assert!(zero.was_given_up());
        assert!(ranks.iter().all(|rank| rank.next_generation(8) == 2));
    }

    #[test]
    fn a_rank_in_a_call_is_part_of_a_circle() {
        assert_eq!(ended(&[(7, &[]), (8, &[0, 1])], &[(0, 1)]), [11]);
        assert_eq!(ended(&[(7, &[]), (8, &[1, 2]), (9, &[2, 0])], &[(0, 1)]), [2, 11]);
        assert_eq!(
            ended(&[(7, &[0, 1]), (8, &[0, 1]), (9, &[])], &[(2, 0), (2, 1)]),
            [0, 1],
            "the call may come later"
        );
        assert_eq!(ended(&[(7, &[]), (8, &[1, 2]), (9, &[])], &[(0, 1)]), [0; 0], "rank 2 is slow");
    }
}
