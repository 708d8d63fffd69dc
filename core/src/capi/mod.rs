//! The C API of `dl_comm.h`: only argument conversion and waiting. The header has the contracts.

#![allow(non_snake_case)]

mod arguments;
mod call;
mod collectives;
mod functions;
mod groups;
mod parameter_servers;
mod point_to_point;
mod store;

pub use arguments::{CBuffer, CDevice};
pub use call::CCall;
pub use collectives::*;
pub use functions::*;
pub use groups::*;
pub use parameter_servers::*;
pub use point_to_point::*;
pub use store::CStore;
