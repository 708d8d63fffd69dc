//! The ranks of a job: who they are, and how all of them agree on something.
//!
//! Thread rule: any thread; collective functions run one at a time, in the same order on all ranks.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh3::xxh3_64;

use super::bootstrap::{Bootstrap, Members, encode_record, gather_records};
use super::group_agreement::{Proposals, Stored, stored};
use super::process::ProcessLiveness;
use super::rank_info::{RankInfo, exchange_rank_info};
use super::shm_region::Liveness;
use super::wait_context::{WaitContext, with_limits};
use crate::codec::decode;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::signals;
use crate::topology::Topology;

/// Grace period for messages from an exited process.
const DRAIN_GRACE: Duration = Duration::from_secs(1);

/// The ranks of a job, as seen by one of them.
pub struct Ranks {
    pub(super) bootstrap: Arc<dyn Bootstrap>,
    /// The positions of the ranks.
    pub topology: Arc<Topology>,
    /// The display names of the ranks.
    pub names: Arc<[String]>,
    /// Host and process of every rank.
    pub rank_info: Arc<[RankInfo]>,
    /// Liveness of the other processes of this host.
    pub(super) local_processes: Arc<ProcessLiveness>,
    /// A random number known only to the ranks of this job.
    pub key: u128,
    /// Settings of this process.
    pub config: Config,
}

impl Ranks {
    /// Gathers the information of all ranks. Collective. Returns also whether this rank can watch the processes of its
    /// host: a failure is that of all ranks, who have to agree on it.
    pub(super) fn gather(bootstrap: Arc<dyn Bootstrap>, config: &Config) -> Result<(Ranks, Result<()>)> {
        let found = with_limits("init_mpi", config.timeout, config.stall_warn, &|| None, |wait_ctx| {
            exchange_rank_info(&*bootstrap, &config.shm_dir, wait_ctx)
        });
        let (rank_info, key) = found.inspect_err(|_| bootstrap.leave())?;
        let rank = bootstrap.rank();
        let host_keys: Vec<_> = rank_info.iter().map(RankInfo::host_key).collect();
        let topology = Topology::new(rank, &host_keys);
        let names = rank_info.iter().enumerate().map(|(rank, info)| format!("rank {rank} on {}", info.host)).collect();
        let pid = |&other: &usize| {
            let info = &rank_info[other];
            (other != rank && info.pid_namespace == rank_info[rank].pid_namespace).then_some(info.pid)
        };
        let liveness = ProcessLiveness::new(&topology.local_ranks().iter().map(pid).collect::<Vec<_>>()).map(Arc::new);
        let ranks = Ranks {
            bootstrap,
            topology: Arc::new(topology),
            names,
            local_processes: liveness.clone().unwrap_or_default(),
            rank_info: rank_info.into(),
            key,
            config: config.clone(),
        };
        Ok((ranks, liveness.map(drop)))
    }

    /// Runs `work` with the deadline of the settings. Also aborts it when a process of this host exits, or `lost`
    /// describes a lost rank. `what` names the work in messages.
    pub(super) fn with_deadline<T>(
        &self,
        what: &str,
        lost: impl Fn() -> Option<String>,
        work: impl FnOnce(&WaitContext<'_>) -> Result<T>,
    ) -> Result<T> {
        let seen = Cell::new(None);
        let abort_reason = || {
            if signals::interrupted() {
                return Some(Error::PeerLost(format!("{what} was interrupted by a signal")));
            }
            let ended = |&rank: &usize| self.describe_end(rank);
            let description = self.topology.local_ranks().iter().find_map(ended).or_else(&lost)?;
            // Messages that the process sent before it exited may still arrive.
            let since: Instant = seen.get().unwrap_or_else(Instant::now);
            seen.set(Some(since));
            (since.elapsed() > DRAIN_GRACE).then(|| Error::PeerLost(format!("{description}, in {what}")))
        };
        with_limits(what, self.config.timeout, self.config.stall_warn, &abort_reason, work)
    }

    /// The ranks, for the start of a network.
    pub(super) fn members(&self) -> Members<'_> {
        Members { topology: &self.topology, names: &self.names, processes: &self.local_processes, config: &self.config }
    }

    /// Liveness of the other processes of this host, by local rank.
    pub fn local_processes(&self) -> Arc<ProcessLiveness> {
        Arc::clone(&self.local_processes)
    }

    /// How the process of `rank` has ended, if it is known to have ended. Only for ranks of this host.
    pub(super) fn describe_end(&self, rank: usize) -> Option<String> {
        let local = self.topology.local_rank_of(rank)?;
        Some(format!("{} {}", self.names[rank], self.local_processes.lost(local)?))
    }

    /// As [`Ranks::agree`] without values: one all-reduce, if the ranks agree.
    ///
    /// # Errors
    /// As for [`Ranks::agree`].
    pub(super) fn agree_on(&self, shape: &str, outcome: Result<()>, wait_ctx: &WaitContext<'_>) -> Result<()> {
        match self.settle(shape, outcome.is_err(), 0, wait_ctx)? {
            Some(_) => Ok(()),
            None => self.explain(shape, outcome, wait_ctx).map(drop),
        }
    }

    /// Gathers this rank's outcome from all ranks. Returns all outcomes if they are `Ok` and the shapes are equal.
    /// Collective.
    ///
    /// # Errors
    /// Those of [`Bootstrap::allgather`] and [`agreed`].
    pub(super) fn agree<T: Serialize + DeserializeOwned>(
        &self,
        shape: &str,
        outcome: Result<T>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Vec<T>> {
        let record = outcome.as_ref().map_or(Vec::new(), encode_record);
        match self.settle(shape, outcome.is_err(), record.len(), wait_ctx)? {
            Some(longest) => {
                let records = self.bootstrap.allgather(&record, longest, wait_ctx)?;
                records.iter().map(|record| decode(record)).collect()
            }
            None => self.explain(shape, outcome, wait_ctx),
        }
    }

    /// The length of the longest record if no rank has failed and the shapes are equal; the same on all ranks.
    fn settle(&self, shape: &str, failed: bool, len: usize, wait_ctx: &WaitContext<'_>) -> Result<Option<usize>> {
        let hash = xxh3_64(shape.as_bytes());
        let mine = [u64::from(failed), hash, !hash, len as u64];
        let [failed, largest, smallest, longest] = self.bootstrap.allreduce_max(mine, wait_ctx)?;
        Ok((failed == 0 && largest == !smallest).then(|| usize::try_from(longest).unwrap_or(usize::MAX)))
    }

    /// Gathers the shapes and errors, which differ.
    fn explain<T: Serialize + DeserializeOwned>(
        &self,
        shape: &str,
        outcome: Result<T>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Vec<T>> {
        let records = gather_records(&*self.bootstrap, &proposal(shape, outcome), wait_ctx)?;
        agreed(&records, |rank| &self.names[rank])
    }
}

/// The record by which a rank proposes `shape` and shares its outcome.
pub(super) fn proposal<T: Serialize>(shape: &str, outcome: Result<T>) -> Vec<u8> {
    encode_record(&(shape, stored(outcome)))
}

/// The outcomes in the ranks' `records`, by [`proposal`], whose ranks have the names `name`.
///
/// # Errors
/// Those of [`Proposals::verdict`].
pub(super) fn agreed<'a, T: DeserializeOwned>(records: &[Vec<u8>], name: impl Fn(usize) -> &'a str) -> Result<Vec<T>> {
    let mut values = Vec::with_capacity(records.len());
    let mut all: Option<Proposals> = None;
    for (rank, bytes) in records.iter().enumerate() {
        let (shape, outcome): (String, Stored<T>) = decode(bytes)?;
        let own = Proposals::new(rank, &shape, &outcome);
        all = Some(match all {
            Some(others) => others.and(own),
            None => own,
        });
        values.extend(outcome.ok());
    }
    let name = |rank: usize| name(rank).to_owned();
    all.map_or(Ok(()), |all| all.verdict((records.len() > 1).then_some(&name)))?;
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_agree_or_get_the_same_error() {
        let agree = |records: &[Vec<u8>]| agreed::<i32>(records, |rank| ["rank 0", "rank 1"][rank]);
        let good = |shape: &str, value: i32| proposal(shape, Ok(value));
        assert_eq!(agree(&[good("a", 4), good("a", 5)]), Ok(vec![4, 5]));
        assert!(
            matches!(agree(&[good("a", 4), good("b", 5)]), Err(Error::Mismatch(text)) if text.contains("rank 1: b"))
        );
        let full = proposal::<i32>("a", Err(Error::System("full".into())));
        assert_eq!(agree(&[good("a", 4), full.clone()]), Err(Error::System("rank 1: full".into())));
        assert_eq!(agree(&[full]), Err(Error::System("full".into())), "the only rank has no name");
        assert!(matches!(agree(&[proposal(&"x".repeat(3000), Ok(0))]), Err(Error::Internal(_))));
    }
}
