//! The flight recorder: the last calls of a team, always on, and the sums of all its calls.
//!
//! A record costs a slot in a ring and a few looks at the clock; words are made when somebody wants to read it.
//! Thread rule: a [`Record`] is shared by the threads that carry out its call; the [`RecorderState`] is behind a lock of its own.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

use super::call_summary::{CallSummary, SmallCallStats};
use super::callers::ThreadId;
use crate::collective::Call;
use crate::error::{Error, Result};
use crate::timeline;
use crate::timings::{Activity, CallTimings};

/// How many calls the ring holds.
const RING_CALLS: usize = 256;
/// How many kinds of calls are remembered for their words.
const MAX_SUMMARIES: usize = 512;

/// One call.
#[derive(Debug)]
pub(super) struct Record {
    /// The number of its submission on this rank, from 0.
    pub number: u64,
    pub signature: u64,
    pub summary: Arc<CallSummary>,
    pub submitted: Instant,
    pub timeout: Option<Duration>,
    /// The thread that waits for it, if one does.
    pub thread: Option<ThreadId>,
    pub timings: CallTimings,
    /// Nanoseconds after the submission; 0 for not yet.
    started: AtomicU64,
    ended: AtomicU64,
    /// Its place among the calls that the ranks have matched, from 1, the same on all ranks; 0 for not yet.
    matched: AtomicU64,
    error: OnceLock<Error>,
}

impl Record {
    /// The record of the last short call of a kind.
    fn of_short(team: i32, kind: &SmallCallStats, since: Instant) -> Record {
        let number = kind.number.load(Ordering::Relaxed);
        let (ended, took) = (kind.last_ended.load(Ordering::Relaxed), kind.last_nanos.load(Ordering::Relaxed).max(1));
        Record {
            number,
            signature: kind.signature,
            summary: Arc::clone(&kind.summary),
            submitted: since + Duration::from_nanos(ended.saturating_sub(took)),
            timeout: None,
            thread: None,
            timings: CallTimings::new(team, number),
            started: AtomicU64::new(1),
            ended: AtomicU64::new(took),
            matched: AtomicU64::new(kind.match_index.load(Ordering::Relaxed)),
            error: OnceLock::new(),
        }
    }

    /// The record of a call that is in no ring and in no sum.
    pub fn detached(call: &Call) -> Record {
        Record::new(call.team(), 0, Arc::new(CallSummary::new(call)), call.signature, None, None)
    }

    /// The record of call `number`, which is submitted now.
    fn new(
        team: i32,
        number: u64,
        summary: Arc<CallSummary>,
        signature: u64,
        timeout: Option<Duration>,
        thread: Option<ThreadId>,
    ) -> Record {
        Record {
            number,
            signature,
            summary,
            submitted: Instant::now(),
            timeout,
            thread,
            timings: CallTimings::new(team, number),
            started: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            matched: AtomicU64::new(0),
            error: OnceLock::new(),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.submitted.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
    }

    /// A thread has taken the call up; `at_once` when it had nothing else to do, which saves a look at the clock.
    pub fn start(&self, at_once: bool) {
        if self.started.load(Ordering::Relaxed) == 0 {
            let now = if at_once && !timeline::is_on() { 1 } else { self.now() };
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
        [("team", self.timings.team().into()), ("call", self.number.into())]
    }

    pub fn started(&self) -> Option<Duration> {
        at(&self.started)
    }

    pub fn ended(&self) -> Option<Duration> {
        at(&self.ended)
    }

    pub fn match_index(&self) -> Option<u64> {
        Some(self.matched.load(Ordering::Relaxed)).filter(|&place| place > 0)
    }

    pub fn error(&self) -> Option<&Error> {
        self.error.get()
    }
}

/// The time of a clock that is some milliseconds late and costs next to nothing to look at.
fn coarse_now() -> Duration {
    let time = clock_gettime(ClockId::MonotonicCoarse);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn at(nanos: &AtomicU64) -> Option<Duration> {
    Some(nanos.load(Ordering::Acquire)).filter(|&nanos| nanos > 0).map(Duration::from_nanos)
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
    pub comm: f64,
    /// Seconds of the threads by [`Activity`]: copy, wait, reduce, network.
    pub activities: [f64; 4],
    /// Steps, raised flags, messages, bytes of messages.
    pub counts: [u64; 4],
}

impl Totals {
    fn add(&mut self, record: &Record) {
        let Some(ended) = record.ended() else { return };
        self.calls += 1;
        self.failed += u64::from(record.error().is_some());
        self.bytes += record.summary.bytes as u64;
        let started = record.started().unwrap_or(ended);
        self.queued += started.as_secs_f64();
        self.comm += (ended - started).as_secs_f64();
        for activity in [Activity::Copy, Activity::Wait, Activity::Reduce, Activity::Network] {
            self.activities[activity as usize] += record.timings.seconds(activity);
        }
        for (sum, count) in self.counts.iter_mut().zip(record.timings.counts()) {
            *sum += count;
        }
    }
}

impl Totals {
    /// Adds the short calls of a kind: a step and a flag each, and no other rank to be waited for for long.
    fn add_short(&mut self, kind: &SmallCallStats) {
        let calls = kind.calls.load(Ordering::Relaxed);
        self.calls += calls;
        self.bytes += calls * kind.summary.bytes as u64;
        self.comm += kind.nanos.load(Ordering::Relaxed) as f64 * 1e-9;
        self.counts[0] += calls;
        self.counts[1] += calls;
    }
}

/// A signature is a hash already.
#[derive(Default)]
struct Signature(u64);

impl Hasher for Signature {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = self.0.rotate_left(8) ^ u64::from(byte));
    }
    fn write_u64(&mut self, signature: u64) {
        self.0 = signature;
    }
}

/// What is remembered of a team's calls; see the module's text.
#[derive(Default)]
pub(super) struct RecorderState {
    ring: VecDeque<Arc<Record>>,
    /// Calls that left the ring before they had ended.
    evicted_running: Vec<Arc<Record>>,
    summaries: HashMap<u64, Arc<CallSummary>, BuildHasherDefault<Signature>>,
    /// The kinds of short calls.
    small_calls: Vec<Arc<SmallCallStats>>,
    /// The sums over calls that have left the ring.
    totals: Totals,
}

impl RecorderState {
    /// Makes room in the ring; a record that nobody looks at any more is given back.
    fn evict(&mut self) -> Option<Arc<Record>> {
        let RecorderState { evicted_running: strays, totals, .. } = self;
        strays.retain(|stray| {
            totals.add(stray);
            stray.ended().is_none()
        });
        if self.ring.len() < RING_CALLS {
            return None;
        }
        let oldest = self.ring.pop_front()?;
        if oldest.ended().is_none() {
            self.evicted_running.push(oldest);
            return None;
        }
        self.totals.add(&oldest);
        Some(oldest)
    }
}

/// A recorder behind its lock.
pub(super) struct Recorder {
    state: Mutex<RecorderState>,
    /// The number of the next call.
    next: AtomicU64,
    /// What [`SmallCallStats`]s count from, by the precise clock and by the coarse one.
    since: (Instant, Duration),
}

impl Default for Recorder {
    fn default() -> Recorder {
        Recorder { state: Mutex::default(), next: AtomicU64::new(0), since: (Instant::now(), coarse_now()) }
    }
}

impl Recorder {
    fn lock(&self) -> MutexGuard<'_, RecorderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the number of a call that is submitted now.
    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The kind of short calls like that of `record`.
    pub fn small_call_stats(&self, record: &Record) -> Arc<SmallCallStats> {
        let mut recorder = self.lock();
        if let Some(kind) = recorder.small_calls.iter().find(|kind| kind.signature == record.signature) {
            return Arc::clone(kind);
        }
        let RecorderState { small_calls: shorts, totals, .. } = &mut *recorder;
        if shorts.len() >= MAX_SUMMARIES {
            // Those that no executor has.
            shorts.retain(|kind| {
                let used = Arc::strong_count(kind) > 1;
                if !used {
                    totals.add_short(kind);
                }
                used
            });
        }
        let kind = Arc::new(SmallCallStats::new(record.signature, Arc::clone(&record.summary)));
        recorder.small_calls.push(Arc::clone(&kind));
        kind
    }

    /// Counts a short call that ended at once, submitted at that time if it was timed.
    pub fn count_small(&self, kind: &SmallCallStats, place: u64, submitted: Option<Instant>) {
        let ended = coarse_now().saturating_sub(self.since.1);
        kind.count(self.number(), place, ended, submitted.map(|from| from.elapsed()));
    }

    /// Opens the record of a call that is submitted now.
    pub fn open(&self, call: &Call, timeout: Option<Duration>, thread: Option<ThreadId>) -> Arc<Record> {
        let mut recorder = self.lock();
        if recorder.summaries.len() > MAX_SUMMARIES {
            recorder.summaries.clear();
        }
        let summary = recorder.summaries.entry(call.signature).or_insert_with(|| Arc::new(CallSummary::new(call)));
        let summary = Arc::clone(summary);
        let fresh = Record::new(call.team(), self.number(), summary, call.signature, timeout, thread);
        // The memory of the oldest, where nobody has it any more.
        let record = match recorder.evict() {
            Some(mut oldest) => match Arc::get_mut(&mut oldest) {
                Some(place) => {
                    *place = fresh;
                    oldest
                }
                None => Arc::new(fresh),
            },
            None => Arc::new(fresh),
        };
        recorder.ring.push_back(Arc::clone(&record));
        record
    }

    /// Closes the record of a call that has ended.
    pub fn close(&self, record: &Record, result: &Result<()>) {
        if let Err(error) = result {
            let _first = record.error.set(error.clone());
        }
        let now = record.now();
        record.ended.store(now, Ordering::Release);
        if timeline::is_on() {
            let [team, work] = record.place();
            let (matched, bytes) = (record.match_index(), record.summary.bytes);
            let error = result.as_ref().err().map(ToString::to_string);
            let args = [team, work, ("matched", matched.into()), ("bytes", bytes.into()), ("error", error.into())];
            let until = record.submitted + Duration::from_nanos(now);
            timeline::span("call", &record.summary.name_line, record.submitted, until, &args);
        }
    }

    /// A call behind others whose deadline has passed.
    pub fn overdue(&self) -> Option<Arc<Record>> {
        let waits = |record: &&Arc<Record>| record.started().is_none() && record.ended().is_none();
        let late = |record: &&Arc<Record>| record.timeout.is_some_and(|timeout| record.submitted.elapsed() > timeout);
        let recorder = self.lock();
        recorder.evicted_running.iter().chain(&recorder.ring).filter(waits).find(late).cloned()
    }

    /// The calls that have not ended.
    pub fn pending(&self) -> Vec<Arc<Record>> {
        let recorder = self.lock();
        recorder
            .evicted_running
            .iter()
            .chain(&recorder.ring)
            .filter(|record| record.ended().is_none())
            .cloned()
            .collect()
    }

    /// The sums over all calls that have ended.
    pub fn totals(&self) -> Totals {
        let recorder = self.lock();
        let mut totals = recorder.totals.clone();
        recorder.evicted_running.iter().chain(&recorder.ring).for_each(|record| totals.add(record));
        recorder.small_calls.iter().for_each(|kind| totals.add_short(kind));
        totals
    }

    /// The seconds that callers of short calls have waited.
    pub fn small_call_wait(&self) -> f64 {
        self.lock().small_calls.iter().map(|kind| kind.nanos.load(Ordering::Relaxed) as f64 * 1e-9).sum()
    }

    /// The last calls, oldest first; of the short ones that ended at once, the last of each kind.
    pub fn last(&self, team: i32) -> Vec<Arc<Record>> {
        let recorder = self.lock();
        let mut last: Vec<Arc<Record>> = recorder.evicted_running.iter().chain(&recorder.ring).cloned().collect();
        let used = recorder.small_calls.iter().filter(|kind| kind.calls.load(Ordering::Relaxed) > 0);
        last.extend(used.map(|kind| Arc::new(Record::of_short(team, kind, self.since.0))));
        last.sort_by_key(|record| record.number);
        last
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::buffer::{Buffer, Tensor};
    use crate::collective::{CallConfig, Op};
    use crate::dtype::DType;
    use crate::timings::PhaseTimer;

    fn call(data: &mut [f32], name: &str) -> Call {
        let config = CallConfig {
            team: 0,
            ranks: 2,
            channels: 1,
            slot: 4096,
            small_max: 0,
            single_thread_max: 0,
            acc_f64: false,
        };
        let tensor = Tensor::new(Buffer::in_place(data.as_mut_ptr().cast(), data.len(), DType::F32), &[]);
        Call::new(Op::Allreduce, vec![vec![tensor]], name, "", "weight".into(), config).unwrap()
    }

    #[test]
    fn the_last_calls_are_kept_and_all_are_counted() {
        let recorder = Recorder::default();
        let mut data = [0f32; 16];
        for number in 0..RING_CALLS as u64 + 10 {
            let record = recorder.open(&call(&mut data, "a"), Some(Duration::ZERO), None);
            assert_eq!(record.number, number);
            assert!(recorder.overdue().is_some_and(|late| Arc::ptr_eq(&late, &record)));
            record.start(number % 2 == 0);
            assert!(recorder.overdue().is_none());
            record.matched(number + 1);
            let result = if number == 3 { Err(Error::Timeout("late".into())) } else { Ok(()) };
            recorder.close(&record, &result);
        }
        let last = recorder.last(0);
        assert_eq!((last.len(), last[0].number), (RING_CALLS, 10));
        assert_eq!(last[0].summary.tensors, ["tensor 0 'weight': float32[16]"]);
        assert!(last.windows(2).all(|pair| Arc::ptr_eq(&pair[0].summary, &pair[1].summary)), "words are made once");
        let totals = recorder.totals();
        assert_eq!((totals.calls, totals.failed, totals.bytes), (266, 1, 266 * 64));
    }

    #[test]
    fn a_short_call_is_told_with_the_time_of_its_end() {
        let recorder = Recorder::default();
        let mut data = [0f32; 16];
        let first = recorder.open(&call(&mut data, "a"), None, None);
        recorder.close(&first, &Ok(()));
        let kind = recorder.small_call_stats(&first);
        recorder.count_small(&kind, 2, Some(Instant::now()));
        std::thread::sleep(Duration::from_millis(60));
        recorder.count_small(&kind, 3, None);
        let last = recorder.last(0);
        let numbers: Vec<_> = last.iter().map(|record| (record.number, record.match_index())).collect();
        assert_eq!(numbers, [(0, None), (2, Some(3))]);
        let ended = |record: &Record| record.submitted + record.ended().unwrap();
        assert!(ended(&last[1]) > ended(&last[0]) + Duration::from_millis(40), "of the one that was not timed too");
    }

    #[test]
    fn many_kinds_of_calls_do_not_fill_the_memory() {
        let recorder = Recorder::default();
        for kind in 0..3 * MAX_SUMMARIES {
            recorder.open(&call(&mut [0.0], &kind.to_string()), None, None);
            assert!(recorder.lock().summaries.len() <= MAX_SUMMARIES + 1);
        }
    }

    /// Prints what the recorder and the log cost a call of one chunk; `docs/diagnosis.md` has the figures.
    #[test]
    #[ignore = "a measurement: cargo test --release -p dl_comm_core --lib -- --ignored --nocapture costs"]
    fn what_a_record_costs() {
        let recorder = Recorder::default();
        let mut data = [0f32; 16];
        let call = call(&mut data, "a");
        let rounds = 200_000;
        // Of this thread, whatever else the machine does.
        let clock = || clock_gettime(ClockId::ThreadCPUTime);
        let start = clock();
        for _ in 0..rounds {
            let record = recorder.open(&call, None, None);
            record.start(true);
            let mut timer = PhaseTimer::start(&record.timings, 64);
            for activity in [Activity::Copy, Activity::Reduce, Activity::Copy] {
                timer.end(activity);
            }
            record.matched(1);
            recorder.close(&record, &Ok(()));
        }
        let spent = clock() - start;
        let spent = spent.tv_sec as f64 * 1e9 + spent.tv_nsec as f64;
        println!("{:.0} ns a call", spent / f64::from(rounds));
    }
}
