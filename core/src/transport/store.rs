//! A key-value store through which processes find each other: at start, and when a group is created. It may be slow;
//! no call asks it.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::wait_context::{WaitContext, with_limits};
use crate::codec::{decode, encode};
use crate::error::{Error, Result};
use crate::lock::lock;

/// Interval at which a wait for a key checks its limits.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time for a look into the store for a message about a failure.
pub(super) const LOOK: Duration = Duration::from_secs(1);

/// A key-value store that all ranks of a job can use.
/// Thread rule: any thread; a wait for a key does not block other calls.
pub trait Store: Send + Sync {
    /// Stores `value`, and replaces an earlier value.
    ///
    /// # Errors
    /// Those of the wait context; [`Error::Network`] or [`Error::PeerLost`] when the store cannot be reached.
    fn set(&self, key: &str, value: &[u8], wait_ctx: &WaitContext<'_>) -> Result<()>;

    /// The value of `key`, if it is there now.
    ///
    /// # Errors
    /// As for [`Store::set`].
    fn try_get(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<Option<Vec<u8>>>;

    /// The value of `key`. Waits until it is there. `awaited` names those who set it, and may use the store.
    ///
    /// # Errors
    /// As for [`Store::set`].
    fn wait_for(&self, key: &str, wait_ctx: &WaitContext<'_>, awaited: &dyn Fn() -> String) -> Result<Vec<u8>>;

    /// As [`Store::wait_for`], and names the key in messages.
    ///
    /// # Errors
    /// As for [`Store::set`].
    fn get(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<Vec<u8>> {
        self.wait_for(key, wait_ctx, &|| format!("'{key}'"))
    }

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

    /// Should this process end, all waits and looks for keys that start with `prefix` and are not there fail with `text`;
    /// without a text they do not. Only stores that see the end of their clients do that.
    ///
    /// # Errors
    /// As for [`Store::set`].
    fn fail_waits_at_end(&self, _prefix: &str, _text: Option<&str>, _wait_ctx: &WaitContext<'_>) -> Result<()> {
        Ok(())
    }
}

/// Gathers `record` from `size` callers, of which this one has number `me`, ordered by number. Collective over the
/// callers. `prefix` is used for one exchange only. An error of caller 0 reaches all callers.
///
/// # Errors
/// Those of the store; they name the missing callers as ranks.
pub fn allgather(
    store: &dyn Store,
    prefix: &str,
    me: usize,
    size: usize,
    record: &[u8],
    wait_ctx: &WaitContext<'_>,
) -> Result<Vec<Vec<u8>>> {
    if size == 1 {
        return Ok(vec![record.to_vec()]);
    }
    let all = format!("{prefix}/all");
    let of = |number: usize| format!("{prefix}/{number}");
    let awaited = || missing_ranks(store, size, of);
    store.set(&of(me), record, wait_ctx)?;
    if me != 0 {
        let records: Gathered = decode(&store.wait_for(&all, wait_ctx, &awaited)?)?;
        // A store that is gone needs no cleaning.
        let _removed = end_reading(store, &all, size - 1, wait_ctx);
        return records.map_err(|(code, text)| Error::from_code(code, text));
    }
    let records = (0..size).map(|number| store.wait_for(&of(number), wait_ctx, &awaited)).collect::<Result<Vec<_>>>();
    let gathered: Gathered = records.clone().map_err(|error| (error.code(), error.detail().to_owned()));
    store.set(&all, &encode(&gathered)?, wait_ctx)?;
    (0..size).try_for_each(|number| store.delete(&of(number), wait_ctx))?;
    records
}

/// Called by each of the `readers` readers of `key`: the last one removes it.
pub(super) fn end_reading(store: &dyn Store, key: &str, readers: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
    let count = format!("{key}/readers");
    if usize::try_from(store.add(&count, 1, wait_ctx)?) == Ok(readers) {
        store.delete(key, wait_ctx).and_then(|()| store.delete(&count, wait_ctx))?;
    }
    Ok(())
}

/// The records of all callers, or the code and text of caller 0's error.
type Gathered = std::result::Result<Vec<Vec<u8>>, (i32, String)>;

/// Names the ranks below `size` without a key, for messages.
pub(super) fn missing_ranks(store: &dyn Store, size: usize, key: impl Fn(usize) -> String) -> String {
    missing(store, size, key, &|rank| format!("rank {rank}"))
}

/// Names the callers below `size` without a key, for messages.
pub(super) fn missing(
    store: &dyn Store,
    size: usize,
    key: impl Fn(usize) -> String,
    name: &dyn Fn(usize) -> String,
) -> String {
    let found = with_limits("", Some(LOOK), None, &|| None, |ctx| {
        let is_missing = |number: usize| Ok(store.try_get(&key(number), ctx)?.is_none().then(|| name(number)));
        (0..size).filter_map(|number| is_missing(number).transpose()).collect::<Result<Vec<String>>>()
    });
    // Otherwise number 0 has not answered yet.
    found.ok().filter(|missing| !missing.is_empty()).map_or_else(|| name(0), |missing| missing.join(", "))
}

/// A part of a store: keys with a prefix.
pub struct PrefixStore {
    store: Arc<dyn Store>,
    prefix: String,
}

impl PrefixStore {
    /// The keys of `store` that start with `prefix` and a slash.
    pub fn new(store: Arc<dyn Store>, prefix: String) -> PrefixStore {
        PrefixStore { store, prefix }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8], wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.store.set(&self.key(key), value, wait_ctx)
    }

    fn try_get(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<Option<Vec<u8>>> {
        self.store.try_get(&self.key(key), wait_ctx)
    }

    fn wait_for(&self, key: &str, wait_ctx: &WaitContext<'_>, awaited: &dyn Fn() -> String) -> Result<Vec<u8>> {
        self.store.wait_for(&self.key(key), wait_ctx, awaited)
    }

    fn add(&self, key: &str, by: i64, wait_ctx: &WaitContext<'_>) -> Result<i64> {
        self.store.add(&self.key(key), by, wait_ctx)
    }

    fn delete(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.store.delete(&self.key(key), wait_ctx)
    }

    fn fail_waits_at_end(&self, prefix: &str, text: Option<&str>, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.store.fail_waits_at_end(&self.key(prefix), text, wait_ctx)
    }
}

/// A store in the memory of this process, for ranks that are threads, and behind the server of other stores.
#[derive(Default)]
pub struct MemoryStore {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
    /// Why waits for keys with a prefix fail.
    failed: Mutex<Vec<(String, Error)>>,
}

impl MemoryStore {
    /// The value of `key` now.
    pub fn value(&self, key: &str) -> Option<Vec<u8>> {
        lock(&self.values).get(key).cloned()
    }

    /// The keys, in order.
    #[cfg(test)]
    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = lock(&self.values).keys().cloned().collect();
        keys.sort_unstable();
        keys
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

    /// Fails all waits and looks for keys that start with `prefix` and are not there.
    pub fn fail_waits(&self, prefix: &str, error: Error) {
        lock(&self.failed).push((prefix.to_owned(), error));
        // Whoever has not seen it waits now.
        drop(lock(&self.values));
        self.changed.notify_all();
    }

    /// Why a wait for `key` fails, if it does.
    pub fn failure(&self, key: &str) -> Option<Error> {
        lock(&self.failed).iter().find(|(prefix, _)| key.starts_with(prefix)).map(|(_, error)| error.clone())
    }

    /// As [`Store::try_get`], without limits.
    ///
    /// # Errors
    /// [`MemoryStore::failure`]
    pub fn look(&self, key: &str) -> Result<Option<Vec<u8>>> {
        match (self.value(key), self.failure(key)) {
            (None, Some(error)) => Err(error),
            (value, _) => Ok(value),
        }
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

    fn try_get(&self, key: &str, _wait_ctx: &WaitContext<'_>) -> Result<Option<Vec<u8>>> {
        self.look(key)
    }

    fn wait_for(&self, key: &str, wait_ctx: &WaitContext<'_>, awaited: &dyn Fn() -> String) -> Result<Vec<u8>> {
        let mut values = lock(&self.values);
        loop {
            if let Some(value) = values.get(key) {
                return Ok(value.clone());
            }
            drop(values);
            wait_ctx.check(Duration::ZERO, awaited)?;
            if let Some(error) = self.failure(key) {
                return Err(error);
            }
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
