//! What all Loom tests share: exploring a model, ranks as Loom's threads, their regions and waits.
// Each test program uses only some of the functions.
#![allow(dead_code, clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use dl_comm_core::buffer::{Buffer, Tensor};
use dl_comm_core::collective::selection::{HostLimits, PathLimits};
use dl_comm_core::collective::{Call, CallConfig, Channel, Counts, Op};
use dl_comm_core::deadline::Deadline;
use dl_comm_core::dtype::DType;
use dl_comm_core::error::Error;
use dl_comm_core::group_key::GroupKey;
use dl_comm_core::timings::CallTimings;
use dl_comm_core::topology::Topology;
use dl_comm_core::transport::memory::Aligned;
use dl_comm_core::transport::sync::{check_read, check_write, start_execution, track};
use dl_comm_core::transport::wait_context::WaitCallbacks;
use dl_comm_core::transport::{ShmRegion, WaitContext, in_process};
use loom::thread::{Builder, JoinHandle};

/// Number of floats in a slot.
pub const FLOATS: usize = 32;
/// Bytes of a slot: two cache lines.
pub const SLOT: usize = FLOATS * size_of::<f32>();

/// Explores `body`. `preemptions` is the maximum number of preemptions of a thread; `None` for no bound.
pub fn explore(preemptions: Option<usize>, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 100_000;
    let from = Instant::now();
    let runs = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&runs);
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        start_execution();
        body();
    });
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    println!("{name}: {runs:?} executions, preemptions {preemptions:?}, {:.1} s", from.elapsed().as_secs_f64());
}

/// Runs a rank with a larger stack than Loom's default.
pub fn spawn(body: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    Builder::new().stack_size(0x8000).spawn(body).unwrap()
}

/// The regions of `ranks` ranks on one host in new memory, with one channel and slots that are made.
pub fn regions(ranks: usize, access: in_process::Access) -> Vec<Arc<ShmRegion>> {
    regions_in_tree(ranks, access, None)
}

/// As [`regions`]; notices take a tree with this fan-out.
pub fn regions_in_tree(ranks: usize, access: in_process::Access, fan_out: Option<usize>) -> Vec<Arc<ShmRegion>> {
    let resources = in_process::world_in_tree(&[ranks], 1, SLOT, access, |_ranks| fan_out).unwrap();
    let regions: Vec<_> = resources.into_iter().map(|resources| resources.region).collect();
    regions.iter().for_each(|region| region.open().unwrap());
    regions
}

/// Only the failure of a region aborts a wait.
struct RegionFailure<'a>(&'a ShmRegion);

impl WaitCallbacks for RegionFailure<'_> {
    fn describe(&self) -> String {
        String::new()
    }

    fn abort_reason(&self) -> Option<Error> {
        self.0.control().failure()
    }

    fn on_stall(&self, _text: &str) {}
}

/// Calls `body` with a wait context that only the region's failure aborts.
pub fn with_wait_context<T>(region: &ShmRegion, body: impl FnOnce(&WaitContext<'_>) -> T) -> T {
    let (warned, timings) = (AtomicBool::new(false), CallTimings::new(0, 0));
    let callbacks = RegionFailure(region);
    body(&WaitContext::new(Instant::now(), Deadline::default(), None, &warned, &timings, &callbacks))
}

/// Settings of calls on one channel. Calls of at most `small_max` bytes may take one round.
pub fn config(topology: &Topology, small_max: usize) -> CallConfig {
    let one_round = (small_max > 0).then_some(small_max);
    let (reductions, moves) = (PathLimits { one_round, measured: None }, PathLimits { one_round, measured: Some(1) });
    let limits =
        HostLimits { reductions, reduce_scatters: reductions, broadcasts: moves, blocks: moves, ..HostLimits::NONE };
    CallConfig { limits, ..CallConfig::new(topology, GroupKey::team(0), 1, SLOT) }
}

/// A call of `op` with one tensor.
pub fn call(op: Op, buffer: Buffer, name: &str, config: CallConfig) -> Call {
    let tensors = vec![vec![Tensor::new(buffer, &[])]];
    Call::new(op, tensors, Counts::Even, name, "", String::new(), config).unwrap()
}

/// Runs a call as the group's threads do. Returns whether the calls of all ranks match.
pub fn run(channel: &mut Channel, call: &Call, region: &ShmRegion) -> bool {
    with_wait_context(region, |wait_ctx| {
        let matched = channel.run_first_chunk(call, wait_ctx).unwrap();
        if matched {
            let plan = channel.plan();
            channel.run_chunks(call, 1..plan.chunks(call), plan, wait_ctx).unwrap();
        }
        matched
    })
}

/// Floats whose memory is tracked: an access of another rank that is not ordered with those of the owner is reported.
pub struct Floats(Aligned);

impl Floats {
    /// This many floats, all 0.
    pub fn new(len: usize) -> Floats {
        let memory = Aligned::new(len * size_of::<f32>());
        let start = memory.as_ptr().addr();
        track(start..start + memory.len());
        Floats(memory)
    }

    /// The address of the first one.
    pub fn ptr(&self) -> *mut f32 {
        self.0.as_ptr().cast()
    }

    /// The number of floats.
    pub fn len(&self) -> usize {
        self.0.len() / size_of::<f32>()
    }

    /// Sets each to `value` of its index.
    pub fn fill(&mut self, value: impl Fn(usize) -> f32) {
        check_write(self.0.as_ptr(), self.0.len());
        // SAFETY: aligned floats, borrowed uniquely.
        let floats = unsafe { std::slice::from_raw_parts_mut(self.ptr(), self.len()) };
        floats.iter_mut().enumerate().for_each(|(index, float)| *float = value(index));
    }

    /// Asserts that each is `value` of its index.
    pub fn expect(&self, value: impl Fn(usize) -> f32) {
        check_read(self.0.as_ptr(), self.0.len());
        // SAFETY: aligned floats.
        let floats = unsafe { std::slice::from_raw_parts(self.ptr(), self.len()) };
        floats.iter().enumerate().for_each(|(index, &float)| assert_eq!(float, value(index), "index {index}"));
    }

    /// These floats as the input and output of a call.
    pub fn in_place(&self) -> Buffer {
        Buffer::in_place(self.ptr().cast(), self.len(), DType::F32)
    }
}
