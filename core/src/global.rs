//! The process-wide state behind the faces: MPI, the teams, and the rules of init, finalize and fork.
//!
//! Thread rule: everything may be called from any thread. Collective functions that make teams run one at a time.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use crate::affinity::{self, Place};
use crate::buffer::{Tensor, View};
use crate::collective::{Carrier, Op};
use crate::config::Config;
use crate::dump::{Dumper, OnSignal};
use crate::error::{Error, Result, guard};
use crate::fork;
use crate::plan::ALIGN;
use crate::say::say;
use crate::schedule::{Arguments, Cooldown, Schedule};
use crate::team::{self, Limit, Parcel, Request, Settings, Stage, Team, report_waited};
use crate::timeline;
use crate::topology::Topology;
use crate::transport::Network;
use crate::transport::arena::Arenas;
use crate::transport::mpi::{RankPlace, TeamShape, World};

/// The team of broadcasts, barriers and averages outside of training.
pub const CONTROL: i32 = -1;

/// Team numbers are below this.
pub const MAX_TEAMS: i32 = 64;

enum State {
    Fresh,
    Started {
        world: Arc<Mutex<World>>,
        topology: Arc<Topology>,
        places: Arc<[RankPlace]>,
        network: Option<Network>,
        config: Box<Config>,
        teams: BTreeMap<i32, Arc<Team>>,
        dumper: Arc<Dumper>,
        /// For what it does as long as it is there.
        _on_signal: OnSignal,
    },
    /// The ranks stay known.
    Finalized(Arc<Topology>),
}

static STATE: RwLock<State> = RwLock::new(State::Fresh);
/// Held while a team is made, so that all ranks make them in the order of their calls.
static MAKING: Mutex<()> = Mutex::new(());
/// The arenas of this host, or why there are none; they stay as long as the process, since somebody may have memory of them.
static ARENAS: OnceLock<Result<Arc<Arenas>>> = OnceLock::new();
/// The process that started dl_comm; 0 before.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// A number that differs between two cores in one process: the address of this one's state.
pub fn core_id() -> usize {
    (&raw const STATE).addr()
}

fn check_fork() -> Result<()> {
    if fork::is_child() {
        let owner = OWNER.load(Ordering::Relaxed);
        return Err(Error::State(format!(
            "this process was forked from process {owner}, which uses dl_comm; a forked child cannot (start it afresh, \
             for instance with the 'spawn' method)"
        )));
    }
    Ok(())
}

fn not_started() -> Error {
    Error::State("dl_comm is not initialised; call init() first".into())
}

fn finalized() -> Error {
    Error::State("dl_comm was finalised and cannot be used again in this process".into())
}

fn read<T>(view: impl FnOnce(&State) -> Result<T>) -> Result<T> {
    check_fork()?;
    view(&STATE.read().unwrap_or_else(PoisonError::into_inner))
}

fn write<T>(change: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
    check_fork()?;
    change(&mut STATE.write().unwrap_or_else(PoisonError::into_inner))
}

/// Brings MPI up, or adopts it. Nothing happens when that was done. Collective.
///
/// # Errors
/// Those of [`Config::from_env`] and [`World::start`]; [`Error::State`] after [`finalize`].
pub fn init_mpi() -> Result<()> {
    write(|state| match state {
        State::Started { .. } => Ok(()),
        State::Finalized(_) => Err(finalized()),
        State::Fresh => {
            let config = Config::from_env()?;
            let world = World::start(&config)?;
            if config.timeout.is_none() && world.topology().rank() == 0 {
                say("DL_COMM_TIMEOUT_S is 0: a call waits for the other ranks for ever");
            }
            OWNER.store(process::id(), Ordering::Relaxed);
            fork::watch();
            let (topology, places) = (Arc::clone(world.topology()), Arc::clone(world.places()));
            let network = world.network();
            let _first = ARENAS.set(world.arenas().clone());
            let rank = topology.rank();
            let dumper = Arc::new(Dumper::new(rank, Arc::clone(&places), world.key(), config.dump_dir.clone()));
            let ready = || {
                if !config.timeline.is_empty() {
                    timeline::start(&config.timeline, rank, &places[rank].title(rank))?;
                }
                OnSignal::start(Arc::clone(&dumper))
            };
            // The other ranks do not know of it: they would be waited for until the deadline.
            let _on_signal = ready().inspect_err(|_| world.leave())?;
            let world = Arc::new(Mutex::new(world));
            let config = Box::new(config);
            let teams = BTreeMap::new();
            *state = State::Started { world, topology, places, network, config, teams, dumper, _on_signal };
            Ok(())
        }
    })
}

/// Brings up everything that the collectives need. Nothing happens when that was done. Collective.
///
/// # Errors
/// Those of [`init_mpi`] and of the making of a team.
pub fn init() -> Result<()> {
    init_mpi()?;
    if is_initialized() {
        return Ok(());
    }
    let config = config()?;
    make_team(CONTROL, config.default_nthreads, config.default_prec_level)
}

/// Whether [`init`] has succeeded and [`finalize`] was not called.
pub fn is_initialized() -> bool {
    read(|state| Ok(matches!(state, State::Started { teams, .. } if teams.contains_key(&CONTROL)))).unwrap_or(false)
}

/// The settings of this process.
///
/// # Errors
/// [`Error::State`] before [`init_mpi`] and after [`finalize`].
pub fn config() -> Result<Config> {
    read(|state| match state {
        State::Started { config, .. } => Ok(Config::clone(config)),
        State::Fresh => Err(not_started()),
        State::Finalized(_) => Err(finalized()),
    })
}

/// Writes this rank's last calls into `folder`, or where `DL_COMM_DUMP_DIR` says; returns the file.
///
/// # Errors
/// [`Error::State`] before [`init_mpi`] and after [`finalize`]; [`Error::System`].
pub fn dump(folder: Option<&str>) -> Result<PathBuf> {
    let dumper = read(|state| match state {
        State::Started { dumper, .. } => Ok(Arc::clone(dumper)),
        State::Fresh => Err(not_started()),
        State::Finalized(_) => Err(finalized()),
    })?;
    dumper.write("asked for", folder)
}

/// Starts the timeline of this rank in `folder`.
///
/// # Errors
/// As for [`dump`]; [`Error::State`] when one is being recorded.
pub fn start_timeline(folder: &str) -> Result<()> {
    let (rank, title) = read(|state| match state {
        State::Started { topology, places, .. } => {
            let rank = topology.rank();
            Ok((rank, places[rank].title(rank)))
        }
        State::Fresh => Err(not_started()),
        State::Finalized(_) => Err(finalized()),
    })?;
    timeline::start(folder, rank, &title)
}

/// Ends the timeline of this rank. Nothing happens when there is none.
///
/// # Errors
/// [`Error::State`] in a forked child, which has the file of its parent.
pub fn stop_timeline() -> Result<()> {
    check_fork()?;
    timeline::stop();
    Ok(())
}

/// The numbers of all teams, as a JSON object.
///
/// # Errors
/// As for [`config`].
pub fn stats() -> Result<serde_json::Value> {
    read(|state| match state {
        State::Started { teams, topology, .. } => {
            let teams: serde_json::Map<String, serde_json::Value> =
                teams.iter().map(|(id, team)| (id.to_string(), team.stats())).collect();
            Ok(serde_json::json!({"rank": topology.rank(), "size": topology.size(), "teams": teams}))
        }
        State::Fresh => Err(not_started()),
        State::Finalized(_) => Err(finalized()),
    })
}

/// Where the ranks are. Known after [`finalize`] too.
///
/// # Errors
/// [`Error::State`] before [`init_mpi`].
pub fn topology() -> Result<Arc<Topology>> {
    read(|state| match state {
        State::Started { topology, .. } | State::Finalized(topology) => Ok(Arc::clone(topology)),
        State::Fresh => Err(not_started()),
    })
}

/// What there is to tell of this process ([`crate::describe`]).
#[derive(Debug, Clone)]
pub struct Overview {
    /// `fresh`, `started` (MPI is up) or `finalized`.
    pub state: &'static str,
    /// The settings, while started.
    pub config: Option<Config>,
    /// Where the ranks are, once it was started.
    pub topology: Option<Arc<Topology>>,
    /// Every rank's place, while started.
    pub places: Arc<[RankPlace]>,
    /// What was measured of the network between the hosts, while started, where there are several.
    pub network: Option<Network>,
    /// The teams, by number, while started.
    pub teams: Vec<Carrier>,
}

/// What there is to tell of this process, in every state.
///
/// # Errors
/// [`Error::State`] in a forked child.
pub fn overview() -> Result<Overview> {
    read(|state| {
        let (places, teams) = (Arc::new([]), Vec::new());
        let mut told = Overview { state: "fresh", config: None, topology: None, places, network: None, teams };
        match state {
            State::Fresh => {}
            State::Finalized(topology) => (told.state, told.topology) = ("finalized", Some(Arc::clone(topology))),
            State::Started { topology, places, network, config, teams, .. } => {
                told.network = *network;
                told.state = "started";
                told.config = Some(Config::clone(config));
                told.topology = Some(Arc::clone(topology));
                told.places = Arc::clone(places);
                told.teams = teams.values().map(|team| team.carrier()).collect();
            }
        }
        Ok(told)
    })
}

/// Makes team `id` with `threads` threads. Collective.
///
/// # Errors
/// [`Error::Invalid`] for numbers out of range and a team that exists; [`Error::Mismatch`] when the ranks disagree.
pub fn create_team(id: i32, threads: i32, prec_level: i32) -> Result<()> {
    if !(0..MAX_TEAMS).contains(&id) {
        return Err(Error::Invalid(format!("team {id} is out of range; teams go from 0 to {}", MAX_TEAMS - 1)));
    }
    let threads = usize::try_from(threads).ok().filter(|threads| (1..=256).contains(threads));
    let threads = threads.ok_or_else(|| Error::Invalid("a team has from 1 to 256 threads".into()))?;
    let prec_level = match prec_level {
        0 => 0,
        1 => 1,
        _ => return Err(Error::Invalid(format!("prec_level is {prec_level}; it is 0 (float) or 1 (double)"))),
    };
    if !is_initialized() {
        // Says which of not initialised, finalised and forked it is.
        config()?;
        return Err(not_started());
    }
    if find_team(id)?.is_some() {
        return Err(Error::Invalid(format!("team {id} exists already")));
    }
    make_team(id, threads, prec_level)
}

fn make_team(id: i32, threads: usize, prec_level: u8) -> Result<()> {
    let _turn = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if find_team(id)?.is_some() {
        return Ok(());
    }
    let config = config()?;
    let (world, dumper) = read(|state| match state {
        State::Started { world, dumper, .. } => Ok((Arc::clone(world), Arc::clone(dumper))),
        _ => Err(not_started()),
    })?;
    let cpus = match usize::try_from(id) {
        // Nothing to win for what is not part of training.
        Err(_) => None,
        Ok(team) => {
            let topology = topology()?;
            let (local_rank, local_size) = (topology.local_rank(), topology.local_size());
            let (allowed, online) = affinity::allowed()?;
            affinity::assign(&config.affinity, Place { local_rank, local_size, team, threads }, &allowed, online)?
        }
    };
    let slot = config.chunk_bytes.next_multiple_of(ALIGN);
    let algorithm = config.algorithm;
    let shape = TeamShape { id, threads, prec_level, slot, algorithm };
    let endpoint = world.lock().unwrap_or_else(PoisonError::into_inner).endpoint(shape)?;
    let Config { timeout, stall_warn, match_within, .. } = config;
    let settings = Settings { id, precise: prec_level == 1, algorithm, timeout, stall_warn, match_within };
    let on_alarm = Arc::clone(&dumper);
    let alarm = Arc::new(move |words: &str| on_alarm.alarm(words));
    let team = Arc::new(Team::start(endpoint, settings, cpus.as_deref(), alarm)?);
    dumper.add(&team);
    write(|state| match state {
        State::Started { teams, .. } => {
            teams.insert(id, team);
            Ok(())
        }
        _ => Err(not_started()),
    })
}

fn find_team(id: i32) -> Result<Option<Arc<Team>>> {
    read(|state| match state {
        State::Started { teams, .. } => Ok(teams.get(&id).cloned()),
        State::Fresh => Err(not_started()),
        State::Finalized(_) => Err(finalized()),
    })
}

fn team(id: i32) -> Result<Arc<Team>> {
    match find_team(id)? {
        Some(team) => Ok(team),
        None if !is_initialized() => Err(not_started()),
        None => Err(Error::Invalid(format!(
            "team {id} does not exist ({} of them do); create_team() or init(nteams=...) makes teams",
            nteams()?
        ))),
    }
}

/// Makes team `id` unless it exists, with the default precision, and the default number of threads unless `threads` tells.
/// Collective when the team does not exist.
///
/// # Errors
/// Those of [`create_team`].
pub fn ensure_team(id: i32, threads: Option<i32>) -> Result<()> {
    if id >= 0 && find_team(id)?.is_some() {
        return Ok(());
    }
    let config = config()?;
    let threads = threads.or(i32::try_from(config.default_nthreads).ok()).unwrap_or(1);
    create_team(id, threads, i32::from(config.default_prec_level))
}

/// Sets the deadline of coming calls on team `id`; `None` for none.
///
/// # Errors
/// When there is no such team.
pub fn set_timeout(id: i32, timeout: Option<Duration>) -> Result<()> {
    team(id).map(|team| team.set_timeout(timeout))
}

/// The number of teams that [`create_team`] made.
///
/// # Errors
/// As for [`config`].
pub fn nteams() -> Result<usize> {
    read(|state| match state {
        State::Started { teams, .. } => Ok(teams.keys().filter(|&&id| id != CONTROL).count()),
        State::Fresh => Err(not_started()),
        State::Finalized(_) => Err(finalized()),
    })
}

fn submit(op: Op, id: i32, request: Request, towers: impl FnOnce() -> Result<Vec<Vec<Tensor>>>) {
    // The memory's validity is what the faces ask of their callers.
    match guard(|| Ok((team(id)?, towers()?))) {
        // SAFETY: see the faces' contracts: dl_comm.h, completion.h.
        Ok((team, towers)) if op == Op::Average && id != CONTROL => unsafe { team.gradients(towers, request) },
        // SAFETY: as above.
        Ok((team, towers)) => unsafe { team.submit(op, towers, request) },
        Err(error) => request.refuse(error),
    }
}

/// Starts the average of several replicas of a list of tensors on team `id`, by the team's schedule. The lists are made by
/// `towers`, whose errors reach `request` too.
pub fn average(id: i32, request: Request, towers: impl FnOnce() -> Result<Vec<Vec<Tensor>>>) {
    submit(Op::Average, id, request, towers);
}

/// Averages one list in place as [`average_and_wait`] does, the short way if there is one.
///
/// # Errors
/// The outcome.
///
/// # Safety
/// The memory of `views` is valid, and nobody else uses it meanwhile.
pub unsafe fn average_list(id: i32, name: &str, limit: Limit, views: &[View<'_>]) -> Result<()> {
    // SAFETY: the caller's promise.
    if let Some(result) = unsafe { team(id)?.average_shortly(name, views, limit) } {
        return result;
    }
    // SAFETY: as above.
    unsafe { average_and_wait(id, name, limit, vec![views.iter().map(|view| view.to_tensor()).collect()]) }
}

/// Averages `towers` in place by the schedule of team `id`, and waits. Where the schedule lets calls return before their
/// average has ended, the tensors are copied.
///
/// # Errors
/// The outcome.
///
/// # Safety
/// The memory of `towers` is valid, and nobody else uses it meanwhile.
pub unsafe fn average_and_wait(id: i32, name: &str, limit: Limit, towers: Vec<Vec<Tensor>>) -> Result<()> {
    if id == CONTROL || !carries(id, 0)? {
        return wait(name, |request| average(id, request.within(limit), || Ok(towers)));
    }
    // SAFETY: the caller's promise.
    let (stage, copies) = unsafe { Stage::of(&towers, team(id)?.pool()) }?;
    let mine = Arc::clone(&stage);
    let result = outcome(name, |request| average(id, request.within(limit).keeping(mine), || Ok(copies)))?;
    let result = result.map_or(Ok(stage), Stage::from_parcel)?;
    // SAFETY: the caller's promise; a result is nobody else's any more.
    unsafe { result.copy_to(&towers) };
    Ok(())
}

/// `len` zero bytes, at a multiple of 4096, that the ranks of this host see in each other; see [`crate::transport::arena`].
///
/// # Errors
/// [`Error::System`] when there is not so much memory; why there is none of this kind; [`Error::State`] before [`init_mpi`].
pub fn alloc(len: usize) -> Result<*mut u8> {
    read(|state| match state {
        State::Started { .. } => arenas()?.alloc(len),
        State::Fresh => Err(not_started()),
        State::Finalized(_) => Err(finalized()),
    })
}

/// Gives back what [`alloc`] returned, after [`finalize`] too. Nothing happens for null.
///
/// # Errors
/// [`Error::Invalid`] for anything else.
///
/// # Safety
/// Nobody uses the memory any more.
pub unsafe fn free(memory: *mut u8) -> Result<()> {
    check_fork()?;
    if memory.is_null() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { arenas()?.free(memory) }
}

fn arenas() -> Result<&'static Arc<Arenas>> {
    ARENAS.get().ok_or_else(not_started)?.as_ref().map_err(Error::clone)
}

/// Whether coming averages of `owner` on team `id` may return before they have ended, if they bring memory of their own.
///
/// # Errors
/// When there is no such team.
pub fn carries(id: i32, owner: u64) -> Result<bool> {
    team(id).map(|team| id != CONTROL && team.carries(owner))
}

/// Forgets what calls of `owner` on team `id` have left to calls that will not come. Nothing happens without such a team.
pub fn release(id: i32, owner: u64) {
    if let Ok(team) = team(id) {
        team.release(owner);
    }
}

/// Forgets the means that the last calls of `owner` on team `id` have left. Nothing happens without such a team.
pub fn discard(id: i32, owner: u64) {
    if let Ok(team) = team(id) {
        team.discard(owner);
    }
}

/// Counts `seconds` that a caller has waited for a call on team `id` that is not timed.
///
/// # Errors
/// When there is no such team.
pub fn add_waited(id: i32, seconds: f64) -> Result<()> {
    team(id).map(|team| team.add_waited(seconds))
}

/// For how many seconds callers of this rank have waited for averages of team `id`.
///
/// # Errors
/// When there is no such team.
pub fn waited(id: i32) -> Result<f64> {
    team(id).map(|team| team.waited().1)
}

/// Sets the schedule of team `id`, which is made when it does not exist, as by [`ensure_team`]. A `cooldown` of `None` is
/// that of the environment. Every rank must set the same; calls on different schedules do not match.
///
/// # Errors
/// [`Error::Invalid`] for arguments out of range; those of [`ensure_team`].
pub fn config_team(id: i32, arguments: impl FnOnce(Cooldown) -> Result<Arguments>) -> Result<()> {
    let schedule = Schedule::new(arguments(config()?.cooldown)?)?;
    ensure_team(id, None)?;
    team(id)?.configure(schedule);
    Ok(())
}

/// Starts the broadcast of a list of tensors from rank `root`.
pub fn broadcast(root: i32, request: Request, tensors: impl FnOnce() -> Result<Vec<Tensor>>) {
    broadcast_towers(root, request, || Ok(vec![tensors()?]));
}

/// Starts the broadcast of the root's first tower to all towers of all ranks.
pub fn broadcast_towers(root: i32, request: Request, towers: impl FnOnce() -> Result<Vec<Vec<Tensor>>>) {
    match usize::try_from(root) {
        Ok(root) => submit(Op::Broadcast { root }, CONTROL, request, towers),
        Err(_) => request.refuse(Error::Invalid(format!("root {root} is not a rank"))),
    }
}

/// Starts a barrier.
pub fn barrier(request: Request) {
    submit(Op::Barrier, CONTROL, request, || Ok(Vec::new()));
}

/// Runs `start` with a request and waits for its outcome.
///
/// # Errors
/// The outcome.
pub fn wait(name: &str, start: impl FnOnce(Request)) -> Result<()> {
    outcome(name, start).map(drop)
}

fn outcome(name: &str, start: impl FnOnce(Request)) -> Result<Option<Arc<dyn Parcel>>> {
    team::outcome(|done| start(Request::new(done).named(name, "").blocking(true)))
}

/// Ends the teams and, where dl_comm started it, MPI. Nothing happens when nothing was started or all is ended. Collective.
///
/// A team that failed has told its callers; after that this still ends everything, but leaves MPI as it is, since the other
/// ranks may never come to its end.
///
/// # Errors
/// [`Error::State`] in a forked child.
pub fn finalize() -> Result<()> {
    end(None)
}

/// Ends the use of dl_comm after a failure elsewhere in the program: the ranks of this host hear of it, and MPI is left as
/// it is, so that the launcher ends the job. Not collective.
///
/// # Errors
/// [`Error::State`] in a forked child.
pub fn abandon(why: &str) -> Result<()> {
    end(Some(Error::PeerLost(format!("{why} on {}", process_name()))))
}

fn process_name() -> String {
    let rank = topology().map_or(0, |topology| topology.rank());
    format!("rank {rank} (pid {})", process::id())
}

/// The plugin's line about the waited time, and a word about means that no call has returned.
fn report(teams: &BTreeMap<i32, Arc<Team>>, rank: usize) {
    let scheduled = teams.iter().filter(|(id, _)| **id != CONTROL);
    report_waited(scheduled.clone().map(|(_, team)| team), rank);
    for (id, team) in scheduled {
        if team.left_behind() > 0 && team.waited().0.speaks(rank) {
            say(&format!(
                "finalize() came before the last of team {id}'s max_steps calls: the mean of its last call was not returned"
            ));
        }
    }
}

fn end(reason: Option<Error>) -> Result<()> {
    check_fork()?;
    let ended = {
        let mut state = STATE.write().unwrap_or_else(PoisonError::into_inner);
        let State::Started { topology, .. } = &*state else { return Ok(()) };
        let next = State::Finalized(Arc::clone(topology));
        std::mem::replace(&mut *state, next)
    };
    let State::Started { world, teams, topology, .. } = ended else { return Ok(()) };
    if let Some(error) = &reason {
        teams.values().for_each(|team| team.fail(error));
    }
    teams.values().for_each(|team| team.stop());
    timeline::stop();
    report(&teams, topology.rank());
    let failed = teams.values().any(|team| team.failure().is_some());
    if failed || reason.is_some() {
        // A job that lost a rank would wait for it in MPI_Finalize for ever.
        world.lock().unwrap_or_else(PoisonError::into_inner).leave();
    }
    // The teams' communicators go before MPI.
    drop(teams);
    drop(world);
    Ok(())
}
