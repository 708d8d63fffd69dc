//! How a team begins and ends: what its calls are carried by, and its threads.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};

use super::callers::CallerThreads;
use super::executor::Executor;
use super::process_groups::{ProcessGroups, WaitingGroup};
use super::reconcile::{EARLY_DIVISOR, MAX_BACKOFF};
use super::state::{GroupConfig, GroupState, OnFailure};
use super::submit::Group;
use super::worker::Worker;
use crate::affinity::{bind, request_short_slice};
use crate::collective::{CallConfig, Channel, InterHost};
use crate::error::{Error, Result};
use crate::log::log_line;
use crate::topology::Topology;
use crate::transport::GroupResources;
use crate::transport::shm_region::RegionLayout;

/// Where the threads of the ranks outnumber the processors, calls up to so many bytes are carried by one thread of each rank:
/// to wake another one that has to wait for a processor takes longer than its help saves. Measured with 2 ranks on 2
/// processors, ordinary and shared memory: 1 MiB takes 0.83 and 0.8 of the time that it takes with two threads each, 8 MiB
/// the same, and with 4 ranks two threads win from there on.
const ALONE: usize = 4 << 20;

/// What a rank reads of the others in a call that takes one exchange: that, and its own, should stay in the caches.
const READ: usize = 1 << 20;

/// The longest call that takes one exchange. It is worth more to threads that could share a call than to one.
fn short(layout: RegionLayout) -> usize {
    (READ / layout.ranks.saturating_sub(1).max(1) / layout.channels).min(layout.slot)
}

impl Group {
    /// Starts a team with one thread for each channel of `endpoint`, thread i on processor `cpus[i]` if these are given.
    /// `process_groups` are the teams of the rank, to which this one is added.
    ///
    /// # Errors
    /// [`Error::System`] when the system refuses a thread.
    pub fn start(
        endpoint: GroupResources,
        settings: GroupConfig,
        cpus: Option<&[usize]>,
        alarm: OnFailure,
        process_groups: &Arc<ProcessGroups>,
    ) -> Result<Group> {
        let GroupResources { topology, names, region, links, network, oversubscribed: crowded } = endpoint;
        let config = CallConfig {
            team: settings.id,
            ranks: topology.size(),
            channels: links.len(),
            slot: region.layout().slot,
            single_thread_max: if crowded { ALONE } else { 0 },
            small_max: if topology.hosts() == 1 { short(region.layout()) } else { 0 },
            acc_f64: settings.acc_f64,
        };
        let rank = topology.rank();
        let (sender, notes) = channel();
        let shared = Arc::new(GroupState {
            settings,
            region: Arc::clone(&region),
            several_hosts: topology.hosts() > 1,
            rank,
            names,
            failure: OnceLock::new(),
            on_failure: alarm,
            recorder: Arc::default(),
            callers: CallerThreads::default(),
            process_groups: Arc::clone(process_groups),
            queue: Mutex::new(Some(sender)),
            stall_check_after: (settings.match_timeout / EARLY_DIVISOR).max(10 * MAX_BACKOFF),
            is_reconciling: AtomicBool::new(false),
            joins_stalled: AtomicBool::new(false),
            joined_seq: AtomicU64::new(0),
            matched: AtomicU64::new(0),
            timeout: AtomicU64::new(0),
            gpu_info: OnceLock::new(),
            device_bytes: AtomicUsize::new(0),
            calls_in_chunks: AtomicUsize::new(0),
        });
        shared.set_timeout(settings.timeout);
        let mut threads = Vec::new();
        let mut helpers = Vec::new();
        let mut state = None;
        for (index, link) in links.into_iter().enumerate() {
            let topology: Arc<Topology> = Arc::clone(&topology);
            let inter_host = link.map(|link| InterHost::new(link, &topology, network, settings.algorithm));
            let worker = Worker {
                shared: Arc::clone(&shared),
                index,
                rank,
                config,
                channel: Channel::new(topology, region.channel(index)).with(inter_host),
                staging: None,
            };
            if index == 0 {
                state = Some(worker);
            } else {
                let (sender, receiver) = channel();
                helpers.push(sender);
                threads.push(spawn(&settings, index, cpus, move || worker.run_helper(&receiver))?);
            }
        }
        let Some(worker) = state else {
            return Err(Error::Invalid("a team needs at least one thread".into()));
        };
        let executor = Arc::new(Executor::new(worker, helpers));
        let served = Arc::clone(&executor);
        threads.push(spawn(&settings, 0, cpus, move || served.run_loop(&notes))?);
        process_groups.add(Arc::clone(&shared) as Arc<dyn WaitingGroup>);
        Ok(Group { shared, topology, config, executor, threads: Mutex::new(threads) })
    }

    /// Completes what is enqueued and ends the threads. Further calls are refused.
    pub fn stop(&self) {
        drop(self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner).take());
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                log_line(&format!("a thread of team {} panicked", self.config.team));
            }
        }
        self.shared.region.set_departed();
    }

    /// Lets go of what leads to other hosts, and of GPUs, after [`Group::stop`].
    pub fn release_resources(&self) {
        self.executor.release_resources(self.shared.known_failure().is_some());
    }
}

/// Starts a thread whose name fits the 15 characters that Linux keeps.
fn spawn(
    settings: &GroupConfig,
    index: usize,
    cpus: Option<&[usize]>,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let team = if settings.id < 0 { "c".to_owned() } else { settings.id.to_string() };
    let cpu = cpus.and_then(|cpus| cpus.get(index).copied());
    let bound = move || {
        request_short_slice();
        if let Some(Err(error)) = cpu.map(bind) {
            log_line(&format!("{error}; the thread runs where the process may"));
        }
        body();
    };
    Builder::new()
        .name(format!("dlcomm-{team}.{index}"))
        .spawn(bound)
        .map_err(|error| Error::system("starting a thread", error))
}
