//! Copies with non-temporal stores.
//!
//! A plain store reads its cache line from memory first, and the line evicts another one from the caches. A
//! non-temporal store does neither. It is faster when the target is in no cache and is not read soon: when the data
//! written between two uses of the target exceeds the last-level cache. When the target is cached, a non-temporal store
//! is slower, because it waits for memory.
//!
//! Measured with `benches/stream_copy.rs` on a Zen 5 processor with 32 MiB of last-level cache (AVX-512, one thread).
//! GB/s of copied bytes, memcpy and `stream_copy`:
//! - nothing cached: 20 and 23 in pieces of 256 KiB, 17 and 24 from 1 MiB;
//! - source cached: 28 and 35 in pieces of 256 KiB, 25 and 36 from 1 MiB;
//! - target cached: 34 and 24 up to 256 KiB, 23 and 25 from 1 to 16 MiB.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256i, __m512i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
};

/// Size of a cache line in bytes; a non-temporal store should fill a whole line.
#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;

/// Copies `len` bytes with non-temporal stores, without reading the target first. Without AVX2, and on other
/// architectures than x86-64, it is a plain copy. The stores are ordered before all later stores, as in a plain copy.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`]; no alignment is needed.
pub unsafe fn stream_copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: guaranteed by the caller; the processor supports the selected instructions.
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

/// Copies the whole cache lines of the target with `stream`, and the bytes before and after them with a plain copy.
///
/// # Safety
/// As for [`stream_copy`]; the processor supports `stream`; `len` is at least a cache line.
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

/// Copies `count` cache lines.
///
/// # Safety
/// The processor has AVX-512; `dst` is aligned to a cache line; both memories have `count` lines.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream_avx512(src: *const u8, dst: *mut u8, count: usize) {
    let (src, dst) = (src.cast::<__m512i>(), dst.cast::<__m512i>());
    for line in 0..count {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_stream_si512(dst.add(line), _mm512_loadu_si512(src.add(line))) };
    }
}

/// Copies `count` cache lines.
///
/// # Safety
/// The processor has AVX2; `dst` is aligned to a cache line; both memories have `count` lines.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_avx2(src: *const u8, dst: *mut u8, count: usize) {
    let (src, dst) = (src.cast::<__m256i>(), dst.cast::<__m256i>());
    for half in 0..2 * count {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm256_stream_si256(dst.add(half), _mm256_loadu_si256(src.add(half))) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Copies nonzero bytes to offset `to` in a buffer of zeros and checks that no other byte changes.
    fn check(copy: unsafe fn(*const u8, *mut u8, usize), from: usize, to: usize, len: usize) {
        let source: Vec<u8> = (0..from + len).map(|index| index as u8 | 1).collect();
        let mut target = vec![0u8; to + len + 200];
        // SAFETY: both buffers have at least `len` bytes from there.
        unsafe { copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), len) };
        assert_eq!(target[to..to + len], source[from..]);
        assert!(target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 0));
    }

    proptest! {
        #[test]
        fn exactly_the_given_bytes_are_copied(from in 0usize..70, to in 0usize..130, len in 0usize..3000) {
            check(stream_copy, from, to, len);
            #[cfg(target_arch = "x86_64")]
            if len >= CACHE_LINE {
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: as for `copy`; the processor has AVX2.
                    check(|src, dst, len| unsafe { lines(src, dst, len, stream_avx2) }, from, to, len);
                }
                if is_x86_feature_detected!("avx512f") {
                    // SAFETY: as for `copy`; the processor has AVX-512.
                    check(|src, dst, len| unsafe { lines(src, dst, len, stream_avx512) }, from, to, len);
                }
            }
        }
    }
}
