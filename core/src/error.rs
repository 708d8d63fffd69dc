//! The error type of the core, its codes, and the guard that stops panics at foreign interfaces.
//!
//! Messages are lower case and say what to do. Each binding maps the codes to its own exceptions.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::address_space::AddressSpace;

/// An error of the core. `Clone`, because one failure of a group reaches all of its waiting calls.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An invalid argument.
    #[error("{0}")]
    Invalid(String),
    /// The element type is unknown, or invalid for the operation.
    #[error("{0}")]
    DType(String),
    /// Called before init, after finalize, or in a forked child.
    #[error("{0}")]
    State(String),
    /// The ranks issued different collectives; no output was written.
    #[error("collective mismatch, nothing was written:\n{0}")]
    Mismatch(String),
    /// A deadline passed.
    #[error("{0}")]
    Timeout(String),
    /// A rank of the job was lost.
    #[error("{0}")]
    PeerLost(String),
    /// The operating system reported an error.
    #[error("{0}")]
    System(String),
    /// The library for messages between hosts reported an error.
    #[error("{0}")]
    Network(String),
    /// A bug in dl_comm.
    #[error("internal error, please report: {0}")]
    Internal(String),
}

/// Result of the core's functions.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The `DL_COMM_ERROR_*` code in `dl_comm.h`.
    pub fn code(&self) -> i32 {
        match self {
            Error::Invalid(_) => -1,
            Error::DType(_) => -2,
            Error::State(_) => -3,
            Error::Mismatch(_) => -4,
            Error::Timeout(_) => -5,
            Error::PeerLost(_) => -6,
            Error::System(_) => -7,
            Error::Network(_) => -8,
            Error::Internal(_) => -9,
        }
    }

    /// Restores an error from its code and text, the two fields stored in shared memory.
    pub fn from_code(code: i32, text: String) -> Error {
        match code {
            -1 => Error::Invalid(text),
            -2 => Error::DType(text),
            -3 => Error::State(text),
            -4 => Error::Mismatch(text),
            -5 => Error::Timeout(text),
            -6 => Error::PeerLost(text),
            -7 => Error::System(text),
            -8 => Error::Network(text),
            _ => Error::Internal(text),
        }
    }

    /// The text without the prefix that `Display` adds.
    pub fn detail(&self) -> &str {
        match self {
            Error::Invalid(text)
            | Error::DType(text)
            | Error::State(text)
            | Error::Mismatch(text)
            | Error::Timeout(text)
            | Error::PeerLost(text)
            | Error::System(text)
            | Error::Network(text)
            | Error::Internal(text) => text,
        }
    }

    /// Whether the group still works after this error: true for misuse and mismatches, false when ranks are out of
    /// sync.
    pub fn is_recoverable(&self) -> bool {
        matches!(self, Error::Invalid(_) | Error::DType(_) | Error::State(_) | Error::Mismatch(_))
    }

    /// A failed system call; `what` describes the attempted action.
    pub fn system(what: impl std::fmt::Display, error: impl std::fmt::Display) -> Error {
        Error::System(format!("{what}: {error}"))
    }

    /// A thread that did not start: it may have no address space for its stack.
    pub fn no_thread(error: impl std::fmt::Display) -> Error {
        let space = AddressSpace::now();
        let why = space.limit.map_or(String::new(), |_| format!("; {space}"));
        Error::System(format!("starting a thread: {error}{why}"))
    }
}

/// Runs `body` and turns a panic into [`Error::Internal`]: a panic that reaches C or C++ would abort the process.
pub fn guard<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(Error::Internal(panic_text(&*panic))))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("panic without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_internal_error() {
        let error = guard::<()>(|| panic!("odd")).unwrap_err();
        assert_eq!(error, Error::Internal("odd".into()));
        assert!(!error.is_recoverable());
    }

    #[test]
    fn codes_round_trip() {
        for code in -9..=-1 {
            assert_eq!(Error::from_code(code, "x".into()).code(), code);
        }
    }
}
