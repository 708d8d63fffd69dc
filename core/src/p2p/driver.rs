//! Who makes progress: one thread at a time, the *driver*. It polls, then sleeps on the bell of this rank. The network
//! between hosts and devices ring no bell: while something waits for them, the driver takes short naps.
//!
//! A thread that waits for a send or receive drives if nobody does; else it waits for its result, or for the driver to
//! leave. If sends or receives are under way and no caller drives, the thread `dlcomm-p2p` does. It leaves as soon as a
//! caller wants to drive, and ends after a second without work.
//! Thread rule: any thread.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::progress::{Short, ShortReceive, State};
use crate::error::{Error, Result, guard};
use crate::lock::lock;
use crate::log::log_line;
use crate::transport::mailbox::header;
use crate::transport::mailbox::memory::MailboxMemory;
use crate::transport::mailbox::notice::MailboxHeader;
use crate::transport::spin::{MIN_SPINS, MaxSpins, Spins, Waiter};

/// Nobody drives.
const NOBODY: u32 = 0;
/// A caller drives.
const CALLER: u32 = 1;
/// The thread drives.
const THREAD: u32 = 2;

/// Polls for a short message before its receive is posted.
const SHORT_SPINS: u32 = 500;
/// Interval at which deadlines and other ranks are checked.
const CHECK_EVERY: Duration = Duration::from_millis(20);
/// A driver that always has something to do reads the clock after this many polls.
const POLLS_PER_CHECK: u32 = 4096;
/// The thread looks this often whether it is needed: most callers wait soon after a start, and then need no thread.
const STANDBY: Duration = Duration::from_millis(1);
/// It looks so often without work before it sleeps until it is woken, which costs the caller a system call.
const LOOKS: u32 = 50;
/// The thread ends after this time without work.
const IDLE: Duration = Duration::from_secs(1);
/// A driver that waits for the network or a device polls so long before its first nap, unless the ranks share processors. A nap
/// delays the answer, so the next wait of the other rank is longer, too: only spins get back to short waits.
const NETWORK_SPIN: Duration = Duration::from_micros(100);
/// Naps of a driver that waits for the network or a device, one after the other; then the last one again.
const NAPS: [Duration; 4] =
    [Duration::from_micros(20), Duration::from_micros(50), Duration::from_micros(100), Duration::from_micros(200)];

/// What the threads share.
pub struct Shared {
    state: Mutex<State>,
    memory: Arc<dyn MailboxMemory>,
    /// Sends and receives under way.
    pub pending: AtomicUsize,
    /// Whether the network has something to send for sends that may have ended.
    sending: AtomicBool,
    /// Whether something waits for the network or a device.
    awaiting: AtomicBool,
    /// Threads that want the state; the driver lets them have it.
    wanting: AtomicUsize,
    driver: AtomicU32,
    /// Whether the thread looks for work.
    awake: AtomicBool,
    /// Callers that wait while another thread drives.
    waiters: AtomicUsize,
    gate: Mutex<Gate>,
    changed: Condvar,
    thread_changed: Condvar,
    /// Polls before a sleep.
    spins: Spins,
    pub closed: AtomicBool,
    /// After a panic.
    broken: OnceLock<Error>,
}

#[derive(Default)]
struct Gate {
    thread: Option<JoinHandle<()>>,
    /// Whether the thread sleeps until it is woken.
    idle: bool,
}

/// The role of the driver, which its end gives back.
struct Driver<'a>(&'a Shared);

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        self.0.driver.store(NOBODY, Ordering::Release);
        self.0.wake_waiters();
    }
}

impl Shared {
    pub fn new(state: State, max_spins: MaxSpins) -> Shared {
        Shared {
            memory: Arc::clone(state.mailbox.memory()),
            state: Mutex::new(state),
            pending: AtomicUsize::new(0),
            sending: AtomicBool::new(false),
            awaiting: AtomicBool::new(false),
            wanting: AtomicUsize::new(0),
            driver: AtomicU32::new(NOBODY),
            awake: AtomicBool::new(false),
            waiters: AtomicUsize::new(0),
            gate: Mutex::default(),
            changed: Condvar::new(),
            thread_changed: Condvar::new(),
            spins: Spins::new(max_spins),
            closed: AtomicBool::new(false),
            broken: OnceLock::new(),
        }
    }

    fn header(&self) -> &MailboxHeader {
        header(&*self.memory, self.memory.me())
    }

    #[inline]
    fn lock_state(&self) -> MutexGuard<'_, State> {
        self.state.try_lock().unwrap_or_else(|_| {
            self.wanting.fetch_add(1, Ordering::Relaxed);
            let state = lock(&self.state);
            self.wanting.fetch_sub(1, Ordering::Relaxed);
            state
        })
    }

    /// Changes the state. A panic is that of the caller; what is under way then ends, because the state may be wrong.
    #[inline]
    fn change<T>(&self, state: &mut MutexGuard<'_, State>, change: impl FnOnce(&mut State) -> T) -> thread::Result<T> {
        let changed = catch_unwind(AssertUnwindSafe(|| change(state)));
        if changed.is_err() {
            self.break_off(state);
        }
        changed
    }

    /// After a panic: ends all sends and receives, and accepts no more.
    #[cold]
    fn break_off(&self, state: &mut State) {
        let error = Error::Internal("sends and receives ended because of a panic; please report its message".into());
        let error = self.broken.get_or_init(|| error);
        let ended = guard(|| {
            state.check(Instant::now(), Some(error));
            Ok(())
        });
        if let Err(second) = ended {
            log_line(&format!("ending the sends and receives after a panic failed: {second}"));
        }
    }

    /// The reason why no send or receive can start, if there is one.
    pub fn broken(&self) -> Option<&Error> {
        self.broken.get()
    }

    /// Changes the state so that there are no results and the network has no more to do.
    #[inline]
    pub fn with_state<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock_state();
        self.change(&mut state, change).unwrap_or_else(|panic| {
            self.give_out(state);
            resume_unwind(panic)
        })
    }

    /// Changes the state, then gives out the results. `new`: sends and receives that `change` starts.
    pub fn with<T>(&self, new: usize, change: impl FnOnce(&mut State) -> T) -> T {
        self.try_with(new, change).unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// As [`Shared::with`], for the driver: a panic has no caller to whom it belongs.
    fn try_with<T>(&self, new: usize, change: impl FnOnce(&mut State) -> T) -> thread::Result<T> {
        if new > 0 {
            self.pending.fetch_add(new, Ordering::SeqCst);
        }
        let mut state = self.lock_state();
        let was_polled = state.must_be_polled();
        let result = self.change(&mut state, change);
        let naps = state.must_be_polled() && !was_polled;
        if (self.give_out(state) || naps) && self.driver.load(Ordering::Relaxed) != NOBODY {
            // The driver may wait for one of the results, or sleep too long.
            self.header().ring_bell();
        }
        result
    }

    /// Unlocks the state and gives out the results, if there are any.
    fn give_out(&self, mut state: MutexGuard<'_, State>) -> bool {
        for (place, value) in [(&self.sending, state.has_open_sends()), (&self.awaiting, state.must_be_polled())] {
            if value != place.load(Ordering::Relaxed) {
                place.store(value, Ordering::SeqCst);
            }
        }
        if state.finished.results.is_empty() {
            return false;
        }
        let mut finished = std::mem::take(&mut state.finished.results);
        drop(state);
        self.pending.fetch_sub(finished.len(), Ordering::Relaxed);
        finished.drain(..).for_each(|(request, result)| request.finish(result));
        self.wake_waiters();
        // Saves an allocation.
        if let Ok(mut state) = self.state.try_lock()
            && state.finished.results.is_empty()
        {
            state.finished.results = finished;
        }
        true
    }

    fn wake_waiters(&self) {
        // Either this load sees the waiter, or the waiter sees the result, or that nobody drives.
        fence(Ordering::SeqCst);
        if self.waiters.load(Ordering::Relaxed) > 0 {
            drop(lock(&self.gate));
            self.changed.notify_all();
        }
    }

    /// Looks once at what has come; returns whether that was anything. For the driver.
    fn poll(&self) -> bool {
        if self.wanting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        let mut state = lock(&self.state);
        let moved = self.look(&mut state);
        self.give_out(state) || moved
    }

    /// Looks at what has come, for the driver.
    fn look(&self, state: &mut MutexGuard<'_, State>) -> bool {
        // After a panic there is something: what was under way has ended.
        self.change(state, State::look).unwrap_or(true)
    }

    /// Receives a short message of local rank `from` that is there or, if the caller `waits`, comes soon, without a
    /// request. `None`: the receive must be posted.
    ///
    /// # Safety
    /// The memory of the receive is valid.
    pub unsafe fn receive_short(&self, from: usize, receive: &ShortReceive<'_>, waits: bool) -> Option<(u32, usize)> {
        // A driver may sleep; and what is under way needs progress.
        if self.driver.load(Ordering::Relaxed) != NOBODY || self.pending.load(Ordering::Relaxed) > 0 {
            return None;
        }
        let mut state = self.state.try_lock().ok().filter(|state| state.matching.is_empty(receive.context))?;
        let polls = if waits { self.spins.get(Waiter::Caller).min(SHORT_SPINS) } else { 1 };
        for _ in 0..polls {
            // SAFETY: guaranteed by the caller.
            let found = self.change(&mut state, |state| unsafe { state.take_short(from, receive) });
            match found.unwrap_or(Short::Other) {
                Short::Taken { tag, bytes } => return Some((tag, bytes)),
                Short::Other => return None,
                Short::NotYet if self.wanting.load(Ordering::Relaxed) > 0 => return None,
                Short::NotYet => std::hint::spin_loop(),
            }
        }
        None
    }

    /// Looks once, unless another thread drives.
    pub fn test(&self) {
        if let Some(_driver) = self.become_driver(CALLER) {
            self.poll();
        }
    }

    /// The role of the driver, if nobody has it.
    fn become_driver(&self, who: u32) -> Option<Driver<'_>> {
        let free = self.driver.compare_exchange(NOBODY, who, Ordering::Acquire, Ordering::Relaxed).is_ok();
        free.then_some(Driver(self))
    }

    /// Polls and sleeps as `waiter` until `ended`; calls `check` about every 20 ms. For the driver.
    fn drive(&self, waiter: Waiter, ended: &dyn Fn() -> bool, check: &dyn Fn()) {
        let mut last_check = None;
        let (mut idle, mut polls, mut naps) = (0, 0u32, 0);
        let mut since = None;
        loop {
            if ended() {
                if let Some(since) = since {
                    self.spins.adapt(waiter, Instant::now().saturating_duration_since(since));
                }
                return;
            }
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(POLLS_PER_CHECK) {
                self.check(&mut last_check, check);
            }
            if self.poll() {
                (idle, since, naps) = (0, None, 0);
            } else if naps == 0 && (idle < self.spins.get(waiter) || self.spins_for_network(since)) {
                idle += 1;
                if idle == MIN_SPINS {
                    since = Some(Instant::now());
                }
                // No yield: it would cost a whole time slice where other programs want the processor.
                std::hint::spin_loop();
            } else {
                let from = *since.get_or_insert_with(Instant::now);
                if self.sleep(ended, NAPS[naps]) {
                    // Only one look between naps.
                    naps = (naps + 1).min(NAPS.len() - 1);
                } else {
                    naps = 0;
                    self.spins.adapt(waiter, from.elapsed());
                }
                (idle, since) = (0, None);
                self.check(&mut last_check, check);
            }
        }
    }

    /// Whether to go on polling, `since` the first polls of this wait.
    fn spins_for_network(&self, since: Option<Instant>) -> bool {
        self.awaiting.load(Ordering::Relaxed)
            && self.spins.is_long()
            && since.is_none_or(|since| since.elapsed() < NETWORK_SPIN)
    }

    /// Checks deadlines and other ranks if it is time, and then calls `check`.
    fn check(&self, last: &mut Option<Instant>, check: &dyn Fn()) {
        let now = Instant::now();
        // The first time would be too early to find anything.
        if now.saturating_duration_since(*last.get_or_insert(now)) >= CHECK_EVERY {
            // After a panic, whose message is on stderr, nothing is left to be checked.
            let _checked = self.try_with(0, |state| state.check(now, None));
            check();
            *last = Some(now);
        }
    }

    /// Sleeps until the bell rings, unless there is something to do. If something waits for the network, it sleeps for
    /// at most `nap` and returns true.
    fn sleep(&self, ended: &dyn Fn() -> bool, nap: Duration) -> bool {
        let header = self.header();
        let (bell, cleared) = header.before_sleep(self.memory.ranks());
        let mut state = lock(&self.state);
        let mut moved = self.look(&mut state);
        for &rank in &cleared {
            moved |= self.change(&mut state, |state| state.look_at(rank)).unwrap_or(true);
        }
        let naps = state.must_be_polled();
        moved |= self.give_out(state);
        if moved {
            cleared.into_iter().for_each(|rank| header.keep_notice(rank));
        } else if !ended() {
            let slept = if naps { header.nap(bell, nap) } else { header.sleep(bell) };
            if let Err(error) = slept {
                log_line(&error.to_string());
                std::thread::sleep(CHECK_EVERY);
            }
        }
        header.after_sleep();
        naps && !moved
    }

    /// Waits until `ended`, and makes progress meanwhile if nobody else does. Calls `check` from time to time.
    pub fn wait(self: &Arc<Shared>, ended: &dyn Fn() -> bool, check: &dyn Fn()) {
        while !ended() {
            if let Some(driver) = self.become_driver(CALLER) {
                self.drive(Waiter::Caller, ended, check);
                drop(driver);
                if self.waiters.load(Ordering::Relaxed) == 0 {
                    self.ensure_thread();
                }
                return;
            }
            self.waiters.fetch_add(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if self.driver.load(Ordering::Relaxed) == THREAD {
                self.header().ring_bell();
            }
            let gate = lock(&self.gate);
            if !ended() && self.driver.load(Ordering::Relaxed) != NOBODY {
                drop(self.changed.wait_timeout(gate, CHECK_EVERY).unwrap_or_else(PoisonError::into_inner));
            } else {
                drop(gate);
            }
            self.waiters.fetch_sub(1, Ordering::Relaxed);
            check();
        }
    }

    /// Whether somebody must make progress.
    fn has_work(&self) -> bool {
        self.pending.load(Ordering::SeqCst) > 0 || self.sending.load(Ordering::SeqCst)
    }

    /// Makes sure that somebody makes progress while sends or receives are under way.
    pub fn ensure_thread(self: &Arc<Shared>) {
        // Either this sees that the thread is about to sleep or end, or the thread sees the work.
        if !self.has_work() || self.awake.load(Ordering::SeqCst) {
            return;
        }
        let mut gate = lock(&self.gate);
        if gate.thread.is_some() {
            if std::mem::take(&mut gate.idle) {
                self.thread_changed.notify_all();
            }
        } else if !self.closed.load(Ordering::Relaxed) {
            let shared = Arc::clone(self);
            match Builder::new().name("dlcomm-p2p".to_owned()).spawn(move || shared.run_thread()) {
                Ok(thread) => {
                    gate.thread = Some(thread);
                    self.awake.store(true, Ordering::SeqCst);
                }
                // Callers that wait make progress themselves.
                Err(error) => log_line(&Error::no_thread(error).to_string()),
            }
        }
    }

    fn run_thread(&self) {
        let mut idle_looks = 0;
        loop {
            let mut gate = lock(&self.gate);
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            let has_work = self.has_work();
            idle_looks = if has_work { 0 } else { idle_looks + 1 };
            if idle_looks > LOOKS {
                self.awake.store(false, Ordering::SeqCst);
                if self.has_work() {
                    self.awake.store(true, Ordering::SeqCst);
                    continue;
                }
                gate.idle = true;
                let (mut gate, waited) =
                    self.thread_changed.wait_timeout(gate, IDLE).unwrap_or_else(PoisonError::into_inner);
                let woken = !std::mem::take(&mut gate.idle);
                if waited.timed_out() && !woken {
                    // The next start makes a new one.
                    drop(gate.thread.take());
                    return;
                }
                self.awake.store(true, Ordering::SeqCst);
                idle_looks = 0;
                continue;
            }
            drop(self.thread_changed.wait_timeout(gate, STANDBY).unwrap_or_else(PoisonError::into_inner));
            let wanted = self.has_work() && self.waiters.load(Ordering::Relaxed) == 0;
            let Some(_driver) = wanted.then(|| self.become_driver(THREAD)).flatten() else { continue };
            let leaves =
                || !self.has_work() || self.waiters.load(Ordering::Relaxed) > 0 || self.closed.load(Ordering::Relaxed);
            self.drive(Waiter::Thread, &leaves, &|| {});
        }
    }

    /// Ends all sends and receives with `error`, and the thread.
    pub fn close(&self, error: &Error) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        self.with(0, |state| state.check(Instant::now(), Some(error)));
        self.header().ring_bell();
        let thread = {
            let mut gate = lock(&self.gate);
            self.thread_changed.notify_all();
            gate.thread.take()
        };
        match thread.map(JoinHandle::join) {
            Some(Err(_)) => Err(Error::Internal("the thread dlcomm-p2p panicked".into())),
            _ => Ok(()),
        }
    }
}
