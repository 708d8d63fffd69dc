//! The creation of a group by its members: they agree on it, and get its memory and its links between hosts.
//!
//! Groups of all ranks agree through the bootstrap, others through the store ([`super::group_agreement`]), so that only
//! members take part.
//! Thread rule: any thread; groups of all ranks one at a time, in the same order on all ranks.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use super::creations::{Calls, Creation, LOOK_EVERY};
use super::flag_tree::fan_out;
use super::group_agreement::{Agreement, Share};
use super::group_arenas::{GroupArenas, readable_processes};
use super::group_memory::NewControl;
use super::interval::Interval;
use super::job::Job;
use super::peer_memory::PeerMemory;
use super::process::ProcessLiveness;
use super::region_layout::{default_slot, max_channels};
use super::shm_region::{Liveness, LocalPeer, RegionLayout, ShmRegion};
use super::spin::MaxSpins;
use super::wait_context::{WaitContext, with_limits};
use super::window::window;
use super::{GroupResources, HostLink};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::group_config::GroupConfig;
use crate::group_key::{GroupKey, GroupName, Members};
use crate::topology::Topology;
use crate::wire_layout::exchange_buffer_bytes;

/// The first member ends its wait this much earlier than the others, so that all get its error.
const FIRST_MEMBER_MARGIN: Duration = Duration::from_millis(500);

/// A group to be created.
#[derive(Clone, Copy)]
struct CreationPlan<'a> {
    key: &'a GroupKey,
    members: &'a Members,
    topology: &'a Arc<Topology>,
    names: &'a Arc<[String]>,
    config: &'a GroupConfig,
}

impl Job {
    /// Creates the resources of the group `name`. Called by its members only: a rank that is not `ready` takes part
    /// too, and all members get its error. `calls` are those of this process.
    ///
    /// # Errors
    /// Equal on all members: the settings differ, or a rank is not ready, lost, or out of memory. After a passed
    /// deadline in a group of all ranks they are out of sync, and no further such group can be created.
    pub fn create_group(
        &self,
        name: GroupName,
        members: &Members,
        config: &GroupConfig,
        ready: Result<()>,
        calls: &dyn Calls,
    ) -> Result<GroupResources> {
        let first = GroupKey::new(name.clone(), members, 0).hash();
        let generation = self.creations.next_generation(first);
        let key = GroupKey::new(name, members, generation);
        let (topology, names) = (self.topology_of(members), self.member_names(members));
        let what = format!("the creation of {}", key.name());
        let plan = CreationPlan { key: &key, members, topology: &topology, names: &names, config };
        match members {
            Members::World { .. } => self.in_step(&what, |wait_ctx| {
                let agree = |shape: &str, outcome: Result<Share>| {
                    let shares = self.ranks.agree(shape, outcome, wait_ctx)?;
                    let local = topology.local_ranks();
                    let readable = local.iter().all(|&rank| shares[rank].readable);
                    Ok(Share { control: shares[local[0]].control, first_link: shares[0].first_link, readable })
                };
                self.create(&plan, ready, agree, wait_ctx)
            }),
            Members::List { .. } => {
                let after = config.timeout.after.map(|timeout| match members.me() {
                    0 => timeout,
                    _ => timeout + FIRST_MEMBER_MARGIN,
                });
                let timeout = Deadline { after, ..config.timeout };
                let listed: Vec<usize> = members.iter().collect();
                let running = self.creations.start(
                    &*self.store,
                    Creation {
                        hash: key.hash(),
                        first,
                        generation,
                        text: format!("{} of ranks {listed:?}", key.name()),
                        members: listed,
                        on_main_thread: rustix::thread::gettid() == rustix::process::getpid(),
                    },
                );
                let (interval, conflict_looks) = (Interval::new(LOOK_EVERY), Cell::new(0));
                let conflict = || {
                    if members.size() == 1 {
                        return None;
                    }
                    calls.look();
                    interval.run(|| {
                        let looks = conflict_looks.replace(conflict_looks.get() + 1);
                        running.conflict(looks, calls)
                    })
                };
                let name = |member: usize| self.ranks.names[members.to_world(member)].clone();
                let prefix = format!("group/{:016x}", key.hash());
                let looks = Interval::new(LOOK_EVERY);
                let agreement = Agreement { store: &*self.store, prefix, topology: &topology, name: &name, looks };
                let failed =
                    || self.lost_member(members, &what).or_else(|| agreement.decided_error()).or_else(&conflict);
                let created = with_limits(&what, timeout, self.ranks.config.stall_warn, &failed, |wait_ctx| {
                    let agree = |shape: &str, outcome: Result<Share>| agreement.agree(shape, outcome, wait_ctx);
                    self.create(&plan, ready.clone(), agree, wait_ctx)
                });
                if matches!(created, Err(Error::Mismatch(_))) && running.was_given_up() {
                    drop(running);
                    return self.create_group(key.name().clone(), members, config, ready, calls);
                }
                created
            }
        }
    }

    /// A lost member, if one is known to be lost.
    fn lost_member(&self, members: &Members, what: &str) -> Option<Error> {
        let detected = |rank: usize| {
            let is_lost = self.groups.lost_ranks().any(|lost| lost == rank);
            is_lost.then(|| format!("{} is lost", self.ranks.names[rank]))
        };
        let lost = members.iter().find_map(|rank| self.ranks.describe_end(rank).or_else(|| detected(rank)))?;
        Some(Error::PeerLost(format!("{lost}, in {what}")))
    }

    /// The hosts of the members.
    fn topology_of(&self, members: &Members) -> Arc<Topology> {
        let world = &self.ranks.topology;
        match members {
            Members::World { .. } => Arc::clone(world),
            Members::List { .. } => {
                let host_of = |rank: usize| world.position(rank).map(|position| position.host);
                Arc::new(Topology::new(members.me(), &members.iter().map(host_of).collect::<Vec<_>>()))
            }
        }
    }

    /// Creates the group once the members have agreed by `agree`, which combines what they have made for each other.
    fn create(
        &self,
        plan: &CreationPlan<'_>,
        ready: Result<()>,
        agree: impl FnOnce(&str, Result<Share>) -> Result<Share>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<GroupResources> {
        let CreationPlan { key, members, topology, names, config } = *plan;
        let world = &self.ranks.topology;
        let window = window(topology.hosts());
        let ranks = topology.local_size();
        let cpus_per_rank = self.cpus_per_rank(topology, members);
        let channels = max_channels(config.threads, cpus_per_rank);
        let slot = config.slot.unwrap_or_else(|| default_slot(topology.hosts(), ranks, channels));
        let fan_out = fan_out(ranks, config.selection.flat_notices(cpus_per_rank));
        let layout = RegionLayout { ranks, channels: config.threads, slot, window, fan_out };
        let made = ready.and_then(|()| self.make_shares(topology, members, layout, wait_ctx));
        let local = |&rank: &usize| world.local_rank_of(members.to_world(rank)).unwrap_or(0);
        let local_ranks: Vec<usize> = topology.local_ranks().iter().map(local).collect();
        let readable = readable_processes(self.groups.arenas(), &local_ranks);
        let own = made.as_ref().map(|(control, first_link)| Share {
            control: control.as_ref().map_or(0, NewControl::offset),
            first_link: *first_link,
            readable: readable.is_some(),
        });
        let share = agree(&config.agreement(), own.map_err(Error::clone))?;
        let (control, _) = made?;

        let readable = readable.filter(|_| share.readable);
        let memory = Box::new(self.groups.region(key.hash(), local_ranks.clone(), share.control, control)?);
        let peer = |&rank: &usize| LocalPeer { rank, world: members.to_world(rank), name: names[rank].clone() };
        let peers = topology.local_ranks().iter().map(peer).collect();
        let processes = Arc::clone(&self.ranks.local_processes);
        let liveness = Box::new(MemberLiveness { processes, local_ranks: local_ranks.clone() });
        let arenas = GroupArenas::new(Arc::clone(self.groups.arenas()), local_ranks, readable, memory.holds());
        let arenas = if topology.hosts() > 1 { arenas.between_hosts() } else { arenas };
        let region = ShmRegion::new(
            memory,
            layout,
            topology.local_rank(),
            peers,
            liveness,
            MaxSpins::with_yields(cpus_per_rank),
        )?
        .with_peer_memory(Some(Arc::new(arenas) as Arc<dyn PeerMemory>))
        .with_departure(key.name().departure());
        let links = |channel: usize| {
            let first = share.first_link + channel * topology.num_shards();
            self.links(topology, members, first, slot)
        };
        Ok(GroupResources {
            key: key.clone(),
            members: members.clone(),
            names: Arc::clone(names),
            region: Arc::new(region),
            links: (0..config.threads).map(links).collect(),
            network: self.network_model,
            cpus_per_rank,
            topology: Arc::clone(topology),
        })
    }

    /// What this rank makes for the others: the first on a host the control block; the first member the number of the
    /// first link, if there are several hosts.
    fn make_shares(
        &self,
        topology: &Topology,
        members: &Members,
        layout: RegionLayout,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<(Option<NewControl>, usize)> {
        let listed: Option<Vec<u32>> = match members {
            Members::World { .. } => None,
            Members::List { .. } => Some(members.iter().filter_map(|rank| u32::try_from(rank).ok()).collect()),
        };
        let is_first_on_host = topology.local_rank() == 0;
        let control = is_first_on_host.then(|| self.groups.create_control(layout, listed.as_deref())).transpose()?;
        let links = match &self.network {
            Some(network) if topology.hosts() > 1 && members.me() == 0 => {
                let links = layout.channels * topology.num_shards();
                let count = i64::try_from(links).unwrap_or(i64::MAX);
                let end = usize::try_from(self.store.add("links", count, wait_ctx)?).unwrap_or(usize::MAX);
                if end > network.max_links() {
                    let text = "this job has made more groups between hosts than the network can tell apart";
                    return Err(Error::Network(text.into()));
                }
                end - links
            }
            _ => 0,
        };
        Ok((control, links))
    }

    /// The names of the members in messages.
    fn member_names(&self, members: &Members) -> Arc<[String]> {
        match members {
            Members::World { .. } => Arc::clone(&self.ranks.names),
            Members::List { .. } => members
                .iter()
                .enumerate()
                .map(|(rank, world)| format!("rank {rank} ({} of the job)", self.ranks.names[world]))
                .collect(),
        }
    }

    /// The links of this rank's shards, if the group has several hosts. The link of shard s has the number `first` + s.
    fn links(&self, topology: &Topology, members: &Members, first: usize, slot: usize) -> Vec<Box<dyn HostLink>> {
        let Some(network) = self.network.as_ref().filter(|_| topology.hosts() > 1) else { return Vec::new() };
        let host_name = |&owner: &usize| {
            let host = self.ranks.topology.position(owner).map_or(0, |position| position.host);
            let ranks = self.ranks.topology.ranks_of(host).iter().filter(|&&rank| members.of_world(rank).is_some());
            let ranks: Vec<String> = ranks.map(usize::to_string).collect();
            format!("{} (ranks {})", self.ranks.rank_info[owner].host, ranks.join(", "))
        };
        let link = |shard: usize| {
            let owner = |host: usize| members.to_world(topology.shard_owner(shard, host));
            let owners: Vec<usize> = (0..topology.hosts()).map(owner).collect();
            let hosts = owners.iter().map(host_name).collect();
            network.link(first + shard, owners, hosts, exchange_buffer_bytes(slot, topology))
        };
        topology.own_shards().map(link).collect()
    }
}

/// The processes of the members on this host, by local rank in the group.
struct MemberLiveness {
    processes: Arc<ProcessLiveness>,
    local_ranks: Vec<usize>,
}

impl Liveness for MemberLiveness {
    fn lost(&self, local_rank: usize) -> Option<String> {
        self.processes.lost(self.local_ranks[local_rank])
    }
}
