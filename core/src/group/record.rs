//! The record of one call: what it was, and when its life began, matched and ended.
//!
//! Thread rule: the threads that run a call share its record.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::call_summary::{CallSummary, SmallCallStats};
use super::callers::Origin;
use crate::collective::Call;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::timeline;
use crate::timings::CallTimings;

/// One call.
#[derive(Debug)]
pub(super) struct Record {
    /// Number of its submission on this rank, from 0.
    pub number: u64,
    pub signature: u64,
    pub summary: Arc<CallSummary>,
    pub submitted: Instant,
    pub deadline: Deadline,
    pub origin: Origin,
    pub timings: CallTimings,
    /// Nanoseconds after the submission; 0: not yet.
    started: AtomicU64,
    ended: AtomicU64,
    /// Whether it matches by name, and lacked its counterpart when the ranks looked.
    unmatched: AtomicBool,
    /// Index among the matched calls, from 1, the same on all ranks; 0: not matched yet.
    matched: AtomicU64,
    error: OnceLock<Error>,
}

impl Record {
    /// The record of the last small call of a signature.
    pub fn of_small(team: i32, stats: &SmallCallStats, since: Instant) -> Record {
        let number = stats.number.load(Ordering::Relaxed);
        let (ended, duration) =
            (stats.last_ended.load(Ordering::Relaxed), stats.last_nanos.load(Ordering::Relaxed).max(1));
        Record {
            number,
            signature: stats.signature,
            summary: Arc::clone(&stats.summary),
            submitted: since + Duration::from_nanos(ended.saturating_sub(duration)),
            deadline: Deadline::default(),
            origin: Origin::default(),
            timings: CallTimings::new(team, number),
            started: AtomicU64::new(1),
            ended: AtomicU64::new(duration),
            unmatched: AtomicBool::new(false),
            matched: AtomicU64::new(stats.match_index.load(Ordering::Relaxed)),
            error: OnceLock::new(),
        }
    }

    /// A record that is neither in the ring nor in the totals.
    pub fn detached(call: &Call) -> Record {
        Record::new(
            call.group().number(),
            0,
            Arc::new(CallSummary::new(call)),
            call.signature,
            Deadline::default(),
            Origin::default(),
        )
    }

    /// The record of call `number`, submitted now.
    pub fn new(
        team: i32,
        number: u64,
        summary: Arc<CallSummary>,
        signature: u64,
        deadline: Deadline,
        origin: Origin,
    ) -> Record {
        Record {
            number,
            signature,
            summary,
            submitted: Instant::now(),
            deadline,
            origin,
            timings: CallTimings::new(team, number),
            started: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            unmatched: AtomicBool::new(false),
            matched: AtomicU64::new(0),
            error: OnceLock::new(),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.submitted.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
    }

    /// Marks the call as started. `was_idle`: the thread was idle, which saves a clock read.
    pub fn start(&self, was_idle: bool) {
        if self.started.load(Ordering::Relaxed) == 0 {
            let now = if was_idle && !timeline::is_on() { 1 } else { self.now() };
            self.started.store(now, Ordering::Relaxed);
            if timeline::is_on() {
                let until = self.submitted + Duration::from_nanos(now);
                timeline::span("phase", "queue", self.submitted, until, &self.trace_args());
            }
        }
    }

    /// Whether a call that matches by name lacks its counterpart: then its deadline ends only this call.
    pub fn set_unmatched(&self, unmatched: bool) {
        self.unmatched.store(unmatched, Ordering::Relaxed);
    }

    /// As [`Record::set_unmatched`] has set it.
    pub fn is_unmatched(&self) -> bool {
        self.unmatched.load(Ordering::Relaxed)
    }

    /// Marks the call as matched; `match_index` is its index, from 1.
    pub fn matched(&self, match_index: u64) {
        self.matched.store(match_index, Ordering::Relaxed);
    }

    /// Marks the call as ended with `result`.
    pub fn end(&self, result: &Result<()>) {
        if let Err(error) = result {
            let _first = self.error.set(error.clone());
        }
        let now = self.now();
        self.ended.store(now, Ordering::Release);
        if timeline::is_on() {
            let [team, work] = self.trace_args();
            let (matched, bytes) = (self.match_index(), self.summary.bytes);
            let error = result.as_ref().err().map(ToString::to_string);
            let args = [team, work, ("matched", matched.into()), ("bytes", bytes.into()), ("error", error.into())];
            let until = self.submitted + Duration::from_nanos(now);
            timeline::span("call", &self.summary.name_line, self.submitted, until, &args);
        }
    }

    fn trace_args(&self) -> [(&'static str, Value); 2] {
        [("team", self.timings.team().into()), ("call", self.number.into())]
    }

    pub fn started(&self) -> Option<Duration> {
        at(&self.started)
    }

    pub fn ended(&self) -> Option<Duration> {
        at(&self.ended)
    }

    pub fn match_index(&self) -> Option<u64> {
        Some(self.matched.load(Ordering::Relaxed)).filter(|&match_index| match_index > 0)
    }

    pub fn error(&self) -> Option<&Error> {
        self.error.get()
    }
}

fn at(nanos: &AtomicU64) -> Option<Duration> {
    Some(nanos.load(Ordering::Acquire)).filter(|&nanos| nanos > 0).map(Duration::from_nanos)
}
