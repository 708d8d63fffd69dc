//! What the ranks of a host show each other for calls on device memory: their allocations, and the numbers by which their
//! streams meet.
//!
//! Thread rule: [`Flags`] may be used from any thread; the rest is plain data.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::super::Channel;
use super::path::Wait;
use super::{LAST, within};
use crate::error::{Error, Result};
use crate::transport::arena::Shared;
use crate::transport::cuda::{Context, DeviceMemory, Export, Exports, HostMemory, Pinned, Stream};

/// A page, in which a rank's number is.
pub(super) const PAGE: usize = 4096;

/// The numbers that the ranks of a host have come to, in memory that all of them and their GPUs see. The own page is not given
/// back when the team ends: another rank may look at it later than that.
#[derive(Default)]
pub(super) struct Flags {
    /// By local rank.
    pub pages: Vec<Pinned>,
    /// The number of the last meeting of this rank.
    pub step: AtomicU32,
    released: AtomicBool,
}

impl Flags {
    fn number(&self, rank: usize) -> &AtomicU32 {
        // SAFETY: the page is mapped as long as this lives, and holds nothing else.
        unsafe { &*self.pages[rank].memory().cast::<AtomicU32>() }
    }

    /// Raises the number of this rank, `me`, when its stream has ended.
    pub fn raise(&self, me: usize, step: u32) {
        self.number(me).store(step, Ordering::Release);
    }

    /// Whether all ranks have come to `step`.
    pub fn all_have(&self, step: u32) -> bool {
        let has = |rank| self.number(rank).load(Ordering::Acquire).wrapping_sub(step).cast_signed() >= 0;
        (0..self.pages.len()).all(has)
    }

    /// Lets everybody's streams go on, whoever has not come: of a rank that has ended nothing comes any more. Numbers are far
    /// ahead of this rank's meetings then, however many ranks do this. To be repeated as long as a stream may wait: those of
    /// other ranks that go on set their numbers back to what they have come to.
    pub fn release(&self) {
        self.released.store(true, Ordering::Relaxed);
        let far = self.step.load(Ordering::Relaxed).wrapping_add(1 << 30);
        (0..self.pages.len()).for_each(|rank| self.number(rank).store(far, Ordering::Release));
    }

    /// Whether a rank was lost.
    pub fn is_released(&self) -> bool {
        self.released.load(Ordering::Relaxed)
    }
}

/// Whether other processes can see this one's memory, and who can wait for them.
pub(super) fn probe(context: &Arc<Context>) -> Result<Wait> {
    let _entered = context.enter()?;
    context.kernels()?;
    let memory = DeviceMemory::new(context, PAGE)?;
    if Exports::default().locate(memory.address(), 1)?.is_none() {
        return Err(Error::System("its memory cannot be shown to other processes (cuIpcGetMemHandle)".into()));
    }
    let stream = Stream::new(context)?;
    let flag = HostMemory::new(context, PAGE)?;
    // SAFETY: the number is in pinned memory, which stays until the stream has ended.
    let waited =
        unsafe { stream.write_number(flag.address(), 1).and_then(|()| stream.wait_for_number(flag.address(), 1)) };
    let done = waited.and_then(|()| stream.record());
    let came = done.is_ok_and(|event| within(LAST, || event.has_come().unwrap_or(false)));
    Ok(if came { Wait::Stream } else { Wait::Host })
}

/// A handle in numbers, as ranks tell it.
pub(super) fn words(handle: &[u8; 64]) -> impl Iterator<Item = u64> {
    handle.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes))
}

/// The handle that these are the numbers of.
pub(super) fn handle(words: &[u64]) -> Option<[u8; 64]> {
    let mut handle = [0; 64];
    let words = words.get(..8)?;
    handle.as_chunks_mut::<8>().0.iter_mut().zip(words).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
    Some(handle)
}

/// What is the rank's own before the others come in.
pub(super) struct Own {
    /// Of its page, for the others.
    pub place: u64,
    pub shared: Arc<dyn Shared>,
    /// Memory that the others may read.
    pub bounce: DeviceMemory,
    pub exports: Exports,
    pub export: Export,
}

impl Own {
    /// Takes `bytes` of the GPU, and a page that the other ranks see.
    pub fn new(channel: &Channel, context: &Arc<Context>, bytes: usize) -> Result<Own> {
        let none = || Error::System("the ranks of the host share no memory".into());
        let shared = channel.node.node().shared_memory().ok_or_else(none)?;
        let bounce = DeviceMemory::new(context, bytes)?;
        let mut exports = Exports::default();
        exports.locate(bounce.address(), 1)?;
        let export = exports.news(1).0.pop().ok_or_else(|| Error::System("GPU memory cannot be exported".into()))?;
        let start = shared.take(PAGE)?.addr();
        let place = shared.locate(start..start + PAGE).ok_or_else(none)?;
        Ok(Own { place, shared, bounce, exports, export })
    }
}

/// What a rank tells before a call of two shots: whether there are places; how many exports are new and how many gone; the
/// new ones (number and handle), the numbers of those that are gone, and two places for each tensor: read and written.
pub(super) struct Note<'a> {
    pub fresh: Vec<Export>,
    pub gone: Vec<u32>,
    pub places: Option<&'a [u64]>,
}

impl Note<'_> {
    pub fn read(words: &[u64]) -> Result<Note<'_>> {
        let parse = || {
            let (&[visible, fresh, gone], rest) = words.split_first_chunk::<3>()?;
            let (news, rest) = rest.split_at_checked(usize::try_from(fresh).ok()?.checked_mul(9)?)?;
            let (gone, rest) = rest.split_at_checked(usize::try_from(gone).ok()?)?;
            let export =
                |words: &[u64]| Some(Export { number: u32::try_from(words[0]).ok()?, handle: handle(&words[1..])? });
            Some(Note {
                fresh: news.chunks_exact(9).map(export).collect::<Option<_>>()?,
                gone: gone.iter().map(|&number| u32::try_from(number).ok()).collect::<Option<_>>()?,
                places: (visible == 1).then_some(rest),
            })
        };
        parse().ok_or_else(|| Error::Internal("what a rank told of its memory is not legible".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_as_they_were_written_and_cut_ones_refused() {
        let mut bytes = [0; 64];
        bytes.iter_mut().zip(0..).for_each(|(byte, index)| *byte = index);
        let mut note = vec![1, 1, 2, 5];
        note.extend(words(&bytes));
        note.extend([3, 4, 100, 200]);
        let read = Note::read(&note).unwrap();
        assert_eq!((read.fresh[0].number, read.fresh[0].handle), (5, bytes));
        assert_eq!((&read.gone[..], read.places), (&[3, 4][..], Some(&[100, 200][..])));
        note[0] = 0;
        assert_eq!(Note::read(&note).unwrap().places, None);
        for len in 0..14 {
            assert!(Note::read(&note[..len]).is_err(), "{len}");
        }
    }
}
