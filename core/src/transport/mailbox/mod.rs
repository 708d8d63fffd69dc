//! Mailboxes: messages between two ranks of a host through shared memory, without other ranks' help.
//!
//! For each ordered pair of ranks there is a [`ring`] of cells, made by the sender at its first message in its own
//! shared memory. Its offset is in the sender's header ([`notice`]). A message of up to a cell is copied there, and the
//! send is complete. A long message is announced in a cell; the receiver copies it from its place if that is shared
//! memory, or from the sender's private memory ([`process_memory`]) up to a size, else the sender sends it in parts
//! through a [`staging`] area. The state of a long message is in the ring, so
//! that either end can give up at any time without harm to the other.
//! Thread rule: a [`Mailbox`] is used by one thread at a time; [`Mailbox::header`] by any.

mod line;
pub mod memory;
pub mod notice;
pub mod process_memory;
pub mod ring;
pub mod staging;

use std::sync::Arc;

use self::memory::MailboxMemory;
use self::notice::{MAX_RANKS, MailboxHeader};
use self::ring::{Ring, RingReceiver, RingSender};
use self::staging::{Staging, StagingReceiver, StagingSender};
use super::sync::Ordering;
use crate::error::{Error, Result};

/// Messages to one rank.
pub struct Outbox {
    /// The ring.
    pub ring: RingSender,
    staging: Option<StagingSender>,
}

/// Messages from one rank.
pub struct Inbox {
    /// The ring.
    pub ring: RingReceiver,
    staging: Option<StagingReceiver>,
    /// The number of its process, if this process can read its memory.
    process: Option<i32>,
}

/// The mailboxes of one rank with all ranks of its host.
pub struct Mailbox {
    memory: Arc<dyn MailboxMemory>,
    me: usize,
    /// What the ranks show. In `memory`.
    headers: Vec<&'static MailboxHeader>,
    outboxes: Vec<Option<Outbox>>,
    inboxes: Vec<Option<Inbox>>,
}

impl Mailbox {
    /// The mailboxes in `memory`.
    ///
    /// # Errors
    /// [`Error::System`] if the host has too many ranks.
    pub fn new(memory: Arc<dyn MailboxMemory>) -> Result<Mailbox> {
        let ranks = memory.ranks();
        if ranks > MAX_RANKS {
            return Err(Error::System(format!("a host of {ranks} ranks has more than {MAX_RANKS} mailboxes")));
        }
        // SAFETY: as in `header`; the mailbox keeps the memory.
        let headers = (0..ranks).map(|rank| unsafe { &*memory.header(rank).cast::<MailboxHeader>() }).collect();
        let (outboxes, inboxes) = ((0..ranks).map(|_| None).collect(), (0..ranks).map(|_| None).collect());
        Ok(Mailbox { me: memory.me(), memory, headers, outboxes, inboxes })
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<dyn MailboxMemory> {
        &self.memory
    }

    /// The messages to `rank`; makes the ring if there is none.
    ///
    /// # Errors
    /// [`Error::System`] if the shared memory is exhausted.
    #[inline]
    pub fn outbox(&mut self, rank: usize) -> Result<&mut Outbox> {
        if self.outboxes[rank].is_none() {
            self.make_outbox(rank)?;
        }
        self.outboxes[rank].as_mut().ok_or_else(|| Error::Internal("no ring".into()))
    }

    #[cold]
    fn make_outbox(&mut self, rank: usize) -> Result<()> {
        let memory = self.memory.alloc(size_of::<Ring>())?;
        // SAFETY: new memory of this size, never freed.
        let ring = unsafe { Ring::create(memory) };
        let offset = self.memory.offset_of(memory.addr()..memory.addr() + size_of::<Ring>());
        let offset = offset.ok_or_else(|| Error::Internal("a ring is outside of the shared memory".into()))?;
        self.header(self.me).rings.0[rank].store(offset, Ordering::Release);
        self.outboxes[rank] = Some(Outbox { ring: RingSender::new(ring), staging: None });
        Ok(())
    }

    /// The staging area to `rank`; makes it if there is none.
    ///
    /// # Errors
    /// [`Error::System`] if the shared memory is exhausted.
    pub fn staging(&mut self, rank: usize) -> Result<&mut StagingSender> {
        self.outbox(rank)?;
        let memory = &self.memory;
        let Some(Outbox { ring, staging }) = &mut self.outboxes[rank] else {
            return Err(Error::Internal("no ring".into()));
        };
        if staging.is_none() {
            let area = memory.alloc(size_of::<Staging>())?;
            // SAFETY: new memory of this size, never freed; large allocations are aligned to pages.
            let made = unsafe { Staging::create(area) };
            let offset = memory.offset_of(area.addr()..area.addr() + size_of::<Staging>());
            let offset = offset.ok_or_else(|| Error::Internal("an area is outside of the shared memory".into()))?;
            ring.ring().staging.0.store(offset, Ordering::Release);
            *staging = Some(StagingSender::new(made));
        }
        staging.as_mut().ok_or_else(|| Error::Internal("no staging area".into()))
    }

    /// The messages from `rank`; `None` if it has sent none.
    #[inline]
    pub fn inbox(&mut self, rank: usize) -> Option<&mut Inbox> {
        if self.inboxes[rank].is_none() {
            let offset = self.header(rank).rings.0[self.me].load(Ordering::Acquire);
            if offset == 0 {
                return None;
            }
            let ring = self.memory.resolve(rank, offset, size_of::<Ring>())?;
            // SAFETY: a ring that the sender has made and never frees.
            let ring = unsafe { &*ring.cast::<Ring>() };
            self.inboxes[rank] = Some(Inbox {
                ring: RingReceiver::new(ring),
                staging: None,
                process: process_memory::readable(self.header(rank)),
            });
        }
        self.inboxes[rank].as_mut()
    }

    /// The staging area of `rank` for this rank; `None` if there is none.
    pub fn staged(&mut self, rank: usize) -> Option<&mut StagingReceiver> {
        self.inbox(rank)?;
        let memory = &self.memory;
        let Inbox { ring, staging, .. } = self.inboxes[rank].as_mut()?;
        if staging.is_none() {
            let offset = ring.ring().staging.0.load(Ordering::Acquire);
            if offset == 0 {
                return None;
            }
            let area = memory.resolve(rank, offset, size_of::<Staging>())?;
            // SAFETY: an area that the sender has made and never frees.
            *staging = Some(StagingReceiver::new(unsafe { &*area.cast::<Staging>() }));
        }
        staging.as_mut()
    }

    /// The number of the process of `rank`, if it has sent something and this process can read its memory.
    pub fn process(&mut self, rank: usize) -> Option<i32> {
        self.inbox(rank)?.process
    }

    /// Reads the memory of `rank` no more.
    pub fn forget_process(&mut self, rank: usize) {
        if let Some(inbox) = self.inbox(rank) {
            inbox.process = None;
        }
    }

    /// What `rank` shows.
    #[inline]
    pub fn header(&self, rank: usize) -> &MailboxHeader {
        self.headers[rank]
    }

    /// Tells `rank` that this rank has changed something in the memory that they share.
    #[inline]
    pub fn notify(&self, rank: usize) {
        self.header(rank).give_notice(self.me);
    }
}

/// What `rank` shows in `memory`.
pub fn header(memory: &dyn MailboxMemory, rank: usize) -> &MailboxHeader {
    // SAFETY: the memory of a header is zero at first (Loom: created), and lives as long as `memory`.
    unsafe { &*memory.header(rank).cast::<MailboxHeader>() }
}

/// Reports to the ranks of the host that this rank sends no more messages.
pub fn depart(memory: &dyn MailboxMemory) {
    header(memory, memory.me()).departed.0.store(1, Ordering::Release);
    (0..memory.ranks()).filter(|&rank| rank != memory.me()).for_each(|rank| header(memory, rank).ring_bell());
}

/// Whether `rank` sends no more messages. Those that it has sent are in its ring.
pub fn has_departed(memory: &dyn MailboxMemory, rank: usize) -> bool {
    header(memory, rank).departed.0.load(Ordering::Acquire) == 1
}
