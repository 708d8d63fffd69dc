//! `dl_comm._dl_comm`: passes NumPy arrays to the C API. Users see the package's Python files.
//!
//! Thread rule: every function may be called from any Python thread; none holds the GIL while it waits.

mod api;
mod arrays;
mod calls;
mod device;
mod dlpack;
mod groups;
mod log;
mod memory;
mod parameter_server;
mod received;
mod store;
mod works;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;

use api::{argument_error, call, text};
use arrays::Buffers;

type Array<'py> = Bound<'py, PyAny>;

pub(crate) fn c_name(name: Option<&Bound<'_, PyString>>) -> PyResult<CString> {
    let Some(name) = name else { return Ok(CString::default()) };
    let text = name.extract::<String>().ok().and_then(|text| CString::new(text).ok());
    text.ok_or_else(|| match name.repr() {
        Ok(repr) => argument_error(name.py(), format!("name is {repr}; it is Unicode text without NUL characters")),
        Err(error) => error,
    })
}

/// Averages `sources` over all ranks into `destinations` (possibly the same arrays). Both are `towers` consecutive
/// replicas of a list. `timeout` is in seconds: 0 for no timeout, negative for the team's.
#[pyfunction]
#[pyo3(signature = (sources, destinations, team, name=None, towers=1, timeout=-1.0))]
fn average(
    py: Python<'_>,
    sources: Vec<Array<'_>>,
    destinations: Vec<Array<'_>>,
    team: i32,
    name: Option<&Bound<'_, PyString>>,
    towers: usize,
    timeout: f64,
) -> PyResult<()> {
    let name = c_name(name)?;
    let buffers = Buffers::new(py, &sources, &destinations)?;
    let count = buffers.len() / towers.max(1);
    // SAFETY: the caller keeps the arrays alive; the list outlives the call.
    call(py, || unsafe {
        api::ffi::dl_comm_average_towers(buffers.as_ptr(), count, towers, team, name.as_ptr(), timeout)
    })?;
    Ok(())
}

/// Copies the arrays of rank `root` to all ranks, in place.
#[pyfunction]
#[pyo3(signature = (arrays, root, name=None, timeout=-1.0))]
fn broadcast(
    py: Python<'_>,
    arrays: Vec<Array<'_>>,
    root: i32,
    name: Option<&Bound<'_, PyString>>,
    timeout: f64,
) -> PyResult<()> {
    let name = c_name(name)?;
    let buffers = Buffers::new(py, &arrays, &arrays)?;
    // SAFETY: as for `average`.
    call(py, || unsafe {
        api::ffi::dl_comm_broadcast_buffers(buffers.as_ptr(), buffers.len(), root, name.as_ptr(), timeout)
    })?;
    Ok(())
}

/// Allocates `bytes` zero bytes that the ranks of the host share; returns the address.
#[pyfunction]
fn alloc(py: Python<'_>, bytes: usize) -> PyResult<usize> {
    let mut address = 0;
    call(py, || {
        let mut memory = std::ptr::null_mut();
        // SAFETY: `memory` is valid for the address.
        let code = unsafe { api::ffi::dl_comm_alloc(bytes, &raw mut memory) };
        address = memory.expose_provenance();
        code
    })?;
    Ok(address)
}

/// Frees memory from `alloc`, which must be unused.
#[pyfunction]
fn free(py: Python<'_>, memory: usize) -> PyResult<()> {
    // SAFETY: guaranteed by the caller.
    call(py, || unsafe { api::ffi::dl_comm_free(std::ptr::with_exposed_provenance_mut(memory)) })?;
    Ok(())
}

/// Waits for all ranks, at most `timeout` seconds (0: no limit, negative: the team's timeout).
#[pyfunction]
#[pyo3(signature = (timeout=-1.0))]
fn barrier(py: Python<'_>, timeout: f64) -> PyResult<()> {
    // SAFETY: passes a number.
    call(py, || unsafe { api::ffi::dl_comm_barrier_timeout(timeout) })?;
    Ok(())
}

/// Ends the job after a failure; the other ranks get an error with `why`.
#[pyfunction]
fn abort(py: Python<'_>, why: &str) -> PyResult<i32> {
    let why = CString::new(why.replace('\0', " "))?;
    // SAFETY: a NUL-terminated text.
    call(py, || unsafe { api::ffi::dl_comm_abort(why.as_ptr()) })
}

/// Sets the deadline of a team's future calls in seconds; 0 for none.
#[pyfunction]
fn set_timeout(py: Python<'_>, team: i32, seconds: f64) -> PyResult<()> {
    // SAFETY: passes numbers.
    call(py, || unsafe { api::ffi::dl_comm_set_timeout(team, seconds) })?;
    Ok(())
}

/// Whether the arrays have the same bits on all ranks.
#[pyfunction]
fn buffers_match(py: Python<'_>, arrays: Vec<Array<'_>>, verbose: bool) -> PyResult<bool> {
    let buffers = Buffers::read_only(&arrays)?;
    let verbose = i32::from(verbose);
    // SAFETY: as for `average`.
    let differs =
        call(py, || unsafe { api::ffi::dl_comm_check_buffers_match(buffers.as_ptr(), buffers.len(), verbose) })?;
    Ok(differs == 0)
}

/// Declares functions without arguments that return an int.
macro_rules! no_argument_functions {
    ($($(#[$doc:meta])* $name:ident = $c:ident;)*) => { $(
        $(#[$doc])*
        #[pyfunction]
        fn $name(py: Python<'_>) -> PyResult<i32> {
            // SAFETY: takes no arguments and may be called at any time.
            call(py, || unsafe { api::ffi::$c() })
        }
    )* };
}

no_argument_functions! {
    /// Initializes MPI.
    init_mpi = dl_comm_init_mpi;
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
    /// Completes the timeline.
    timeline_stop = dl_comm_timeline_stop;
}

/// Makes this process a rank by the address of rank 0.
#[pyfunction]
fn init_address(py: Python<'_>, address: String, rank: i32, size: i32, key: String) -> PyResult<()> {
    let (address, key) = (CString::new(address)?, CString::new(key)?);
    // SAFETY: NUL-terminated texts, which outlive the call.
    call(py, || unsafe { api::ffi::dl_comm_init_address(address.as_ptr(), rank, size, key.as_ptr()) })?;
    Ok(())
}

/// Shuts down.
#[pyfunction]
fn finalize(py: Python<'_>) -> PyResult<i32> {
    // SAFETY: takes no arguments and may be called at any time.
    let done = call(py, || unsafe { api::ffi::dl_comm_finalize() });
    // In a forked child, dropping it could wait for threads that only the parent has.
    if !is_helper(py) {
        store::release();
    }
    done
}

/// Waits until the GPU has ended all calls that it was given.
#[pyfunction]
fn synchronize(py: Python<'_>) -> PyResult<()> {
    // SAFETY: takes no arguments and may be called at any time.
    call(py, || unsafe { api::ffi::dl_comm_synchronize() })?;
    Ok(())
}

/// Whether dl_comm is initialized.
#[pyfunction]
fn is_initialized(py: Python<'_>) -> bool {
    // SAFETY: takes no arguments and may be called at any time.
    py.detach(|| unsafe { api::ffi::dl_comm_is_initialized() != 0 })
}

/// Sets the signal whose handler writes stacks for dumps to file `fd`.
#[pyfunction]
fn stacks_from(py: Python<'_>, signal: i32, fd: i32) -> PyResult<()> {
    // SAFETY: passes numbers.
    call(py, || unsafe { api::ffi::dl_comm_stacks_from(signal, fd) })?;
    Ok(())
}

/// Sets whether later starts listen for SIGUSR1.
#[pyfunction]
fn dump_on_signal(enabled: bool) {
    // SAFETY: passes a number.
    unsafe { api::ffi::dl_comm_dump_on_signal(i32::from(enabled)) };
}

/// Notes that this rank has refused a call with this error.
#[pyfunction]
fn note_refusal(py: Python<'_>, error: &str) -> PyResult<()> {
    let error = CString::new(error.replace('\0', " "))?;
    // SAFETY: passes a C string.
    call(py, || unsafe { api::ffi::dl_comm_note_refusal(error.as_ptr()) })?;
    Ok(())
}

/// Whether this process is or was a rank.
#[pyfunction]
fn is_up(py: Python<'_>) -> bool {
    // SAFETY: takes no arguments and may be called at any time.
    py.detach(|| unsafe { api::ffi::dl_comm_get_rank() >= 0 && api::ffi::dl_comm_is_helper() == 0 })
}

/// Whether this process is a helper of a rank.
#[pyfunction]
fn is_helper(py: Python<'_>) -> bool {
    // SAFETY: takes no arguments and may be called at any time.
    py.detach(|| unsafe { api::ffi::dl_comm_is_helper() != 0 })
}

/// The current environment. `os.environ` lacks the changes that the core has made.
#[pyfunction]
fn environment(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let variables = PyDict::new(py);
    for (name, value) in std::env::vars_os() {
        variables.set_item(PyBytes::new(py, name.as_bytes()), PyBytes::new(py, value.as_bytes()))?;
    }
    Ok(variables)
}

/// Creates a team.
#[pyfunction]
fn create_team(py: Python<'_>, id: i32, nthreads: i32, prec_level: i32) -> PyResult<()> {
    // SAFETY: passes numbers.
    call(py, || unsafe { api::ffi::dl_create_team(id, nthreads, prec_level) })?;
    Ok(())
}

/// Initializes dl_comm, and creates the missing teams below `nteams`.
#[pyfunction]
fn init_teams(py: Python<'_>, nteams: i32, nthreads: i32) -> PyResult<()> {
    // SAFETY: passes numbers.
    call(py, || unsafe { api::ffi::dl_comm_init_teams(nteams, nthreads) })?;
    Ok(())
}

/// Sets a team's schedule; `cooldown` is a `dl_comm_cooldown_t`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "the arguments of the plugin")]
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
        // SAFETY: passes numbers.
        unsafe { api::ffi::dl_comm_config_team(team, trans_alg, ksteps, max_steps, verbosity, perf_freq, cooldown) }
    })?;
    Ok(())
}

/// Discards the carried means of an owner.
#[pyfunction]
fn release(py: Python<'_>, team: i32, owner: u64) -> PyResult<()> {
    // SAFETY: passes numbers.
    call(py, || unsafe { api::ffi::dl_comm_release_owner(team, owner) })?;
    Ok(())
}

/// The seconds that callers have waited on a team.
#[pyfunction]
fn waited(py: Python<'_>, team: i32) -> PyResult<f64> {
    let mut seconds = 0.0;
    call(py, || {
        // SAFETY: passes a number.
        seconds = unsafe { api::ffi::dl_comm_get_waited(team) };
        if seconds < 0.0 { seconds as i32 } else { 0 }
    })?;
    Ok(seconds)
}

/// Calls a function that returns a text, with a larger buffer until the text fits.
fn read_text(py: Python<'_>, function: impl Fn(&mut [std::ffi::c_char]) -> i32 + Sync) -> PyResult<String> {
    let mut text = vec![0; 4096];
    loop {
        let length = usize::try_from(call(py, || function(&mut text))?)?;
        if length < text.len() {
            // A char of C is signed on some processors only.
            let bytes: Vec<u8> = text[..length].iter().map(|&letter| letter.to_ne_bytes()[0]).collect();
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
        text.resize(length + 1, 0);
    }
}

/// The statistics of all teams, as JSON.
#[pyfunction]
fn stats(py: Python<'_>) -> PyResult<String> {
    // SAFETY: the buffer has that many bytes.
    read_text(py, |text| unsafe { api::ffi::dl_comm_stats(text.as_mut_ptr(), text.len()) })
}

/// Writes a dump of this rank; returns the path of the file.
#[pyfunction]
#[pyo3(signature = (folder=None))]
fn dump(py: Python<'_>, folder: Option<String>) -> PyResult<String> {
    let folder = folder.map(CString::new).transpose()?;
    let folder = folder.as_deref();
    read_text(py, |path| {
        let folder = folder.map_or(std::ptr::null(), std::ffi::CStr::as_ptr);
        // SAFETY: as above; `folder` outlives the call.
        unsafe { api::ffi::dl_comm_dump(folder, path.as_mut_ptr(), path.len()) }
    })
}

/// Starts a timeline.
#[pyfunction]
fn timeline_start(py: Python<'_>, folder: String) -> PyResult<()> {
    let folder = CString::new(folder)?;
    // SAFETY: `folder` outlives the call.
    call(py, || unsafe { api::ffi::dl_comm_timeline_start(folder.as_ptr()) })?;
    Ok(())
}

/// Compiles the kernels for GPUs of a compute capability into a folder; returns the number of files.
#[pyfunction]
fn compile_kernels(py: Python<'_>, folder: String, capability: i32) -> PyResult<i32> {
    let folder = CString::new(folder)?;
    // SAFETY: `folder` outlives the call.
    call(py, || unsafe { api::ffi::dl_comm_compile_kernels(folder.as_ptr(), capability) })
}

/// Identifies the core in this process.
#[pyfunction]
fn core_id() -> usize {
    // SAFETY: takes no arguments and may be called at any time.
    unsafe { api::ffi::dl_comm_core_id() }
}

/// A description of this process, as JSON.
#[pyfunction]
fn describe(py: Python<'_>) -> PyResult<String> {
    // SAFETY: the buffer has that many bytes.
    read_text(py, |text| unsafe { api::ffi::dl_comm_describe(text.as_mut_ptr(), text.len()) })
}

/// Takes the exception that a signal handler raised while a call waited; None if there is none.
#[pyfunction]
fn raised_while_waiting(py: Python<'_>) -> Option<Py<PyAny>> {
    api::raised().map(|error| error.into_value(py).into_any())
}

/// The module.
#[pymodule]
fn _dl_comm(module: &Bound<'_, PyModule>) -> PyResult<()> {
    api::run_handlers_while_waiting();
    // SAFETY: a static string.
    module.add("__version__", unsafe { text(api::ffi::dl_comm_version()) })?;
    for function in [
        wrap_pyfunction!(groups::create_group, module)?,
        wrap_pyfunction!(groups::join, module)?,
        wrap_pyfunction!(groups::group_of_team, module)?,
        wrap_pyfunction!(parameter_server::create_parameter_server, module)?,
        wrap_pyfunction!(device::average_on, module)?,
        wrap_pyfunction!(dlpack::device_memory, module)?,
        wrap_pyfunction!(dlpack::read_dlpack, module)?,
        wrap_pyfunction!(device::gpu_count, module)?,
        wrap_pyfunction!(device::device_of_pointer, module)?,
        wrap_pyfunction!(log::log_to, module)?,
        wrap_pyfunction!(log::end_log, module)?,
        wrap_pyfunction!(memory::empty_result, module)?,
        wrap_pyfunction!(memory::set_memory_handler, module)?,
        wrap_pyfunction!(memory::shared_handler, module)?,
        wrap_pyfunction!(alloc, module)?,
        wrap_pyfunction!(average, module)?,
        wrap_pyfunction!(broadcast, module)?,
        wrap_pyfunction!(free, module)?,
        wrap_pyfunction!(buffers_match, module)?,
        wrap_pyfunction!(init_mpi, module)?,
        wrap_pyfunction!(store::init_store, module)?,
        wrap_pyfunction!(init_address, module)?,
        wrap_pyfunction!(finalize, module)?,
        wrap_pyfunction!(synchronize, module)?,
        wrap_pyfunction!(abort, module)?,
        wrap_pyfunction!(rank, module)?,
        wrap_pyfunction!(size, module)?,
        wrap_pyfunction!(local_rank, module)?,
        wrap_pyfunction!(local_size, module)?,
        wrap_pyfunction!(hosts, module)?,
        wrap_pyfunction!(barrier, module)?,
        wrap_pyfunction!(set_timeout, module)?,
        wrap_pyfunction!(is_initialized, module)?,
        wrap_pyfunction!(stacks_from, module)?,
        wrap_pyfunction!(dump_on_signal, module)?,
        wrap_pyfunction!(note_refusal, module)?,
        wrap_pyfunction!(compile_kernels, module)?,
        wrap_pyfunction!(is_up, module)?,
        wrap_pyfunction!(is_helper, module)?,
        wrap_pyfunction!(environment, module)?,
        wrap_pyfunction!(create_team, module)?,
        wrap_pyfunction!(init_teams, module)?,
        wrap_pyfunction!(config_team, module)?,
        wrap_pyfunction!(release, module)?,
        wrap_pyfunction!(waited, module)?,
        wrap_pyfunction!(stats, module)?,
        wrap_pyfunction!(dump, module)?,
        wrap_pyfunction!(timeline_start, module)?,
        wrap_pyfunction!(timeline_stop, module)?,
        wrap_pyfunction!(core_id, module)?,
        wrap_pyfunction!(describe, module)?,
        wrap_pyfunction!(raised_while_waiting, module)?,
    ] {
        module.add_function(function)?;
    }
    Ok(())
}
