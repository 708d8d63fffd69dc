//! Calls of the bindings, which name teams by number, and groups below that of the control team. A function that blocks
//! returns the call's error.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::xxh3_64;

use super::collectives::{SmallCallOptions, run_on_all};
use super::state::{CONTROL, check_fork, group_number, team, topology};
use super::waits::interrupt;
use crate::buffer::{Buffer, Tensor, View};
use crate::collective::Op;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Result, guard};
use crate::group::{self, Timeout};
use crate::log::log_line;
use crate::plugin::{ResultBuffer, StagingBuffer, StepOptions, Team};

/// Starts an allreduce (mean) of several replicas of a list of tensors on team `id`, by the team's schedule. `towers`
/// makes the lists; its errors reach `options` too.
pub fn average(id: i32, options: StepOptions, towers: impl FnOnce() -> Result<Vec<Vec<Tensor>>>) {
    // The bindings require valid memory of their callers.
    match guard(|| Ok((team(id)?, towers()?))) {
        // SAFETY: the contracts of the bindings: dl_comm.h, completion.h.
        Ok((team, towers)) if id != CONTROL => unsafe { team.gradients(towers, options) },
        // SAFETY: as above.
        Ok((team, towers)) => unsafe { team.average(towers, options) },
        Err(error) => options.fail(error),
    }
}

/// Number of ended sessions; their teams must not be used any more.
static ENDED: AtomicU64 = AtomicU64::new(0);

/// The team that a thread has called last.
struct CachedTeam {
    num_ended: u64,
    id: i32,
    team: Arc<Team>,
}

thread_local! {
    static LAST_TEAM: Cell<Option<CachedTeam>> = const { Cell::new(None) };
}

/// Invalidates the cached teams when the session ends.
pub(super) fn forget_teams() {
    ENDED.fetch_add(1, Ordering::AcqRel);
}

/// Calls `body` with team `id`. A thread's last team is cached without a lock: the lock and the reference count took a
/// sixth of the time of a small call.
fn with_team<T>(id: i32, body: impl FnOnce(&Team) -> T) -> Result<T> {
    check_fork()?;
    if group_number(id).is_some() {
        // The cache would keep the group.
        return team(id).map(|team| body(&team));
    }
    let num_ended = ENDED.load(Ordering::Acquire);
    // The cache is empty during the call, so a nested call of this thread looks the team up.
    let last =
        LAST_TEAM.try_with(Cell::take).ok().flatten().filter(|last| last.id == id && last.num_ended == num_ended);
    let last = match last {
        Some(last) => last,
        None => CachedTeam { num_ended, id, team: team(id)? },
    };
    let result = body(&last.team);
    // Thread-local storage is gone while a thread exits.
    let _kept = LAST_TEAM.try_with(|cache| cache.set(Some(last)));
    Ok(result)
}

/// Runs an allreduce of one list in place like [`average_and_wait`], by the fast path if possible.
///
/// # Safety
/// The memory of `views` is valid and not used otherwise.
pub unsafe fn average_list(id: i32, name: &str, timeout: Timeout, views: &[View<'_>]) -> Result<()> {
    // SAFETY: the caller's promise.
    if let Some(result) = with_team(id, |team| unsafe { team.try_small_allreduce(name, views, timeout) })? {
        return result;
    }
    // SAFETY: as above.
    unsafe { average_and_wait(id, name, timeout, vec![views.iter().map(|view| view.to_tensor()).collect()]) }
}

/// Runs an allreduce of `towers` in place by the schedule of team `id`, and blocks. If the schedule lets calls return
/// early, it works on copies of the tensors.
///
/// # Safety
/// The memory of `towers` is valid and not used otherwise.
pub unsafe fn average_and_wait(id: i32, name: &str, timeout: Timeout, towers: Vec<Vec<Tensor>>) -> Result<()> {
    if !may_return_early(id, 0)? {
        return wait(name, |options| average(id, options.with_timeout(timeout), || Ok(towers)));
    }
    // SAFETY: the caller's promise.
    let (staging, copies) = unsafe { StagingBuffer::of(&towers, team(id)?.staging()) }?;
    let results = Arc::clone(&staging);
    let result = wait_for_result(name, |options| {
        let options = StepOptions { results: Some(results), ..options.with_timeout(timeout) };
        average(id, options, || Ok(copies));
    })?;
    let result = result.map_or(Ok(staging), StagingBuffer::from_results)?;
    // SAFETY: the caller's promise; nobody else uses a result any more.
    unsafe { result.copy_to(&towers) };
    Ok(())
}

/// Runs an allreduce of tensors in device memory. Returns once the device's stream waits for the result.
///
/// # Safety
/// The memory of `tensors` is valid and used only by work on the stream before and after the call.
pub unsafe fn average_on(device: Device, id: i32, name: &str, timeout: Timeout, tensors: Vec<Tensor>) -> Result<()> {
    wait(name, |options| average(id, options.with_timeout(timeout).with_device(Some(device)), || Ok(vec![tensors])))
}

/// Calls `start` with new options and waits for the result.
fn wait(name: &str, start: impl FnOnce(StepOptions)) -> Result<()> {
    wait_for_result(name, start).map(drop)
}

fn wait_for_result(name: &str, start: impl FnOnce(StepOptions)) -> Result<Option<Arc<dyn ResultBuffer>>> {
    group::wait_for_result(interrupt, |done| {
        let mut options = StepOptions::new(done);
        (options.call.name, options.call.caller_blocks) = (name.to_owned(), true);
        start(options);
    })
}

/// Whether later allreduces of `owner` on team `id` may return early if they own their memory.
///
/// # Errors
/// If there is no such team.
pub fn may_return_early(id: i32, owner: u64) -> Result<bool> {
    // Only teams have schedules.
    if id < 0 { Ok(false) } else { team(id).map(|team| team.may_return_early(owner)) }
}

/// Whether all ranks have the same bytes: compares hashes with those of rank 0, then combines the results of all ranks.
/// If they differ and `verbose` is set, this rank logs which of its tensors differ. Collective.
///
/// # Errors
/// [`Error::Invalid`] for invalid memory; those of a broadcast and an allreduce, such as
/// [`Error::Mismatch`] if the ranks' lists differ.
///
/// # Safety
/// The memory of `tensors` is valid, and nobody writes to it during the call.
pub unsafe fn buffers_match(tensors: &[Tensor], verbose: bool) -> Result<bool> {
    let rank = topology()?.rank();
    let hash = |tensor: &Tensor| {
        // SAFETY: the caller's promise.
        xxh3_64(unsafe { tensor.buffer.bytes(0, tensor.buffer.len()) })
    };
    tensors.iter().try_for_each(|tensor| tensor.buffer.check_source())?;
    // The descriptions of the tensors must match too: they go into the call's name and so into its signature.
    let list = tensors.iter().map(Tensor::describe).collect::<Vec<_>>().join(", ");
    let shortened = &list[..list.floor_char_boundary(200)];
    let name = format!("check_buffers_match of {shortened}{}", if shortened == list { "" } else { " ..." });
    let name = if shortened == list { name } else { format!("{name} (hash {:016x})", xxh3_64(list.as_bytes())) };
    let local: Vec<u64> = tensors.iter().map(hash).collect();
    let mut root_hashes = local.clone();
    let hashes = Buffer::in_place(root_hashes.as_mut_ptr().cast(), root_hashes.len(), DType::I64);
    let call = SmallCallOptions { name: &name, by_name: false, timeout: Timeout::GroupDefault };
    // SAFETY: this function owns the hashes.
    unsafe { run_on_all(Op::broadcast(0), &[View { buffer: hashes, shape: &[] }], call, None) }?;
    let differing: Vec<usize> = (0..local.len()).filter(|&index| local[index] != root_hashes[index]).collect();
    if verbose {
        for &index in &differing {
            log_line(&format!("tensor {index} ({}) of rank {rank} differs from rank 0's", tensors[index].describe()));
        }
    }
    let mut mismatch = [if differing.is_empty() { 0f64 } else { 1.0 }];
    let flag = Buffer::in_place(mismatch.as_mut_ptr().cast(), 1, DType::F64);
    // SAFETY: this function owns the flag.
    unsafe { run_on_all(Op::MEAN, &[View { buffer: flag, shape: &[] }], call, None) }?;
    Ok(mismatch[0] == 0.0)
}
