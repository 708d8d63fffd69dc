//! What a thread that waits for a call needs: deadlock detection knows that it is blocked, and signals end its wait.
//!
//! Thread rule: any thread.

use super::state::{check_fork, started};
use crate::error::{Error, Result};
use crate::group::{self, BlockedCaller};
use crate::signals;

/// Fails the groups with pending calls of this process: a signal has interrupted the caller.
pub fn interrupt() {
    // Without a session there are no calls.
    let _ended = started(|runtime| {
        runtime.process_groups.interrupt();
        Ok(())
    });
}

/// Notes that this rank has refused a call with this error about its arguments, which the other ranks may have made.
pub fn note_refusal(error: &str) {
    // Without a session there are no calls.
    let _ended = started(|runtime| {
        runtime.process_groups.refuse(error.to_owned());
        Ok(())
    });
}

/// A guard for a thread that waits, outside of the core, for a call that it has started; `None` without a session.
pub fn blocked() -> Option<BlockedCaller> {
    started(|runtime| Ok(runtime.process_groups.blocked())).ok()
}

/// Checks for signals in such a wait. If one should end the wait, the pending calls soon end with an error.
pub fn look_for_signals() {
    if signals::interrupted() {
        interrupt();
    }
}

/// Waits until the GPU has ended all calls that it was given. Their deadlines bound that.
///
/// # Errors
/// That of a call that was lost on the GPU in this job; [`Error::State`] in a forked child, and if a signal ends the wait.
pub fn synchronize() -> Result<()> {
    check_fork()?;
    group::synchronize(|| match signals::interrupted() {
        true => Err(Error::State("a signal has interrupted the wait for the GPU".into())),
        false => Ok(()),
    })
}
