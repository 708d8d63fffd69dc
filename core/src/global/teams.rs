//! The teams of this process: made by number, found by number.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{State, config, is_initialized, not_started, started, topology, write};
use crate::affinity::{self, Place};
use crate::collective::device::DeviceSettings;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::plan::ALIGN;
use crate::schedule::{Arguments, Cooldown, Schedule};
use crate::team::{Settings, Team};
use crate::transport::mpi::TeamShape;

/// The team of broadcasts, barriers and averages outside of training.
pub const CONTROL: i32 = -1;

/// Team numbers are below this.
pub const MAX_TEAMS: i32 = 64;

/// Held while a team is made, so that all ranks make them in the order of their calls.
static MAKING: Mutex<()> = Mutex::new(());

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

pub(super) fn make_team(id: i32, threads: usize, prec_level: u8) -> Result<()> {
    let _turn = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if find_team(id)?.is_some() {
        return Ok(());
    }
    let config = config()?;
    let (world, dumper) = started(|session| Ok((Arc::clone(&session.world), Arc::clone(&session.dumper))))?;
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
    let chunk = config.device.chunk.min(slot).next_multiple_of(ALIGN);
    let device = DeviceSettings { chunk, ..config.device };
    let shape = TeamShape { id, threads, prec_level, slot, algorithm, gpu_path: device.path, gpu_chunk: chunk };
    let endpoint = world.lock().unwrap_or_else(PoisonError::into_inner).endpoint(shape)?;
    let Config { timeout, stall_warn, match_within, .. } = config;
    let settings = Settings { id, precise: prec_level == 1, algorithm, timeout, stall_warn, match_within, device };
    let on_alarm = Arc::clone(&dumper);
    let alarm = Arc::new(move |words: &str| on_alarm.alarm(words));
    let team = Arc::new(Team::start(endpoint, settings, cpus.as_deref(), alarm)?);
    dumper.add(&team);
    write(|state| match state {
        State::Started(session) => {
            session.teams.insert(id, team);
            Ok(())
        }
        _ => Err(not_started()),
    })
}

pub(super) fn find_team(id: i32) -> Result<Option<Arc<Team>>> {
    started(|session| Ok(session.teams.get(&id).cloned()))
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
    team(id).map(|team| team.set_timeout(timeout))
}

/// The number of teams that [`create_team`] made.
///
/// # Errors
/// As for [`config`].
pub fn nteams() -> Result<usize> {
    started(|session| Ok(session.teams.keys().filter(|&&id| id != CONTROL).count()))
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
