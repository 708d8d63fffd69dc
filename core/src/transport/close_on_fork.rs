//! Sockets that are closed in forked children. A child that outlives its parent (a data loader worker) would keep the
//! connection open, and peers would not see the parent's exit. Linux has close-on-exec but no close-on-fork.
//!
//! Thread rule: a [`CloseOnFork`] may be used from any thread.

use std::net::TcpStream;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Once, OnceLock};

/// A bit for each descriptor of a block: whether it is such a socket.
type Block = [AtomicU64; 1 << 10];
/// Descriptors of a block.
const BLOCK: usize = 64 << 10;

/// The descriptors that are such sockets, by block; each block is made by its first one. The blocks are for 4 million, four
/// times what Linux allows a process by default.
static OPEN: [OnceLock<Box<Block>>; 64] = [const { OnceLock::new() }; 64];

/// The word with the bit of a descriptor, and the bit. Makes the block if it is missing; `None` beyond the last block.
fn bit(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    let block = OPEN.get(fd / BLOCK)?.get_or_init(|| Box::new([const { AtomicU64::new(0) }; 1 << 10]));
    Some((&block[fd % BLOCK / 64], 1 << (fd % 64)))
}

/// The handler runs in the forked child; only async-signal-safe calls are allowed there.
extern "C" fn close_all() {
    for (number, block) in OPEN.iter().enumerate().filter_map(|(number, block)| Some((number, block.get()?))) {
        for (index, word) in block.iter().enumerate() {
            let mut bits = word.swap(0, Ordering::Relaxed);
            while bits != 0 {
                let fd = number * BLOCK + index * 64 + bits.trailing_zeros() as usize;
                // SAFETY: closes the child's copy. The thread that uses the socket does not exist in the child.
                unsafe { libc::close(fd as RawFd) };
                bits &= bits - 1;
            }
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
        if let Some((word, bit)) = bit(stream.as_raw_fd()) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
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
        // Unregister before the close: afterwards the descriptor number may be reused.
        if let Some((word, bit)) = bit(self.0.as_raw_fd()) {
            word.fetch_and(!bit, Ordering::Relaxed);
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
    fn any_number_of_sockets_is_registered() {
        /// A descriptor that is never used: the process has fewer open files.
        struct Number(RawFd);
        impl AsRawFd for Number {
            fn as_raw_fd(&self) -> RawFd {
                self.0
            }
        }
        let is_set = |fd| bit(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0);
        // Near the end of the default limit, which no test reaches.
        let sockets: Vec<_> = (1_040_000..1_045_000).map(|fd| CloseOnFork::new(Number(fd))).collect();
        assert!((1_040_000..1_045_000).all(is_set) && !is_set(1_045_000) && !is_set(1_039_999));
        drop(sockets);
        assert!(!(1_040_000..1_045_000).any(is_set));
        drop(CloseOnFork::new(Number(RawFd::MAX)));
    }

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
