//! How a scheduled call gets its result: from its own mean, the one before, or both, when these have come.
//!
//! Thread rule: a delivery runs once, on the thread that ends the last of its flights, or on the submitting one.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::options::OnResult;
use super::schedule_state::{CallPlan, InFlightMean, ResultBuffer, ScheduleState};
use super::wait_time::WaitTime;
use super::weighted_sum::{CarryWeights, weighted_sum};
use crate::buffer::Buffer;
use crate::error::{Error, Result, guard};

/// A call that waits for what it returns.
pub(super) struct ResultAssembly {
    pub schedule: Arc<Mutex<ScheduleState>>,
    pub wait_time: Arc<WaitTime>,
    pub list: u64,
    pub plan: CallPlan,
    pub own: Arc<InFlightMean>,
    pub done: OnResult,
    /// The caller puts the result together itself.
    pub return_weights: bool,
    /// When the caller began to wait; `None` when the caller counts by itself.
    pub waiting_since: Option<Instant>,
}

impl ResultAssembly {
    /// Ends the call when its flights have ended.
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
        let shares = self.plan.weights;
        let before_flight = self.plan.before.take();
        let result = match (before, own) {
            (Ok(()), Ok(())) => guard(|| results_of(shares, self.return_weights, &self.own, before_flight)),
            (Err(error), own) => {
                // The one before is lost; what this call should have returned of its own goes to the next.
                if own.is_ok() && self.own.results.is_some() {
                    self.replace(Some((Arc::clone(&self.own), 1.0)));
                }
                Err(error)
            }
            (Ok(()), Err(error)) => {
                self.replace(before_flight.map(|before| (before, shares.carried)));
                Err(error)
            }
        };
        let ResultAssembly { wait_time, plan, done, waiting_since, own, .. } = self;
        // The memory of a mean goes with its result buffer, on the thread of the one who takes it.
        drop(own);
        if let Some(since) = waiting_since {
            wait_time.add(since.elapsed().as_secs_f64());
        }
        if plan.prints {
            wait_time.report(plan.index);
        }
        done(result);
    }

    fn replace(&self, instead: Option<(Arc<InFlightMean>, f64)>) {
        let mut schedule = self.schedule.lock().unwrap_or_else(PoisonError::into_inner);
        schedule.replace_carried(self.list, &self.own, instead);
    }
}

/// The result buffer with the result; `None` when it is in the call's own memory.
fn results_of(
    shares: CarryWeights,
    return_weights: bool,
    own: &Arc<InFlightMean>,
    before: Option<Arc<InFlightMean>>,
) -> Result<Option<Arc<dyn ResultBuffer>>> {
    let CarryWeights { left, carried } = shares;
    let Some(before) = before else {
        if left == 0.0 {
            return Ok(None);
        }
        let (results, addresses) = kept(own)?.zeros_like()?;
        if return_weights {
            results.set_weights(1.0 - left, 0.0);
        } else if left < 1.0 {
            let fresh =
                |(mean, address): (&Buffer, usize)| Buffer::in_place(address as *mut u8, mean.len(), mean.dtype());
            let fresh: Vec<Buffer> = own.means.iter().zip(addresses).map(fresh).collect();
            mix(&own.means, &fresh, &fresh, shares);
        }
        return Ok(Some(results));
    };
    if return_weights && own.results.is_some() {
        let results = kept(&before)?;
        results.set_weights(1.0 - left, carried);
        return Ok(Some(results));
    }
    if left == 0.0 {
        mix(&own.means, &before.means, &own.means, shares);
        return Ok(None);
    }
    if left < 1.0 {
        mix(&own.means, &before.means, &before.means, shares);
    } else if carried < 1.0 {
        // Its own average may still be on its way: nothing of it is looked at.
        mix(&before.means, &before.means, &before.means, shares);
    }
    kept(&before).map(Some)
}

fn kept(in_flight: &InFlightMean) -> Result<Arc<dyn ResultBuffer>> {
    in_flight.results.clone().ok_or_else(|| Error::Internal("a mean was left behind without its memory".into()))
}

fn mix(own: &[Buffer], before: &[Buffer], out: &[Buffer], shares: CarryWeights) {
    for ((own, before), out) in own.iter().zip(before).zip(out) {
        // SAFETY: the flights have ended, and their lists are alike; the memory of `own` is the call's, that of `before`
        // its result buffer's, and nobody else's until the call is done.
        unsafe { weighted_sum(own.dtype(), own.dst(), before.dst(), out.dst(), own.len(), shares) };
    }
}
