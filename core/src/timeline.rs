//! The timeline: the activity of every thread, as one Chrome trace file per rank, while recording is on
//! (`DL_COMM_TIMELINE` or `dl_comm_timeline_start`). `python -m dl_comm.timeline` merges the files.
//!
//! Times are microseconds on the monotonic clock of rank 0's host. Ranks of a host share that clock; the offset to
//! other hosts is measured at start. The file is a JSON array without a closing bracket until it is complete, which the
//! format allows: the file of a killed rank is readable.
//! Thread rule: all functions may be called from any thread; a lock is held while a span is written. Costs one load
//! when off.
//! Source of the format: "Trace Event Format" of the Chromium project.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Read, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::clock::monotonic;
use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::lock::lock;
use crate::log::log_line;

static ON: AtomicBool = AtomicBool::new(false);
static WRITER: Mutex<Option<Writer>> = Mutex::new(None);
/// Clock of rank 0's host minus the clock of this host, in nanoseconds.
static OFFSET: AtomicI64 = AtomicI64::new(0);
static THREADS: AtomicU64 = AtomicU64::new(1);
/// The groups with names, by their numbers. Locked before [`WRITER`].
static GROUPS: Mutex<BTreeMap<i32, GroupLabel>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// The thread's number in the file, and the [`Writer::number`] of the file that has its name.
    static THREAD: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// Maximum age of buffered spans.
const FLUSH: Duration = Duration::from_millis(500);

struct Writer {
    file: BufWriter<File>,
    rank: usize,
    /// The number of this file, from 1, in this process.
    number: u64,
    flushed: Instant,
}

/// What a file says of a group, whose spans have its number and its own numbers of ranks and hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLabel {
    /// Its name, as in messages.
    pub name: String,
    /// The rank in the job of each rank.
    pub members: Vec<usize>,
    /// The rank in the job of the first rank of each host.
    pub hosts: Vec<usize>,
}

/// Labels the group with this number, in the current file and in later ones, until [`forget_group`].
pub fn label_group(number: i32, label: GroupLabel) {
    let mut groups = lock(&GROUPS);
    if let Some(writer) = &mut *lock(&WRITER) {
        writer.write_label(number, &label);
    }
    groups.insert(number, label);
}

/// Ends a label: the group has no further calls.
pub fn forget_group(number: i32) {
    lock(&GROUPS).remove(&number);
}

/// Sets the clock of rank 0's host minus this host's clock.
pub fn set_offset(nanos: i64) {
    OFFSET.store(nanos, Ordering::Relaxed);
}

/// Nanoseconds on the clock of rank 0's host, which all ranks share as far as the hosts' clocks run alike.
pub fn now() -> i64 {
    monotonic(Instant::now()) + OFFSET.load(Ordering::Relaxed)
}

/// Whether a timeline is being recorded.
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Starts the file of rank `rank` of job `job` in `folder`, which is created if missing. `title` names the process in
/// the trace. If another job's file has the same name, the file goes into the subfolder `job`.
///
/// # Errors
/// [`Error::System`]; [`Error::State`] when a timeline is being recorded.
pub fn start(folder: &str, rank: usize, title: &str, job: &str) -> Result<()> {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let groups = lock(&GROUPS);
    let mut slot = lock(&WRITER);
    if slot.is_some() {
        return Err(Error::State("a timeline is being recorded already; stop it first".into()));
    }
    let name = format!("rank{rank}.trace.json");
    let mut folder = Path::new(folder).to_owned();
    if is_of_another(&folder.join(&name), job) {
        folder.push(job);
    }
    let path = folder.join(&name);
    let failed = |error: std::io::Error| Error::system(format!("writing the timeline {}", path.display()), error);
    let (opened, _) = Folder::named(&folder).map_err(failed)?;
    let file = BufWriter::new(opened.create(&name).map_err(failed)?);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let mut writer = Writer { file, rank, number, flushed: Instant::now() };
    writer.file.write_all(b"[\n").map_err(failed)?;
    writer.write(&json!({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": title, "job": job}}));
    writer.write(&json!({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}));
    groups.iter().for_each(|(number, label)| writer.write_label(*number, label));
    // Other jobs read this header to detect the file.
    writer.file.flush().map_err(failed)?;
    *slot = Some(writer);
    ON.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether the file exists and belongs to another job: its first lines contain the job's id.
fn is_of_another(path: &Path, job: &str) -> bool {
    let mut head = Vec::new();
    match File::open(path) {
        Ok(file) => match file.take(4096).read_to_end(&mut head) {
            Ok(_) => !String::from_utf8_lossy(&head).contains(&format!("\"job\":\"{job}\"")),
            Err(_) => true,
        },
        Err(error) => error.kind() != ErrorKind::NotFound,
    }
}

/// Completes the file; does nothing without a timeline.
pub fn stop() {
    ON.store(false, Ordering::Relaxed);
    if let Some(mut writer) = lock(&WRITER).take() {
        let end = json!({"ph": "M", "name": "process_labels", "pid": writer.rank, "args": {"labels": "complete"}});
        let ended = writeln!(writer.file, "{end}\n]").and_then(|()| writer.file.flush());
        if let Err(error) = ended {
            log_line(&format!("the timeline's end was not written: {error}"));
        }
    }
}

/// Writes a span `name` of this thread in `category`.
pub fn span(category: &str, name: &str, from: Instant, to: Instant, args: &[(&str, Value)]) {
    let mut slot = lock(&WRITER);
    let Some(writer) = &mut *slot else { return };
    let micros = |moment: Instant| (monotonic(moment) + OFFSET.load(Ordering::Relaxed)) as f64 * 1e-3;
    let args: serde_json::Map<String, Value> =
        args.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    let thread = writer.thread();
    writer.write(&json!({
        "ph": "X", "cat": category, "name": name, "pid": writer.rank, "tid": thread,
        "ts": micros(from), "dur": micros(to) - micros(from), "args": args,
    }));
    if writer.flushed.elapsed() > FLUSH {
        writer.flushed = Instant::now();
        if let Err(error) = writer.file.flush() {
            log_line(&format!("the timeline ends here: {error}"));
            ON.store(false, Ordering::Relaxed);
            *slot = None;
        }
    }
}

impl Writer {
    fn write(&mut self, event: &Value) {
        // An error appears at the next flush: the buffer keeps unwritten bytes.
        let _buffered = writeln!(self.file, "{event},");
    }

    fn write_label(&mut self, number: i32, label: &GroupLabel) {
        let args = json!({"number": number, "name": label.name, "members": label.members, "hosts": label.hosts});
        self.write(&json!({"ph": "M", "name": "dl_comm_group", "pid": self.rank, "args": args}));
    }

    /// The number of the calling thread; writes its name once per file.
    fn thread(&mut self) -> u64 {
        let (mut number, named) = THREAD.get();
        if number == 0 {
            number = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        if named != self.number {
            THREAD.set((number, self.number));
            let name = thread::current().name().unwrap_or("caller").to_owned();
            let pid = self.rank;
            self.write(&json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": name}}));
        }
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The only test that records: the timeline is global to the process.
    #[test]
    fn a_file_has_the_recorded_spans() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path();
        let text = folder.to_str().unwrap();
        assert!(matches!(start("/proc/nowhere", 0, "x", "a"), Err(Error::System(_))));
        start(text, 3, "rank 3", "b").unwrap();
        stop();
        let other = std::fs::read_to_string(folder.join("rank3.trace.json")).unwrap();
        let label = |name: &str| GroupLabel { name: name.into(), members: vec![3, 1], hosts: vec![3] };
        label_group(7, label("before"));
        label_group(9, label("forgotten"));
        forget_group(9);
        start(text, 3, "rank 3", "a").unwrap();
        label_group(8, label("while"));
        stop();
        forget_group(8);
        let file = std::fs::read_to_string(folder.join("a/rank3.trace.json")).unwrap();
        let events: Vec<Value> = serde_json::from_str(&file).unwrap();
        let labels = events.iter().filter(|event| event["name"] == "dl_comm_group").map(|event| &event["args"]);
        let found: Vec<_> = labels.map(|args| (args["number"].clone(), args["name"].clone())).collect();
        assert_eq!(found, [(7.into(), "before".into()), (8.into(), "while".into())]);
        // The same job again: the same file is replaced.
        start(text, 3, "rank 3", "a").unwrap();
        assert_eq!(std::fs::read_to_string(folder.join("rank3.trace.json")).unwrap(), other);
        assert!(matches!(start(text, 3, "rank 3", "a"), Err(Error::State(_))));
        let from = Instant::now();
        span("phase", "odd \"name\"", from, from + Duration::from_millis(2), &[("target", "rank 1".into())]);
        stop();
        stop();
        let file = std::fs::read_to_string(folder.join("a/rank3.trace.json")).unwrap();
        let events: Vec<Value> = serde_json::from_str(&file).unwrap();
        let span = events.iter().find(|event| event["name"] == "odd \"name\"").unwrap();
        assert!((span["dur"].as_f64().unwrap() - 2000.0).abs() < 1e-3 && span["pid"] == 3, "{span}");
        assert_eq!(span["args"]["target"], "rank 1");
        assert!((span["ts"].as_f64().unwrap() * 1e3 - monotonic(from) as f64).abs() < 1e4);
        assert!(!is_on());
    }
}
