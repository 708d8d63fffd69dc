//! How the ranks of a job find each other in a [`Store`], and how they leave it.
//!
//! Rank 0 names the job by a random number, under which all its keys are, so that jobs that use one store one after the
//! other do not see each other's keys. The others find that name, and say that they are there.
//! Thread rule: any thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::store::{POLL_INTERVAL, PrefixStore, Store, missing_ranks};
use super::wait_context::{WaitContext, with_limits};
use crate::codec::{decode, encode};
use crate::error::{Error, Result};

/// The key of the job's name.
const JOB: &str = "dl_comm/job";
/// How often a rank that waits for the others checks whether rank 0 has started another job.
const STALE_CHECK: Duration = Duration::from_millis(200);
/// Time limit of removing the job's name after a failure.
const CLEAN_UP: Duration = Duration::from_secs(1);

/// A code and a text of an error, as other ranks see it.
type Outcome = std::result::Result<(), (i32, String)>;

/// A job of ranks that share a store, as one of them sees it.
pub(super) struct StoreJob {
    pub rank: usize,
    pub size: usize,
    /// The random name of the job.
    pub name: String,
    /// The store of all jobs.
    root: Arc<dyn Store>,
    /// The keys of this job.
    pub store: Arc<dyn Store>,
    finished: AtomicBool,
}

fn here(rank: usize) -> String {
    format!("here/{rank}")
}

fn prefix(name: &str) -> String {
    format!("dl_comm/{name}")
}

/// A random name.
pub(super) fn random_name() -> Result<String> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::system("drawing a random number", error))?;
    Ok(format!("{:016x}", u64::from_ne_bytes(bytes)))
}

/// Waits for the name of a job that this rank has not joined yet, and joins it.
fn find_job(root: &Arc<dyn Store>, rank: usize, wait_ctx: &WaitContext<'_>) -> Result<String> {
    let twice = || format!("rank 0, or another process has joined as rank {rank} already");
    loop {
        let name = root.wait_for(JOB, wait_ctx, &|| "rank 0".into())?;
        let name = String::from_utf8_lossy(&name).into_owned();
        let job = PrefixStore::new(Arc::clone(root), prefix(&name));
        // A job that goes already without this rank is an earlier one, which was killed and had fewer ranks.
        let goes = |go: Vec<u8>| Ok(decode::<Outcome>(&go)?.is_ok());
        if job.add(&format!("joined/{rank}"), 1, wait_ctx)? == 1
            && !job.try_get("go", wait_ctx)?.map_or(Ok(false), goes)?
        {
            return Ok(name);
        }
        // The name of a job that has ended.
        while root.try_get(JOB, wait_ctx)?.as_deref() == Some(name.as_bytes()) {
            wait_ctx.check(Duration::ZERO, &twice)?;
            thread::sleep(POLL_INTERVAL);
        }
    }
}

impl StoreJob {
    /// Finds the other ranks in the store that `connect` returns. Collective.
    pub fn join(
        rank: usize,
        size: usize,
        connect: &dyn Fn(&WaitContext<'_>) -> Result<Arc<dyn Store>>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<StoreJob> {
        loop {
            let root = connect(wait_ctx)?;
            let name = match rank {
                0 => random_name()?,
                _ => match find_job(&root, rank, wait_ctx) {
                    // The server of an earlier job, which has ended now.
                    Err(Error::PeerLost(_)) => {
                        wait_ctx.check(Duration::ZERO, &|| "rank 0".into())?;
                        thread::sleep(POLL_INTERVAL);
                        continue;
                    }
                    found => found?,
                },
            };
            let store: Arc<dyn Store> = Arc::new(PrefixStore::new(Arc::clone(&root), prefix(&name)));
            let job = StoreJob { rank, size, name, root, store, finished: AtomicBool::new(false) };
            if rank == 0 {
                job.assemble(wait_ctx)?;
                return Ok(job);
            }
            match job.announce(wait_ctx) {
                Ok(true) => return Ok(job),
                Ok(false) => {}
                Err(error) => {
                    if matches!(error, Error::Timeout(_)) {
                        // The others have the same deadline, and name the ranks that are missing. A store that is gone has
                        // no other waits.
                        let _ended = with_limits("", Some(CLEAN_UP), None, &|| None, |ctx| {
                            job.store.fail_waits_at_end("", None, ctx)
                        });
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Rank 0: names the job, and waits for the others.
    fn assemble(&self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let (store, size) = (&*self.store, self.size);
        let size_bytes = encode(&size)?;
        store.set(&here(0), &size_bytes, wait_ctx)?;
        self.root.set(JOB, self.name.as_bytes(), wait_ctx)?;
        let awaited = || missing_ranks(store, size, here);
        let arrives = |rank: usize| {
            let theirs: usize = decode(&store.wait_for(&here(rank), wait_ctx, &awaited)?)?;
            if theirs == size {
                return Ok(());
            }
            Err(Error::Invalid(format!("rank {rank} was started as one of {theirs} ranks, rank 0 as one of {size}")))
        };
        let outcome = (1..size).try_for_each(arrives);
        let published: Outcome = outcome.clone().map_err(|error| (error.code(), error.detail().to_owned()));
        store.set("go", &encode(&published)?, wait_ctx)?;
        outcome
    }

    /// Another rank: says that it is there, and waits for rank 0. Returns whether this job has started; else rank 0
    /// has started another one.
    fn announce(&self, wait_ctx: &WaitContext<'_>) -> Result<bool> {
        let store = &*self.store;
        let ended = format!("rank {} has ended, or has lost its connection, before all ranks had started", self.rank);
        store.fail_waits_at_end("", Some(&ended), wait_ctx)?;
        store.set(&here(self.rank), &encode(&self.size)?, wait_ctx)?;
        let awaited = || missing_ranks(store, self.size, here);
        loop {
            let slice = with_limits("", Some(STALE_CHECK), None, &|| None, |ctx| store.get("go", ctx));
            let go = match slice {
                Ok(go) => Some(go),
                Err(Error::Timeout(_)) => {
                    wait_ctx.check(Duration::ZERO, &awaited)?;
                    if self.root.try_get(JOB, wait_ctx)?.as_deref() == Some(self.name.as_bytes()) {
                        continue;
                    }
                    // Rank 0 removes the name after a failure, which it has reported before.
                    store.try_get("go", wait_ctx)?
                }
                Err(error) => return Err(error),
            };
            let Some(go) = go else { return Ok(false) };
            let published: Outcome = decode(&go)?;
            return published.map(|()| true).map_err(|(code, text)| Error::from_code(code, text));
        }
    }

    /// Rank 0: removes what the start has stored.
    fn clean_up(&self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.store.delete("go", wait_ctx)?;
        for rank in 0..self.size {
            self.store.delete(&here(rank), wait_ctx)?;
            self.store.delete(&format!("joined/{rank}"), wait_ctx)?;
        }
        Ok(())
    }

    /// Waits until all ranks have called it, and removes their keys.
    pub fn end(&self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let (store, size) = (&*self.store, self.size);
        let [end, gone] = ["end", "gone"].map(|step| move |rank: usize| format!("{step}/{rank}"));
        self.finished.store(true, Ordering::Relaxed);
        store.set(&end(self.rank), &[], wait_ctx)?;
        if self.rank != 0 {
            store.wait_for("ended", wait_ctx, &|| missing_ranks(store, size, end))?;
            return store.set(&gone(self.rank), &[], wait_ctx);
        }
        (1..size)
            .try_for_each(|rank| store.wait_for(&end(rank), wait_ctx, &|| missing_ranks(store, size, end)).map(drop))?;
        // Before the others go on: a next start must not find this job.
        self.root.delete(JOB, wait_ctx)?;
        self.clean_up(wait_ctx)?;
        store.set("ended", &[], wait_ctx)?;
        // The store may end with this process, so wait until nobody needs it.
        store.set(&gone(0), &[], wait_ctx)?;
        (1..size).try_for_each(|rank| {
            store.wait_for(&gone(rank), wait_ctx, &|| missing_ranks(store, size, gone)).map(drop)
        })?;
        let keys = (0..size).flat_map(|rank| [end(rank), gone(rank)]).chain(["ended".to_owned()]);
        keys.into_iter().try_for_each(|key| store.delete(&key, wait_ctx))
    }
}

impl Drop for StoreJob {
    fn drop(&mut self) {
        if self.rank == 0 && !self.finished.load(Ordering::Relaxed) {
            // The other keys may still tell the other ranks of the failure. A store that is gone needs no cleaning.
            let _removed = with_limits("", Some(CLEAN_UP), None, &|| None, |ctx| self.root.delete(JOB, ctx));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::store::MemoryStore;

    /// A store whose job fails between two looks of another rank: just before it looks for the job's name.
    struct FailsBetween(MemoryStore, String);

    impl Store for FailsBetween {
        fn set(&self, key: &str, value: &[u8], wait_ctx: &WaitContext<'_>) -> Result<()> {
            self.0.set(key, value, wait_ctx)
        }

        fn try_get(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<Option<Vec<u8>>> {
            if key == JOB {
                let failed: Outcome = Err((Error::Timeout(String::new()).code(), "rank 2 is missing".into()));
                self.0.set(&format!("{}/go", prefix(&self.1)), &encode(&failed)?, wait_ctx)?;
                self.0.delete(JOB, wait_ctx)?;
            }
            self.0.try_get(key, wait_ctx)
        }

        fn wait_for(&self, key: &str, wait_ctx: &WaitContext<'_>, awaited: &dyn Fn() -> String) -> Result<Vec<u8>> {
            self.0.wait_for(key, wait_ctx, awaited)
        }

        fn add(&self, key: &str, by: i64, wait_ctx: &WaitContext<'_>) -> Result<i64> {
            self.0.add(key, by, wait_ctx)
        }

        fn delete(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<()> {
            self.0.delete(key, wait_ctx)
        }
    }

    #[test]
    fn a_failure_of_the_start_is_not_taken_for_another_job() {
        let store: Arc<dyn Store> = Arc::new(FailsBetween(MemoryStore::default(), "name".into()));
        let joined = with_limits("the test", Some(Duration::from_secs(2)), None, &|| None, |ctx| {
            store.set(JOB, b"name", ctx)?;
            StoreJob::join(1, 3, &|_| Ok(Arc::clone(&store)), ctx).map(drop)
        });
        assert!(matches!(&joined, Err(Error::Timeout(text)) if text == "rank 2 is missing"), "{joined:?}");
    }
}
