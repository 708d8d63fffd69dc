//! The state of a team's schedule: counted calls, and the means carried over to the next call.
//!
//! Each scheduled call has an [`InFlightMean`]: its allreduce on the group's threads. [`super::result_assembly`] builds
//! a call's result when all of its means are complete. A mean that is carried to the next call is stored here with its
//! memory, by list of tensors. So calls on different lists (of two networks, or of two buckets) never receive each
//! other's means.
//! Thread rule: a [`ScheduleState`] is protected by the team's lock; an [`InFlightMean`] may be used from any thread.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::schedule::{Schedule, Verbosity};
use super::weighted_sum::CarryWeights;
use crate::buffer::Buffer;
use crate::error::Result;
use crate::lock::lock;

/// The memory of a scheduled call. The binding that made the call owns it, and keeps it until its mean has been
/// returned. May be dropped on any thread.
pub trait ResultBuffer: Any + Send + Sync {
    /// Identifies the kind of buffer. Buffers of one kind can replace each other.
    fn owner_type(&self) -> usize;

    /// Sets the weights of the call's own mean and of the mean in this buffer, for callers that add them themselves
    /// ([`super::StepOptions::return_weights`]). Called before the caller receives this buffer.
    fn set_weights(&self, _own: f64, _here: f64) {}

    /// Creates a zeroed buffer for the same tensors. Returns it with the addresses of the tensors, tower by tower.
    ///
    /// # Errors
    /// [`crate::error::Error::System`] when memory is exhausted.
    fn zeros_like(&self) -> Result<(Arc<dyn ResultBuffer>, Vec<usize>)>;
}

type Continuation = Box<dyn FnOnce(Result<()>) + Send>;

enum PendingState {
    Running(Vec<Continuation>),
    Ended(Result<()>),
}

/// A mean whose allreduce is running or complete.
pub(super) struct InFlightMean {
    state: Mutex<PendingState>,
    /// Owns the memory; without it the mean cannot be carried to another call.
    pub results: Option<Arc<dyn ResultBuffer>>,
    /// The tensors with the means, of all towers.
    pub means: Vec<Buffer>,
}

impl InFlightMean {
    pub fn new(results: Option<Arc<dyn ResultBuffer>>, means: Vec<Buffer>) -> Arc<InFlightMean> {
        Arc::new(InFlightMean { state: Mutex::new(PendingState::Running(Vec::new())), results, means })
    }

    /// Completes the allreduce and calls the continuations.
    pub fn end(&self, result: &Result<()>) {
        let mut state = lock(&self.state);
        let before = std::mem::replace(&mut *state, PendingState::Ended(result.clone()));
        drop(state);
        if let PendingState::Running(waiting) = before {
            waiting.into_iter().for_each(|next| next(result.clone()));
        }
    }

    /// Calls `next` with the outcome: immediately if complete, else on the thread that completes it.
    pub fn then(&self, next: Continuation) {
        let mut state = lock(&self.state);
        let result = match &mut *state {
            PendingState::Running(waiting) => return waiting.push(next),
            PendingState::Ended(result) => result.clone(),
        };
        drop(state);
        next(result);
    }
}

/// A mean carried over to the next call on its list.
struct CarriedMean {
    mean: Arc<InFlightMean>,
    carry: f64,
}

/// A list of tensors with repeated calls.
#[derive(Default)]
struct TensorListState {
    /// The owner of the calls; 0 if not specified.
    owner: u64,
    /// Whether the list is among those whose means must be returned before the last call.
    counted: bool,
    /// Whether an earlier call was in the non-blocking phase: the first call blocks.
    entered: bool,
    carried: Option<CarriedMean>,
}

/// The plan of a call according to the schedule.
pub(super) struct CallPlan {
    /// Index of the call.
    pub index: u64,
    /// The carries to the next call and from the previous call.
    pub weights: CarryWeights,
    /// The carried mean that the call returns.
    pub before: Option<Arc<InFlightMean>>,
    /// The position in the schedule, for messages.
    pub position: String,
    /// Whether this rank prints the waited time afterwards.
    pub prints: bool,
}

/// The schedule of a team and its carried means.
pub(super) struct ScheduleState {
    schedule: Schedule,
    rank: usize,
    calls: u64,
    /// The number of lists with counted calls.
    counted: u64,
    lists: HashMap<u64, TensorListState>,
}

impl ScheduleState {
    pub fn new(rank: usize) -> ScheduleState {
        ScheduleState { schedule: Schedule::BLOCKING, rank, calls: 0, counted: 0, lists: HashMap::new() }
    }

    /// Starts `schedule` at its first call. The next call on a list returns the list's carried mean.
    pub fn configure(&mut self, schedule: Schedule) {
        self.schedule = schedule;
        self.calls = 0;
        self.counted = 0;
        self.lists.retain(|_, list| list.carried.is_some());
        self.lists.values_mut().for_each(|list| (list.counted, list.entered) = (false, false));
    }

    /// Whether future calls of `owner` may return before their allreduce completes, or return a carried mean. Lists of
    /// other owners are ignored: they may already be released on some ranks only.
    pub fn may_return_early(&self, owner: u64) -> bool {
        let has_carried_mean = || self.lists.values().any(|list| list.owner == owner && list.carried.is_some());
        self.schedule.may_carry_from(self.calls.saturating_sub(1)) || has_carried_mean()
    }

    pub fn verbosity(&self) -> Verbosity {
        self.schedule.verbosity
    }

    /// The number of carried means that no call has returned.
    pub fn undelivered_means(&self) -> usize {
        self.lists.values().filter(|list| list.carried.is_some()).count()
    }

    /// Plans the next call, which is on `list` of `owner` with the buffer `results`. A call that `continues_step` is
    /// not counted. Without `results`, or if the carried mean is in another kind of buffer, the call carries nothing
    /// over: the carried mean is then added to the call's own result.
    pub fn plan_call(
        &mut self,
        list: u64,
        owner: u64,
        continues_step: bool,
        results: Option<&dyn ResultBuffer>,
    ) -> CallPlan {
        let index = if continues_step { self.calls.saturating_sub(1) } else { self.calls };
        let state = self.lists.entry(list).or_default();
        state.owner = owner;
        if !continues_step {
            self.calls += 1;
            self.counted += u64::from(!state.counted);
            state.counted = true;
        }
        let carry = self.schedule.carry_weight(index, self.counted.max(1));
        let (before, carried) = match state.carried.take() {
            Some(CarriedMean { mean: in_flight, carry }) => (Some(in_flight), carry),
            None => (None, 0.0),
        };
        let carried_buffer = before.as_ref().and_then(|before| before.results.as_deref());
        let can_carry = results.is_some_and(|results| {
            carried_buffer.is_none_or(|carried_buffer| carried_buffer.owner_type() == results.owner_type())
        });
        let left = if state.entered && can_carry { carry } else { 0.0 };
        state.entered = self.schedule.is_non_blocking(index);
        if !self.schedule.may_carry_from(index) {
            // No more carries: drop the list, so unused lists do not leak.
            self.lists.remove(&list);
        }
        let prints = !continues_step && self.schedule.prints_at(index) && self.schedule.verbosity.prints_on(self.rank);
        CallPlan {
            index,
            weights: CarryWeights { left, carried },
            before,
            position: self.schedule.position(index, left),
            prints,
        }
    }

    /// Drops the lists of `owner` and their carried means. The call counts stay, because ranks may release at different
    /// times.
    pub fn release(&mut self, owner: u64) {
        self.lists.retain(|_, list| list.owner != owner);
    }

    /// Drops the carried means of `owner`.
    pub fn discard_carried(&mut self, owner: u64) {
        self.lists.values_mut().filter(|list| list.owner == owner).for_each(|list| list.carried = None);
    }

    /// Carries a share of `in_flight`'s mean over to the next call on `list`.
    pub fn carry(&mut self, list: u64, in_flight: Arc<InFlightMean>, carry: f64) {
        if carry > 0.0 {
            self.lists.entry(list).or_default().carried = Some(CarriedMean { mean: in_flight, carry });
        }
    }

    /// After a failure of `failed`, which its caller has received: replaces it by `replacement` for the next call on
    /// `list`, unless that call has already been planned.
    pub fn replace_carried(
        &mut self,
        list: u64,
        failed: &Arc<InFlightMean>,
        replacement: Option<(Arc<InFlightMean>, f64)>,
    ) {
        let Some(state) = self.lists.get_mut(&list) else { return };
        if state.carried.as_ref().is_none_or(|carried| Arc::ptr_eq(&carried.mean, failed)) {
            state.carried = replacement.map(|(in_flight, carry)| CarriedMean { mean: in_flight, carry });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_used_once_do_not_leak() {
        let mut schedule = ScheduleState::new(0);
        for list in 0..100 {
            let plan = schedule.plan_call(list, 0, false, None);
            assert_eq!((plan.index, plan.weights.left), (list, 0.0));
            assert!(schedule.lists.is_empty());
        }
    }
}
