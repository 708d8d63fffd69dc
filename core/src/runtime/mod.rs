//! The process-wide state behind the bindings: the job, the teams, and the rules of init, finalize and fork.
//!
//! Thread rule: any thread; collective functions that create teams run one at a time.

mod calls;
pub mod collectives;
mod group_creation;
mod introspect;
mod lifecycle;
mod memory;
mod parameter_servers;
pub mod point_to_point;
mod state;
mod teams;
mod turn;
mod waits;

pub use calls::{average, average_and_wait, average_list, average_on, buffers_match, may_return_early};
pub use collectives::barrier;
pub use group_creation::{GroupOptions, create_group};
pub use introspect::{ProcessInfo, dump, overview, start_timeline, stats, stop_timeline};
pub use lifecycle::{abort, finalize, init, start, start_by_address, start_by_store};
pub use memory::{alloc, free};
pub use parameter_servers::create_parameter_server;
pub use state::{
    CONTROL, MAX_TEAMS, check_fork, config, core_id, group_of_number, group_of_team, is_helper, is_initialized, nteams,
    rank_info, topology,
};
pub use teams::{
    add_waited, config_team, create_team, discard_carried, ensure_team, init_teams, release, set_timeout, waited,
};
pub use waits::{blocked, interrupt, look_for_signals, note_refusal, synchronize};
