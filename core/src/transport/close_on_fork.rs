//! Connections that forked children do not keep: a child that outlives its parent, a data loader say, would hold them open,
//! and nobody would hear of the parent's end. Linux closes files at exec, but has no such thing for fork.
//!
//! Thread rule: a [`CloseOnForkStream`] may be used from any thread.

use std::net::TcpStream;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

/// The connections, -1 where there is none. As many as an alert has among 2^32 hosts.
static OPEN: [AtomicI32; 64] = [const { AtomicI32::new(-1) }; 64];

/// Runs in a forked child, where only async-signal-safe calls are allowed.
extern "C" fn close_all() {
    for place in &OPEN {
        let fd = place.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            // SAFETY: the child's copy, which nobody in it uses: the thread that does is not there.
            unsafe { libc::close(fd) };
        }
    }
}

/// A connection that is closed in forked children.
pub struct CloseOnForkStream(TcpStream);

impl CloseOnForkStream {
    /// Makes `stream` one.
    pub fn new(stream: TcpStream) -> CloseOnForkStream {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: the handler calls close() only. Fails for want of memory; children keep what they inherit then.
            let _status = unsafe { libc::pthread_atfork(None, None, Some(close_all)) };
        });
        let put =
            |place: &AtomicI32| place.compare_exchange(-1, stream.as_raw_fd(), Ordering::Relaxed, Ordering::Relaxed);
        let _kept = OPEN.iter().any(|place| put(place).is_ok());
        CloseOnForkStream(stream)
    }
}

impl Deref for CloseOnForkStream {
    type Target = TcpStream;

    fn deref(&self) -> &TcpStream {
        &self.0
    }
}

impl Drop for CloseOnForkStream {
    fn drop(&mut self) {
        let fd = self.0.as_raw_fd();
        // Before it is closed and its number somebody else's.
        for place in &OPEN {
            let _others = place.compare_exchange(fd, -1, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;
    use std::time::Duration;

    #[test]
    fn a_forked_child_does_not_hold_a_connection_open() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = CloseOnForkStream::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (mut far, _) = listener.accept().unwrap();
        far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // SAFETY: the child sleeps and ends, no more.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                libc::sleep(60);
                libc::_exit(0);
            }
        }
        drop(near);
        assert_eq!(far.read(&mut [0; 1]).unwrap(), 0, "the end is seen though the child lives");
        // SAFETY: the own child.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: as above.
        assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
    }
}
