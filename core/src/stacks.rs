//! The stacks of an interpreter, for dumps: they show where a rank is that others wait for. An interpreter gives them
//! without its locks, also when it hangs: it has a handler for a signal (Python's faulthandler) that writes them to a file.
//!
//! Thread rule: everything may be called from any thread.

use std::fs::File;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// The most that is kept of a text.
const MOST: usize = 1 << 18;

/// A signal, and the file that its handler writes to.
static SOURCE: Mutex<Option<(i32, i32)>> = Mutex::new(None);

/// From now on the handler of `signal` writes the stacks to file `fd`, which stays open.
pub fn come_from(signal: i32, fd: i32) {
    *SOURCE.lock().unwrap_or_else(PoisonError::into_inner) = Some((signal, fd));
}

/// The stacks, line by line; none where there is no interpreter, or no longer one.
pub fn take() -> Vec<String> {
    let source = SOURCE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((signal, fd)) = *source else { return Vec::new() };
    // SAFETY: an open file of this process, which is not closed here.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    // The handler writes where the file's position is.
    // SAFETY: changes the position of a file, no more.
    if file.set_len(0).is_err() || unsafe { libc::lseek(fd, 0, libc::SEEK_SET) } != 0 || !raise(signal) {
        return Vec::new();
    }
    let mut text = vec![0; MOST];
    let count = file.read_at(&mut text, 0).unwrap_or(0);
    String::from_utf8_lossy(&text[..count]).lines().map(str::to_owned).collect()
}

/// Has the handler of `signal` run in this thread; false when there is none, and the signal would end the process.
fn raise(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: asks for the action, which is there when the call says so.
    let action = unsafe {
        if libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) != 0 {
            return false;
        }
        action.assume_init()
    };
    if matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
        return false;
    }
    // SAFETY: sets of signals of this thread, made by the calls before they are used. The signal comes before the call that
    // sends it returns, since this thread lets it.
    unsafe {
        let (mut set, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        if libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), before.as_mut_ptr()) != 0 {
            return false;
        }
        let sent = libc::pthread_kill(libc::pthread_self(), signal) == 0;
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        sent
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicI32, Ordering};

    static WRITES_TO: AtomicI32 = AtomicI32::new(-1);

    extern "C" fn handler(_signal: i32) {
        let text = b"Thread 1:\n  in f\n";
        // SAFETY: writes a constant.
        unsafe { libc::write(WRITES_TO.load(Ordering::Relaxed), text.as_ptr().cast(), text.len()) };
    }

    #[test]
    fn a_handler_writes_them_and_without_one_there_are_none() {
        let signal = libc::SIGRTMAX() - 9;
        let file = rustix::fs::memfd_create("stacks", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        WRITES_TO.store(file.as_raw_fd(), Ordering::Relaxed);
        assert!(take().is_empty());
        come_from(signal, file.as_raw_fd());
        assert!(take().is_empty(), "the signal is not sent to a process that it would end");
        // SAFETY: the handler does what handlers may.
        unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
        for _again in 0..2 {
            assert_eq!(take(), ["Thread 1:", "  in f"]);
        }
        *SOURCE.lock().unwrap() = None;
    }
}
