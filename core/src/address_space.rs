//! The address space of the process, which `ulimit -v` and batch systems limit.

use std::fmt;

use rustix::process::{Resource, getrlimit};

/// How much of the address space is in use, and its limit.
#[derive(Debug, Clone, Copy)]
pub struct AddressSpace {
    /// The limit in bytes, if there is one.
    pub limit: Option<u64>,
    /// Bytes in use.
    pub used: u64,
}

impl AddressSpace {
    /// What the system says now.
    pub fn now() -> AddressSpace {
        let pages = std::fs::read_to_string("/proc/self/statm").ok();
        let pages = pages.and_then(|text| text.split_ascii_whitespace().next()?.parse::<u64>().ok());
        let used = pages.unwrap_or(0) * rustix::param::page_size() as u64;
        AddressSpace { limit: getrlimit(Resource::As).current, used }
    }
}

impl fmt::Display for AddressSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = self.used >> 20;
        match self.limit {
            Some(limit) => {
                let limit = limit >> 20;
                write!(f, "{used} of the {limit} MiB of address space that ulimit -v (RLIMIT_AS) allows are in use")
            }
            None => write!(f, "{used} MiB of address space are in use, without a limit"),
        }
    }
}
