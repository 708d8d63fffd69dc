//! How often a wait does something that is expensive, such as a question to the store.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Lets an action run once in a period, the first time a period after its creation.
/// Thread rule: one thread.
pub(super) struct Interval {
    period: Duration,
    last: Cell<Instant>,
}

impl Interval {
    pub fn new(period: Duration) -> Interval {
        Interval { period, last: Cell::new(Instant::now()) }
    }

    /// The result of `action`, or `None` if it is not due yet.
    pub fn run<T>(&self, action: impl FnOnce() -> Option<T>) -> Option<T> {
        if self.last.get().elapsed() < self.period {
            return None;
        }
        self.last.set(Instant::now());
        action()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_runs_once_in_a_period() {
        let interval = Interval::new(Duration::from_secs(3600));
        assert_eq!(interval.run(|| Some(1)), None);
        let interval = Interval::new(Duration::ZERO);
        assert_eq!(interval.run(|| Some(1)), Some(1));
        assert_eq!(interval.run(|| None::<i32>), None);
    }
}
