//! Sockets that are closed in forked children. A child that outlives its parent (a data loader worker) would keep the
//! connection open, and peers would not see the parent's exit. Linux has close-on-exec but no close-on-fork.
//!
//! Thread rule: a [`CloseOnFork`] may be used from any thread.

use std::net::TcpStream;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

/// The open sockets; -1 is free. The failure detector has at most 64 for 2^32 hosts, the server of a store one a rank.
static OPEN: [AtomicI32; 1024] = [const { AtomicI32::new(-1) }; 1024];

/// The handler runs in the forked child; only async-signal-safe calls are allowed there.
extern "C" fn close_all() {
    for slot in &OPEN {
        let fd = slot.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            // SAFETY: closes the child's copy. The thread that uses the socket does not exist in the child.
            unsafe { libc::close(fd) };
        }
    }
}

/// A TCP connection that is closed in forked children.
pub type CloseOnForkStream = CloseOnFork<TcpStream>;

/// A socket that is closed in forked children.
pub struct CloseOnFork<T: AsRawFd>(T);

impl<T: AsRawFd> CloseOnFork<T> {
    /// Registers `stream` for closing.
    pub fn new(stream: T) -> CloseOnFork<T> {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: the handler only calls close(). Registration fails when memory is exhausted; then children
            // inherit the sockets.
            let _status = unsafe { libc::pthread_atfork(None, None, Some(close_all)) };
        });
        let store =
            |slot: &AtomicI32| slot.compare_exchange(-1, stream.as_raw_fd(), Ordering::Relaxed, Ordering::Relaxed);
        let _stored = OPEN.iter().any(|slot| store(slot).is_ok());
        CloseOnFork(stream)
    }
}

impl<T: AsRawFd> Deref for CloseOnFork<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsRawFd> Drop for CloseOnFork<T> {
    fn drop(&mut self) {
        let fd = self.0.as_raw_fd();
        // Unregister before the close: afterwards the descriptor number may be reused.
        for slot in &OPEN {
            let _result = slot.compare_exchange(fd, -1, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;
    use std::time::Duration;

    #[test]
    fn a_forked_child_does_not_keep_a_connection_open() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = CloseOnForkStream::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (mut remote, _) = listener.accept().unwrap();
        remote.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // SAFETY: the child only sleeps and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                libc::sleep(60);
                libc::_exit(0);
            }
        }
        drop(local);
        assert_eq!(remote.read(&mut [0; 1]).unwrap(), 0, "the end is seen though the child lives");
        // SAFETY: signals the test's own child.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: as above.
        assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
    }
}
