//! Dumps: a JSON file with a rank's recent calls and its current wait, read by `python -m dl_comm.analyze_dumps`. A
//! rank writes a dump after a failure or a stall, on SIGUSR1, and on request.
//!
//! Thread rule: a [`Dumper`] may be used from any thread; a lock serializes writing.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::{Handle, Signals};

use crate::config::DumpDir;
use crate::error::{Error, Result};
use crate::folder::{Folder, Found};
use crate::group::Group;
use crate::lock::lock;
use crate::log::log_line;
use crate::stacks;
use crate::transport::rank_info::RankInfo;

/// Dumps older than this are deleted.
const MAX_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Whether a start installs a [`SignalDumper`].
static LISTENS: AtomicBool = AtomicBool::new(true);

/// Sets whether later starts listen for SIGUSR1.
pub fn listen_for_signal(enabled: bool) {
    LISTENS.store(enabled, Ordering::Relaxed);
}

/// Writes this rank's dumps.
pub struct Dumper {
    rank: usize,
    rank_info: Arc<[RankInfo]>,
    key: u128,
    folder: DumpDir,
    teams: Mutex<Vec<Weak<Group>>>,
    writing: Mutex<()>,
}

impl Dumper {
    /// Creates the dumper of rank `rank`. `key` is the job's secret key.
    pub fn new(rank: usize, rank_info: Arc<[RankInfo]>, key: u128, folder: DumpDir) -> Dumper {
        Dumper { rank, rank_info, key, folder, teams: Mutex::default(), writing: Mutex::default() }
    }

    /// Adds a group to the dumps.
    pub fn add(&self, team: &Arc<Group>) {
        let mut teams = lock(&self.teams);
        teams.retain(|team| team.strong_count() > 0);
        teams.push(Arc::downgrade(team));
    }

    /// Writes a dump with `reason`, unless `DL_COMM_DUMP_DIR` disables dumps. Logs errors.
    pub fn write_on_failure(&self, reason: &str) {
        if self.folder == DumpDir::Disabled {
            return;
        }
        if let Err(error) = self.write(reason, None) {
            log_line(&error.to_string());
        }
    }

    /// Writes a dump into `folder`, or into the directory of `DL_COMM_DUMP_DIR`, and returns its path. Overwrites this
    /// rank's earlier dump.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn write(&self, reason: &str, folder: Option<&str>) -> Result<PathBuf> {
        let _guard = lock(&self.writing);
        let name = format!("rank{}.json", self.rank);
        let opened = match (folder, &self.folder) {
            (Some(folder), _) => Folder::named(Path::new(folder)),
            (None, DumpDir::Folder(folder)) => Folder::named(Path::new(folder)),
            (None, _) => self.temporary(),
        };
        let (folder, found) = opened.map_err(|error| {
            let location = folder.map_or_else(|| self.location(), str::to_owned);
            Error::system(format!("writing the last calls to {location}/{name}"), error)
        })?;
        let path = folder.path().join(&name);
        folder
            .write(&name, format!("{:#}\n", self.content(reason)).as_bytes())
            .map_err(|error| Error::system(format!("writing the last calls to {}", path.display()), error))?;
        if found == Found::New {
            let folder = folder.path().display();
            log_line(&format!(
                "the last calls of each rank are in {folder}; python -m dl_comm.analyze_dumps {folder} reads them"
            ));
        }
        Ok(path)
    }

    /// The setting that chose the directory, for error messages.
    fn location(&self) -> String {
        match &self.folder {
            DumpDir::Folder(folder) => format!("DL_COMM_DUMP_DIR={folder}"),
            _ => "in TMPDIR; DL_COMM_DUMP_DIR names another place".into(),
        }
    }

    /// Deletes dumps of earlier jobs that are older than a week from this user's folder in the temporary
    /// directory.
    pub fn clean(&self) {
        let Ok(user_dir) = Folder::named(&std::env::temp_dir()).and_then(|(base, _)| base.existing(&user_folder()))
        else {
            return;
        };
        for entry in std::fs::read_dir(user_dir.path()).into_iter().flatten().flatten() {
            let modified = entry.metadata().and_then(|metadata| metadata.modified());
            if modified.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > MAX_AGE)) {
                // Only this user can write to the folder. `dl_comm.doctor` reports files that remain.
                let _removed = std::fs::remove_dir_all(entry.path());
            }
        }
    }

    /// The job's folder in the temporary directory. Another user may have created a folder with the usual name. The
    /// fallback name contains the job's id, a secret until the folder exists.
    fn temporary(&self) -> std::io::Result<(Folder, Found)> {
        let (base, _) = Folder::named(&std::env::temp_dir())?;
        let user_folder = user_folder();
        let user_dir = match base.private(&user_folder) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                base.private(&format!("{user_folder}-{}", self.job()))
            }
            other => other,
        };
        user_dir?.0.private(&self.job())
    }

    /// The job's id: the low 48 bits of its secret key.
    pub fn job(&self) -> String {
        format!("{:012x}", self.key & 0xffff_ffff_ffff)
    }

    fn content(&self, reason: &str) -> Value {
        let teams: Vec<Arc<Group>> = lock(&self.teams).iter().filter_map(Weak::upgrade).collect();
        let info = |(rank, info): (usize, &RankInfo)| json!({"rank": rank, "host": info.host, "pid": info.pid});
        json!({
            "format": "dl_comm dump 2",
            "job": self.job(),
            "reason": reason,
            "time": SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            "rank": self.rank,
            "size": self.rank_info.len(),
            "ranks": self.rank_info.iter().enumerate().map(info).collect::<Vec<_>>(),
            "stacks": stacks::take(),
            "teams": teams.iter().map(|team| team.dump()).collect::<Vec<_>>(),
        })
    }
}

/// The name of this user's folder of dumps.
fn user_folder() -> String {
    format!("dl_comm-{}", rustix::process::geteuid().as_raw())
}

/// Writes a dump at each SIGUSR1 until it is dropped. MPICH's launcher sends this signal to the ranks that survive a
/// lost rank (`-disable-auto-cleanup`). Handlers of the program stay installed and run too.
pub struct SignalDumper {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl SignalDumper {
    /// Installs the handler and starts the thread; None if the program does not want them ([`listen_for_signal`]).
    ///
    /// # Errors
    /// [`Error::System`] when the system refuses the handler or the thread.
    pub fn start(dumper: Arc<Dumper>) -> Result<Option<SignalDumper>> {
        if !LISTENS.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let refused = |error: std::io::Error| Error::system("listening for SIGUSR1", error);
        let mut signals = Signals::new([SIGUSR1]).map_err(refused)?;
        let handle = signals.handle();
        let listen = move || {
            for _ in signals.forever() {
                dumper.write_on_failure("SIGUSR1");
            }
        };
        let thread = thread::Builder::new().name("dlcomm-signal".into()).spawn(listen).map_err(refused)?;
        Ok(Some(SignalDumper { handle, thread: Some(thread) }))
    }
}

impl Drop for SignalDumper {
    fn drop(&mut self) {
        self.handle.close();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log_line("the thread that listens for SIGUSR1 panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_dump_is_private_and_written_on_a_signal() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("dumps");
        let here = DumpDir::Folder(folder.to_string_lossy().into_owned());
        let info = |host: &str| RankInfo { host: host.into(), ..RankInfo::default() };
        let dumper = Arc::new(Dumper::new(1, [info("a"), info("b")].into(), 0xabc, here));
        dumper.write_on_failure("because");
        let path = folder.join("rank1.json");
        let read = || serde_json::from_str::<Value>(&fs::read_to_string(&path).unwrap()).unwrap();
        let found = read();
        assert_eq!((found["reason"].as_str(), found["ranks"][1]["host"].as_str()), (Some("because"), Some("b")));
        assert_eq!(found["job"], "000000000abc");
        assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
        let signal_dumper = SignalDumper::start(dumper).unwrap();
        signal_hook::low_level::raise(SIGUSR1).unwrap();
        while read()["reason"] != "SIGUSR1" {
            thread::yield_now();
        }
        drop(signal_dumper);
    }
}
