//! NCCL: loaded at run time, by its own name, which cudarc does not look for; communicators that never block the host.
//!
//! Thread rule: a [`Communicator`] may be used from any thread, one at a time; groups are a thread's own.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;

use super::driver::Address;
use super::stream::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// What the ranks of a communicator know each other by.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// NCCL's handle; null once it was ended.
struct Handle(*mut c_void);

// SAFETY: NCCL lets any thread use a communicator, one at a time.
unsafe impl Send for Handle {}

/// `ncclConfig_t` as NCCL 2.14 had it; newer ones take it, by its size and version.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const AVERAGE: c_int = 4;

/// The functions that are used, of NCCL 2.14 and later.
struct Functions {
    _library: Library,
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init: unsafe extern "C" fn(*mut *mut c_void, c_int, UniqueId, c_int, *mut Config) -> c_int,
    async_error: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    all_reduce: unsafe extern "C" fn(Address, Address, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int,
    broadcast: unsafe extern "C" fn(Address, Address, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
    destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
    abort: unsafe extern "C" fn(*mut c_void) -> c_int,
}

fn functions() -> Result<&'static Functions> {
    static LOADED: OnceLock<std::result::Result<Functions, String>> = OnceLock::new();
    LOADED.get_or_init(load).as_ref().map_err(|why| Error::System(format!("NCCL cannot be used: {why}")))
}

fn load() -> std::result::Result<Functions, String> {
    // SAFETY: NCCL's initialisers do nothing that matters here.
    let library = unsafe { Library::new("libnccl.so.2") }.map_err(|error| error.to_string())?;
    macro_rules! get {
        ($name:literal) => {
            // SAFETY: the field's type is the function's, as NCCL's documents tell it.
            *unsafe { library.get($name) }.map_err(|error| error.to_string())?
        };
    }
    Ok(Functions {
        get_version: get!(b"ncclGetVersion"),
        get_unique_id: get!(b"ncclGetUniqueId"),
        init: get!(b"ncclCommInitRankConfig"),
        async_error: get!(b"ncclCommGetAsyncError"),
        error_string: get!(b"ncclGetErrorString"),
        all_reduce: get!(b"ncclAllReduce"),
        broadcast: get!(b"ncclBroadcast"),
        group_start: get!(b"ncclGroupStart"),
        group_end: get!(b"ncclGroupEnd"),
        finalize: get!(b"ncclCommFinalize"),
        destroy: get!(b"ncclCommDestroy"),
        abort: get!(b"ncclCommAbort"),
        _library: library,
    })
}

/// The version of NCCL, 22809 for 2.28.9.
///
/// # Errors
/// [`Error::System`] when it is not there.
pub fn version() -> Result<i32> {
    let all = functions()?;
    let mut version = 0;
    // SAFETY: the place is valid.
    check(all, "asking for the version", unsafe { (all.get_version)(&raw mut version) })?;
    Ok(version)
}

fn check(all: &Functions, what: &str, code: c_int) -> Result<()> {
    if code == SUCCESS || code == IN_PROGRESS {
        return Ok(());
    }
    // SAFETY: NCCL's texts are constants.
    let text = unsafe { CStr::from_ptr((all.error_string)(code)) }.to_string_lossy();
    Err(Error::System(format!("NCCL: {what}: {text}")))
}

impl UniqueId {
    /// A new one.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn new() -> Result<UniqueId> {
        let all = functions()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: the place is valid.
        check(all, "making an id", unsafe { (all.get_unique_id)(&raw mut id) })?;
        Ok(id)
    }
}

/// A communicator, whose functions return before they are done.
pub struct Communicator {
    /// Held during a function, and from the start of a group to its end; none of that blocks.
    handle: Mutex<Handle>,
}

/// Operations that become one; the communicator is not ended meanwhile.
pub struct NcclGroupGuard<'a>(&'a Handle);

impl Communicator {
    /// Begins to make a communicator of `size` ranks on the current context's GPU; see [`Communicator::is_ready`].
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn start(size: usize, id: UniqueId, rank: usize) -> Result<Communicator> {
        let all = functions()?;
        let number = |value: usize| c_int::try_from(value).unwrap_or(c_int::MAX);
        let mut config = Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 21400, blocking: 0 };
        // A thread of NCCL's writes the handle there once more when the communicator is made, which is later, or never: the
        // place stays for good.
        let place: *mut *mut c_void = Box::leak(Box::new(ptr::null_mut()));
        // SAFETY: the places are valid.
        let code = unsafe { (all.init)(place, number(size), id, number(rank), &raw mut config) };
        check(all, "making a communicator", code)?;
        // SAFETY: the place is valid; what is written there later is the same.
        let handle = unsafe { place.read_volatile() };
        Ok(Communicator { handle: Mutex::new(Handle(handle)) })
    }

    /// Whether the last function is done.
    ///
    /// # Errors
    /// [`Error::System`] when it failed, or anything before it; [`Error::State`] after [`Communicator::abort`].
    pub fn is_ready(&self) -> Result<bool> {
        let all = functions()?;
        let mut code = SUCCESS;
        // SAFETY: the handle is alive, the place valid.
        check(all, "asking for errors", unsafe { (all.async_error)(self.handle()?.0, &raw mut code) })?;
        check(all, "an operation", code)?;
        Ok(code == SUCCESS)
    }

    /// Runs `body`, whose operations become one.
    ///
    /// # Errors
    /// Those of `body`; [`Error::System`].
    pub fn grouped(&self, body: impl FnOnce(&NcclGroupGuard<'_>) -> Result<()>) -> Result<()> {
        let all = functions()?;
        let handle = self.handle()?;
        // SAFETY: no arguments.
        check(all, "starting a group", unsafe { (all.group_start)() })?;
        let done = body(&NcclGroupGuard(&handle));
        // SAFETY: ends what was started, on the same thread.
        check(all, "ending a group", unsafe { (all.group_end)() })?;
        done
    }

    /// Begins to bring the communicator to its end, with what is enqueued on it; see [`Communicator::is_ready`]. Collective.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn finish(&self) -> Result<()> {
        let all = functions()?;
        // SAFETY: the handle is alive.
        check(all, "ending a communicator", unsafe { (all.finalize)(self.handle()?.0) })
    }

    /// Frees the communicator after [`Communicator::finish`] is done.
    pub fn destroy(&self) {
        self.end(|all| all.destroy);
    }

    /// Ends the communicator and all that is enqueued on it, whatever the other ranks do. Only the first call does.
    pub fn abort(&self) {
        self.end(|all| all.abort);
    }

    fn end(&self, how: impl FnOnce(&Functions) -> unsafe extern "C" fn(*mut c_void) -> c_int) {
        let mut handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = std::mem::replace(&mut *handle, Handle(ptr::null_mut()));
        if let (Ok(all), false) = (functions(), ended.0.is_null()) {
            // SAFETY: alive until here, and nobody gets it any more.
            unsafe { how(all)(ended.0) };
        }
    }

    fn handle(&self) -> Result<MutexGuard<'_, Handle>> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        if handle.0.is_null() { Err(Error::State("the communicator was ended".into())) } else { Ok(handle) }
    }
}

impl NcclGroupGuard<'_> {
    /// Averages `count` elements over the ranks.
    ///
    /// # Errors
    /// [`Error::System`]
    ///
    /// # Safety
    /// The memory is valid until that is done, and nobody else's.
    pub unsafe fn average(
        &self,
        from: Address,
        to: Address,
        count: usize,
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        let all = functions()?;
        // SAFETY: the caller's promise.
        let code = unsafe { (all.all_reduce)(from, to, count, code_of(dtype), AVERAGE, self.0.0, stream.raw().cast()) };
        check(all, "starting an all-reduce", code)
    }

    /// Copies `bytes` bytes of rank `root` to all.
    ///
    /// # Errors
    /// [`Error::System`]
    ///
    /// # Safety
    /// As for [`Group::average`].
    pub unsafe fn broadcast(
        &self,
        from: Address,
        to: Address,
        bytes: usize,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        let all = functions()?;
        let root = c_int::try_from(root).unwrap_or(c_int::MAX);
        // SAFETY: the caller's promise.
        let code = unsafe { (all.broadcast)(from, to, bytes, 1, root, self.0.0, stream.raw().cast()) };
        check(all, "starting a broadcast", code)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort();
    }
}

/// NCCL's number for an element type; bool travels as bytes.
fn code_of(dtype: DType) -> c_int {
    match dtype {
        DType::I8 => 0,
        DType::U8 | DType::Bool => 1,
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
    }
}
