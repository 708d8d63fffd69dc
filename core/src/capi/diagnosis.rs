//! Statistics, dumps, the timeline, and what a binding does with signals and messages.

use std::ffi::{c_char, c_int};

use super::arguments::{copy_text, text};
use super::status::{catch, safe_functions, status};
use crate::dump;
use crate::error::Error;
use crate::log::{Sink, set_sink};
use crate::process_info::process_info;
use crate::runtime;
use crate::signals;
use crate::stacks;

safe_functions! {
    fn dl_comm_stacks_from(signal: c_int, fd: c_int) -> c_int {
        status(|| {
            stacks::come_from(signal, fd);
            Ok(())
        })
    }
    fn dl_comm_dump_on_signal(enabled: c_int) { dump::listen_for_signal(enabled != 0); }
    fn dl_comm_timeline_stop() -> c_int { status(runtime::stop_timeline) }
    fn dl_comm_set_signal_check(check: Option<signals::Check>) { signals::set_check(check); }
    fn dl_comm_set_log(log: Option<Sink>) { set_sink(log); }
}

/// `dl_comm_stats` of `dl_comm.h`.
///
/// # Safety
/// `text` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_stats(text: *mut c_char, capacity: usize) -> c_int {
    // SAFETY: the caller's promise.
    catch(|| unsafe { copy_text(&runtime::stats()?.to_string(), text, capacity) })
}

/// `dl_comm_dump` of `dl_comm.h`.
///
/// # Safety
/// `folder` is a C string or NULL; `path` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_dump(folder: *const c_char, path: *mut c_char, capacity: usize) -> c_int {
    catch(|| {
        // SAFETY: the caller's promise.
        let folder = (!folder.is_null()).then(|| unsafe { text(folder) });
        let file = runtime::dump(folder.as_deref())?;
        // SAFETY: the caller's promise.
        unsafe { copy_text(&file.to_string_lossy(), path, capacity) }
    })
}

/// `dl_comm_note_refusal` of `dl_comm.h`.
///
/// # Safety
/// `error` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_note_refusal(error: *const c_char) -> c_int {
    catch(|| {
        // SAFETY: the caller's promise.
        runtime::note_refusal(&unsafe { text(error) });
        Ok(0)
    })
}

/// `dl_comm_timeline_start` of `dl_comm.h`.
///
/// # Safety
/// `folder` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_timeline_start(folder: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    status(|| match unsafe { text(folder) } {
        folder if folder.is_empty() => Err(Error::Invalid("a timeline needs a folder".into())),
        folder => runtime::start_timeline(&folder),
    })
}

/// `dl_comm_describe` of `dl_comm.h`.
///
/// # Safety
/// As for [`dl_comm_stats`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dl_comm_describe(text: *mut c_char, capacity: usize) -> c_int {
    // SAFETY: the caller's promise.
    catch(|| unsafe { copy_text(&process_info()?, text, capacity) })
}
