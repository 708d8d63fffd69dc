//! Shared memory segments of the processes of a host.
//!
//! One rank creates a file with a random name and mode 0600. The other ranks open the file. Then its name is removed, so nothing remains after a
//! crash. The creator holds a lock on the file while the name exists. A name without a lock was left by a crash in that
//! moment; creating the next segment removes it. All failures are an [`Error::System`].

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, MemfdFlags, flock, memfd_create};
use rustix::process::{Resource, getrlimit};

use crate::address_space::AddressSpace;
use crate::error::{Error, Result};
use crate::log::log_line;

/// Prefix of segment names.
const PREFIX: &str = "dl_comm.";
/// Address space limit for the arenas of a host's ranks: half of a process's address space.
const MAX_ADDRESS_BYTES: u64 = 1 << 46;
/// An arena that can have no more bytes is of no use.
const MIN_ARENA_BYTES: u64 = 8 << 20;
/// Minimum age of a stale name: longer than the time between creating and locking a file.
const STALE_AGE: Duration = Duration::from_secs(60);

/// Removes stale names of this user's processes in `folder`. Skips files that cannot be inspected.
fn reclaim(folder: &Path) {
    let me = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let key = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if !key.is_some_and(|key| key.len() == 32 && key.bytes().all(|byte| byte.is_ascii_hexdigit())) {
            continue;
        }
        let Ok(metadata) = entry.metadata() else { continue };
        let old = metadata.modified().is_ok_and(|time| time.elapsed().is_ok_and(|age| age > STALE_AGE));
        if !metadata.is_file() || metadata.uid() != me || !old {
            continue;
        }
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(entry.path());
        let Ok(file) = opened else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // Another process may have removed it already.
            let _removed = std::fs::remove_file(entry.path());
        }
    }
}

/// The name of a segment in the file system, removed on drop.
#[derive(Debug)]
pub struct Name {
    path: PathBuf,
    /// Holds the lock.
    _file: File,
}

impl Name {
    /// The path for other processes.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path)
            && error.kind() != ErrorKind::NotFound
        {
            log_line(&format!("{} stays behind: {error}", self.path.display()));
        }
    }
}

/// Creates the file of an arena ([`super::arena`]) for one of `ranks` ranks. Returns it and the most bytes of it that
/// may be mapped.
pub fn create(folder: &str, ranks: usize) -> Result<(File, Name, usize)> {
    let max_len = max_arena_bytes(&AddressSpace::now(), ranks)?;
    let (file, name) = create_file(folder)?;
    Ok((file, name, max_len))
}

/// As [`create`], for a rank that shares nothing: it needs no folder.
pub fn create_private() -> Result<(File, usize)> {
    let failed = |error: rustix::io::Errno| Error::system("creating memory for the only rank of this host", error);
    let file = memfd_create("dl_comm", MemfdFlags::CLOEXEC).map_err(failed)?;
    Ok((file.into(), max_arena_bytes(&AddressSpace::now(), 1)?))
}

/// Opens a file that another process created.
pub fn open(path: &Path) -> Result<File> {
    let open = || {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        // If other users can rename files in the folder, the file may be theirs.
        if file.metadata()?.uid() != rustix::process::geteuid().as_raw() {
            return Err(std::io::Error::new(ErrorKind::PermissionDenied, "it belongs to another user"));
        }
        Ok(file)
    };
    open().map_err(|error| Error::system(format!("opening the shared memory {}", path.display()), error))
}

/// The most bytes of an arena that each of `ranks` ranks maps: with a limit, all arenas take up to half of the address
/// space that is left.
fn max_arena_bytes(space: &AddressSpace, ranks: usize) -> Result<usize> {
    let ranks = ranks as u64;
    let limited = space.limit.map_or(u64::MAX, |limit| limit.saturating_sub(space.used) / 2 / ranks);
    if limited < MIN_ARENA_BYTES {
        let needed = (space.used + 2 * ranks * MIN_ARENA_BYTES) >> 20;
        return Err(Error::System(format!(
            "mapping the shared memory of {ranks} ranks: {space}; at least {needed} MiB are needed: raise the limit"
        )));
    }
    let file = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX).max(MIN_ARENA_BYTES);
    Ok(usize::try_from(limited.min(file).min(MAX_ADDRESS_BYTES / ranks)).unwrap_or(usize::MAX))
}

fn create_file(folder: &str) -> Result<(File, Name)> {
    let mut key = [0u8; 16];
    rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::system("drawing a random name", error))?;
    reclaim(Path::new(folder));
    let path = Path::new(folder).join(format!("{PREFIX}{:032x}", u128::from_ne_bytes(key)));
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path).map_err(|error| {
        Error::system(format!("creating shared memory in {folder}, which DL_COMM_SHM_DIR may change"), error)
    })?;
    // Without lock support, names left by a crash remain.
    let _locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
    let lock_file = file
        .try_clone()
        .map_err(|error| Error::system(format!("keeping the shared memory {}", path.display()), error))?;
    Ok((file, Name { path, _file: lock_file }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::arenas::Arenas;
    use crate::transport::peer_memory::PeerMemory;
    use memmap2::MmapOptions;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    fn file(folder: &str) -> (File, Name) {
        let (file, name, _) = create(folder, 1000).unwrap();
        (file, name)
    }

    #[test]
    fn two_maps_share_memory_and_the_name_is_removed() {
        let (first, name) = file("/dev/shm");
        let path = name.path().to_owned();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let second = open(&path).unwrap();
        drop(name);
        assert!(!path.exists());
        first.set_len(8192).unwrap();
        let [first, second] = [first, second].map(|file| MmapOptions::new().len(8192).map_raw(&file).unwrap());
        // SAFETY: both maps have 8192 bytes, and no other code uses them.
        unsafe {
            first.as_mut_ptr().add(8191).write_volatile(7);
            assert_eq!(second.as_mut_ptr().add(8191).read_volatile(), 7);
        }
    }

    #[test]
    fn stale_names_are_removed_and_others_stay() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path();
        let text = folder.to_str().unwrap();
        let (_file, in_use) = file(text);
        let stale = folder.join(format!("dl_comm.{:032x}", 7));
        let recent = folder.join(format!("dl_comm.{:032x}", 8));
        let other = folder.join("dl_comm.log");
        let hour_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
        for path in [&stale, &recent, &other] {
            File::create(path).unwrap();
        }
        for path in [&stale, &other, in_use.path()] {
            File::options().write(true).open(path).unwrap().set_modified(hour_ago).unwrap();
        }
        let (_second_file, second) = file(text);
        let exist = [stale.exists(), recent.exists(), other.exists(), in_use.path().exists(), second.path().exists()];
        assert_eq!(exist, [false, true, true, true, true]);
    }

    #[test]
    fn another_user_cannot_open_a_file() {
        if !rustix::process::geteuid().is_root() {
            return; // only root can run a process as another user
        }
        let (_file, name) = file("/dev/shm");
        let mut cat = Command::new("head");
        let output = cat.args(["-c", "1"]).arg(name.path()).uid(65534).gid(65534).output().unwrap();
        assert!(String::from_utf8_lossy(&output.stderr).contains("Permission denied"), "{output:?}");
    }

    #[test]
    fn a_link_is_not_followed() {
        let (_file, name) = file("/dev/shm");
        let base = tempfile::tempdir().unwrap();
        let link = base.path().join("link");
        std::os::unix::fs::symlink(name.path(), &link).unwrap();
        assert!(open(name.path()).is_ok());
        assert!(open(&link).is_err());
    }

    #[test]
    fn the_only_rank_needs_no_folder() {
        let (file, max_len) = create_private().unwrap();
        let arenas = Arenas::new(vec![file], 0, max_len).unwrap();
        assert!(arenas.alloc_zeroed(5000).is_ok());
    }

    #[test]
    fn a_missing_folder_is_named_in_the_error() {
        let absent = create("/nonexistent", 1).map(drop).unwrap_err().to_string();
        assert!(absent.contains("/nonexistent") && absent.contains("DL_COMM_SHM_DIR"), "{absent}");
    }

    #[test]
    fn arenas_take_half_of_the_address_space_that_is_left() {
        let space = |limit| AddressSpace { limit, used: 1 << 30 };
        assert_eq!(max_arena_bytes(&space(Some(2 << 30)), 2).unwrap(), 256 << 20);
        assert!(max_arena_bytes(&space(None), 1000).unwrap() as u64 <= MAX_ADDRESS_BYTES / 1000);
        for limit in [0, 1 << 30, (1 << 30) + (31 << 20)] {
            let error = max_arena_bytes(&space(Some(limit)), 2).unwrap_err().to_string();
            assert!(error.contains("ulimit -v") && error.contains("1056 MiB"), "{error}");
        }
    }
}
