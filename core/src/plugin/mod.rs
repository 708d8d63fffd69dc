//! The schedules of the Cray PE DL Plugin: means that later calls return (pipelined, warm-up, cool-down).
//!
//! A client of [`crate::group`], which knows nothing of schedules. A [`Team`] is a group with a schedule.

mod options;
mod result_assembly;
mod schedule;
mod schedule_state;
mod staging;
mod team;
mod wait_time;
mod weighted_sum;

pub use options::{OnResult, StepOptions};
pub use schedule::{Arguments, Cooldown, Schedule, Verbosity};
pub use schedule_state::ResultBuffer;
pub use staging::{StagingBuffer, StagingPool};
pub use team::{Team, report_waited};
