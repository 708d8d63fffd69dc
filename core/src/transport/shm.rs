//! Segments of shared memory between the processes of a host.
//!
//! One rank creates a file with a random name, mode 0600, with its pages reserved (a full `/dev/shm` is an error here, not
//! a bus error later); the others map it; then its name is removed, so nothing stays behind whatever happens to the job.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use memmap2::MmapRaw;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::retry_on_intr;

use super::node::Memory;
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

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
}
