//! The order in which the calls of a process start on a GPU: that of their submission, whatever their groups.
//!
//! A GPU may run the work of several streams in the order in which it got it (with one hardware queue it does). Work of
//! NCCL waits for that of other ranks. So two ranks that start the calls of two groups in different orders would wait for
//! each other. Therefore each call takes a place when it is submitted, and starts when no call has a place before it.
//!
//! Within a group the calls start in the order in which its ranks agree on them, which may be another one: the call that
//! is agreed on next uses the first place of its group that is free.
//!
//! Invariant: no thread waits for its turn. Whoever brings a launch, leaves it here if calls before it have not come, and
//! the thread that brings the last of these runs it. So agreements never wait for launches, and all calls that all ranks
//! have submitted are agreed on, in whatever order each rank has submitted them. Then every place before them gets its
//! launch or is given up, and all launches run. If all ranks submit their common calls in the same order, the GPUs run
//! them: the first call in that order that some GPU has not run is the first one on each of its GPUs.
//!
//! Ranks that submit in different orders break NCCL's rule, and may never agree on a call before those behind it have
//! run: one waits for the second call before it makes the first. Where a GPU has several queues, as usual, launches then
//! overtake the calls that have not come ([`LaunchOrder::overtake`]). With one queue they must not: the ranks do not know
//! of each other whether they do. They wait until the deadline.
//!
//! A place is given up when its call ends without a launch: an error, a deadline, a call that takes another path. The
//! launches of a group that has failed run at once, out of turn: they fail.
//! Thread rule: any thread. Launches run one at a time.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use crate::lock::lock;

/// Starts a call on the GPU. It must not panic.
pub type Launch = Box<dyn FnOnce() + Send>;

/// The calls that have not started on a GPU.
#[derive(Default)]
pub struct LaunchOrder {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    places: VecDeque<Entry>,
    /// The group whose launch runs now, and the thread.
    running: Option<(u64, ThreadId)>,
}

struct Entry {
    group: u64,
    /// `None` until the call is agreed on.
    launch: Option<Launch>,
}

impl State {
    /// The first place of a group without a launch.
    fn free(&self, group: u64) -> Option<usize> {
        self.places.iter().position(|entry| entry.group == group && entry.launch.is_none())
    }
}

/// The place of a submitted call. Dropping it gives it up.
pub struct Place {
    order: Arc<LaunchOrder>,
    group: u64,
    used: bool,
}

impl Place {
    /// The last place, for a call of the group with this number.
    pub fn new(order: &Arc<LaunchOrder>, group: u64) -> Place {
        lock(&order.state).places.push_back(Entry { group, launch: None });
        Place { order: Arc::clone(order), group, used: false }
    }

    /// Runs `launch`, and those behind it, or leaves it to the thread that brings what is missing before it. The calls of
    /// a group come in the same order on all ranks.
    pub fn launch(mut self, launch: Launch) {
        self.used = true;
        let mut state = lock(&self.order.state);
        // There is one: each call that is not agreed on has one.
        match state.free(self.group) {
            Some(place) => state.places[place].launch = Some(launch),
            None => state.places.push_back(Entry { group: self.group, launch: Some(launch) }),
        }
        drop(state);
        self.order.run();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.used {
            return;
        }
        let mut state = lock(&self.order.state);
        if let Some(place) = state.free(self.group) {
            state.places.remove(place);
        }
        drop(state);
        self.order.run();
    }
}

impl LaunchOrder {
    /// Runs the launches whose turn it is, unless another thread does.
    fn run(&self) {
        let mut state = lock(&self.state);
        while state.running.is_none() {
            let next = state.places.front_mut().and_then(|entry| Some((entry.group, entry.launch.take()?)));
            let Some((group, launch)) = next else { break };
            state.places.pop_front();
            state.running = Some((group, thread::current().id()));
            drop(state);
            launch();
            state = lock(&self.state);
            state.running = None;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Runs the launches of a group that has failed, out of turn.
    pub fn cancel(&self, group: u64) {
        let mut cancelled = Vec::new();
        let mut state = lock(&self.state);
        let places = std::mem::take(&mut state.places);
        for entry in places {
            match entry {
                Entry { launch: Some(launch), .. } if entry.group == group => cancelled.push(launch),
                entry => state.places.push_back(entry),
            }
        }
        drop(state);
        cancelled.into_iter().for_each(|launch| launch());
        self.run();
    }

    /// Runs the launches up to the first of `group`, before calls that have not come. False if there is none.
    pub fn overtake(&self, group: u64) -> bool {
        let mut state = lock(&self.state);
        let is_first = |entry: &Entry| entry.group == group && entry.launch.is_some();
        let Some(last) = state.places.iter().position(is_first) else { return false };
        let behind = state.places.split_off(last + 1);
        let (launches, missing): (Vec<Entry>, Vec<Entry>) =
            state.places.drain(..).partition(|entry| entry.launch.is_some());
        state.places.extend(launches.into_iter().chain(missing).chain(behind));
        drop(state);
        self.run();
        true
    }

    /// Waits until all launches of a group have run. Does nothing in a launch.
    pub fn wait(&self, group: u64) {
        let state = lock(&self.state);
        if state.running.is_some_and(|(_, thread)| thread == thread::current().id()) {
            return;
        }
        let waits = |state: &mut State| {
            state.running.is_some_and(|(running, _)| running == group)
                || state.places.iter().any(|entry| entry.group == group && entry.launch.is_some())
        };
        drop(self.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// A launch that sends `number`.
    fn sends(number: u32, sender: &Sender<u32>) -> Launch {
        let sender = sender.clone();
        Box::new(move || sender.send(number).unwrap())
    }

    #[test]
    fn launches_run_in_the_order_of_their_places() {
        let (order, (sender, ran)) = (Arc::new(LaunchOrder::default()), channel());
        let place = |group| Place::new(&order, group);
        let (one, two, three) = (place(1), place(2), place(3));
        three.launch(sends(3, &sender));
        two.launch(sends(2, &sender));
        assert!(ran.try_recv().is_err(), "the first has not come");
        one.launch(sends(1, &sender));
        assert_eq!(ran.try_iter().collect::<Vec<_>>(), [1, 2, 3]);
        // One that is given up does not hold the others up.
        let (one, two) = (place(1), place(2));
        two.launch(sends(2, &sender));
        drop(one);
        assert_eq!(ran.try_iter().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn a_group_uses_its_places_in_the_order_of_its_agreements() {
        let (order, (sender, ran)) = (Arc::new(LaunchOrder::default()), channel());
        let (first, other, second) = (Place::new(&order, 1), Place::new(&order, 2), Place::new(&order, 1));
        // The ranks agree on the second call first.
        second.launch(sends(12, &sender));
        assert_eq!(ran.try_iter().collect::<Vec<_>>(), [12]);
        first.launch(sends(11, &sender));
        other.launch(sends(2, &sender));
        assert_eq!(ran.try_iter().collect::<Vec<_>>(), [2, 11]);
    }

    #[test]
    fn the_launches_of_a_failed_group_run_at_once() {
        let (order, (sender, ran)) = (Arc::new(LaunchOrder::default()), channel());
        let (blocking, failed, later) = (Place::new(&order, 1), Place::new(&order, 2), Place::new(&order, 3));
        failed.launch(sends(2, &sender));
        later.launch(sends(3, &sender));
        order.cancel(2);
        order.wait(2);
        assert_eq!(ran.try_iter().collect::<Vec<_>>(), [2]);
        drop(blocking);
        assert_eq!(ran.try_iter().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn launches_overtake_calls_that_have_not_come() {
        let (order, (sender, ran)) = (Arc::new(LaunchOrder::default()), channel());
        let [missing, two, three, four] = [1, 2, 3, 4].map(|group| Place::new(&order, group));
        assert!(!order.overtake(3));
        four.launch(sends(4, &sender));
        three.launch(sends(3, &sender));
        two.launch(sends(2, &sender));
        assert!(order.overtake(3));
        assert_eq!(ran.try_iter().collect::<Vec<_>>(), [2, 3]);
        missing.launch(sends(1, &sender));
        assert_eq!(ran.try_iter().collect::<Vec<_>>(), [1, 4]);
    }

    #[test]
    fn one_thread_runs_the_launches_that_others_bring_meanwhile() {
        let (order, (sender, ran)) = (Arc::new(LaunchOrder::default()), channel());
        let places: Vec<Place> = (0..100).map(|number| Place::new(&order, number)).collect();
        thread::scope(|scope| {
            for (number, place) in (0..100).zip(places) {
                let launch = sends(number, &sender);
                scope.spawn(move || place.launch(launch));
            }
        });
        (0..100).for_each(|group| order.wait(group));
        assert_eq!(ran.try_iter().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
    }
}
