//! C API of send and receive.

use std::borrow::Cow;
use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr;

use super::arguments::{CBuffer, Views, number, reference, sized, store, text, to_timeout, views};
use super::collectives::{CWork, Callback};
use super::functions::status;
use super::groups::CGroup;
use crate::error::{Error, Result};
use crate::group::MessageOptions;
use crate::p2p::{Status, Then};
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
    /// The options; puts the tensors into `list` and the text of the name into `name`.
    ///
    /// # Safety
    /// The pointers are valid.
    unsafe fn read<'a, 'n>(
        &self,
        sends: bool,
        list: &mut Views<'a>,
        name: &'n mut Cow<'a, str>,
    ) -> Result<MessageOptions<'n>> {
        // SAFETY: the caller's promise.
        unsafe {
            views(self.buffers, self.count, list)?;
            *name = text(self.name);
        }
        let options = MessageOptions::from_codes(sends, self.peer, self.tag, name, to_timeout(self.timeout))?;
        Ok(MessageOptions { exact: self.exact != 0, ..options })
    }

    fn then(&self) -> Option<Then> {
        let callback = Callback { done: self.done?, context: self.context };
        Some(Box::new(move |result| callback.call(&result.map(drop))))
    }
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
        let (group, message) = (&reference(group, "group")?.0, sized(message, offset_of!(CMessage, done), "message")?);
        let (mut list, mut name) = (Views::new(), Cow::default());
        let options = message.read(true, &mut list, &mut name)?;
        let sent = point_to_point::send(group, &list, options, message.then())?;
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
        let (group, message) = (&reference(group, "group")?.0, sized(message, offset_of!(CMessage, done), "message")?);
        let (mut list, mut name) = (Views::new(), Cow::default());
        let options = message.read(false, &mut list, &mut name)?;
        let received = point_to_point::receive(group, &list, options, message.then())?;
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
        let ended = transfer.test()?.ok_or_else(|| Error::State("the send or receive has not ended".into()))?;
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
        let read = |message: *const CMessage| match message.is_null() {
            true => Ok(None),
            false => match sized(message, offset_of!(CMessage, done), "message")? {
                given if given.done.is_some() => {
                    Err(Error::Invalid("dl_comm_sendrecv calls no `done`; use dl_comm_send and dl_comm_receive".into()))
                }
                given => Ok(Some(given)),
            },
        };
        let (send, receive) = (read(send)?, read(receive)?);
        let (mut from, mut into) = (Views::new(), Views::new());
        let (mut send_name, mut receive_name) = (Cow::default(), Cow::default());
        let send = match &send {
            Some(message) => Some(message.read(true, &mut from, &mut send_name)?),
            None => None,
        };
        let receive = match &receive {
            Some(message) => Some(message.read(false, &mut into, &mut receive_name)?),
            None => None,
        };
        let send = send.map(|options| (&from[..], options));
        let receive = receive.map(|options| (&into[..], options));
        let received = point_to_point::send_receive(group, send, receive)?;
        match received {
            Some(received) if !result.is_null() => store(result, CStatus::of(received)?, "status"),
            _ => Ok(()),
        }
    })
}
