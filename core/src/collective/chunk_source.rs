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
    /// A call whose chunks run as `plan` says.
    pub fn new(call: &'a Call, plan: ChunkPlan, wait_ctx: WaitContext<'a>) -> ActiveCall<'a> {
        ActiveCall { call, plan, wait_ctx }
    }
}

/// A chunk that can begin.
#[derive(Debug, Clone, Copy)]
pub struct NextChunk {
    /// The number of its call in the source.
    pub call: usize,
    /// Its index in the call.
    pub chunk: usize,
    /// Whether it is the first one of its call.
    pub is_first: bool,
    /// Whether the ranks compare their calls: in the first chunk of a call that not all of them are known to have.
    pub compares: bool,
}

/// Chunks in their order; `Channel::drive` runs them.
pub trait ChunkSource {
    /// The next chunk.
    fn next(&self) -> Option<NextChunk>;

    /// The next chunk begins. Returns what this rank has behind its call.
    fn begin(&mut self) -> Lookahead;

    /// The ranks of the host know whether the other chunks of call `number` are in place.
    fn set_in_place(&mut self, number: usize, in_place: bool);

    /// A call that has chunks which have not ended.
    fn call(&self, number: usize) -> ActiveCall<'_>;

    /// The oldest chunk, of call `number`, has ended. All ranks have this call and the `ahead` calls behind it, or more.
    fn ended(&mut self, number: usize, ahead: usize);
}

/// The chunks of one call.
pub(super) struct ChunksOf<'a, I> {
    pub active: ActiveCall<'a>,
    /// The next one.
    pub next: Option<usize>,
    /// Those after it.
    pub others: I,
    /// Whether the next one is the first of the call, in which the ranks compare their calls.
    pub compares: bool,
}

impl<I: Iterator<Item = usize>> ChunkSource for ChunksOf<'_, I> {
    fn next(&self) -> Option<NextChunk> {
        self.next.map(|chunk| NextChunk { call: 0, chunk, is_first: self.compares, compares: self.compares })
    }

    fn begin(&mut self) -> Lookahead {
        self.next = self.others.next();
        Lookahead::default()
    }

    fn set_in_place(&mut self, _number: usize, in_place: bool) {
        self.active.plan.zero_copy = in_place;
    }

    fn call(&self, _number: usize) -> ActiveCall<'_> {
        self.active
    }

    fn ended(&mut self, _number: usize, _ahead: usize) {}
}
