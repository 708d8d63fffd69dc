//! Messages and parts of long messages on the network: memory, order and credits.
//!
//! Messages with headers have tag 0, and are received from any rank into memory that waits for them. They carry a
//! number, because the network may end receives in another order. A rank may have [`CREDITS`] short messages and
//! announcements at another rank that has not taken them yet, so what nobody looks at is bounded. The part of a long
//! message is received into a *slot*, whose number plus 1 is its tag: a slot has one part at a time.
//! Memory: all belongs to the port or the network; short messages and parts are copied.
//! Thread rule: used under the lock of the endpoint.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::header::{HEADER_BYTES, MessageHeader, MessageKind};
use crate::error::{Error, Result};
use crate::transport::counter::START;
use crate::transport::memory::Aligned;
use crate::transport::messages::{Completed, MessageNetwork};

/// Longest message whose data travels with its header, in bytes.
pub const SHORT_BYTES: usize = 8 << 10;
/// Bytes of a part of a long message.
pub const PART_BYTES: usize = 256 << 10;
/// Parts that may be on their way to this rank, and from it.
const MAX_PARTS: usize = 16;
/// Messages that may be at another rank that has not taken them yet.
pub const CREDITS: u32 = 32;
/// Receives that wait for messages.
const POSTED: usize = 16;

const MESSAGE: u64 = 0;
const PART: u64 = 1;
const POSTED_MESSAGE: u64 = 2;
const SLOT: u64 = 3;

/// The order of the messages with one rank.
struct Link {
    /// The number of the next message to it, and of the next one from it.
    next: u32,
    expected: u32,
    /// Messages after the expected one.
    early: BTreeMap<u32, (MessageHeader, Aligned)>,
    /// Messages to it that needed a credit, and how many it has taken.
    used: u32,
    acknowledged: u32,
    /// Messages from it that needed a credit, and what it knows of that.
    taken: u32,
    reported: u32,
    open_sends: usize,
    /// Those of them that are parts.
    open_parts: usize,
    departed: bool,
    /// Whether it knows that this rank sends no more.
    departure_sent: bool,
}

impl Default for Link {
    fn default() -> Self {
        Link {
            next: START,
            expected: START,
            early: BTreeMap::new(),
            used: START,
            acknowledged: START,
            taken: START,
            reported: START,
            open_sends: 0,
            open_parts: 0,
            departed: false,
            departure_sent: false,
        }
    }
}

/// A part of a long message that this rank has asked for.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// The sender.
    pub from: usize,
    /// The message.
    pub id: u64,
    /// Where the part begins.
    pub offset: usize,
    /// Its length.
    pub len: usize,
}

/// What has come.
pub enum Event {
    /// A message from a rank. Its memory must be given back.
    Message(usize, MessageHeader, Aligned),
    /// A part, or nothing (length 0) if the sender gave up. As above.
    Part(Part, Aligned, usize),
    /// Memory for parts to be sent is free.
    PartSent,
}

/// The network of an endpoint, and who is behind it.
pub struct Hosts {
    /// The messages between hosts.
    pub network: Box<dyn MessageNetwork>,
    /// How a rank of another host, by its rank in the job, has ended, if it has.
    pub lost: Box<dyn Fn(usize) -> Option<String> + Send + Sync>,
}

/// See the module's documentation.
pub struct Port {
    network: Box<dyn MessageNetwork>,
    lost: Box<dyn Fn(usize) -> Option<String> + Send + Sync>,
    links: BTreeMap<usize, Link>,
    /// Ranks to which nothing is sent any more. What is open with them may never end, and does not count below.
    gone: BTreeSet<usize>,
    /// Sends that have not ended.
    open_sends: usize,
    spare_messages: Vec<Aligned>,
    spare_parts: Vec<Aligned>,
    /// Those of them that are parts.
    open_parts: usize,
    slots: Vec<Option<Part>>,
    /// Slots whose parts have not come.
    open_slots: usize,
    /// Receives that wait for messages.
    posted: usize,
    completed: Vec<Completed>,
    events: VecDeque<Event>,
}

impl Port {
    /// A port to `hosts`. It receives at once.
    ///
    /// # Errors
    /// A failure of the network.
    pub fn new(hosts: Hosts) -> Result<Port> {
        let Hosts { network, lost } = hosts;
        let mut port = Port {
            network,
            lost,
            links: BTreeMap::new(),
            gone: BTreeSet::new(),
            open_sends: 0,
            spare_messages: Vec::new(),
            spare_parts: Vec::new(),
            open_parts: 0,
            slots: Vec::new(),
            open_slots: 0,
            posted: 0,
            completed: Vec::new(),
            events: VecDeque::new(),
        };
        for _ in 0..POSTED {
            port.post_receive()?;
        }
        Ok(port)
    }

    fn message_memory(&mut self) -> Aligned {
        self.spare_messages.pop().unwrap_or_else(|| Aligned::new(HEADER_BYTES + SHORT_BYTES))
    }

    fn part_memory(&mut self) -> Aligned {
        self.spare_parts.pop().unwrap_or_else(|| Aligned::new(PART_BYTES))
    }

    fn post_receive(&mut self) -> Result<()> {
        let buffer = self.message_memory();
        self.network.receive(None, 0, buffer, POSTED_MESSAGE)?;
        self.posted += 1;
        Ok(())
    }

    /// Whether the network has something to send.
    pub fn has_open_sends(&self) -> bool {
        self.open_sends > 0
    }

    /// Whether a message of this kind may be sent to `to` now.
    pub fn has_credit(&self, to: usize) -> bool {
        self.links.get(&to).is_none_or(|link| link.used.wrapping_sub(link.acknowledged) < CREDITS)
    }

    /// Whether `rank` has said that it sends no more.
    pub fn has_departed(&self, rank: usize) -> bool {
        self.links.get(&rank).is_some_and(|link| link.departed)
    }

    /// Whether there were messages with `rank`.
    pub fn knows(&self, rank: usize) -> bool {
        self.links.contains_key(&rank)
    }

    /// Tells the ranks with which there were messages that no more come, unless they are lost. They may have departed
    /// themselves: then they wait for this.
    ///
    /// # Errors
    /// A failure of the network.
    pub fn send_departure(&mut self) -> Result<()> {
        let missing =
            |(&rank, link): (&usize, &Link)| (!link.departure_sent && self.lost(rank).is_none()).then_some(rank);
        for rank in self.links.iter().filter_map(missing).collect::<Vec<_>>() {
            self.send_always(rank, MessageHeader::new(MessageKind::Departed), 0, |_| {})?;
            self.links.entry(rank).or_default().departure_sent = true;
        }
        Ok(())
    }

    /// Whether all ranks with which there were messages have departed, except those that are lost.
    pub fn have_all_departed(&self) -> bool {
        self.links.iter().all(|(&rank, link)| link.departed || self.lost(rank).is_some())
    }

    /// How `rank` has ended without saying so, if it has.
    pub fn lost(&self, rank: usize) -> Option<String> {
        (self.lost)(rank)
    }

    /// Whether nothing is sent to `rank` any more.
    pub fn is_gone(&mut self, rank: usize) -> bool {
        if !self.gone.contains(&rank) && self.lost(rank).is_some() {
            self.forget(rank);
        }
        self.gone.contains(&rank)
    }

    /// Sends no more to `rank`: the network may not survive messages to a process that has ended.
    fn forget(&mut self, rank: usize) {
        if self.gone.insert(rank) {
            if let Some(link) = self.links.get(&rank) {
                self.open_sends -= link.open_sends;
                self.open_parts -= link.open_parts;
            }
            self.open_slots -= self.slots.iter().flatten().filter(|part| part.from == rank).count();
        }
    }

    fn start_send(&mut self, to: usize, tag: usize, buffer: Aligned, len: usize, kind: u64) -> Result<()> {
        self.network.send(to, tag, buffer, len, kind | (to as u64) << 2)?;
        let link = self.links.entry(to).or_default();
        let part = usize::from(kind == PART);
        link.open_sends += 1;
        link.open_parts += part;
        if !self.gone.contains(&to) {
            self.open_sends += 1;
            self.open_parts += part;
        }
        Ok(())
    }

    /// Sends a message with `data` bytes, which `fill` writes. There is a credit if it needs one.
    ///
    /// # Errors
    /// A failure of the network.
    pub fn send(&mut self, to: usize, header: MessageHeader, data: usize, fill: impl FnOnce(*mut u8)) -> Result<()> {
        if self.is_gone(to) { Ok(()) } else { self.send_always(to, header, data, fill) }
    }

    fn send_always(&mut self, to: usize, header: MessageHeader, data: usize, fill: impl FnOnce(*mut u8)) -> Result<()> {
        let mut buffer = self.message_memory();
        let link = self.links.entry(to).or_default();
        MessageHeader { sequence: link.next, taken: link.taken, ..header }
            .write(&mut buffer.as_mut_slice()[..HEADER_BYTES]);
        fill(buffer.as_ptr().wrapping_add(HEADER_BYTES));
        link.next = link.next.wrapping_add(1);
        link.reported = link.taken;
        link.used = link.used.wrapping_add(u32::from(header.kind.needs_credit()));
        self.start_send(to, 0, buffer, HEADER_BYTES + data, MESSAGE)
    }

    /// Whether a part may be sent now.
    pub fn has_part_memory(&self) -> bool {
        self.open_parts < MAX_PARTS
    }

    /// Sends a part of `len` bytes, which `fill` writes, into the `slot` of rank `to`.
    ///
    /// # Errors
    /// A failure of the network.
    pub fn send_part(&mut self, to: usize, slot: u32, len: usize, fill: impl FnOnce(*mut u8)) -> Result<()> {
        if self.is_gone(to) {
            return Ok(());
        }
        let buffer = self.part_memory();
        fill(buffer.as_ptr());
        self.start_send(to, slot as usize + 1, buffer, len, PART)
    }

    /// Whether another part may be asked for.
    pub fn has_slot(&self) -> bool {
        self.open_slots < MAX_PARTS
    }

    /// Asks for a part; there is a slot for it.
    ///
    /// # Errors
    /// A failure of the network.
    pub fn want(&mut self, part: Part) -> Result<()> {
        if self.is_gone(part.from) {
            return Ok(());
        }
        let free = self.slots.iter().position(Option::is_none);
        let slot = free.unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        if slot >= self.network.max_tag() {
            return Err(Error::Network("lost ranks hold all tags of the network".into()));
        }
        let buffer = self.part_memory();
        self.network.receive(Some(part.from), slot + 1, buffer, SLOT | (slot as u64) << 2)?;
        self.slots[slot] = Some(part);
        self.open_slots += 1;
        let Part { from, id, offset, len } = part;
        let tag = slot as u32;
        self.send(
            from,
            MessageHeader {
                tag,
                context: offset as u64,
                total: len as u64,
                id,
                ..MessageHeader::new(MessageKind::Want)
            },
            0,
            |_| {},
        )
    }

    /// Looks at the network.
    ///
    /// # Errors
    /// A failure of the network, or a message that no rank sends.
    pub fn poll(&mut self) -> Result<()> {
        let mut completed = std::mem::take(&mut self.completed);
        let polled = self.network.poll(&mut completed);
        for Completed { token, buffer, source, len } in completed.drain(..) {
            self.complete(token & 3, (token >> 2) as usize, buffer, source, len)?;
        }
        self.completed = completed;
        polled
    }

    fn complete(&mut self, kind: u64, number: usize, buffer: Aligned, source: usize, len: usize) -> Result<()> {
        match kind {
            POSTED_MESSAGE => return self.arrived(source, buffer, len),
            SLOT => {
                let part = self.slots.get_mut(number).and_then(Option::take);
                let part = part.ok_or_else(|| Error::Internal(format!("slot {number} has no part")))?;
                self.open_slots -= usize::from(!self.gone.contains(&part.from));
                self.events.push_back(Event::Part(part, buffer, len));
                return Ok(());
            }
            PART => {
                self.spare_parts.push(buffer);
                self.events.push_back(Event::PartSent);
            }
            _ => self.spare_messages.push(buffer),
        }
        let part = usize::from(kind == PART);
        if let Some(link) = self.links.get_mut(&number) {
            link.open_sends -= 1;
            link.open_parts -= part;
            if !self.gone.contains(&number) {
                self.open_sends -= 1;
                self.open_parts -= part;
            }
        }
        Ok(())
    }

    /// Puts a message, and those that have waited for it, among the events.
    fn arrived(&mut self, from: usize, buffer: Aligned, len: usize) -> Result<()> {
        self.posted -= 1;
        let header = MessageHeader::read(&buffer.as_slice()[..len], from)?;
        let link = self.links.entry(from).or_default();
        if header.sequence.wrapping_sub(link.expected) > u32::MAX / 2 {
            return Err(Error::Internal(format!("message {} from rank {from} came twice", header.sequence)));
        }
        let is_early = header.sequence != link.expected;
        link.early.insert(header.sequence, (header, buffer));
        while let Some((header, buffer)) = link.early.remove(&link.expected) {
            link.expected = link.expected.wrapping_add(1);
            link.acknowledged = header.taken;
            link.taken = link.taken.wrapping_add(u32::from(header.kind.needs_credit()));
            link.departed |= header.kind == MessageKind::Departed;
            self.events.push_back(Event::Message(from, header, buffer));
        }
        let (departed, owed) = (link.departed, link.taken.wrapping_sub(link.reported));
        if departed {
            self.forget(from);
        }
        if is_early {
            // What it waits for must not keep others from arriving.
            self.post_receive()?;
        }
        if owed >= CREDITS / 2 {
            self.send(from, MessageHeader::new(MessageKind::Credit), 0, |_| {})?;
        }
        Ok(())
    }

    /// The next thing that has come.
    pub fn next(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Gives the memory of a message back.
    ///
    /// # Errors
    /// A failure of the network.
    pub fn give_back(&mut self, message: Aligned) -> Result<()> {
        self.spare_messages.push(message);
        if self.posted < POSTED { self.post_receive() } else { Ok(()) }
    }

    /// Gives the memory of a part back.
    pub fn give_back_part(&mut self, part: Aligned) {
        self.spare_parts.push(part);
    }
}
