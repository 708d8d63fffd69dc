//! Collectives on a group, without a schedule.

use std::sync::Arc;
use std::time::Duration;

use super::state::{CONTROL, check_fork, group_of_team, process_name, started, topology};
use super::waits::{blocked, interrupt};
use crate::buffer::{Buffer, Tensor, View};
use crate::collective::{Counts, Op};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{
    self, Allocate, CallHandle, CallOptions, CallWords, Group, Join, OnComplete, Position, RaggedTensor,
    SmallCallInput, Timeout, wait_for_result,
};
use crate::reduce::ReduceOp;
use crate::timeline;

/// The code of Adasum among the operators, which is no operator of single elements.
const ADASUM: i32 = 9;

/// What a call asks for, by the codes of `dl_comm.h`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CollectiveRequest {
    /// One collective.
    Collective(Op),
    /// The allreduce by Adasum, a chain of collectives.
    Adasum,
}

impl CollectiveRequest {
    /// Reads the codes of a collective and of its operator, the factors of a scaled operator, and the root. What the
    /// collective does not use is ignored.
    ///
    /// # Errors
    /// [`Error::Invalid`] for unknown codes and for a negative root.
    #[inline(always)]
    pub fn from_codes(collective: i32, reduce: i32, (pre, post): (f64, f64), root: i32) -> Result<CollectiveRequest> {
        let (Ok(root), Some(known)) = (usize::try_from(root), ReduceOp::from_code(reduce)) else {
            return CollectiveRequest::from_other_codes(collective, reduce, root);
        };
        Op::from_code(collective, known.with_factors(pre, post), root).map(CollectiveRequest::Collective)
    }

    /// As `from_codes`, for Adasum and codes that there are not.
    #[cold]
    fn from_other_codes(collective: i32, reduce: i32, root: i32) -> Result<CollectiveRequest> {
        let root = usize::try_from(root).map_err(|_| Error::Invalid(format!("root {root} is negative")))?;
        if reduce != ADASUM {
            return Err(Error::Invalid(format!("no operator has the code {reduce}")));
        }
        let op = Op::from_code(collective, ReduceOp::Sum, root)?;
        match op.collective.reduces {
            true if op.is_allreduce() => Ok(CollectiveRequest::Adasum),
            true => Err(Error::Invalid(format!("adasum is an operator of allreduce, not of {}", op.title()))),
            false => Ok(CollectiveRequest::Collective(op)),
        }
    }

    /// The lengths of the blocks of `tensors` tensors, as in [`Counts::from_lists`]; `None` where the caller gives none.
    ///
    /// # Errors
    /// [`Error::Invalid`] for counts that the collective does not take.
    pub fn counts(self, tensors: usize, send: Option<&[usize]>, receive: Option<&[usize]>) -> Result<Counts> {
        match self {
            CollectiveRequest::Collective(op) => Counts::from_lists(op, tensors, send, receive),
            CollectiveRequest::Adasum if send.is_some() || receive.is_some() => {
                Err(Error::Invalid("adasum: takes no counts; it works on whole tensors".into()))
            }
            CollectiveRequest::Adasum => Ok(Counts::Even),
        }
    }
}

/// Starts a call on `tensors` and returns a handle; `then` gets the result too, unless this returns an error.
///
/// # Errors
/// If the process may not make calls. The errors of the call are in the handle.
///
/// # Safety
/// As for [`Group::submit`], until the call has ended.
pub unsafe fn start(
    group: &Arc<Group>,
    request: CollectiveRequest,
    tensors: Vec<Tensor>,
    options: CallOptions,
    then: Option<OnComplete>,
) -> Result<CallHandle> {
    check_fork()?;
    let (handle, done) = CallHandle::new(then);
    let options = CallOptions { loss: Some(handle.loss()), ..options };
    // SAFETY: the caller's promise.
    unsafe { submit(group, request, tensors, options, done) };
    Ok(group.led(handle))
}

/// Starts an all-gather or all-to-all of which a rank knows only the lengths that it sends; `then` as for [`start`].
///
/// # Errors
/// As for [`start`].
///
/// # Safety
/// As for [`group::start_ragged`].
pub unsafe fn start_ragged(
    group: &Arc<Group>,
    (op, tensors, allocate): RaggedCall,
    options: CallOptions,
    then: Option<OnComplete>,
) -> Result<CallHandle> {
    check_fork()?;
    let (handle, done) = CallHandle::new(then);
    // SAFETY: the caller's promise.
    unsafe { group::start_ragged(group, op, tensors, options, allocate, done) };
    Ok(group.led(handle))
}

/// Runs such a call to its end.
///
/// # Errors
/// Those of the call.
///
/// # Safety
/// As for [`group::start_ragged`].
pub unsafe fn run_ragged(group: &Arc<Group>, (op, tensors, allocate): RaggedCall, options: CallOptions) -> Result<()> {
    check_fork()?;
    // Its collectives are started one by the other, not by this thread.
    let _blocked = blocked();
    // SAFETY: the caller's promise.
    wait_for_result(interrupt, |done| unsafe { group::start_ragged(group, op, tensors, options, allocate, done) })
}

/// What [`group::start_ragged`] takes: the collective, its tensors, and what makes room for the results.
pub type RaggedCall = (Op, Vec<RaggedTensor>, Allocate);

/// Starts a call as [`start`], without a handle. `done` gets every error.
///
/// # Safety
/// As for [`start`].
pub unsafe fn submit(
    group: &Arc<Group>,
    request: CollectiveRequest,
    tensors: Vec<Tensor>,
    options: CallOptions,
    done: OnComplete,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match request {
            CollectiveRequest::Collective(op) => group.submit(op, towers(op, tensors), options, done),
            CollectiveRequest::Adasum => group::start_adasum(group, tensors, options, done),
        }
    }
}

/// What the fast path of small calls needs to know of a call. It takes calls on host memory with even blocks and without
/// an instance.
#[derive(Debug, Clone, Copy)]
pub struct SmallCallOptions<'a> {
    /// As in [`CallOptions`].
    pub name: &'a str,
    /// As in [`CallOptions`].
    pub by_name: bool,
    /// As in [`CallOptions`].
    pub timeout: Timeout,
}

/// Runs a call to its end by the fast path, as [`Group::try_small`]. `None`: no effect.
///
/// # Safety
/// As there.
#[inline]
pub unsafe fn try_small<'v>(
    group: &Group,
    words: Option<CallWords<'_>>,
    input: impl FnOnce() -> Option<SmallCallInput<'v>>,
    timeout: Timeout,
) -> Option<Result<()>> {
    if check_fork().is_err() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { group.try_small(words, input, timeout) }.map(|(result, _)| result)
}

/// Starts a call by the fast path, as [`Group::try_start_small`]. `None`: no effect.
///
/// # Safety
/// As there.
pub unsafe fn try_start_small<'v>(
    group: &Group,
    words: Option<CallWords<'_>>,
    input: impl FnOnce() -> Option<SmallCallInput<'v>>,
    timeout: Timeout,
    then: &mut Option<OnComplete>,
) -> Option<CallHandle> {
    if check_fork().is_err() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { group.try_start_small(words, input, timeout, then) }
}

/// Runs a call to its end, by the fast path if it is `small`. Otherwise `options` makes its options.
///
/// # Errors
/// Those of the call, and of `options`.
///
/// # Safety
/// As for [`Group::submit`].
pub unsafe fn run(
    group: &Arc<Group>,
    request: CollectiveRequest,
    views: &[View<'_>],
    small: Option<SmallCallOptions<'_>>,
    options: impl FnOnce() -> Result<CallOptions>,
) -> Result<()> {
    if let (Some(SmallCallOptions { name, by_name, timeout }), CollectiveRequest::Collective(op)) = (small, request) {
        // SAFETY: the caller's promise.
        let input = || Some(SmallCallInput { op, name, by_name, views });
        // SAFETY: the caller's promise.
        let result = unsafe { try_small(group, None, input, timeout) };
        if let Some(result) = result {
            return result;
        }
    }
    check_fork()?;
    let options = CallOptions { caller_blocks: true, ..options()? };
    // The collectives of an Adasum are started one by the other, not by this thread.
    let _blocked = (request == CollectiveRequest::Adasum).then(blocked);
    let tensors = views.iter().map(|view| view.to_tensor()).collect();
    // SAFETY: the caller's promise.
    wait_for_result(interrupt, |done| unsafe { submit(group, request, tensors, options, done) })
}

/// Runs a collective to its end in the group of all ranks that has no schedule.
///
/// # Errors
/// Those of the call; if the process may not make calls.
///
/// # Safety
/// As for [`Group::submit`].
pub unsafe fn run_on_all(op: Op, views: &[View<'_>], call: SmallCallOptions<'_>, device: Option<Device>) -> Result<()> {
    let (group, SmallCallOptions { name, by_name, timeout }) = (group_of_team(CONTROL)?, call);
    let options = || Ok(CallOptions { name: name.to_owned(), by_name, timeout, device, ..CallOptions::default() });
    // SAFETY: the caller's promise.
    unsafe { run(&group, CollectiveRequest::Collective(op), views, device.is_none().then_some(call), options) }
}

/// Broadcasts the first tower of rank `root` to all towers of all ranks, and waits.
///
/// # Errors
/// As for [`run_on_all`].
///
/// # Safety
/// As for [`Group::submit`].
pub unsafe fn broadcast_towers(root: i32, towers: Vec<Vec<Tensor>>, device: Option<Device>) -> Result<()> {
    let (op, group) = (broadcast_from(root)?, group_of_team(CONTROL)?);
    let options = CallOptions { caller_blocks: true, device, ..CallOptions::default() };
    // SAFETY: the caller's promise.
    wait_for_result(interrupt, |done| unsafe { group.submit(op, towers, options, done) })
}

/// The broadcast from rank `root`.
///
/// # Errors
/// [`Error::Invalid`] if `root` is negative.
pub fn broadcast_from(root: i32) -> Result<Op> {
    let rank = usize::try_from(root).map_err(|_| Error::Invalid(format!("root {root} is not a rank")))?;
    Ok(Op::broadcast(rank))
}

/// A barrier of all ranks; `name` is part of what must match.
///
/// # Errors
/// As for [`run_on_all`].
pub fn barrier(name: &str, timeout: Timeout) -> Result<()> {
    // SAFETY: a barrier has no tensors.
    unsafe { run_on_all(Op::BARRIER, &[], SmallCallOptions { name, by_name: false, timeout }, None) }
}

/// Waits for a call that another function has started, as [`CallHandle::wait`].
///
/// # Errors
/// Those of the call, and of the wait.
pub fn wait_for(handle: &CallHandle, timeout: Option<Duration>) -> Result<()> {
    check_fork()?;
    if timeout.is_none()
        && let Some(result) = handle.complete()
    {
        return result;
    }
    // This thread makes no calls meanwhile, which deadlock detection needs to know.
    let _blocked = blocked();
    handle.wait(timeout, interrupt)
}

/// Contributes zeros to the calls of the other ranks until all have joined, as [`Group::start_join`]; without a group, on
/// all teams. Returns the rank that was the last, in the group or in the job.
///
/// # Errors
/// As for [`Group::start_join`]; [`Error::State`] if a team has a schedule with non-blocking calls.
pub fn join(group: Option<&Arc<Group>>, timeout: Timeout) -> Result<usize> {
    check_fork()?;
    let joins = |other: &Arc<Group>| group.is_none_or(|group| group.number() == other.number());
    let teams: Vec<_> = started(|runtime| {
        let teams = runtime.teams.iter().filter(|(_, team)| joins(team.group()));
        Ok(teams.map(|(id, team)| (*id, Arc::clone(team))).collect())
    })?;
    if let Some((id, _)) = teams.iter().find(|(_, team)| team.may_return_early(0)) {
        let text = format!("team {id} has a schedule with non-blocking calls, whose positions would differ after join");
        return Err(Error::State(text));
    }
    if let Some(group) = group {
        let join = group.start_join(timeout)?;
        return wait_for(&join.handle, None).map(|()| join.last());
    }
    // All are started before an error returns: other ranks may join those that work.
    let at = timeline::now();
    let joins: Vec<_> = teams.iter().map(|(_, team)| team.group().start_join(timeout)).collect();
    let ended = joins.into_iter().collect::<Result<Vec<Join>>>()?;
    wait_for_all(&ended)?;
    let position = group::position(ended.iter().map(Join::contributions).sum(), at);
    let mut all = vec![Position::default(); topology()?.size()];
    let buffer = Buffer::new(position.as_ptr().cast(), all.as_mut_ptr().cast(), position.len(), DType::I64);
    let (view, name) = (View { buffer, shape: &[] }, "join: the last rank");
    // SAFETY: the numbers are used by nobody else.
    unsafe { run_on_all(Op::ALLGATHER, &[view], SmallCallOptions { name, by_name: false, timeout }, None) }?;
    Ok(group::last(&all))
}

/// Waits until all have ended, or one with an error.
fn wait_for_all(joins: &[Join]) -> Result<()> {
    const CHECK: Duration = Duration::from_millis(20);
    let _blocked = blocked();
    loop {
        let mut pending = None;
        for join in joins {
            match join.handle.test() {
                Some(result) => result?,
                None => pending = Some(join),
            }
        }
        let Some(join) = pending else { return Ok(()) };
        match join.handle.wait(Some(CHECK), interrupt) {
            // The next look finds the error of a call that has ended since.
            Err(Error::Timeout(_)) => {}
            result => result?,
        }
    }
}

/// Ends a group after a failure: its calls fail on all members, with an error that contains the first line of `why`.
pub fn abort(group: &Group, why: &str) {
    let why = why.lines().next().map_or_else(String::new, |line| format!(": {line}"));
    let name = group.call_config().key.name();
    group.fail(&Error::PeerLost(format!("{} has ended {name}{why}", process_name())));
}

fn towers(op: Op, tensors: Vec<Tensor>) -> Vec<Vec<Tensor>> {
    if op.is_barrier() { Vec::new() } else { vec![tensors] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_give_requests() {
        let request = |collective, reduce, root| CollectiveRequest::from_codes(collective, reduce, (2.0, 3.0), root);
        assert_eq!(request(1, 1, 0), Ok(CollectiveRequest::Collective(Op::MEAN)));
        assert_eq!(request(1, 9, 0), Ok(CollectiveRequest::Adasum));
        assert_eq!(
            request(1, 8, 0),
            Ok(CollectiveRequest::Collective(Op::allreduce(ReduceOp::ScaledSum { pre: 2.0, post: 3.0 })))
        );
        assert_eq!(request(2, 9, 1), Ok(CollectiveRequest::Collective(Op::broadcast(1))));
        assert!(matches!(request(8, 9, 0), Err(Error::Invalid(_))), "reduce-scatter by Adasum");
        for (collective, reduce, root) in [(0, 0, 0), (1, 14, 0), (1, -1, 0), (4, 0, -1)] {
            assert!(matches!(request(collective, reduce, root), Err(Error::Invalid(_))));
        }
        assert!(CollectiveRequest::Adasum.counts(1, Some(&[1]), None).is_err());
    }
}
