//! Safe file access in directories that other users can write to, such as `/tmp`. No file of ours follows a link or
//! replaces a folder that another user put there. Every path is opened relative to an open directory.
//!
//! All functions also fail with system errors.
//! Thread rule: a [`Folder`] may be used from any thread.

use std::fs::{DirBuilder, File};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fstat, mkdirat, openat, renameat, unlinkat};
use rustix::io::Errno;

/// An open directory.
pub struct Folder {
    fd: OwnedFd,
    path: PathBuf,
}

/// Whether a folder existed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// It existed.
    Existing,
    /// It was created.
    New,
}

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl Folder {
    /// Opens a directory that the user named, with any owner. Creates it with mode 0700 if it is missing.
    pub fn named(path: &Path) -> Result<(Folder, Found)> {
        if let Some(parent) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
        }
        let found = match DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => Found::New,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Found::Existing,
            Err(error) => return Err(error),
        };
        let fd = openat(CWD, path, FOLDER, Mode::empty())?;
        Ok((Folder { fd, path: path.to_owned() }, found))
    }

    /// Opens folder `name` inside this one, which must belong to this user alone. Creates it if it is missing.
    ///
    /// # Errors
    /// [`ErrorKind::PermissionDenied`] when `name` is a link, not a directory, owned by another user, or accessible to
    /// others; system errors.
    pub fn private(&self, name: &str) -> Result<(Folder, Found)> {
        let found = match mkdirat(&self.fd, name, Mode::RWXU) {
            Ok(()) => Found::New,
            Err(Errno::EXIST) => Found::Existing,
            Err(error) => return Err(error.into()),
        };
        Ok((self.existing(name)?, found))
    }

    /// As [`Folder::private`], without creating the folder.
    ///
    /// # Errors
    /// As [`Folder::private`].
    pub fn existing(&self, name: &str) -> Result<Folder> {
        let path = self.path.join(name);
        let refused = |why: &str| Error::new(ErrorKind::PermissionDenied, format!("{} {why}", path.display()));
        let fd = match openat(&self.fd, name, FOLDER | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::LOOP | Errno::NOTDIR) => return Err(refused("is a link or no folder")),
            Err(Errno::ACCESS) => return Err(refused("belongs to another user")),
            Err(error) => return Err(error.into()),
        };
        let metadata = fstat(&fd)?;
        if metadata.st_uid != rustix::process::geteuid().as_raw() {
            return Err(refused("belongs to another user"));
        }
        if metadata.st_mode & 0o077 != 0 {
            return Err(refused("is open to other users"));
        }
        Ok(Folder { fd, path })
    }

    /// The path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates file `name`. Removes an existing entry of that name first, without following links.
    pub fn create(&self, name: &str) -> Result<File> {
        match unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.fd, name, flags, Mode::from_raw_mode(0o666))?.into())
    }

    /// Reads file `name`, which must be a regular file of this user.
    ///
    /// # Errors
    /// [`ErrorKind::PermissionDenied`] when it is a link, not a regular file, or owned by another user; system errors.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        // NONBLOCK: opening a FIFO would otherwise wait for a writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let refused =
            |why: &str| Error::new(ErrorKind::PermissionDenied, format!("{} {why}", self.path.join(name).display()));
        let fd = match openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::LOOP) => return Err(refused("is a link")),
            Err(error) => return Err(error.into()),
        };
        let metadata = fstat(&fd)?;
        if FileType::from_raw_mode(metadata.st_mode) != FileType::RegularFile {
            return Err(refused("is no file"));
        }
        if metadata.st_uid != rustix::process::geteuid().as_raw() {
            return Err(refused("belongs to another user"));
        }
        let mut content = Vec::new();
        File::from(fd).read_to_end(&mut content)?;
        Ok(content)
    }

    /// Writes file `name` atomically, by a rename: other processes may read it meanwhile.
    pub fn write(&self, name: &str, content: &[u8]) -> Result<()> {
        let partial = format!(".{name}.{}", std::process::id());
        self.create(&partial)?.write_all(content)?;
        Ok(renameat(&self.fd, &partial, &self.fd, name)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use tempfile::tempdir;

    #[test]
    fn entries_of_other_users_are_refused() {
        let base = tempdir().unwrap();
        let path = base.path().join("named");
        let (folder, found) = Folder::named(&path).unwrap();
        assert_eq!(found, Found::New);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let (private_folder, found) = folder.private("mine").unwrap();
        assert_eq!((found, mode(private_folder.path())), (Found::New, 0o700));
        assert_eq!(folder.private("mine").unwrap().1, Found::Existing);
        symlink("mine", path.join("link")).unwrap();
        fs::write(path.join("file"), "").unwrap();
        fs::create_dir(path.join("open")).unwrap();
        fs::set_permissions(path.join("open"), fs::Permissions::from_mode(0o777)).unwrap();
        for name in ["link", "file", "open"] {
            let error = folder.private(name).map(drop).unwrap_err();
            assert!(error.kind() == ErrorKind::PermissionDenied && error.to_string().contains(name), "{error}");
        }
        if rustix::process::geteuid().is_root() {
            chown(path.join("mine"), Some(65534), None).unwrap();
            let error = folder.private("mine").map(drop).unwrap_err().to_string();
            assert!(error.contains("another user"), "{error}");
        }
    }

    #[test]
    fn only_files_of_this_user_are_read() {
        let base = tempdir().unwrap();
        let path = base.path();
        let (folder, _) = Folder::named(path).unwrap();
        folder.write("file", b"content").unwrap();
        assert_eq!(folder.read("file").unwrap(), b"content");
        assert_eq!(folder.read("none").unwrap_err().kind(), ErrorKind::NotFound);
        symlink("file", path.join("link")).unwrap();
        fs::create_dir(path.join("folder")).unwrap();
        rustix::fs::mkfifoat(CWD, path.join("pipe"), Mode::RWXU).unwrap();
        for name in ["link", "folder", "pipe"] {
            let error = folder.read(name).unwrap_err();
            assert!(error.kind() == ErrorKind::PermissionDenied && error.to_string().contains(name), "{error}");
        }
        if rustix::process::geteuid().is_root() {
            chown(path.join("file"), Some(65534), None).unwrap();
            assert!(folder.read("file").unwrap_err().to_string().contains("another user"));
        }
    }

    #[test]
    fn links_are_replaced_and_not_followed() {
        let base = tempdir().unwrap();
        let path = base.path();
        let (folder, _) = Folder::named(path).unwrap();
        let precious = path.join("precious");
        fs::write(&precious, "kept").unwrap();
        symlink(&precious, path.join("rank0.json")).unwrap();
        symlink(&precious, path.join(format!(".rank0.json.{}", std::process::id()))).unwrap();
        folder.write("rank0.json", b"new").unwrap();
        assert_eq!(fs::read_to_string(&precious).unwrap(), "kept");
        assert_eq!(fs::read_to_string(path.join("rank0.json")).unwrap(), "new");
        assert!(fs::symlink_metadata(path.join("rank0.json")).unwrap().is_file());
    }
}
