//! The C API of `dl_comm.h`: only argument conversion and waiting. The header has the contracts.

#![allow(non_snake_case)]

mod arguments;
mod call;
mod collectives;
mod diagnosis;
mod groups;
mod job;
mod memory;
mod parameter_servers;
mod point_to_point;
mod status;
mod store;
mod teams;

pub use arguments::{CBuffer, CDevice};
pub use call::CCall;
pub use collectives::*;
pub use diagnosis::*;
pub use groups::*;
pub use job::*;
pub use memory::*;
pub use parameter_servers::*;
pub use point_to_point::*;
pub use status::dl_comm_last_error;
pub use store::CStore;
pub use teams::*;
