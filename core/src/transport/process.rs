//! Liveness of the processes of a host: whether they have exited, and how.
//!
//! Thread rule: everything may be used from any thread.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::shm_region::Liveness;
use crate::error::{Error, Result};
use crate::log::log_line;

/// Another process, monitored through its pidfd.
pub struct Process {
    pid: i32,
    /// `None` when the process exited before it was opened.
    fd: Option<OwnedFd>,
}

impl Process {
    /// Opens process `pid`; `None` where pidfds are not supported.
    ///
    /// # Errors
    /// [`Error::System`] when descriptors or memory are exhausted.
    pub fn open(pid: i32) -> Result<Option<Process>> {
        let Some(raw) = Pid::from_raw(pid) else { return Ok(None) };
        match pidfd_open(raw, PidfdFlags::empty()) {
            Ok(fd) => Ok(Some(Process { pid, fd: Some(fd) })),
            Err(Errno::SRCH) => Ok(Some(Process { pid, fd: None })),
            Err(Errno::NOSYS | Errno::PERM | Errno::INVAL) => Ok(None),
            Err(error) => Err(Error::system(format!("watching process {pid} of this host"), error)),
        }
    }

    /// The descriptor that becomes readable when the process exits; `None` if it already has.
    pub fn end(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Describes the exit, if the process has exited: `(pid 7) has ended: killed by signal 9`. May take 0.1 s.
    pub fn ended(&self) -> Option<String> {
        let Some(fd) = &self.fd else { return Some(format!("(pid {}) has ended", self.pid)) };
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let ended = poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&now)).is_ok_and(|count| count > 0);
        ended.then(|| format!("(pid {}) has ended{}", self.pid, exit_text(fd, self.pid)))
    }
}

/// The exit status as text, such as `: exit status 3`; empty if unavailable.
fn exit_text(fd: &OwnedFd, pid: i32) -> String {
    for _ in 0..20 {
        // The first works until the parent has reaped the process, the second from then on.
        if let Some(status) = zombie_status(pid).or_else(|| exit_code(fd)) {
            return match (status & 0x7f, (status >> 8) & 0xff) {
                (0, code) => format!(": exit status {code}"),
                (signal, _) => format!(": killed by signal {signal}"),
            };
        }
        thread::sleep(Duration::from_millis(5));
    }
    String::new()
}

/// The fields of `/proc/PID/stat` from field 3, the state (proc_pid_stat(5)).
pub fn stat_fields(pid: i32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name (field 2) may contain any character; it ends at the last parenthesis.
    Some(text.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect())
}

/// The wait status of a zombie: field 52.
fn zombie_status(pid: i32) -> Option<i32> {
    let fields = stat_fields(pid).filter(|fields| fields.first().is_some_and(|state| state == "Z"))?;
    fields.get(49)?.parse().ok()
}

/// The wait status of a reaped process, from Linux 6.15.
fn exit_code(fd: &OwnedFd) -> Option<i32> {
    // SAFETY: plain integers.
    let mut info: libc::pidfd_info = unsafe { std::mem::zeroed() };
    info.mask = libc::PIDFD_INFO_EXIT.into();
    // SAFETY: the kernel writes at most the size encoded in the request, which is that of `info`.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), libc::PIDFD_GET_INFO, &raw mut info) } == 0;
    (done && info.mask & u64::from(libc::PIDFD_INFO_EXIT) != 0).then_some(info.exit_code)
}

/// Monitors the processes of a host's ranks for all groups, with one descriptor per process. The default monitors none.
#[derive(Default)]
pub struct ProcessLiveness {
    peers: Vec<Option<Arc<Process>>>,
}

impl ProcessLiveness {
    /// Monitors the processes `pids` (by local rank; `None` is not monitored). Without pidfds it logs a warning, and
    /// lost ranks are noticed at the deadline only.
    ///
    /// # Errors
    /// Errors of [`Process::open`].
    pub fn new(pids: &[Option<i32>]) -> Result<ProcessLiveness> {
        let open = |pid: &Option<i32>| Ok(pid.map(Process::open).transpose()?.flatten().map(Arc::new));
        let peers: Vec<Option<Arc<Process>>> = pids.iter().map(open).collect::<Result<_>>()?;
        if peers.iter().zip(pids).any(|(peer, pid)| peer.is_none() && pid.is_some()) {
            log_line(
                "this system does not let a process watch others (pidfd_open): the end of a rank is noticed at the deadline",
            );
        }
        Ok(ProcessLiveness { peers })
    }

    /// The process of a rank, if it is monitored.
    pub fn process(&self, local_rank: usize) -> Option<Arc<Process>> {
        self.peers.get(local_rank)?.clone()
    }
}

impl Liveness for Arc<ProcessLiveness> {
    fn lost(&self, local_rank: usize) -> Option<String> {
        self.peers.get(local_rank)?.as_ref()?.ended()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn an_exited_process_is_noticed_with_its_status() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let liveness = Arc::new(ProcessLiveness::new(&[Some(pid), None]).unwrap());
        assert_eq!(liveness.lost(0), None);
        assert_eq!(liveness.lost(1), None);
        child.kill().unwrap();
        while liveness.lost(0).is_none() {
            std::thread::yield_now();
        }
        assert_eq!(liveness.lost(0), Some(format!("(pid {pid}) has ended: killed by signal 9")), "as a zombie");
        child.wait().unwrap();
        let description = liveness.lost(0).unwrap();
        let expected = [format!("(pid {pid}) has ended: killed by signal 9"), format!("(pid {pid}) has ended")];
        assert!(expected.contains(&description), "{description}");
        assert!(Arc::new(ProcessLiveness::new(&[Some(pid)]).unwrap()).lost(0).unwrap().contains("has ended"));
    }
}
