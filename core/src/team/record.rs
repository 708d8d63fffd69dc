//! The flight recorder: the last calls of a team, always on, and the sums of all its calls.
//!
//! A record costs a slot in a ring and a few looks at the clock; words are made when somebody wants to read it.
//! Thread rule: a [`Record`] is shared by the threads that carry out its call; the [`Recorder`] is behind a lock of its own.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::collective::Job;
use crate::error::{Error, Result};
use crate::timeline;
use crate::trace::{Activity, Log};

/// How many calls the ring holds.
const KEPT: usize = 256;
/// How many tensors of a call stand in a dump.
const SHOWN: usize = 4;
/// How many kinds of calls are remembered for their words.
const KINDS: usize = 512;

/// The words for all calls of one signature.
#[derive(Debug)]
pub(super) struct Brief {
    pub heading: String,
    pub tensors: Vec<String>,
    pub count: usize,
    pub bytes: usize,
}

/// One call.
#[derive(Debug)]
pub(super) struct Record {
    /// The number of its submission on this rank, from 0.
    pub number: u64,
    pub signature: u64,
    pub brief: Arc<Brief>,
    pub submitted: Instant,
    pub timeout: Option<Duration>,
    pub log: Log,
    /// Nanoseconds after the submission; 0 for not yet.
    started: AtomicU64,
    ended: AtomicU64,
    /// Its place among the calls that the ranks have matched, from 1, the same on all ranks; 0 for not yet.
    matched: AtomicU64,
    error: OnceLock<Error>,
}

impl Record {
    fn now(&self) -> u64 {
        u64::try_from(self.submitted.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
    }

    /// A thread has taken the call up.
    pub fn start(&self) {
        if self.started.load(Ordering::Relaxed) == 0 {
            let now = self.now();
            self.started.store(now, Ordering::Relaxed);
            if timeline::is_on() {
                let until = self.submitted + Duration::from_nanos(now);
                timeline::span("phase", "queue", self.submitted, until, &self.place());
            }
        }
    }

    /// All ranks have it: it is their `place`-th, from 1.
    pub fn matched(&self, place: u64) {
        self.matched.store(place, Ordering::Relaxed);
    }

    fn place(&self) -> [(&'static str, Value); 2] {
        [("team", self.log.team().into()), ("call", self.number.into())]
    }

    pub fn started(&self) -> Option<Duration> {
        at(&self.started)
    }

    pub fn ended(&self) -> Option<Duration> {
        at(&self.ended)
    }

    pub fn place_of_match(&self) -> Option<u64> {
        Some(self.matched.load(Ordering::Relaxed)).filter(|&place| place > 0)
    }

    pub fn error(&self) -> Option<&Error> {
        self.error.get()
    }
}

fn at(nanos: &AtomicU64) -> Option<Duration> {
    Some(nanos.load(Ordering::Relaxed)).filter(|&nanos| nanos > 0).map(Duration::from_nanos)
}

/// Sums over the calls of a team that have ended, and their number.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Totals {
    /// Calls that have ended.
    pub calls: u64,
    /// Those of them that failed.
    pub failed: u64,
    /// Bytes of the tensors on the wire.
    pub bytes: u64,
    /// Seconds between submission and start.
    pub queued: f64,
    /// Seconds from start to end.
    pub busy: f64,
    /// Seconds of the threads by [`Activity`]: copy, wait, reduce, network.
    pub activities: [f64; 4],
    /// Steps, raised flags, messages, bytes of messages.
    pub counts: [u64; 4],
}

/// What is remembered of a team's calls; see the module's text.
#[derive(Default)]
pub(super) struct Recorder {
    ring: VecDeque<Arc<Record>>,
    kinds: HashMap<u64, Arc<Brief>>,
    next: u64,
    totals: Totals,
}

/// A recorder behind its lock.
#[derive(Default)]
pub(super) struct Shared(Mutex<Recorder>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Recorder> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the record of a call that is submitted now.
    pub fn open(&self, team: i32, job: &Job, timeout: Option<Duration>) -> Arc<Record> {
        let mut recorder = self.lock();
        if recorder.kinds.len() > KINDS {
            recorder.kinds.clear();
        }
        let brief = recorder.kinds.entry(job.signature).or_insert_with(|| Arc::new(Brief::new(job)));
        let brief = Arc::clone(brief);
        let number = recorder.next;
        recorder.next += 1;
        let record = Arc::new(Record {
            number,
            signature: job.signature,
            brief,
            submitted: Instant::now(),
            timeout,
            log: Log::new(team, number),
            started: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            matched: AtomicU64::new(0),
            error: OnceLock::new(),
        });
        let oldest = if recorder.ring.len() == KEPT { recorder.ring.pop_front() } else { None };
        recorder.ring.push_back(Arc::clone(&record));
        drop(recorder);
        drop(oldest);
        record
    }

    /// Closes the record of a call that has ended.
    pub fn close(&self, record: &Record, result: &Result<()>) {
        let now = record.now();
        if let Err(error) = result {
            let _first = record.error.set(error.clone());
        }
        record.ended.store(now, Ordering::Relaxed);
        let mut recorder = self.lock();
        let totals = &mut recorder.totals;
        totals.calls += 1;
        totals.failed += u64::from(result.is_err());
        totals.bytes += record.brief.bytes as u64;
        let started = record.started().unwrap_or(Duration::from_nanos(now)).as_secs_f64();
        totals.queued += started;
        totals.busy += now as f64 * 1e-9 - started;
        for (index, activity) in
            [Activity::Copy, Activity::Wait, Activity::Reduce, Activity::Network].iter().enumerate()
        {
            totals.activities[index] += record.log.seconds(*activity);
        }
        for (sum, count) in totals.counts.iter_mut().zip(record.log.counts()) {
            *sum += count;
        }
        drop(recorder);
        if timeline::is_on() {
            let [team, call] = record.place();
            let (matched, bytes) = (record.place_of_match(), record.brief.bytes);
            let error = result.as_ref().err().map(ToString::to_string);
            let args = [team, call, ("matched", matched.into()), ("bytes", bytes.into()), ("error", error.into())];
            let until = record.submitted + Duration::from_nanos(now);
            timeline::span("call", &record.brief.heading, record.submitted, until, &args);
        }
    }

    /// A call behind others whose deadline has passed.
    pub fn overdue(&self) -> Option<Arc<Record>> {
        let waits = |record: &&Arc<Record>| record.started().is_none() && record.ended().is_none();
        let late = |record: &&Arc<Record>| record.timeout.is_some_and(|timeout| record.submitted.elapsed() > timeout);
        self.lock().ring.iter().filter(waits).find(late).cloned()
    }

    pub fn totals(&self) -> Totals {
        self.lock().totals.clone()
    }

    /// The last calls, oldest first.
    pub fn last(&self) -> Vec<Arc<Record>> {
        self.lock().ring.iter().cloned().collect()
    }
}

impl Brief {
    fn new(job: &Job) -> Brief {
        let count = job.tensors(0).len();
        Brief { heading: job.heading(), tensors: job.lines(0..SHOWN).collect(), count, bytes: job.plan.total() }
    }
}
