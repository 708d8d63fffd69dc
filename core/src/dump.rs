//! Dumps: what a rank last did and waits for, as a JSON file, for `python -m dl_comm.analyze_dumps`. Written after a failure or a
//! stall, on SIGUSR1, and when somebody asks.
//!
//! Thread rule: a [`Dumper`] may be used from any thread; one file is written at a time.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::{Handle, Signals};

use crate::config::DumpDir;
use crate::error::{Error, Result};
use crate::folder::{Folder, Found};
use crate::group::Group;
use crate::log::log_line;
use crate::stacks;
use crate::transport::bootstrap::RankInfo;

/// How long dumps stay that nobody has removed.
const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

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
    /// For rank `rank` of a job with ranks at these places, and this key.
    pub fn new(rank: usize, places: Arc<[RankInfo]>, key: u128, folder: DumpDir) -> Dumper {
        Dumper { rank, rank_info: places, key, folder, teams: Mutex::default(), writing: Mutex::default() }
    }

    /// Adds a team to what is written.
    pub fn add(&self, team: &Arc<Group>) {
        let mut teams = self.teams.lock().unwrap_or_else(PoisonError::into_inner);
        teams.retain(|team| team.strong_count() > 0);
        teams.push(Arc::downgrade(team));
    }

    /// Writes a dump because of `reason`, unless `DL_COMM_DUMP_DIR` says not to. What fails is told.
    pub fn write_on_failure(&self, reason: &str) {
        if self.folder == DumpDir::Disabled {
            return;
        }
        if let Err(error) = self.write(reason, None) {
            log_line(&error.to_string());
        }
    }

    /// Writes a dump into `folder`, or where `DL_COMM_DUMP_DIR` says, and returns the file. A later one of the same rank
    /// takes its place.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn write(&self, reason: &str, folder: Option<&str>) -> Result<PathBuf> {
        let _turn = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let name = format!("rank{}.json", self.rank);
        let opened = match (folder, &self.folder) {
            (Some(folder), _) => Folder::named(Path::new(folder)),
            (None, DumpDir::Folder(folder)) => Folder::named(Path::new(folder)),
            (None, _) => self.temporary(),
        };
        let (folder, found) = opened.map_err(|error| {
            let wanted = folder.map_or_else(|| self.wanted(), str::to_owned);
            Error::system(format!("writing the last calls to {wanted}/{name}"), error)
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

    /// What the user may change to have dumps elsewhere.
    fn wanted(&self) -> String {
        match &self.folder {
            DumpDir::Folder(folder) => format!("DL_COMM_DUMP_DIR={folder}"),
            _ => "in TMPDIR; DL_COMM_DUMP_DIR names another place".into(),
        }
    }

    /// Removes what jobs have left a week ago in this user's folder under that for temporary files.
    pub fn clean(&self) {
        let Ok(mine) = Folder::named(&std::env::temp_dir()).and_then(|(base, _)| base.existing(&usual())) else {
            return;
        };
        for entry in std::fs::read_dir(mine.path()).into_iter().flatten().flatten() {
            let modified = entry.metadata().and_then(|about| about.modified());
            if modified.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > KEPT)) {
                // The folder is this user's alone. What cannot be removed stays, for the doctor to name.
                let _removed = std::fs::remove_dir_all(entry.path());
            }
        }
    }

    /// The job's folder under that for temporary files. Anybody can make a folder of the usual name there, but not one of
    /// this job's, which is a secret until it is made.
    fn temporary(&self) -> std::io::Result<(Folder, Found)> {
        let (base, _) = Folder::named(&std::env::temp_dir())?;
        let usual = usual();
        let mine = match base.private(&usual) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                base.private(&format!("{usual}-{}", self.job()))
            }
            other => other,
        };
        mine?.0.private(&self.job())
    }

    /// Tells the job from others; not all of its key, which is a secret.
    pub fn job(&self) -> String {
        format!("{:012x}", self.key & 0xffff_ffff_ffff)
    }

    fn content(&self, reason: &str) -> Value {
        let teams: Vec<Arc<Group>> =
            self.teams.lock().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade).collect();
        let place = |(rank, place): (usize, &RankInfo)| json!({"rank": rank, "host": place.host, "pid": place.pid});
        json!({
            "format": "dl_comm dump 2",
            "job": self.job(),
            "reason": reason,
            "time": SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            "rank": self.rank,
            "size": self.rank_info.len(),
            "ranks": self.rank_info.iter().enumerate().map(place).collect::<Vec<_>>(),
            "stacks": stacks::take(),
            "teams": teams.iter().map(|team| team.dump()).collect::<Vec<_>>(),
        })
    }
}

/// The folder of this user's dumps.
fn usual() -> String {
    format!("dl_comm-{}", rustix::process::geteuid().as_raw())
}

/// Writes a dump whenever SIGUSR1 comes, until it is dropped. MPICH's launcher sends that signal too, to the ranks that
/// outlive another one (`-disable-auto-cleanup`). Handlers of others stay, and are called as well.
pub struct SignalDumper {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl SignalDumper {
    /// Starts to listen.
    ///
    /// # Errors
    /// [`Error::System`] when the system refuses the handler or the thread.
    pub fn start(dumper: Arc<Dumper>) -> Result<SignalDumper> {
        let refused = |error: std::io::Error| Error::system("listening for SIGUSR1", error);
        let mut signals = Signals::new([SIGUSR1]).map_err(refused)?;
        let handle = signals.handle();
        let listen = move || {
            for _ in signals.forever() {
                dumper.write_on_failure("SIGUSR1");
            }
        };
        let thread = thread::Builder::new().name("dlcomm-signal".into()).spawn(listen).map_err(refused)?;
        Ok(SignalDumper { handle, thread: Some(thread) })
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_dump_is_written_for_its_user_and_on_a_signal() {
        let folder = std::env::temp_dir().join(format!("dl_comm_dump_{}", std::process::id()));
        let here = DumpDir::Folder(folder.to_string_lossy().into_owned());
        let place = |host: &str| RankInfo {
            host: host.into(),
            boot: String::new(),
            device: String::new(),
            pid: 1,
            pid_namespace: String::new(),
        };
        let dumper = Arc::new(Dumper::new(1, [place("a"), place("b")].into(), 0xabc, here));
        dumper.write_on_failure("because");
        let path = folder.join("rank1.json");
        let read = || serde_json::from_str::<Value>(&fs::read_to_string(&path).unwrap()).unwrap();
        let found = read();
        assert_eq!((found["reason"].as_str(), found["ranks"][1]["host"].as_str()), (Some("because"), Some("b")));
        assert_eq!(found["job"], "000000000abc");
        assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
        let listening = SignalDumper::start(dumper).unwrap();
        signal_hook::low_level::raise(SIGUSR1).unwrap();
        while read()["reason"] != "SIGUSR1" {
            thread::yield_now();
        }
        drop(listening);
        fs::remove_dir_all(&folder).unwrap();
    }
}
