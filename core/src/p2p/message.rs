//! Messages: what a send and a receive are given, and what a receive learns.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::device::{DeviceMemory, Span};
use crate::buffer::Buffer;
use crate::deadline::Deadline;
use crate::dtype::DType;
use crate::error::{Error, Result as CoreResult};
use crate::stream_copy::stream_copy;

/// What a message was: the result of a send or receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Status {
    /// The rank that sent it, in its group.
    pub source: usize,
    /// Its tag.
    pub tag: u32,
    /// Its length in bytes.
    pub bytes: usize,
}

/// The group of a message.
pub trait Scope: Send + Sync {
    /// Separates the messages of groups.
    fn context(&self) -> u64;
    /// The group in messages.
    fn name(&self) -> String;
    /// The number of its ranks.
    fn size(&self) -> usize;
    /// The world rank of a rank of the group.
    fn to_world(&self, rank: usize) -> usize;
    /// The rank in the group of a world rank.
    fn of_world(&self, world: usize) -> Option<usize>;
    /// Whether the group has ended. Quick.
    fn has_failed(&self) -> bool {
        self.failure().is_some()
    }
    /// The failure that ended the group, if one did.
    fn failure(&self) -> Option<Error>;
}

/// The limits of a send or receive, and what messages about it say.
pub struct Limits {
    /// The group.
    pub scope: Arc<dyn Scope>,
    /// Its name; may be empty.
    pub name: String,
    /// When its deadline was first checked: a clock at every start would cost more than a short message.
    pub(super) since: Cell<Option<Instant>>,
    /// The deadline.
    pub deadline: Deadline,
}

impl Limits {
    /// The name of a send or receive in messages, such as `receive "grads" (tag 3) from rank 1 in team 0`.
    pub fn describe(&self, what: &str, tag: Option<u32>, peer: &str) -> String {
        let name = if self.name.is_empty() { String::new() } else { format!(" \"{}\"", self.name) };
        let tag = tag.map_or_else(|| "any tag".to_owned(), |tag| format!("tag {tag}"));
        format!("{what}{name} ({tag}) {peer} in {}", self.scope.name())
    }

    /// The time since the first call of this.
    pub fn waited(&self, now: Instant) -> Duration {
        let since = self.since.get().unwrap_or(now);
        self.since.set(Some(since));
        now.saturating_duration_since(since)
    }

    /// Whether the deadline has passed.
    pub fn is_over(&self, now: Instant) -> bool {
        self.deadline.is_over(self.waited(now))
    }
}

/// The element types of a message in two bytes, of which the receiver compares them: 0 for bytes of any type, 1 and the
/// code of the type of all elements, or a hash of the types one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Types(pub u16);

impl Types {
    /// In the hashes of several types.
    const SEVERAL: u16 = 1 << 15;

    /// These types, and then elements of another one.
    fn then(self, dtype: DType) -> Types {
        let code = dtype as u16 + 1;
        match self.0 {
            0 => Types(code),
            before => Types(before.rotate_left(5).wrapping_add(code).wrapping_mul(0x9e37) | Types::SEVERAL),
        }
    }

    /// Whether a message of these types fits a receive of those of `expected`.
    #[inline]
    pub fn fit(self, expected: Types) -> bool {
        self == expected || self.0 == 0 || expected.0 == 0
    }

    /// For messages.
    pub fn name(self) -> &'static str {
        match self.0 {
            0 => "no elements",
            code if code & Types::SEVERAL != 0 => "elements of several types",
            code => DType::ALL.get(usize::from(code) - 1).map_or("elements of an unknown type", |dtype| dtype.name()),
        }
    }
}

/// What spans have if their memory is on a device; they themselves are then in the host memory of its data, if there is any.
pub(super) struct OnDevice {
    pub memory: Box<dyn DeviceMemory>,
    pub pieces: SmallVec<[Span; 1]>,
    pub exported: Vec<u8>,
    /// Whether a copy from or to the pieces was started.
    pub copies: bool,
    /// Whether the memory of the sender is open for this receive.
    pub is_open: bool,
}

/// The memory of a message: the bytes of its tensors, one after the other.
#[derive(Default)]
pub struct Spans {
    pub(super) spans: SmallVec<[Span; 1]>,
    pub(super) len: usize,
    types: Types,
    last: Option<DType>,
    pub(super) device: Option<Box<OnDevice>>,
}

// SAFETY: only addresses; whoever starts a send or receive keeps the memory valid until it has ended.
unsafe impl Send for Spans {}

impl Spans {
    /// Adds the source of a tensor that is sent, or the destination of one that is received.
    ///
    /// # Errors
    /// Those of the buffer's checks; as for [`Spans::add`].
    #[inline(always)]
    pub fn add_buffer(&mut self, buffer: &Buffer, sends: bool) -> CoreResult<()> {
        if sends {
            buffer.check_source()?;
        } else {
            buffer.check_destination_of(buffer.len())?;
        }
        let start = if sends { buffer.source_at(0).cast_mut() } else { buffer.dst() };
        if !buffer.is_empty() && self.last != Some(buffer.dtype()) {
            self.types = self.types.then(buffer.dtype());
            self.last = Some(buffer.dtype());
        }
        self.add(start, buffer.len() * buffer.dtype().size())
    }

    /// Adds `len` bytes at `start`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are more bytes than memory can have.
    #[inline(always)]
    pub fn add(&mut self, start: *mut u8, len: usize) -> CoreResult<()> {
        match self.len.checked_add(len) {
            Some(total) if total <= isize::MAX as usize => self.len = total,
            _ => return Err(too_long()),
        }
        if len > 0 {
            self.spans.push(Span { start, len });
        }
        Ok(())
    }

    /// The types of the elements.
    #[inline]
    pub fn types(&self) -> Types {
        self.types
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The addresses, if the message is in one piece.
    pub fn range(&self) -> Option<std::ops::Range<usize>> {
        let [span] = self.spans[..] else { return None };
        Some(span.start.addr()..span.start.addr() + span.len)
    }

    /// Calls `each` with the address of every piece of `len` bytes from `offset` on, and where it is in them.
    #[inline]
    fn pieces(&self, mut offset: usize, len: usize, mut each: impl FnMut(*mut u8, usize, usize)) {
        let mut done = 0;
        for span in &self.spans {
            if done == len {
                return;
            }
            if offset >= span.len {
                offset -= span.len;
                continue;
            }
            let count = (span.len - offset).min(len - done);
            each(span.start.wrapping_add(offset), done, count);
            (done, offset) = (done + count, 0);
        }
    }

    /// Copies `len` bytes from `offset` on to `to`.
    ///
    /// # Safety
    /// The memory is valid, and so is `to`; they do not overlap.
    #[inline]
    pub unsafe fn read(&self, offset: usize, len: usize, to: *mut u8) {
        self.pieces(offset, len, |start, at, count| {
            // SAFETY: guaranteed by the caller.
            unsafe { start.copy_to_nonoverlapping(to.wrapping_add(at), count) };
        });
    }

    /// Copies `len` bytes at `from` to `offset` on; past the caches if the message is larger than they are.
    ///
    /// # Safety
    /// As for [`Spans::read`].
    #[inline]
    pub unsafe fn write(&self, offset: usize, from: *const u8, len: usize) {
        let streams = self.len >= STREAM_BYTES;
        self.pieces(offset, len, |start, at, count| {
            // SAFETY: guaranteed by the caller.
            unsafe {
                match streams {
                    true => stream_copy(from.wrapping_add(at), start, count),
                    false => start.copy_from_nonoverlapping(from.wrapping_add(at), count),
                }
            }
        });
    }

    /// Fills `len` bytes from `offset` on with `fill`, which gets an address, the place in the `len` bytes, and a count.
    ///
    /// # Errors
    /// The first error of `fill`.
    pub fn fill<E>(
        &self,
        offset: usize,
        len: usize,
        mut fill: impl FnMut(*mut u8, usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut result = Ok(());
        self.pieces(offset, len, |start, at, count| {
            if result.is_ok() {
                result = fill(start, at, count);
            }
        });
        result
    }

    /// Copies another message to the start of this one.
    ///
    /// # Safety
    /// The memory of both is valid; this one is as long as the other. They may overlap.
    pub unsafe fn copy_from(&self, other: &Spans) {
        let mut offset = 0;
        for span in &other.spans {
            self.pieces(offset, span.len, |start, at, count| {
                // SAFETY: guaranteed by the caller.
                unsafe { start.copy_from(span.start.wrapping_add(at), count) };
            });
            offset += span.len;
        }
    }
}

#[cold]
fn too_long() -> Error {
    Error::Invalid("the message is longer than memory can be".into())
}

/// A message of this size is not read soon from the caches. As in [`crate::stream_copy`].
const STREAM_BYTES: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn spans_are_one_line_of_bytes(lengths in prop::collection::vec(0usize..20, 0..6), from in 0usize..60, len in 0usize..60) {
            let mut memory: Vec<Vec<u8>> = lengths.iter().map(|&len| vec![0; len]).collect();
            let mut spans = Spans::default();
            memory.iter_mut().for_each(|piece| spans.add(piece.as_mut_ptr(), piece.len()).unwrap());
            let total: usize = lengths.iter().sum();
            prop_assert_eq!(spans.len(), total);
            let from = from.min(total);
            let len = len.min(total - from);
            let data: Vec<u8> = (1..=len as u8).collect();
            let mut back = vec![0u8; len];
            // SAFETY: the pieces live; the range is within them.
            unsafe {
                spans.write(from, data.as_ptr(), len);
                spans.read(from, len, back.as_mut_ptr());
            }
            prop_assert_eq!(&back, &data);
            let all: Vec<u8> = memory.concat();
            prop_assert_eq!(&all[from..from + len], &data[..]);
            prop_assert!(all[..from].iter().chain(&all[from + len..]).all(|&byte| byte == 0));
        }
    }
}
