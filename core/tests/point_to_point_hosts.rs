//! Send and receive between ranks that are threads, on several "hosts". The network delays messages, and reorders those
//! of different senders.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use dl_comm_core::cases::cases;
use dl_comm_core::error::Error;
use dl_comm_core::p2p::{Message, Scope, Spans, Status, Transfer};
use dl_comm_core::transport::in_process::messages::ThreadMessages;
use proptest::prelude::*;

#[path = "common/endpoints.rs"]
mod endpoints;

use endpoints::{Lost, Rank, bytes, deadline, hosts_with, run, spans, spans_mut};

/// Longest message that needs no receive.
const SHORT: usize = 8192;
/// Messages that a rank may have at another one that does not look.
const CREDITS: usize = 32;

fn hosts(sizes: &[usize]) -> Vec<Rank> {
    hosts_with(sizes, false, &Lost::default(), ThreadMessages::world(sizes.iter().sum(), 1, 3))
}

#[test]
fn short_and_long_messages_arrive_with_their_status() {
    let ranks = hosts(&[1, 1]);
    for len in [0, 1, 4097, SHORT, SHORT + 1, 262_144, 262_145, 3_000_000, 9_000_001] {
        run(&ranks, |number, rank| {
            let data = bytes(number, len);
            let mut other = vec![0; len + 5];
            let send = rank.start_send(1 - number, 3, &data);
            let status = rank.receive(Some(1 - number), Some(3), &mut other).unwrap();
            assert_eq!(status, Status { source: 1 - number, tag: 3, bytes: len });
            assert_eq!(other[..len], bytes(1 - number, len));
            assert_eq!(other[len..], [0; 5]);
            assert_eq!(send.wait(None), Ok(Status { source: number, tag: 3, bytes: len }));
        });
    }
}

#[test]
fn short_sends_end_without_their_receives_up_to_a_number() {
    let ranks = hosts(&[1, 1]);
    let data = bytes(1, SHORT);
    for tag in 0..CREDITS as u32 {
        assert!(ranks[0].start_send(1, tag, &data).result().is_some());
    }
    let waiting: Vec<_> =
        (0..3 * CREDITS as u32).map(|tag| ranks[0].start_send(1, CREDITS as u32 + tag, &data)).collect();
    assert!(waiting.iter().all(|send| send.result().is_none()));
    let mut other = vec![0; SHORT];
    for tag in (0..4 * CREDITS as u32).rev() {
        assert_eq!(ranks[1].receive(Some(0), Some(tag), &mut other).unwrap().bytes, SHORT);
        assert_eq!(other, data);
    }
    waiting.iter().for_each(|send| assert!(send.wait(None).is_ok()));
}

#[test]
fn a_message_that_is_too_long_fails_its_receive_only() {
    for len in [10, 100_000] {
        let ranks = hosts(&[1, 1]);
        let data = bytes(3, len);
        run(&ranks, |number, rank| {
            if number == 0 {
                let sends = [0, 1].map(|tag| rank.start_send(1, tag, &data));
                sends.iter().for_each(|send| assert!(send.wait(None).is_ok()));
            } else {
                let mut short = vec![9; len - 1];
                let error = rank.receive(Some(0), Some(0), &mut short).unwrap_err();
                let expected =
                    format!("receive (tag 0) from rank 0 in group 7 has room for {} bytes, and the", len - 1);
                assert!(matches!(&error, Error::Invalid(text) if text.starts_with(&expected)), "{error:?}");
                assert!(short.iter().all(|&byte| byte == 9));
                let mut right = vec![0; len];
                rank.receive(Some(0), Some(1), &mut right).unwrap();
                assert_eq!(right, data);
            }
        });
    }
}

#[test]
fn a_deadline_ends_either_side_and_the_other_learns_of_it() {
    let ranks = hosts(&[1, 1]);
    let (data, short) = (bytes(4, 2_000_000), Some(Duration::from_millis(100)));
    let message = Message { deadline: deadline(short), ..ranks[0].message(Some(1), Some(5)) };
    // SAFETY: the memory lives until the request has ended.
    let send = unsafe { Transfer::send(&ranks[0].endpoint, &message, spans(&data), None) }.unwrap();
    let error = send.wait(None).unwrap_err();
    assert!(error.to_string().contains("the send (tag 5) to rank 1 in group 7 was not complete"), "{error}");
    // The message is gone; the next one arrives.
    let mut other = vec![0; 2_000_000];
    let receive = ranks[1].start_receive(Some(0), Some(6), &mut other);
    let next = ranks[0].start_send(1, 6, &data);
    assert_eq!(receive.wait(None).unwrap().tag, 6);
    next.wait(None).unwrap();
    assert_eq!(other, data);
    let message = Message { deadline: deadline(short), name: "x", ..ranks[1].message(None, None) };
    // SAFETY: as above.
    let receive = unsafe { Transfer::receive(&ranks[1].endpoint, &message, spans(&other), None) }.unwrap();
    let error = receive.wait(None).unwrap_err();
    assert!(error.to_string().contains("the receive \"x\" (any tag) from any rank in group 7 was not"), "{error}");
}

/// Sends and receives that give up at any time. The memory of a failed call may be used again at once.
#[test]
fn either_side_may_give_up_midway() {
    let ranks = hosts_with(&[1, 1], false, &Lost::default(), ThreadMessages::world(2, 5, 8));
    let data = bytes(5, 4_000_000);
    for round in 0..60u64 {
        let mut other = vec![0; 4_000_000];
        let late = |round: u64| Some(Duration::from_micros(500 * (1 + round * 7 % 40)));
        thread::scope(|scope| {
            let sender = scope.spawn(|| {
                let message = Message { deadline: deadline(late(round)), ..ranks[0].message(Some(1), Some(5)) };
                // SAFETY: the memory lives until the request has ended.
                let send = unsafe { Transfer::send(&ranks[0].endpoint, &message, spans(&data), None) }.unwrap();
                send.wait(None)
            });
            let message = Message { deadline: deadline(late(round * 3 + 1)), ..ranks[1].message(Some(0), Some(5)) };
            // SAFETY: as above.
            let receive =
                unsafe { Transfer::receive(&ranks[1].endpoint, &message, spans_mut(&mut other), None) }.unwrap();
            let received = receive.wait(None);
            let copy = other.clone();
            if received.is_ok() {
                assert_eq!(copy, data);
            }
            let sent = sender.join().unwrap();
            assert!(received.is_ok() || sent.is_err(), "{sent:?} {received:?}");
            thread::sleep(Duration::from_millis(1));
            // A late part must not be written.
            assert!(other == copy);
        });
    }
    // What was left behind harms nobody.
    let mut other = vec![0; 4_000_000];
    let receive = ranks[1].start_receive(Some(0), Some(6), &mut other);
    let send = ranks[0].start_send(1, 6, &data);
    receive.wait(None).unwrap();
    send.wait(None).unwrap();
    assert_eq!(other, data);
}

#[test]
fn a_lost_rank_fails_what_waits_for_it() {
    let lost = Lost(Arc::new((0..3).map(|_| AtomicBool::new(false)).collect()));
    let ranks = hosts_with(&[1, 2], false, &lost, ThreadMessages::world(3, 2, 2));
    let (data, mut other) = (bytes(5, 100), vec![0; 100]);
    ranks[1].send(0, 0, &data);
    // What it has sent arrives.
    ranks[0].receive(Some(1), Some(0), &mut other).unwrap();
    lost.0[1].store(true, Ordering::Relaxed);
    let error = ranks[0].receive(Some(1), Some(0), &mut other).unwrap_err();
    assert_eq!(error, Error::PeerLost("rank 1 has ended, in the receive (tag 0) from rank 1 in group 7".into()));
    let long = bytes(6, 200_001);
    let error = ranks[0].start_send(1, 4, &long).wait(None).unwrap_err();
    assert_eq!(error, Error::PeerLost("rank 1 has ended, in the send (tag 4) to rank 1 in group 7".into()));
    // Rank 2 may still send.
    let any = ranks[0].start_receive(None, None, &mut other);
    thread::sleep(Duration::from_millis(100));
    assert!(any.test().is_none());
    ranks[2].endpoint.close().unwrap();
    let error = thread::scope(|scope| {
        let waiter = scope.spawn(|| any.wait(None).unwrap_err());
        // Rank 2 had no messages with rank 0, which makes itself known later.
        while !waiter.is_finished() {
            ranks[2].endpoint.linger();
            thread::sleep(Duration::from_millis(1));
        }
        waiter.join().unwrap()
    });
    assert!(error.to_string().contains("in the receive (any tag) from any rank in group 7"), "{error}");
}

#[test]
fn the_last_message_arrives_after_its_ranks_end() {
    let ranks = hosts(&[1, 1]);
    let (data, mut other) = (bytes(7, 100), vec![0; 100]);
    ranks[0].send(1, 0, &data);
    let unmatched = ranks[0].start_send(1, 1, &vec![0; 100_000]);
    ranks[0].endpoint.close().unwrap();
    assert!(matches!(unmatched.wait(None), Err(Error::State(_))));
    ranks[1].receive(Some(0), Some(0), &mut other).unwrap();
    assert_eq!(other, data);
    let error = ranks[1].receive(Some(0), None, &mut other).unwrap_err();
    let text = "rank 0 has called finalize, in the receive (any tag) from rank 0 in group 7";
    assert_eq!(error, Error::PeerLost(text.into()));
    // SAFETY: nothing is started.
    let refused =
        unsafe { Transfer::send(&ranks[0].endpoint, &ranks[0].message(Some(1), Some(0)), Spans::default(), None) };
    assert!(matches!(refused, Err(Error::State(_))));
}

#[test]
fn a_broken_network_ends_what_needs_it() {
    for starts in [16, 17, 18, 19, 21, 24, 29, 35] {
        let mut networks = ThreadMessages::world(3, 3, 1);
        let last = networks.pop().unwrap().failing_after(starts);
        networks.push(last);
        let ranks = hosts_with(&[1, 2], false, &Lost::default(), networks);
        let data = bytes(1, 3_000_000);
        let mut other = vec![0; 3_000_000];
        thread::scope(|scope| {
            scope.spawn(|| {
                let message = Message {
                    deadline: deadline(Some(Duration::from_millis(200))),
                    ..ranks[0].message(Some(2), Some(0))
                };
                for _ in 0..2 {
                    // SAFETY: the memory lives until the request has ended.
                    let send = unsafe { Transfer::send(&ranks[0].endpoint, &message, spans(&data), None) }.unwrap();
                    let _ended = send.wait(None);
                }
            });
            let both = [0, 1].map(|_| ranks[2].receive(Some(0), Some(0), &mut other));
            let error = both.iter().find_map(|result| result.clone().err());
            if let Some(error) = error {
                assert!(matches!(&error, Error::Network(text) if text.contains("the network is broken")), "{error}");
            }
        });
        // Ranks of one host still reach each other.
        ranks[1].send(2, 1, &data[..100]);
        ranks[2].receive(Some(1), Some(1), &mut other[..100]).unwrap();
        assert_eq!(other[..100], data[..100]);
    }
}

/// A group of the ranks `members`.
struct Pair {
    members: [usize; 2],
}

impl Scope for Pair {
    fn context(&self) -> u64 {
        99
    }
    fn name(&self) -> String {
        "pair".into()
    }
    fn size(&self) -> usize {
        2
    }
    fn to_world(&self, rank: usize) -> usize {
        self.members[rank]
    }
    fn of_world(&self, world: usize) -> Option<usize> {
        self.members.iter().position(|&member| member == world)
    }
    fn failure(&self) -> Option<Error> {
        None
    }
}

#[test]
fn groups_of_some_ranks_have_their_own_messages() {
    let ranks = hosts(&[2, 2]);
    let pair = Arc::new(Pair { members: [3, 1] });
    let (first_routes, last_routes) = (ranks[1].routes_of(&pair), ranks[3].routes_of(&pair));
    let (first, second) = ([1u8], vec![2u8; 20_000]);
    ranks[1].send(3, 0, &first);
    let mut found = vec![0u8; 20_000];
    // SAFETY: the memory lives until both have ended.
    let (send, receive) = unsafe {
        let message = Message { group: &first_routes, ..ranks[1].message(Some(0), Some(0)) };
        let send = Transfer::send(&ranks[1].endpoint, &message, spans(&second), None).unwrap();
        let message = Message { group: &last_routes, ..ranks[3].message(None, None) };
        (send, Transfer::receive(&ranks[3].endpoint, &message, spans_mut(&mut found), None).unwrap())
    };
    assert_eq!(receive.wait(None), Ok(Status { source: 1, tag: 0, bytes: 20_000 }));
    assert_eq!(send.wait(None), Ok(Status { source: 1, tag: 0, bytes: 20_000 }));
    assert_eq!(found, second);
    assert_eq!(ranks[3].receive(None, None, &mut found[..1]).unwrap().source, 1);
    assert_eq!(found[0], 1);
}

#[test]
fn progress_is_made_without_a_wait() {
    let ranks = hosts(&[1, 1]);
    let (data, mut other) = (bytes(1, 1_000_000), vec![0; 1_000_000]);
    let receive = ranks[1].start_receive(None, None, &mut other);
    let send = ranks[0].start_send(1, 0, &data);
    let until = Instant::now() + Duration::from_secs(60);
    while send.result().is_none() || receive.result().is_none() {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(other, data);
}

#[test]
fn many_threads_of_a_rank_send_and_receive() {
    let ranks = hosts(&[1, 1]);
    run(&ranks, |number, rank| {
        thread::scope(|scope| {
            for tag in 0..6u32 {
                scope.spawn(move || {
                    for round in 0..40 {
                        let len = [8, 5000, 70_000, 600_000][(round + tag as usize) % 4];
                        let (data, mut other) = (bytes(round + number, len), vec![0; len]);
                        let send = rank.start_send(1 - number, tag, &data);
                        rank.receive(Some(1 - number), Some(tag), &mut other).unwrap();
                        assert_eq!(other, bytes(round + 1 - number, len));
                        send.wait(None).unwrap();
                    }
                });
            }
        });
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24)))]

    /// Every rank sends to every other one, and receives from any rank or a given one: each message comes once, those of
    /// one sender and tag in their order.
    #[test]
    fn messages_arrive_once_and_in_order(
        sizes in prop::collection::vec(1usize..3, 1..4),
        lists in prop::collection::vec(prop::collection::vec((0usize..6, 0u32..3, 0usize..700_000, 0u8..4), 0..25), 6),
        receive_first in any::<bool>(),
        names_source in any::<bool>(),
        any_tag in any::<bool>(),
        seed: u64,
        slowness in 1u64..6,
    ) {
        let size: usize = sizes.iter().sum();
        let ranks = hosts_with(&sizes, false, &Lost::default(), ThreadMessages::world(size, seed, slowness));
        // (to, tag, length); a quarter of the lengths is long.
        let lists: Vec<Vec<(usize, u32, usize)>> = lists[..size].iter().map(|list| list.iter().map(
            |&(to, tag, len, kind)| (to % size, tag, 8 + if kind == 0 { len } else { len % 12_000 })
        ).collect()).collect();
        let (lists, start) = (&lists, Barrier::new(size));
        run(&ranks, |me, rank| {
            start.wait();
            let mut wanted: Vec<(usize, u32)> = (0..size)
                .flat_map(|from| lists[from].iter().filter(|(to, ..)| *to == me).map(move |&(_, tag, _)| (from, tag)))
                .collect();
            // The order of the receives is another one than that of the sends.
            wanted.sort_by_key(|&(from, tag)| (tag, from));
            let data: Vec<Vec<u8>> = lists[me].iter().enumerate().map(|(index, &(_, _, len))| {
                let mut data = bytes(me, len);
                data[..8].copy_from_slice(&(index as u64).to_le_bytes());
                data
            }).collect();
            let mut buffers = vec![vec![0u8; 700_008]; wanted.len()];
            let pattern = |&(from, tag): &(usize, u32)| (names_source.then_some(from), (!any_tag).then_some(tag));
            let start_receives = |buffers: &mut Vec<Vec<u8>>| -> Vec<_> {
                let each = wanted.iter().zip(buffers).map(|(wanted, buffer)| {
                    let (from, tag) = pattern(wanted);
                    rank.start_receive(from, tag, buffer)
                });
                each.collect()
            };
            let mut receives = if receive_first { start_receives(&mut buffers) } else { Vec::new() };
            let sends: Vec<_> = lists[me].iter().zip(&data).map(|(&(to, tag, _), data)| rank.start_send(to, tag, data)).collect();
            if !receive_first {
                receives = start_receives(&mut buffers);
            }
            let mut seen: HashMap<(usize, u32), i64> = HashMap::new();
            for (receive, buffer) in receives.iter().zip(&buffers) {
                let status = receive.wait(None).unwrap();
                let index = i64::from_le_bytes(buffer[..8].try_into().unwrap());
                let (to, tag, len) = lists[status.source][index as usize];
                assert_eq!((to, status.tag, status.bytes), (me, tag, len));
                assert_eq!(buffer[8..len], bytes(status.source, len)[8..]);
                let last = seen.insert((status.source, tag), index).unwrap_or(-1);
                assert!(last < index, "message {index} of rank {} after {last}", status.source);
            }
            sends.iter().for_each(|send| assert!(send.wait(None).is_ok()));
        });
    }
}
