//! Cache of compiled kernels on disk, shared by processes.
//!
//! The folder `DL_COMM_CACHE`, where python/dl_comm/_libraries/build.py keeps its builds too, has a folder `kernels` that only
//! this user can write. It has one file for each compiled image: the image's hash, and the image.
//! No function returns an error: a missing or damaged file is a miss, and a failed write is ignored.
//! Thread rule: any thread. If several processes write one file, one of their versions remains.

use std::ffi::OsString;
use std::path::PathBuf;

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::folder::Folder;

/// Images by name; without a folder, always empty.
pub struct Cache(Option<Folder>);

impl Cache {
    /// The cache of this user, or an empty cache if the folder cannot be used.
    pub fn open() -> Cache {
        Cache::within(cache_folder(|name| std::env::var_os(name)))
    }

    fn within(folder: Option<PathBuf>) -> Cache {
        let open = |path: PathBuf| Folder::named(&path)?.0.private("kernels");
        Cache(folder.and_then(|path| open(path).ok()).map(|(folder, _)| folder))
    }

    /// The image stored under `name`, if it is intact.
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        let content = self.0.as_ref()?.read(name).ok()?;
        let (hash, image) = content.split_first_chunk()?;
        (xxh3_128(image).to_le_bytes() == *hash).then(|| image.to_vec())
    }

    /// Stores `image` under `name`.
    pub fn put(&self, name: &str, image: &[u8]) {
        if let Some(folder) = &self.0 {
            // On failure the next process compiles again.
            let _kept = folder.write(name, &[&xxh3_128(image).to_le_bytes(), image].concat());
        }
    }
}

/// Hash of `parts`, in hexadecimal.
pub fn name<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Xxh3::new();
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    format!("{:032x}", hash.digest128())
}

/// `DL_COMM_CACHE`, else `dl_comm` in the user's cache folder, as in python/dl_comm/_libraries/build.py.
fn cache_folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("DL_COMM_CACHE").or_else(|| {
        let caches = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
        Some(caches.join("dl_comm"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::Path;
    use tempfile::tempdir;

    fn cache(path: &Path) -> Cache {
        Cache::within(Some(path.to_owned()))
    }

    #[test]
    fn stored_images_are_found_by_the_next_process() {
        let folder = tempdir().unwrap();
        let path = folder.path();
        assert_eq!(cache(path).get("a"), None);
        cache(path).put("a", b"image");
        assert_eq!(cache(path).get("a").unwrap(), b"image");
        cache(path).put("a", b"another");
        assert_eq!(cache(path).get("a").unwrap(), b"another");
        assert_eq!(cache(path).get("b"), None);
        // No temporary file remains.
        assert_eq!(fs::read_dir(path.join("kernels")).unwrap().count(), 1);
    }

    #[test]
    fn damaged_images_are_not_returned() {
        let folder = tempdir().unwrap();
        let path = folder.path();
        cache(path).put("a", &[7; 100]);
        let file = path.join("kernels/a");
        let whole = fs::read(&file).unwrap();
        let longer = [&whole[..], &[0]].concat();
        let mut flipped = whole.clone();
        flipped[60] ^= 1;
        for content in [&[], &whole[..10], &whole[..16], &whole[..whole.len() - 1], &longer, &flipped] {
            fs::write(&file, content).unwrap();
            assert_eq!(cache(path).get("a"), None, "{} bytes", content.len());
        }
        fs::write(&file, &whole).unwrap();
        assert_eq!(cache(path).get("a").unwrap(), [7; 100]);
    }

    #[test]
    fn files_that_other_users_could_have_written_are_ignored() {
        let base = tempdir().unwrap();
        let path = base.path();
        cache(path).put("a", b"image");
        let folder = path.join("kernels");
        symlink("a", folder.join("link")).unwrap();
        assert_eq!(cache(path).get("link"), None);
        fs::create_dir(folder.join("folder")).unwrap();
        assert_eq!(cache(path).get("folder"), None);
        cache(path).put("folder", b"cannot be");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o770)).unwrap();
        assert_eq!(cache(path).get("a"), None);
        cache(path).put("b", b"image");
        assert!(!folder.join("b").exists());
        // The path of the folder is a file; no folder at all.
        let file = &path.join("file");
        fs::write(file, "").unwrap();
        cache(file).put("a", b"image");
        assert_eq!(cache(file).get("a"), None);
        assert_eq!(Cache::within(None).get("a"), None);
    }

    #[test]
    fn folder_is_the_one_of_the_op_libraries() {
        let folder = |given: &[(&str, &str)]| {
            cache_folder(|name| given.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
        };
        let all = [("DL_COMM_CACHE", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")];
        assert_eq!(folder(&all), Some("/a".into()));
        assert_eq!(folder(&all[1..]), Some("/b/dl_comm".into()));
        assert_eq!(folder(&all[2..]), Some("/c/.cache/dl_comm".into()));
        assert_eq!(
            folder(&[("DL_COMM_CACHE", ""), ("XDG_CACHE_HOME", ""), ("HOME", "/c")]),
            Some("/c/.cache/dl_comm".into())
        );
        assert_eq!(folder(&[]), None);
    }

    #[test]
    fn different_parts_give_different_names() {
        let of = |parts: &[&str]| name(parts.iter().map(|part| part.as_bytes()));
        assert_eq!(of(&["a", "bc"]), of(&["a", "bc"]));
        assert_ne!(of(&["a", "bc"]), of(&["ab", "c"]));
        assert_eq!(of(&[]).len(), 32);
    }
}
