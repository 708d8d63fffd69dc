//! Waiting on the host for a GPU, with sleeps.

use std::time::{Duration, Instant};

use crate::error::Result;
use crate::transport::WaitContext;
use crate::transport::gpu::{Event, Stream};

/// How long it looks at the GPU, and lets other threads run between two looks, before it sleeps: a sleep takes some 70 us at
/// least, which is as long as a short call.
const SPIN_TIME: Duration = Duration::from_micros(300);
/// The longest sleep between two looks.
const MAX_SLEEP: Duration = Duration::from_millis(1);

/// Waits on the host until `event` has come.
///
/// # Errors
/// Those of the driver, and when the wait context ends.
pub fn wait_event(event: &Event, wait_ctx: &WaitContext<'_>) -> Result<()> {
    poll(|| event.is_complete(), &|| "the GPU".to_owned(), wait_ctx)
}

/// Waits until `done` says so, for `whom`.
pub fn poll(done: impl Fn() -> Result<bool>, whom: &dyn Fn() -> String, wait_ctx: &WaitContext<'_>) -> Result<()> {
    let mut nap = Duration::from_micros(20);
    let since = Instant::now();
    let mut asked = since;
    while !done()? {
        if since.elapsed() < SPIN_TIME {
            std::thread::yield_now();
            continue;
        }
        std::thread::sleep(nap);
        nap = (nap * 2).min(MAX_SLEEP);
        if asked.elapsed() > MAX_SLEEP {
            wait_ctx.check(Duration::ZERO, whom)?;
            asked = Instant::now();
        }
    }
    Ok(())
}

/// How long the end of a team, or of a call that has failed, waits for what its GPU is at.
pub(crate) const TEARDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether `done` says so within `time`.
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

/// Whether `stream` has done all that it was given, or does so soon.
pub fn is_idle(stream: &Stream) -> bool {
    stream.record().is_ok_and(|event| poll_until(TEARDOWN_TIMEOUT, || event.is_complete().unwrap_or(true)))
}
