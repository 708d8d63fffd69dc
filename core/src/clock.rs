//! The monotonic clock that all processes of a host share.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A moment that all times of this process are counted from.
fn origin() -> (Instant, Duration) {
    static ORIGIN: OnceLock<(Instant, Duration)> = OnceLock::new();
    *ORIGIN.get_or_init(|| {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        (Instant::now(), Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0)))
    })
}

/// Nanoseconds of `moment` on the host's monotonic clock, which all processes of a host share.
pub fn monotonic(moment: Instant) -> i64 {
    let (origin, at) = origin();
    let signed = |duration: Duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
    signed(at) + signed(moment.saturating_duration_since(origin)) - signed(origin.saturating_duration_since(moment))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_monotonic_clock_is_the_hosts() {
        let before = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let between = monotonic(Instant::now());
        let after = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let nanos = |time: rustix::time::Timespec| time.tv_sec * 1_000_000_000 + time.tv_nsec;
        // The origin itself is known to within the time between two looks at the clock.
        assert!((nanos(before) - 1_000_000..=nanos(after) + 1_000_000).contains(&between));
    }
}
