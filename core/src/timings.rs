//! Where the time of a call goes: a log of each call, which costs a few looks at the clock, and, while a timeline is
//! recorded ([`crate::timeline`]), the spans behind the sums.
//!
//! Thread rule: a [`CallTimings`] is shared by the threads that carry out a call; all counters are atomics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::timeline;

/// What a thread of a team does in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Copies between tensors and shared memory.
    Copy,
    /// Waits for a rank of this host.
    Wait,
    /// Adds up, or moves what is broadcast within a host.
    Reduce,
    /// Exchanges messages with other hosts, waiting for them included.
    Network,
}

impl Activity {
    /// The word for it in files.
    pub fn as_str(self) -> &'static str {
        match self {
            Activity::Copy => "copy",
            Activity::Wait => "wait",
            Activity::Reduce => "reduce",
            Activity::Network => "network",
        }
    }
}

/// Whom a wait was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitTarget {
    /// A rank of this host.
    Rank(usize),
    /// The ranks of another host.
    Host(usize),
}

/// What a call did: sums over the threads that carried it out.
#[derive(Debug, Default)]
pub struct CallTimings {
    team: i32,
    number: u64,
    nanos: [AtomicU64; 4],
    steps: AtomicU64,
    flags: AtomicU64,
    messages: AtomicU64,
    sent: AtomicU64,
    late: Mutex<Vec<(WaitTarget, Duration)>>,
    waiting: Mutex<Vec<WaitTarget>>,
}

impl CallTimings {
    /// The log of the call with this number on this rank's team.
    pub fn new(team: i32, number: u64) -> CallTimings {
        CallTimings { team, number, ..CallTimings::default() }
    }

    /// The team of the call.
    pub fn team(&self) -> i32 {
        self.team
    }

    /// Adds a span of `activity`.
    pub fn add(&self, activity: Activity, from: Instant, to: Instant) {
        self.nanos[activity as usize].fetch_add(nanos(to - from), Ordering::Relaxed);
        if timeline::is_on() {
            timeline::span("phase", activity.as_str(), from, to, &self.place());
        }
    }

    /// Notes a wait for a rank of this host.
    pub fn waited(&self, rank: usize, from: Instant, to: Instant) {
        self.add(Activity::Wait, from, to);
        self.add_wait(WaitTarget::Rank(rank), from, to);
    }

    /// Notes a wait for `late`, which is part of a span of [`Activity::SyncMode`] or [`Activity::NetworkModel`].
    pub fn add_wait(&self, late: WaitTarget, from: Instant, to: Instant) {
        let mut waits = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        match waits.iter_mut().find(|(other, _)| *other == late) {
            Some((_, sum)) => *sum += to - from,
            None => waits.push((late, to - from)),
        }
        drop(waits);
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).clear();
        if timeline::is_on() {
            let whom = match late {
                WaitTarget::Rank(rank) => format!("rank {rank}"),
                WaitTarget::Host(host) => format!("host {host}"),
            };
            let [team, call] = self.place();
            timeline::span(
                "wait_for_rank",
                &format!("wait for {whom}"),
                from,
                to,
                &[team, call, ("target", whom.into())],
            );
        }
    }

    fn place(&self) -> [(&'static str, serde_json::Value); 2] {
        [("team", self.team.into()), ("call", self.number.into())]
    }

    /// Notes whom a thread waits for now, when it has done so for a while.
    pub fn set_waiting(&self, late: Vec<WaitTarget>) {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = late;
    }

    /// Whom a thread waits for.
    pub fn waiting(&self) -> Vec<WaitTarget> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts a step through the host's memory.
    pub fn step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a raised flag.
    pub fn flag(&self) {
        self.flags.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts messages to other hosts, `bytes` in all.
    pub fn messages(&self, count: usize, bytes: usize) {
        self.messages.fetch_add(count as u64, Ordering::Relaxed);
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The seconds of `activity`.
    pub fn seconds(&self, activity: Activity) -> f64 {
        self.nanos[activity as usize].load(Ordering::Relaxed) as f64 * 1e-9
    }

    /// For whom threads waited, and how long.
    pub fn late(&self) -> Vec<(WaitTarget, Duration)> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What was counted: steps, flags raised, messages, bytes of the messages.
    pub fn counts(&self) -> [u64; 4] {
        [&self.steps, &self.flags, &self.messages, &self.sent].map(|count| count.load(Ordering::Relaxed))
    }
}

/// A look at the clock, and what happens until the next. Work on few bytes is not timed, unless a timeline is recorded:
/// the clock would be a good part of it. Waits tell their own time ([`CallTimings::waited`]).
pub struct PhaseTimer<'a> {
    timings: &'a CallTimings,
    since: Option<Instant>,
}

/// Bytes below which work is not timed.
const SMALL: usize = 16 << 10;

impl PhaseTimer<'_> {
    /// Starts now, with work on `bytes`.
    pub fn start(log: &CallTimings, bytes: usize) -> PhaseTimer<'_> {
        PhaseTimer { timings: log, since: (bytes >= SMALL || timeline::is_on()).then(Instant::now) }
    }

    /// What was done since the last look was `activity`.
    pub fn end(&mut self, activity: Activity) {
        if let Some(since) = &mut self.since {
            let now = Instant::now();
            self.timings.add(activity, *since, now);
            *since = now;
        }
    }

    /// Since the last look there was a wait, which tells its own time.
    pub fn reset(&mut self) {
        if let Some(since) = &mut self.since {
            *since = Instant::now();
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laps_and_waits_add_up() {
        let log = CallTimings::default();
        let start = Instant::now();
        let mut timer = PhaseTimer::start(&log, SMALL);
        std::thread::sleep(Duration::from_millis(5));
        timer.end(Activity::Reduce);
        timer.end(Activity::Copy);
        let spent = start.elapsed().as_secs_f64();
        let mut few = PhaseTimer::start(&log, SMALL - 1);
        few.reset();
        few.end(Activity::Network);
        assert_eq!(log.seconds(Activity::Network), 0.0);
        assert!((0.005..=spent).contains(&log.seconds(Activity::Reduce)));
        assert!(log.seconds(Activity::Reduce) + log.seconds(Activity::Copy) <= spent);
        for _ in 0..2 {
            log.add_wait(WaitTarget::Rank(3), start, start + Duration::from_secs(1));
        }
        log.add_wait(WaitTarget::Host(1), start, start + Duration::from_secs(1));
        assert_eq!(
            log.late(),
            [(WaitTarget::Rank(3), Duration::from_secs(2)), (WaitTarget::Host(1), Duration::from_secs(1))]
        );
        log.messages(2, 100);
        assert_eq!(log.counts(), [0, 0, 2, 100]);
    }
}
