//! Settings of a group's calls. Plain data.

use super::blocks::Compartments;
use super::selection::HostLimits;
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
    /// At which lengths its calls on one host take another path.
    pub limits: HostLimits,
    /// Whether floating-point sums are float64.
    pub acc_f64: bool,
}

impl CallConfig {
    /// The settings of group `key`, with `channels` channels and slots of `slot` bytes. No call takes one round, and sums of
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
            limits: HostLimits::NONE,
            acc_f64: false,
        }
    }
}
