//! Start and end of a group: its resources and threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::active::Active;
use super::callers::{CallerThreads, is_group_thread};
use super::gpu_state::GpuState;
use super::group_deadline::GroupDeadline;
use super::lead::Lead;
use super::process_groups::{ProcessGroups, WaitingGroup};
use super::reconcile::{EARLY_DIVISOR, MAX_BACKOFF};
use super::state::{GroupState, OnFailure};
use super::submit::Group;
use super::thread::{GroupThread, ThreadSettings};
use super::worker::Worker;
use crate::collective::selection::GroupShape;
use crate::collective::{Algorithm, AlgorithmSetting, CallConfig, Channel};
use crate::error::{Error, Result};
use crate::fork;
use crate::group_config::GroupConfig;
use crate::group_key::GroupName;
use crate::lock::lock;
use crate::log::log_line;
use crate::timeline::{self, GroupLabel};
use crate::topology::Topology;
use crate::transport::shm_region::RegionLayout;
use crate::transport::{GroupResources, max_channels};

impl Group {
    /// A group with one thread for each channel of `resources`, thread i on processor `cpus[i]` if given. Its memory
    /// and its threads are made by the first call that needs them, or by [`Group::prepare`]. Adds the group to
    /// `process_groups`.
    ///
    /// # Errors
    /// [`Error::Invalid`] without channels.
    pub fn start(
        resources: GroupResources,
        settings: GroupConfig,
        cpus: Option<&[usize]>,
        on_failure: OnFailure,
        process_groups: &Arc<ProcessGroups>,
    ) -> Result<Group> {
        let GroupResources { key, members, topology, names, region, links, network, cpus_per_rank } = resources;
        let channels = max_channels(links.len(), cpus_per_rank);
        let RegionLayout { ranks, slot, .. } = region.layout();
        let config = CallConfig {
            max_channels: channels,
            limits: settings.selection.host_limits(GroupShape {
                hosts: topology.hosts(),
                ranks,
                channels,
                slot,
                cpus_per_rank,
                keeps_bits: settings.algorithm != AlgorithmSetting::Always(Algorithm::Ring),
            }),
            acc_f64: settings.acc_f64,
            ..CallConfig::new(&topology, key, links.len(), slot)
        };
        let rank = topology.rank();
        let thread = |index: usize| ThreadSettings {
            name: format!("{}.{index}", config.key.name().thread_label()),
            cpu: cpus.and_then(|cpus| cpus.get(index).copied()),
            idle_timeout: settings.idle_timeout,
        };
        let lead_settings = thread(0);
        let helper_settings: Vec<ThreadSettings> = (1..links.len()).map(thread).collect();
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let shared = Arc::new(GroupState {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            config,
            members,
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
            lead_thread: OnceLock::new(),
            stall_check_after: (settings.match_timeout / EARLY_DIVISOR).max(10 * MAX_BACKOFF),
            reconciling: Active::default(),
            lacks_calls: AtomicBool::new(false),
            joining_stalled: Active::default(),
            joined_round: AtomicU64::new(0),
            matched: AtomicU64::new(0),
            matched_below: AtomicU64::new(0),
            deadline: GroupDeadline::new(settings.timeout),
            gpu: GpuState::default(),
            looked_for_lost: AtomicU64::new(0),
        });
        let mut workers = links.into_iter().enumerate().map(|(index, links)| {
            let channel = Channel::new(Arc::clone(&topology), region.channel(index));
            Worker {
                shared: Arc::clone(&shared),
                index,
                rank,
                channel: channel.with_links(links, network, settings.algorithm),
                staging: None,
            }
        });
        let Some(first) = workers.next() else {
            return Err(Error::Invalid("a group needs at least one thread".into()));
        };
        let helper = |(worker, settings): (Worker, ThreadSettings)| {
            let worker = Mutex::new(worker);
            GroupThread::new(settings, move |thread| lock(&worker).run_helper(thread))
        };
        let helpers = workers.zip(helper_settings).map(helper).collect();
        let lead = Lead::new(&shared, lead_settings, first, helpers);
        process_groups.add(Arc::clone(&shared) as Arc<dyn WaitingGroup>);
        label_in_timeline(&shared, &topology);
        let (messenger, ragged_calls) = (OnceLock::new(), AtomicU64::new(0));
        Ok(Group { shared, topology, lead, messenger, ragged_calls })
    }

    /// Makes the memory of this rank and starts the threads now, not by the first call.
    ///
    /// # Errors
    /// [`Error::System`] when there is not enough memory, or the system refuses a thread.
    pub fn prepare(&self) -> Result<()> {
        self.shared.region.open()?;
        self.lead.start_threads()
    }

    /// Completes the enqueued calls and ends the threads. Later calls fail.
    pub fn stop(&self) {
        stop(&self.shared, &self.lead);
    }

    /// Closes links to other hosts and releases GPU resources, after [`Group::stop`].
    pub fn release_resources(&self) {
        self.shared.gpu.release_copies();
        self.lead.release_resources();
    }
}

/// A callback may drop the last handle of a group; it must not wait for the group's threads.
impl Drop for Group {
    fn drop(&mut self) {
        if fork::is_child() {
            // The threads are those of the parent.
            return;
        }
        if !is_group_thread() {
            return self.stop();
        }
        let (shared, lead) = (Arc::clone(&self.shared), Arc::clone(&self.lead));
        let stopped = std::thread::Builder::new().name("dlcomm-end".into()).spawn(move || stop(&shared, &lead));
        if let Err(error) = stopped {
            log_line(&format!("the threads of {} stay: {error}", self.shared.config.key.name()));
        }
    }
}

/// Tells the timeline the name and the ranks of a group. Teams have their numbers and all ranks.
fn label_in_timeline(shared: &GroupState, topology: &Topology) {
    let (key, members) = (&shared.config.key, &shared.members);
    if matches!(key.name(), GroupName::Named(_)) {
        let hosts = (0..topology.hosts()).map(|host| members.to_world(topology.ranks_of(host)[0])).collect();
        let label = GroupLabel { name: key.name().to_string(), members: members.iter().collect(), hosts };
        timeline::label_group(key.number(), label);
    }
}

fn stop(shared: &GroupState, lead: &Lead) {
    lead.close();
    shared.region.set_departed();
    timeline::forget_group(shared.config.key.number());
}
