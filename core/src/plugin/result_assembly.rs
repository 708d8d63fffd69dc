//! Assembles the result of a scheduled call from its own mean, the carried mean, or both, once they are complete.
//!
//! Thread rule: an assembly runs once, on the thread that completes the last mean, or on the submitting thread.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::options::OnResult;
use super::schedule_state::{CallPlan, InFlightMean, ResultBuffer, ScheduleState};
use super::wait_time::WaitTime;
use super::weighted_sum::{CarryWeights, weighted_sum};
use crate::buffer::Buffer;
use crate::error::{Error, Result, guard};
use crate::lock::lock;

/// A call that waits for the means of its result.
pub(super) struct ResultAssembly {
    pub schedule: Arc<Mutex<ScheduleState>>,
    pub wait_time: Arc<WaitTime>,
    pub list_hash: u64,
    pub plan: CallPlan,
    pub own: Arc<InFlightMean>,
    pub done: OnResult,
    /// The caller itself adds the means.
    pub return_weights: bool,
    /// Start of the caller's wait; `None` if the caller measures it.
    pub waiting_since: Option<Instant>,
}

impl ResultAssembly {
    /// Completes the call once its means are complete.
    pub fn start(self) {
        match self.plan.before.clone() {
            None => self.after(Ok(())),
            Some(before) => before.then(Box::new(move |result| self.after(result))),
        }
    }

    fn after(self, before: Result<()>) {
        if self.plan.weights.left < 1.0 {
            let own = Arc::clone(&self.own);
            own.then(Box::new(move |own| self.end(before, own)));
        } else {
            self.end(before, Ok(()));
        }
    }

    fn end(mut self, before: Result<()>, own: Result<()>) {
        let weights = self.plan.weights;
        let carried_mean = self.plan.before.take();
        let result = match (before, own) {
            (Ok(()), Ok(())) => guard(|| results_of(weights, self.return_weights, &self.own, carried_mean)),
            (Err(error), own) => {
                // The carried mean is lost; carry the whole mean of this call over to the next call.
                if own.is_ok() && self.own.results.is_some() {
                    self.replace(Some((Arc::clone(&self.own), 1.0)));
                }
                Err(error)
            }
            (Ok(()), Err(error)) => {
                self.replace(carried_mean.map(|before| (before, weights.carried)));
                Err(error)
            }
        };
        let ResultAssembly { wait_time, plan, done, waiting_since, own, .. } = self;
        // Dropped here: the result buffer owns the mean's memory from now on, and its receiver frees it.
        drop(own);
        if let Some(since) = waiting_since {
            wait_time.add(since.elapsed().as_secs_f64());
        }
        if plan.prints {
            wait_time.report(plan.index);
        }
        done(result);
    }

    fn replace(&self, replacement: Option<(Arc<InFlightMean>, f64)>) {
        let mut schedule = lock(&self.schedule);
        schedule.replace_carried(self.list_hash, &self.own, replacement);
    }
}

/// The buffer with the result; `None` if the result is in the call's own tensors.
fn results_of(
    weights: CarryWeights,
    return_weights: bool,
    own: &Arc<InFlightMean>,
    before: Option<Arc<InFlightMean>>,
) -> Result<Option<Arc<dyn ResultBuffer>>> {
    let CarryWeights { left, carried } = weights;
    let Some(before) = before else {
        if left == 0.0 {
            return Ok(None);
        }
        let (results, addresses) = result_buffer(own)?.zeros_like()?;
        if return_weights {
            results.set_weights(1.0 - left, 0.0);
        } else if left < 1.0 {
            let zeros =
                |(mean, address): (&Buffer, usize)| Buffer::in_place(address as *mut u8, mean.len(), mean.dtype());
            let zeros: Vec<Buffer> = own.means.iter().zip(addresses).map(zeros).collect();
            mix(&own.means, &zeros, &zeros, weights);
        }
        return Ok(Some(results));
    };
    if return_weights && own.results.is_some() {
        let results = result_buffer(&before)?;
        results.set_weights(1.0 - left, carried);
        return Ok(Some(results));
    }
    if left == 0.0 {
        mix(&own.means, &before.means, &own.means, weights);
        return Ok(None);
    }
    if left < 1.0 {
        mix(&own.means, &before.means, &before.means, weights);
    } else if carried < 1.0 {
        // This call's own allreduce may still be running: do not read its mean.
        mix(&before.means, &before.means, &before.means, weights);
    }
    result_buffer(&before).map(Some)
}

fn result_buffer(in_flight: &InFlightMean) -> Result<Arc<dyn ResultBuffer>> {
    in_flight.results.clone().ok_or_else(|| Error::Internal("a mean was left behind without its memory".into()))
}

fn mix(own: &[Buffer], before: &[Buffer], out: &[Buffer], weights: CarryWeights) {
    for ((own, before), out) in own.iter().zip(before).zip(out) {
        // SAFETY: both allreduces are complete, and their lists have equal shapes. The call owns the memory of `own`,
        // its result buffer that of `before`; no other code accesses it until the call completes.
        unsafe { weighted_sum(own.dtype(), own.dst(), before.dst(), out.dst(), own.len(), weights) };
    }
}
