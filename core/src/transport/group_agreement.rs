//! How the members of a group agree on it through the store: up a tree to the first member, and down again.
//!
//! Each member stores a record. The first member on a host combines the records of its host with those of the hosts
//! below it in a binomial tree over the hosts. So the first member of the group gets one record for all. It decides, and
//! stores the decision; the first member on each host passes it on with what only its host needs. No member waits for more
//! records than its host has members and the tree has levels, and a record does not grow with the number of members.
//!
//! Thread rule: any thread.

use serde::{Deserialize, Serialize};

use super::bootstrap::shortened;
use super::interval::Interval;
use super::store::{LOOK, Store, end_reading, missing};
use super::wait_context::{WaitContext, with_limits};
use crate::codec::{decode, encode};
use crate::error::{Error, Result};
use crate::topology::Topology;

/// What a member has for the others; combined, what they have for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Share {
    /// The offset of the host's control block, in the arena of the host's first member, which makes it.
    pub control: u64,
    /// The number of the group's first link, which the first member of the group takes.
    pub first_link: usize,
    /// Whether the members on the host can read each other's private memory.
    pub readable: bool,
}

/// An outcome that can be stored; the error is a code and a text.
pub(super) type Stored<T> = std::result::Result<T, (i32, String)>;

pub(super) fn stored<T>(outcome: Result<T>) -> Stored<T> {
    outcome.map_err(|error| (error.code(), shortened(error.detail())))
}

fn restored<T>(outcome: Stored<T>) -> Result<T> {
    outcome.map_err(|(code, text)| Error::from_code(code, text))
}

/// What some members propose.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Proposals {
    /// The lowest of the members, and its shape: what all must have in common.
    first: (usize, String),
    /// The lowest member with another shape, and that.
    other: Option<(usize, String)>,
    /// The lowest member with an error, and that.
    failed: Option<(usize, i32, String)>,
}

impl Proposals {
    /// That of member `rank`.
    pub fn new<T>(rank: usize, shape: &str, outcome: &Stored<T>) -> Proposals {
        let failed = outcome.as_ref().err().map(|(code, text)| (rank, *code, text.clone()));
        Proposals { first: (rank, shape.to_owned()), other: None, failed }
    }

    /// Combines those of some members with those of others.
    pub fn and(self, other: Proposals) -> Proposals {
        let (low, high) = if self.first.0 < other.first.0 { (self, other) } else { (other, self) };
        let different = if high.first.1 == low.first.1 { high.other } else { Some(high.first) };
        Proposals {
            first: low.first,
            other: low.other.into_iter().chain(different).min(),
            failed: low.failed.into_iter().chain(high.failed).min(),
        }
    }

    /// Whether all members agree and none has an error. `name` names a member if there are several.
    ///
    /// # Errors
    /// The error of the lowest member that has one; [`Error::Mismatch`] when the shapes differ.
    pub fn verdict(self, name: Option<&dyn Fn(usize) -> String>) -> Result<()> {
        if let Some((rank, code, text)) = self.failed {
            return Err(Error::from_code(code, name.map_or_else(String::new, |name| name(rank) + ": ") + &text));
        }
        match self.other {
            None => Ok(()),
            Some((rank, shape)) => {
                Err(Error::Mismatch(format!("  rank {}: {}\n  rank {rank}: {shape}", self.first.0, self.first.1)))
            }
        }
    }
}

/// The hosts whose records `host` combines with its own: its children in a binomial tree over `hosts` hosts.
fn children(host: usize, hosts: usize) -> impl Iterator<Item = usize> {
    let levels = if host == 0 { usize::BITS } else { host.trailing_zeros() };
    (0..levels).map(move |level| host + (1 << level)).take_while(move |&child| child < hosts)
}

/// What some members propose, and the share of this host if all its members have one.
type Gathered = (Proposals, Option<Share>);

/// One agreement of the members of a group, as seen by one of them.
pub(super) struct Agreement<'a> {
    pub store: &'a dyn Store,
    /// The start of all keys; used for one agreement only.
    pub prefix: String,
    /// The members, and their hosts.
    pub topology: &'a Topology,
    /// Names a member in messages.
    pub name: &'a dyn Fn(usize) -> String,
    /// How often this member looks for an early decision.
    pub looks: Interval,
}

impl Agreement<'_> {
    fn key(&self, of: &str, number: usize) -> String {
        format!("{}/{of}/{number}", self.prefix)
    }

    fn decision_key(&self) -> String {
        format!("{}/decision", self.prefix)
    }

    /// The error on which the first member has decided, if it has and if it is time to look for one: a member that waits
    /// asks this often, and the store may have many members.
    pub fn decided_error(&self) -> Option<Error> {
        if self.topology.hosts() == 1 {
            return None;
        }
        self.looks.run(|| {
            let bytes =
                with_limits("", Some(LOOK), None, &|| None, |ctx| self.store.try_get(&self.decision_key(), ctx));
            let decision: Stored<usize> = decode(&bytes.ok()??).ok()?;
            restored(decision).err()
        })
    }

    /// Combines the outcomes of all members, if they are `Ok` and the shapes are equal. Collective over the members.
    ///
    /// # Errors
    /// Those of [`Proposals::verdict`], equal on all members; those of the store, which name the missing members. An error
    /// that one member's wait had is reported to the others with its name.
    pub fn agree(&self, shape: &str, outcome: Result<Share>, wait_ctx: &WaitContext<'_>) -> Result<Share> {
        let (store, topology, me) = (self.store, self.topology, self.topology.rank());
        if topology.size() == 1 {
            return outcome;
        }
        let outcome = stored(outcome);
        store.set(&self.key("member", me), &encode(&(shape, &outcome))?, wait_ctx)?;
        let share = match topology.local_rank() {
            0 => self.lead(shape, outcome, wait_ctx),
            _ => self.wait_for("result", topology.host(), wait_ctx).and_then(restored),
        }?;
        // All have agreed: what goes wrong from here on must not look like a failure to this member only.
        let _removed = self.remove_read(wait_ctx);
        Ok(share)
    }

    /// Removes the keys that nobody reads after this member.
    fn remove_read(&self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let (store, topology, host) = (self.store, self.topology, self.topology.host());
        store.delete(&self.key("member", topology.rank()), wait_ctx)?;
        if topology.local_rank() != 0 {
            return end_reading(store, &self.key("result", host), topology.local_size() - 1, wait_ctx);
        }
        children(host, topology.hosts()).try_for_each(|child| store.delete(&self.key("host", child), wait_ctx))?;
        if host == 0 { Ok(()) } else { end_reading(store, &self.decision_key(), topology.hosts() - 1, wait_ctx) }
    }

    /// The part of the first member on a host: the share that it passes on to the others.
    fn lead(&self, shape: &str, outcome: Stored<Share>, wait_ctx: &WaitContext<'_>) -> Result<Share> {
        let (topology, host) = (self.topology, self.topology.host());
        let gathered = self.gather(shape, outcome, wait_ctx);
        let result = match host {
            0 => self.decide(gathered, wait_ctx),
            _ => self.report(shape, gathered, wait_ctx),
        };
        if topology.local_size() > 1 {
            self.store.set(&self.key("result", host), &encode(&stored(result.clone()))?, wait_ctx)?;
        }
        result
    }

    /// The part of the first member of the group: decides for all.
    fn decide(&self, gathered: Result<Gathered>, wait_ctx: &WaitContext<'_>) -> Result<Share> {
        let result = gathered.and_then(|(proposals, share)| {
            proposals.verdict(Some(self.name))?;
            share.ok_or_else(without_share)
        });
        if self.topology.hosts() > 1 {
            let decision = stored(result.clone().map(|share| share.first_link));
            self.store.set(&self.decision_key(), &encode(&decision)?, wait_ctx)?;
        }
        result
    }

    /// The part of the first member on another host: passes on what was gathered, and waits for the decision.
    fn report(&self, shape: &str, gathered: Result<Gathered>, wait_ctx: &WaitContext<'_>) -> Result<Share> {
        let (store, topology) = (self.store, self.topology);
        let failed = |error: &Error| Proposals::new::<()>(topology.rank(), shape, &stored(Err(error.clone())));
        let proposals = gathered.as_ref().map_or_else(failed, |(proposals, _)| proposals.clone());
        store.set(&self.key("host", topology.host()), &encode(&proposals)?, wait_ctx)?;
        let (_, share) = gathered?;
        let decision: Stored<usize> = decode(&store.wait_for(&self.decision_key(), wait_ctx, &|| self.missing())?)?;
        let first_link = restored(decision)?;
        share.map(|share| Share { first_link, ..share }).ok_or_else(without_share)
    }

    /// Combines the records of this host and of those below it. The share is that of this host, if all its members have one.
    fn gather(&self, shape: &str, outcome: Stored<Share>, wait_ctx: &WaitContext<'_>) -> Result<Gathered> {
        let topology = self.topology;
        let mut all = Proposals::new(topology.rank(), shape, &outcome);
        let mut share = outcome.ok();
        for &member in &topology.local_ranks()[1..] {
            let (shape, outcome): (String, Stored<Share>) = self.wait_for("member", member, wait_ctx)?;
            all = all.and(Proposals::new(member, &shape, &outcome));
            let readable = outcome.is_ok_and(|share| share.readable);
            share = share.map(|own| Share { readable: own.readable && readable, ..own });
        }
        for child in children(topology.host(), topology.hosts()) {
            all = all.and(self.wait_for("host", child, wait_ctx)?);
        }
        Ok((all, share))
    }

    fn wait_for<T: for<'de> Deserialize<'de>>(&self, of: &str, number: usize, wait_ctx: &WaitContext<'_>) -> Result<T> {
        decode(&self.store.wait_for(&self.key(of, number), wait_ctx, &|| self.missing())?)
    }

    /// Names the members that have not come.
    fn missing(&self) -> String {
        missing(self.store, self.topology.size(), |member| self.key("member", member), self.name)
    }
}

fn without_share() -> Error {
    Error::Internal("members agree without a share of their host".into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::super::creations::LOOK_EVERY;
    use super::super::store::MemoryStore;
    use super::*;

    #[test]
    fn every_host_has_one_parent() {
        for hosts in 1..70 {
            let mut found: Vec<usize> = (0..hosts).flat_map(|host| children(host, hosts)).collect();
            found.sort_unstable();
            assert_eq!(found, (1..hosts).collect::<Vec<_>>());
            let levels = hosts.next_power_of_two().ilog2() as usize;
            assert!((0..hosts).all(|host| children(host, hosts).count() <= levels));
        }
    }

    /// A store that counts what a member reads.
    struct Counted<'a>(&'a MemoryStore, AtomicUsize);

    impl Store for Counted<'_> {
        fn set(&self, key: &str, value: &[u8], wait_ctx: &WaitContext<'_>) -> Result<()> {
            assert!(value.len() < 200, "{key}: a record does not grow with the members");
            self.0.set(key, value, wait_ctx)
        }
        fn try_get(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<Option<Vec<u8>>> {
            self.0.try_get(key, wait_ctx)
        }
        fn wait_for(&self, key: &str, wait_ctx: &WaitContext<'_>, awaited: &dyn Fn() -> String) -> Result<Vec<u8>> {
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.wait_for(key, wait_ctx, awaited)
        }
        fn add(&self, key: &str, by: i64, wait_ctx: &WaitContext<'_>) -> Result<i64> {
            self.0.add(key, by, wait_ctx)
        }
        fn delete(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<()> {
            self.0.delete(key, wait_ctx)
        }
    }

    /// What the ranks of `hosts` (by rank) get, of which each proposes what `propose` returns. Ranks without a proposal
    /// do not come.
    fn run(
        hosts: &[usize],
        propose: impl Fn(usize) -> Option<(String, Result<Share>)> + Sync,
    ) -> Vec<Option<Result<Share>>> {
        let memory = MemoryStore::default();
        let member = |rank: usize| {
            let (shape, outcome) = propose(rank)?;
            let topology = Topology::new(rank, hosts);
            let store = Counted(&memory, AtomicUsize::new(0));
            let name = |rank: usize| format!("rank {rank}");
            let agreement = Agreement {
                store: &store,
                prefix: "g".into(),
                topology: &topology,
                name: &name,
                looks: Interval::new(LOOK_EVERY),
            };
            let lost = || agreement.decided_error();
            // Without the decision others would wait much longer than rank 0.
            let timeout = Duration::from_millis(if rank == 0 { 2_000 } else { 60_000 });
            let result = with_limits("it", Some(timeout), None, &lost, |ctx| agreement.agree(&shape, outcome, ctx));
            let levels = topology.hosts().next_power_of_two().ilog2() as usize;
            assert!(store.1.into_inner() <= topology.local_size() + levels);
            Some(result)
        };
        let member = &member;
        let results = thread::scope(|scope| {
            let ranks: Vec<_> = (0..hosts.len()).map(|rank| scope.spawn(move || member(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        if results.iter().all(|result| matches!(result, Some(Ok(_)))) {
            assert_eq!(memory.keys(), Vec::<String>::new());
        }
        results
    }

    fn share(rank: usize) -> Share {
        Share { control: 100 + rank as u64, first_link: if rank == 0 { 7 } else { 0 }, readable: rank != 3 }
    }

    /// Hosts by rank: one; several, interleaved; many.
    fn worlds() -> [Vec<usize>; 4] {
        [vec![0; 4], vec![0, 1, 0, 2, 1], (0..11).collect(), (0..40).map(|rank| rank / 3).collect()]
    }

    #[test]
    fn all_members_get_the_shares_of_their_host() {
        for hosts in worlds() {
            let results = run(&hosts, |rank| Some(("a".into(), Ok(share(rank)))));
            for (rank, result) in results.into_iter().enumerate() {
                let local: Vec<usize> = (0..hosts.len()).filter(|&other| hosts[other] == hosts[rank]).collect();
                let want = Share { control: 100 + local[0] as u64, first_link: 7, readable: !local.contains(&3) };
                assert_eq!(result, Some(Ok(want)), "rank {rank} of {hosts:?}");
            }
        }
    }

    #[test]
    fn all_members_get_the_same_error() {
        for hosts in worlds() {
            let shape = |rank: usize| if rank >= 2 { "b" } else { "a" }.to_owned();
            let results = run(&hosts, |rank| Some((shape(rank), Ok(share(rank)))));
            let want = Error::Mismatch("  rank 0: a\n  rank 2: b".into());
            assert!(results.iter().all(|result| *result == Some(Err(want.clone()))), "{results:?}");
            let full = || Err(Error::System("full".into()));
            let results = run(&hosts, |rank| Some((shape(rank), if rank % 2 == 1 { full() } else { Ok(share(rank)) })));
            let want = Error::System("rank 1: full".into());
            assert!(results.iter().all(|result| *result == Some(Err(want.clone()))), "{results:?}");
        }
    }

    #[test]
    fn missing_members_are_named_to_all_others() {
        for hosts in worlds() {
            let absent = [2, 3];
            let results = run(&hosts, |rank| (!absent.contains(&rank)).then(|| ("a".into(), Ok(share(rank)))));
            for (rank, result) in results.into_iter().enumerate().filter(|(rank, _)| !absent.contains(rank)) {
                let Some(Err(Error::Timeout(text))) = result else { panic!("rank {rank} of {hosts:?}: {result:?}") };
                assert!(text.ends_with("waiting for rank 2, rank 3"), "{text}");
            }
        }
    }
}
