//! Order between the caller's stream and the core's streams, and waits of the host for them, with sleeps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::collective::call::Call;
use crate::error::{Error, Result};
use crate::topology::Topology;
use crate::transport::WaitContext;
use crate::transport::gpu::{CallerStream, Event, Stream};

/// The outcome of a call.
pub enum DeviceResult {
    /// The call is enqueued; the event completes with it.
    Enqueued(Event),
    /// All ranks must run it through host memory.
    FallBackToHost,
}

/// The caller's stream of `call`, which is on device memory.
pub fn producer(call: &Call) -> Result<&Arc<CallerStream>> {
    call.producer().ok_or_else(|| Error::Internal("a call on host memory has no GPU".into()))
}

/// Makes `stream` wait for the call's inputs.
pub fn wait_inputs(call: &Call, stream: &Stream) -> Result<()> {
    stream.wait(producer(call)?.ready())
}

/// Makes the caller's stream wait for the work on `stream`.
pub fn signal_outputs(call: &Call, stream: &Stream) -> Result<Event> {
    let end = stream.record()?;
    producer(call)?.make_caller_wait(&end)?;
    Ok(end)
}

/// Makes an error of this rank alone unrecoverable once the ranks have agreed on a call: the others already run it, so
/// the error must end the group.
pub fn unrecoverable(error: Error) -> Error {
    if error.is_recoverable() { Error::System(error.detail().to_owned()) } else { error }
}

/// The broadcast's root as a local rank, if it is on this host.
pub fn root(call: &Call, topology: &Topology) -> Option<usize> {
    call.op.is_broadcast().then(|| topology.local_rank_of(call.op.root)).flatten()
}

/// How long a wait polls and yields before it sleeps. A sleep takes at least about 70 us, as long as a small call.
const SPIN_TIME: Duration = Duration::from_micros(300);
/// Maximum sleep between two checks.
const MAX_SLEEP: Duration = Duration::from_millis(1);

/// Blocks until `event` has completed.
pub fn wait_event(event: &Event, wait_ctx: &WaitContext<'_>) -> Result<()> {
    poll(|| event.is_complete(), &|| "the GPU".to_owned(), wait_ctx)
}

/// Takes the event, if there is one, and waits for it.
pub fn wait_taken(event: &mut Option<Event>, wait_ctx: &WaitContext<'_>) -> Result<()> {
    event.take().map_or(Ok(()), |event| wait_event(&event, wait_ctx))
}

/// Blocks until `done` returns true; `waiting_for` names the awaited party in errors.
pub fn poll(
    done: impl Fn() -> Result<bool>,
    waiting_for: &dyn Fn() -> String,
    wait_ctx: &WaitContext<'_>,
) -> Result<()> {
    let mut sleep = Duration::from_micros(20);
    let since = Instant::now();
    let mut checked = since;
    while !done()? {
        if since.elapsed() < SPIN_TIME {
            std::thread::yield_now();
            continue;
        }
        std::thread::sleep(sleep);
        sleep = (sleep * 2).min(MAX_SLEEP);
        if checked.elapsed() > MAX_SLEEP {
            wait_ctx.check(Duration::ZERO, waiting_for)?;
            checked = Instant::now();
        }
    }
    Ok(())
}

/// How long the end of a group or of a failed call waits for the GPU's work.
pub(crate) const TEARDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether `done` returns true within `time`.
pub fn poll_until(time: Duration, done: impl Fn() -> bool) -> bool {
    let since = Instant::now();
    while !done() {
        if since.elapsed() > time {
            return false;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    true
}

/// Whether `stream` finishes its work within [`TEARDOWN_TIMEOUT`].
pub fn is_idle(stream: &Stream) -> bool {
    stream.record().is_ok_and(|event| poll_until(TEARDOWN_TIMEOUT, || event.is_complete().unwrap_or(true)))
}
