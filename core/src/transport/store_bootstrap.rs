//! The bootstrap of a job whose processes only share a [`Store`]. On one host, no library is started; on several, that
//! of the network.
//!
//! Rank 0 names the job by a random number, under which all its keys are, so that jobs that use one store one after the
//! other do not see each other's keys. The others find that name, and say that they are there.
//! Thread rule: that of [`Bootstrap`].

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh3::xxh3_128;

use super::bootstrap::{Bootstrap, Exchanges, MAX_RECORD, Members, Network};
use super::detector_links::{CONNECT_TIMEOUT, FAILURE_CHECK, HostAddress, Listener};
use super::hello::Admission;
use super::interval::Interval;
use super::launcher::{PreparedStart, StartedNetwork, Way, Ways, prepare_start, start_network};
use super::rank0_address::{resolve, unusable, warning_of_loopback};
use super::ranks::{agreed, proposal};
use super::start_links::StartLinks;
use super::store::{MemoryStore, POLL_INTERVAL, PrefixStore, Store, allgather, missing_ranks};
use super::tcp_store::{ServedStore, TcpStore};
use super::wait_context::{WaitContext, with_limits};
use crate::codec::{decode, encode};
use crate::config::{Config, Rendezvous};
use crate::deadline::{Deadline, SetBy};
use crate::error::{Error, Result};
use crate::log::log_line;
use crate::signals;

/// The key of the job's name.
const JOB: &str = "dl_comm/job";
/// How often a rank that waits for the others checks whether rank 0 has started another job.
const STALE_CHECK: Duration = Duration::from_millis(200);
/// When the first ranks of all hosts must have connected, or have given up on it ([`CONNECT_TIMEOUT`]): a rank that has
/// not, has ended or is stopped.
const CONNECT_LIMIT: Duration = CONNECT_TIMEOUT.saturating_add(Duration::from_secs(5));
/// Time limit of removing the job's name after a failure.
const CLEAN_UP: Duration = Duration::from_secs(1);

/// A code and a text of an error, as other ranks see it.
type Outcome = std::result::Result<(), (i32, String)>;

/// The ranks that share a store.
struct StoreBootstrap {
    rank: usize,
    size: usize,
    /// The random name of the job.
    name: String,
    /// The store of all jobs.
    root: Arc<dyn Store>,
    /// The keys of this job.
    store: Arc<dyn Store>,
    num_exchanges: AtomicU64,
    num_bytes: AtomicU64,
    finished: AtomicBool,
    /// The network between hosts, once it is started.
    network: OnceLock<StartedNetwork>,
}

/// Makes this process rank `rank` of `size` by `store`. Collective.
///
/// # Errors
/// [`Error::Timeout`] with the missing ranks; those of the store; [`Error::Invalid`] if the ranks disagree.
pub fn connect_by_store(
    rank: usize,
    size: usize,
    store: &Arc<dyn Store>,
    config: &Config,
) -> Result<Arc<dyn Bootstrap>> {
    limited(config, |wait_ctx| join(rank, size, &|_| Ok(Arc::clone(store)), wait_ctx))
}

/// Makes this process a rank by a store that rank 0 serves at the address of `rendezvous`. Collective.
///
/// # Errors
/// As for [`connect_by_store`]; [`Error::Invalid`] for an address that cannot be used.
pub fn connect_by_address(rendezvous: &Rendezvous, config: &Config) -> Result<Arc<dyn Bootstrap>> {
    let &Rendezvous { rank, size, ref address, key, .. } = rendezvous;
    if size == 1 {
        return limited(config, |wait_ctx| join(0, 1, &|_| Ok(Arc::new(MemoryStore::default())), wait_ctx));
    }
    let resolve = |wait_ctx: &WaitContext<'_>| resolve(rendezvous, wait_ctx);
    // Without a key only loopback addresses are used.
    let admission = key.map_or(Admission::OwnUser, Admission::Key);
    if rank == 0 {
        let serve = |wait_ctx: &WaitContext<'_>| {
            let addresses = resolve(wait_ctx)?;
            warning_of_loopback(address, &addresses).iter().for_each(|text| log_line(text));
            let bound: Vec<_> = addresses.iter().map(TcpListener::bind).collect();
            let refused = bound.iter().find_map(|socket| socket.as_ref().err().map(ToString::to_string));
            let sockets: Vec<TcpListener> = bound.into_iter().flatten().collect();
            if sockets.is_empty() {
                return Err(unusable(address, &format!("rank 0 cannot listen there: {}", refused.unwrap_or_default())));
            }
            Ok(Arc::new(ServedStore::start(sockets, size, admission)?) as Arc<dyn Store>)
        };
        return limited(config, |wait_ctx| {
            let store = serve(wait_ctx)?;
            join(rank, size, &|_| Ok(Arc::clone(&store)), wait_ctx)
        });
    }
    let dial = |wait_ctx: &WaitContext<'_>| {
        let store = TcpStore::new(resolve(wait_ctx)?, admission, rank);
        store.connect(wait_ctx)?;
        Ok(Arc::new(store) as Arc<dyn Store>)
    };
    limited(config, |wait_ctx| join(rank, size, &dial, wait_ctx))
}

/// Runs `work` with the deadline of `config`; a signal ends it.
fn limited(
    config: &Config,
    work: impl FnOnce(&WaitContext<'_>) -> Result<StoreBootstrap>,
) -> Result<Arc<dyn Bootstrap>> {
    let joined = with_limits("init_mpi", config.timeout, config.stall_warn, &interruption, work)?;
    Ok(Arc::new(joined))
}

fn interruption() -> Option<Error> {
    signals::interrupted().then(|| Error::PeerLost("init_mpi was interrupted by a signal".into()))
}

fn here(rank: usize) -> String {
    format!("here/{rank}")
}

/// Finds the other ranks in the store that `connect` returns.
fn join(
    rank: usize,
    size: usize,
    connect: &dyn Fn(&WaitContext<'_>) -> Result<Arc<dyn Store>>,
    wait_ctx: &WaitContext<'_>,
) -> Result<StoreBootstrap> {
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
        let (num_exchanges, num_bytes, finished) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let network = OnceLock::new();
        let bootstrap = StoreBootstrap { rank, size, name, root, store, num_exchanges, num_bytes, finished, network };
        if rank == 0 {
            bootstrap.assemble(wait_ctx)?;
            return Ok(bootstrap);
        }
        match bootstrap.announce(wait_ctx) {
            Ok(true) => return Ok(bootstrap),
            Ok(false) => {}
            Err(error) => {
                if matches!(error, Error::Timeout(_)) {
                    // The others have the same deadline, and name the ranks that are missing. A store that is gone has
                    // no other waits.
                    let _ended = with_limits("", Some(CLEAN_UP), None, &|| None, |ctx| {
                        bootstrap.store.fail_waits_at_end("", None, ctx)
                    });
                }
                return Err(error);
            }
        }
    }
}

fn prefix(name: &str) -> String {
    format!("dl_comm/{name}")
}

fn random_name() -> Result<String> {
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

impl StoreBootstrap {
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
                    // Rank 0 removes the name after a failure, which it has told before.
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
}

impl Bootstrap for StoreBootstrap {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn allgather(&self, record: &[u8], _longest: usize, wait_ctx: &WaitContext<'_>) -> Result<Vec<Vec<u8>>> {
        let number = self.num_exchanges.fetch_add(1, Ordering::Relaxed);
        self.num_bytes.fetch_add(record.len() as u64, Ordering::Relaxed);
        allgather(&*self.store, &format!("exchange/{number}"), self.rank, self.size, record, wait_ctx)
    }

    fn allreduce_max(&self, values: [u64; 4], wait_ctx: &WaitContext<'_>) -> Result<[u64; 4]> {
        let all = self.allgather(&encode(&values)?, MAX_RECORD, wait_ctx)?;
        all.iter().try_fold([0; 4], |largest, record| {
            let values: [u64; 4] = decode(record)?;
            Ok(std::array::from_fn(|index| values[index].max(largest[index])))
        })
    }

    fn exchanges(&self) -> Exchanges {
        let allgathers = self.num_exchanges.load(Ordering::Relaxed);
        Exchanges { allreduces: 0, allgathers, bytes: self.num_bytes.load(Ordering::Relaxed) }
    }

    fn store(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::clone(&self.store))
    }

    fn network(&self, members: &Members<'_>, wait_ctx: &WaitContext<'_>) -> Result<Arc<dyn Network>> {
        // A rank that fails before the library starts must not leave the others waiting in it.
        let prepared = prepare_start(&self.name, members, &self.store);
        let listener = (members.topology.local_rank() == 0).then(|| Listener::open(&members.config.interface).ok());
        let listener = listener.flatten();
        let address = listener.as_ref().map_or(String::new(), Listener::address);
        let ways = prepared.as_ref().map_err(Error::clone);
        let offer = ways.and_then(|prepared| Ok((prepared.ways(), address, random_name()?)));
        let offers: Vec<(Ways, String, String)> = self.agree(offer, wait_ctx)?;
        let ways: Vec<Ways> = offers.iter().map(|(ways, ..)| ways.clone()).collect();
        let (way, prepared) = (Ways::choose(&ways)?, prepared?);
        if !matches!(way, Way::Running { .. }) {
            self.connect_hosts(&prepared, listener.as_ref(), members, &offers)?;
        }
        // From now on the others know more of a rank that ends than that its connection has closed.
        self.store.fail_waits_at_end("", None, wait_ctx)?;
        let watch = prepared.watch();
        let started = start_network(prepared, way, &self.name, members, wait_ctx);
        let outcome = started.as_ref().map(drop).map_err(Error::clone);
        // A rank may end before it has agreed. A look asks the store.
        let looks = Interval::new(FAILURE_CHECK);
        let lost = || looks.run(&*watch).map(Error::PeerLost);
        let (timeout, warn) = (members.config.timeout, members.config.stall_warn);
        let failure = || interruption().or_else(lost);
        with_limits("init_mpi", timeout, warn, &failure, |ctx| self.agree::<(), ()>(outcome, ctx))
            .inspect_err(|_| started.iter().for_each(StartedNetwork::leave))?;
        let network = started?;
        self.network.get_or_init(|| network).network()
    }

    fn started(&self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.network.get().into_iter().for_each(StartedNetwork::finish_start);
        // From now on the job has a failure detector.
        self.store.fail_waits_at_end("", None, wait_ctx)
    }

    fn lost(&self) -> Option<String> {
        self.network.get().and_then(StartedNetwork::lost)
    }

    fn uses_launcher(&self) -> bool {
        false
    }

    fn ends_together(&self) -> bool {
        true
    }

    fn finish(&self, all_here: &dyn Fn(), wait_ctx: &WaitContext<'_>) -> Result<()> {
        let Some(network) = self.network.get() else {
            return match self.end(wait_ctx) {
                // On one host nobody needs anything of the others now, and a store that is gone needs no cleaning.
                Err(Error::Network(text)) => {
                    log_line(&format!("finalize has not waited for the other ranks: {text}"));
                    Ok(())
                }
                ended => ended,
            };
        };
        network.barrier(wait_ctx)?;
        all_here();
        // The barrier's last messages may need help to leave.
        let waits = || {
            network.progress();
            wait_ctx.check(Duration::ZERO, &|| "the end of the other ranks".into()).err()
        };
        with_limits("finalize", None, None, &waits, |ctx| self.end(ctx))
    }

    fn leave(&self) {
        self.network.get().into_iter().for_each(StartedNetwork::leave);
    }
}

impl StoreBootstrap {
    /// Connects the first ranks of the hosts with each other; the others wait. A rank that ends meanwhile is found here:
    /// the library would wait for it without end. Collective.
    fn connect_hosts(
        &self,
        prepared: &PreparedStart,
        listener: Option<&Listener>,
        members: &Members<'_>,
        offers: &[(Ways, String, String)],
    ) -> Result<()> {
        let Members { topology, names, config, .. } = members;
        let started = Instant::now();
        // A look asks the store.
        let looks = Interval::new(FAILURE_CHECK);
        let lost = || looks.run(|| prepared.lost());
        if let Some(listener) = listener {
            let host = |host: usize| {
                let leader = topology.ranks_of(host)[0];
                let addresses = offers[leader].1.split(',').filter_map(|address| address.parse().ok()).collect();
                HostAddress { name: names[leader].clone(), ranks: vec![leader], addresses }
            };
            let hosts: Vec<HostAddress> = (0..topology.hosts()).map(host).collect();
            let key = xxh3_128(offers[0].2.as_bytes());
            let within = config.timeout.unwrap_or(Duration::MAX);
            let has_failed = || lost().is_some();
            prepared.watch_links(StartLinks::connect(listener, topology.host(), &hosts, key, within, &has_failed));
        }
        let deadline = match config.timeout {
            Some(after) if after < CONNECT_LIMIT => Deadline::from(Some(after)),
            _ => Deadline { after: Some(CONNECT_LIMIT.saturating_sub(started.elapsed())), set_by: SetBy::Library },
        };
        let connected = prepared.lost().map_or(Ok(()), |lost| Err(Error::PeerLost(lost)));
        let failure = || interruption().or_else(|| lost().map(Error::PeerLost));
        let agree = |ctx: &WaitContext<'_>| self.agree::<(), ()>(connected, ctx).map(drop);
        let outcome = with_limits("connecting the hosts", deadline, None, &failure, agree);
        if outcome.is_err() && self.rank == 0 {
            // The others learn it from the store, which may end with this process.
            thread::sleep(2 * FAILURE_CHECK);
        }
        outcome
    }

    /// The values of all ranks, if all have succeeded. Collective.
    fn agree<T: Serialize, U: DeserializeOwned>(
        &self,
        outcome: Result<T>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Vec<U>> {
        let records = self.allgather(&proposal("", outcome), MAX_RECORD, wait_ctx)?;
        let names: Vec<String> = (0..self.size).map(|rank| format!("rank {rank}")).collect();
        agreed(&records, |rank| &names[rank])
    }

    /// Waits until all ranks have called it, and removes their keys.
    fn end(&self, wait_ctx: &WaitContext<'_>) -> Result<()> {
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

impl Drop for StoreBootstrap {
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

    fn within(seconds: f64) -> Config {
        Config { timeout: Some(Duration::from_secs_f64(seconds)), ..Config::default() }
    }

    fn memory() -> Arc<dyn Store> {
        Arc::new(MemoryStore::default())
    }

    fn limits<T>(work: impl FnOnce(&WaitContext<'_>) -> Result<T>) -> Result<T> {
        with_limits("the test", Some(Duration::from_secs(60)), None, &|| None, work)
    }

    /// Runs `work` on a thread for each rank.
    fn on_ranks<T: Send>(size: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let work = &work;
            let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || work(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn jobs_follow_each_other_in_one_store_and_leave_nothing() {
        for size in 1..=7 {
            let store = Arc::new(MemoryStore::default());
            let shared: Arc<dyn Store> = Arc::clone(&store) as Arc<dyn Store>;
            on_ranks(size, |number| {
                for start in 0..4 {
                    let rank = (number + start) % size;
                    let job = connect_by_store(rank, size, &shared, &within(60.0)).unwrap();
                    assert_eq!((job.rank(), job.size()), (rank, size));
                    for round in 0..3 {
                        let records = limits(|ctx| job.allgather(&[rank as u8, round], 2, ctx)).unwrap();
                        assert_eq!(records, (0..size as u8).map(|rank| vec![rank, round]).collect::<Vec<_>>());
                    }
                    limits(|ctx| job.finish(&|| {}, ctx)).unwrap();
                }
            });
            assert_eq!(store.keys(), [""; 0]);
        }
    }

    #[test]
    fn a_job_that_was_left_does_not_disturb_the_next() {
        let store = memory();
        let left = on_ranks(3, |rank| connect_by_store(rank, 3, &store, &within(60.0)).unwrap());
        // As after a kill: nothing is cleaned up.
        std::mem::forget(left);
        let jobs = on_ranks(3, |rank| {
            // The others find the old name first.
            thread::sleep(Duration::from_millis(if rank == 0 { 50 } else { 0 }));
            connect_by_store(rank, 3, &store, &within(60.0)).unwrap()
        });
        on_ranks(3, |rank| limits(|ctx| jobs[rank].finish(&|| {}, ctx)).unwrap());
    }

    #[test]
    fn the_next_job_in_a_store_may_have_other_ranks() {
        for sizes in [[2, 3], [1, 4], [3, 2]] {
            let store = memory();
            let [before, now] = sizes;
            let left = on_ranks(before, |rank| connect_by_store(rank, before, &store, &within(60.0)).unwrap());
            std::mem::forget(left);
            let jobs = on_ranks(now, |rank| {
                thread::sleep(Duration::from_millis(if rank == 0 { 50 } else { 0 }));
                connect_by_store(rank, now, &store, &within(60.0)).unwrap()
            });
            assert!(jobs.iter().all(|job| job.size() == now));
            on_ranks(now, |rank| limits(|ctx| jobs[rank].finish(&|| {}, ctx)).unwrap());
        }
    }

    #[test]
    fn missing_ranks_are_named_by_all_others() {
        let store = memory();
        let errors = on_ranks(3, |rank| connect_by_store(rank, 5, &store, &within(1.0)).map(drop).unwrap_err());
        assert!(
            errors.iter().all(|error| matches!(error, Error::Timeout(text) if text.ends_with("for rank 3, rank 4"))),
            "{errors:?}"
        );
        let error = connect_by_store(1, 2, &memory(), &within(0.1)).map(drop).unwrap_err();
        assert!(matches!(&error, Error::Timeout(text) if text.ends_with("for rank 0")), "{error}");
    }

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
        limits(|ctx| store.set(JOB, b"name", ctx)).unwrap();
        let error = connect_by_store(1, 3, &store, &within(2.0)).map(drop).unwrap_err();
        assert!(matches!(&error, Error::Timeout(text) if text == "rank 2 is missing"), "{error}");
    }

    #[test]
    fn different_sizes_are_an_error_on_both_ranks() {
        let store = memory();
        let errors = on_ranks(2, |rank| connect_by_store(rank, 2 + rank, &store, &within(60.0)).map(drop).unwrap_err());
        assert_eq!(errors[0], errors[1]);
        assert!(matches!(&errors[0], Error::Invalid(text) if text.contains("rank 1 was started as one of 3 ranks")));
    }

    #[test]
    fn a_rank_that_does_not_come_to_the_end_is_named() {
        let store = memory();
        let jobs = on_ranks(3, |rank| connect_by_store(rank, 3, &store, &within(60.0)).unwrap());
        let soon = Some(Duration::from_millis(300));
        let errors = on_ranks(2, |rank| {
            with_limits("the end", soon, None, &|| None, |ctx| jobs[rank].finish(&|| {}, ctx)).unwrap_err()
        });
        assert!(errors.iter().all(|error| error.to_string().ends_with("for rank 2")), "{errors:?}");
    }
}
