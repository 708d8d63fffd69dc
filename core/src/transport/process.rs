//! The watch over processes of this host: whether they have ended, and how.
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

/// Another process, by its pidfd, which tells its end from the moment it happens.
pub struct Process {
    pid: i32,
    /// `None`: it had ended before it could be opened.
    fd: Option<OwnedFd>,
}

impl Process {
    /// Opens the process `pid`; `None` where the system has no pidfds for us.
    ///
    /// # Errors
    /// [`Error::System`] for want of descriptors or memory.
    pub fn open(pid: i32) -> Result<Option<Process>> {
        let Some(raw) = Pid::from_raw(pid) else { return Ok(None) };
        match pidfd_open(raw, PidfdFlags::empty()) {
            Ok(fd) => Ok(Some(Process { pid, fd: Some(fd) })),
            Err(Errno::SRCH) => Ok(Some(Process { pid, fd: None })),
            Err(Errno::NOSYS | Errno::PERM | Errno::INVAL) => Ok(None),
            Err(error) => Err(Error::system(format!("watching process {pid} of this host"), error)),
        }
    }

    /// What to poll for reading, which tells the end; `None` when it has ended already.
    pub fn end(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Words about its end, if it has ended: `(pid 7) has ended: killed by signal 9`. May take a tenth of a second.
    pub fn ended(&self) -> Option<String> {
        let Some(fd) = &self.fd else { return Some(format!("(pid {}) has ended", self.pid)) };
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let ended = poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&now)).is_ok_and(|count| count > 0);
        ended.then(|| format!("(pid {}) has ended{}", self.pid, how(fd, self.pid)))
    }
}

/// `: exit status 3` and the like, where the system tells it.
fn how(fd: &OwnedFd, pid: i32) -> String {
    for _ in 0..20 {
        // The one until the parent has taken note of the end, the other from then on.
        if let Some(status) = of_zombie(pid).or_else(|| exit_code(fd)) {
            return match (status & 0x7f, (status >> 8) & 0xff) {
                (0, code) => format!(": exit status {code}"),
                (signal, _) => format!(": killed by signal {signal}"),
            };
        }
        thread::sleep(Duration::from_millis(5));
    }
    String::new()
}

/// The wait status of a process that nobody has waited for (proc_pid_stat(5)).
fn of_zombie(pid: i32) -> Option<i32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, the second field, may have anything in it but ends with the last parenthesis.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    // Field 3 is the state, field 52 the status.
    if *fields.first()? == "Z" { fields.get(49)?.parse().ok() } else { None }
}

/// The wait status of a process that was waited for, from Linux 6.15 on.
fn exit_code(fd: &OwnedFd) -> Option<i32> {
    /// The first version of `struct pidfd_info` of linux/pidfd.h.
    #[repr(C)]
    struct Info {
        mask: u64,
        group: u64,
        ids: [u32; 11],
        exit_code: i32,
    }
    const EXIT: u64 = 1 << 3;
    /// `_IOWR(0xFF, 11, struct pidfd_info)`.
    const GET_INFO: libc::c_ulong = (3 << 30) | ((size_of::<Info>() as libc::c_ulong) << 16) | (0xff << 8) | 11;
    let mut info = Info { mask: EXIT, group: 0, ids: [0; 11], exit_code: 0 };
    // SAFETY: the request writes no more than the size in its number, which is that of `info`.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), GET_INFO as _, &raw mut info) } == 0;
    (done && info.mask & EXIT != 0).then_some(info.exit_code)
}

/// Watches the processes of a host's ranks, for all teams: one descriptor for each. The default watches none.
#[derive(Default)]
pub struct ProcessLiveness {
    peers: Vec<Option<Arc<Process>>>,
}

impl ProcessLiveness {
    /// Watches the processes `pids` (by local rank; `None` is not watched). Where the system has no pidfds, one line says
    /// so, and the deadline remains.
    ///
    /// # Errors
    /// Those of [`Process::open`].
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

    /// The process of a rank, if it is watched.
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn an_ended_process_is_noticed_and_how_it_ended() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let watch = Arc::new(ProcessLiveness::new(&[Some(pid), None]).unwrap());
        assert_eq!(watch.lost(0), None);
        assert_eq!(watch.lost(1), None);
        child.kill().unwrap();
        while watch.lost(0).is_none() {
            std::thread::yield_now();
        }
        assert_eq!(watch.lost(0), Some(format!("(pid {pid}) has ended: killed by signal 9")), "as a zombie");
        child.wait().unwrap();
        let words = watch.lost(0).unwrap();
        let told = [format!("(pid {pid}) has ended: killed by signal 9"), format!("(pid {pid}) has ended")];
        assert!(told.contains(&words), "{words}");
        assert!(Arc::new(ProcessLiveness::new(&[Some(pid)]).unwrap()).lost(0).unwrap().contains("has ended"));
    }
}
