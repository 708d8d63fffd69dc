//! NCCL, loaded at run time as libnccl.so.2 (cudarc looks for other names), with non-blocking communicators.
//!
//! Thread rule: any thread may use a [`Communicator`], one at a time; a group of operations belongs to one thread.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;

use super::driver::Address;
use super::stream::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Identifies a communicator; all of its ranks pass the same id.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// NCCL's handle; null after `ncclCommDestroy` or `ncclCommAbort`.
struct Handle(*mut c_void);

// SAFETY: any thread may use a communicator, one at a time.
unsafe impl Send for Handle {}

/// `ncclConfig_t` of NCCL 2.14. Newer versions accept it, by its size and version.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const OP_AVG: c_int = 4;

/// The functions in use, of NCCL 2.14 and later.
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
    LOADED.get_or_init(load).as_ref().map_err(|reason| Error::System(format!("NCCL cannot be used: {reason}")))
}

fn load() -> std::result::Result<Functions, String> {
    // SAFETY: NCCL's initializers have no side effects on this process.
    let library = unsafe { Library::new("libnccl.so.2") }.map_err(|error| error.to_string())?;
    macro_rules! get {
        ($name:literal) => {
            // SAFETY: the field has the function's type as NCCL documents it.
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

/// The version of NCCL; 22809 is 2.28.9.
///
/// # Errors
/// [`Error::System`] if NCCL is missing.
pub fn version() -> Result<i32> {
    let nccl = functions()?;
    let mut version = 0;
    // SAFETY: the out pointer is valid.
    check(nccl, "asking for the version", unsafe { (nccl.get_version)(&raw mut version) })?;
    Ok(version)
}

fn check(nccl: &Functions, what: &str, code: c_int) -> Result<()> {
    if code == SUCCESS || code == IN_PROGRESS {
        return Ok(());
    }
    // SAFETY: NCCL's texts are constants.
    let text = unsafe { CStr::from_ptr((nccl.error_string)(code)) }.to_string_lossy();
    Err(Error::System(format!("NCCL: {what}: {text}")))
}

impl UniqueId {
    /// Makes a new id.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn new() -> Result<UniqueId> {
        let nccl = functions()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: the out pointer is valid.
        check(nccl, "making an id", unsafe { (nccl.get_unique_id)(&raw mut id) })?;
        Ok(id)
    }
}

/// A non-blocking communicator.
pub struct Communicator {
    /// Locked during each function, and from the start of a group to its end. None of these blocks.
    handle: Mutex<Handle>,
}

/// An NCCL group in progress. It holds the communicator's lock, so nobody can end the communicator.
pub struct NcclGroupGuard<'a>(&'a Handle);

impl Communicator {
    /// Starts to create a communicator of `size` ranks on the current context's GPU. It is usable when
    /// [`Communicator::is_ready`].
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn start(size: usize, id: UniqueId, rank: usize) -> Result<Communicator> {
        let nccl = functions()?;
        let number = |value: usize| c_int::try_from(value).unwrap_or(c_int::MAX);
        let mut config = Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 21400, blocking: 0 };
        // A thread of NCCL may write the handle there again at any later time, so the memory is never freed.
        let handle_slot: *mut *mut c_void = Box::leak(Box::new(ptr::null_mut()));
        // SAFETY: the out pointers are valid.
        let code = unsafe { (nccl.init)(handle_slot, number(size), id, number(rank), &raw mut config) };
        check(nccl, "making a communicator", code)?;
        // SAFETY: the pointer is valid; a later write there stores the same handle.
        let handle = unsafe { handle_slot.read_volatile() };
        Ok(Communicator { handle: Mutex::new(Handle(handle)) })
    }

    /// Whether the last operation has completed.
    ///
    /// # Errors
    /// [`Error::System`] if it or an earlier one failed; [`Error::State`] after [`Communicator::abort`].
    pub fn is_ready(&self) -> Result<bool> {
        let nccl = functions()?;
        let mut code = SUCCESS;
        // SAFETY: the handle is alive, the out pointer valid.
        check(nccl, "asking for errors", unsafe { (nccl.async_error)(self.handle()?.0, &raw mut code) })?;
        check(nccl, "an operation", code)?;
        Ok(code == SUCCESS)
    }

    /// Runs `body` in one NCCL group, which fuses its operations.
    ///
    /// # Errors
    /// Those of `body`; [`Error::System`].
    pub fn grouped(&self, body: impl FnOnce(&NcclGroupGuard<'_>) -> Result<()>) -> Result<()> {
        let nccl = functions()?;
        let handle = self.handle()?;
        // SAFETY: no arguments.
        check(nccl, "starting a group", unsafe { (nccl.group_start)() })?;
        let done = body(&NcclGroupGuard(&handle));
        // SAFETY: ends the group that this thread started.
        check(nccl, "ending a group", unsafe { (nccl.group_end)() })?;
        done
    }

    /// Starts to finalize the communicator and its enqueued work. Done when [`Communicator::is_ready`]. Collective.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn finish(&self) -> Result<()> {
        let nccl = functions()?;
        // SAFETY: the handle is alive.
        check(nccl, "ending a communicator", unsafe { (nccl.finalize)(self.handle()?.0) })
    }

    /// Frees the communicator, after [`Communicator::finish`] has completed.
    pub fn destroy(&self) {
        self.end(|nccl| nccl.destroy);
    }

    /// Aborts the communicator and its enqueued work, without the other ranks. Later calls do nothing.
    pub fn abort(&self) {
        self.end(|nccl| nccl.abort);
    }

    fn end(&self, function: impl FnOnce(&Functions) -> unsafe extern "C" fn(*mut c_void) -> c_int) {
        let mut handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let old = std::mem::replace(&mut *handle, Handle(ptr::null_mut()));
        if let (Ok(nccl), false) = (functions(), old.0.is_null()) {
            // SAFETY: alive until here; no other thread can get the handle any more.
            unsafe { function(nccl)(old.0) };
        }
    }

    fn handle(&self) -> Result<MutexGuard<'_, Handle>> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        if handle.0.is_null() { Err(Error::State("the communicator was ended".into())) } else { Ok(handle) }
    }
}

impl NcclGroupGuard<'_> {
    /// Allreduce (mean) of `count` elements.
    ///
    /// # Errors
    /// [`Error::System`]
    ///
    /// # Safety
    /// The memory is valid and not used otherwise until the operation has completed.
    pub unsafe fn average(
        &self,
        from: Address,
        to: Address,
        count: usize,
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        let nccl = functions()?;
        // SAFETY: the caller's promise.
        let code = unsafe { (nccl.all_reduce)(from, to, count, code_of(dtype), OP_AVG, self.0.0, stream.raw().cast()) };
        check(nccl, "starting an all-reduce", code)
    }

    /// Broadcasts `bytes` bytes from rank `root`.
    ///
    /// # Errors
    /// [`Error::System`]
    ///
    /// # Safety
    /// As for [`NcclGroupGuard::average`].
    pub unsafe fn broadcast(
        &self,
        from: Address,
        to: Address,
        bytes: usize,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        let nccl = functions()?;
        let root = c_int::try_from(root).unwrap_or(c_int::MAX);
        // SAFETY: the caller's promise.
        let code = unsafe { (nccl.broadcast)(from, to, bytes, 1, root, self.0.0, stream.raw().cast()) };
        check(nccl, "starting a broadcast", code)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort();
    }
}

/// `ncclDataType_t` of `dtype`; bool is sent as bytes.
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
