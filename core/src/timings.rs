//! The time of a call by activity. Costs a few clock reads per call. While a timeline is recorded
//! ([`crate::timeline`]), it also writes each span.
//!
//! Thread rule: the threads that run a call share its [`CallTimings`]; all counters are atomics.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::lock::lock;
use crate::timeline;

/// Activity of a group thread in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Copies between tensors and shared memory.
    Copy,
    /// Waits for a rank of this host.
    Wait,
    /// Reduces, or copies broadcast data within a host.
    Reduce,
    /// Exchanges messages with other hosts, including waits for them.
    Network,
}

impl Activity {
    /// The name in files.
    pub fn as_str(self) -> &'static str {
        match self {
            Activity::Copy => "copy",
            Activity::Wait => "wait",
            Activity::Reduce => "reduce",
            Activity::Network => "network",
        }
    }
}

/// The target of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitTarget {
    /// A rank of this host.
    Rank(usize),
    /// The ranks of another host.
    Host(usize),
}

/// Timings and counters of a call, summed over its threads.
#[derive(Debug, Default)]
pub struct CallTimings {
    team: i32,
    number: u64,
    nanos: [AtomicU64; 4],
    rounds: AtomicU64,
    flags: AtomicU64,
    messages: AtomicU64,
    sent: AtomicU64,
    waits: Mutex<Vec<(WaitTarget, Duration)>>,
    waiting: Mutex<Vec<WaitTarget>>,
}

impl CallTimings {
    /// Timings of call `number` of a group on this rank.
    pub fn new(team: i32, number: u64) -> CallTimings {
        CallTimings { team, number, ..CallTimings::default() }
    }

    /// Id of the call's group.
    pub fn team(&self) -> i32 {
        self.team
    }

    /// Adds a span of `activity`.
    pub fn add(&self, activity: Activity, from: Instant, to: Instant) {
        let nanos = u64::try_from((to - from).as_nanos()).unwrap_or(u64::MAX);
        self.nanos[activity as usize].fetch_add(nanos, Ordering::Relaxed);
        if timeline::is_on() {
            timeline::span("phase", activity.as_str(), from, to, &self.labels());
        }
    }

    /// Adds a wait for a rank of this host.
    pub fn waited(&self, rank: usize, from: Instant, to: Instant) {
        self.add(Activity::Wait, from, to);
        self.add_wait(WaitTarget::Rank(rank), from, to);
    }

    /// Adds a wait for `target`, within a span of [`Activity::Wait`] or [`Activity::Network`].
    pub fn add_wait(&self, target: WaitTarget, from: Instant, to: Instant) {
        let mut waits = lock(&self.waits);
        match waits.iter_mut().find(|(other, _)| *other == target) {
            Some((_, sum)) => *sum += to - from,
            None => waits.push((target, to - from)),
        }
        drop(waits);
        lock(&self.waiting).clear();
        if timeline::is_on() {
            let name = match target {
                WaitTarget::Rank(rank) => format!("rank {rank}"),
                WaitTarget::Host(host) => format!("host {host}"),
            };
            let [team, call] = self.labels();
            let args = [team, call, ("target", name.as_str().into())];
            timeline::span("wait_for_rank", &format!("wait for {name}"), from, to, &args);
        }
    }

    fn labels(&self) -> [(&'static str, serde_json::Value); 2] {
        [("team", self.team.into()), ("call", self.number.into())]
    }

    /// Sets the current targets of a long wait.
    pub fn set_waiting(&self, target: Vec<WaitTarget>) {
        *lock(&self.waiting) = target;
    }

    /// The current targets of a long wait.
    pub fn waiting(&self) -> Vec<WaitTarget> {
        lock(&self.waiting).clone()
    }

    /// Counts a round through shared memory.
    pub fn round(&self) {
        self.rounds.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a raised flag.
    pub fn flag(&self) {
        self.flags.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts `count` messages to other hosts, `bytes` in total.
    pub fn messages(&self, count: usize, bytes: usize) {
        self.messages.fetch_add(count as u64, Ordering::Relaxed);
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Total seconds spent in `activity`.
    pub fn seconds(&self, activity: Activity) -> f64 {
        self.nanos[activity as usize].load(Ordering::Relaxed) as f64 * 1e-9
    }

    /// The total wait per target.
    pub fn waits(&self) -> Vec<(WaitTarget, Duration)> {
        lock(&self.waits).clone()
    }

    /// Counts: shared memory rounds, raised flags, messages, bytes of the messages.
    pub fn counts(&self) -> [u64; 4] {
        [&self.rounds, &self.flags, &self.messages, &self.sent].map(|count| count.load(Ordering::Relaxed))
    }
}

/// Measures consecutive phases of a call. Small work is timed only while a timeline is recorded: reading the clock
/// would take too long. Waits are measured apart ([`CallTimings::waited`]).
pub struct PhaseTimer<'a> {
    timings: &'a CallTimings,
    since: Option<Instant>,
}

/// Work on fewer bytes is not timed.
const SMALL: usize = 16 << 10;

impl PhaseTimer<'_> {
    /// Starts a phase that processes `bytes`.
    pub fn start(timings: &CallTimings, bytes: usize) -> PhaseTimer<'_> {
        PhaseTimer { timings, since: (bytes >= SMALL || timeline::is_on()).then(Instant::now) }
    }

    /// Ends a phase of `activity` and starts the next.
    pub fn end(&mut self, activity: Activity) {
        if let Some(since) = &mut self.since {
            let now = Instant::now();
            self.timings.add(activity, *since, now);
            *since = now;
        }
    }

    /// Starts a new phase without counting the last one: it was a wait, which is measured apart.
    pub fn reset(&mut self) {
        if let Some(since) = &mut self.since {
            *since = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_and_waits_add_up() {
        let timings = CallTimings::default();
        let start = Instant::now();
        let mut timer = PhaseTimer::start(&timings, SMALL);
        std::thread::sleep(Duration::from_millis(5));
        timer.end(Activity::Reduce);
        timer.end(Activity::Copy);
        let spent = start.elapsed().as_secs_f64();
        let mut small = PhaseTimer::start(&timings, SMALL - 1);
        small.reset();
        small.end(Activity::Network);
        assert_eq!(timings.seconds(Activity::Network), 0.0);
        assert!((0.005..=spent).contains(&timings.seconds(Activity::Reduce)));
        assert!(timings.seconds(Activity::Reduce) + timings.seconds(Activity::Copy) <= spent);
        for _ in 0..2 {
            timings.add_wait(WaitTarget::Rank(3), start, start + Duration::from_secs(1));
        }
        timings.add_wait(WaitTarget::Host(1), start, start + Duration::from_secs(1));
        assert_eq!(
            timings.waits(),
            [(WaitTarget::Rank(3), Duration::from_secs(2)), (WaitTarget::Host(1), Duration::from_secs(1))]
        );
        timings.messages(2, 100);
        assert_eq!(timings.counts(), [0, 0, 2, 100]);
    }
}
