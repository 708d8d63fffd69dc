//! Ranks as threads of one process, on hosts of any shape, for tests. Shared memory is the heap and messages use
//! channels; all layers above run unchanged.

pub mod mailbox_memory;
pub mod messages;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use crate::error::{Error, Result};
use crate::group_key::{GroupKey, Members};
use crate::topology::Topology;
use crate::transport::memory::Aligned;
use crate::transport::peer_memory::{DirectCopies, PeerMemory};
use crate::transport::region_control::RegionControl;
use crate::transport::shm_region::{Liveness, LocalPeer, RegionLayout, RegionMemory, ShmRegion};
use crate::transport::spin::MaxSpins;
use crate::transport::window::window;
use crate::transport::{ExchangeMemory, GroupResources, HostLink, HostMessage, MAX_EXCHANGES, NetworkModel, sync};
use crate::wire_layout::exchange_buffer_bytes;

/// A region in the heap: the control block, then the memory of all ranks.
#[derive(Clone)]
pub struct HeapRegion {
    memory: Arc<Aligned>,
    control: usize,
}

impl HeapRegion {
    /// Zeroed memory for a region.
    pub fn new(layout: RegionLayout) -> HeapRegion {
        HeapRegion::with_members(layout, None)
    }

    fn with_members(layout: RegionLayout, members: Option<&[u32]>) -> HeapRegion {
        let control = layout.control_bytes(members.map_or(0, <[u32]>::len));
        let memory = Arc::new(Aligned::new(control + layout.ranks * layout.rank_bytes()));
        let region = HeapRegion { memory, control };
        #[cfg(loom)]
        {
            layout.prepare(region.control());
            let memory = |rank: usize| region.control().wrapping_add(control + rank * layout.rank_bytes());
            (0..layout.ranks).for_each(|rank| layout.prepare_rank(memory(rank)));
        }
        // SAFETY: new memory of this layout, which the region keeps.
        unsafe { RegionControl::create(region.control(), layout, members) };
        region
    }
}

impl RegionMemory for HeapRegion {
    fn control(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    fn make(&self, me: usize, len: usize) -> Result<u64> {
        Ok((self.control + me * len) as u64)
    }

    fn of_rank(&self, _rank: usize, place: u64, len: usize) -> Option<*mut u8> {
        let place = usize::try_from(place).ok().filter(|place| place + len <= self.memory.len())?;
        Some(self.memory.as_ptr().wrapping_add(place))
    }
}

/// The number of checks before a wait sleeps. Loom runs each of them in every order, and has no clock to adapt it.
const SPINS: MaxSpins = MaxSpins::equal(if cfg!(loom) { 0 } else { 100 });

struct AlwaysAlive;

impl Liveness for AlwaysAlive {
    fn lost(&self, _local_rank: usize) -> Option<String> {
        None
    }
}

/// How the ranks of a host reach each other's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Not at all: data goes through slots.
    Slots,
    /// All memory is peer memory.
    Peer,
    /// That of even ranks is peer memory.
    EvenPeer,
    /// All memory is private, and the ranks can copy out of it.
    Private,
    /// As `Private`, and the ranks choose between slots and direct copies by measurements.
    Measured,
    /// As `Private`, but the memory of even ranks is peer memory.
    EvenPeerOddPrivate,
    /// As `Private`, but the system refuses the copies of rank 1, from the given number on.
    Refused(usize),
}

impl Access {
    /// All kinds.
    pub const ALL: [Access; 8] = [
        Access::Slots,
        Access::Peer,
        Access::EvenPeer,
        Access::Private,
        Access::Measured,
        Access::EvenPeerOddPrivate,
        Access::Refused(0),
        Access::Refused(3),
    ];

    fn memory(self, rank: usize) -> Option<Arc<dyn PeerMemory>> {
        let is_even = rank.is_multiple_of(2);
        let (peer, private) = match self {
            Access::Slots => return None,
            Access::Peer => (true, false),
            Access::EvenPeer => (is_even, false),
            Access::Private | Access::Measured | Access::Refused(_) => (false, true),
            Access::EvenPeerOddPrivate => (is_even, true),
        };
        let left = match self {
            Access::Refused(count) if rank == 1 => count,
            _ => usize::MAX,
        };
        let measures = self == Access::Measured;
        Some(Arc::new(ProcessMemory { peer, private, measures, left: AtomicUsize::new(left) }))
    }
}

/// Threads of one process share all memory: an offset is an address.
struct ProcessMemory {
    peer: bool,
    private: bool,
    measures: bool,
    /// Copies out of private memory that succeed.
    left: AtomicUsize,
}

impl ProcessMemory {
    unsafe fn copy(&self, from: *const u8, to: *mut u8, len: usize) -> bool {
        let take = |left: usize| left.checked_sub(usize::from(left != usize::MAX));
        let allowed = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        if allowed {
            sync::check_read(from, len);
            // SAFETY: guaranteed by the caller.
            unsafe { from.copy_to_nonoverlapping(to, len) };
        }
        allowed
    }
}

impl PeerMemory for ProcessMemory {
    fn offset_of(&self, range: Range<usize>) -> Option<u64> {
        self.peer.then_some(range.start as u64)
    }
    fn resolve(&self, _local_rank: usize, address: u64, _len: usize) -> Option<*mut u8> {
        usize::try_from(address).ok().map(std::ptr::with_exposed_provenance_mut)
    }
    fn direct_copies(&self) -> DirectCopies {
        if self.private {
            DirectCopies { possible: true, always: !self.measures, private: true }
        } else {
            DirectCopies::NONE
        }
    }
    unsafe fn read_private(&self, local_rank: usize, address: u64, to: *mut u8, len: usize) -> bool {
        // SAFETY: guaranteed by the caller.
        self.resolve(local_rank, address, len).is_some_and(|from| unsafe { self.copy(from, to, len) })
    }
}

/// The region of a group with one rank on this host; with `members`, of these ranks of the job.
#[cfg(test)]
pub(in crate::transport) fn single(members: Option<&[u32]>) -> Result<Arc<ShmRegion>> {
    let layout = RegionLayout { ranks: 1, channels: 1, slot: 4096, window: 2, fan_out: None };
    let memory = Box::new(HeapRegion::with_members(layout, members));
    let peers = vec![LocalPeer { rank: 0, world: 0, name: "rank 0".into() }];
    ShmRegion::new(memory, layout, 0, peers, Box::new(AlwaysAlive), SPINS).map(Arc::new)
}

/// The resources of a job with `sizes[h]` ranks on host h, by rank. `slot` is in bytes.
///
/// # Errors
/// Errors of [`ShmRegion::new`].
pub fn world(sizes: &[usize], channels: usize, slot: usize, access: Access) -> Result<Vec<GroupResources>> {
    world_in_tree(sizes, channels, slot, access, |_ranks| None)
}

/// As [`world`]; `fan_out` returns the fan-out of the tree that the notices of so many ranks take, if they take one.
///
/// # Errors
/// As for [`world`].
pub fn world_in_tree(
    sizes: &[usize],
    channels: usize,
    slot: usize,
    access: Access,
    fan_out: impl Fn(usize) -> Option<usize>,
) -> Result<Vec<GroupResources>> {
    let hosts: Vec<usize> = sizes.iter().enumerate().flat_map(|(host, &size)| vec![host; size]).collect();
    group(&GroupKey::team(0), &hosts, channels, slot, access, fan_out)
}

/// As [`world_in_tree`], for the group `key`, whose rank r is on host `hosts[r]`.
///
/// # Errors
/// As for [`world`].
pub fn group(
    key: &GroupKey,
    hosts: &[usize],
    channels: usize,
    slot: usize,
    access: Access,
    fan_out: impl Fn(usize) -> Option<usize>,
) -> Result<Vec<GroupResources>> {
    let topology = Topology::new(0, hosts);
    let region = |host: usize| {
        let (ranks, window) = (topology.ranks_of(host).len(), window(topology.hosts()));
        let layout = RegionLayout { ranks, channels, slot, window, fan_out: fan_out(ranks) };
        (layout, HeapRegion::new(layout))
    };
    let regions: Vec<(RegionLayout, HeapRegion)> = (0..topology.hosts()).map(region).collect();
    let mut links = all_links(&topology, channels, slot);
    let endpoint = |rank: usize| {
        let topology = Topology::new(rank, hosts);
        let (layout, memory) = &regions[topology.host()];
        let peers = topology
            .local_ranks()
            .iter()
            .map(|&rank| LocalPeer { rank, world: rank, name: format!("rank {rank}") })
            .collect();
        let (memory, liveness) = (Box::new(memory.clone()), Box::new(AlwaysAlive));
        let region = ShmRegion::new(memory, *layout, topology.local_rank(), peers, liveness, SPINS)?;
        let region =
            region.with_departure(key.name().departure()).with_peer_memory(access.memory(topology.local_rank()));
        let links = std::mem::take(&mut links[rank]);
        Ok(GroupResources {
            key: key.clone(),
            members: Members::World { size: hosts.len(), me: rank },
            names: (0..hosts.len()).map(|rank| format!("rank {rank}")).collect(),
            topology: Arc::new(topology),
            region: Arc::new(region),
            links,
            network: NetworkModel::UNKNOWN,
            cpus_per_rank: usize::MAX,
        })
    };
    (0..hosts.len()).map(endpoint).collect()
}

/// For every rank and channel, the links of its shards.
fn all_links(topology: &Topology, channels: usize, slot: usize) -> Vec<Vec<Vec<Box<dyn HostLink>>>> {
    let no_links = |_| (0..channels).map(|_| Vec::new()).collect();
    let mut links: Vec<Vec<Vec<Box<dyn HostLink>>>> = (0..topology.size()).map(no_links).collect();
    let capacity = exchange_buffer_bytes(slot, topology);
    let shards = if topology.hosts() > 1 { topology.num_shards() } else { 0 };
    let groups = (0..shards).flat_map(|shard| (0..channels).map(move |channel| (shard, channel)));
    for (shard, channel) in groups {
        for (host, link) in link_group(topology.hosts(), capacity).into_iter().enumerate() {
            links[topology.shard_owner(shard, host)][channel].push(Box::new(link));
        }
    }
    links
}

/// The links of one shard and channel, by host.
fn link_group(hosts: usize, capacity: usize) -> Vec<ThreadLink> {
    let exchange = |_| Exchange { senders: vec![], receivers: vec![], pending: vec![] };
    let link = |host: usize| ThreadLink {
        memory: ExchangeMemory::new(capacity),
        exchanges: [0; MAX_EXCHANGES].map(exchange),
        random: host as u32 + 1,
    };
    let mut links: Vec<ThreadLink> = (0..hosts).map(link).collect();
    for exchange in 0..MAX_EXCHANGES {
        for from in 0..hosts {
            for to in 0..hosts {
                let (sender, receiver) = channel();
                links[from].exchanges[exchange].senders.push(sender);
                links[to].exchanges[exchange].receivers.push(receiver);
            }
        }
    }
    links
}

/// Messages of different exchanges may overtake each other.
struct ThreadLink {
    memory: ExchangeMemory,
    exchanges: [Exchange; MAX_EXCHANGES],
    /// The state of a xorshift generator.
    random: u32,
}

struct Exchange {
    /// By host.
    senders: Vec<Sender<Vec<u8>>>,
    receivers: Vec<Receiver<Vec<u8>>>,
    /// The receives in flight.
    pending: Vec<HostMessage>,
}

impl HostLink for ThreadLink {
    fn memory(&mut self) -> &mut ExchangeMemory {
        &mut self.memory
    }

    fn start(&mut self, exchange: usize, sends: &[HostMessage], receives: &[HostMessage]) -> Result<()> {
        let send = self.memory.of(exchange).send;
        let Exchange { senders, pending, .. } = &mut self.exchanges[exchange];
        for HostMessage { host, bytes } in sends {
            // `poll` reports a lost peer.
            senders[*host].send(send[bytes.clone()].to_vec()).ok();
        }
        pending.extend_from_slice(receives);
        Ok(())
    }

    fn poll(&mut self, completed: &mut dyn FnMut(usize)) -> Result<()> {
        for step in [13, -17, 5] {
            self.random ^= if step > 0 { self.random << step } else { self.random >> -step };
        }
        let random = self.random;
        let is_late = |index: &usize| random >> index & 1 == 1;
        let exchanges = self.exchanges.iter_mut().enumerate().filter(|(index, _)| !is_late(index));
        for (number, Exchange { receivers, pending, .. }) in exchanges {
            let mut lost = None;
            pending.retain(|HostMessage { host, bytes }| match receivers[*host].try_recv() {
                Ok(message) => {
                    self.memory.of(number).recv[bytes.clone()][..message.len()].copy_from_slice(&message);
                    completed(*host);
                    false
                }
                Err(TryRecvError::Empty) => true,
                Err(TryRecvError::Disconnected) => {
                    lost = Some(*host);
                    true
                }
            });
            if let Some(host) = lost {
                return Err(Error::PeerLost(format!("a rank of host {host} has ended")));
            }
        }
        Ok(())
    }

    fn in_flight(&self, exchange: usize) -> usize {
        self.exchanges[exchange].pending.len()
    }

    fn awaited(&self) -> Vec<usize> {
        let mut hosts: Vec<usize> =
            self.exchanges.iter().flat_map(|exchange| exchange.pending.iter().map(|message| message.host)).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    fn host_name(&self, host: usize) -> String {
        format!("host {host}")
    }
}
