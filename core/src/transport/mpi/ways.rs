//! How the processes of a job with a store get a running MPI: which ways each has, and which all of them take. Pure.

use serde::{Deserialize, Serialize};

use super::launcher;
use crate::error::{Error, Result};

/// The ways of one process, which its ranks exchange.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ways {
    /// MPI runs with this rank and size. The name of the job that has started it; empty: somebody else has.
    running: Option<String>,
    /// The launcher of this process knows it by this rank and size, and starts MPI.
    launcher: bool,
    /// Why it cannot be its own process manager, if so.
    refusal: Option<String>,
}

/// The way of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// MPI runs already.
    Running {
        /// Somebody else than dl_comm has started it.
        by_others: bool,
    },
    /// The launcher's.
    Launcher,
    /// Every process is its own process manager.
    Store,
}

/// What [`Ways::find`] has to know about MPI in this process.
pub struct Library<'a> {
    /// The text of its version.
    pub version: &'a str,
    /// Rank and size of this process, while it runs.
    pub running: Option<(usize, usize)>,
    /// Whether it has ended.
    pub is_finalized: bool,
    /// The name of the job in which dl_comm has started it.
    pub started_by: Option<String>,
}

impl Ways {
    /// The ways of the process that is rank and size `me`. `lookup` reads the environment.
    ///
    /// # Errors
    /// [`Error::Network`] if MPI runs with another rank or size; [`Error::State`] after its end.
    pub fn find(
        me: (usize, usize),
        library: &Library<'_>,
        lookup: impl Fn(&str) -> Option<String> + Copy,
    ) -> Result<Ways> {
        let (rank, size) = me;
        if library.is_finalized {
            return Err(Error::State(
                "MPI is finalized already and cannot be started again in this process, but the ranks are on several hosts"
                    .into(),
            ));
        }
        if let Some((other, others)) = library.running.filter(|found| *found != me) {
            return Err(Error::Network(format!(
                "MPI runs in this process already, as rank {other} of {others}, and cannot be rank {rank} of {size}: on \
                 several hosts a process has the same rank in all its jobs; start new processes"
            )));
        }
        let refusal = library.version.contains("Open MPI").then(|| {
            "the ranks are on several hosts, and dl_comm was built with Open MPI, which only its own launcher can start: \
             use Open MPI's mpiexec, or install dl_comm with MPICH"
                .to_owned()
        });
        Ok(Ways {
            running: library.running.map(|_| library.started_by.clone().unwrap_or_default()),
            launcher: launcher::starts_as(me, library.version, lookup),
            refusal,
        })
    }

    /// Whether this process may have to be its own process manager.
    pub fn may_use_store(&self) -> bool {
        self.running.is_none() && self.refusal.is_none()
    }

    fn describe(&self) -> &'static str {
        match self.running.as_deref() {
            None => "has no MPI running",
            Some("") => "has an MPI that another library has started",
            Some(_) => "has MPI running from an earlier job",
        }
    }

    /// The way that the ranks with these ways take; the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Network`] if there is none.
    pub fn choose(all: &[Ways]) -> Result<Way> {
        let Some(first) = all.first() else { return Err(Error::Internal("no rank has a way to start MPI".into())) };
        if let Some((rank, other)) = all.iter().enumerate().find(|(_, ways)| ways.running != first.running) {
            let (mine, theirs) = (first.describe(), other.describe());
            let another = if mine == theirs { ", another one" } else { "" };
            return Err(Error::Network(format!(
                "rank {rank} {theirs}{another}, rank 0 {mine}: ranks on several hosts use one MPI, which ranks cannot join \
                 later; start all processes again"
            )));
        }
        if let Some(job) = &first.running {
            return Ok(Way::Running { by_others: job.is_empty() });
        }
        if all.iter().all(|ways| ways.launcher) {
            return Ok(Way::Launcher);
        }
        match all.iter().enumerate().find_map(|(rank, ways)| Some((rank, ways.refusal.as_ref()?))) {
            None => Ok(Way::Store),
            Some((rank, why)) => Err(Error::Network(format!("rank {rank}: {why}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MPICH: &str = "MPICH Version: 5.0.2";

    fn find(library: &Library<'_>, variables: &[(&str, &str)]) -> Result<Ways> {
        let set = |name: &str| variables.iter().find(|entry| entry.0 == name).map(|entry| entry.1.to_owned());
        Ways::find((1, 4), library, set)
    }

    fn library(running: Option<(usize, usize)>, job: Option<&str>) -> Library<'static> {
        Library { version: MPICH, running, is_finalized: false, started_by: job.map(str::to_owned) }
    }

    #[test]
    fn mpi_is_used_again_by_the_same_ranks_only() {
        let running = |job| find(&library(Some((1, 4)), job), &[]).unwrap();
        let none = find(&library(None, None), &[]).unwrap();
        assert!(none.may_use_store() && !running(Some("job")).may_use_store());
        for other in [(0, 4), (1, 2)] {
            let error = find(&library(Some(other), Some("job")), &[]).unwrap_err();
            assert!(error.to_string().contains("start new processes"), "{error}");
        }
        let ended = Library { is_finalized: true, ..library(None, None) };
        assert!(matches!(find(&ended, &[]), Err(Error::State(_))));

        let chosen = |all: &[&Ways]| Ways::choose(&all.iter().copied().cloned().collect::<Vec<_>>());
        let (ours, later, theirs) = (running(Some("job")), running(Some("later")), running(None));
        assert_eq!(chosen(&[&ours, &ours]), Ok(Way::Running { by_others: false }));
        assert_eq!(chosen(&[&theirs, &theirs]), Ok(Way::Running { by_others: true }));
        for (all, text) in [
            ([&none, &ours], "rank 1 has MPI running from an earlier job, rank 0 has no MPI running: "),
            ([&ours, &none], "rank 1 has no MPI running, rank 0 has MPI running from an earlier job: "),
            ([&ours, &later], "rank 1 has MPI running from an earlier job, another one, rank 0 has"),
            ([&ours, &theirs], "rank 1 has an MPI that another library has started, rank 0 has MPI"),
        ] {
            let error = chosen(&all).unwrap_err().to_string();
            assert!(error.starts_with(text) && !error.contains('"'), "{error}");
        }
    }

    #[test]
    fn the_launcher_is_used_if_it_can_start_all_ranks() {
        let under =
            |variables: &[(&str, &str)], version| find(&Library { version, ..library(None, None) }, variables).unwrap();
        let (rank, size) = (("PMI_RANK", "1"), ("PMI_SIZE", "4"));
        let (launched, alone) = (under(&[rank, size], MPICH), under(&[], MPICH));
        let chosen = |all: [&Ways; 2]| Ways::choose(&all.map(Clone::clone));
        assert_eq!(chosen([&launched, &launched]), Ok(Way::Launcher));
        assert_eq!(chosen([&launched, &alone]), Ok(Way::Store));
        let open_mpi = "Open MPI v5.0.11";
        let launched = under(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")], open_mpi);
        assert_eq!(chosen([&launched, &launched]), Ok(Way::Launcher));
        let error = chosen([&launched, &under(&[], open_mpi)]).unwrap_err();
        assert!(matches!(error, Error::Network(text) if text.contains("Open MPI's mpiexec")));
    }
}
