//! The bootstrap of a job whose processes only share a [`Store`] ([`StoreJob`]). On one host, no library is started; on
//! several, that of the network.
//!
//! Thread rule: that of [`Bootstrap`].

use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
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
use super::store::{MemoryStore, Store, allgather};
use super::store_job::{StoreJob, random_name};
use super::tcp_store::{ServedStore, TcpStore};
use super::wait_context::{WaitContext, with_limits};
use crate::codec::{decode, encode};
use crate::config::{Config, Rendezvous};
use crate::deadline::{Deadline, SetBy};
use crate::error::{Error, Result};
use crate::log::log_line;
use crate::signals;

/// When the first ranks of all hosts must have connected, or have given up on it ([`CONNECT_TIMEOUT`]): a rank that has
/// not, has ended or is stopped.
const CONNECT_LIMIT: Duration = CONNECT_TIMEOUT.saturating_add(Duration::from_secs(5));

/// The ranks that share a store.
struct StoreBootstrap {
    job: StoreJob,
    num_exchanges: AtomicU64,
    num_bytes: AtomicU64,
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
    limited(config, |wait_ctx| StoreJob::join(rank, size, &|_| Ok(Arc::clone(store)), wait_ctx))
}

/// Makes this process a rank by a store that rank 0 serves at the address of `rendezvous`. Collective.
///
/// # Errors
/// As for [`connect_by_store`]; [`Error::Invalid`] for an address that cannot be used.
pub fn connect_by_address(rendezvous: &Rendezvous, config: &Config) -> Result<Arc<dyn Bootstrap>> {
    let &Rendezvous { rank, size, ref address, key, .. } = rendezvous;
    if size == 1 {
        return limited(config, |wait_ctx| StoreJob::join(0, 1, &|_| Ok(Arc::new(MemoryStore::default())), wait_ctx));
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
            StoreJob::join(rank, size, &|_| Ok(Arc::clone(&store)), wait_ctx)
        });
    }
    let dial = |wait_ctx: &WaitContext<'_>| {
        let store = TcpStore::new(resolve(wait_ctx)?, admission, rank);
        store.connect(wait_ctx)?;
        Ok(Arc::new(store) as Arc<dyn Store>)
    };
    limited(config, |wait_ctx| StoreJob::join(rank, size, &dial, wait_ctx))
}

/// Runs `work` with the deadline of `config`; a signal ends it.
fn limited(config: &Config, work: impl FnOnce(&WaitContext<'_>) -> Result<StoreJob>) -> Result<Arc<dyn Bootstrap>> {
    let job = with_limits("init_mpi", config.timeout, config.stall_warn, &interruption, work)?;
    let (num_exchanges, num_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
    Ok(Arc::new(StoreBootstrap { job, num_exchanges, num_bytes, network: OnceLock::new() }))
}

fn interruption() -> Option<Error> {
    signals::interrupted().then(|| Error::PeerLost("init_mpi was interrupted by a signal".into()))
}

impl Bootstrap for StoreBootstrap {
    fn rank(&self) -> usize {
        self.job.rank
    }

    fn size(&self) -> usize {
        self.job.size
    }

    fn allgather(&self, record: &[u8], _longest: usize, wait_ctx: &WaitContext<'_>) -> Result<Vec<Vec<u8>>> {
        let number = self.num_exchanges.fetch_add(1, Ordering::Relaxed);
        self.num_bytes.fetch_add(record.len() as u64, Ordering::Relaxed);
        let StoreJob { rank, size, store, .. } = &self.job;
        allgather(&**store, &format!("exchange/{number}"), *rank, *size, record, wait_ctx)
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
        Some(Arc::clone(&self.job.store))
    }

    fn network(&self, members: &Members<'_>, wait_ctx: &WaitContext<'_>) -> Result<Arc<dyn Network>> {
        // A rank that fails before the library starts must not leave the others waiting in it.
        let prepared = prepare_start(&self.job.name, members, &self.job.store);
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
        self.job.store.fail_waits_at_end("", None, wait_ctx)?;
        let watch = prepared.watch();
        let started = start_network(prepared, way, &self.job.name, members, wait_ctx);
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
        self.job.store.fail_waits_at_end("", None, wait_ctx)
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
            return match self.job.end(wait_ctx) {
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
        with_limits("finalize", None, None, &waits, |ctx| self.job.end(ctx))
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
        if outcome.is_err() && self.job.rank == 0 {
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
        let names: Vec<String> = (0..self.job.size).map(|rank| format!("rank {rank}")).collect();
        agreed(&records, |rank| &names[rank])
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
