//! What the system knows about the pages of this process's memory.
//!
//! Thread rule: any thread.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

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

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    num_regions: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `PAGEMAP_SCAN` of linux/fs.h: from Linux 6.7 on.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// Whether `address` is in a huge page; false if the system does not say that.
pub fn is_huge(address: *const u8) -> bool {
    static PAGEMAP: OnceLock<Option<File>> = OnceLock::new();
    let Some(pagemap) = PAGEMAP.get_or_init(|| File::open("/proc/self/pagemap").ok()) else { return false };
    let start = page_of(address).addr() as u64;
    let mut region = PageRegion::default();
    let mut argument = ScanArgument {
        size: size_of::<ScanArgument>() as u64,
        start,
        end: start + rustix::param::page_size() as u64,
        regions: (&raw mut region).addr() as u64,
        num_regions: 1,
        category_mask: PAGE_IS_HUGE,
        return_mask: PAGE_IS_HUGE,
        ..ScanArgument::default()
    };
    // SAFETY: the argument has this layout, and there is room for one region.
    unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) == 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memmap2::{Advice, MmapMut};

    #[test]
    fn a_page_becomes_resident_when_it_is_written() {
        let mut map = MmapMut::map_anon(64 << 10).unwrap();
        let at = |map: &MmapMut, byte: usize| map.as_ptr().wrapping_add(byte);
        assert!(!is_resident(at(&map, 40_000)));
        map[40_001] = 1;
        assert!(is_resident(at(&map, 40_000)) && !is_resident(at(&map, 0)));
        assert!(!is_resident(std::ptr::without_provenance(4096)));
    }

    #[test]
    fn small_pages_are_not_huge() {
        let mut map = MmapMut::map_anon(8 << 20).unwrap();
        let _hint = map.advise(Advice::NoHugePage);
        map.fill(1);
        assert!(!is_huge(map.as_ptr().wrapping_add(4 << 20)));
        assert!(!is_huge(std::ptr::without_provenance(4096)));
    }
}
