//! The calls that bindings make on teams, by their numbers.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::state::{CONTROL, check_fork, started, team};
use crate::buffer::{Tensor, View};
use crate::collective::Op;
use crate::device::Device;
use crate::error::{Error, Result, guard};
use crate::group::{self, BlockedCaller, Timeout};
use crate::plugin::{ResultBuffer, StagingBuffer, StepOptions, Team};
use crate::signals;

fn submit(op: Op, id: i32, options: StepOptions, towers: impl FnOnce() -> Result<Vec<Vec<Tensor>>>) {
    // The memory's validity is what the bindings ask of their callers.
    match guard(|| Ok((team(id)?, towers()?))) {
        // SAFETY: see the bindings' contracts: dl_comm.h, completion.h.
        Ok((team, towers)) if op == Op::Allreduce && id != CONTROL => unsafe { team.gradients(towers, options) },
        // SAFETY: as above.
        Ok((team, towers)) => unsafe { team.submit(op, towers, options) },
        Err(error) => options.fail(error),
    }
}

/// Starts the average of several replicas of a list of tensors on team `id`, by the team's schedule. The lists are made by
/// `towers`, whose errors reach `options` too.
pub fn average(id: i32, options: StepOptions, towers: impl FnOnce() -> Result<Vec<Vec<Tensor>>>) {
    submit(Op::Allreduce, id, options, towers);
}

/// Counts sessions that have ended, from which no thread uses a team any more.
static ENDED: AtomicU64 = AtomicU64::new(0);

/// The team that a thread has called last.
struct Last {
    ended: u64,
    id: i32,
    team: Arc<Team>,
}

thread_local! {
    static LAST_TEAM: Cell<Option<Last>> = const { Cell::new(None) };
}

/// The session has ended: its teams are found no more.
pub(super) fn forget_teams() {
    ENDED.fetch_add(1, Ordering::AcqRel);
}

/// Calls `body` with team `id`, which a thread that has called it before finds without a lock: that and the counting of
/// references were a sixth of a short call.
fn with_team<T>(id: i32, body: impl FnOnce(&Team) -> T) -> Result<T> {
    check_fork()?;
    let ended = ENDED.load(Ordering::Acquire);
    // A call of this thread within the call finds nothing here.
    let last = LAST_TEAM.try_with(Cell::take).ok().flatten().filter(|last| last.id == id && last.ended == ended);
    let last = match last {
        Some(last) => last,
        None => Last { ended, id, team: team(id)? },
    };
    let result = body(&last.team);
    // A thread that is ending has no place for it any more.
    let _kept = LAST_TEAM.try_with(|place| place.set(Some(last)));
    Ok(result)
}

/// Averages one list in place as [`average_and_wait`] does, the short way if there is one.
///
/// # Errors
/// The outcome.
///
/// # Safety
/// The memory of `views` is valid, and nobody else uses it meanwhile.
pub unsafe fn average_list(id: i32, name: &str, limit: Timeout, views: &[View<'_>]) -> Result<()> {
    // SAFETY: the caller's promise.
    if let Some(result) = with_team(id, |team| unsafe { team.try_small_allreduce(name, views, limit) })? {
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
pub unsafe fn average_and_wait(id: i32, name: &str, limit: Timeout, towers: Vec<Vec<Tensor>>) -> Result<()> {
    if id == CONTROL || !may_return_early(id, 0)? {
        return wait(name, |options| average(id, options.with_timeout(limit), || Ok(towers)));
    }
    // SAFETY: the caller's promise.
    let (staging, copies) = unsafe { StagingBuffer::of(&towers, team(id)?.staging()) }?;
    let mine = Arc::clone(&staging);
    let result = wait_for_result(name, |options| {
        let options = StepOptions { results: Some(mine), ..options.with_timeout(limit) };
        average(id, options, || Ok(copies));
    })?;
    let result = result.map_or(Ok(staging), StagingBuffer::from_results)?;
    // SAFETY: the caller's promise; a result is nobody else's any more.
    unsafe { result.copy_to(&towers) };
    Ok(())
}

/// Averages a list of tensors in device memory, and waits until the device's stream will see the result.
///
/// # Errors
/// The outcome.
///
/// # Safety
/// The memory of `tensors` is valid, and nobody but what is on the stream before and after the call uses it.
pub unsafe fn average_on(device: Device, id: i32, name: &str, limit: Timeout, tensors: Vec<Tensor>) -> Result<()> {
    wait(name, |options| average(id, options.with_timeout(limit).with_device(Some(device)), || Ok(vec![tensors])))
}

/// Starts the broadcast of a list of tensors from rank `root`.
pub fn broadcast(root: i32, options: StepOptions, tensors: impl FnOnce() -> Result<Vec<Tensor>>) {
    broadcast_towers(root, options, || Ok(vec![tensors()?]));
}

/// Starts the broadcast of the root's first tower to all towers of all ranks.
pub fn broadcast_towers(root: i32, options: StepOptions, towers: impl FnOnce() -> Result<Vec<Vec<Tensor>>>) {
    match usize::try_from(root) {
        Ok(root) => submit(Op::Broadcast { root }, CONTROL, options, towers),
        Err(_) => options.fail(Error::Invalid(format!("root {root} is not a rank"))),
    }
}

/// Starts a barrier.
pub fn barrier(options: StepOptions) {
    submit(Op::Barrier, CONTROL, options, || Ok(Vec::new()));
}

/// Runs `start` with a options and waits for its outcome.
///
/// # Errors
/// The outcome.
pub fn wait(name: &str, start: impl FnOnce(StepOptions)) -> Result<()> {
    wait_for_result(name, start).map(drop)
}

/// Ends the teams in which calls of this process have not ended: a signal has interrupted their caller.
fn interrupt() {
    // Without a session there is nothing to end.
    let _ended = started(|runtime| {
        runtime.process_groups.interrupt();
        Ok(())
    });
}

/// What a caller holds that waits, outside of the core, for a call that it has started; `None` when nothing is up any more.
pub fn blocked() -> Option<BlockedCaller> {
    started(|runtime| Ok(runtime.process_groups.blocked())).ok()
}

/// Looks for signals for such a caller. When one wants the wait to end, the calls that are under way end soon, with an error.
pub fn look_for_signals() {
    if signals::interrupted() {
        interrupt();
    }
}

fn wait_for_result(name: &str, start: impl FnOnce(StepOptions)) -> Result<Option<Arc<dyn ResultBuffer>>> {
    group::wait_for_result(interrupt, |done| {
        let mut options = StepOptions::new(done);
        (options.call.name, options.call.caller_blocks) = (name.to_owned(), true);
        start(options);
    })
}

/// Whether coming averages of `owner` on team `id` may return before they have ended, if they bring memory of their own.
///
/// # Errors
/// When there is no such team.
pub fn may_return_early(id: i32, owner: u64) -> Result<bool> {
    team(id).map(|team| id != CONTROL && team.may_return_early(owner))
}
