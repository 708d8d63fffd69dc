//! Maps whose keys are hashes already, such as signatures. Plain data.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map by hashes.
pub type HashedMap<V> = HashMap<u64, V, BuildHasherDefault<KeyAsHash>>;

/// Takes a key as it is.
#[derive(Debug, Default)]
pub struct KeyAsHash(u64);

impl Hasher for KeyAsHash {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = self.0.rotate_left(8) ^ u64::from(byte));
    }
    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}
