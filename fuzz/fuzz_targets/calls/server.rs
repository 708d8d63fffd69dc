//! A parameter server from its making to its end, with any operations.

use std::ffi::{c_int, c_void};
use std::ptr;

use arbitrary::Arbitrary;
use dl_comm_core::capi::{self, CGroup, CParameterServer, CUpdate};

use super::{TestBuffer, check, lists};

#[derive(Debug, Arbitrary)]
pub enum Operation {
    Send(Update),
    Receive(Update),
    /// The tensor, the deadline, and after how many blocks the callback fails.
    Modify(u8, f64, u8),
    Close(f64),
}

#[derive(Debug, Arbitrary)]
pub struct Update {
    first: u8,
    /// A number of tensors that no list has.
    endless: bool,
    buffers: Option<Vec<TestBuffer>>,
    rule: i8,
    factor: f64,
    timeout: f64,
    /// Bytes of the structure that the caller knows, in words; `None`: all.
    words: Option<u8>,
    started: bool,
}

#[derive(Debug, Arbitrary)]
pub struct Server {
    tensors: Vec<TestBuffer>,
    timeout: f64,
    operations: Vec<Operation>,
}

/// Fails after so many blocks.
///
/// # Safety
/// `context` is a number; `memory` has `count` elements.
unsafe extern "C" fn change(context: *mut c_void, memory: *mut c_void, _first: usize, count: usize) -> c_int {
    // SAFETY: as above; every element has at least one byte.
    unsafe {
        memory.cast::<u8>().write_bytes(1, count);
        let left = context.cast::<u8>();
        *left = (*left).saturating_sub(1);
        c_int::from(*left == 0)
    }
}

impl Update {
    /// # Safety
    /// `server` is valid.
    unsafe fn make(&self, server: *const CParameterServer, sends: bool) -> c_int {
        let list = self.buffers.as_ref().map(|buffers| lists(buffers));
        let listed = list.as_ref().map_or(1, |list| list.buffers.len());
        let size = self.words.map_or(size_of::<CUpdate>(), |words| usize::from(words % 20) * 8);
        let update = CUpdate {
            // No byte after the structure is read.
            size: size.min(size_of::<CUpdate>()),
            first: usize::from(self.first % 12),
            count: if self.endless && list.is_none() { usize::MAX } else { listed },
            buffers: list.as_ref().map_or(ptr::null(), |list| list.buffers.as_ptr()),
            rule: c_int::from(self.rule % 6),
            factor: self.factor,
            timeout: self.timeout,
            done: None,
            context: ptr::null_mut(),
        };
        let function = if sends { capi::dl_comm_parameter_server_send } else { capi::dl_comm_parameter_server_receive };
        // SAFETY: the arguments follow dl_comm.h; the memory lives until the operation has ended.
        unsafe {
            if !self.started {
                return function(server, &update, ptr::null_mut());
            }
            let mut work = ptr::null_mut();
            let code = function(server, &update, &mut work);
            assert_eq!(code == 0, !work.is_null());
            if code < 0 {
                return code;
            }
            let waited = capi::dl_comm_wait(work, 0.0);
            assert_eq!(capi::dl_comm_work_free(work), 0);
            waited
        }
    }
}

impl Server {
    /// # Safety
    /// `group` is NULL or valid.
    pub unsafe fn make(&self, group: *const CGroup) -> c_int {
        let list = lists(&self.tensors);
        let mut server = ptr::null_mut();
        // SAFETY: the arguments follow dl_comm.h.
        unsafe {
            let (buffers, count) = (list.buffers.as_ptr(), list.buffers.len());
            let code = capi::dl_comm_parameter_server_create(group, buffers, count, self.timeout, &mut server);
            assert_eq!(code == 0, !server.is_null());
            // NULL is refused, too.
            for operation in self.operations.iter().take(8) {
                let code = match operation {
                    Operation::Send(update) => update.make(server, true),
                    Operation::Receive(update) => update.make(server, false),
                    Operation::Modify(tensor, timeout, blocks) => {
                        let mut left = *blocks;
                        let (tensor, left) = (usize::from(tensor % 12), (&raw mut left).cast());
                        capi::dl_comm_parameter_server_modify(server, tensor, *timeout, Some(change), left)
                    }
                    Operation::Close(timeout) => capi::dl_comm_parameter_server_close(server, *timeout),
                };
                assert!(code < 0 || !server.is_null());
                check(code, operation);
            }
            assert_eq!(capi::dl_comm_parameter_server_free(server), 0);
            code
        }
    }
}
