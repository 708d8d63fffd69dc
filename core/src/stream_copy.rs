//! A copy that leaves the caches alone.
//!
//! A plain store reads its cache line from memory first, and the line stays in the caches in place of others. A
//! non-temporal store does neither. It pays where the target is in no cache, and will not be read soon: that is, where
//! what is written between two uses of it is more than the last-level cache holds. Where the target is in a cache, the
//! copy has to wait for memory that a plain one would not touch.
//!
//! Measured with `benches/stream_copy.rs` on a Zen 5 processor with 32 MiB of last-level cache (AVX-512, one thread, GB/s
//! of the copied bytes, memcpy against `stream_copy`), by what is in the caches: neither source nor target, 20 against 23
//! in pieces of 256 KiB, 17 against 24 from 1 MiB on; the source only, 28 against 35 and 25 against 36; the target only,
//! 34 against 24 up to 256 KiB, and 23 against 25 for the target of 1 to 16 MiB.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256i, __m512i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
};

/// Bytes of a cache line, which non-temporal stores fill as a whole.
#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;

/// Copies `len` bytes with non-temporal stores: past the caches, without reading the target first. On processors without
/// AVX2, and other than x86-64, it is a plain copy. When it returns, the stores are ordered before all later ones, as
/// those of a plain copy are.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`]; nothing needs to be aligned.
pub unsafe fn stream_copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise, and the processor has the instructions that are asked for.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if len >= 2 * CACHE_LINE {
            if is_x86_feature_detected!("avx512f") {
                return lines(src, dst, len, stream_avx512);
            }
            if is_x86_feature_detected!("avx2") {
                return lines(src, dst, len, stream_avx2);
            }
        }
        src.copy_to_nonoverlapping(dst, len);
    }
}

/// Copies whole lines of the target by `stream`, which takes their number, and what is before and after them plainly.
///
/// # Safety
/// As for [`stream_copy`], and `stream` can run here; `len` is a line or more.
#[cfg(target_arch = "x86_64")]
unsafe fn lines(src: *const u8, dst: *mut u8, len: usize, stream: unsafe fn(*const u8, *mut u8, usize)) {
    let head = dst.addr().wrapping_neg() % CACHE_LINE;
    let count = (len - head) / CACHE_LINE;
    let tail = head + count * CACHE_LINE;
    // SAFETY: the three parts are within the `len` bytes.
    unsafe {
        src.copy_to_nonoverlapping(dst, head);
        stream(src.add(head), dst.add(head), count);
        src.add(tail).copy_to_nonoverlapping(dst.add(tail), len - tail);
        _mm_sfence();
    }
}

/// # Safety
/// The processor has AVX-512; `dst` is at the start of one of `count` lines.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream_avx512(src: *const u8, dst: *mut u8, count: usize) {
    let (src, dst) = (src.cast::<__m512i>(), dst.cast::<__m512i>());
    for line in 0..count {
        // SAFETY: the caller's promise.
        unsafe { _mm512_stream_si512(dst.add(line), _mm512_loadu_si512(src.add(line))) };
    }
}

/// # Safety
/// The processor has AVX2; `dst` is at the start of one of `count` lines.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_avx2(src: *const u8, dst: *mut u8, count: usize) {
    let (src, dst) = (src.cast::<__m256i>(), dst.cast::<__m256i>());
    for half in 0..2 * count {
        // SAFETY: the caller's promise.
        unsafe { _mm256_stream_si256(dst.add(half), _mm256_loadu_si256(src.add(half))) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Copies 1, 2, 3, … to `to` in a buffer of zeros; nothing else may change.
    fn check(copy: unsafe fn(*const u8, *mut u8, usize), from: usize, to: usize, len: usize) {
        let source: Vec<u8> = (0..from + len).map(|index| index as u8 | 1).collect();
        let mut target = vec![0u8; to + len + 200];
        // SAFETY: both have so many bytes.
        unsafe { copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), len) };
        assert_eq!(target[to..to + len], source[from..]);
        assert!(target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 0));
    }

    proptest! {
        #[test]
        fn every_byte_is_copied_and_no_other(from in 0usize..70, to in 0usize..130, len in 0usize..3000) {
            check(stream_copy, from, to, len);
            #[cfg(target_arch = "x86_64")]
            if len >= CACHE_LINE {
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: as for a copy; the instructions are there.
                    check(|src, dst, len| unsafe { lines(src, dst, len, stream_avx2) }, from, to, len);
                }
                if is_x86_feature_detected!("avx512f") {
                    // SAFETY: as for a copy; the instructions are there.
                    check(|src, dst, len| unsafe { lines(src, dst, len, stream_avx512) }, from, to, len);
                }
            }
        }
    }
}
