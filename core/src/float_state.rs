//! The floating-point state of a thread: rounding, and whether subnormal numbers are flushed to zero.
//!
//! A thread that calls dl_comm may have any state: TensorFlow's threads flush, and `torch.set_flush_denormal` is a
//! setting of users. New threads inherit it. A rank may run a reduction on any thread, and every rank must get the same
//! bits, so arithmetic on elements of tensors has the default state.
//!
//! Thread rule: the state is that of the current thread.

use std::marker::PhantomData;

/// The current thread has the default state until this is dropped: round to nearest, subnormals kept, no traps.
#[must_use]
pub struct DefaultFloatState {
    /// The thread's state, if it was another one.
    before: Option<State>,
    _this_thread: PhantomData<*const ()>,
}

impl DefaultFloatState {
    /// Sets the default state.
    #[inline]
    pub fn enter() -> DefaultFloatState {
        let now = get();
        let before = (now & !STATUS != DEFAULT).then_some(now);
        if before.is_some() {
            set(DEFAULT);
        }
        DefaultFloatState { before, _this_thread: PhantomData }
    }
}

impl Drop for DefaultFloatState {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.before {
            set(before);
        }
    }
}

#[cfg(target_arch = "x86_64")]
use mxcsr::{DEFAULT, STATUS, State, get, set};

#[cfg(target_arch = "x86_64")]
mod mxcsr {
    use std::arch::asm;

    pub type State = u32;
    /// All exceptions are masked.
    pub const DEFAULT: State = 0x1f80;
    /// The flags of exceptions that have occurred.
    pub const STATUS: State = 0x3f;

    #[inline]
    pub fn get() -> State {
        let mut state = 0;
        // SAFETY: writes four bytes.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut state, options(nostack, preserves_flags)) };
        state
    }

    #[inline]
    pub fn set(state: State) {
        // SAFETY: reads four bytes. The state is the one that Rust assumes, or the one that the caller had.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const state, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
use fpcr::{DEFAULT, STATUS, State, get, set};

#[cfg(target_arch = "aarch64")]
mod fpcr {
    use std::arch::asm;

    pub type State = u64;
    pub const DEFAULT: State = 0;
    /// The flags are in another register.
    pub const STATUS: State = 0;

    #[inline]
    pub fn get() -> State {
        let state;
        // SAFETY: reads a register.
        unsafe { asm!("mrs {}, fpcr", out(reg) state, options(nostack, preserves_flags)) };
        state
    }

    #[inline]
    pub fn set(state: State) {
        // SAFETY: the state is the one that Rust assumes, or the one that the caller had.
        unsafe { asm!("msr fpcr, {}", in(reg) state, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the floating-point state of this processor is not known: add it here");

/// Calls `run` on a thread that flushes subnormals and rounds down.
#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) fn with_other_state<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let changed = scope.spawn(|| {
            // Flush results (bit 15) and operands (bit 6) to zero, round down (bit 13).
            let other = DEFAULT | 1 << 15 | 1 << 6 | 1 << 13;
            set(other);
            let result = run();
            assert_eq!(get() & !STATUS, other);
            result
        });
        changed.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::hint::black_box;

    use super::*;

    #[test]
    fn the_state_is_the_default_one_and_then_the_former_one() {
        let sum = || black_box(1e-39f32) + black_box(1e-39f32);
        let (flushed, kept, nested, after) = with_other_state(|| {
            let flushed = sum();
            let state = DefaultFloatState::enter();
            let kept = sum();
            drop(DefaultFloatState::enter());
            let nested = sum();
            drop(state);
            (flushed, kept, nested, sum())
        });
        assert_eq!([flushed, kept, nested, after].map(|value| value != 0.0), [false, true, true, false]);
    }
}
