//! The settings of a group. Plain data.

use std::time::Duration;

use crate::collective::device::DeviceSettings;
use crate::collective::{AlgorithmSetting, Selection};
use crate::deadline::Deadline;

/// The settings of a group. The ranks must agree on all but the times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupConfig {
    /// Number of threads, each with its own channel.
    pub threads: usize,
    /// How long a thread without calls stays; `None`: until the group ends.
    pub idle_timeout: Option<Duration>,
    /// Size of a slot in bytes, a multiple of [`crate::wire_layout::ALIGN`]; `None`: by the numbers of ranks and channels.
    pub slot: Option<usize>,
    /// Whether floating-point sums are float64.
    pub acc_f64: bool,
    /// Algorithm between hosts.
    pub algorithm: AlgorithmSetting,
    /// At which lengths calls take another path.
    pub selection: Selection,
    /// Settings for calls on device memory.
    pub device: DeviceSettings,
    /// Deadline of a call.
    pub timeout: Deadline,
    /// Wait after which a warning names the stragglers.
    pub stall_warn: Option<Duration>,
    /// How long differing calls wait for a counterpart; a thirtieth of it if every caller is already blocked.
    pub match_timeout: Duration,
}

impl GroupConfig {
    /// All settings on which the ranks must agree, as text.
    pub fn agreement(&self) -> String {
        let slot = self.slot.map_or("the default size".to_owned(), |bytes| format!("{bytes} bytes"));
        let mut text = format!(
            "{} threads, prec_level {}, slots of {}, the algorithm {} between hosts, the path {} and \
             chunks of {} bytes for GPUs",
            self.threads,
            u8::from(self.acc_f64),
            slot,
            self.algorithm.name(),
            self.device.path.name(),
            self.device.chunk
        );
        if self.selection != Selection::default() {
            text += ", the limits ";
            text += &self.selection.text();
        }
        text
    }
}
