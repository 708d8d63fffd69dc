//! Compiled kernels, kept between processes: the folder of `DL_COMM_CACHE`, as for the operations that python/dl_comm/_build.py
//! builds, has a folder `kernels` that belongs to this user alone, with one file for each thing that was compiled.
//!
//! Nothing here fails: what cannot be read, or is not what was written, is not there, and what cannot be written is not kept.
//! Thread rule: may be used from any thread; of processes that write the same file, any one's is kept.

use std::ffi::OsString;
use std::path::PathBuf;

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::folder::Folder;

/// The bytes before an image: its length, and its hash.
const HEADER_BYTES: usize = 24;

/// Images by name.
pub struct Cache(Option<Folder>);

impl Cache {
    /// That of this user; an empty one that keeps nothing, where there is no such folder.
    pub fn open() -> Cache {
        Cache::within(place(|name| std::env::var_os(name)))
    }

    fn within(place: Option<PathBuf>) -> Cache {
        let open = |place: PathBuf| Folder::named(&place)?.0.private("kernels");
        Cache(place.and_then(|place| open(place).ok()).map(|(folder, _)| folder))
    }

    /// What was kept by this name.
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        let mut content = self.0.as_ref()?.read(name).ok()?;
        if content.len() < HEADER_BYTES {
            return None;
        }
        let image = content.split_off(HEADER_BYTES);
        (content == head(&image)).then_some(image)
    }

    /// Keeps `image` by this name.
    pub fn put(&self, name: &str, image: &[u8]) {
        if let Some(folder) = &self.0 {
            // The next process compiles, as this one did.
            let _kept = folder.write(name, &[&head(image), image].concat());
        }
    }
}

/// A name for what is made of all this.
pub fn name<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Xxh3::new();
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    format!("{:032x}", hash.digest128())
}

fn head(image: &[u8]) -> [u8; HEADER_BYTES] {
    let mut head = [0; HEADER_BYTES];
    head[..8].copy_from_slice(&(image.len() as u64).to_le_bytes());
    head[8..].copy_from_slice(&xxh3_128(image).to_le_bytes());
    head
}

/// As in python/dl_comm/_build.py: `DL_COMM_CACHE`, else `dl_comm` in the user's cache folder.
fn place(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("DL_COMM_CACHE").or_else(|| {
        let caches = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
        Some(caches.join("dl_comm"))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::Path;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("dl_comm_kernels_{name}_{}", std::process::id()));
        let _none = fs::remove_dir_all(&path);
        path
    }

    fn cache(path: &Path) -> Cache {
        Cache::within(Some(path.to_owned()))
    }

    #[test]
    fn what_is_kept_is_found_by_the_next_one() {
        let path = scratch("kept");
        assert_eq!(cache(&path).get("a"), None);
        cache(&path).put("a", b"image");
        assert_eq!(cache(&path).get("a").unwrap(), b"image");
        cache(&path).put("a", b"another");
        assert_eq!(cache(&path).get("a").unwrap(), b"another");
        assert_eq!(cache(&path).get("b"), None);
        // Nothing is left of how it was written.
        assert_eq!(fs::read_dir(path.join("kernels")).unwrap().count(), 1);
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn what_is_not_whole_is_not_there() {
        let path = scratch("damaged");
        cache(&path).put("a", &[7; 100]);
        let file = path.join("kernels/a");
        let whole = fs::read(&file).unwrap();
        let longer = [&whole[..], &[0]].concat();
        let mut flipped = whole.clone();
        flipped[60] ^= 1;
        for content in [&[], &whole[..10], &whole[..HEADER_BYTES], &whole[..whole.len() - 1], &longer, &flipped] {
            fs::write(&file, content).unwrap();
            assert_eq!(cache(&path).get("a"), None, "{} bytes", content.len());
        }
        fs::write(&file, &whole).unwrap();
        assert_eq!(cache(&path).get("a").unwrap(), [7; 100]);
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn what_others_could_have_put_there_is_not_taken() {
        let path = scratch("others");
        cache(&path).put("a", b"image");
        let folder = path.join("kernels");
        symlink("a", folder.join("link")).unwrap();
        assert_eq!(cache(&path).get("link"), None);
        fs::create_dir(folder.join("folder")).unwrap();
        assert_eq!(cache(&path).get("folder"), None);
        cache(&path).put("folder", b"cannot be");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o770)).unwrap();
        assert_eq!(cache(&path).get("a"), None);
        cache(&path).put("b", b"image");
        assert!(!folder.join("b").exists());
        fs::remove_dir_all(&path).unwrap();
        // A file where the folder should be, and no folder at all.
        fs::write(&path, "").unwrap();
        cache(&path).put("a", b"image");
        assert_eq!(cache(&path).get("a"), None);
        assert_eq!(Cache::within(None).get("a"), None);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn the_folder_is_that_of_the_operations() {
        let place = |given: &[(&str, &str)]| {
            place(|name| given.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
        };
        let all = [("DL_COMM_CACHE", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")];
        assert_eq!(place(&all), Some("/a".into()));
        assert_eq!(place(&all[1..]), Some("/b/dl_comm".into()));
        assert_eq!(place(&all[2..]), Some("/c/.cache/dl_comm".into()));
        assert_eq!(
            place(&[("DL_COMM_CACHE", ""), ("XDG_CACHE_HOME", ""), ("HOME", "/c")]),
            Some("/c/.cache/dl_comm".into())
        );
        assert_eq!(place(&[]), None);
    }

    #[test]
    fn names_tell_apart() {
        let of = |parts: &[&str]| name(parts.iter().map(|part| part.as_bytes()));
        assert_eq!(of(&["a", "bc"]), of(&["a", "bc"]));
        assert_ne!(of(&["a", "bc"]), of(&["ab", "c"]));
        assert_eq!(of(&[]).len(), 32);
    }
}
