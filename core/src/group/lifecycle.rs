//! Start and end of a group: its resources and threads.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{Builder, JoinHandle};

use super::callers::CallerThreads;
use super::executor::Executor;
use super::process_groups::{ProcessGroups, WaitingGroup};
use super::reconcile::{EARLY_DIVISOR, MAX_BACKOFF};
use super::state::{GroupState, OnFailure};
use super::submit::Group;
use super::worker::Worker;
use crate::affinity::{bind, request_short_slice};
use crate::collective::{CallConfig, Channel, InterHost};
use crate::error::{Error, Result};
use crate::group_config::GroupConfig;
use crate::lock::lock;
use crate::log::log_line;
use crate::topology::Topology;
use crate::transport::GroupResources;
use crate::transport::shm_region::RegionLayout;

/// If the ranks' threads outnumber the processors, one thread per rank runs calls up to this size: waking another
/// thread that must wait for a processor costs more than it helps. Measured with 2 ranks on 2 processors, in ordinary
/// and shared memory: 1 MiB takes 0.83 and 0.8 of the time with two threads each, and 8 MiB the same time. With 4
/// ranks, two threads are faster from 8 MiB on.
const SINGLE_THREAD_MAX_BYTES: usize = 4 << 20;

/// Data that a rank reads from its peers in a small call; this and its own data should stay in the caches.
const SMALL_READ_BYTES: usize = 1 << 20;

/// Largest small call. With more channels the limit is lower, because several threads could share a larger call.
fn small_max(layout: RegionLayout) -> usize {
    (SMALL_READ_BYTES / layout.ranks.saturating_sub(1).max(1) / layout.channels).min(layout.slot)
}

impl Group {
    /// Starts a group with one thread for each channel of `resources`, thread i on processor `cpus[i]` if given. Adds
    /// the group to `process_groups`.
    ///
    /// # Errors
    /// [`Error::System`] if the system refuses a thread.
    pub fn start(
        resources: GroupResources,
        settings: GroupConfig,
        cpus: Option<&[usize]>,
        on_failure: OnFailure,
        process_groups: &Arc<ProcessGroups>,
    ) -> Result<Group> {
        let GroupResources { topology, names, region, links, network, oversubscribed } = resources;
        let config = CallConfig {
            single_thread_max: if oversubscribed { SINGLE_THREAD_MAX_BYTES } else { 0 },
            small_max: if topology.hosts() == 1 { small_max(region.layout()) } else { 0 },
            acc_f64: settings.acc_f64,
            ..CallConfig::new(&topology, settings.id, links.len(), region.layout().slot)
        };
        let rank = topology.rank();
        let (sender, receiver) = channel();
        let shared = Arc::new(GroupState {
            settings,
            region: Arc::clone(&region),
            several_hosts: topology.hosts() > 1,
            rank,
            names,
            failure: OnceLock::new(),
            on_failure,
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
        let lead = Arc::clone(&executor);
        threads.push(spawn(&settings, 0, cpus, move || lead.run_loop(&receiver))?);
        process_groups.add(Arc::clone(&shared) as Arc<dyn WaitingGroup>);
        Ok(Group { shared, topology, config, executor, threads: Mutex::new(threads), messenger: OnceLock::new() })
    }

    /// Completes the enqueued calls and ends the threads. Later calls fail.
    pub fn stop(&self) {
        drop(lock(&self.shared.queue).take());
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            if thread.join().is_err() {
                log_line(&format!("a thread of team {} panicked", self.config.team));
            }
        }
        self.shared.region.set_departed();
    }

    /// Closes links to other hosts and releases GPU resources, after [`Group::stop`].
    pub fn release_resources(&self) {
        self.executor.release_resources(self.shared.known_failure().is_some());
    }
}

/// Starts a thread; its name fits the 15 characters that Linux keeps.
fn spawn(
    settings: &GroupConfig,
    index: usize,
    cpus: Option<&[usize]>,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let team = if settings.id < 0 { "c".to_owned() } else { settings.id.to_string() };
    let cpu = cpus.and_then(|cpus| cpus.get(index).copied());
    let run = move || {
        request_short_slice();
        if let Some(Err(error)) = cpu.map(bind) {
            log_line(&format!("{error}; the thread runs where the process may"));
        }
        body();
    };
    Builder::new()
        .name(format!("dlcomm-{team}.{index}"))
        .spawn(run)
        .map_err(|error| Error::system("starting a thread", error))
}
