//! The teams of this process: made by number, found by number.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{RuntimeState, barrier, config, is_initialized, not_started, started, topology, wait, write};
use crate::affinity::{self, GroupPlacement};
use crate::collective::device::DeviceSettings;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::group::{Group, GroupConfig};
use crate::plugin::{Arguments, Cooldown, Schedule, Team};
use crate::transport::bootstrap::TeamShape;
use crate::wire_layout::ALIGN;

/// The team of broadcasts, barriers and averages outside of training.
pub const CONTROL: i32 = -1;

/// Team numbers are below this.
pub const MAX_TEAMS: i32 = 64;

/// Held while a team is made, so that all ranks make them in the order of their calls.
static CREATE_LOCK: Mutex<()> = Mutex::new(());

/// Makes team `id` with `threads` threads. Collective.
///
/// # Errors
/// [`Error::Invalid`] for numbers out of range and a team that exists; [`Error::Mismatch`] when the ranks disagree.
pub fn create_team(id: i32, threads: i32, prec_level: i32) -> Result<()> {
    if !(0..MAX_TEAMS).contains(&id) {
        return Err(Error::Invalid(format!("team {id} is out of range; teams go from 0 to {}", MAX_TEAMS - 1)));
    }
    let threads = checked_threads(threads)?;
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
    let call = format!("create_team(team={id}, nthreads={threads}, prec_level={prec_level})");
    make_team(id, threads, prec_level, Some(&call))
}

/// Brings everything up, and the teams below `count` that do not exist, with the default precision and the default number
/// of threads unless `threads` tells. Collective.
///
/// # Errors
/// Those of [`super::init`] and [`create_team`]; [`Error::Mismatch`] when the ranks ask for different teams.
pub fn init_teams(count: i32, threads: Option<i32>) -> Result<()> {
    if !(1..=MAX_TEAMS).contains(&count) {
        return Err(Error::Invalid(format!("nteams is {count}; it is a number from 1 to {MAX_TEAMS}")));
    }
    super::init()?;
    let config = config()?;
    let threads = match threads {
        None => config.default_nthreads,
        Some(threads) => checked_threads(threads)?,
    };
    let missing: Vec<i32> = started(|runtime| Ok((0..count).filter(|id| !runtime.teams.contains_key(id)).collect()))?;
    for (index, id) in missing.into_iter().enumerate() {
        // One agreement for all: a rank that asks for fewer teams must not go on to other calls.
        let call = (index == 0).then(|| format!("init(nteams={count}, nthread_per_team={threads})"));
        make_team(id, threads, config.default_prec_level, call.as_deref())?;
    }
    Ok(())
}

fn checked_threads(threads: i32) -> Result<usize> {
    let threads = usize::try_from(threads).ok().filter(|threads| (1..=256).contains(threads));
    threads.ok_or_else(|| Error::Invalid("a team has from 1 to 256 threads".into()))
}

/// Makes team `id`, once the ranks have agreed on `call`, if that tells what they have called.
pub(super) fn make_team(id: i32, threads: usize, prec_level: u8, call: Option<&str>) -> Result<()> {
    let _turn = CREATE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    if find_team(id)?.is_some() {
        return Ok(());
    }
    if let Some(call) = call {
        // Ranks that are elsewhere are found out as in any other call.
        wait(call, barrier)?;
    }
    let config = config()?;
    let (world, dumper, process_groups) = started(|runtime| {
        Ok((Arc::clone(&runtime.world), Arc::clone(&runtime.dumper), Arc::clone(&runtime.process_groups)))
    })?;
    let cpus = processors(&config, id, threads);
    let slot = config.chunk_bytes.next_multiple_of(ALIGN);
    let algorithm = config.algorithm;
    // Slices of a chunk go between hosts in messages that are as long as a slot.
    let longest = if topology()?.hosts() > 1 { slot } else { usize::MAX };
    let chunk = config.device.chunk.min(longest).next_multiple_of(ALIGN);
    let device = DeviceSettings { chunk, ..config.device };
    let shape = TeamShape { id, threads, prec_level, slot, algorithm, gpu_path: device.path, gpu_chunk: chunk };
    let world = world.lock().unwrap_or_else(PoisonError::into_inner);
    let endpoint = world.endpoint(shape, cpus.as_ref().map(drop).map_err(Error::clone))?;
    let cpus = cpus?;
    let Config { timeout, stall_warn, match_timeout: match_within, .. } = config;
    let settings = GroupConfig {
        id,
        acc_f64: prec_level == 1,
        algorithm,
        timeout,
        stall_warn,
        match_timeout: match_within,
        device,
    };
    let on_alarm = Arc::clone(&dumper);
    let alarm = Arc::new(move |words: &str| on_alarm.write_on_failure(words));
    let group = Group::start(endpoint, settings, cpus.as_deref(), alarm, &process_groups);
    let team = group.map(|group| Arc::new(Team::new(group)));
    let team = world.confirm(&format!("the creation of team {id}"), team)?;
    drop(world);
    dumper.add(team.group());
    write(|state| match state {
        RuntimeState::Started(runtime) => {
            runtime.teams.insert(id, team);
            Ok(())
        }
        _ => Err(not_started()),
    })
}

/// The processors of the team's threads, if they have some of their own.
fn processors(config: &Config, id: i32, threads: usize) -> Result<Option<Vec<usize>>> {
    // Nothing to win for what is not part of training.
    let Ok(team) = usize::try_from(id) else { return Ok(None) };
    let topology = topology()?;
    let (local_rank, local_size) = (topology.local_rank(), topology.local_size());
    let (allowed, online) = affinity::allowed()?;
    affinity::assign_cpus(&config.affinity, GroupPlacement { local_rank, local_size, team, threads }, &allowed, online)
}

pub(super) fn find_team(id: i32) -> Result<Option<Arc<Team>>> {
    started(|runtime| Ok(runtime.teams.get(&id).cloned()))
}

pub(super) fn team(id: i32) -> Result<Arc<Team>> {
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
    team(id).map(|team| team.group().set_timeout(timeout))
}

/// The number of teams that [`create_team`] made.
///
/// # Errors
/// As for [`config`].
pub fn nteams() -> Result<usize> {
    started(|runtime| Ok(runtime.teams.keys().filter(|&&id| id != CONTROL).count()))
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

/// Whether coming averages of `owner` on team `id` may return before they have ended, if they bring memory of their own.
///
/// # Errors
/// When there is no such team.
pub fn may_return_early(id: i32, owner: u64) -> Result<bool> {
    team(id).map(|team| id != CONTROL && team.may_return_early(owner))
}

/// Forgets what calls of `owner` on team `id` have left to calls that will not come. Nothing happens without such a team.
pub fn release(id: i32, owner: u64) {
    if let Ok(team) = team(id) {
        team.release(owner);
    }
}

/// Forgets the means that the last calls of `owner` on team `id` have left. Nothing happens without such a team.
pub fn discard_carried(id: i32, owner: u64) {
    if let Ok(team) = team(id) {
        team.discard_carried(owner);
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
