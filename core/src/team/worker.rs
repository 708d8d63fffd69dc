//! The threads of a team: the lead, which takes the calls in order, and the helpers, which take their share of long ones.
//!
//! To lead is a role, on a [`Seat`]: a caller that waits for its call anyway takes it while nobody else has it and no call is
//! queued, and carries the call out itself, which spares it two changes of threads. The other ranks cannot tell.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use super::Shared;
use super::call::Call;
use super::device::OnDevice;
use super::elsewhere::Elsewhere;
use super::short::{Begun, Templates};
use crate::buffer::View;
use crate::collective::device::Stager;
use crate::collective::{Carrier, Channel, Job, Op, Shown};
use crate::error::{Error, Result, guard};
use crate::say::say;
use crate::transport::Patience;
use crate::transport::patience::Asked;

/// One thread of a team and its channel.
pub(super) struct Worker {
    pub shared: Arc<Shared>,
    pub index: usize,
    pub rank: usize,
    pub carrier: Carrier,
    pub channel: Channel,
    /// For calls on device memory that go through the host, once there was one.
    pub stager: Option<Stager>,
}

/// What the team's calls go through, one after the other.
pub(super) struct Seat {
    lead: Mutex<Lead>,
    /// Calls that were enqueued and have not ended.
    queued: AtomicUsize,
}

/// What who leads has.
struct Lead {
    worker: Worker,
    helpers: Vec<Sender<Arc<Call>>>,
    /// A call that its caller could not carry out, because the ranks called different things. It comes before all others.
    left: Option<Arc<Call>>,
    templates: Templates,
    /// For calls on device memory, once there was one.
    device: Option<OnDevice>,
    closed: bool,
}

/// Something for the thread that leads.
pub(super) enum Note {
    /// A call.
    Call(Arc<Call>),
    /// A call was left in the seat.
    Left,
    /// Other ranks wait long in a step for which there is no call here.
    Attend,
}

/// The seat in the hands of a caller.
pub(super) struct Held<'a> {
    seat: &'a Seat,
    lead: MutexGuard<'a, Lead>,
}

/// A short call that other ranks are to be waited for, and what was shown of it.
pub(super) type Rest = (Box<Job>, Shown);

/// The calls that the lead has been given and not carried out.
pub(super) struct Queue<'a> {
    receiver: &'a Receiver<Note>,
    pub calls: VecDeque<Arc<Call>>,
    /// When the last one came.
    pub arrived: Instant,
    /// Whether the lead had nothing to do when the first came.
    idle: bool,
    /// Other ranks wait long in a step.
    attends: bool,
    pub closed: bool,
}

impl Queue<'_> {
    /// Waits for a note when there is no call; false when there is none and none can come.
    fn wait(&mut self) -> bool {
        self.idle = false;
        if self.calls.is_empty() {
            let note = self.receiver.try_recv().or_else(|_| {
                self.idle = true;
                self.receiver.recv()
            });
            match note {
                Ok(note) => self.push(note),
                Err(_) => return false,
            }
        }
        true
    }

    /// Takes what has been submitted.
    pub fn take(&mut self) {
        loop {
            match self.receiver.try_recv() {
                Ok(note) => self.push(note),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.closed = true;
                    return;
                }
            }
        }
    }

    /// Waits up to `nap` for a further call; whether one came.
    pub fn nap(&mut self, nap: Duration) -> bool {
        match self.receiver.recv_timeout(nap) {
            Ok(note) => self.push(note),
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => {
                self.closed = true;
                thread::sleep(nap);
                return false;
            }
        }
        true
    }

    fn push(&mut self, note: Note) {
        match note {
            Note::Call(call) => self.calls.push_back(call),
            Note::Left => {}
            Note::Attend => self.attends = true,
        }
        self.arrived = Instant::now();
    }

    /// Puts the calls with the signatures `order` first, in that order.
    pub fn reorder(&mut self, order: &[u64]) {
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

impl Seat {
    /// A seat with channel 0 and the threads that help.
    pub fn new(worker: Worker, helpers: Vec<Sender<Arc<Call>>>) -> Seat {
        let lead = Lead { worker, helpers, left: None, templates: Templates::default(), device: None, closed: false };
        Seat { lead: Mutex::new(lead), queued: AtomicUsize::new(0) }
    }

    /// The seat for a caller that waits, if nobody has it and nothing is queued.
    pub fn take(&self) -> Option<Held<'_>> {
        if self.queued.load(Ordering::Acquire) > 0 {
            return None;
        }
        let lead = match self.lead.try_lock() {
            Ok(lead) => lead,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        (!lead.closed).then_some(Held { seat: self, lead })
    }

    /// Counts a call that is about to be queued.
    pub fn enqueue(&self) {
        self.queued.fetch_add(1, Ordering::Release);
    }

    /// Carries out the calls that `receiver` gets until it closes; then nobody takes the seat any more.
    pub fn serve(&self, receiver: &Receiver<Note>) {
        let (calls, arrived) = (VecDeque::new(), Instant::now());
        let mut queue = Queue { receiver, calls, arrived, idle: true, attends: false, closed: false };
        while queue.wait() {
            let ended = self.lock().turn(&mut queue);
            // The next caller finds the seat free.
            if let Some((call, result)) = ended {
                self.queued.fetch_sub(1, Ordering::Release);
                call.finish(result);
            }
        }
        let mut lead = self.lock();
        lead.closed = true;
        lead.helpers.clear(); // which ends their threads
        let left = lead.left.take();
        drop(lead);
        if let Some(call) = left {
            call.finish(Err(Error::State("the team has ended".into())));
        }
    }

    /// Lets go of channel 0's way to other hosts, and of GPUs; the helpers' have gone with their threads.
    pub fn let_go(&self, failed: bool) {
        let mut lead = self.lock();
        lead.worker.channel.leave_hosts(failed);
        lead.worker.stager = None;
        lead.device = None;
    }

    fn lock(&self) -> MutexGuard<'_, Lead> {
        self.lead.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held<'_> {
    /// Begins a short call, submitted at `since` if it is timed: `Ok(None)` when that was all, what is left of it when other ranks are to
    /// be waited for. `None` when it has to go another way; an error has ended the team.
    pub fn begin(
        &mut self,
        op: Op,
        name: &str,
        views: &[View<'_>],
        since: Option<Instant>,
    ) -> Option<Result<Option<Rest>>> {
        let Lead { worker, templates, .. } = &mut *self.lead;
        let Worker { shared, channel, .. } = worker;
        let begun = guard(|| {
            Ok(templates.begin(channel, op, name, views).map(|begun| match begun {
                Begun::Ended(kind) => {
                    shared.recorder.short(kind, shared.match_one(), since);
                    None
                }
                Begun::Goes(job, shown) => Some((job, shown)),
            }))
        });
        if let Err(error) = &begun {
            shared.fail(error);
        }
        begun.transpose()
    }

    /// Carries `call` out on this thread, what was `shown` of it already included. False when the thread that leads must see
    /// to it: the call was left in the seat.
    pub fn carry(mut self, call: &Arc<Call>, shown: Option<Shown>) -> bool {
        let first = match shown {
            None => self.lead.first(call, true),
            Some(shown) => {
                call.record.start(true);
                self.lead.worker.attempt(call, |channel, call, patience| channel.taken(&call.job, shown, patience))
            }
        };
        let result = match first {
            Ok(true) => {
                self.lead.keep(call);
                self.lead.spread(call)
            }
            Ok(false) => {
                self.lead.left = Some(Arc::clone(call));
                self.seat.enqueue();
                return false;
            }
            Err(error) => Err(error),
        };
        drop(self);
        call.finish(result);
        true
    }
}

impl Lead {
    /// Deals with the first call of `queue`; returns it when this thread's part of it has ended.
    fn turn(&mut self, queue: &mut Queue<'_>) -> Option<(Arc<Call>, Result<()>)> {
        if let Some(call) = self.left.take() {
            queue.calls.push_front(call);
            return self.worker.line_up(queue, None, Elsewhere::new(&self.worker.shared));
        }
        // A note may tell of what was seen to before it was read.
        let attends = std::mem::take(&mut queue.attends);
        let Some(call) = queue.calls.front().cloned() else {
            return if attends { self.attend(queue) } else { None };
        };
        match self.first(&call, queue.idle) {
            Ok(true) => {
                queue.calls.pop_front();
                let result = self.spread(&call);
                Some((call, result))
            }
            Ok(false) => self.worker.line_up(queue, None, Elsewhere::new(&self.worker.shared)),
            Err(error) => {
                queue.calls.pop_front();
                Some((call, Err(error)))
            }
        }
    }

    /// Takes part without a call in the step in which other ranks wait long, and in the reconciliation that follows.
    fn attend(&mut self, queue: &mut Queue<'_>) -> Option<(Arc<Call>, Result<()>)> {
        let shared = Arc::clone(&self.worker.shared);
        shared.awaited_step()?;
        // Before the others can see this rank: what follows on other teams is noticed.
        shared.attends.store(true, Ordering::Release);
        let elsewhere = Elsewhere::new(&shared);
        let job = Job::absent(self.worker.carrier);
        let absent = job.map(|job| Arc::new(Call::absent(job, Arc::clone(&shared.recorder))));
        let ended = match absent.and_then(|absent| Ok((self.first(&absent, true)?, absent))) {
            Ok((false, absent)) => self.worker.line_up(queue, Some(&absent), elsewhere),
            // The others had no call either; or the team has failed, or ends.
            Ok((true, _)) | Err(_) => None,
        };
        shared.attends.store(false, Ordering::Release);
        ended
    }

    /// The first chunk of `call`; false when the ranks called different things.
    fn first(&mut self, call: &Arc<Call>, at_once: bool) -> Result<bool> {
        call.record.start(at_once);
        self.worker.attempt(call, |channel, call, patience| match call.job.producer() {
            None => channel.first(&call.job, patience),
            // Nothing of the data moves before all ranks are known to have called the same.
            Some(_) => channel.first(&call.job.header(), patience),
        })
    }

    /// Keeps the job of `call` for short calls like it, if it is one.
    fn keep(&mut self, call: &Call) {
        let Lead { worker, templates, .. } = self;
        if call.job.is_repeatable() && call.job.is_short() {
            templates.keep(&call.job, || worker.shared.recorder.kind(&call.record));
        }
    }

    /// Carries out what is left of a call that the ranks have matched.
    fn spread(&mut self, call: &Arc<Call>) -> Result<()> {
        let Lead { worker, helpers, device, .. } = self;
        call.record.matched(worker.shared.match_one());
        if call.job.producer().is_some() {
            if OnDevice::carry(device, worker, call)? {
                return Ok(());
            }
        } else if call.job.plan.chunks() == 1 {
            return Ok(());
        }
        call.direct.store(worker.channel.is_direct(), Ordering::Relaxed);
        // Helper h takes the chunks h, h + channels, ...
        let helped = (call.job.channels() - 1).min(call.job.plan.chunks() - 1);
        call.split(helped);
        for helper in &helpers[..helped] {
            if helper.send(Arc::clone(call)).is_err() {
                call.finish(Err(Error::Internal("a thread of the team has ended".into())));
            }
        }
        worker.share(call)
    }
}

impl Worker {
    /// Carries out this thread's share of the calls of `queue` until it closes.
    pub fn help(mut self, queue: &Receiver<Arc<Call>>) {
        while let Ok(call) = queue.recv() {
            let result = self.share(&call);
            call.finish(result);
        }
    }

    /// The chunks of this thread but the first of all.
    fn share(&mut self, call: &Arc<Call>) -> Result<()> {
        if call.job.producer().is_some() {
            return self.share_on_device(call);
        }
        let (index, channels) = (self.index, call.job.channels());
        self.attempt(call, |channel, call, patience| {
            let chunks = (index..call.job.plan.chunks()).step_by(channels).filter(|&chunk| chunk > 0);
            channel.rest(&call.job, chunks, call.direct.load(Ordering::Relaxed), patience)
        })
    }

    /// Runs `work` unless the team has failed; ends the team when its failure leaves the ranks out of step.
    pub fn attempt<T>(
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
