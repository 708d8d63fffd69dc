//! An MPI communicator: non-blocking operations, polled under a deadline. The only file that calls MPI functions.

use std::ffi::{CStr, c_char, c_int};
use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::time::Duration;

use mpi::Threading;
use mpi::environment::{is_finalized, threading_support};
use mpi::ffi;
use smallvec::{SmallVec, smallvec};

use crate::error::{Error, Result};
use crate::lock::lock;
use crate::log::log_line;
use crate::transport::WaitContext;
use crate::transport::backoff::Backoff;

/// Serializes MPI calls when MPI allows only one thread at a time.
static MPI_LOCK: Mutex<()> = Mutex::new(());

/// A transfer in flight.
pub type Request = ffi::MPI_Request;

/// A communicator. A duplicate is freed on drop.
pub struct Comm {
    raw: ffi::MPI_Comm,
    serialized: bool,
    owned: bool,
}

// SAFETY: any thread may use a communicator handle; `call` serializes the calls where MPI requires it.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl Comm {
    /// The communicator of all ranks. MPI must be initialized.
    pub fn world() -> Comm {
        // SAFETY: reads a constant of the library.
        let raw = unsafe { ffi::RSMPI_COMM_WORLD };
        Comm { raw, serialized: threading_support() != Threading::Multiple, owned: false }
    }

    fn call(&self, function: impl FnOnce() -> c_int) -> Result<()> {
        let guard = self.serialized.then(|| lock(&MPI_LOCK));
        let code = function();
        drop(guard);
        if code == 0 { Ok(()) } else { Err(Error::Network(error_text(code))) }
    }

    /// Starts an operation.
    fn start(&self, function: impl FnOnce(&mut Request) -> c_int) -> Result<Request> {
        // SAFETY: reads a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        self.call(|| function(&mut request)).map(|()| request)
    }

    pub fn rank(&self) -> Result<usize> {
        let mut rank = 0;
        // SAFETY: `rank` is valid during the call.
        self.call(|| unsafe { ffi::MPI_Comm_rank(self.raw, &mut rank) })?;
        Ok(usize::try_from(rank).unwrap_or(0))
    }

    pub fn size(&self) -> Result<usize> {
        let mut size = 0;
        // SAFETY: `size` is valid during the call.
        self.call(|| unsafe { ffi::MPI_Comm_size(self.raw, &mut size) })?;
        Ok(usize::try_from(size).unwrap_or(1))
    }

    /// Duplicates the communicator; errors on the duplicate are returned. Collective.
    pub fn duplicate(&self, wait_ctx: &WaitContext<'_>) -> Result<Comm> {
        // SAFETY: reads a constant of the library.
        let mut raw = Box::new(unsafe { ffi::RSMPI_COMM_NULL });
        // SAFETY: `raw` lives until the request completes, and is leaked if it never does.
        let request = self.start(|request| unsafe { ffi::MPI_Comm_idup(self.raw, &mut *raw, request) })?;
        if let Err(error) = self.wait(&mut [request], wait_ctx, "the other ranks") {
            Box::leak(raw);
            return Err(error);
        }
        let comm = Comm { raw: *raw, serialized: self.serialized, owned: true };
        comm.return_errors()?;
        Ok(comm)
    }

    /// From now on, calls return their errors instead of ending the process.
    pub fn return_errors(&self) -> Result<()> {
        // SAFETY: a live communicator and a constant.
        self.call(|| unsafe { ffi::MPI_Comm_set_errhandler(self.raw, ffi::RSMPI_ERRORS_RETURN) })
    }

    /// Gathers `record` from all ranks, ordered by rank. All records have one length. Collective.
    pub fn allgather(&self, record: &[u8], wait_ctx: &WaitContext<'_>) -> Result<Vec<Vec<u8>>> {
        let count = int(record.len())?;
        let send = record.to_vec();
        let mut recv = vec![0u8; record.len() * self.size()?];
        // SAFETY: both buffers live until the request completes, and are leaked if it never does.
        let request = self.start(|request| unsafe {
            let byte = ffi::RSMPI_UINT8_T;
            let (from, to) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
            ffi::MPI_Iallgather(from, count, byte, to, count, byte, self.raw, request)
        })?;
        if let Err(error) = self.wait(&mut [request], wait_ctx, "the other ranks") {
            send.leak();
            recv.leak();
            return Err(error);
        }
        Ok(recv.chunks_exact(record.len()).map(<[u8]>::to_vec).collect())
    }

    /// The maximum of each number over all ranks. Collective.
    pub fn allreduce_max<const N: usize>(&self, values: [u64; N], wait_ctx: &WaitContext<'_>) -> Result<[u64; N]> {
        let (count, send, mut recv) = (int(N)?, Box::new(values), Box::new([0; N]));
        // SAFETY: both buffers live until the request completes, and are leaked if it never does.
        let request = self.start(|request| unsafe {
            let (from, to) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
            ffi::MPI_Iallreduce(from, to, count, ffi::RSMPI_UINT64_T, ffi::RSMPI_MAX, self.raw, request)
        })?;
        if let Err(error) = self.wait(&mut [request], wait_ctx, "the other ranks") {
            Box::leak(send);
            Box::leak(recv);
            return Err(error);
        }
        Ok(*recv)
    }

    /// Waits until every rank has called it. Collective.
    pub fn barrier(&self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        // SAFETY: the operation has no buffers.
        let request = self.start(|request| unsafe { ffi::MPI_Ibarrier(self.raw, request) })?;
        self.wait(&mut [request], wait_ctx, "the other ranks")
    }

    /// Moves messages along that are sent already.
    pub fn progress(&self) -> Result<()> {
        let mut found = 0;
        // SAFETY: constants of the library, and a valid flag.
        self.call(|| unsafe {
            let (source, tag) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG);
            ffi::MPI_Iprobe(source, tag, self.raw, &mut found, ffi::RSMPI_STATUS_IGNORE)
        })
    }

    /// The largest tag of a message.
    pub fn max_tag(&self) -> Result<usize> {
        let mut value: *mut c_int = std::ptr::null_mut();
        let mut found = 0;
        // SAFETY: the attribute of the world's communicator points to an int that lives as long as MPI.
        self.call(|| unsafe {
            let (key, place) = (ffi::MPI_TAG_UB as c_int, (&raw mut value).cast());
            ffi::MPI_Comm_get_attr(ffi::RSMPI_COMM_WORLD, key, place, &mut found)
        })?;
        // SAFETY: as above. Every MPI allows tags up to 32767.
        let tag = if found == 0 || value.is_null() { 32767 } else { unsafe { *value } };
        Ok(usize::try_from(tag).unwrap_or(32767))
    }

    /// Starts sending `bytes` to rank `to`.
    ///
    /// # Safety
    /// The bytes stay valid and unchanged until the request completes.
    pub unsafe fn send(&self, bytes: &[u8], to: usize, tag: usize) -> Result<Request> {
        let (count, to, tag) = (int(bytes.len())?, int(to)?, int(tag)?);
        // SAFETY: guaranteed by the caller.
        self.start(|request| unsafe {
            ffi::MPI_Isend(bytes.as_ptr().cast(), count, ffi::RSMPI_UINT8_T, to, tag, self.raw, request)
        })
    }

    /// Starts receiving at most `bytes.len()` bytes from rank `from`.
    ///
    /// # Safety
    /// The bytes stay valid and are not accessed until the request completes.
    pub unsafe fn receive(&self, bytes: &mut [u8], from: usize, tag: usize) -> Result<Request> {
        let (count, from, tag) = (int(bytes.len())?, int(from)?, int(tag)?);
        // SAFETY: guaranteed by the caller.
        self.start(|request| unsafe {
            ffi::MPI_Irecv(bytes.as_mut_ptr().cast(), count, ffi::RSMPI_UINT8_T, from, tag, self.raw, request)
        })
    }

    /// Starts receiving a message with this tag from any rank, if there is one.
    ///
    /// # Safety
    /// As for [`Comm::receive`].
    pub unsafe fn receive_arrived(&self, bytes: &mut [u8], tag: usize) -> Result<Option<Request>> {
        let (count, tag, mut found) = (int(bytes.len())?, int(tag)?, 0);
        let mut message = MaybeUninit::<ffi::MPI_Message>::uninit();
        // SAFETY: the places are valid during the call; the others are constants.
        self.call(|| unsafe {
            let (any, status) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_STATUS_IGNORE);
            ffi::MPI_Improbe(any, tag, self.raw, &mut found, message.as_mut_ptr(), status)
        })?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: guaranteed by the caller; MPI has written the message.
        let request = self.start(|request| unsafe {
            ffi::MPI_Imrecv(bytes.as_mut_ptr().cast(), count, ffi::RSMPI_UINT8_T, message.as_mut_ptr(), request)
        })?;
        Ok(Some(request))
    }

    /// As `test_some`, and calls `done` with the index, the source and the received bytes of each request that has
    /// completed. The source and bytes of a send have no meaning.
    pub fn test_messages(&self, requests: &mut [Request], mut done: impl FnMut(usize, usize, usize)) -> Result<()> {
        let (count, mut completed) = (int(requests.len())?, 0);
        let mut indices = vec![0; requests.len()];
        let mut statuses = vec![MaybeUninit::<ffi::MPI_Status>::zeroed(); requests.len()];
        // SAFETY: `requests` are live requests of this process or null; the other two have the same length.
        self.call(|| unsafe {
            let (requests, indices) = (requests.as_mut_ptr(), indices.as_mut_ptr());
            ffi::MPI_Testsome(count, requests, &mut completed, indices, statuses.as_mut_ptr().cast())
        })?;
        // MPI_UNDEFINED, a negative number, if all requests are null.
        let completed = usize::try_from(completed).unwrap_or(0);
        for (&index, status) in indices[..completed].iter().zip(&statuses) {
            let mut len = 0;
            // SAFETY: MPI has written the status, of integers; the others are constants.
            let source = unsafe {
                let status = status.assume_init_ref();
                self.call(|| ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &mut len))?;
                status.MPI_SOURCE
            };
            done(from_int(index), from_int(source), from_int(len));
        }
        Ok(())
    }

    /// Waits until all requests complete; `awaited` names the awaited ranks.
    ///
    /// # Errors
    /// The wait context's errors (the requests stay in flight), or a failure of MPI.
    pub fn wait(&self, requests: &mut [Request], wait_ctx: &WaitContext<'_>, awaited: &str) -> Result<()> {
        let (mut done, mut pending, mut backoff) = (Vec::new(), requests.len(), Backoff::default());
        loop {
            self.test_some(requests, &mut done)?;
            pending -= done.drain(..).count();
            if pending == 0 {
                return Ok(());
            }
            backoff.nap(|| wait_ctx.check(Duration::ZERO, &|| awaited.to_owned()))?;
        }
    }

    /// Moves the requests along, without waiting; MPI sets those that have completed to null. Adds their indices to
    /// `done`.
    ///
    /// # Errors
    /// A failure of MPI.
    pub fn test_some(&self, requests: &mut [Request], done: &mut Vec<usize>) -> Result<()> {
        let count = int(requests.len())?;
        let mut indices: SmallVec<[c_int; 32]> = smallvec![0; requests.len()];
        let mut completed = 0;
        // SAFETY: `requests` are live requests of this process or null; `indices` has the same length.
        self.call(|| unsafe {
            let (requests, indices) = (requests.as_mut_ptr(), indices.as_mut_ptr());
            ffi::MPI_Testsome(count, requests, &mut completed, indices, ffi::RSMPI_STATUSES_IGNORE)
        })?;
        // MPI_UNDEFINED, a negative number, if all requests are null.
        let completed = usize::try_from(completed).unwrap_or(0);
        done.extend(indices[..completed].iter().filter_map(|&index| usize::try_from(index).ok()));
        Ok(())
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        if self.owned && !is_finalized() {
            let mut raw = self.raw;
            // SAFETY: a live duplicate, freed once.
            if let Err(error) = self.call(|| unsafe { ffi::MPI_Comm_free(&mut raw) }) {
                log_line(&format!("freeing a communicator: {error}"));
            }
        }
    }
}

fn int(value: usize) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| Error::Internal(format!("{value} is too large for MPI's int")))
}

/// A negative number of a completed operation means that it has no such property.
fn from_int(value: c_int) -> usize {
    usize::try_from(value).unwrap_or(0)
}

fn error_text(code: c_int) -> String {
    let mut text = [0 as c_char; 1024];
    let mut len = 0;
    // SAFETY: 1024 is more than MPI_MAX_ERROR_STRING of every library (256 to 512 and a NUL).
    let found = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut len) } == 0;
    // SAFETY: MPI wrote a NUL-terminated string, or the buffer is all zero.
    let message = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
    if found { format!("MPI: {message}") } else { format!("MPI error {code}") }
}
