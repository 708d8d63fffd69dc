//! How many rounds of a channel overlap. Plain data.

/// Rounds of a channel that may overlap, and so the number of slots of a rank, on one host: one is packed while another
/// is reduced and a third is unpacked.
pub const HOST_WINDOW: usize = 4;
/// The same between hosts: so many chunks of a call are under way.
pub const NETWORK_WINDOW: usize = if cfg!(loom) { 4 } else { 8 };
/// The same of small calls.
pub const SMALL_WINDOW: u32 = 2;
/// The largest window. Windows are powers of two: the numbers of rounds wrap.
pub const MAX_WINDOW: usize = NETWORK_WINDOW;

/// The window of a group on `hosts` hosts.
pub fn window(hosts: usize) -> usize {
    if hosts > 1 { NETWORK_WINDOW } else { HOST_WINDOW }
}
