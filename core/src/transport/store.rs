//! A key-value store through which processes find each other: at start, and when a group is created. It may be slow;
//! no call asks it.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::WaitContext;
use crate::error::{Error, Result};
use crate::lock::lock;

/// Interval at which a wait for a key checks its limits.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A key-value store that all ranks of a job can use.
/// Thread rule: any thread; a wait for a key does not block other calls.
pub trait Store: Send + Sync {
    /// Stores `value`, and replaces an earlier value.
    ///
    /// # Errors
    /// Those of the wait context, and [`Error::Network`] when the store cannot be reached.
    fn set(&self, key: &str, value: &[u8], wait_ctx: &WaitContext<'_>) -> Result<()>;

    /// The value of `key`. Waits until it is there.
    ///
    /// # Errors
    /// As for [`Store::set`].
    fn get(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<Vec<u8>>;

    /// Adds `by` to the number at `key`, which starts at 0, and returns the sum. A key of a number is used by `add`
    /// only.
    ///
    /// # Errors
    /// As for [`Store::set`].
    fn add(&self, key: &str, by: i64, wait_ctx: &WaitContext<'_>) -> Result<i64>;

    /// Removes `key`, if the store can do that.
    ///
    /// # Errors
    /// As for [`Store::set`].
    fn delete(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<()>;
}

/// Gathers `record` from `size` callers, of which this one has number `me`, ordered by number. Collective over the
/// callers. `prefix` is used for one exchange only.
///
/// # Errors
/// Those of the store.
pub fn allgather(
    store: &dyn Store,
    prefix: &str,
    me: usize,
    size: usize,
    record: &[u8],
    wait_ctx: &WaitContext<'_>,
) -> Result<Vec<Vec<u8>>> {
    let all = format!("{prefix}/all");
    let of = |number: usize| format!("{prefix}/{number}");
    if me != 0 {
        store.set(&of(me), record, wait_ctx)?;
        let records = crate::codec::decode(&store.get(&all, wait_ctx)?)?;
        // The last reader removes the records.
        if store.add(&format!("{prefix}/readers"), 1, wait_ctx)? == size as i64 - 1 {
            store.delete(&all, wait_ctx)?;
            store.delete(&format!("{prefix}/readers"), wait_ctx)?;
        }
        return Ok(records);
    }
    let mut records = vec![record.to_vec()];
    for number in 1..size {
        records.push(store.get(&of(number), wait_ctx)?);
        store.delete(&of(number), wait_ctx)?;
    }
    if size > 1 {
        store.set(&all, &crate::codec::encode(&records)?, wait_ctx)?;
    }
    Ok(records)
}

/// A store in the memory of this process, for ranks that are threads, and behind the server of other stores.
#[derive(Default)]
pub struct MemoryStore {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl MemoryStore {
    /// The value of `key` now.
    pub fn try_get(&self, key: &str) -> Option<Vec<u8>> {
        lock(&self.values).get(key).cloned()
    }

    /// As [`Store::set`], without limits.
    pub fn insert(&self, key: &str, value: Vec<u8>) {
        lock(&self.values).insert(key.to_owned(), value);
        self.changed.notify_all();
    }

    /// As [`Store::add`], without limits.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the value is no number.
    pub fn increment(&self, key: &str, by: i64) -> Result<i64> {
        let mut values = lock(&self.values);
        let value = values.entry(key.to_owned()).or_insert_with(|| 0i64.to_le_bytes().to_vec());
        let number = value.as_slice().try_into().map(i64::from_le_bytes);
        let sum = number.map_err(|_| Error::Invalid(format!("the value of '{key}' is no number")))?.wrapping_add(by);
        *value = sum.to_le_bytes().to_vec();
        drop(values);
        self.changed.notify_all();
        Ok(sum)
    }

    /// As [`Store::delete`], without limits.
    pub fn remove(&self, key: &str) {
        lock(&self.values).remove(key);
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8], _wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.insert(key, value.to_vec());
        Ok(())
    }

    fn get(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<Vec<u8>> {
        let mut values = lock(&self.values);
        loop {
            if let Some(value) = values.get(key) {
                return Ok(value.clone());
            }
            drop(values);
            wait_ctx.check(Duration::ZERO, &|| format!("'{key}'"))?;
            values = lock(&self.values);
            if !values.contains_key(key) {
                values = self.changed.wait_timeout(values, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    fn add(&self, key: &str, by: i64, _wait_ctx: &WaitContext<'_>) -> Result<i64> {
        self.increment(key, by)
    }

    fn delete(&self, key: &str, _wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.remove(key);
        Ok(())
    }
}
