//! The timeline: what every thread did when, as a file of the Chrome trace format for each rank, while it is switched on
//! (`DL_COMM_TIMELINE` or `dl_comm_timeline_start`). `python -m dl_comm.timeline` merges the files.
//!
//! Times are microseconds on the monotonic clock of the first rank's host: ranks of one host share a clock, and the
//! difference to other hosts is measured at start. The file is a JSON array whose end may be missing, as the format
//! allows, so what a killed rank has written can be read.
//! Thread rule: everything may be called from any thread; a lock is held while a span is written. Costs one load when off.
//! Source of the format: "Trace Event Format" of the Chromium project.

use std::cell::Cell;
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::clock::monotonic;
use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::log::log_line;

static ON: AtomicBool = AtomicBool::new(false);
static WRITER: Mutex<Option<Writer>> = Mutex::new(None);
/// What the clock of this host lacks to that of the first host, in nanoseconds.
static OFFSET: AtomicI64 = AtomicI64::new(0);
static THREADS: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// The number of the thread in the file, and whether its name is there yet.
    static THREAD: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// How long written spans may stay in memory.
const FLUSH: Duration = Duration::from_millis(500);

struct Writer {
    file: BufWriter<File>,
    rank: usize,
    /// Tells the files that follow each other apart.
    number: u64,
    flushed: Instant,
}

fn writer() -> MutexGuard<'static, Option<Writer>> {
    WRITER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the difference of the first host's clock to this one's.
pub fn set_offset(nanos: i64) {
    OFFSET.store(nanos, Ordering::Relaxed);
}

/// Whether a timeline is recorded.
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Starts a file in `folder`, which is made when it is not there, for rank `rank` of job `job`, known as `title`. Where
/// another job has left a file of that name, this one goes into a folder of the job in it.
///
/// # Errors
/// [`Error::System`]; [`Error::State`] when a timeline is on.
pub fn start(folder: &str, rank: usize, title: &str, job: &str) -> Result<()> {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let mut slot = writer();
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
    // Other jobs look for it.
    writer.file.flush().map_err(failed)?;
    *slot = Some(writer);
    ON.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether a file is there that job `job` has not written: its first lines would say so.
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

/// Ends the file. Nothing happens when there is none.
pub fn stop() {
    ON.store(false, Ordering::Relaxed);
    if let Some(mut writer) = writer().take() {
        let end = json!({"ph": "M", "name": "process_labels", "pid": writer.rank, "args": {"labels": "complete"}});
        let ended = writeln!(writer.file, "{end}\n]").and_then(|()| writer.file.flush());
        if let Err(error) = ended {
            log_line(&format!("the timeline's end was not written: {error}"));
        }
    }
}

/// Writes that this thread did `name`, of the category `category`, from `from` to `to`.
pub fn span(category: &str, name: &str, from: Instant, to: Instant, args: &[(&str, Value)]) {
    let mut slot = writer();
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
        // A failure shows at the next flush, since the buffer keeps what it could not write.
        let _buffered = writeln!(self.file, "{event},");
    }

    /// The number of the calling thread, whose name is written once.
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The only test that switches it on: it is one for the process.
    #[test]
    fn a_file_has_what_happened() {
        let folder = std::env::temp_dir().join(format!("dl_comm_timeline_{}", std::process::id()));
        let text = folder.to_string_lossy().into_owned();
        assert!(matches!(start("/proc/nowhere", 0, "x", "a"), Err(Error::System(_))));
        start(&text, 3, "rank 3", "b").unwrap();
        stop();
        let other = std::fs::read_to_string(folder.join("rank3.trace.json")).unwrap();
        start(&text, 3, "rank 3", "a").unwrap();
        stop();
        // The same job again: the same file.
        start(&text, 3, "rank 3", "a").unwrap();
        assert_eq!(std::fs::read_to_string(folder.join("rank3.trace.json")).unwrap(), other);
        assert!(matches!(start(&text, 3, "rank 3", "a"), Err(Error::State(_))));
        let from = Instant::now();
        span("phase", "odd \"name\"", from, from + Duration::from_millis(2), &[("target", "rank 1".into())]);
        stop();
        stop();
        let file = std::fs::read_to_string(folder.join("a/rank3.trace.json")).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let events: Vec<Value> = serde_json::from_str(&file).unwrap();
        let span = events.iter().find(|event| event["name"] == "odd \"name\"").unwrap();
        assert!((span["dur"].as_f64().unwrap() - 2000.0).abs() < 1e-3 && span["pid"] == 3, "{span}");
        assert_eq!(span["args"]["target"], "rank 1");
        assert!((span["ts"].as_f64().unwrap() * 1e3 - monotonic(from) as f64).abs() < 1e4);
        assert!(!is_on());
    }
}
