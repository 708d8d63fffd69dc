//! A watchdog for MPI_Init and MPI_Finalize, which wait for all ranks without a deadline.
//!
//! The watchdog is a thread with a known name. So the ranks of a host can see in /proc which local ranks have reached
//! the call. The launcher sets each process's rank in its environment (PMI_RANK).

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::lock::lock;
use crate::log::{log_last_line, log_line};
use crate::transport::process::stat_fields;

/// The name of the thread.
const NAME: &str = "dlcomm-start";

/// Interval at which a watch looks for a lost rank.
const LOST_CHECK: Duration = Duration::from_millis(500);

/// After this time the launcher has started all ranks of a host.
const ALL_STARTED: Duration = Duration::from_secs(1);

/// What a watch knows about the other ranks.
pub struct Others {
    /// Names the ranks that the call waits for.
    pub missing: Box<dyn Fn() -> String + Send>,
    /// Describes a rank that has ended, without which the call never returns.
    pub lost: Arc<dyn Fn() -> Option<String> + Send + Sync>,
}

impl Default for Others {
    /// What /proc shows.
    fn default() -> Others {
        Others { missing: Box::new(missing_ranks), lost: Arc::new(ended_ranks(Instant::now())) }
    }
}

/// A function that describes ranks that have ended, where all are on this host: those without a process, some time after
/// `since`. The launcher starts all of them at once.
fn ended_ranks(since: Instant) -> impl Fn() -> Option<String> + Send + Sync {
    // Those that the last look has missed, too.
    let before: Mutex<Vec<usize>> = Mutex::default();
    move || {
        if since.elapsed() < ALL_STARTED {
            return None;
        }
        let Launched { size, all_here: true } = Launched::here()? else { return None };
        let ranks = pids_by_rank(&processes());
        let missing: Vec<usize> = (0..size).filter(|rank| !ranks.contains_key(rank)).collect();
        let mut before = lock(&before);
        let ended = missing.iter().find(|rank| before.contains(rank)).copied();
        *before = missing;
        ended.map(|rank| format!("rank {rank} has ended before it called init"))
    }
}

/// Watches a call from [`StartupWatch::begin`] until it is dropped.
pub struct StartupWatch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StartupWatch {
    /// Prepares to watch `function`. After `warn` it logs the missing ranks; after `timeout`, or when a rank is lost, it
    /// ends the process with status 1.
    ///
    /// # Errors
    /// [`Error::System`] when the thread cannot be started.
    pub fn prepare(
        function: &'static str,
        warn: Option<Duration>,
        timeout: Option<Duration>,
        others: Others,
    ) -> Result<StartupWatch> {
        let (stop, signals) = channel::<()>();
        let watch = move || {
            // Without a begin, the sender is dropped.
            if signals.recv().is_err() {
                return;
            }
            let from = Instant::now();
            let mut warn = warn.filter(|warn| timeout.is_none_or(|timeout| *warn < timeout));
            let end = |why: &str| {
                log_last_line(&format!("{function} {why}; this process ends with status 1"));
                // SAFETY: _exit skips exit handlers, which may wait for the blocked thread.
                unsafe { libc::_exit(1) };
            };
            loop {
                let next = [warn, timeout].into_iter().flatten().min();
                let remaining = next.map(|limit| (from + limit).saturating_duration_since(Instant::now()));
                let pause = remaining.map_or(LOST_CHECK, |remaining| remaining.min(LOST_CHECK));
                if !matches!(signals.recv_timeout(pause), Err(RecvTimeoutError::Timeout)) {
                    return;
                }
                if let Some(lost) = (others.lost)() {
                    end(&format!("cannot complete: {lost}"));
                }
                let has_passed = |limit: &Duration| from.elapsed() >= *limit;
                if let Some(timeout) = timeout.filter(has_passed) {
                    let missing = (others.missing)();
                    end(&format!(
                        "was not complete after {} s (DL_COMM_TIMEOUT_S); still waiting for {missing}",
                        timeout.as_secs_f64()
                    ));
                }
                if let Some(passed) = warn.take_if(|limit| has_passed(limit)) {
                    log_line(&format!(
                        "{function} has waited {} s for {} (DL_COMM_STALL_WARN_S)",
                        passed.as_secs_f64(),
                        (others.missing)()
                    ));
                }
            }
        };
        let thread = Builder::new().name(NAME.into()).spawn(watch);
        let thread = thread.map_err(Error::no_thread)?;
        Ok(StartupWatch { stop: Some(stop), thread: Some(thread) })
    }

    /// The call begins now.
    pub fn begin(&self) {
        // The thread ends only with the sender.
        let _sent = self.stop.as_ref().map(|stop| stop.send(()));
    }
}

impl Drop for StartupWatch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log_line("the watch over MPI panicked");
        }
    }
}

/// A process, as read from /proc.
struct Process {
    pid: i32,
    parent: i32,
    rank: Option<usize>,
}

/// What the launcher's variables say of the job.
struct Launched {
    size: usize,
    /// Whether all its ranks are on this host.
    all_here: bool,
}

impl Launched {
    fn here() -> Option<Launched> {
        let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<usize>().ok());
        let environment = variables(std::process::id().cast_signed());
        let count = |name: &str| environment.get(name).and_then(|text| text.parse().ok()).or_else(|| number(name));
        let size = count("PMI_SIZE")?;
        Some(Launched { size, all_here: count("MPI_LOCALNRANKS") == Some(size) })
    }
}

/// Describes the missing ranks as far as /proc shows them.
fn missing_ranks() -> String {
    let Some(Launched { size, all_here }) = Launched::here() else { return "the other ranks".to_owned() };
    let ranks = pids_by_rank(&processes());
    let mut missing: Vec<String> = Vec::new();
    for (rank, pids) in &ranks {
        if !pids.iter().any(|&pid| has_started(pid)) {
            let pids = pids.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
            missing.push(format!("rank {rank} (pid {pids}), which has not called init"));
        }
    }
    if all_here {
        missing.extend(
            (0..size).filter(|rank| !ranks.contains_key(rank)).map(|rank| format!("rank {rank}, which has ended")),
        );
    }
    if missing.is_empty() { "ranks of other hosts".to_owned() } else { missing.join(", ") }
}

/// The processes of this job on this host and their descendants, by rank.
fn pids_by_rank(processes: &[Process]) -> BTreeMap<usize, Vec<i32>> {
    let by_pid: HashMap<i32, &Process> = processes.iter().map(|process| (process.pid, process)).collect();
    // The first ancestor without a rank: the launcher's process.
    let launcher = |pid: i32| {
        let mut process = by_pid.get(&pid)?;
        while process.rank.is_some() {
            process = by_pid.get(&process.parent)?;
        }
        Some(process.pid)
    };
    let own_launcher = launcher(std::process::id().cast_signed());
    let mut ranks: BTreeMap<usize, Vec<i32>> = BTreeMap::new();
    for process in processes {
        if let Some(rank) = process.rank
            && own_launcher.is_some()
            && launcher(process.pid) == own_launcher
        {
            ranks.entry(rank).or_default().push(process.pid);
        }
    }
    ranks
}

/// The processes of this host whose environment this user may read.
fn processes() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let process = |pid: i32| {
        let fields = stat_fields(pid)?;
        let (state, parent) = (fields.first()?, fields.get(1)?.parse().ok()?);
        let rank = variables(pid).get("PMI_RANK").and_then(|rank| rank.parse().ok());
        (state != "Z").then_some(Process { pid, parent, rank })
    };
    entries.flatten().filter_map(|entry| process(entry.file_name().to_str()?.parse().ok()?)).collect()
}

/// The initial environment of a process.
fn variables(pid: i32) -> HashMap<String, String> {
    let bytes = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let pairs = text.split('\0').filter_map(|entry| entry.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Whether a process has a watchdog thread.
fn has_started(pid: i32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    threads.flatten().any(|thread| fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.trim() == NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_grouped_by_launcher_and_rank() {
        let me = std::process::id().cast_signed();
        let process = |pid, parent, rank| Process { pid, parent, rank };
        let ranks = pids_by_rank(&[
            process(1, 0, None),
            process(50, 1, None),
            process(me, 50, Some(1)),
            process(52, 50, Some(0)),
            process(53, 52, Some(0)),
            process(60, 1, None),
            process(61, 60, Some(0)),
        ]);
        assert_eq!(ranks, BTreeMap::from([(0, vec![52, 53]), (1, vec![me])]));
    }

    #[test]
    fn a_watch_is_visible_and_ends() {
        let prepare =
            || StartupWatch::prepare("a call", Some(Duration::from_secs(100)), None, Others::default()).unwrap();
        drop(prepare());
        let watch = prepare();
        watch.begin();
        let me = std::process::id().cast_signed();
        while !has_started(me) {
            std::thread::yield_now();
        }
        drop(watch);
        assert!(processes().iter().any(|process| process.pid == me));
    }
}
