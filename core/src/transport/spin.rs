//! How long a wait spins before it sleeps, adapted to the waits before it.
//!
//! A sleep costs more than the system calls: an idle processor takes 15 to 40 µs to run the thread again, and longer to
//! get back to its speed. A caller that waits has nothing else to do and may spin for a multiple of that. A thread of
//! the library runs beside the program, which may need the processor.
//! Thread rule: any thread.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Who waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiter {
    /// A thread of the program, in a call.
    Caller,
    /// A thread of the library.
    Thread,
}

impl Waiter {
    /// Below this, spinning is cheaper than a sleep.
    fn spin_max(self) -> Duration {
        match self {
            Waiter::Caller => Duration::from_millis(1),
            Waiter::Thread => Duration::from_micros(50),
        }
    }
}

/// The most checks before a wait sleeps.
#[derive(Debug, Clone, Copy)]
pub struct MaxSpins {
    caller: u32,
    thread: u32,
    /// The checks between two yields, for waits that yield: a power of two.
    yield_interval: u32,
}

/// For waiters with a processor of their own.
const YIELD_INTERVAL: u32 = 64;
/// If ranks share processors, the awaited one often waits for that of the waiter.
const YIELD_INTERVAL_SHARED_CPUS: u32 = 8;

impl MaxSpins {
    /// For ranks with so many CPUs each; few if ranks share CPUs.
    pub fn new(cpus_per_rank: usize) -> MaxSpins {
        match cpus_per_rank {
            0 => MaxSpins::equal(MIN_SPINS),
            _ => MaxSpins { caller: 40_000, thread: 2000, yield_interval: YIELD_INTERVAL },
        }
    }

    /// As `new`, for waits that yield: these take the processor from nobody.
    pub fn with_yields(cpus_per_rank: usize) -> MaxSpins {
        match cpus_per_rank {
            0 => MaxSpins { caller: 4000, thread: 512, yield_interval: YIELD_INTERVAL_SHARED_CPUS },
            _ => MaxSpins::new(cpus_per_rank),
        }
    }

    /// The same for every waiter.
    pub const fn equal(spins: u32) -> MaxSpins {
        MaxSpins { caller: spins, thread: spins, yield_interval: YIELD_INTERVAL }
    }

    fn of(self, waiter: Waiter) -> u32 {
        match waiter {
            Waiter::Caller => self.caller,
            Waiter::Thread => self.thread,
        }
    }
}

/// Minimum number of checks, unless the maximum is smaller.
pub const MIN_SPINS: u32 = 64;

/// The current number of checks before a sleep, by waiter.
pub struct Spins {
    max: MaxSpins,
    caller: AtomicU32,
    thread: AtomicU32,
}

impl Spins {
    /// Starts with the maximum.
    pub fn new(max: MaxSpins) -> Spins {
        Spins { max, caller: AtomicU32::new(max.caller), thread: AtomicU32::new(max.thread) }
    }

    /// The number of checks before a sleep of `waiter`.
    pub fn get(&self, waiter: Waiter) -> u32 {
        self.current(waiter).load(Ordering::Relaxed)
    }

    /// The checks between two yields, for waits that yield.
    pub fn yield_interval(&self) -> u32 {
        self.max.yield_interval
    }

    /// Whether waits may spin for long.
    pub fn is_long(&self) -> bool {
        self.max.thread > MIN_SPINS
    }

    /// Doubles the number if spinning was cheaper in a wait that took `time`, else halves it.
    pub fn adapt(&self, waiter: Waiter, time: Duration) {
        let (spins, max) = (self.get(waiter), self.max.of(waiter));
        let next = if time < waiter.spin_max() { spins.saturating_mul(2) } else { spins / 2 };
        self.current(waiter).store(next.clamp(MIN_SPINS.min(max), max), Ordering::Relaxed);
    }

    fn current(&self, waiter: Waiter) -> &AtomicU32 {
        match waiter {
            Waiter::Caller => &self.caller,
            Waiter::Thread => &self.thread,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spins_adapt_to_the_waits_of_each_waiter() {
        let (short, long) = (Duration::from_micros(1), Duration::from_secs(1));
        for (max, min) in [(MaxSpins { caller: 5000, ..MaxSpins::equal(2000) }, MIN_SPINS), (MaxSpins::equal(10), 10)] {
            let spins = Spins::new(max);
            for (waiter, other) in [(Waiter::Caller, Waiter::Thread), (Waiter::Thread, Waiter::Caller)] {
                assert_eq!(spins.get(waiter), max.of(waiter));
                (0..20).for_each(|_| spins.adapt(waiter, long));
                assert_eq!((spins.get(waiter), spins.get(other)), (min, max.of(other)));
                (0..20).for_each(|_| spins.adapt(waiter, short));
                assert_eq!(spins.get(waiter), max.of(waiter));
            }
        }
    }

    #[test]
    fn a_caller_spins_through_waits_after_which_a_thread_sleeps() {
        let spins = Spins::new(MaxSpins::equal(1000));
        for waiter in [Waiter::Caller, Waiter::Thread] {
            spins.adapt(waiter, Duration::from_micros(200));
        }
        assert_eq!((spins.get(Waiter::Caller), spins.get(Waiter::Thread)), (1000, 500));
    }
}
