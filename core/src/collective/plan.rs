//! How the chunks of a call after the first run. Plain data.

use super::call::Call;
use super::path_choice::CallPath;

/// What the first chunk of a call has shown about the others; the same on all ranks of a host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChunkPlan {
    /// Whether all ranks of the host can access the tensors, and the slots hold addresses.
    pub zero_copy: bool,
    /// Whether the first round has completed all chunks.
    pub is_complete: bool,
    /// Bytes of the longest block, or of the line; the same on all ranks.
    pub total: usize,
    /// The path on one host, if the call has a choice.
    pub path: CallPath,
}

impl ChunkPlan {
    /// The plan of `call` between hosts, of which all ranks know the length.
    pub fn between_hosts(call: &Call, zero_copy: bool) -> ChunkPlan {
        ChunkPlan { zero_copy, total: call.layout.total(), ..ChunkPlan::default() }
    }

    /// The number of chunks that run one after the other, the first of which has run.
    pub fn chunks(self, call: &Call) -> usize {
        if self.is_complete { 1 } else { self.all_chunks(call) }
    }

    /// The number of chunks of `call`.
    pub(super) fn all_chunks(self, call: &Call) -> usize {
        self.total.div_ceil(call.layout.chunk_size()).max(1)
    }

    /// Bytes of chunk `chunk` of the longest block.
    pub(super) fn chunk_len(self, call: &Call, chunk: usize) -> usize {
        self.total.saturating_sub(chunk * call.layout.chunk_size()).min(call.layout.chunk_size())
    }
}
