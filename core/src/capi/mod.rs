//! The C API of `dl_comm.h`: only argument conversion and waiting. The header has the contracts.

#![allow(non_snake_case)]

mod arguments;
mod device;
mod errors;
mod functions;

pub use arguments::{CBuffer, CDevice};
pub use device::{
    dl_comm_average_on, dl_comm_broadcast_buffers, dl_comm_broadcast_on, dl_comm_device_of_pointer, dl_comm_gpu_count,
};
pub use functions::{
    dl_comm_abort, dl_comm_alloc, dl_comm_average, dl_comm_average_towers, dl_comm_barrier, dl_comm_barrier_timeout,
    dl_comm_broadcast, dl_comm_check_buffers_match, dl_comm_config_team, dl_comm_core_id, dl_comm_create_team,
    dl_comm_describe, dl_comm_dump, dl_comm_ensure_team, dl_comm_finalize, dl_comm_free, dl_comm_get_local_nranks,
    dl_comm_get_nhosts, dl_comm_get_nranks, dl_comm_get_nteams, dl_comm_get_rank, dl_comm_get_waited,
    dl_comm_gradients, dl_comm_init, dl_comm_init_mpi, dl_comm_init_teams, dl_comm_is_helper, dl_comm_is_initialized,
    dl_comm_last_error, dl_comm_localrank, dl_comm_release_owner, dl_comm_set_signal_check, dl_comm_set_timeout,
    dl_comm_stacks_from, dl_comm_stats, dl_comm_timeline_start, dl_comm_timeline_stop, dl_comm_version, dl_create_team,
};
