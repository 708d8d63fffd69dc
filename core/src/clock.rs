//! CLOCK_MONOTONIC: all processes of a host share this clock.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A fixed reference: an `Instant` and its value on CLOCK_MONOTONIC.
fn origin() -> (Instant, Duration) {
    static ORIGIN: OnceLock<(Instant, Duration)> = OnceLock::new();
    *ORIGIN.get_or_init(|| {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        (Instant::now(), Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0)))
    })
}

/// Nanoseconds of `moment` on CLOCK_MONOTONIC.
pub fn monotonic(moment: Instant) -> i64 {
    let (origin, at) = origin();
    let signed = |duration: Duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
    signed(at) + signed(moment.saturating_duration_since(origin)) - signed(origin.saturating_duration_since(moment))
}

/// The time since some point before this process, to some milliseconds; cheaper than an `Instant`.
#[inline]
pub fn coarse_now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monotonic_matches_clock_monotonic() {
        let before = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let between = monotonic(Instant::now());
        let after = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let nanos = |time: rustix::time::Timespec| time.tv_sec * 1_000_000_000 + time.tv_nsec;
        // The origin is exact only up to the time between two clock reads.
        assert!((nanos(before) - 1_000_000..=nanos(after) + 1_000_000).contains(&between));
    }
}
