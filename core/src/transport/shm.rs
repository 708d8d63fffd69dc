//! Segments of shared memory between the processes of a host, and the watch over those processes.
//!
//! One rank creates a file with a random name, mode 0600, with its pages reserved (a full `/dev/shm` is an error here, not
//! a bus error later); the others map it; then its name is removed, so nothing stays behind whatever happens to the job.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use memmap2::MmapRaw;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::node::{Memory, Watch};
use crate::error::{Error, Result};
use crate::say::say;

/// A mapped segment. Unmapped when dropped.
pub struct Segment {
    map: MmapRaw,
}

impl Memory for Segment {
    fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }
    fn len(&self) -> usize {
        self.map.len()
    }
}

/// A segment's name in the file system; removed when dropped.
#[derive(Debug)]
pub struct Name(PathBuf);

impl Name {
    /// The path that the other processes open.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0)
            && error.kind() != ErrorKind::NotFound
        {
            say(&format!("{} stays behind: {error}", self.0.display()));
        }
    }
}

impl Segment {
    /// Creates a segment of `len` zero bytes in `folder`.
    ///
    /// # Errors
    /// [`Error::System`], with the size needed when the folder is full.
    pub fn create(folder: &str, len: usize) -> Result<(Segment, Name)> {
        let mut key = [0u8; 16];
        rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| Error::system("drawing a random name", error))?;
        let path = Path::new(folder).join(format!("dl_comm.{:032x}", u128::from_ne_bytes(key)));
        let failed = |what: &str, error: std::io::Error| Error::system(format!("{what} {}", path.display()), error);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(|error| failed("creating the shared memory", error))?;
        let name = Name(path.clone());
        retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), 0, len as u64)).map_err(|error| {
            Error::system(
                format!(
                    "reserving {} KiB of shared memory in {folder} (make it larger, point DL_COMM_SHM_DIR elsewhere, or set \
                     DL_COMM_CHUNK_KB or the number of threads lower)",
                    len.div_ceil(1024)
                ),
                error,
            )
        })?;
        Ok((Segment::map(&file).map_err(|error| failed("mapping", error))?, name))
    }

    /// Maps the segment that another process created.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn open(path: &Path) -> Result<Segment> {
        let open = || Segment::map(&OpenOptions::new().read(true).write(true).open(path)?);
        open().map_err(|error| Error::system(format!("opening the shared memory {}", path.display()), error))
    }

    fn map(file: &File) -> std::io::Result<Segment> {
        Ok(Segment { map: MmapRaw::map_raw(file)? })
    }
}

/// Watches processes by their pidfds, which tell an end from the moment it happens.
pub struct ProcessWatch {
    peers: Vec<Option<(i32, Peer)>>,
}

enum Peer {
    Open(OwnedFd),
    /// It had ended before it could be opened.
    Ended,
}

impl ProcessWatch {
    /// Watches the processes `pids` (by local rank; `None` is not watched). A process that cannot be opened is not watched:
    /// the deadline remains.
    pub fn new(pids: &[Option<i32>]) -> ProcessWatch {
        let open = |pid: i32| match pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()) {
            Ok(fd) => Some((pid, Peer::Open(fd))),
            Err(Errno::SRCH) => Some((pid, Peer::Ended)),
            Err(_) => None,
        };
        ProcessWatch { peers: pids.iter().map(|pid| pid.and_then(open)).collect() }
    }
}

impl Watch for ProcessWatch {
    fn lost(&self, local_rank: usize) -> Option<String> {
        let (pid, peer) = self.peers.get(local_rank)?.as_ref()?;
        let ended = match peer {
            Peer::Ended => true,
            Peer::Open(fd) => {
                let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
                poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&now)).is_ok_and(|count| count > 0)
            }
        };
        ended.then(|| format!("(pid {pid}) has ended"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    #[test]
    fn two_maps_are_one_memory_and_the_name_goes() {
        let (first, name) = Segment::create("/dev/shm", 8192).unwrap();
        let path = name.path().to_owned();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let second = Segment::open(&path).unwrap();
        drop(name);
        assert!(!path.exists());
        // SAFETY: both maps are at least 8192 bytes long, and nobody else has them.
        unsafe {
            first.base().add(8191).write_volatile(7);
            assert_eq!(second.base().add(8191).read_volatile(), 7);
        }
    }

    #[test]
    fn a_folder_that_is_full_or_absent_is_an_error_that_says_so() {
        let huge = Segment::create("/dev/shm", 1 << 50).map(drop).unwrap_err().to_string();
        assert!(huge.contains("KiB") && huge.contains("DL_COMM_CHUNK_KB"), "{huge}");
        let absent = Segment::create("/nonexistent", 64).map(drop).unwrap_err().to_string();
        assert!(absent.contains("/nonexistent"), "{absent}");
    }

    #[test]
    fn an_ended_process_is_noticed() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let watch = ProcessWatch::new(&[Some(i32::try_from(child.id()).unwrap()), None]);
        assert_eq!(watch.lost(0), None);
        child.kill().unwrap();
        while watch.lost(0).is_none() {
            std::thread::yield_now();
        }
        assert_eq!(watch.lost(1), None);
        child.wait().unwrap();
    }
}
