//! `dl_comm._dl_comm`: NumPy arrays in, calls of the C API out. The package's Python files are what users see.
//!
//! Thread rule: every function may be called from any Python thread; none holds the GIL while it waits.

mod api;
mod arrays;

use pyo3::prelude::*;
use pyo3::types::PyString;
use std::ffi::CString;

use api::{call, text};
use arrays::Buffers;

type Array<'py> = Bound<'py, PyAny>;

fn c_name(name: Option<&Bound<'_, PyString>>) -> PyResult<CString> {
    let name = name.map_or(Ok(String::new()), |name| name.extract())?;
    Ok(CString::new(name)?)
}

/// Averages `sources` into `destinations` (which may be the same arrays) over all ranks; both are `towers` replicas of a list,
/// one after the other.
#[pyfunction]
#[pyo3(signature = (sources, destinations, team, name=None, towers=1))]
fn average(
    py: Python<'_>,
    sources: Vec<Array<'_>>,
    destinations: Vec<Array<'_>>,
    team: i32,
    name: Option<&Bound<'_, PyString>>,
    towers: usize,
) -> PyResult<()> {
    let name = c_name(name)?;
    let buffers = Buffers::new(&sources, &destinations)?;
    let count = buffers.len() / towers.max(1);
    // SAFETY: the arrays are held by the caller; the list outlives the call.
    call(py, || unsafe { api::ffi::dl_comm_average_towers(buffers.as_ptr(), count, towers, team, name.as_ptr()) })?;
    Ok(())
}

/// Copies the arrays of rank `root` into those of all ranks, in place.
#[pyfunction]
#[pyo3(signature = (arrays, root, name=None))]
fn broadcast(py: Python<'_>, arrays: Vec<Array<'_>>, root: i32, name: Option<&Bound<'_, PyString>>) -> PyResult<()> {
    let name = c_name(name)?;
    let buffers = Buffers::new(&arrays, &arrays)?;
    // SAFETY: as for `average`.
    call(py, || unsafe { api::ffi::dl_comm_broadcast_buffers(buffers.as_ptr(), buffers.len(), root, name.as_ptr()) })?;
    Ok(())
}

/// Whether the arrays hold the same bits on all ranks.
#[pyfunction]
fn buffers_match(py: Python<'_>, arrays: Vec<Array<'_>>, verbose: bool) -> PyResult<bool> {
    let buffers = Buffers::read_only(&arrays)?;
    let verbose = i32::from(verbose);
    // SAFETY: as for `average`.
    let differ =
        call(py, || unsafe { api::ffi::dl_comm_check_buffers_match(buffers.as_ptr(), buffers.len(), verbose) })?;
    Ok(differ == 0)
}

/// Declares functions without arguments that return an int.
macro_rules! plain {
    ($($(#[$doc:meta])* $name:ident = $c:ident;)*) => { $(
        $(#[$doc])*
        #[pyfunction]
        fn $name(py: Python<'_>) -> PyResult<i32> {
            // SAFETY: the function takes nothing and may be called at any time.
            call(py, || unsafe { api::ffi::$c() })
        }
    )* };
}

plain! {
    /// Brings MPI up.
    init_mpi = dl_comm_init_mpi;
    /// Brings everything up.
    init = dl_comm_init;
    /// Ends everything.
    finalize = dl_comm_finalize;
    /// Ends everything after a failure.
    abandon = dl_comm_abandon;
    /// The rank.
    rank = dl_comm_get_rank;
    /// The number of ranks.
    size = dl_comm_get_nranks;
    /// The rank on this host.
    local_rank = dl_comm_localrank;
    /// The number of ranks on this host.
    local_size = dl_comm_get_local_nranks;
    /// The number of hosts.
    hosts = dl_comm_get_nhosts;
    /// Waits for all ranks.
    barrier = dl_comm_barrier;
}

/// Whether everything is up.
#[pyfunction]
fn is_initialized() -> bool {
    // SAFETY: the function takes nothing and may be called at any time.
    unsafe { api::ffi::dl_comm_is_initialized() != 0 }
}

/// Creates a team.
#[pyfunction]
fn create_team(py: Python<'_>, id: i32, nthreads: i32, prec_level: i32) -> PyResult<()> {
    // SAFETY: plain numbers.
    call(py, || unsafe { api::ffi::dl_create_team(id, nthreads, prec_level) })?;
    Ok(())
}

/// Creates a team unless it exists.
#[pyfunction]
fn ensure_team(py: Python<'_>, id: i32, nthreads: i32) -> PyResult<()> {
    // SAFETY: plain numbers.
    call(py, || unsafe { api::ffi::dl_comm_ensure_team(id, nthreads) })?;
    Ok(())
}

/// Sets a team's schedule; `cooldown` is that of `dl_comm_cooldown_t`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "they are the plugin's")]
fn config_team(
    py: Python<'_>,
    team: i32,
    trans_alg: i32,
    ksteps: i32,
    max_steps: i32,
    verbosity: i32,
    perf_freq: i32,
    cooldown: u32,
) -> PyResult<()> {
    call(py, || {
        // SAFETY: plain numbers.
        unsafe { api::ffi::dl_comm_config_team(team, trans_alg, ksteps, max_steps, verbosity, perf_freq, cooldown) }
    })?;
    Ok(())
}

/// Forgets what averages of an owner have left to calls that will not come.
#[pyfunction]
fn release(py: Python<'_>, team: i32, owner: u64) -> PyResult<()> {
    // SAFETY: plain numbers.
    call(py, || unsafe { api::ffi::dl_comm_release(team, owner) })?;
    Ok(())
}

/// For how many seconds averages of a team were waited for.
#[pyfunction]
fn waited(py: Python<'_>, team: i32) -> PyResult<f64> {
    let mut seconds = 0.0;
    call(py, || {
        // SAFETY: a plain number.
        seconds = unsafe { api::ffi::dl_comm_get_waited(team) };
        if seconds < 0.0 { seconds as i32 } else { 0 }
    })?;
    Ok(seconds)
}

/// The identity of the core.
#[pyfunction]
fn core_id() -> usize {
    // SAFETY: the function takes nothing and may be called at any time.
    unsafe { api::ffi::dl_comm_core_id() }
}

/// The module.
#[pymodule]
fn _dl_comm(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // SAFETY: a static string.
    module.add("__version__", unsafe { text(api::ffi::dl_comm_version()) })?;
    for function in [
        wrap_pyfunction!(average, module)?,
        wrap_pyfunction!(broadcast, module)?,
        wrap_pyfunction!(buffers_match, module)?,
        wrap_pyfunction!(init_mpi, module)?,
        wrap_pyfunction!(init, module)?,
        wrap_pyfunction!(finalize, module)?,
        wrap_pyfunction!(abandon, module)?,
        wrap_pyfunction!(rank, module)?,
        wrap_pyfunction!(size, module)?,
        wrap_pyfunction!(local_rank, module)?,
        wrap_pyfunction!(local_size, module)?,
        wrap_pyfunction!(hosts, module)?,
        wrap_pyfunction!(barrier, module)?,
        wrap_pyfunction!(is_initialized, module)?,
        wrap_pyfunction!(create_team, module)?,
        wrap_pyfunction!(ensure_team, module)?,
        wrap_pyfunction!(config_team, module)?,
        wrap_pyfunction!(release, module)?,
        wrap_pyfunction!(waited, module)?,
        wrap_pyfunction!(core_id, module)?,
    ] {
        module.add_function(function)?;
    }
    Ok(())
}
