//! Matching of calls after a mismatch of signatures: decides from all ranks' pending calls what to run next.
//!
//! Each rank sends its pending calls in submission order, and all ranks decide the same from the same lists
//! ([`decide`]). There are two kinds of calls:
//! - Calls that match by name ([`PendingCall::by_name`]) match wherever they stand; those of one name in their order.
//! - Of the others, none is skipped: a later one would match that of another training step. If the first of them are the
//!   same on all ranks except for their order, they run.
//!
//! What runs, runs in the order of rank 0, but a call that shares memory with one before it on any rank stays behind that
//! one. So submitting the same calls in different order costs only this exchange. A call fails if the ranks need contrary
//! orders.
//!
//! Calls that differ only in whether they name a length for each pair of ranks take the form that does
//! ([`Reconciliation::ByPairs`]). That form has one signature for all lengths, so it is the second choice.
//!
//! A call without a counterpart waits until none can come. Then every rank fails a call, with an error that lists each
//! rank's call:
//! - early, if all ranks have a call of one name but with different contents: by name at once, others after a while
//!   ([`Age::Conflicting`]), because they may match in another order;
//! - if no rank expects further calls ([`FurtherCalls::Settled`]), or a call that does not match by name has waited too long
//!   ([`Age::Expired`]): the oldest of these on each rank, or else one name. A rank drops a call by name at its deadline,
//!   without the others.
//!
//! A rank that waits in another group participates with an empty list, which detects ranks that wait for each other in
//! different groups. Then nothing fails while any rank computes, because that rank may just be slow.
//! [`PendingCalls::quiet`] covers only this group's callers, so it counts only if all lists have calls.
//!
//! A rank may have refused a call because of its arguments ([`PendingCalls::refused`]). It may make the call again, properly.
//! If it has none that matches, the calls that the others have in its place fail after a while.
//!
//! A rank may have joined ([`PendingKind::Join`]): it has no more data. The common calls of the other ranks then run
//! one by one, and it contributes zeros to them ([`Reconciliation::StandIn`]), until all have joined. So did Horovod's
//! `join`.
//!
//! The protocol is optimistic: only different signatures start it. Horovod's coordinator (Sergeev and Del Balso, 2018)
//! negotiates every tensor instead. Pure; no I/O.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::common_calls::{Found, conflict, find};
use super::pending_calls::MAX_HEADER_BYTES;
pub use super::pending_calls::{Age, FurtherCalls, PendingCall, PendingCalls, PendingKind};

/// The status of a rank, reported to ranks that wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankStatus {
    /// Whether it has joined.
    pub joined: bool,
    /// Whether the rank waits for calls of this group.
    pub calls: bool,
    /// Whether more calls can come.
    pub further_calls: FurtherCalls,
    /// Whether it has refused a call.
    pub refused: bool,
}

impl RankStatus {
    fn of(list: &PendingCalls) -> RankStatus {
        let PendingCalls { further_calls, refused, .. } = *list;
        RankStatus { joined: list.has_joined(), calls: !list.calls.is_empty(), further_calls, refused }
    }

    /// The status as text for messages.
    pub fn describe(self) -> &'static str {
        match self {
            RankStatus { joined: true, .. } => "has joined",
            RankStatus { calls: true, .. } => "waits in a different call",
            RankStatus { further_calls: FurtherCalls::Busy, .. } => "has made no such call and computes",
            RankStatus { further_calls: FurtherCalls::Open | FurtherCalls::Settled, .. } => {
                "has made no such call and waits in another team"
            }
            RankStatus { further_calls: FurtherCalls::Closed, .. } => "has made no such call and has called finalize",
        }
    }
}

/// The common decision of all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reconciliation {
    /// Run the calls with these signatures in this order; a repeated signature runs that often.
    Run(Vec<u64>),
    /// Run the call with this signature; the ranks that have joined contribute zeros.
    StandIn(u64),
    /// Give the calls that have this signature by pairs that form, and decide again.
    ByPairs(u64),
    /// Fail the calls at these positions, by rank: they do not match.
    Fail(Vec<Option<usize>>),
    /// Fail the calls at these positions, by rank: those without have refused theirs.
    Refused(Vec<Option<usize>>),
    /// Fail the call at these positions, by rank: with calls on the same memory, it needs contrary orders.
    Contrary(Vec<Option<usize>>),
    /// Decide again after new calls; the current status by rank.
    Wait(Vec<RankStatus>),
}

/// The decision for `lists`, by rank.
pub fn decide(lists: &[PendingCalls]) -> Reconciliation {
    let all: Vec<&PendingCalls> = lists.iter().collect();
    let of_all = |positions: Vec<usize>| positions.into_iter().map(Some).collect();
    match find(&all) {
        Some(Found::Common(order)) => return Reconciliation::Run(order),
        Some(Found::Different(positions)) => return Reconciliation::Fail(of_all(positions)),
        Some(Found::Contrary(positions)) => return Reconciliation::Contrary(of_all(positions)),
        None => {}
    }
    if let Some(signature) = common_by_pairs(lists) {
        return Reconciliation::ByPairs(signature);
    }
    if let Some(positions) = refused(lists) {
        return Reconciliation::Refused(positions);
    }
    if let Some(positions) = conflict(&all, false) {
        return Reconciliation::Fail(of_all(positions));
    }
    if let Some(decision) = decide_for_joined(lists) {
        return decision;
    }
    let closed = |list: &PendingCalls| list.calls.is_empty() && list.further_calls == FurtherCalls::Closed;
    let expired = |list: &PendingCalls| list.calls.iter().any(|call| call.age == Age::Expired);
    let several_groups = lists.iter().any(|list| list.calls.is_empty());
    let settled = |list: &PendingCalls| {
        matches!(list.further_calls, FurtherCalls::Settled | FurtherCalls::Closed) || !several_groups && list.quiet
    };
    let busy = several_groups && lists.iter().any(|list| list.further_calls == FurtherCalls::Busy);
    if lists.iter().any(closed) || !busy && (lists.iter().any(expired) || lists.iter().all(settled)) {
        return Reconciliation::Fail(unmatched(lists));
    }
    Reconciliation::Wait(lists.iter().map(RankStatus::of).collect())
}

/// For calls by name that some rank lacks: the key of the name, and some of these ranks.
pub type Lacking = Vec<(u64, Vec<usize>)>;

/// Those of the oldest calls of each rank, in at most `max_bytes` encoded bytes: for the message if their deadline passes.
pub fn lacking(lists: &[PendingCalls], max_bytes: usize) -> Lacking {
    const MAX_RANKS: usize = 16;
    const MAX_ENTRY_BYTES: usize = 11 + 5 * MAX_RANKS;
    let most = max_bytes.saturating_sub(MAX_HEADER_BYTES) / MAX_ENTRY_BYTES;
    let by_name = |list: &PendingCalls| list.calls.iter().filter(|call| call.by_name).map(|call| call.key).collect();
    let names: Vec<Vec<u64>> = lists.iter().map(by_name).collect();
    let sets: Vec<HashSet<u64>> = names.iter().map(|names| names.iter().copied().collect()).collect();
    let without = |name: u64| (0..lists.len()).filter(|&rank| !sets[rank].contains(&name)).take(MAX_RANKS).collect();
    let lacked = |names: &Vec<u64>| {
        let entries = names.iter().map(|&name| (name, without(name)));
        entries.filter(|(_, ranks): &(u64, Vec<usize>)| !ranks.is_empty()).take(most / lists.len()).collect::<Lacking>()
    };
    names.iter().flat_map(lacked).collect()
}

/// What fails if no call has a counterpart: the oldest call of each rank that does not match by name. Without such calls,
/// one name, so that the others may still match: the oldest that some rank lacks, of the rank with the fewest calls, which
/// waits for it.
fn unmatched(lists: &[PendingCalls]) -> Vec<Option<usize>> {
    // A rank that has joined stays while others have calls: these fail, and those that follow may match.
    let others_call = lists.iter().any(|list| !list.calls.is_empty() && !list.has_joined());
    let stays = |list: &PendingCalls| others_call && list.has_joined();
    let in_order = |list: &PendingCalls| list.calls.iter().position(|call| !call.by_name).filter(|_| !stays(list));
    let oldest: Vec<Option<usize>> = lists.iter().map(in_order).collect();
    if oldest.iter().any(Option::is_some) {
        return oldest;
    }
    let names = |list: &PendingCalls| list.calls.iter().map(|call| call.key).collect::<HashSet<u64>>();
    let all: Vec<HashSet<u64>> = lists.iter().map(names).collect();
    let mut callers: Vec<&PendingCalls> = lists.iter().filter(|list| !stays(list)).collect();
    callers.sort_by_key(|list| list.calls.len());
    let calls = || callers.iter().flat_map(|list| &list.calls);
    let lacking = calls().find(|call| all.iter().any(|names| !names.contains(&call.key)));
    let name = lacking.or_else(|| calls().next()).map(|call| call.key);
    lists.iter().map(|list| list.calls.iter().position(|call| Some(call.key) == name)).collect()
}

/// What fails because some ranks have refused their calls: the oldest call of each of the others that does not match by name,
/// if all of these have one that has waited for a while.
fn refused(lists: &[PendingCalls]) -> Option<Vec<Option<usize>>> {
    let instead = |list: &PendingCalls| {
        let position = list.calls.iter().position(|call| !call.by_name)?;
        let call = &list.calls[position];
        (call.kind != PendingKind::Join && call.age != Age::New).then_some(position)
    };
    let (refused, others): (Vec<_>, Vec<_>) = lists.iter().partition(|list| list.refused);
    if refused.is_empty() || others.is_empty() || others.iter().any(|list| instead(list).is_none()) {
        return None;
    }
    Some(lists.iter().map(|list| instead(list).filter(|_| !list.refused)).collect())
}

/// The decision for the ranks that have not joined, if others have and these have a common call or a conflict.
fn decide_for_joined(lists: &[PendingCalls]) -> Option<Reconciliation> {
    let (joined, active): (Vec<&PendingCalls>, Vec<&PendingCalls>) = lists.iter().partition(|list| list.has_joined());
    if joined.is_empty() || active.is_empty() {
        return None;
    }
    let of_active = |positions: Vec<usize>| {
        let mut positions = positions.into_iter();
        let position = |list: &PendingCalls| if list.has_joined() { None } else { positions.next() };
        lists.iter().map(position).collect::<Vec<Option<usize>>>()
    };
    Some(match find(&active).or_else(|| conflict(&active, false).map(Found::Different))? {
        Found::Common(order) => {
            let find = |list: &&PendingCalls| list.calls.iter().position(|call| call.signature == order[0]);
            let positions: Vec<usize> = active.iter().filter_map(find).collect();
            if active[0].calls[positions[0]].kind == PendingKind::TakesZeros {
                return Some(Reconciliation::StandIn(order[0]));
            }
            Reconciliation::Fail(of_active(positions))
        }
        Found::Different(positions) => Reconciliation::Fail(of_active(positions)),
        Found::Contrary(positions) => Reconciliation::Contrary(of_active(positions)),
    })
}

/// The signature of a call by pairs that another call could have.
fn common_by_pairs(lists: &[PendingCalls]) -> Option<u64> {
    let calls = || lists.iter().flat_map(|list| &list.calls);
    let forms: HashSet<u64> = calls().map(|call| call.by_pairs).filter(|&form| form != 0).collect();
    if forms.is_empty() {
        return None;
    }
    calls().map(|call| call.signature).find(|signature| forms.contains(signature))
}

impl Reconciliation {
    /// The decision in about `max_bytes` encoded bytes. Signatures that do not fit are then at the front of all lists
    /// and follow in the next decision. With very many ranks the status of the last ranks is dropped.
    pub fn truncated(mut self, max_bytes: usize) -> Reconciliation {
        let capacity = max_bytes.saturating_sub(MAX_HEADER_BYTES);
        match &mut self {
            Reconciliation::Run(order) => order.truncate((capacity / 10).max(1)),
            Reconciliation::Wait(ranks) => ranks.truncate(capacity / 4),
            Reconciliation::Fail(_)
            | Reconciliation::Contrary(_)
            | Reconciliation::Refused(_)
            | Reconciliation::StandIn(_)
            | Reconciliation::ByPairs(_) => {}
        }
        self
    }
}

#[cfg(test)]
mod tests;
