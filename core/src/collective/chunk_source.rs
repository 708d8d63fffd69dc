//! The chunks that a channel runs between hosts, in their order: of one call, or of several.
//!
//! Thread rule: that of [`super::Channel`].

use super::call::Call;
use super::lookahead::Lookahead;
use super::plan::ChunkPlan;
use crate::transport::WaitContext;

/// A call whose chunks are under way.
#[derive(Clone, Copy)]
pub struct ActiveCall<'a> {
    pub(super) call: &'a Call,
    pub(super) plan: ChunkPlan,
    /// The limits of its waits.
    pub wait_ctx: WaitContext<'a>,
}

impl<'a> ActiveCall<'a> {
    /// A call of one chunk.
    pub fn new(call: &'a Call, wait_ctx: WaitContext<'a>) -> ActiveCall<'a> {
        ActiveCall { call, plan: ChunkPlan { total: call.layout.total(), ..ChunkPlan::default() }, wait_ctx }
    }
}

/// A chunk that can begin.
#[derive(Debug, Clone, Copy)]
pub struct NextChunk {
    /// The number of its call in the source.
    pub call: usize,
    /// Its index in the call.
    pub chunk: usize,
    /// Whether the ranks compare their calls: for the first chunk of a call.
    pub compares: bool,
}

/// Chunks in their order; `Channel::drive` runs them.
pub trait ChunkSource {
    /// The next chunk.
    fn next(&self) -> Option<NextChunk>;

    /// The next chunk begins. Returns what this rank has behind its call, if the ranks compare their calls.
    fn begin(&mut self) -> Lookahead;

    /// A call that has chunks which have not ended.
    fn call(&self, number: usize) -> ActiveCall<'_>;

    /// The oldest chunk, of call `number`, has ended. If the ranks have compared their calls, all of them have this one and
    /// the `ahead` calls behind it.
    fn ended(&mut self, number: usize, ahead: usize);
}

/// The chunks of one call.
pub(super) struct ChunksOf<'a, I> {
    pub active: ActiveCall<'a>,
    /// The next one.
    pub next: Option<usize>,
    /// Those after it.
    pub others: I,
    /// Whether the ranks compare their calls.
    pub compares: bool,
}

impl<I: Iterator<Item = usize>> ChunkSource for ChunksOf<'_, I> {
    fn next(&self) -> Option<NextChunk> {
        self.next.map(|chunk| NextChunk { call: 0, chunk, compares: self.compares })
    }

    fn begin(&mut self) -> Lookahead {
        self.next = self.others.next();
        Lookahead::default()
    }

    fn call(&self, _number: usize) -> ActiveCall<'_> {
        self.active
    }

    fn ended(&mut self, _number: usize, _ahead: usize) {}
}
