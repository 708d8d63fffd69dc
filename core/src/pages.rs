//! What the system knows about the pages of this process's memory.
//!
//! Thread rule: any thread.

/// Whether the page at `address` has memory: no write to it has to make the page first.
pub fn is_resident(address: *const u8) -> bool {
    let page = page_of(address);
    let mut resident = 0u8;
    // SAFETY: the system writes one byte for the page; it only looks at the address.
    unsafe { libc::mincore(page, 1, &raw mut resident) == 0 && resident & 1 == 1 }
}

fn page_of(address: *const u8) -> *mut libc::c_void {
    address.map_addr(|address| address & !(rustix::param::page_size() - 1)).cast_mut().cast()
}

#[cfg(test)]
mod tests {
    use super::*;
    use memmap2::MmapMut;

    #[test]
    fn a_page_becomes_resident_when_it_is_written() {
        let mut map = MmapMut::map_anon(64 << 10).unwrap();
        let at = |map: &MmapMut, byte: usize| map.as_ptr().wrapping_add(byte);
        assert!(!is_resident(at(&map, 40_000)));
        map[40_001] = 1;
        assert!(is_resident(at(&map, 40_000)) && !is_resident(at(&map, 0)));
        assert!(!is_resident(std::ptr::without_provenance(4096)));
    }
}
