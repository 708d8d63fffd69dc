//! The one table of choices: which path a call takes, by its collective, bytes, ranks, hosts and memory.
//!
//! [`ROWS`] has the lengths at which calls take another path, and numbers of ranks; `DL_COMM_SELECTION` sets them
//! ([`Selection`]). The functions here apply them, and make the choices that depend on no length. Three things are only
//! asked from here: what a rank has measured ([`super::path_choice`]), the model of the network (`inter_host/cost.rs`), and
//! what the GPUs of the ranks can do (`device/path.rs`). `docs/algorithms.md` shows the rows, and what each path costs.
//! Thread rule: plain data and pure functions.

use super::algorithm::{Algorithm, AlgorithmSetting};
use super::operation::{Op, Pattern};
use crate::error::{Error, Result};
use crate::transport::NETWORK_WINDOW;
use crate::wire_layout::ALIGN;

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Reductions of a line that take one round without measuring.
    ReduceMeasured,
    /// Those that may take one round.
    ReduceOneRound,
    /// The same where ranks share processors: further rounds cost changes of threads.
    ReduceOneRoundSharedCpus,
    /// Reduce-scatters that take one round.
    ReduceScatterOneRound,
    /// Broadcasts that go through slots without measuring.
    BroadcastMeasured,
    /// Those that may take one round. The copies of the root and of the others follow each other.
    BroadcastOneRound,
    /// Other moves that go through slots without measuring: system calls, and another round of flags, cost more.
    BlocksMeasured,
    /// Those that may take one round: beyond, several chunks overlap the work of senders and receivers.
    BlocksOneRound,
    /// Calls on GPUs whose ranks take turns that go through host memory (from here on, `ipc` is as fast on an H200).
    IpcHostMemory,
    /// Calls on GPUs in which each rank reads the input of all. Others read and write less, but take another barrier of
    /// the streams and an exchange of addresses.
    IpcOneShot,
    /// Tensors that are packed together for NCCL: an operation for each costs more.
    NcclFused,
    /// Started allreduces that travel together between hosts.
    HostsFused,
    /// Slices that the owner of a shard reduces alone, on hosts with more ranks than shards.
    OwnerAlone,
    /// The same where ranks share processors: others are no faster together.
    OwnerAloneSharedCpus,
    /// Ranks of a host that read each other's flags; on larger hosts notices take a tree.
    NoticesFlat,
    /// The same where ranks share processors: a rank that passes a notice on must first get one.
    NoticesFlatSharedCpus,
}

/// What happens to calls below and beyond a [`Limit`].
#[derive(Debug)]
pub struct Row {
    /// The limit.
    pub limit: Limit,
    /// The name in `DL_COMM_SELECTION`.
    pub name: &'static str,
    /// The calls.
    pub calls: &'static str,
    /// The bytes that the limit is about.
    pub of: &'static str,
    /// The limit in bytes, or in [`RANKS`], unless it is set.
    pub bytes: usize,
    /// Whether a call of so many bytes is still a short one.
    pub inclusive: bool,
    /// How short calls run.
    pub short: &'static str,
    /// How longer ones run.
    pub long: &'static str,
}

/// What a rank reads of the inputs of the others, on the threads that could share the call.
const READ: &str = "bytes x (ranks - 1) x threads";
const LINE: &str = "bytes";
const BLOCKS: &str = "bytes of all blocks of a rank";
const REDUCE: &str = "allreduce, reduce";
const MOVE_BLOCKS: &str = "gather, all-gather, scatter, all-to-all";
const UNMEASURED: &str = "without measuring";
const REDUCE_MEASURED: &str = "one round or slices, as measured";
const MOVE_MEASURED: &str = "copies or direct copies, as measured";
const ONE_ROUND: &str = "one round";
const SLICES: &str = "slices, or in place";
const SLOTS: &str = "slots, or in place";
const SLICE: &str = "bytes of a shard's slice";
const ALONE: &str = "the owner of the shard reduces it";
const PARTS: &str = "ranks without a shard reduce parts of it";
/// The limits of these rows are no bytes.
pub const RANKS: &str = "ranks of the host";
const ALL_FLAGS: &str = "each rank reads those of all";
const FLAGS_IN_TREE: &str = "in a tree";

/// The table, in the order of [`Limit`].
#[rustfmt::skip]
pub static ROWS: [Row; 16] = [
    row(Limit::ReduceMeasured, "reduce.measured", REDUCE, READ, 8 << 10, true, UNMEASURED, REDUCE_MEASURED),
    row(Limit::ReduceOneRound, "reduce.one_round", REDUCE, READ, 128 << 10, true, ONE_ROUND, SLICES),
    row(Limit::ReduceOneRoundSharedCpus, "reduce.one_round_shared_cpus", "the same, if ranks share processors", READ,
        512 << 10, true, ONE_ROUND, SLICES),
    row(Limit::ReduceScatterOneRound, "reduce_scatter.one_round", "reduce-scatter", BLOCKS, 128 << 10, true, ONE_ROUND, SLOTS),
    row(Limit::BroadcastMeasured, "broadcast.measured", "broadcast", LINE, 16 << 10, false, UNMEASURED, MOVE_MEASURED),
    row(Limit::BroadcastOneRound, "broadcast.one_round", "broadcast", LINE, 64 << 10, true, ONE_ROUND, SLOTS),
    row(Limit::BlocksMeasured, "blocks.measured", MOVE_BLOCKS, BLOCKS, 16 << 10, false, UNMEASURED, MOVE_MEASURED),
    row(Limit::BlocksOneRound, "blocks.one_round", MOVE_BLOCKS, BLOCKS, 128 << 10, true, ONE_ROUND, SLOTS),
    row(Limit::IpcHostMemory, "ipc.host_memory", "GPU path ipc, if ranks take turns on a GPU", LINE, 2 << 20, false,
        "host memory", "ipc"),
    row(Limit::IpcOneShot, "ipc.one_shot", "GPU path ipc", "bytes x ranks", 4 << 20, true, "one shot", "two shots"),
    row(Limit::NcclFused, "nccl.fused", "GPU path nccl: allreduce, reduce, broadcast", "bytes of a tensor", 256 << 10, true,
        "packed together, if more than 4", "one by one"),
    row(Limit::HostsFused, "hosts.fused", "allreduces between hosts that are started without waiting",
        "bytes of neighbours with one operator", 64 << 10, true, "in one message", "in several"),
    row(Limit::OwnerAlone, "hosts.owner_alone", "allreduce, reduce between hosts of more than 16 ranks", SLICE, 4 << 10, true,
        ALONE, PARTS),
    row(Limit::OwnerAloneSharedCpus, "hosts.owner_alone_shared_cpus", "the same, if ranks share processors", SLICE,
        MAX_BYTES, true, ALONE, PARTS),
    row(Limit::NoticesFlat, "notices.flat", "flags on a host", RANKS, 15, true, ALL_FLAGS, FLAGS_IN_TREE),
    row(Limit::NoticesFlatSharedCpus, "notices.flat_shared_cpus", "the same, if ranks share processors", RANKS, 1 << 20, true,
        ALL_FLAGS, FLAGS_IN_TREE),
];

#[allow(clippy::too_many_arguments)]
const fn row(
    limit: Limit,
    name: &'static str,
    calls: &'static str,
    of: &'static str,
    bytes: usize,
    inclusive: bool,
    short: &'static str,
    long: &'static str,
) -> Row {
    Row { limit, name, calls, of, bytes, inclusive, short, long }
}

/// The limits of a process or a group: those of the table, or as they are set. The same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selection([usize; ROWS.len()]);

impl Default for Selection {
    fn default() -> Selection {
        Selection(std::array::from_fn(|row| ROWS[row].bytes))
    }
}

/// No limit is longer: sums and products of limits fit.
const MAX_BYTES: usize = 1 << 40;

impl Selection {
    /// The table with the limits in `text`, a value of `DL_COMM_SELECTION`: `name=bytes`, with commas between them. Bytes
    /// may end with `K`, `M` or `G`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown or repeated name, or bytes that are no number.
    pub fn parse(text: &str) -> Result<Selection> {
        let mut selection = Selection::default();
        let mut set = [false; ROWS.len()];
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, bytes) = part.split_once('=').map_or((part, ""), |(name, bytes)| (name.trim(), bytes.trim()));
            let Some(row) = ROWS.iter().position(|row| row.name == name) else {
                let names: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
                return Err(Error::Invalid(format!("'{name}' is no limit; these are {}", names.join(", "))));
            };
            if std::mem::replace(&mut set[row], true) {
                return Err(Error::Invalid(format!("'{name}' is set twice")));
            }
            selection.0[row] = parse_bytes(bytes).ok_or_else(|| {
                Error::Invalid(format!(
                    "{name} is '{bytes}'; set it to bytes, such as 0, 4096, 64K or 1M, at most 1024G"
                ))
            })?;
        }
        Ok(selection)
    }

    /// The limits that are not those of the table, as [`Selection::parse`] takes them.
    pub fn text(&self) -> String {
        let differing = ROWS.iter().zip(self.0).filter(|(row, bytes)| row.bytes != *bytes);
        differing.map(|(row, bytes)| format!("{}={bytes}", row.name)).collect::<Vec<_>>().join(",")
    }

    /// The limit in bytes.
    pub fn limit(&self, limit: Limit) -> usize {
        self.0[limit as usize]
    }

    /// With another limit.
    #[must_use]
    pub fn with(mut self, limit: Limit, bytes: usize) -> Selection {
        self.0[limit as usize] = bytes.min(MAX_BYTES);
        self
    }

    /// The most ranks of a host that read each other's flags.
    pub fn flat_notices(&self, cpus_per_rank: usize) -> usize {
        self.limit(if cpus_per_rank == 0 { Limit::NoticesFlatSharedCpus } else { Limit::NoticesFlat })
    }

    /// The limits of the calls of a group.
    pub fn host_limits(&self, group: GroupShape) -> HostLimits {
        let GroupShape { hosts, ranks, channels, slot, cpus_per_rank, keeps_bits } = group;
        if hosts > 1 {
            let fused = if keeps_bits { self.limit(Limit::HostsFused) } else { 0 };
            let alone = if cpus_per_rank == 0 { Limit::OwnerAloneSharedCpus } else { Limit::OwnerAlone };
            return HostLimits { fused, owner_alone: self.limit(alone), ..HostLimits::NONE };
        }
        // With more channels the limits are lower, because several threads could share a larger call.
        let read = |limit| self.limit(limit) / ranks.saturating_sub(1).max(1) / channels;
        let (one_round, measured) = match cpus_per_rank {
            0 => (Limit::ReduceOneRoundSharedCpus, None),
            _ if ranks == 1 => (Limit::ReduceOneRound, None),
            _ => (Limit::ReduceOneRound, Some(read(Limit::ReduceMeasured) + 1)),
        };
        let limits = |one_round: usize, measured: Option<usize>| PathLimits { one_round: Some(one_round), measured };
        HostLimits {
            reductions: limits(read(one_round).min(slot), measured),
            reduce_scatters: limits(self.limit(Limit::ReduceScatterOneRound) / ranks, None),
            broadcasts: limits(self.limit(Limit::BroadcastOneRound), Some(self.limit(Limit::BroadcastMeasured))),
            blocks: limits(self.limit(Limit::BlocksOneRound) / ranks, Some(self.limit(Limit::BlocksMeasured))),
            ..HostLimits::NONE
        }
    }
}

fn parse_bytes(text: &str) -> Option<usize> {
    let units = [('K', 10), ('M', 20), ('G', 30)];
    let with_unit = units.into_iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)));
    let (digits, shift) = with_unit.unwrap_or((text, 0));
    digits.parse::<usize>().ok()?.checked_mul(1 << shift).filter(|&bytes| bytes <= MAX_BYTES)
}

/// What the limits of a group depend on; the same on all ranks.
#[derive(Debug, Clone, Copy)]
pub struct GroupShape {
    /// The number of hosts.
    pub hosts: usize,
    /// The number of ranks on this host.
    pub ranks: usize,
    /// The most channels that a call uses.
    pub channels: usize,
    /// Bytes of a slot.
    pub slot: usize,
    /// Processors of each rank; 0: some share one.
    pub cpus_per_rank: usize,
    /// Whether between hosts the bits of a sum do not depend on the position of an element.
    pub keeps_bits: bool,
}

/// At which lengths calls on one host take another path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostLimits {
    /// Of an allreduce or reduce.
    pub reductions: PathLimits,
    /// Of a reduce-scatter.
    pub reduce_scatters: PathLimits,
    /// Of a broadcast or barrier.
    pub broadcasts: PathLimits,
    /// Of the others, which move blocks.
    pub blocks: PathLimits,
    /// Between hosts: bytes of started allreduces that travel together.
    pub fused: usize,
    /// Between hosts: bytes of a slice that the owner of its shard reduces alone.
    pub owner_alone: usize,
}

impl HostLimits {
    /// Between hosts: no call takes one round, nothing is measured, and only owners of shards reduce.
    pub const NONE: HostLimits = {
        let none = PathLimits { one_round: None, measured: None };
        let (fused, owner_alone) = (0, MAX_BYTES);
        HostLimits { reductions: none, reduce_scatters: none, broadcasts: none, blocks: none, fused, owner_alone }
    };

    /// Those of the calls of `op`.
    pub fn of(&self, op: Op) -> PathLimits {
        match (op.pattern(), op.collective.reduces) {
            (Pattern::Line, true) => self.reductions,
            (Pattern::Line, false) => self.broadcasts,
            (_, true) => self.reduce_scatters,
            (_, false) => self.blocks,
        }
    }
}

/// The limits of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathLimits {
    /// Bytes of the line, or of a block, of the longest call that may take one round.
    pub one_round: Option<usize>,
    /// Bytes of the line, or of all blocks, of the shortest call for which the ranks measure which of two paths is faster.
    pub measured: Option<usize>,
}

/// Whether a call may run in place, from tensor to tensor, where ranks can access each other's: between hosts only an
/// allreduce does.
pub(super) fn may_run_in_place(op: Op, hosts: usize) -> bool {
    hosts == 1 || op.is_allreduce()
}

/// The algorithm between hosts of a chunk of a call; `fastest`: that of a line by the model of the network.
pub(super) fn between_hosts(op: Op, setting: AlgorithmSetting, fastest: impl FnOnce() -> Algorithm) -> Algorithm {
    match setting {
        // Blocks are whole on one host.
        _ if op.pattern() != Pattern::Line => Algorithm::Pairwise,
        AlgorithmSetting::Always(algorithm) => algorithm,
        AlgorithmSetting::Auto => fastest(),
    }
}

/// While fewer chunks of a channel are under way between hosts, a new one is packed first.
pub(super) const MIN_CHUNKS_UNDER_WAY: usize = 2;

/// The most bytes of a shard in more chunks between `hosts` hosts: three of 512 KiB between two, and one more while the hosts,
/// whose exchanges take more latencies, double. If eight are under way, the buffers of their messages leave the nearest caches,
/// and 32 MiB take 1.7 times as long between two hosts whose processors are the limit.
pub(super) fn max_bytes_under_way(hosts: usize) -> usize {
    (2 + hosts.max(1).ilog2() as usize) << 19
}

/// The number of chunks with `bytes` for a shard that are under way on a channel between `hosts` hosts.
pub(super) fn chunks_under_way(hosts: usize, bytes: usize) -> usize {
    (max_bytes_under_way(hosts) / bytes.max(1)).clamp(MIN_CHUNKS_UNDER_WAY, NETWORK_WINDOW)
}

/// Chunks per channel of a large call.
const CHUNKS: usize = 2;
/// The same of a broadcast: the root fills slots while the others empty them, and the first and the last chunk do not
/// overlap.
const BROADCAST_CHUNKS: usize = 8;
/// The same on device memory, so that download, reduction and upload overlap.
const DEVICE_CHUNKS: usize = 4;
/// Minimum size of a chunk; for smaller chunks another channel costs more than it gains.
const MIN_CHUNK_BYTES: usize = 64 << 10;
/// Minimum size of a chunk between GPU and host; smaller copies do not reach the bandwidth of the bus.
const MIN_DEVICE_CHUNK_BYTES: usize = 256 << 10;

/// Bytes of a chunk of the line, or of each block, of a call with `channels` channels. `total`: the bytes of the whole;
/// `None`: the ranks do not know each other's. `max`: what fits a slot.
pub(super) fn chunk_bytes(op: Op, total: Option<usize>, limits: PathLimits, channels: usize, max: usize) -> usize {
    match total {
        Some(total) if limits.one_round.is_none_or(|longest| total > longest) => {
            let chunks = if op.is_broadcast() { BROADCAST_CHUNKS } else { CHUNKS };
            share(total, chunks * channels).clamp(MIN_CHUNK_BYTES.min(max), max)
        }
        _ => max,
    }
}

/// The same between GPU and host. Smaller calls get smaller chunks, so that copies and reductions overlap on every
/// channel.
pub(super) fn device_chunk_bytes(total: usize, channels: usize, max: usize) -> usize {
    share(total, DEVICE_CHUNKS * channels).clamp(MIN_DEVICE_CHUNK_BYTES.min(max), max)
}

fn share(total: usize, chunks: usize) -> usize {
    total.div_ceil(chunks).next_multiple_of(ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce::ReduceOp;

    const TWO: GroupShape =
        GroupShape { hosts: 1, ranks: 2, channels: 1, slot: 512 << 10, cpus_per_rank: 1, keeps_bits: true };

    fn limits(group: GroupShape, op: Op) -> (Option<usize>, Option<usize>) {
        let PathLimits { one_round, measured } = Selection::default().host_limits(group).of(op);
        (one_round, measured)
    }

    #[test]
    fn rows_are_in_the_order_of_the_limits() {
        for (index, row) in ROWS.iter().enumerate() {
            assert_eq!(row.limit as usize, index, "{}", row.name);
            assert_eq!(Selection::default().with(row.limit, 1).text(), format!("{}=1", row.name));
        }
    }

    #[test]
    fn reductions_take_one_round_by_what_a_rank_reads() {
        assert_eq!(limits(TWO, Op::MEAN), (Some(128 << 10), Some((8 << 10) + 1)));
        assert_eq!(limits(TWO, Op::reduce(ReduceOp::Sum, 1)), (Some(128 << 10), Some((8 << 10) + 1)));
        let five = GroupShape { ranks: 5, channels: 2, ..TWO };
        assert_eq!(limits(five, Op::MEAN), (Some(16 << 10), Some((1 << 10) + 1)));
        assert_eq!(limits(GroupShape { ranks: 1, ..TWO }, Op::MEAN), (Some(128 << 10), None));
        assert_eq!(limits(GroupShape { cpus_per_rank: 0, ..TWO }, Op::MEAN), (Some(512 << 10), None));
        assert_eq!(limits(GroupShape { slot: 4096, ..TWO }, Op::MEAN), (Some(4096), Some((8 << 10) + 1)));
    }

    #[test]
    fn moves_take_one_round_by_all_that_a_rank_holds() {
        let four = GroupShape { ranks: 4, channels: 3, cpus_per_rank: 0, ..TWO };
        assert_eq!(limits(four, Op::broadcast(1)), (Some(64 << 10), Some(16 << 10)));
        for op in [Op::ALLGATHER, Op::ALLTOALL, Op::gather(0), Op::scatter(0)] {
            assert_eq!(limits(four, op), (Some(32 << 10), Some(16 << 10)));
        }
        assert_eq!(limits(four, Op::reduce_scatter(ReduceOp::Sum)), (Some(32 << 10), None));
    }

    #[test]
    fn between_hosts_no_call_takes_one_round() {
        assert_eq!(limits(GroupShape { hosts: 2, ..TWO }, Op::MEAN), (None, None));
        assert_eq!(limits(GroupShape { hosts: 2, ..TWO }, Op::BARRIER), (None, None));
        let auto = || Algorithm::Doubling;
        let always = AlgorithmSetting::Always(Algorithm::Ring);
        assert_eq!(between_hosts(Op::MEAN, AlgorithmSetting::Auto, auto), Algorithm::Doubling);
        assert_eq!(between_hosts(Op::broadcast(0), always, auto), Algorithm::Ring);
        assert_eq!(between_hosts(Op::ALLGATHER, always, auto), Algorithm::Pairwise);
    }

    #[test]
    fn longer_chunks_and_fewer_hosts_have_fewer_chunks_under_way() {
        let chunks =
            |hosts: usize| [0, 4 << 10, 256 << 10, 512 << 10, 8 << 20].map(|bytes| chunks_under_way(hosts, bytes));
        assert_eq!(chunks(2), [8, 8, 6, 3, 2]);
        assert_eq!(chunks(5), [8, 8, 8, 4, 2]);
        assert_eq!(chunks(64), [8, 8, 8, 8, 2]);
    }

    #[test]
    fn long_calls_are_cut_for_their_channels() {
        let limits = Selection::default().host_limits(TWO);
        let chunk = |op: Op, total| chunk_bytes(op, total, limits.of(op), 2, 512 << 10);
        assert_eq!(chunk(Op::MEAN, Some(128 << 10)), 512 << 10, "one chunk");
        assert_eq!(chunk(Op::MEAN, Some((128 << 10) + 64)), 64 << 10);
        assert_eq!(chunk(Op::MEAN, Some(1 << 20)), 256 << 10);
        assert_eq!(chunk(Op::MEAN, Some(1 << 30)), 512 << 10);
        assert_eq!(chunk(Op::broadcast(0), Some(4 << 20)), 256 << 10);
        assert_eq!(chunk(Op::ALLTOALL, None), 512 << 10, "lengths that only pairs of ranks know");
        assert_eq!(device_chunk_bytes(1 << 20, 1, 2 << 20), 256 << 10);
        assert_eq!(device_chunk_bytes(1 << 30, 1, 2 << 20), 2 << 20);
        assert_eq!(device_chunk_bytes(1 << 30, 1, 4096), 4096);
    }

    #[test]
    fn a_text_sets_limits() {
        let selection = Selection::parse(" reduce.one_round = 64K,blocks.measured=1M, ipc.one_shot=0,").unwrap();
        assert_eq!(selection.limit(Limit::ReduceOneRound), 64 << 10);
        assert_eq!(selection.text(), "reduce.one_round=65536,blocks.measured=1048576,ipc.one_shot=0");
        assert_eq!(Selection::parse(&selection.text()), Ok(selection));
        assert_eq!(Selection::parse(""), Ok(Selection::default()));
        assert_eq!(Selection::default().text(), "");
        for (text, named) in [
            ("reduce", "'reduce' is no limit; these are reduce.measured, "),
            ("reduce.one_round", "reduce.one_round is ''; set it to bytes"),
            ("nccl.fused=-1", "nccl.fused is '-1'"),
            ("nccl.fused=1T", "nccl.fused is '1T'"),
            ("nccl.fused=1025G", "nccl.fused is '1025G'"),
            ("nccl.fused=1.5K", "nccl.fused is '1.5K'"),
            ("nccl.fused=99999999999999999999", "nccl.fused is '9999"),
            ("nccl.fused=18446744073709551615M", "nccl.fused is '1844"),
            ("nccl.fused=1,nccl.fused=2", "'nccl.fused' is set twice"),
        ] {
            let error = Selection::parse(text).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
