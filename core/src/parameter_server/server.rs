//! A parameter server: the operations of this rank, in their order, and its end.
//!
//! A blocking operation runs on its caller's thread if no started one is under way. Those that were started run on a
//! thread of this rank, one after the other.
//! Thread rule: any thread.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::operation::{Action, Operation};
use super::remote::{self, Exchange};
use super::shards::Shards;
use super::state::{OwnMemory, ServerState};
use crate::error::{Error, Result};
use crate::fork;
use crate::group::{CallHandle, Group, OnComplete, Submission, Timeout, wait_for_result};
use crate::lock::lock;
use crate::log::log_line;
use crate::signals;
use crate::transport::WaitContext;

/// A started operation.
type Item = (Operation, Submission, OnComplete);

/// The operations that wait for their turn.
#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    /// Whether the thread runs one.
    is_busy: bool,
    /// Those that run on their callers' threads.
    inline: usize,
    is_closed: bool,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Turns {
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// A parameter server, as one rank sees it; see [`crate::parameter_server`].
pub struct ParameterServer {
    state: Arc<ServerState>,
    turns: Arc<Turns>,
    /// Applies the requests of other hosts.
    serving: Mutex<Option<JoinHandle<()>>>,
}

fn closed() -> Error {
    Error::State("the parameter server was closed".into())
}

/// Runs an operation. The server ends if it fails in the middle.
///
/// # Safety
/// The memory of its buffers is valid for the elements, and not used otherwise.
unsafe fn run(state: &ServerState, operation: &Operation, submission: Option<Submission>) -> Result<()> {
    state.group.check_members()?;
    // SAFETY: guaranteed by the caller.
    let run = |wait: &WaitContext<'_>| unsafe { exchange(state, operation, wait) };
    let summary = || (operation.describe(), operation.bytes());
    let result = state.group.run_one_sided(operation.key(), summary, submission, operation.timeout, run);
    result.inspect_err(|error| state.group.fail(error))
}

/// The shards of other hosts come first, as they take longest; then those of this host, from this rank's on, so that ranks
/// meet rarely.
///
/// # Safety
/// As for [`run`].
unsafe fn exchange(state: &ServerState, operation: &Operation, wait: &WaitContext<'_>) -> Result<()> {
    // SAFETY: guaranteed by the caller; dropping the exchange ends its messages.
    let mut exchange = unsafe { Exchange::start(state, operation) }?;
    let (shards, me, ranks) = (&state.shards, state.rank, state.shards.layout().ranks());
    for owner in (me..ranks).chain(0..me).filter(|&owner| shards.is_local(owner)) {
        for tensor in operation.tensors.clone() {
            let shard = shards.shard(tensor, owner);
            let (memory, part) = (operation.memory(tensor, shard.start), 0..shard.len());
            // SAFETY: guaranteed by the caller.
            unsafe {
                match operation.action {
                    Action::Send(rule) => shards.update(owner, tensor, part, rule, memory, wait)?,
                    Action::Receive => shards.read(owner, tensor, part, memory, wait)?,
                }
            }
        }
        exchange.advance(false)?;
    }
    exchange.advance(true)
}

impl ParameterServer {
    /// A server on the memory of `shards`, of which `own` is this rank's, in a group of its own. Starts the thread for
    /// requests of other hosts, if there are any.
    ///
    /// # Errors
    /// [`Error::System`] if the system refuses the thread.
    pub fn start(group: Arc<Group>, shards: Shards, own: OwnMemory) -> Result<ParameterServer> {
        let several_hosts = group.topology().hosts() > 1;
        let state = ServerState { shards, rank: group.rank(), operations: AtomicU32::new(0), own, group };
        let state = Arc::new(state);
        let serving = several_hosts.then(|| {
            let server = Arc::clone(&state);
            spawn("dlcomm-ps", move || remote::serve(&server))
        });
        let serving = Mutex::new(serving.transpose()?);
        Ok(ParameterServer { state, turns: Arc::default(), serving })
    }

    /// The group of its ranks.
    pub fn group(&self) -> &Arc<Group> {
        &self.state.group
    }

    /// Runs an operation to its end; `interrupt` must soon end it if a signal should.
    ///
    /// # Errors
    /// Those of its arguments, which change nothing; those of a wait, which end the server.
    ///
    /// # Safety
    /// The memory of the buffers is valid and not used otherwise.
    pub unsafe fn run(&self, operation: Operation, interrupt: impl Fn()) -> Result<()> {
        operation.check(self.state.shards.layout())?;
        let mut queue = lock(&self.turns.queue);
        if queue.is_closed {
            return Err(closed());
        }
        if queue.is_busy || !queue.items.is_empty() {
            drop(queue);
            return wait_for_result(interrupt, |done| self.enqueue(operation, done));
        }
        queue.inline += 1;
        drop(queue);
        // SAFETY: guaranteed by the caller.
        let result = unsafe { run(&self.state, &operation, None) };
        let mut queue = lock(&self.turns.queue);
        queue.inline -= 1;
        if queue.is_closed {
            self.turns.changed.notify_all();
        }
        result
    }

    /// Starts an operation; `then` gets the result too.
    ///
    /// # Errors
    /// Those of its arguments.
    ///
    /// # Safety
    /// The memory of the buffers is valid until it has ended; nothing else writes what is sent or uses what is received.
    pub unsafe fn submit(&self, operation: Operation, then: Option<OnComplete>) -> Result<CallHandle> {
        operation.check(self.state.shards.layout())?;
        let (handle, done) = CallHandle::new(then);
        self.enqueue(operation, done);
        Ok(handle)
    }

    fn enqueue(&self, operation: Operation, done: OnComplete) {
        let mut queue = lock(&self.turns.queue);
        let refused = match queue.is_closed {
            true => Some(closed()),
            false if queue.thread.is_none() => {
                let (state, turns) = (Arc::clone(&self.state), Arc::clone(&self.turns));
                match spawn("dlcomm-ps-ops", move || run_queue(&state, &turns)) {
                    Ok(thread) => {
                        queue.thread = Some(thread);
                        None
                    }
                    Err(error) => Some(error),
                }
            }
            false => None,
        };
        if let Some(error) = refused {
            drop(queue);
            return done(Err(error));
        }
        queue.items.push_back((operation, self.state.group.submission(), done));
        drop(queue);
        self.turns.changed.notify_all();
    }

    /// Calls `change` with the memory of this rank's shard of a tensor, in its storage type: block by block, with the
    /// position of the block's first element in the tensor, and the number of its elements. Others wait for the block.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such tensor; those of `change`, which ends at its first.
    pub fn modify(
        &self,
        tensor: usize,
        timeout: Timeout,
        change: &mut dyn FnMut(*mut u8, usize, usize) -> Result<()>,
    ) -> Result<()> {
        let ServerState { shards, rank, group, .. } = &*self.state;
        let count = shards.layout().tensors().len();
        if tensor >= count {
            return Err(Error::Invalid(format!("there is no tensor {tensor} in a parameter server of {count}")));
        }
        group.check_members()?;
        let shard = shards.shard(tensor, *rank);
        group.with_limits("a change of this rank's shard", timeout, |wait| {
            shards.modify(*rank, tensor, 0..shard.len(), wait, &mut |memory, done, count| {
                change(memory, shard.start + done, count)
            })
        })
    }

    /// Ends the server, when the operations of all ranks have ended. Collective.
    ///
    /// # Errors
    /// [`Error::State`] if it was closed; those of a barrier.
    pub fn close(&self, timeout: Timeout, interrupt: impl Fn()) -> Result<()> {
        if let Some(thread) = self.close_queue(None)? {
            join(thread);
        }
        let result = self.state.group.barrier("close of the parameter server", timeout, interrupt);
        self.end_serving();
        if result.is_ok() {
            self.state.own.set_unused();
        }
        result
    }

    /// Refuses further operations, and those that wait if there is an error for them.
    fn close_queue(&self, error: Option<Error>) -> Result<Option<JoinHandle<()>>> {
        let mut queue = lock(&self.turns.queue);
        if queue.inline > 0 && signals::checking() {
            let text =
                "a handler of a signal closed a parameter server while its thread waits in it; let that end first";
            return Err(Error::State(text.into()));
        }
        if std::mem::replace(&mut queue.is_closed, true) {
            return Err(closed());
        }
        // The other ranks may free their memory once this one has closed.
        while queue.inline > 0 {
            queue = self.turns.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        let thread = queue.thread.take();
        let refused = error.map(|error| (error, std::mem::take(&mut queue.items)));
        drop(queue);
        self.turns.changed.notify_all();
        if let Some((error, items)) = refused {
            items.into_iter().for_each(|(.., done)| done(Err(error.clone())));
        }
        Ok(thread)
    }

    fn end_serving(&self) {
        if let Some(thread) = lock(&self.serving).take() {
            // The thread has ended too if the messages have.
            let _sent = remote::end(&self.state);
            join(thread);
        }
    }
}

impl Drop for ParameterServer {
    /// Without [`ParameterServer::close`] the others' operations fail from now on.
    fn drop(&mut self) {
        if fork::is_child() {
            // The threads are those of the parent.
            return;
        }
        let error = Error::State("the parameter server was freed before the operation had ended".into());
        if let Ok(Some(thread)) = self.close_queue(Some(error)) {
            join(thread);
        }
        self.end_serving();
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(Error::no_thread)
}

fn join(thread: JoinHandle<()>) {
    // A callback of an operation may free the server.
    if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
        log_line("a thread of the parameter server has panicked");
    }
}

/// Runs the started operations until the server is closed and none is left.
fn run_queue(state: &ServerState, turns: &Turns) {
    let mut queue = lock(&turns.queue);
    loop {
        let Some((operation, submission, done)) = queue.items.pop_front() else {
            if queue.is_closed {
                return;
            }
            queue = turns.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        queue.is_busy = true;
        drop(queue);
        // SAFETY: promised to `submit`, and to `run`, which waits.
        done(unsafe { run(state, &operation, Some(submission)) });
        queue = lock(&turns.queue);
        queue.is_busy = false;
    }
}
