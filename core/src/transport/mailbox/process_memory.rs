//! Reads the private memory of another process of the host, with one copy, where the system allows it
//! (process_vm_readv(2): the same user, and no rule against tracing).
//!
//! A process shows its number, and the address and value of a random word. Who can read the word there can read the
//! process: the number may mean another process in another namespace.
//! Thread rule: any thread.

use std::io;
use std::sync::OnceLock;

use super::notice::MailboxHeader;

/// The word of this process.
static WORD: OnceLock<Box<u64>> = OnceLock::new();

/// Lets the ranks of the host read this process's memory, if the system does.
pub fn show(header: &MailboxHeader) {
    let mut random = [0; 8];
    // Without randomness the word is 0, which shows nothing.
    let _filled = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::NONBLOCK);
    let word = WORD.get_or_init(|| Box::new(u64::from_ne_bytes(random)));
    header.show_process(std::process::id(), (&raw const **word).addr() as u64, **word);
}

/// The number of the process that has shown itself in `header`, if this process can read its memory.
pub fn readable(header: &MailboxHeader) -> Option<i32> {
    let (pid, address, word) = header.shown_process()?;
    let pid = i32::try_from(pid).ok()?;
    let mut found = 0u64;
    // SAFETY: the place has eight bytes.
    unsafe { read(pid, address, (&raw mut found).cast(), size_of::<u64>()) }.ok()?;
    (found == word).then_some(pid)
}

/// Reads `len` bytes at `address` of process `pid`.
///
/// # Errors
/// The process has ended, has no such memory, or must not be read.
///
/// # Safety
/// `to` has room for `len` bytes.
pub unsafe fn read(pid: i32, address: u64, to: *mut u8, len: usize) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let place = std::ptr::without_provenance_mut(address as usize + done);
        let local = libc::iovec { iov_base: to.wrapping_add(done).cast(), iov_len: len - done };
        let remote = libc::iovec { iov_base: place, iov_len: len - done };
        // SAFETY: guaranteed by the caller.
        let copied = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
        match usize::try_from(copied) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::transport::in_process::mailbox_memory::HeapMemory;
    use crate::transport::mailbox::memory::MailboxMemory;

    #[test]
    fn a_process_that_shows_itself_can_be_read() {
        let memory = HeapMemory::world(1, false).remove(0);
        // SAFETY: a header at first use; zero is valid.
        let header = unsafe { &*memory.header(0).cast::<MailboxHeader>() };
        assert_eq!(readable(header), None);
        show(header);
        // Not every system allows it, even for the process itself.
        if let Some(pid) = readable(header) {
            assert_eq!(pid, std::process::id() as i32);
            let (data, mut copy) = ([1u8, 2, 3], [0u8; 3]);
            // SAFETY: three bytes.
            unsafe { read(pid, data.as_ptr().addr() as u64, copy.as_mut_ptr(), 3) }.unwrap();
            assert_eq!(copy, data);
            // SAFETY: as above.
            assert!(unsafe { read(pid, 8, copy.as_mut_ptr(), 3) }.is_err());
        }
    }
}
