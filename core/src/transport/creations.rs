//! What the ranks create: groups of which each waits for a rank that waits in the creation of another one.
//!
//! A creation that waits is published in the store, and looks there for what its members create. If a member waits for
//! this rank in a creation that this rank does not make, and does not make this one, and both wait on their main threads,
//! neither will ever come. Both groups then fail on all their members, which go on with the next generation.
//!
//! Thread rule: any thread.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::store::{LOOK, Store};
use super::wait_context::with_limits;
use crate::codec::{decode, encode};
use crate::error::{Error, Result};
use crate::lock::lock;

/// How often a creation that waits looks at the others, and for a decision that ends it.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Members at which it looks each time: the store may have many clients.
const MEMBERS_A_LOOK: usize = 16;

/// A creation under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Creation {
    /// Of the group.
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

/// Two creations that wait for each other: by whom, and what.
type Conflict = [(usize, Creation); 2];

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
        Running { creations: self, store, creation }
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

    /// The conflict that ends this creation, if there is one. Looks into the store: not for every poll. `looks` counts.
    pub fn conflict(&self, looks: usize) -> Option<Error> {
        // A store that does not answer is reported by a wait for a key.
        let found = with_limits("", Some(LOOK), None, &|| None, |ctx| {
            if let Some(bytes) = self.store.try_get(&Self::conflict_key(self.creation.hash), ctx)? {
                return decode::<Conflict>(&bytes).map(Some);
            }
            self.creations.is_published.store(true, Ordering::Relaxed);
            self.store.set(&Creations::key(self.creations.rank), &encode(&self.creations.own())?, ctx)?;
            let members = &self.creation.members;
            let me = members.iter().position(|&member| member == self.creations.rank).unwrap_or(0);
            for step in 0..MEMBERS_A_LOOK.min(members.len() - 1) {
                let member = members[(me + 1 + (looks * MEMBERS_A_LOOK + step) % (members.len() - 1)) % members.len()];
                let Some(bytes) = self.store.try_get(&Creations::key(member), ctx)? else { continue };
                if let Some(conflict) = self.conflict_with(member, &decode::<Vec<Creation>>(&bytes)?) {
                    // A creation of an earlier conflict ends as soon as its rank looks.
                    let ends = |creation: &Creation| {
                        Ok::<_, Error>(self.store.try_get(&Self::conflict_key(creation.hash), ctx)?.is_some())
                    };
                    if ends(&conflict[0].1)? || ends(&conflict[1].1)? {
                        continue;
                    }
                    for (_, creation) in &conflict {
                        self.store.set(&Self::conflict_key(creation.hash), &encode(&conflict)?, ctx)?;
                    }
                    return Ok(Some(conflict));
                }
            }
            Ok(None)
        });
        let conflict = found.ok()??;
        let mut generations = lock(&self.creations.generations);
        for (_, creation) in conflict.iter().filter(|(_, creation)| creation.members.contains(&self.creations.rank)) {
            // This rank will not create it any more.
            let generation = generations.entry(creation.first).or_insert(0);
            *generation = creation.generation.max(*generation);
        }
        let texts = conflict.iter().map(|(rank, creation)| format!("\n  rank {rank}: {}", creation.text));
        Some(Error::Mismatch(format!(
            "ranks wait for each other in the creation of different groups, and none was created; members create groups with \
             the same name and ranks, in the same order:{}",
            texts.collect::<String>()
        )))
    }

    fn conflict_with(&self, member: usize, theirs: &[Creation]) -> Option<Conflict> {
        let own = self.creations.own();
        let waits_for_this_rank = |other: &&Creation| {
            other.on_main_thread
                && other.members.contains(&self.creations.rank)
                && own.iter().all(|own| own.hash != other.hash)
        };
        let comes = theirs.iter().any(|other| other.hash == self.creation.hash);
        let other = theirs.iter().find(waits_for_this_rank).filter(|_| self.creation.on_main_thread && !comes)?;
        let mut conflict = [(self.creations.rank, self.creation.clone()), (member, other.clone())];
        conflict.sort_by_key(|(rank, _)| *rank);
        Some(conflict)
    }
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

    #[test]
    fn ranks_that_wait_for_each_other_learn_both_groups() {
        let store = MemoryStore::default();
        let ranks: Vec<Creations> = (0..3).map(Creations::new).collect();
        let [zero, one] =
            [ranks[0].start(&store, creation(7, &[0, 1, 2], true)), ranks[1].start(&store, creation(8, &[1, 0], true))];
        assert_eq!(zero.conflict(0), None, "rank 1 has published nothing yet");
        let Some(Error::Mismatch(text)) = one.conflict(0) else { panic!("no conflict") };
        assert!(
            text.ends_with("\n  rank 0: group '7' of ranks [0, 1, 2]\n  rank 1: group '8' of ranks [1, 0]"),
            "{text}"
        );
        assert_eq!(zero.conflict(1), Some(Error::Mismatch(text.clone())));
        let late = ranks[2].start(&store, creation(7, &[0, 1, 2], true));
        assert_eq!(late.conflict(0), Some(Error::Mismatch(text)), "a member that comes later");
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
                assert_eq!((zero.conflict(looks), one.conflict(looks)), (None, None));
            }
            drop((zero, one, more));
        }
    }
}
