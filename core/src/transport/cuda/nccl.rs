//! NCCL, loaded at run time as libnccl.so.2 (cudarc looks for other names), with non-blocking communicators.
//!
//! Thread rule: any thread may use a [`Communicator`], one at a time; a group of operations belongs to one thread.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock};

use libloading::Library;

use super::driver::{Address, Handle};
use super::stream::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::lock::lock;

/// Identifies a communicator; all of its ranks pass the same id.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

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
/// `ncclUint8`: data that is only moved.
const BYTE: c_int = 1;
/// `ncclScalarHostImmediate`: a factor that is read at once.
const HOST_IMMEDIATE: c_int = 1;

/// An operator of NCCL's reductions, `ncclRedOp_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RedOp(c_int);

impl RedOp {
    /// The sum.
    pub const SUM: RedOp = RedOp(0);
    /// The product.
    pub const PRODUCT: RedOp = RedOp(1);
    /// The maximum.
    pub const MAX: RedOp = RedOp(2);
    /// The minimum.
    pub const MIN: RedOp = RedOp(3);
    /// The mean.
    pub const AVERAGE: RedOp = RedOp(4);
}

/// Declares the functions in use, and loads them.
macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        struct Functions {
            _library: Library,
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        fn load() -> std::result::Result<Functions, libloading::Error> {
            // SAFETY: NCCL's initializers have no side effects on this process.
            let library = unsafe { Library::new("libnccl.so.2") }?;
            $(
                // SAFETY: the field has the function's type as NCCL documents it.
                let $name = *unsafe { library.get($symbol) }?;
            )*
            Ok(Functions { $($name,)* _library: library })
        }
    };
}

// Of NCCL 2.14 and later.
functions! {
    get_version = b"ncclGetVersion": fn(*mut c_int) -> c_int;
    get_unique_id = b"ncclGetUniqueId": fn(*mut UniqueId) -> c_int;
    init = b"ncclCommInitRankConfig": fn(*mut *mut c_void, c_int, UniqueId, c_int, *mut Config) -> c_int;
    async_error = b"ncclCommGetAsyncError": fn(*mut c_void, *mut c_int) -> c_int;
    error_string = b"ncclGetErrorString": fn(c_int) -> *const c_char;
    all_reduce = b"ncclAllReduce": fn(Address, Address, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    broadcast = b"ncclBroadcast": fn(Address, Address, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    reduce = b"ncclReduce": fn(Address, Address, usize, c_int, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    all_gather = b"ncclAllGather": fn(Address, Address, usize, c_int, *mut c_void, *mut c_void) -> c_int;
    reduce_scatter = b"ncclReduceScatter": fn(Address, Address, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    send = b"ncclSend": fn(Address, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    receive = b"ncclRecv": fn(Address, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    make_scaled_sum = b"ncclRedOpCreatePreMulSum": fn(*mut c_int, *const c_void, c_int, c_int, *mut c_void) -> c_int;
    free_operator = b"ncclRedOpDestroy": fn(c_int, *mut c_void) -> c_int;
    group_start = b"ncclGroupStart": fn() -> c_int;
    group_end = b"ncclGroupEnd": fn() -> c_int;
    finalize = b"ncclCommFinalize": fn(*mut c_void) -> c_int;
    destroy = b"ncclCommDestroy": fn(*mut c_void) -> c_int;
    abort = b"ncclCommAbort": fn(*mut c_void) -> c_int;
}

fn functions() -> Result<&'static Functions> {
    static LOADED: OnceLock<std::result::Result<Functions, libloading::Error>> = OnceLock::new();
    LOADED.get_or_init(load).as_ref().map_err(|reason| Error::System(format!("NCCL cannot be used: {reason}")))
}

impl Functions {
    /// Converts NCCL's `code` for the action `what`.
    fn check(&self, what: &str, code: c_int) -> Result<()> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: NCCL's texts are constants.
        let text = unsafe { CStr::from_ptr((self.error_string)(code)) }.to_string_lossy();
        Err(Error::System(format!("NCCL: {what}: {text}")))
    }
}

/// The version of NCCL; 22809 is 2.28.9.
///
/// # Errors
/// [`Error::System`] if NCCL is missing.
pub fn version() -> Result<i32> {
    let nccl = functions()?;
    let mut version = 0;
    // SAFETY: the out pointer is valid.
    nccl.check("asking for the version", unsafe { (nccl.get_version)(&raw mut version) })?;
    Ok(version)
}

impl UniqueId {
    /// Makes a new id.
    pub fn new() -> Result<UniqueId> {
        let nccl = functions()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: the out pointer is valid.
        nccl.check("making an id", unsafe { (nccl.get_unique_id)(&raw mut id) })?;
        Ok(id)
    }
}

/// A non-blocking communicator.
pub struct Communicator {
    nccl: &'static Functions,
    /// Null after `ncclCommDestroy` or `ncclCommAbort`. Locked during each function, and from the start of a group to
    /// its end. None of these blocks.
    handle: Mutex<Handle<c_void>>,
}

/// An NCCL group in progress. It holds the communicator's lock, so nobody can end the communicator.
pub struct NcclGroupGuard<'a> {
    nccl: &'static Functions,
    handle: &'a Handle<c_void>,
}

impl Communicator {
    /// Starts to create a communicator of `size` ranks on the current context's GPU. It is usable when
    /// [`Communicator::is_ready`].
    pub fn start(size: usize, id: UniqueId, rank: usize) -> Result<Communicator> {
        let nccl = functions()?;
        let number = |value: usize| c_int::try_from(value).unwrap_or(c_int::MAX);
        let mut config = Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 21400, blocking: 0 };
        // A thread of NCCL may write the handle there again at any later time, so the memory is never freed.
        let handle_slot: *mut *mut c_void = Box::leak(Box::new(ptr::null_mut()));
        // SAFETY: the out pointers are valid.
        let code = unsafe { (nccl.init)(handle_slot, number(size), id, number(rank), &raw mut config) };
        nccl.check("making a communicator", code)?;
        // SAFETY: the pointer is valid; a later write there stores the same handle.
        let handle = unsafe { handle_slot.read_volatile() };
        Ok(Communicator { nccl, handle: Mutex::new(Handle(handle)) })
    }

    /// Whether the last operation has completed.
    ///
    /// # Errors
    /// [`Error::System`] if it or an earlier one failed; [`Error::State`] after [`Communicator::abort`].
    pub fn is_ready(&self) -> Result<bool> {
        let (nccl, mut code) = (self.nccl, SUCCESS);
        // SAFETY: the handle is alive, the out pointer valid.
        nccl.check("asking for errors", unsafe { (nccl.async_error)(self.handle()?.0, &raw mut code) })?;
        nccl.check("an operation", code)?;
        Ok(code == SUCCESS)
    }

    /// Runs `body` in one NCCL group, which fuses its operations.
    ///
    /// # Errors
    /// Those of `body`; [`Error::System`].
    pub fn grouped(&self, body: impl FnOnce(&NcclGroupGuard<'_>) -> Result<()>) -> Result<()> {
        let (nccl, handle) = (self.nccl, self.handle()?);
        // SAFETY: no arguments.
        nccl.check("starting a group", unsafe { (nccl.group_start)() })?;
        let done = body(&NcclGroupGuard { nccl, handle: &handle });
        // SAFETY: ends the group that this thread started.
        nccl.check("ending a group", unsafe { (nccl.group_end)() })?;
        done
    }

    /// Makes the operator that multiplies each input by `factor`, the bytes of an element of `dtype`, and adds them.
    ///
    /// # Errors
    /// [`Error::System`]; [`Error::Internal`] for a type that NCCL lacks.
    pub fn scaled_sum(&self, factor: &[u8], dtype: DType) -> Result<RedOp> {
        if factor.len() != dtype.size() {
            return Err(Error::Internal(format!("a factor of {} has {} bytes", dtype.name(), factor.len())));
        }
        let (mut op, code, factor) = (0, code_of(dtype)?, factor.as_ptr().cast());
        // SAFETY: the handle is alive, the out pointer valid; NCCL reads the factor, an element, before it returns.
        let made = unsafe { (self.nccl.make_scaled_sum)(&raw mut op, factor, code, HOST_IMMEDIATE, self.handle()?.0) };
        self.nccl.check("making an operator", made).map(|()| RedOp(op))
    }

    /// Frees an operator of [`Communicator::scaled_sum`], after the operations with it have been started.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn free_operator(&self, op: RedOp) -> Result<()> {
        // SAFETY: the handle is alive.
        self.nccl.check("freeing an operator", unsafe { (self.nccl.free_operator)(op.0, self.handle()?.0) })
    }

    /// Starts to finalize the communicator and its enqueued work. Done when [`Communicator::is_ready`]. Collective.
    pub fn finish(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        self.nccl.check("ending a communicator", unsafe { (self.nccl.finalize)(self.handle()?.0) })
    }

    /// Frees the communicator, after [`Communicator::finish`] has completed.
    pub fn destroy(&self) {
        self.end(self.nccl.destroy);
    }

    /// Aborts the communicator and its enqueued work, without the other ranks. Later calls do nothing.
    pub fn abort(&self) {
        self.end(self.nccl.abort);
    }

    fn end(&self, function: unsafe extern "C" fn(*mut c_void) -> c_int) {
        let old = std::mem::replace(&mut lock(&self.handle).0, ptr::null_mut());
        if !old.is_null() {
            // SAFETY: alive until here; no other thread can get the handle any more.
            unsafe { function(old) };
        }
    }

    fn handle(&self) -> Result<MutexGuard<'_, Handle<c_void>>> {
        let handle = lock(&self.handle);
        if handle.0.is_null() { Err(Error::State("the communicator was ended".into())) } else { Ok(handle) }
    }
}

/// Memory of an NCCL operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NcclBuffers {
    /// What this rank gives.
    pub from: Address,
    /// What this rank gets.
    pub to: Address,
    /// Elements of a block.
    pub count: usize,
    /// The element type.
    pub dtype: DType,
}

impl NcclBuffers {
    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }
}

/// An NCCL operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NcclOperation {
    /// Reduces the inputs of all ranks; all ranks get the result.
    AllReduce(RedOp),
    /// Reduces the inputs of all ranks; this rank gets the result.
    Reduce(RedOp, usize),
    /// Copies the input of this rank to all ranks.
    Broadcast(usize),
    /// Sends the input, a block, of every rank to all ranks.
    AllGather,
    /// Reduces block r of all ranks; rank r gets the result.
    ReduceScatter(RedOp),
    /// Sends the input to this rank, which receives it.
    Send(usize),
    /// Receives the output from this rank.
    Receive(usize),
}

impl NcclGroupGuard<'_> {
    /// Starts `operation`, whose peers start their parts.
    ///
    /// # Errors
    /// [`Error::System`]; [`Error::Internal`] for a reduction of a type that NCCL lacks.
    ///
    /// # Safety
    /// The memory is valid and not used otherwise until the operation has completed.
    pub unsafe fn start(&self, operation: NcclOperation, buffers: NcclBuffers, stream: &Stream) -> Result<()> {
        use NcclOperation::{AllGather, AllReduce, Broadcast, Receive, Reduce, ReduceScatter, Send};
        let (nccl, comm, stream) = (self.nccl, self.handle.0, stream.raw().cast());
        let NcclBuffers { from, to, count, dtype } = buffers;
        let (rank, bytes) = (|rank: usize| c_int::try_from(rank).unwrap_or(c_int::MAX), buffers.bytes());
        // SAFETY: the caller's promise.
        let code = unsafe {
            match operation {
                AllReduce(op) => (nccl.all_reduce)(from, to, count, code_of(dtype)?, op.0, comm, stream),
                Reduce(op, root) => (nccl.reduce)(from, to, count, code_of(dtype)?, op.0, rank(root), comm, stream),
                Broadcast(root) => (nccl.broadcast)(from, to, bytes, BYTE, rank(root), comm, stream),
                AllGather => (nccl.all_gather)(from, to, bytes, BYTE, comm, stream),
                ReduceScatter(op) => (nccl.reduce_scatter)(from, to, count, code_of(dtype)?, op.0, comm, stream),
                Send(peer) => (nccl.send)(from, bytes, BYTE, rank(peer), comm, stream),
                Receive(peer) => (nccl.receive)(to, bytes, BYTE, rank(peer), comm, stream),
            }
        };
        nccl.check("starting an operation", code)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Whether NCCL has reductions of `dtype`.
pub fn reduces(dtype: DType) -> bool {
    code_of(dtype).is_ok()
}

/// `ncclDataType_t` of `dtype`.
fn code_of(dtype: DType) -> Result<c_int> {
    Ok(match dtype {
        DType::I8 => 0,
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        DType::Bool | DType::I16 | DType::U16 | DType::Complex64 | DType::Complex128 => {
            return Err(Error::Internal(format!("NCCL has no reduction of {}", dtype.name())));
        }
    })
}
