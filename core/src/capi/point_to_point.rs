//! C API of send and receive.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr;

use super::arguments::{CBuffer, CDevice, Given, array, number, reference, sized, store, text, to_device, to_timeout};
use super::collectives::{CWork, Callback};
use super::groups::CGroup;
use super::status::status;
use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::MessageOptions;
use crate::p2p::{Spans, Status, Then};
use crate::runtime::point_to_point;

/// `dl_comm_message_t`; see `dl_comm.h` for the contract.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CMessage {
    /// Bytes of the structure that the caller knows.
    pub size: usize,
    /// The tensors.
    pub buffers: *const CBuffer,
    /// The number of tensors.
    pub count: usize,
    /// The other rank, or -1 for any.
    pub peer: c_int,
    /// The tag, or -1 for any.
    pub tag: c_int,
    /// The name, or null.
    pub name: *const c_char,
    /// The deadline in seconds; 0 for the group's, negative for none.
    pub timeout: f64,
    /// Called with the result, or null.
    pub done: Option<unsafe extern "C" fn(*mut c_void, c_int, *const c_char)>,
    /// The first argument of `done`.
    pub context: *mut c_void,
    /// Not 0: a receive takes only a message of its own length. Absent in the first version.
    pub exact: c_int,
    /// The device of the tensors, or null for host memory. Absent in the first versions.
    pub device: *const CDevice,
}

/// `dl_comm_status_t`; see `dl_comm.h`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CStatus {
    /// The rank that has sent the message.
    pub source: c_int,
    /// Its tag.
    pub tag: c_int,
    /// Its length.
    pub bytes: usize,
}

impl CStatus {
    fn of(status: Status) -> Result<CStatus> {
        Ok(CStatus { source: number(status.source)?, tag: number(status.tag as usize)?, bytes: status.bytes })
    }
}

impl CMessage {
    /// Adds the memory of the tensors to `spans`: a message that moves would be slower.
    ///
    /// # Safety
    /// The pointers are valid.
    #[inline(always)]
    unsafe fn add_to(&self, spans: &mut Spans, sends: bool) -> Result<()> {
        // SAFETY: the caller's promise.
        for buffer in unsafe { array(self.buffers, self.count, "the list of buffers") }? {
            let &CBuffer { src, dst, length, dtype, .. } = buffer;
            spans.add_buffer(&Buffer::new(src.cast(), dst.cast(), length, DType::from_code(dtype)?), sends)?;
        }
        if self.device.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { to_device(self.device) }.map_or(Ok(()), |device| point_to_point::place_on(spans, device))
    }

    #[inline(always)]
    fn options<'n>(&self, sends: bool, name: &'n str) -> Result<MessageOptions<'n>> {
        let options = MessageOptions::from_codes(sends, self.peer, self.tag, name, to_timeout(self.timeout))?;
        Ok(MessageOptions { exact: self.exact != 0, ..options })
    }

    fn then(&self) -> Option<Then> {
        let callback = Callback { done: self.done?, context: self.context };
        Some(Box::new(move |result| callback.call(&result.map(drop))))
    }
}

/// The structure of a caller, as this version knows it.
///
/// # Safety
/// As for [`sized`].
#[inline(always)]
unsafe fn given<'a>(message: *const CMessage) -> Result<Given<'a, CMessage>> {
    // SAFETY: the caller's promise.
    unsafe { sized(message, offset_of!(CMessage, done), "message") }
}

/// As `given`, for a call that ends with the message.
///
/// # Safety
/// As for [`sized`].
#[inline(always)]
unsafe fn given_blocking<'a>(message: *const CMessage) -> Result<Given<'a, CMessage>> {
    // SAFETY: the caller's promise.
    let given = unsafe { given(message) }?;
    if given.done.is_some() {
        return Err(Error::Invalid("dl_comm_sendrecv calls no `done`; use dl_comm_send and dl_comm_receive".into()));
    }
    Ok(given)
}

/// `dl_comm_send` of `dl_comm.h`.
///
/// # Safety
/// The pointers are valid as the header says; the tensors stay valid until the send has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_send(group: *const CGroup, message: *const CMessage, work: *mut *mut CWork) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        store(work, ptr::null_mut(), "work")?;
        let (group, message) = (&reference(group, "group")?.0, given(message)?);
        let name = text(message.name);
        let (options, mut from) = (message.options(true, &name)?, Spans::default());
        message.add_to(&mut from, true)?;
        let sent = point_to_point::send(group, from, &options, message.then())?;
        store(work, Box::into_raw(Box::new(CWork::Message(sent))), "work")
    })
}

/// `dl_comm_receive` of `dl_comm.h`.
///
/// # Safety
/// The pointers are valid as the header says; the tensors stay valid until the receive has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_receive(
    group: *const CGroup,
    message: *const CMessage,
    work: *mut *mut CWork,
) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        store(work, ptr::null_mut(), "work")?;
        let (group, message) = (&reference(group, "group")?.0, given(message)?);
        let name = text(message.name);
        let (options, mut into) = (message.options(false, &name)?, Spans::default());
        message.add_to(&mut into, false)?;
        let received = point_to_point::receive(group, into, &options, message.then())?;
        store(work, Box::into_raw(Box::new(CWork::Message(received))), "work")
    })
}

/// `dl_comm_work_status` of `dl_comm.h`.
///
/// # Safety
/// The pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_work_status(work: *const CWork, result: *mut CStatus) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        let CWork::Message(transfer) = reference(work, "work")? else {
            return Err(Error::Invalid("only a send or receive has a status".into()));
        };
        let ended =
            point_to_point::test(transfer)?.ok_or_else(|| Error::State("the send or receive has not ended".into()))?;
        store(result, CStatus::of(ended?)?, "status")
    })
}

/// `dl_comm_sendrecv` of `dl_comm.h`.
///
/// # Safety
/// The pointers are valid as the header says, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_sendrecv(
    group: *const CGroup,
    send: *const CMessage,
    receive: *const CMessage,
    result: *mut CStatus,
) -> c_int {
    // SAFETY: the caller's promise.
    status(|| unsafe {
        let group = &reference(group, "group")?.0;
        if send.is_null() && receive.is_null() {
            return Ok(());
        }
        if receive.is_null() {
            let send = given_blocking(send)?;
            let (name, mut from) = (text(send.name), Spans::default());
            send.add_to(&mut from, true)?;
            return point_to_point::send_now(group, from, &send.options(true, &name)?);
        }
        let receive = given_blocking(receive)?;
        let (name, mut into) = (text(receive.name), Spans::default());
        receive.add_to(&mut into, false)?;
        let options = receive.options(false, &name)?;
        let received = if send.is_null() {
            point_to_point::receive_now(group, into, &options)?
        } else {
            let send = given_blocking(send)?;
            let (name, mut from) = (text(send.name), Spans::default());
            send.add_to(&mut from, true)?;
            point_to_point::exchange(group, (from, &send.options(true, &name)?), (into, &options))?
        };
        if result.is_null() { Ok(()) } else { store(result, CStatus::of(received)?, "status") }
    })
}
