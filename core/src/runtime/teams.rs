//! The teams of this process, by number.

use std::time::Duration;

use super::group_creation::make_team;
use super::lifecycle;
use super::state::{MAX_TEAMS, config, find_team, is_initialized, not_started, started, team};
use crate::error::{Error, Result};
use crate::plugin::{Arguments, Cooldown, Schedule};

/// Creates team `id` with `threads` threads. Collective.
///
/// # Errors
/// [`Error::Invalid`] for numbers out of range and an existing team; [`Error::Mismatch`] if the ranks disagree.
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
        // Reports whether the process is not initialized, finalized or forked.
        config()?;
        return Err(not_started());
    }
    if find_team(id)?.is_some() {
        return Err(Error::Invalid(format!("team {id} exists already")));
    }
    let call = format!("create_team(team={id}, nthreads={threads}, prec_level={prec_level})");
    make_team(id, threads, prec_level, Some(&call))
}

/// Initializes everything and creates the missing teams below `count`, with the default precision. `threads` overrides
/// the default number of threads. Collective.
///
/// # Errors
/// Those of [`super::init`] and [`create_team`]; [`Error::Mismatch`] if the ranks request different teams.
pub fn init_teams(count: i32, threads: Option<i32>) -> Result<()> {
    if !(1..=MAX_TEAMS).contains(&count) {
        return Err(Error::Invalid(format!("nteams is {count}; it is a number from 1 to {MAX_TEAMS}")));
    }
    lifecycle::init()?;
    let config = config()?;
    let threads = match threads {
        None => config.default_nthreads,
        Some(threads) => checked_threads(threads)?,
    };
    let missing: Vec<i32> = started(|runtime| Ok((0..count).filter(|id| !runtime.teams.contains_key(id)).collect()))?;
    for (index, id) in missing.into_iter().enumerate() {
        // One agreement for all teams: a rank with a smaller `count` must not continue with other calls.
        let call = (index == 0).then(|| format!("init(nteams={count}, threads={threads})"));
        make_team(id, threads, config.default_prec_level, call.as_deref())?;
    }
    Ok(())
}

fn checked_threads(threads: i32) -> Result<usize> {
    let threads = usize::try_from(threads).ok().filter(|threads| (1..=256).contains(threads));
    threads.ok_or_else(|| Error::Invalid("a team has from 1 to 256 threads".into()))
}

/// Creates team `id` if it does not exist, with the default precision. `threads` overrides the default number of
/// threads. Collective if the team does not exist.
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

/// Sets the deadline of later calls on team `id`; `None` for none.
///
/// # Errors
/// If there is no such team.
pub fn set_timeout(id: i32, timeout: Option<Duration>) -> Result<()> {
    team(id).map(|team| team.group().set_timeout(timeout))
}

/// Sets the schedule of team `id`, creating the team like [`ensure_team`] if necessary. `arguments` gets the cooldown
/// setting of the environment. All ranks must set the same schedule; calls on different schedules do not match.
///
/// # Errors
/// [`Error::Invalid`] for arguments out of range; those of [`ensure_team`].
pub fn config_team(id: i32, arguments: impl FnOnce(Cooldown) -> Result<Arguments>) -> Result<()> {
    let schedule = Schedule::new(arguments(config()?.cooldown)?)?;
    ensure_team(id, None)?;
    team(id)?.configure(schedule);
    Ok(())
}

/// Drops the state that calls of `owner` on team `id` have carried over. Does nothing if there is no such team.
pub fn release(id: i32, owner: u64) {
    if let Ok(team) = team(id) {
        team.release(owner);
    }
}

/// Drops the means that the last calls of `owner` on team `id` have carried over. Does nothing if there is no such
/// team.
pub fn discard_carried(id: i32, owner: u64) {
    if let Ok(team) = team(id) {
        team.discard_carried(owner);
    }
}

/// Adds `seconds` that a caller has waited for a call on team `id` whose wait is not counted.
///
/// # Errors
/// If there is no such team.
pub fn add_waited(id: i32, seconds: f64) -> Result<()> {
    team(id).map(|team| team.add_waited(seconds))
}

/// Seconds that callers of this rank have waited for allreduces of team `id`.
///
/// # Errors
/// If there is no such team.
pub fn waited(id: i32) -> Result<f64> {
    team(id).map(|team| team.waited().1)
}
