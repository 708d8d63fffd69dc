//! The watch over a group's calls on a GPU: a thread that polls them until they end.
//!
//! If a rank is lost or the deadline of a call passes, it fails the group and unblocks the GPU's streams, so that no
//! stream waits forever. The calls that are then not complete are lost ([`super::lost`]).
//! Thread rule: any thread may use a [`Monitor`]; it outlives the threads that enqueue the calls.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Once, OnceLock};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::lost::{AtWork, Loss};
use super::state::{GroupState, LOOK_EVERY};
use super::work::Work;
use crate::affinity::unbind;
use crate::collective::device::{StreamRelease, TEARDOWN_TIMEOUT, producer};
use crate::error::{Error, Result};
use crate::log::log_line;
use crate::transport::gpu::{Event, LaunchOrder, has_one_queue};

/// Minimum sleep between two checks, and maximum while a caller is blocked and otherwise.
const MIN_SLEEP: Duration = Duration::from_micros(20);
const MAX_BLOCKING_SLEEP: Duration = Duration::from_micros(200);
const MAX_SLEEP: Duration = Duration::from_millis(10);

/// The thread that polls the calls.
pub(super) struct Monitor {
    /// Closed before the thread is joined.
    queue: Option<Sender<Watched>>,
    streams: Option<Arc<dyn StreamRelease>>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread needs of the group.
struct Watch {
    shared: Arc<GroupState>,
    /// Releases the streams that wait for other ranks, if there are any.
    streams: Option<Arc<dyn StreamRelease>>,
    launches: Arc<LaunchOrder>,
}

/// What has been enqueued of a call.
pub(super) enum Enqueued {
    /// All of it, with the event at its end. The caller gets success.
    All(Event),
    /// All of it, in a GPU graph. Nobody knows when its replays run; only the loss of a rank ends them.
    InGraph,
    /// A part, with the event at its end, if anything. The caller gets an error.
    Part(Option<Event>),
}

/// Where the thread that enqueues a call reports what it has done, once.
pub(super) type Progress = Arc<OnceLock<Enqueued>>;

/// A call on which the ranks have agreed.
struct Watched {
    work: Arc<Work>,
    progress: Progress,
    /// Whether it is known to be lost.
    is_lost: bool,
    _at_work: AtWork,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.work.loss.iter().for_each(Loss::settle);
    }
}

impl Watched {
    fn blocks_host(&self) -> bool {
        self.work.call.producer().is_some_and(|producer| producer.blocks_host())
    }

    /// The group has failed with `error`, and the streams go on without the result of this call.
    fn lose(&mut self, shared: &GroupState, error: &Error) {
        if self.is_lost || !matches!(self.progress.get(), Some(Enqueued::All(_))) {
            return;
        }
        self.is_lost = true;
        // The host gets the error of a call that it waits for.
        if !self.blocks_host() {
            let lost = &shared.recorder.lost;
            let error = lost.add(&self.work.call.full_name(), shared.rank_name(), error);
            self.work.loss.iter().for_each(|loss| loss.set(error.clone()));
        }
    }

    /// Whether the GPU has finished it, or the driver fails.
    fn has_ended(&self) -> bool {
        match self.progress.get() {
            None => false,
            Some(Enqueued::Part(None) | Enqueued::InGraph) => true,
            Some(Enqueued::All(end) | Enqueued::Part(Some(end))) => {
                end.context().push().and_then(|_guard| end.is_complete()).unwrap_or(true)
            }
        }
    }

    fn finish(self, result: Result<()>) {
        if self.blocks_host() {
            self.work.finish(result);
        }
    }
}

impl Monitor {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Error::System`] if the system refuses a thread.
    pub fn start(
        shared: &Arc<GroupState>,
        streams: Option<Arc<dyn StreamRelease>>,
        launches: &Arc<LaunchOrder>,
    ) -> Result<Monitor> {
        let (sender, receiver) = channel();
        let watch = Watch { shared: Arc::clone(shared), streams: streams.clone(), launches: Arc::clone(launches) };
        let builder = Builder::new().name(format!("{}.gpu", shared.config.key.name().thread_label()));
        let spawned = builder.spawn(move || {
            if let Err(error) = unbind() {
                log_line(&error.to_string());
            }
            watch.run(&receiver);
        });
        Ok(Monitor { queue: Some(sender), streams, thread: Some(spawned.map_err(Error::no_thread)?) })
    }

    /// Watches over a call that is enqueued next. If it blocks the host, one of its parts completes with the GPU's work.
    ///
    /// # Errors
    /// [`Error::Internal`] if the thread has ended.
    pub fn watch(&self, work: &Arc<Work>) -> Result<Progress> {
        let (progress, no_monitor) = (Progress::default(), || Error::Internal("nobody watches over the GPU".into()));
        let watched = Watched {
            work: Arc::clone(work),
            progress: Arc::clone(&progress),
            is_lost: false,
            _at_work: AtWork::new(),
        };
        if watched.blocks_host() {
            work.add_parts(1);
        }
        if let (Some(loss), Some(streams)) = (&work.loss, &self.streams) {
            loss.watch(streams);
        }
        let sent = self.queue.as_ref().ok_or_else(no_monitor)?.send(watched);
        sent.map(|()| progress).map_err(|unsent| {
            unsent.0.finish(Err(no_monitor()));
            no_monitor()
        })
    }
}

impl Drop for Monitor {
    /// After the calls have ended.
    fn drop(&mut self) {
        drop(self.queue.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log_line("the watch over a team's GPU panicked");
        }
    }
}

impl Watch {
    /// Polls calls until the GPU has finished them. Once some are in GPU graphs, looks for lost ranks all the time.
    fn run(&self, calls: &Receiver<Watched>) {
        let mut in_graph: Option<String> = None;
        loop {
            let next = match in_graph {
                None => calls.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(_) => calls.recv_timeout(LOOK_EVERY),
            };
            let (error, failed) = match next {
                Ok(watched) => match self.wait(&watched) {
                    Ok(()) => {
                        if matches!(watched.progress.get(), Some(Enqueued::InGraph)) {
                            in_graph.get_or_insert_with(|| watched.work.call.full_name().to_string());
                        }
                        watched.finish(Ok(()));
                        continue;
                    }
                    Err(error) => (error, vec![watched]),
                },
                Err(RecvTimeoutError::Timeout) => {
                    let lost = || self.shared.region.lost_rank();
                    let Some(error) = self.shared.failure().or_else(lost) else { continue };
                    (error, Vec::new())
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            self.shared.fail(&error);
            if let Some(name) = in_graph {
                self.shared.recorder.lost.add(&format!("{name} in a GPU graph"), self.shared.rank_name(), &error);
            }
            return self.drain_failed(failed, calls, &error);
        }
    }

    /// Waits until the GPU has finished a call.
    fn wait(&self, watched: &Watched) -> Result<()> {
        let Watched { work, progress, .. } = watched;
        let _guard = producer(&work.call)?.context().push()?;
        let (since, mut sleep) = (Instant::now(), MIN_SLEEP);
        loop {
            match progress.get() {
                // Another rank may have released this rank's streams.
                Some(Enqueued::All(end)) if end.is_complete()? => {
                    let is_released = self.streams.as_ref().is_some_and(|streams| streams.is_released());
                    return if is_released { Err(self.failure()) } else { Ok(()) };
                }
                Some(Enqueued::InGraph) => return Ok(()),
                Some(Enqueued::Part(_)) => return Err(self.failure()),
                Some(Enqueued::All(_)) | None => {}
            }
            let (shared, has_started) = (&self.shared, progress.get().is_some());
            let is_late = || overdue(work, has_started);
            if let Some(error) = shared.failure().or_else(|| shared.region.lost_rank()).or_else(is_late) {
                return Err(error);
            }
            if !has_started && since.elapsed() > shared.stall_check_after && !has_one_queue() {
                self.overtake(work);
            }
            if !watched.blocks_host() {
                std::thread::sleep(sleep);
                sleep = (2 * sleep).min(MAX_SLEEP);
                continue;
            }
            // The caller waits: it learns of the end at most about an eighth late.
            let pause = (since.elapsed() / 8).min(MAX_BLOCKING_SLEEP);
            if pause < MIN_SLEEP { std::thread::yield_now() } else { std::thread::sleep(pause) }
        }
    }

    /// Lets the call of `work` start before calls of other groups that not all ranks have made.
    fn overtake(&self, work: &Work) {
        static ONCE: Once = Once::new();
        if self.launches.overtake(self.shared.number) {
            ONCE.call_once(|| {
                log_line(&format!(
                    "{} has started on the GPU before a call of another group that this rank has submitted before it, and that some \
                     rank has not made; make the calls of all groups in the same order on all ranks",
                    work.call.full_name()
                ));
            });
        }
    }

    /// The reason why a call has failed, or its stream was released: whoever has seen to that has failed the group first.
    fn failure(&self) -> Error {
        let shared = &self.shared;
        let gone = || Error::PeerLost(format!("another rank has ended {}", shared.config.key.name()));
        shared.failure().or_else(|| shared.region.lost_rank()).unwrap_or_else(gone)
    }

    /// After a failure: unblocks the GPU's streams repeatedly until the group ends, because other ranks may undo it. The
    /// time is unknown: earlier work of the program runs first.
    fn drain_failed(&self, failed: Vec<Watched>, calls: &Receiver<Watched>, error: &Error) {
        let since = Instant::now();
        let mut pending = failed;
        loop {
            pending.extend(calls.try_iter());
            self.launches.cancel(self.shared.number);
            if let Some(streams) = &self.streams {
                // Before the program sees what is left in its tensors.
                pending.iter_mut().for_each(|watched| watched.lose(&self.shared, error));
                streams.release();
            }
            // The caller gets the tensors back once the GPU no longer uses them.
            let is_told = |watched: &Watched| {
                watched.is_lost || self.streams.is_none() || !matches!(watched.progress.get(), Some(Enqueued::All(_)))
            };
            let finished =
                |watched: &Watched| since.elapsed() > TEARDOWN_TIMEOUT || (is_told(watched) && watched.has_ended());
            let (ended, running): (Vec<_>, Vec<_>) = pending.into_iter().partition(finished);
            ended.into_iter().for_each(|watched| watched.finish(Err(error.clone())));
            pending = running;
            match calls.recv_timeout(MAX_SLEEP) {
                Ok(watched) => pending.push(watched),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) if pending.is_empty() => return,
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(MAX_SLEEP),
            }
        }
    }
}

fn overdue(work: &Work, has_started: bool) -> Option<Error> {
    let waited = work.record.submitted.elapsed();
    work.deadline.is_over(waited).then(|| {
        Error::Timeout(format!(
            "{} was not complete on the GPU after {:.1} s ({}){}",
            work.call.full_name(),
            waited.as_secs_f64(),
            work.deadline.set_by,
            if has_started { "" } else { "; it waits for a call of another group that was submitted before it" }
        ))
    })
}
