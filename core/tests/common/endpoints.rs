//! Ranks that are threads and send and receive.
#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use dl_comm_core::deadline::{Deadline, SetBy};
use dl_comm_core::error::{Error, Result};
use dl_comm_core::p2p::{Endpoint, GroupRoutes, Hosts, Message, Peers, Scope, Spans, Status, Transfer};
use dl_comm_core::transport::in_process::mailbox_memory::HeapMemory;
use dl_comm_core::transport::in_process::messages::ThreadMessages;
use dl_comm_core::transport::shm_region::Liveness;
use dl_comm_core::transport::spin::MaxSpins;

/// A group of all ranks.
pub struct Group {
    pub context: u64,
    pub size: usize,
    pub failure: Mutex<Option<Error>>,
}

impl Scope for Group {
    fn context(&self) -> u64 {
        self.context
    }
    fn name(&self) -> String {
        format!("group {}", self.context)
    }
    fn size(&self) -> usize {
        self.size
    }
    fn to_world(&self, rank: usize) -> usize {
        rank
    }
    fn of_world(&self, world: usize) -> Option<usize> {
        Some(world)
    }
    fn failure(&self) -> Option<Error> {
        self.failure.lock().unwrap().clone()
    }
}

/// Ranks that are lost when a test says so.
#[derive(Clone, Default)]
pub struct Lost(pub Arc<Vec<AtomicBool>>);

impl Liveness for Lost {
    fn lost(&self, rank: usize) -> Option<String> {
        self.0.get(rank)?.load(Ordering::Relaxed).then(|| "has ended".to_owned())
    }
}

pub struct Rank {
    pub endpoint: Arc<Endpoint>,
    pub routes: GroupRoutes,
    pub group: Arc<Group>,
}

pub fn world_with(ranks: usize, shares: bool, lost: &Lost) -> Vec<Rank> {
    hosts_with(&[ranks], shares, lost, Vec::new())
}

/// Ranks on several hosts: `sizes[h]` on host h. `networks` are those of the ranks, or empty.
pub fn hosts_with(sizes: &[usize], shares: bool, lost: &Lost, networks: Vec<ThreadMessages>) -> Vec<Rank> {
    let size: usize = sizes.iter().sum();
    let names: Arc<[String]> = (0..size).map(|rank| format!("rank {rank}")).collect();
    let mut networks = networks.into_iter();
    let mut ranks = Vec::new();
    for &local_size in sizes {
        let world: Vec<usize> = (ranks.len()..ranks.len() + local_size).collect();
        for memory in HeapMemory::world(local_size, shares) {
            let first = world[0];
            let liveness = Box::new(LostFrom { lost: lost.clone(), first });
            let peers = Peers { world: world.clone(), names: Arc::clone(&names), liveness, calls: None };
            let group = Arc::new(Group { context: 7, size, failure: Mutex::default() });
            let scope = Arc::clone(&group) as Arc<dyn Scope>;
            let far = lost.clone();
            let hosts = networks
                .next()
                .map(|network| Hosts { network: Box::new(network), lost: Box::new(move |rank| far.lost(rank)) });
            let endpoint = Arc::new(Endpoint::new(Arc::new(memory), peers, MaxSpins::equal(100), hosts).unwrap());
            ranks.push(Rank { routes: endpoint.routes(scope), endpoint, group });
        }
    }
    ranks
}

/// The ranks of a host, whose first rank is `first`.
struct LostFrom {
    lost: Lost,
    first: usize,
}

impl Liveness for LostFrom {
    fn lost(&self, local_rank: usize) -> Option<String> {
        self.lost.lost(self.first + local_rank)
    }
}

pub fn world(ranks: usize, shares: bool) -> Vec<Rank> {
    world_with(ranks, shares, &Lost::default())
}

pub fn spans(data: &[u8]) -> Spans {
    spans_at(data.as_ptr().cast_mut(), data.len())
}

pub fn spans_mut(data: &mut [u8]) -> Spans {
    spans_at(data.as_mut_ptr(), data.len())
}

/// In one piece, or in several of odd lengths.
fn spans_at(start: *mut u8, len: usize) -> Spans {
    let mut spans = Spans::default();
    let most = if len.is_multiple_of(2) { usize::MAX } else { 70_001 };
    let mut at = 0;
    while at < len {
        let piece = (len - at).min(most);
        spans.add(start.wrapping_add(at), piece).unwrap();
        at += piece;
    }
    spans
}

pub fn deadline(after: Option<Duration>) -> Deadline {
    Deadline { after, set_by: SetBy::Call }
}

impl Rank {
    pub fn message(&self, peer: Option<usize>, tag: Option<u32>) -> Message<'_> {
        Message {
            group: &self.routes,
            peer,
            tag,
            name: "",
            deadline: deadline(Some(Duration::from_secs(60))),
            exact: false,
        }
    }

    /// The routes to the ranks of another group.
    pub fn routes_of(&self, scope: &Arc<impl Scope + 'static>) -> GroupRoutes {
        self.endpoint.routes(Arc::clone(scope) as Arc<dyn Scope>)
    }

    pub fn start_send(&self, to: usize, tag: u32, data: &[u8]) -> Transfer {
        // SAFETY: the tests keep the memory.
        unsafe { Transfer::send(&self.endpoint, &self.message(Some(to), Some(tag)), spans(data), None) }.unwrap()
    }

    pub fn start_receive(&self, from: Option<usize>, tag: Option<u32>, data: &mut [u8]) -> Transfer {
        // SAFETY: as above.
        unsafe { Transfer::receive(&self.endpoint, &self.message(from, tag), spans_mut(data), None) }.unwrap()
    }

    pub fn send(&self, to: usize, tag: u32, data: &[u8]) {
        self.start_send(to, tag, data).wait(None).unwrap();
    }

    /// Receives in one call, which may find a short message before its receive is posted.
    pub fn receive_in_one(&self, message: &Message<'_>, data: &mut [u8]) -> Result<Status> {
        // SAFETY: the memory lives until the call has ended.
        unsafe { self.endpoint.receive_now(message, spans_mut(data)) }
    }

    pub fn receive(&self, from: Option<usize>, tag: Option<u32>, data: &mut [u8]) -> Result<Status> {
        self.start_receive(from, tag, data).wait(None)
    }
}

/// Runs `body` on every rank.
pub fn run(ranks: &[Rank], body: impl Fn(usize, &Rank) + Sync) {
    thread::scope(|scope| {
        for (number, rank) in ranks.iter().enumerate() {
            let body = &body;
            scope.spawn(move || body(number, rank));
        }
    });
}

pub fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 31 + seed * 7 + index / 251) as u8).collect()
}
