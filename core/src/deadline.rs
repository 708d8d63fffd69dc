//! The longest time that a call may take. Plain data.

use std::fmt;
use std::time::Duration;

/// Who has set a deadline, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SetBy {
    /// The user's environment, or its default.
    #[default]
    Environment,
    /// The settings of the group.
    Group,
    /// The call.
    Call,
    /// The library, whatever the user allows.
    Library,
}

impl fmt::Display for SetBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SetBy::Environment => "DL_COMM_TIMEOUT_S",
            SetBy::Group => "the timeout of its group",
            SetBy::Call => "the timeout of this call",
            SetBy::Library => "a limit of dl_comm",
        })
    }
}

/// The longest time that a call may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Deadline {
    /// After the start of the call; `None`: no deadline.
    pub after: Option<Duration>,
    /// Who has set it.
    pub set_by: SetBy,
}

impl From<Option<Duration>> for Deadline {
    /// The deadline of the environment.
    fn from(after: Option<Duration>) -> Deadline {
        Deadline { after, set_by: SetBy::Environment }
    }
}

impl Deadline {
    /// Whether it has passed for a call that has run for `time`.
    pub fn is_over(self, time: Duration) -> bool {
        self.after.is_some_and(|after| time >= after)
    }
}
