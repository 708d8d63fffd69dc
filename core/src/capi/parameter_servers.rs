//! C API of parameter servers.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::ptr;

use super::arguments::{CBuffer, Given, reference, sized, store, tensors, to_timeout};
use super::collectives::{CWork, Callback};
use super::groups::CGroup;
use super::status::{free, status};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::group::OnComplete;
use crate::parameter_server::{Action, Operation, ParameterServer, Rule};
use crate::runtime::{check_fork, create_parameter_server, interrupt};

/// `dl_comm_parameter_server_t` of `dl_comm.h`.
pub struct CParameterServer(ParameterServer);

/// `dl_comm_update_t`; see `dl_comm.h` for the contract.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUpdate {
    /// Bytes of the structure that the caller knows.
    pub size: usize,
    /// The first tensor of the server.
    pub first: usize,
    /// The number of tensors.
    pub count: usize,
    /// Their memory, or null for a rule without elements.
    pub buffers: *const CBuffer,
    /// The code of the rule.
    pub rule: c_int,
    /// The factor of the scaled addition.
    pub factor: f64,
    /// The deadline in seconds; 0 for the group's, negative for none.
    pub timeout: f64,
    /// Called with the result, or null.
    pub done: Option<unsafe extern "C" fn(*mut c_void, c_int, *const std::ffi::c_char)>,
    /// The first argument of `done`.
    pub context: *mut c_void,
}

/// # Safety
/// `buffers` is NULL or has `count` valid entries.
unsafe fn memory(buffers: *const CBuffer, count: usize) -> Result<Vec<Buffer>> {
    // SAFETY: the caller's promise.
    Ok(unsafe { tensors(buffers, count) }?.iter().map(|tensor| tensor.buffer).collect())
}

/// `dl_comm_parameter_server_create` of `dl_comm.h`.
///
/// # Safety
/// The pointers are NULL or valid as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_parameter_server_create(
    group: *const CGroup,
    buffers: *const CBuffer,
    count: usize,
    timeout: f64,
    server: *mut *mut CParameterServer,
) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        store(server, ptr::null_mut(), "server")?;
        let group = &reference(group, "group")?.0;
        let made = create_parameter_server(group, memory(buffers, count), to_timeout(timeout))?;
        store(server, Box::into_raw(Box::new(CParameterServer(made))), "server")
    })
}

/// An operation of a caller.
///
/// # Safety
/// The pointers are NULL or valid as the header says.
unsafe fn operation<'a>(update: *const CUpdate, sends: bool) -> Result<(Operation, Given<'a, CUpdate>)> {
    // SAFETY: the caller's promise.
    let update = unsafe { sized(update, offset_of!(CUpdate, done), "update") }?;
    let action = match sends {
        true => Action::Send(Rule::from_code(update.rule, update.factor)?),
        false => Action::Receive,
    };
    let end = update.first.checked_add(update.count);
    let tensors =
        update.first..end.ok_or_else(|| Error::Invalid("count is larger than any number of tensors".into()))?;
    let has_elements = !matches!(action, Action::Send(rule) if !rule.has_elements());
    let count = if has_elements { update.count } else { 0 };
    // SAFETY: the caller's promise.
    let buffers = unsafe { memory(update.buffers, count) }?;
    Ok((Operation { action, tensors, buffers, timeout: to_timeout(update.timeout) }, update))
}

/// Runs or starts an operation.
///
/// # Safety
/// As for [`dl_comm_parameter_server_send`].
unsafe fn run(server: *const CParameterServer, update: *const CUpdate, sends: bool, work: *mut *mut CWork) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        check_fork()?;
        let server = &reference(server, "server")?.0;
        if work.is_null() {
            let (operation, given) = operation(update, sends)?;
            if given.done.is_some() {
                return Err(Error::Invalid("an operation without `work` calls no `done`".into()));
            }
            return server.run(operation, interrupt);
        }
        store(work, ptr::null_mut(), "work")?;
        let (operation, given) = operation(update, sends)?;
        let callback = given.done.map(|done| Callback { done, context: given.context });
        let then = callback.map(|callback| -> OnComplete { Box::new(move |result| callback.call(&result)) });
        let handle = server.submit(operation, then)?;
        store(work, Box::into_raw(Box::new(CWork::Call(handle))), "work")
    })
}

/// `dl_comm_parameter_server_send` of `dl_comm.h`.
///
/// # Safety
/// The pointers are NULL or valid as the header says; with `work` the tensors stay valid until the operation has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_parameter_server_send(
    server: *const CParameterServer,
    update: *const CUpdate,
    work: *mut *mut CWork,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { run(server, update, true, work) }
}

/// `dl_comm_parameter_server_receive` of `dl_comm.h`.
///
/// # Safety
/// As for [`dl_comm_parameter_server_send`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_parameter_server_receive(
    server: *const CParameterServer,
    update: *const CUpdate,
    work: *mut *mut CWork,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { run(server, update, false, work) }
}

/// `dl_comm_parameter_server_modify` of `dl_comm.h`.
///
/// # Safety
/// `server` is NULL or valid; `change` takes `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_parameter_server_modify(
    server: *const CParameterServer,
    tensor: usize,
    timeout: f64,
    change: Option<unsafe extern "C" fn(*mut c_void, *mut c_void, usize, usize) -> c_int>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        check_fork()?;
        let server = &reference(server, "server")?.0;
        let change = change.ok_or_else(|| Error::Invalid("change is NULL".into()))?;
        server.modify(tensor, to_timeout(timeout), &mut |memory, first, count| match change(
            context,
            memory.cast(),
            first,
            count,
        ) {
            0 => Ok(()),
            code => Err(Error::Invalid(format!("the change of a shard returned {code}"))),
        })
    })
}

/// `dl_comm_parameter_server_close` of `dl_comm.h`.
///
/// # Safety
/// `server` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_parameter_server_close(server: *const CParameterServer, timeout: f64) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        check_fork()?;
        reference(server, "server")?.0.close(to_timeout(timeout), interrupt)
    })
}

/// `dl_comm_parameter_server_free` of `dl_comm.h`.
///
/// # Safety
/// `server` is NULL, or a handle that is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_parameter_server_free(server: *mut CParameterServer) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { free(server) }
}
