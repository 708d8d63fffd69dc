//! Start and end of dl_comm in this process.
//!
//! Thread rule: any thread; collective functions that create teams run one at a time.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, Weak};

use super::group_creation::make_team;
use super::state::{
    CONTROL, Runtime, RuntimeState, STATE, check_fork, config, finalized, is_initialized, process_name, read, write,
};
use super::turn::Turn;
use super::{calls, memory, point_to_point};
use crate::config::{Config, RankSource, Rendezvous};
use crate::dump::{Dumper, SignalDumper};
use crate::error::{Error, Result};
use crate::exit_status::fail_at_exit;
use crate::fork;
use crate::group::{self, Group, ProcessGroups};
use crate::helper::{self, StartedBy};
use crate::log::log_line;
use crate::plugin::{Team, report_waited};
use crate::timeline;
use crate::topology::Topology;
use crate::transport::bootstrap::Bootstrap;
use crate::transport::job::Job;
use crate::transport::launcher;
use crate::transport::store::Store;
use crate::transport::store_bootstrap::{connect_by_address, connect_by_store};
use crate::variables;

/// Makes this process a rank: by the variables of plain processes if they are set and no launcher has started it, else
/// by the launcher's library. Does nothing if it already is one, and in a helper process of a rank. Collective.
///
/// # Errors
/// Those of [`Config::from_env`] and [`Job::start`]; [`Error::State`] after a launcher's job that was left.
pub fn start() -> Result<()> {
    if helper::refusal().is_some() {
        return Ok(());
    }
    let started_by = Cell::new(StartedBy::None);
    start_by(IfStarted::Keep, &started_by, |config| {
        let lookup = |name: &str| std::env::var(name).ok();
        let launched = launcher::launched(lookup);
        let is_plain = !config.alone && !launched && !launcher::is_started_by_others();
        match is_plain.then(|| Rendezvous::from_lookup(lookup)).transpose()?.flatten() {
            Some(rendezvous) => {
                started_by.set(by_source(rendezvous.source));
                connect_by_address(&rendezvous, config)
            }
            None => {
                started_by.set(if launched && !config.alone { StartedBy::Mpiexec } else { StartedBy::None });
                launcher::connect(config)
            }
        }
    })
}

fn by_source(source: RankSource) -> StartedBy {
    match source {
        RankSource::Variables => StartedBy::Variables,
        RankSource::Kubernetes => StartedBy::Kubernetes,
        RankSource::Arguments => StartedBy::Arguments,
    }
}

/// Makes this process a rank as in `rendezvous`; else as [`start_by_store`]. Collective.
///
/// # Errors
/// As for [`start_by_store`].
pub fn start_by_address(rendezvous: &Rendezvous) -> Result<()> {
    check_explicit()?;
    let started_by = Cell::new(by_source(rendezvous.source));
    start_by(IfStarted::Refuse, &started_by, |config| connect_by_address(rendezvous, config))
}

/// Refuses a start by the program in a process that is a rank, or was forked from one.
fn check_explicit() -> Result<()> {
    if let Some(refusal) = fork::is_child().then(helper::refusal).flatten() {
        return Err(refusal);
    }
    if config().is_ok() { Err(started_already()) } else { Ok(()) }
}

fn started_already() -> Error {
    Error::State("dl_comm is initialized already; call finalize() first".into())
}

/// Makes this process rank `rank` of `size` by `store`. A process that a rank has started becomes a rank of a job of its
/// own. Collective.
///
/// # Errors
/// As for [`start`]; [`Error::State`] if the process is a rank, or was forked from one.
pub fn start_by_store(rank: usize, size: usize, store: &Arc<dyn Store>) -> Result<()> {
    check_explicit()?;
    let by_torchrun = launcher::torchrun_position(|name| std::env::var(name).ok()) == Some((rank, size));
    let started_by = Cell::new(if by_torchrun { StartedBy::Torchrun } else { StartedBy::Store });
    start_by(IfStarted::Refuse, &started_by, |config| connect_by_store(rank, size, store, config))
}

/// What to do in a process that is a rank already.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IfStarted {
    /// Nothing.
    Keep,
    /// It is an error.
    Refuse,
}

/// `connect` may set `started_by`.
fn start_by(
    if_started: IfStarted,
    started_by: &Cell<StartedBy>,
    connect: impl FnOnce(&Config) -> Result<Arc<dyn Bootstrap>>,
) -> Result<()> {
    // First, because a forked child would find any lock taken here locked forever.
    fork::install_handler();
    check_fork()?;
    let _turn = Turn::take()?;
    let is_started = read(|state| match state {
        RuntimeState::Started(_) if if_started == IfStarted::Refuse => Err(started_already()),
        RuntimeState::Started(_) => Ok(true),
        RuntimeState::Finalized { can_start: false, .. } => Err(finalized(false)),
        RuntimeState::Finalized { .. } | RuntimeState::NotStarted => Ok(false),
    })?;
    if is_started {
        return Ok(());
    }
    let runtime = RuntimeState::Started(Box::new(make_runtime(started_by, connect)?));
    write(|state| {
        *state = runtime;
        Ok(())
    })
}

/// Starts the job and the services of this process. Without a lock: `connect` may call functions of the program.
fn make_runtime(
    started_by: &Cell<StartedBy>,
    connect: impl FnOnce(&Config) -> Result<Arc<dyn Bootstrap>>,
) -> Result<Runtime> {
    let job = Job::start(Config::from_env(), connect)?;
    let config = job.ranks().config.clone();
    if config.timeout.is_none() && job.ranks().topology.rank() == 0 {
        log_line("DL_COMM_TIMEOUT_S is 0: a call waits for the other ranks for ever");
    }
    let started_by = match started_by.get() {
        // An unknown one, or whoever has initialized the message library.
        StartedBy::None if job.ranks().topology.size() > 1 => StartedBy::Mpiexec,
        known => known,
    };
    helper::mark(&job.ranks().topology, started_by, job.uses_launcher());
    if job.ranks().topology.rank() == 0 {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        variables::warning(&variables::unknown(names)).iter().for_each(|text| log_line(text));
    }
    let (topology, rank_info) = (Arc::clone(&job.ranks().topology), Arc::clone(&job.ranks().rank_info));
    let network = job.network();
    memory::keep(job.arenas());
    let rank = topology.rank();
    let dumper = Arc::new(Dumper::new(rank, Arc::clone(&rank_info), job.ranks().key, config.dump_dir.clone()));
    if topology.local_rank() == 0 {
        dumper.clean();
    }
    let start_services = || {
        check_local_rank(&config, started_by, &topology)?;
        if !config.timeline.is_empty() {
            timeline::start(&config.timeline, rank, &rank_info[rank].display_name(rank), &dumper.job())
                .map_err(|error| Error::System(format!("DL_COMM_TIMELINE: {}", error.detail())))?;
        }
        SignalDumper::start(Arc::clone(&dumper))
    };
    let _on_signal = job.confirm("init_mpi", start_services()).inspect_err(|_| job.leave())?;
    let (job, teams, groups) = (Arc::new(job), BTreeMap::new(), BTreeMap::new());
    let process_groups = Arc::new(ProcessGroups::of_process());
    Ok(Runtime { job, topology, rank_info, network, config, teams, groups, process_groups, dumper, _on_signal })
}

/// Compares the local rank with the one that plain processes may have been given.
fn check_local_rank(config: &Config, started_by: StartedBy, topology: &Topology) -> Result<()> {
    let is_given = matches!(started_by, StartedBy::Variables | StartedBy::Kubernetes);
    match config.local_rank.filter(|given| is_given && *given != topology.local_rank()) {
        None => Ok(()),
        Some(given) => Err(Error::Invalid(format!(
            "DL_COMM_LOCAL_RANK is {given}, but the process is number {} of {} on its host, in the order of the ranks; \
             correct DL_COMM_RANK, or unset DL_COMM_LOCAL_RANK",
            topology.local_rank(),
            topology.local_size()
        ))),
    }
}

/// Initializes everything that the collectives need. Does nothing if that was done before. Collective.
///
/// # Errors
/// Those of [`start`] and of creating a team.
pub fn init() -> Result<()> {
    start()?;
    if is_initialized() || helper::refusal().is_some() {
        return Ok(());
    }
    let config = config()?;
    make_team(CONTROL, config.default_nthreads, config.default_prec_level, None)
}

/// Ends the teams and everything that [`start`] has started. Does nothing if nothing was started or all has ended.
/// Collective.
///
/// It waits for the other ranks up to the deadline, also after a failure: the launcher would kill ranks that still have
/// work to do. If they do not come, it logs a line, aborts the job, and makes the exit status differ from 0.
///
/// # Errors
/// [`Error::State`] in a forked child. That of a call on a GPU that was lost and of which the program has not heard; then
/// the job has ended all the same, and the exit status differs from 0.
pub fn finalize() -> Result<()> {
    end(None)
}

/// Ends the use of dl_comm after a failure elsewhere in the program. Reports the first line of `why` to the other ranks
/// and aborts the job, so that the launcher ends it. Not collective.
///
/// # Errors
/// [`Error::State`] in a forked child.
pub fn abort(why: &str) -> Result<()> {
    let why = why.lines().next().map_or_else(String::new, |line| format!(": {line}"));
    end(Some(Error::PeerLost(format!("the program failed on {}{why}", process_name()))))
}

/// Prints the plugin's line about the waited time, and a warning about means that no call has returned.
fn report(teams: &BTreeMap<i32, Arc<Team>>, rank: usize) {
    let scheduled = teams.iter().filter(|(id, _)| **id != CONTROL);
    report_waited(scheduled.clone().map(|(_, team)| team), rank);
    for (id, team) in scheduled {
        if team.undelivered_means() > 0 && team.waited().0.prints_on(rank) {
            log_line(&format!(
                "finalize() came before the last of team {id}'s max_steps calls: the mean of its last call was not returned"
            ));
        }
    }
}

fn end(reason: Option<Error>) -> Result<()> {
    if helper::refusal().is_some() {
        return Ok(());
    }
    let turn = Turn::take()?;
    let previous = {
        let mut state = STATE.write().unwrap_or_else(PoisonError::into_inner);
        let RuntimeState::Started(runtime) = &*state else {
            // The launcher's library remains started if the start failed.
            launcher::end();
            return Ok(());
        };
        let next = RuntimeState::Finalized { topology: Arc::clone(&runtime.topology), can_start: false };
        std::mem::replace(&mut *state, next)
    };
    // abort() must not wait for finalize() on another thread.
    drop(turn);
    let RuntimeState::Started(runtime) = previous else { return Ok(()) };
    let Runtime { job, teams, groups, topology, .. } = *runtime;
    let groups: Vec<Arc<Group>> = groups.values().filter_map(Weak::upgrade).collect();
    let all_groups = || teams.values().map(|team| team.group()).chain(&groups);
    if let Some(error) = &reason {
        all_groups().for_each(|group| group.fail(error));
    }
    let messages = point_to_point::close(&job, reason.is_none());
    all_groups().for_each(|group| group.stop());
    timeline::stop();
    report(&teams, topology.rank());
    let gathered = match &reason {
        Some(_) => {
            job.leave();
            Ok(false)
        }
        None => {
            let failure = all_groups().find_map(|group| group.failure());
            job.final_barrier(failure.as_ref(), &|| messages.linger())
        }
    };
    messages.end(reason.is_none() && gathered == Ok(true));
    if let Err(error) = gathered {
        log_line(&format!("{error}; this process ends with a status other than 0"));
        fail_at_exit();
    }
    // Links between hosts close before the job ends. A team is freed when the last thread drops it from its cache.
    calls::forget_teams();
    all_groups().for_each(|group| group.release_resources());
    drop((teams, groups));
    // The ranks of a launcher's job start again together, which they cannot if one has left.
    let can_start = !(job.uses_launcher() && job.was_left());
    drop(job);
    memory::drop_unused();
    launcher::end();
    // Only now: a new start must not meet a part of the old job.
    *STATE.write().unwrap_or_else(PoisonError::into_inner) = RuntimeState::Finalized { topology, can_start };
    // The GPU's work has ended with the groups. After a failure of the program, the losses are only logged.
    let lost = group::end_lost_calls();
    if reason.is_some() { Ok(()) } else { lost }
}
