//! The state of this process, and access to it.
//!
//! Thread rule: any thread.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, Weak};

use crate::config::Config;
use crate::dump::{Dumper, SignalDumper};
use crate::error::{Error, Result};
use crate::fork;
use crate::group::{Group, ProcessGroups};
use crate::helper::{self, RankPosition};
use crate::plugin::Team;
use crate::topology::Topology;
use crate::transport::NetworkModel;
use crate::transport::job::Job;
use crate::transport::rank_info::RankInfo;

/// The team for broadcasts, barriers and allreduces outside of training.
pub const CONTROL: i32 = -1;

/// The number of that team's group, for the bindings.
const CONTROL_GROUP: u64 = u64::MAX;

/// The number of the group that `id` names where functions take a team. Its calls have no schedule.
pub(super) fn group_number(id: i32) -> Option<u64> {
    u64::try_from(i64::from(CONTROL) - i64::from(id)).ok().filter(|&number| number > 0)
}

/// Upper bound of team numbers, exclusive.
pub const MAX_TEAMS: i32 = 64;

/// The resources of a started process.
pub(super) struct Runtime {
    pub job: Arc<Job>,
    pub topology: Arc<Topology>,
    pub rank_info: Arc<[RankInfo]>,
    pub network: Option<NetworkModel>,
    pub config: Config,
    pub teams: BTreeMap<i32, Arc<Team>>,
    /// Groups that some ranks have made, by number.
    pub groups: BTreeMap<u64, Weak<Group>>,
    pub process_groups: Arc<ProcessGroups>,
    pub dumper: Arc<Dumper>,
    /// Writes dumps on a signal while it lives.
    pub _on_signal: Option<SignalDumper>,
}

pub(super) enum RuntimeState {
    NotStarted,
    Started(Box<Runtime>),
    /// The topology remains available. A new start is possible once the end is complete, unless the job was left.
    Finalized {
        topology: Arc<Topology>,
        can_start: bool,
    },
}

pub(super) static STATE: RwLock<RuntimeState> = RwLock::new(RuntimeState::NotStarted);

/// Distinguishes two cores in one process: the address of this core's state.
pub fn core_id() -> usize {
    (&raw const STATE).addr()
}

/// Refuses a child that a rank has forked.
///
/// # Errors
/// [`Error::State`] there.
pub fn check_fork() -> Result<()> {
    if fork::is_child() { helper::refusal().map_or(Ok(()), Err) } else { Ok(()) }
}

pub(super) fn not_started() -> Error {
    helper::refusal().unwrap_or_else(|| Error::State("dl_comm is not initialized; call init() first".into()))
}

pub(super) fn finalized(can_start: bool) -> Error {
    let then = if can_start { "init() starts it again" } else { "it cannot be used again in this process" };
    Error::State(format!("dl_comm was finalized; {then}"))
}

pub(super) fn read<T>(view: impl FnOnce(&RuntimeState) -> Result<T>) -> Result<T> {
    check_fork()?;
    view(&STATE.read().unwrap_or_else(PoisonError::into_inner))
}

/// The result of `view` on the session, if there is one.
pub(super) fn started<T>(view: impl FnOnce(&Runtime) -> Result<T>) -> Result<T> {
    read(|state| match state {
        RuntimeState::Started(runtime) => view(runtime),
        RuntimeState::NotStarted => Err(not_started()),
        RuntimeState::Finalized { can_start, .. } => Err(finalized(*can_start)),
    })
}

pub(super) fn write<T>(change: impl FnOnce(&mut RuntimeState) -> Result<T>) -> Result<T> {
    check_fork()?;
    change(&mut STATE.write().unwrap_or_else(PoisonError::into_inner))
}

/// Whether [`init`](super::init) has succeeded and [`finalize`](super::finalize) was not called.
pub fn is_initialized() -> bool {
    started(|runtime| Ok(runtime.teams.contains_key(&CONTROL))).unwrap_or(false)
}

/// The settings of this process.
///
/// # Errors
/// [`Error::State`] before [`start`](super::start) and after [`finalize`](super::finalize).
pub fn config() -> Result<Config> {
    started(|runtime| Ok(runtime.config.clone()))
}

/// Rank, sizes and hosts of this rank, or of the rank that this process helps. Available after
/// [`finalize`](super::finalize) too.
///
/// # Errors
/// [`Error::State`] before [`start`](super::start).
pub fn rank_info() -> Result<RankPosition> {
    helper::info().ok_or_else(not_started)
}

/// Whether this process is a helper of a rank: started by the rank, not by a launcher.
pub fn is_helper() -> bool {
    helper::refusal().is_some()
}

/// The topology of the ranks. Available after [`finalize`](super::finalize) too.
///
/// # Errors
/// [`Error::State`] before [`start`](super::start).
pub fn topology() -> Result<Arc<Topology>> {
    read(|state| match state {
        RuntimeState::Started(runtime) => Ok(Arc::clone(&runtime.topology)),
        RuntimeState::Finalized { topology, .. } => Ok(Arc::clone(topology)),
        RuntimeState::NotStarted => Err(not_started()),
    })
}

/// This process in messages.
pub(super) fn process_name() -> String {
    let rank = topology().map_or(0, |topology| topology.rank());
    format!("rank {rank} (pid {})", std::process::id())
}

pub(super) fn find_team(id: i32) -> Result<Option<Arc<Team>>> {
    started(|runtime| Ok(runtime.teams.get(&id).cloned()))
}

pub(super) fn team(id: i32) -> Result<Arc<Team>> {
    if let Some(number) = group_number(id) {
        return Ok(Arc::new(Team::new(group_of_number(number)?)));
    }
    match find_team(id)? {
        Some(team) => Ok(team),
        None if !is_initialized() => Err(not_started()),
        None => Err(Error::Invalid(format!(
            "team {id} does not exist ({} of them do); create_team() or init(nteams=...) makes teams",
            nteams()?
        ))),
    }
}

/// The group of team `id`.
///
/// # Errors
/// If there is no such team.
pub fn group_of_team(id: i32) -> Result<Arc<Group>> {
    team(id).map(|team| Arc::clone(team.group()))
}

/// The group with this [`number`](Group::number); 0: the group of team 0.
///
/// # Errors
/// If there is none: it was freed.
pub fn group_of_number(number: u64) -> Result<Arc<Group>> {
    match number {
        0 => return group_of_team(0),
        CONTROL_GROUP => return group_of_team(CONTROL),
        _ => {}
    }
    started(|runtime| {
        let team = || runtime.teams.values().map(|team| team.group()).find(|group| group.number() == number).cloned();
        let group = runtime.groups.get(&number).and_then(Weak::upgrade).or_else(team);
        group.ok_or_else(|| Error::Invalid(format!("group {number} was freed")))
    })
}

/// The number of teams, without [`CONTROL`].
///
/// # Errors
/// As for [`config`].
pub fn nteams() -> Result<usize> {
    started(|runtime| Ok(runtime.teams.keys().filter(|&&id| id != CONTROL).count()))
}
