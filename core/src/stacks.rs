//! The stacks of an interpreter for dumps: they show the position of a rank that others wait for. A signal handler of
//! the interpreter (Python's faulthandler) writes them to a file. The handler takes no locks, so it works during a
//! hang.
//!
//! Thread rule: all functions may be called from any thread.

use std::fs::File;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::Mutex;

use crate::lock::lock;

/// The size limit of the text, in bytes.
const MAX_TEXT_BYTES: usize = 1 << 18;

/// The signal, and the file descriptor that its handler writes to.
static SOURCE: Mutex<Option<(i32, i32)>> = Mutex::new(None);

/// Registers `signal`, whose handler writes the stacks to `fd`. The caller keeps `fd` open.
pub fn come_from(signal: i32, fd: i32) {
    *lock(&SOURCE) = Some((signal, fd));
}

/// The lines of the stacks; empty without a handler.
pub fn take() -> Vec<String> {
    let source = lock(&SOURCE);
    let Some((signal, fd)) = *source else { return Vec::new() };
    // SAFETY: `fd` is open in this process, and `ManuallyDrop` keeps it open.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    // The handler writes at the file's position.
    // SAFETY: only changes the position of a file.
    if file.set_len(0).is_err() || unsafe { libc::lseek(fd, 0, libc::SEEK_SET) } != 0 || !raise(signal) {
        return Vec::new();
    }
    let mut text = vec![0; MAX_TEXT_BYTES];
    let count = file.read_at(&mut text, 0).unwrap_or(0);
    String::from_utf8_lossy(&text[..count]).lines().map(str::to_owned).collect()
}

/// Runs the handler of `signal` in this thread. False without a handler: the signal's default action could end the
/// process.
fn raise(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: `action` is read only when sigaction succeeded and thus initialized it.
    let action = unsafe {
        if libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) != 0 {
            return false;
        }
        action.assume_init()
    };
    if matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
        return false;
    }
    // SAFETY: both sets are initialized by the calls before their first use. The signal is unblocked in this thread, so
    // pthread_kill delivers it before it returns.
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
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicI32, Ordering};

    static OUTPUT_FD: AtomicI32 = AtomicI32::new(-1);

    extern "C" fn handler(_signal: i32) {
        let text = b"Thread 1:\n  in f\n";
        // SAFETY: writes a constant; write(2) is async-signal-safe.
        unsafe { libc::write(OUTPUT_FD.load(Ordering::Relaxed), text.as_ptr().cast(), text.len()) };
    }

    #[test]
    fn the_handler_writes_the_stacks() {
        let signal = libc::SIGRTMAX() - 9;
        let file = rustix::fs::memfd_create("stacks", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        OUTPUT_FD.store(file.as_raw_fd(), Ordering::Relaxed);
        assert!(take().is_empty());
        come_from(signal, file.as_raw_fd());
        assert!(take().is_empty(), "the signal is not sent to a process that it would end");
        // SAFETY: the handler is async-signal-safe.
        unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
        for _ in 0..2 {
            assert_eq!(take(), ["Thread 1:", "  in f"]);
        }
        *SOURCE.lock().unwrap() = None;
    }
}
