//! Ranks as threads: starts a group on every rank and runs the same closure on each.
// Each test program uses only some of the functions.
#![allow(clippy::unwrap_used, dead_code)]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::collective::device::DeviceSettings;
use dl_comm_core::collective::selection::Limit;
use dl_comm_core::collective::{AlgorithmSetting, Op, Selection};
use dl_comm_core::deadline::Deadline;
use dl_comm_core::dtype::DType;
use dl_comm_core::error::Result;
use dl_comm_core::group::{CallOptions, Group, OnFailure, ProcessGroups, Timeout};
use dl_comm_core::group_config::GroupConfig;
use dl_comm_core::group_key::{GroupKey, GroupName, Members};
use dl_comm_core::plugin::{StagingBuffer, StepOptions, Team};
use dl_comm_core::transport::in_process::{self, Access};
use dl_comm_core::transport::{GroupResources, HostLink};

/// One rank of a test, in one of its teams.
pub struct Rank {
    /// World rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// The team.
    pub team: Team,
}

/// The limits below which moves always go through slots.
pub const SHORT_MOVES: [Limit; 2] = [Limit::BroadcastMeasured, Limit::BlocksMeasured];

/// The world of a test.
#[derive(Debug, Clone)]
pub struct World {
    /// Number of ranks on each host.
    pub hosts: Vec<usize>,
    /// Threads of each team.
    pub threads: usize,
    /// Slot size in bytes.
    pub slot: usize,
    /// Accumulate in float64.
    pub acc_f64: bool,
    /// Algorithm between hosts.
    pub algorithm: AlgorithmSetting,
    /// At which lengths calls take another path. Moves of one byte may be direct copies.
    pub selection: Selection,
    /// How the ranks of a host reach each other's tensors.
    pub access: Access,
    /// The fan-out of the tree that notices take on hosts of 3 ranks and more; `None`: they take none.
    pub fan_out: Option<usize>,
    /// Whether threads outnumber processors.
    pub oversubscribed: bool,
    /// Deadline of calls.
    pub timeout: Duration,
    /// How long an unmatched call waits for its counterparts.
    pub match_timeout: Duration,
    /// Replaces each link to other hosts.
    pub link: fn(Box<dyn HostLink>) -> Box<dyn HostLink>,
}

impl World {
    /// A world with `hosts[h]` ranks on host h and slots of 4 KiB.
    pub fn new(hosts: &[usize]) -> World {
        World {
            hosts: hosts.to_vec(),
            threads: 1,
            slot: 4096,
            acc_f64: false,
            algorithm: AlgorithmSetting::Auto,
            selection: SHORT_MOVES.into_iter().fold(Selection::default(), |all, limit| all.with(limit, 1)),
            access: Access::Slots,
            fan_out: None,
            oversubscribed: false,
            timeout: Duration::from_secs(60),
            match_timeout: Duration::from_millis(300),
            link: |link| link,
        }
    }

    /// Runs `body` on every rank; resumes the first panic of a rank.
    pub fn run<T: Send>(&self, body: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
        self.run_teams(1, |teams| body(&teams[0]))
    }

    /// As `run`, with `count` teams, numbered from 0; `body` gets the rank in each team.
    pub fn run_teams<T: Send>(&self, count: i32, body: impl Fn(&[Rank]) -> T + Sync) -> Vec<T> {
        let size = self.hosts.iter().sum();
        let World { hosts, threads, slot, access, fan_out, .. } = self;
        let world = |_| match *fan_out {
            Some(fan_out) => {
                let fan_out = |ranks: usize| (ranks > 2).then_some(fan_out);
                in_process::world_in_tree(hosts, *threads, *slot, *access, fan_out).unwrap()
            }
            None => in_process::world(hosts, *threads, *slot, *access).unwrap(),
        };
        let mut endpoints: Vec<Vec<GroupResources>> = (0..size).map(|_| Vec::new()).collect();
        for world in (0..count).map(world) {
            endpoints.iter_mut().zip(world).for_each(|(resources, endpoint)| resources.push(endpoint));
        }
        let settings = GroupConfig {
            threads: self.threads,
            idle_timeout: None,
            slot: Some(self.slot),
            acc_f64: self.acc_f64,
            algorithm: self.algorithm,
            selection: self.selection,
            timeout: Deadline { after: Some(self.timeout), ..Deadline::default() },
            stall_warn: None,
            match_timeout: self.match_timeout,
            device: DeviceSettings::default(),
        };
        let on_failure: OnFailure = Arc::new(|_| {});
        thread::scope(|scope| {
            let ranks: Vec<_> = endpoints
                .into_iter()
                .enumerate()
                .map(|(rank, endpoints)| {
                    let (body, on_failure) = (&body, &on_failure);
                    scope.spawn(move || {
                        let process_groups = Arc::new(ProcessGroups::default());
                        let team = |(id, endpoint): (i32, GroupResources)| {
                            let (key, cpus_per_rank) =
                                (GroupKey::team(id), if self.oversubscribed { 0 } else { usize::MAX });
                            let links = endpoint.links.into_iter();
                            let links = links.map(|links| links.into_iter().map(self.link).collect()).collect();
                            let endpoint = GroupResources { key, cpus_per_rank, links, ..endpoint };
                            let team = Group::start(endpoint, settings, None, Arc::clone(on_failure), &process_groups)
                                .unwrap();
                            Rank { rank, size, team: Team::new(Arc::new(team)) }
                        };
                        let teams: Vec<Rank> = (0..).zip(endpoints).map(team).collect();
                        body(&teams)
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }
}

/// How long a thread of [`groups`] stays without calls.
pub const IDLE: Duration = Duration::from_millis(20);

/// The groups with the members `members` (ranks of the job), for each rank of the job: with the rank in the group. Rank
/// r is on host `hosts[r]`.
pub fn groups(hosts: &[usize], members: &[Vec<usize>], timeout: Duration) -> Vec<Vec<Option<Group>>> {
    let settings = GroupConfig {
        threads: 2,
        idle_timeout: Some(IDLE),
        slot: Some(4096),
        acc_f64: false,
        algorithm: AlgorithmSetting::Auto,
        selection: Selection::default(),
        timeout: Deadline { after: Some(timeout), ..Deadline::default() },
        stall_warn: None,
        match_timeout: Duration::from_secs(10),
        device: DeviceSettings::default(),
    };
    let on_failure: OnFailure = Arc::new(|_| {});
    let processes: Vec<Arc<ProcessGroups>> = hosts.iter().map(|_| Arc::default()).collect();
    let mut all: Vec<Vec<Option<Group>>> = hosts.iter().map(|_| Vec::new()).collect();
    for (index, members) in members.iter().enumerate() {
        all.iter_mut().for_each(|groups| groups.push(None));
        let list = Members::List { world: members.as_slice().into(), me: 0 };
        let key = GroupKey::new(GroupName::Named("test".into()), &list, index as u64);
        let member_hosts: Vec<usize> = members.iter().map(|&rank| hosts[rank]).collect();
        let resources = in_process::group(&key, &member_hosts, 2, 4096, Access::Slots, |_ranks| None).unwrap();
        for (&rank, resources) in members.iter().zip(resources) {
            let group = Group::start(resources, settings, None, Arc::clone(&on_failure), &processes[rank]).unwrap();
            all[rank][index] = Some(group);
        }
    }
    all
}

/// An element type of a test.
pub trait Element: Copy + Default + Send + PartialEq + std::fmt::Debug {
    /// Its element type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => { $(impl Element for $rust { const DTYPE: DType = DType::$dtype; })* };
}
element!(f32 => F32, f64 => F64, i8 => I8, u8 => U8, i32 => I32, i64 => I64, half::f16 => F16, half::bf16 => BF16, bool => Bool,
    i16 => I16, u16 => U16, u32 => U32, u64 => U64, [f32; 2] => Complex64, [f64; 2] => Complex128);

/// An in-place tensor of the vector's elements.
pub fn tensor<T: Element>(data: &mut [T]) -> Tensor {
    Tensor::new(Buffer::in_place(data.as_mut_ptr().cast(), data.len(), T::DTYPE), &[])
}

impl Rank {
    /// Starts a call; the receiver gets its outcome.
    pub fn start(&self, op: Op, towers: Vec<Vec<Tensor>>, name: &str) -> Receiver<Result<()>> {
        self.start_with(op, towers, CallOptions { name: name.to_owned(), ..CallOptions::default() })
    }

    /// Starts a call that matches by its name.
    pub fn start_by_name(&self, op: Op, towers: Vec<Vec<Tensor>>, name: &str) -> Receiver<Result<()>> {
        self.start_with(op, towers, CallOptions { name: name.to_owned(), by_name: true, ..CallOptions::default() })
    }

    /// Starts an allreduce with a timeout in seconds.
    pub fn start_within(&self, seconds: f64, towers: Vec<Vec<Tensor>>, name: &str) -> Receiver<Result<()>> {
        let timeout = Timeout::from_seconds(seconds);
        self.start_with(Op::MEAN, towers, CallOptions { name: name.to_owned(), timeout, ..CallOptions::default() })
    }

    /// Starts a call with options.
    pub fn start_with(&self, op: Op, towers: Vec<Vec<Tensor>>, options: CallOptions) -> Receiver<Result<()>> {
        let (sender, receiver) = channel();
        let done = Box::new(move |result| sender.send(result).unwrap());
        // SAFETY: tests wait for the outcome before they drop the vectors.
        unsafe { self.team.group().submit(op, towers, options, done) };
        receiver
    }

    /// Runs a call to completion.
    pub fn call(&self, op: Op, towers: Vec<Vec<Tensor>>, name: &str) -> Result<()> {
        let options = CallOptions { name: name.to_owned(), caller_blocks: true, ..CallOptions::default() };
        self.start_with(op, towers, options).recv().unwrap()
    }

    /// Runs a call that matches by its name to completion.
    pub fn call_by_name(&self, op: Op, towers: Vec<Vec<Tensor>>, name: &str) -> Result<()> {
        let (name, by_name) = (name.to_owned(), true);
        let options = CallOptions { name, by_name, caller_blocks: true, ..CallOptions::default() };
        self.start_with(op, towers, options).recv().unwrap()
    }

    /// Averages a list in place.
    pub fn average(&self, tensors: Vec<Tensor>) -> Result<()> {
        self.call(Op::MEAN, vec![tensors], "")
    }

    /// Broadcasts a list in place.
    pub fn broadcast(&self, root: usize, tensors: Vec<Tensor>) -> Result<()> {
        self.call(Op::broadcast(root), vec![tensors], "")
    }
}

impl Rank {
    /// Runs a scheduled mean in staging memory. Returns what the caller of a binding gets.
    pub fn gradients(&self, data: &mut [f32], name: &str) -> Result<Vec<f32>> {
        self.gradients_of(data, name, "")
    }

    /// As `gradients`, for one of several calls with the same name.
    pub fn gradients_of(&self, data: &mut [f32], name: &str, instance: &str) -> Result<Vec<f32>> {
        let towers = vec![vec![tensor(data)]];
        // SAFETY: the vector is alive.
        let (staging, copies) = unsafe { StagingBuffer::of(&towers, self.team.staging()) }?;
        let (sender, receiver) = channel();
        let done = Box::new(move |result| sender.send(result).unwrap());
        let mut options = StepOptions::new(done);
        (options.call.name, options.call.instance_id) = (name.to_owned(), instance.to_owned());
        options.results = Some(Arc::clone(&staging) as _);
        // SAFETY: the staging buffer owns the memory.
        unsafe { self.team.gradients(copies, options) };
        let result = receiver.recv().unwrap()?.map_or(Ok(staging), StagingBuffer::from_results)?;
        // SAFETY: as above.
        unsafe { result.copy_to(&towers) };
        Ok(data.to_vec())
    }
}
