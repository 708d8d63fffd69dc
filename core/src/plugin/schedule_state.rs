//! The calls of a team on its schedule: which of them block, which return the mean of the call before, and how much.
//!
//! Every scheduled call is a [`Flight`]: its average on the team's threads. What a call returns is put together when the
//! flights that it is made of have ended ([`super::delivery`]); a flight whose mean is left to the next call stays here,
//! with the memory that holds it, by the list of tensors: calls on different lists (of two networks, or of two buckets)
//! never get each other's means.
//! Thread rule: a [`ScheduleState`] is behind the team's lock; a [`Flight`] may be used from any thread.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::schedule::{Schedule, Verbosity};
use super::weighted_sum::CarryWeights;
use crate::buffer::Buffer;
use crate::error::Result;

/// The memory of a scheduled call, owned by the binding that made the call and kept until the mean in it has been returned.
/// May be dropped on any thread.
pub trait ResultBuffer: Any + Send + Sync {
    /// The same for all result buffers that the maker can take the place of each other; other makers have other kinds.
    fn owner_type(&self) -> usize;

    /// How much of the call's own mean, and of what this memory holds, its result is made of: for callers that put it
    /// together themselves ([`super::CallOptions::return_weights`]). Called before the caller gets this result buffer.
    fn set_weights(&self, _own: f64, _here: f64) {}

    /// Fresh memory of zeros for the same tensors, and the addresses of the tensors in it, tower by tower.
    ///
    /// # Errors
    /// [`crate::error::Error::System`] when there is no memory.
    fn zeros_like(&self) -> Result<(Arc<dyn ResultBuffer>, Vec<usize>)>;
}

type Continuation = Box<dyn FnOnce(Result<()>) + Send>;

enum PendingState {
    Running(Vec<Continuation>),
    Ended(Result<()>),
}

/// An average on its way, or come to its end.
pub(super) struct InFlightMean {
    state: Mutex<PendingState>,
    /// The owner of the memory; without one the mean cannot be left to another call.
    pub results: Option<Arc<dyn ResultBuffer>>,
    /// Where the means are: the tensors of all towers.
    pub means: Vec<Buffer>,
}

impl InFlightMean {
    pub fn new(results: Option<Arc<dyn ResultBuffer>>, means: Vec<Buffer>) -> Arc<InFlightMean> {
        Arc::new(InFlightMean { state: Mutex::new(PendingState::Running(Vec::new())), results, means })
    }

    /// The average has ended.
    pub fn end(&self, result: &Result<()>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *state, PendingState::Ended(result.clone()));
        drop(state);
        if let PendingState::Running(waiting) = before {
            waiting.into_iter().for_each(|next| next(result.clone()));
        }
    }

    /// Calls `next` with the outcome: at once, on this thread, when it is known, else on the thread that ends it.
    pub fn then(&self, next: Continuation) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = match &mut *state {
            PendingState::Running(waiting) => return waiting.push(next),
            PendingState::Ended(result) => result.clone(),
        };
        drop(state);
        next(result);
    }
}

/// A mean that was left to the next call on its list.
struct CarriedMean {
    mean: Arc<InFlightMean>,
    carry: f64,
}

/// A list of tensors that is averaged again and again.
#[derive(Default)]
struct TensorListState {
    /// Who averages it; 0 for nobody in particular.
    owner: u64,
    /// Whether it counts among the lists that are to be handed out before the last call.
    counted: bool,
    /// Whether a call on it was in the non-blocking phase already: the first one blocks.
    entered: bool,
    carried: Option<CarriedMean>,
}

/// What a call does, by the schedule.
pub(super) struct CallPlan {
    /// The number of the call.
    pub index: u64,
    /// What it leaves and what it gets.
    pub weights: CarryWeights,
    /// Whose mean it gets.
    pub before: Option<Arc<InFlightMean>>,
    /// Where it stands, for messages.
    pub position: String,
    /// Whether this rank prints afterwards.
    pub prints: bool,
}

/// The schedule of a team and what its calls have left behind.
pub(super) struct ScheduleState {
    schedule: Schedule,
    rank: usize,
    calls: u64,
    /// Lists whose calls count.
    counted: u64,
    lists: HashMap<u64, TensorListState>,
}

impl ScheduleState {
    pub fn new(rank: usize) -> ScheduleState {
        ScheduleState { schedule: Schedule::BLOCKING, rank, calls: 0, counted: 0, lists: HashMap::new() }
    }

    /// Starts `schedule` from its first call. Means that were left behind are returned by the next calls on their lists.
    pub fn configure(&mut self, schedule: Schedule) {
        self.schedule = schedule;
        self.calls = 0;
        self.counted = 0;
        self.lists.retain(|_, list| list.carried.is_some());
        self.lists.values_mut().for_each(|list| (list.counted, list.entered) = (false, false));
    }

    /// Whether coming calls of `owner` may return before their average has ended, or another one's mean. Lists of other
    /// owners do not count: one of them may be gone on one rank and not yet on another.
    pub fn may_return_early(&self, owner: u64) -> bool {
        let owed = || self.lists.values().any(|list| list.owner == owner && list.carried.is_some());
        self.schedule.may_carry_from(self.calls.saturating_sub(1)) || owed()
    }

    pub fn verbosity(&self) -> Verbosity {
        self.schedule.verbosity
    }

    /// The number of means that no call has returned.
    pub fn undelivered_means(&self) -> usize {
        self.lists.values().filter(|list| list.carried.is_some()).count()
    }

    /// What the next call does, which is on `list` of `owner` and brings `results`. A `part` belongs to the call before it and
    /// is not counted. Without a result buffer, or where the mean before is in a result buffer of another kind, nothing is left to the next
    /// call: what is behind is then added where the call's own result is.
    pub fn plan_call(&mut self, list: u64, owner: u64, part: bool, results: Option<&dyn ResultBuffer>) -> CallPlan {
        let index = if part { self.calls.saturating_sub(1) } else { self.calls };
        let state = self.lists.entry(list).or_default();
        state.owner = owner;
        if !part {
            self.calls += 1;
            self.counted += u64::from(!state.counted);
            state.counted = true;
        }
        let planned = self.schedule.carry_weight(index, self.counted.max(1));
        let (before, carried) = match state.carried.take() {
            Some(CarriedMean { mean: in_flight, carry }) => (Some(in_flight), carry),
            None => (None, 0.0),
        };
        let kept = before.as_ref().and_then(|before| before.results.as_deref());
        let keeps = results.is_some_and(|results| kept.is_none_or(|kept| kept.owner_type() == results.owner_type()));
        let left = if state.entered && keeps { planned } else { 0.0 };
        state.entered = self.schedule.is_non_blocking(index);
        if !self.schedule.may_carry_from(index) {
            // Nothing is left from here on. Lists of tensors that never come again must not fill the memory.
            self.lists.remove(&list);
        }
        let prints = !part && self.schedule.prints_at(index) && self.schedule.verbosity.prints_on(self.rank);
        CallPlan {
            index,
            weights: CarryWeights { left, carried },
            before,
            position: self.schedule.position(index, left),
            prints,
        }
    }

    /// Forgets the lists of `owner`, and the means that its last calls have left. What is counted stays: ranks may come here
    /// at different times.
    pub fn release(&mut self, owner: u64) {
        self.lists.retain(|_, list| list.owner != owner);
    }

    /// Forgets the means that the last calls of `owner` have left.
    pub fn discard_carried(&mut self, owner: u64) {
        self.lists.values_mut().filter(|list| list.owner == owner).for_each(|list| list.carried = None);
    }

    /// Leaves a share of `in_flight`'s mean to the next call on `list`.
    pub fn carry(&mut self, list: u64, in_flight: Arc<InFlightMean>, carry: f64) {
        if carry > 0.0 {
            self.lists.entry(list).or_default().carried = Some(CarriedMean { mean: in_flight, carry });
        }
    }

    /// After a failure of `failed`, which its caller has been told: puts `instead` in its place for the next call on `list`,
    /// unless that has come meanwhile.
    pub fn replace_carried(
        &mut self,
        list: u64,
        failed: &Arc<InFlightMean>,
        instead: Option<(Arc<InFlightMean>, f64)>,
    ) {
        let Some(state) = self.lists.get_mut(&list) else { return };
        if state.carried.as_ref().is_none_or(|behind| Arc::ptr_eq(&behind.mean, failed)) {
            state.carried = instead.map(|(in_flight, carry)| CarriedMean { mean: in_flight, carry });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_that_come_once_do_not_fill_the_memory() {
        let mut schedule = ScheduleState::new(0);
        for list in 0..100 {
            let plan = schedule.plan_call(list, 0, false, None);
            assert_eq!((plan.index, plan.weights.left), (list, 0.0));
            assert!(schedule.lists.is_empty());
        }
    }
}
