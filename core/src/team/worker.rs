//! The threads of a team: the lead, which takes the calls in order, and the helpers, which take their share of long ones.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use super::Shared;
use super::call::Call;
use super::callers::ThreadId;
use crate::collective::lineup::{Age, Decision, List, Pending};
use crate::collective::{Account, Channel};
use crate::error::{Error, Result, guard};
use crate::say::say;
use crate::transport::Patience;
use crate::transport::patience::Asked;

/// The longest that the lead looks away from the other ranks while calls are lined up.
const LONGEST_NAP: Duration = Duration::from_millis(20);
/// How much sooner a call is given up when nothing else can come.
const SOONER: u32 = 30;

/// One thread of a team and its channel.
pub(super) struct Worker {
    pub shared: Arc<Shared>,
    pub index: usize,
    pub channels: usize,
    pub rank: usize,
    pub channel: Channel,
}

/// The calls that the lead has been given and not carried out.
struct Queue<'a> {
    receiver: &'a Receiver<Arc<Call>>,
    calls: VecDeque<Arc<Call>>,
    /// When the last one came.
    arrived: Instant,
    /// Whether the lead had nothing to do when the first came.
    idle: bool,
    closed: bool,
}

impl Queue<'_> {
    /// Waits for a call when there is none; false when there is none and none can come.
    fn wait(&mut self) -> bool {
        self.idle = false;
        if self.calls.is_empty() {
            let call = self.receiver.try_recv().or_else(|_| {
                self.idle = true;
                self.receiver.recv()
            });
            match call {
                Ok(call) => self.calls.push_back(call),
                Err(_) => return false,
            }
        }
        true
    }

    /// Takes what has been submitted.
    fn take(&mut self) {
        loop {
            match self.receiver.try_recv() {
                Ok(call) => self.push(call),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.closed = true;
                    return;
                }
            }
        }
    }

    /// Waits up to `nap` for a further call; whether one came.
    fn nap(&mut self, nap: Duration) -> bool {
        match self.receiver.recv_timeout(nap) {
            Ok(call) => self.push(call),
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => {
                self.closed = true;
                thread::sleep(nap);
                return false;
            }
        }
        true
    }

    fn push(&mut self, call: Arc<Call>) {
        self.calls.push_back(call);
        self.arrived = Instant::now();
    }

    /// Puts the calls with the signatures `order` first, in that order.
    fn reorder(&mut self, order: &[u64]) {
        let mut first = VecDeque::with_capacity(self.calls.len());
        for &signature in order {
            let place = self.calls.iter().position(|call| call.job.signature == signature);
            first.extend(place.and_then(|place| self.calls.remove(place)));
        }
        self.calls.iter().for_each(|call| call.moves_up());
        first.append(&mut self.calls);
        self.calls = first;
    }
}

impl Worker {
    /// Carries out the calls that `receiver` gets until it closes.
    pub fn lead(mut self, receiver: &Receiver<Arc<Call>>, helpers: &[Sender<Arc<Call>>]) {
        let mut queue = Queue { receiver, calls: VecDeque::new(), arrived: Instant::now(), idle: true, closed: false };
        while queue.wait() {
            let call = Arc::clone(&queue.calls[0]);
            call.record.start(queue.idle);
            match self.attempt(&call, |channel, call, patience| channel.first(&call.job, patience)) {
                Ok(true) => {
                    queue.calls.pop_front();
                    let result = self.spread(&call, helpers);
                    call.finish(result);
                }
                Ok(false) => self.line_up(&mut queue),
                Err(error) => {
                    queue.calls.pop_front();
                    call.finish(Err(error));
                }
            }
        }
    }

    /// Carries out this thread's share of the calls of `queue` until it closes.
    pub fn help(mut self, queue: &Receiver<Arc<Call>>) {
        while let Ok(call) = queue.recv() {
            let result = self.share(&call);
            call.finish(result);
        }
    }

    /// Carries out what is left of a call that the ranks have matched.
    fn spread(&mut self, call: &Arc<Call>, helpers: &[Sender<Arc<Call>>]) -> Result<()> {
        call.record.matched(self.shared.matched.fetch_add(1, Ordering::Relaxed) + 1);
        if call.job.plan.chunks() == 1 {
            return Ok(());
        }
        // Helper h takes the chunks h, h + channels, ...
        let helped = helpers.len().min(call.job.plan.chunks() - 1);
        call.split(helped);
        for helper in &helpers[..helped] {
            if helper.send(Arc::clone(call)).is_err() {
                call.finish(Err(Error::Internal("a thread of the team has ended".into())));
            }
        }
        self.share(call)
    }

    /// The chunks of this thread but the first of all.
    fn share(&mut self, call: &Arc<Call>) -> Result<()> {
        let (index, channels) = (self.index, self.channels);
        self.attempt(call, |channel, call, patience| {
            let chunks = (index..call.job.plan.chunks()).step_by(channels).filter(|&chunk| chunk > 0);
            channel.rest(&call.job, chunks, patience)
        })
    }

    /// The ranks met with different calls: brings those that all have to the front of the queue, or gives one up, once it
    /// is known which.
    fn line_up(&mut self, queue: &mut Queue<'_>) {
        let mut nap = Duration::from_millis(1);
        loop {
            queue.take();
            let list = self.list(queue);
            let head = Arc::clone(&queue.calls[0]);
            let decision = self.attempt(&head, |channel, _, patience| {
                let decision = channel.line_up(&list, patience)?;
                if decision == Decision::Wait {
                    // The rounds themselves do not wait for what is missing.
                    let counterpart = || "its counterpart on ranks that called something else".to_owned();
                    patience.check(Duration::ZERO, &counterpart)?;
                }
                Ok(decision)
            });
            match decision {
                Ok(Decision::Run(order)) => return queue.reorder(&order),
                Ok(Decision::GiveUp(places)) => return self.give_up(queue, places[self.rank]),
                Ok(Decision::Wait) => {
                    nap = if queue.nap(nap) { Duration::from_millis(1) } else { (2 * nap).min(LONGEST_NAP) };
                }
                Err(error) => {
                    queue.calls.pop_front();
                    return head.finish(Err(error));
                }
            }
        }
    }

    /// What this rank tells of its calls.
    fn list(&self, queue: &Queue<'_>) -> List {
        let shared = &self.shared;
        // Before the deadline, so that what differs is told rather than that time is up.
        let within = |call: &Call| {
            call.timeout.map_or(shared.settings.match_within, |timeout| shared.settings.match_within.min(timeout / 3))
        };
        let pending = |call: &Arc<Call>| Pending {
            signature: call.job.signature,
            key: call.job.key(),
            age: match call.alone_since().elapsed() {
                alone if alone > within(call) => Age::Stale,
                alone if alone > within(call) / SOONER => Age::Ripe,
                _ => Age::Fresh,
            },
        };
        let quiet = queue.arrived.max(queue.calls[0].alone_since()).elapsed();
        let nothing_more = || {
            let waiting: Vec<ThreadId> = queue.calls.iter().filter_map(|call| call.thread).collect();
            queue.closed || (waiting.len() == queue.calls.len() && shared.callers.all_wait(&waiting))
        };
        let settled = quiet > within(&queue.calls[0]) / SOONER && nothing_more();
        List { calls: queue.calls.iter().map(pending).collect(), settled }
    }

    /// Gives up the call at `place`, or, without one, hears about the calls that others give up.
    fn give_up(&mut self, queue: &mut Queue<'_>, place: Option<usize>) {
        let head = Arc::clone(&queue.calls[0]);
        let given_up = place.and_then(|place| queue.calls.remove(place));
        let account = match &given_up {
            Some(call) => Account::Call(&call.job),
            None => Account::None(format!("nothing that matches; it waits for {}", head.job.title())),
        };
        let told = self.attempt::<()>(&head, |channel, _, patience| Err(channel.explain(&account, patience)));
        if let (Some(call), Err(error)) = (given_up, told) {
            call.finish(Err(error));
        }
    }

    /// Runs `work` unless the team has failed; ends the team when its failure leaves the ranks out of step.
    fn attempt<T>(
        &mut self,
        call: &Arc<Call>,
        work: impl FnOnce(&mut Channel, &Call, &Patience<'_>) -> Result<T>,
    ) -> Result<T> {
        let shared = &self.shared;
        if let Some(error) = shared.failure() {
            return Err(error);
        }
        let stalled = |words: &str| {
            say(words);
            (shared.alarm)(words);
        };
        let asked =
            Asked { describe: &|| call.job.brief(), interrupted: &|| shared.interrupted(call), stalled: &stalled };
        let (log, warn) = (&call.record.log, shared.settings.stall_warn);
        let patience = Patience::new(call.record.submitted, call.timeout, warn, &call.warned, log, &asked);
        let channel = &mut self.channel;
        let result = guard(|| work(channel, call, &patience));
        if let Err(error) = &result
            && !error.is_recoverable()
        {
            shared.fail(error);
        }
        result
    }
}
