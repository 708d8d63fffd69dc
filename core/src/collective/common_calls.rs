//! The calls that all ranks have, and the order in which they can run. Pure.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::pending_calls::{Age, PendingCall, PendingCalls};

/// Calls that match one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stream {
    /// Those of one name, which match by name.
    Name(u64),
    /// Others that are equal.
    Signature(u64),
}

impl PendingCall {
    fn stream(&self) -> Stream {
        if self.by_name { Stream::Name(self.key) } else { Stream::Signature(self.signature) }
    }
}

/// A call that all ranks have: its position in each list.
type CommonCall = Vec<usize>;

/// What the ranks can do about their calls.
pub(super) enum Found {
    /// Run the calls with these signatures in this order.
    Common(Vec<u64>),
    /// The calls at these positions have one name and different contents.
    Different(Vec<usize>),
    /// The call at these positions is the first that cannot run: with others that all ranks have, it needs contrary orders
    /// on some ranks.
    Contrary(Vec<usize>),
}

/// The calls that can run, or that cannot match whatever comes; `None` if there are none yet.
pub(super) fn find(lists: &[&PendingCalls]) -> Option<Found> {
    if let Some(positions) = conflict(lists, true) {
        return Some(Found::Different(positions));
    }
    match order(lists, common_calls(lists)) {
        Ok(order) if order.is_empty() => None,
        Ok(order) => Some(Found::Common(order)),
        Err(positions) => Some(Found::Contrary(positions)),
    }
}

/// By rank, the position of a call whose name all ranks have with different signatures: of calls that match by name, or of
/// others that have waited for a while.
pub(super) fn conflict(lists: &[&PendingCalls], by_name: bool) -> Option<Vec<usize>> {
    let is_one = |call: &PendingCall| call.by_name == by_name && call.key != 0 && (by_name || call.age != Age::New);
    let first_of_each = |list: &&PendingCalls| {
        let calls = list.calls.iter().enumerate().rev().filter(|(_, call)| is_one(call));
        calls.map(|(position, call)| (call.key, position)).collect::<HashMap<u64, usize>>()
    };
    let firsts: Vec<HashMap<u64, usize>> = lists.iter().map(first_of_each).collect();
    let differ = |positions: &CommonCall| {
        let calls = || lists.iter().zip(positions).map(|(list, &position)| &list.calls[position]);
        let signatures: HashSet<u64> = calls().map(|call| call.signature).collect();
        signatures.len() > 1 && !calls().any(|call| call.by_pairs != 0 && signatures.contains(&call.by_pairs))
    };
    let names = lists.first()?.calls.iter().filter(|call| is_one(call)).map(|call| call.key);
    let positions = |name: u64| firsts.iter().map(|first| first.get(&name).copied()).collect::<Option<CommonCall>>();
    names.filter_map(positions).find(differ)
}

/// The calls that all ranks have, in the order of rank 0: the first of each name, as many as are the same; and of the
/// other calls those at the front.
fn common_calls(lists: &[&PendingCalls]) -> Vec<CommonCall> {
    let in_order = |list: &&PendingCalls| -> Vec<u64> {
        list.calls.iter().filter(|call| !call.by_name).map(|call| call.signature).collect()
    };
    let prefix = common_prefix(&lists.iter().map(in_order).collect::<Vec<_>>());
    let by_stream = |list: &&PendingCalls| {
        let (mut streams, mut others) = (HashMap::<Stream, Vec<usize>>::new(), 0);
        for (position, call) in list.calls.iter().enumerate() {
            others += usize::from(!call.by_name);
            if call.by_name || others <= prefix {
                streams.entry(call.stream()).or_default().push(position);
            }
        }
        streams
    };
    let streams: Vec<HashMap<Stream, Vec<usize>>> = lists.iter().map(by_stream).collect();
    let mut found: HashMap<Stream, usize> = HashMap::new();
    let mut common = Vec::new();
    for (position, call) in lists.first().into_iter().flat_map(|list| list.calls.iter().enumerate()) {
        let index = found.entry(call.stream()).or_insert(0);
        let place = |streams: &HashMap<Stream, Vec<usize>>| streams.get(&call.stream())?.get(*index).copied();
        let Some(places) = streams.iter().map(place).collect::<Option<CommonCall>>() else { continue };
        let is_same = |(list, &place): (&&PendingCalls, &usize)| list.calls[place].signature == call.signature;
        if places[0] == position && lists.iter().zip(&places).all(is_same) {
            *index += 1;
            common.push(places);
        }
    }
    common
}

/// The smallest number of calls at the front of all lists that are the same up to order; 0 if there is none.
fn common_prefix(lists: &[Vec<u64>]) -> usize {
    let Some((first, others)) = lists.split_first() else { return 0 };
    // For each other rank: by signature, its count minus that of the first rank, without zeros.
    let mut surplus: Vec<HashMap<u64, i64>> = vec![HashMap::new(); others.len()];
    let count = |surplus: &mut HashMap<u64, i64>, signature: u64, by: i64| {
        let entry = surplus.entry(signature).or_insert(0);
        *entry += by;
        if *entry == 0 {
            surplus.remove(&signature);
        }
    };
    for (position, &signature) in first.iter().enumerate() {
        for (surplus, other) in surplus.iter_mut().zip(others) {
            let Some(&of_other) = other.get(position) else { return 0 };
            count(surplus, of_other, 1);
            count(surplus, signature, -1);
        }
        if surplus.iter().all(HashMap::is_empty) {
            return position + 1;
        }
    }
    0
}

/// The calls of one rank that have not been chosen, by the memory that they share.
struct Memory<'a> {
    calls: &'a [PendingCall],
    left: HashMap<u32, BTreeSet<usize>>,
}

impl<'a> Memory<'a> {
    fn new(list: &&'a PendingCalls) -> Memory<'a> {
        let mut left = HashMap::<u32, BTreeSet<usize>>::new();
        for (position, call) in list.calls.iter().enumerate().filter(|(_, call)| call.memory != 0) {
            left.entry(call.memory).or_default().insert(position);
        }
        Memory { calls: &list.calls, left }
    }

    /// The calls that the one at `position` must follow.
    fn before(&self, position: usize) -> impl Iterator<Item = usize> {
        let call = &self.calls[position];
        let left = self.left.get(&call.memory).filter(|_| call.stays_behind);
        left.into_iter().flat_map(move |left| left.range(..position).copied())
    }

    fn choose(&mut self, position: usize) {
        if let Some(left) = self.left.get_mut(&self.calls[position].memory) {
            left.remove(&position);
        }
    }
}

/// The order in which the `common` calls run: that of rank 0, as far as calls need not stay behind others. Without those
/// behind a call that some rank lacks.
///
/// # Errors
/// The first call that the others keep from running, because the ranks need contrary orders.
fn order(lists: &[&PendingCalls], common: Vec<CommonCall>) -> Result<Vec<u64>, CommonCall> {
    let first = |call: &CommonCall| &lists[0].calls[call[0]];
    if !lists.iter().any(|list| list.calls.iter().any(|call| call.stays_behind)) {
        return Ok(common.iter().map(|call| first(call).signature).collect());
    }
    let mut memories: Vec<Memory<'_>> = lists.iter().map(Memory::new).collect();
    let (mut left, mut order) = (common, Vec::new());
    loop {
        let (number, mut held) = (left.len(), HashSet::new());
        left.retain(|call| {
            let is_free = |(memory, &position): (&Memory<'_>, &usize)| memory.before(position).next().is_none();
            let runs = !held.contains(&first(call).stream()) && memories.iter().zip(call).all(is_free);
            if runs {
                order.push(first(call).signature);
                memories.iter_mut().zip(call).for_each(|(memory, &position)| memory.choose(position));
            } else {
                held.insert(first(call).stream());
            }
            !runs
        });
        if left.len() == number {
            break;
        }
    }
    // What waits for a call that some rank lacks is not contrary.
    loop {
        let (number, mut held) = (left.len(), HashSet::new());
        let here = |rank: usize| left.iter().map(|call| call[rank]).collect::<HashSet<usize>>();
        let all: Vec<HashSet<usize>> = (0..lists.len()).map(here).collect();
        left.retain(|call| {
            let waits = |(rank, &position): (usize, &usize)| {
                memories[rank].before(position).any(|before| !all[rank].contains(&before))
            };
            let waits = held.contains(&first(call).stream()) || call.iter().enumerate().any(waits);
            if waits {
                held.insert(first(call).stream());
            }
            !waits
        });
        if left.len() == number {
            return left.into_iter().next().map_or(Ok(order), Err);
        }
    }
}
