//! The mailboxes under Loom, as in `loom.rs`: a ring that is full, empty and wraps, a staging area, and sleepers on
//! either side. Loom has no clock, so a lost wake is a deadlock.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

mod loom_support;

use std::sync::Arc;

use dl_comm_core::transport::in_process::mailbox_memory::HeapMemory;
use dl_comm_core::transport::mailbox::Mailbox;
use dl_comm_core::transport::mailbox::memory::MailboxMemory;
use dl_comm_core::transport::mailbox::ring::{Envelope, LongEnvelope, LongState};
use dl_comm_core::transport::mailbox::staging::PartInfo;
use dl_comm_core::transport::sync::check_read;
use loom_support::{explore, spawn};

/// The mailboxes of two ranks.
fn mailboxes() -> [Mailbox; 2] {
    let mut mailboxes = HeapMemory::world(2, false)
        .into_iter()
        .map(|memory| Mailbox::new(Arc::new(memory) as Arc<dyn MailboxMemory>).unwrap());
    [mailboxes.next().unwrap(), mailboxes.next().unwrap()]
}

/// Runs `advance` until it returns true; sleeps after each time without effect.
fn drive(mailbox: &mut Mailbox, me: usize, mut advance: impl FnMut(&mut Mailbox) -> bool) {
    while !advance(mailbox) {
        let (bell, _cleared) = mailbox.header(me).before_sleep(2);
        let ended = advance(mailbox);
        if !ended {
            mailbox.header(me).sleep(bell).unwrap();
        }
        mailbox.header(me).after_sleep();
        if ended {
            return;
        }
    }
}

fn send(mailbox: &mut Mailbox, to: usize, tag: u32, len: usize) -> bool {
    let ring = &mut mailbox.outbox(to).unwrap().ring;
    if !ring.has_room() {
        return false;
    }
    let envelope = Envelope { context: 1, total: len as u64, tag, kind: 0, types: 0 };
    // SAFETY: there is room.
    unsafe { ring.send(envelope, len, |cell| cell.write_bytes(tag as u8, len)) };
    mailbox.notify(to);
    true
}

fn receive(mailbox: &mut Mailbox, from: usize, tag: u32, len: usize) -> bool {
    let Some(inbox) = mailbox.inbox(from) else { return false };
    let Some(message) = inbox.ring.peek() else { return false };
    assert_eq!((message.envelope.tag, message.envelope.total), (tag, len as u64));
    check_read(message.data, len);
    // SAFETY: the cell has these bytes.
    assert!((0..len).all(|at| unsafe { message.data.add(at).read() } == tag as u8));
    if inbox.ring.take() {
        mailbox.notify(from);
    }
    true
}

/// Messages of the lengths in turn, through a ring of two cells; both ends sleep when they cannot go on.
fn stream(lengths: &'static [usize]) {
    let [mut sender, mut receiver] = mailboxes();
    let receiving = spawn(move || {
        let mut next = 0;
        drive(&mut receiver, 1, |mailbox| {
            while next < lengths.len() && receive(mailbox, 0, next as u32, lengths[next]) {
                next += 1;
            }
            next == lengths.len()
        });
    });
    let sending = spawn(move || {
        let mut next = 0;
        drive(&mut sender, 0, |mailbox| {
            while next < lengths.len() && send(mailbox, 1, next as u32, lengths[next]) {
                next += 1;
            }
            next == lengths.len()
        });
    });
    sending.join().unwrap();
    receiving.join().unwrap();
}

#[test]
fn messages_go_through_a_small_ring() {
    explore(Some(2), || stream(&[8, 64, 8, 0, 64]));
}

#[test]
fn messages_cross() {
    explore(Some(2), || {
        let ranks = mailboxes().into_iter().enumerate().map(|(me, mut mailbox)| {
            spawn(move || {
                let (mut sent, mut received) = (0, 0);
                drive(&mut mailbox, me, |mailbox| {
                    while sent < 2 && send(mailbox, 1 - me, sent, 8) {
                        sent += 1;
                    }
                    while received < 2 && receive(mailbox, 1 - me, received, 8) {
                        received += 1;
                    }
                    sent == 2 && received == 2
                });
            })
        });
        ranks.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().unwrap());
    });
}

/// A long message in three parts through two; with `gives_up`, its sender may abort it at any time.
fn long_message(gives_up: bool) {
    let [mut sender, mut receiver] = mailboxes();
    const PARTS: u64 = 3;
    let receiving = spawn(move || {
        let (mut taken, mut parts, mut ended) = (false, 0, false);
        drive(&mut receiver, 1, |mailbox| {
            let Some(inbox) = mailbox.inbox(0) else { return false };
            if !taken {
                let Some(message) = inbox.ring.peek() else { return false };
                let long = message.long();
                assert_eq!((long.id, long.slot), (5, 0));
                let _now = inbox.ring.take();
                taken = true;
                let ring = inbox.ring.ring();
                if ring.change_long(0, LongState::Announced, LongState::Streaming).is_err() {
                    ring.set_long(0, LongState::Free);
                    ended = true;
                }
                mailbox.notify(0);
            }
            while !ended && parts < PARTS {
                let Some((info, data)) = mailbox.staged(0).and_then(|staged| staged.peek()) else { break };
                assert_eq!(info, PartInfo { id: 5, offset: parts, len: 8 });
                check_read(data, 8);
                // SAFETY: the part has these bytes.
                assert_eq!(unsafe { data.read() }, parts as u8);
                mailbox.staged(0).unwrap().take();
                mailbox.notify(0);
                parts += 1;
            }
            if !ended {
                let ring = mailbox.inbox(0).unwrap().ring.ring();
                if parts == PARTS {
                    if ring.change_long(0, LongState::Streaming, LongState::Done).is_err() {
                        ring.set_long(0, LongState::Free);
                    }
                    ended = true;
                } else if ring.long_state(0) == LongState::Aborted {
                    ring.set_long(0, LongState::Free);
                    ended = true;
                }
                mailbox.notify(0);
            }
            ended
        });
    });
    let sending = spawn(move || {
        let ring = &mut sender.outbox(1).unwrap().ring;
        ring.ring().set_long(0, LongState::Announced);
        let envelope = Envelope { context: 1, total: 100, tag: 0, kind: 0, types: 0 };
        // SAFETY: the ring is empty.
        unsafe { ring.announce(envelope, LongEnvelope { id: 5, place: 0, slot: 0, exported: 0, address: 0 }, &[]) };
        sender.notify(1);
        let mut aborted = false;
        if gives_up {
            let ring = sender.outbox(1).unwrap().ring.ring();
            aborted = [LongState::Announced, LongState::Streaming]
                .into_iter()
                .any(|state| ring.change_long(0, state, LongState::Aborted).is_ok());
            sender.notify(1);
        }
        let mut parts = 0;
        drive(&mut sender, 0, |mailbox| {
            let state = mailbox.outbox(1).unwrap().ring.ring().long_state(0);
            if aborted {
                return state == LongState::Free;
            }
            while state == LongState::Streaming && parts < PARTS {
                let staging = mailbox.staging(1).unwrap();
                if !staging.has_room() {
                    break;
                }
                // SAFETY: a part is free.
                unsafe {
                    staging.send(PartInfo { id: 5, offset: parts, len: 8 }, |part| part.write_bytes(parts as u8, 8))
                };
                mailbox.notify(1);
                parts += 1;
            }
            state == LongState::Done
        });
    });
    sending.join().unwrap();
    receiving.join().unwrap();
}

#[test]
fn a_long_message_comes_in_parts() {
    explore(Some(2), || long_message(false));
}

#[test]
fn a_sender_may_give_up() {
    explore(Some(2), || long_message(true));
}
