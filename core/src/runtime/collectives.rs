//! Collectives on a group, without a schedule.

use std::sync::Arc;

use super::calls::{blocked, interrupt};
use super::state::{check_fork, team};
use crate::buffer::{Tensor, View};
use crate::collective::{Counts, Op};
use crate::error::Result;
use crate::group::{self, CallHandle, CallOptions, Group, OnComplete, wait_for_result};

/// The group of team `id`.
///
/// # Errors
/// If there is no such team.
pub fn group_of_team(id: i32) -> Result<Arc<Group>> {
    team(id).map(|team| Arc::clone(team.group()))
}

/// Starts `op` on `tensors` and returns a handle; `then` gets the result too, unless this returns an error.
///
/// # Errors
/// If the process may not make calls. The errors of the call are in the handle.
///
/// # Safety
/// As for [`Group::submit`], until the call has ended.
pub unsafe fn start(
    group: &Group,
    op: Op,
    tensors: Vec<Tensor>,
    options: CallOptions,
    then: Option<OnComplete>,
) -> Result<CallHandle> {
    check_fork()?;
    let (handle, done) = CallHandle::new(then);
    // SAFETY: the caller's promise.
    unsafe { group.submit(op, towers(op, tensors), options, done) };
    Ok(handle)
}

/// Runs `op` to its end, by the fast path if possible.
///
/// # Errors
/// Those of the call.
///
/// # Safety
/// As for [`Group::submit`].
pub unsafe fn run(group: &Group, op: Op, views: &[View<'_>], mut options: CallOptions) -> Result<()> {
    check_fork()?;
    if options.device.is_none() && options.counts == Counts::Even {
        // SAFETY: the caller's promise.
        let ended = unsafe { group.try_small(op, &options.name, views, options.timeout) };
        if let Some((result, _)) = ended {
            return result;
        }
    }
    options.caller_blocks = true;
    let tensors = views.iter().map(|view| view.to_tensor()).collect();
    // SAFETY: the caller's promise.
    wait_for_result(interrupt, |done| unsafe { group.submit(op, towers(op, tensors), options, done) })
}

/// As [`start`], of the Adasum of `tensors` ([`start_adasum`](group::start_adasum)).
///
/// # Errors
/// As for [`start`].
///
/// # Safety
/// As for [`start`].
pub unsafe fn start_adasum(
    group: &Arc<Group>,
    tensors: Vec<Tensor>,
    options: CallOptions,
    then: Option<OnComplete>,
) -> Result<CallHandle> {
    check_fork()?;
    let (handle, done) = CallHandle::new(then);
    // SAFETY: the caller's promise.
    unsafe { group::start_adasum(group, tensors, options, done) };
    Ok(handle)
}

/// Waits for a call that another function has started, as [`CallHandle::wait`].
///
/// # Errors
/// Those of the call, and of the wait.
pub fn wait_for(handle: &CallHandle, timeout: Option<std::time::Duration>) -> Result<()> {
    check_fork()?;
    // This thread makes no calls meanwhile, which deadlock detection needs to know.
    let _blocked = blocked();
    handle.wait(timeout, interrupt)
}

fn towers(op: Op, tensors: Vec<Tensor>) -> Vec<Vec<Tensor>> {
    if op.is_barrier() { Vec::new() } else { vec![tensors] }
}
