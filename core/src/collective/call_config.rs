//! Settings of a group's calls. Plain data.

use super::blocks::Compartments;
use crate::group_key::GroupKey;
use crate::topology::Topology;

/// Settings of a group's calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallConfig {
    /// The group's key.
    pub key: GroupKey,
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// The number of channels.
    pub channels: usize,
    /// The most channels that a call uses.
    pub max_channels: usize,
    /// Size of a slot in bytes.
    pub slot: usize,
    /// How blocks share a slot.
    pub compartments: Compartments,
    /// Largest allreduce or reduce, in bytes, that may run in one round; 0 with several hosts, where no call does.
    pub small_max: usize,
    /// From this size on the ranks measure whether one round is faster than slices.
    pub timed_min: usize,
    /// Bytes of all blocks of the largest other call that runs in one round.
    pub small_blocks_max: usize,
    /// Whether floating-point sums are float64.
    pub acc_f64: bool,
}

impl CallConfig {
    /// The settings of group `key`, with `channels` channels and slots of `slot` bytes. No call is small, and sums of
    /// float32 are float32.
    pub fn new(topology: &Topology, key: GroupKey, channels: usize, slot: usize) -> CallConfig {
        CallConfig {
            key,
            rank: topology.rank(),
            ranks: topology.size(),
            channels,
            max_channels: channels,
            slot,
            compartments: Compartments::new(topology),
            small_max: 0,
            timed_min: usize::MAX,
            small_blocks_max: 0,
            acc_f64: false,
        }
    }
}
