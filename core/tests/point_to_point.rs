//! Send and receive between ranks that are threads.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use dl_comm_core::buffer::Buffer;
use dl_comm_core::cases::cases;
use dl_comm_core::dtype::DType;
use dl_comm_core::error::Error;
use dl_comm_core::p2p::{Message, Scope, Spans, Status, Then, Transfer};
use dl_comm_core::transport::mailbox::ring::CELL_BYTES;
use proptest::prelude::*;

#[path = "common/endpoints.rs"]
mod endpoints;

use endpoints::{Group, Lost, bytes, deadline, run, spans, spans_mut, world, world_with};

#[test]
fn short_and_long_messages_arrive_with_their_status() {
    for (shares, shows) in [(false, false), (true, false), (false, true)] {
        let ranks = world(2, shares);
        if shows {
            ranks.iter().for_each(|rank| rank.endpoint.show_process());
        }
        for len in [0, 1, 8, 32, 33, CELL_BYTES, CELL_BYTES + 1, 131_072, 131_073, 3_000_000, 9_000_000] {
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
}

#[test]
fn sends_up_to_a_cell_end_without_their_receives() {
    let ranks = world(2, false);
    let data = bytes(1, CELL_BYTES);
    for tag in 0..16 {
        assert!(ranks[0].start_send(1, tag, &data).result().is_some());
    }
    // The ring is full now.
    let waiting = ranks[0].start_send(1, 16, &data);
    assert!(waiting.result().is_none());
    let mut other = vec![0; CELL_BYTES];
    for tag in (0..17).rev() {
        ranks[1].receive(Some(0), Some(tag), &mut other).unwrap();
        assert_eq!(other, data);
    }
    waiting.wait(None).unwrap();
}

#[test]
fn a_rank_sends_to_itself() {
    let ranks = world(1, false);
    for len in [0, 10, 100_000] {
        let data = bytes(2, len);
        let mut other = vec![0; len];
        let send = ranks[0].start_send(0, 1, &data);
        assert_eq!(send.result().is_some(), len <= CELL_BYTES);
        assert_eq!(ranks[0].receive(None, None, &mut other).unwrap().bytes, len);
        assert_eq!(other, data);
        send.wait(None).unwrap();
        let receive = ranks[0].start_receive(Some(0), Some(9), &mut other);
        ranks[0].send(0, 9, &data);
        receive.wait(None).unwrap();
    }
}

#[test]
fn a_message_that_is_too_long_fails_its_receive_only() {
    for (shares, len) in [(false, 10), (false, 100_000), (true, 100_000)] {
        let ranks = world(2, shares);
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

/// A receive in one call takes the messages in the same order as one that was posted before.
#[test]
fn a_receive_in_one_call_takes_the_message_that_a_posted_one_would() {
    let ranks = world(2, false);
    let mut found = [0u8; 8];
    for (tag, data) in [(0, [1u8; 8]), (1, [2; 8]), (1, [3; 8]), (2, [4; 8])] {
        ranks[0].send(1, tag, &data);
    }
    // The first message fits nothing here: it waits for a receive of its own.
    for (tag, value) in [(Some(1), 2), (None, 1), (Some(1), 3), (None, 4)] {
        let status = ranks[1].receive_in_one(&ranks[1].message(Some(0), tag), &mut found).unwrap();
        assert_eq!((status.source, status.bytes, found), (0, 8, [value; 8]));
    }
    // A receive that was posted before has its message, although the call waits for one, too.
    let mut before = [0u8; 8];
    let posted = ranks[1].start_receive(Some(0), None, &mut before);
    for value in [5, 6] {
        ranks[0].send(1, 7, &[value; 8]);
    }
    ranks[1].receive_in_one(&ranks[1].message(Some(0), Some(7)), &mut found).unwrap();
    posted.wait(None).unwrap();
    assert_eq!((before, found), ([5; 8], [6; 8]));
}

#[test]
fn a_receive_in_one_call_checks_the_length() {
    let ranks = world(2, false);
    let mut found = [0u8; 8];
    let message = ranks[1].message(Some(0), Some(0));
    for len in [3, 9, CELL_BYTES + 1] {
        ranks[0].start_send(1, 0, &bytes(1, len));
        let exact = Message { exact: true, ..message };
        assert!(matches!(ranks[1].receive_in_one(&exact, &mut found), Err(Error::Mismatch(_))), "{len} bytes");
        ranks[0].start_send(1, 0, &bytes(1, len));
        let result = ranks[1].receive_in_one(&message, &mut found);
        match len {
            3 => assert_eq!(result, Ok(Status { source: 0, tag: 0, bytes: 3 })),
            _ => assert!(matches!(result, Err(Error::Invalid(_))), "{len} bytes"),
        }
    }
    assert_eq!(found[3..], [0; 5]);
}

/// Calls of several threads, with started ones between them, have each its own messages.
#[test]
fn receives_in_one_call_of_several_threads_do_not_disturb_each_other() {
    let ranks = world(2, false);
    let (rounds, threads) = (300, 3);
    run(&ranks, |number, rank| {
        thread::scope(|scope| {
            for tag in 0..threads {
                scope.spawn(move || {
                    for round in 0..rounds {
                        // Also long ones.
                        let len = [8, 33, 600, CELL_BYTES + 1][(round + tag as usize) % 4];
                        let (data, mut other) = (bytes(round + number, len), vec![0; len]);
                        let message = rank.message(Some(1 - number), Some(tag));
                        if round % 3 == 0 {
                            let sent = rank.start_send(1 - number, tag, &data);
                            rank.receive_in_one(&message, &mut other).unwrap();
                            sent.wait(None).unwrap();
                        } else {
                            // SAFETY: the memory lives until the call has ended.
                            let both = unsafe {
                                let receive = (&message, spans_mut(&mut other));
                                rank.endpoint.exchange((&message, spans(&data)), receive)
                            };
                            assert_eq!(both.unwrap().bytes, len);
                        }
                        assert_eq!(other, bytes(round + 1 - number, len));
                    }
                });
            }
        });
    });
}

#[test]
fn groups_do_not_see_each_others_messages() {
    let ranks = world(2, false);
    let other = Arc::new(Group { context: 8, size: 2, failure: Mutex::default() });
    let routes = [0, 1].map(|rank: usize| ranks[rank].routes_of(&other));
    let (first, second) = ([1u8], [2u8]);
    ranks[0].send(1, 0, &first);
    let message = Message { group: &routes[0], ..ranks[0].message(Some(1), Some(0)) };
    // SAFETY: the memory lives.
    unsafe { Transfer::send(&ranks[0].endpoint, &message, spans(&second), None) }.unwrap();
    let mut found = [0u8];
    let message = Message { group: &routes[1], ..ranks[1].message(None, None) };
    // SAFETY: as above.
    let request = unsafe { Transfer::receive(&ranks[1].endpoint, &message, spans_mut(&mut found), None) }.unwrap();
    request.wait(None).unwrap();
    assert_eq!(found, second);
    ranks[1].receive(None, None, &mut found).unwrap();
    assert_eq!(found, first);
}

#[test]
fn a_deadline_ends_either_side_and_the_other_learns_of_it() {
    for (shares, shows) in [(false, false), (true, false), (false, true)] {
        let ranks = world(2, shares);
        if shows {
            ranks.iter().for_each(|rank| rank.endpoint.show_process());
        }
        let (data, short) = (bytes(4, 2_000_000), Some(Duration::from_millis(100)));
        let message = Message { deadline: deadline(short), ..ranks[0].message(Some(1), Some(5)) };
        // SAFETY: the memory lives until the request has ended.
        let send = unsafe { Transfer::send(&ranks[0].endpoint, &message, spans(&data), None) }.unwrap();
        let error = send.wait(None).unwrap_err();
        assert!(error.to_string().contains("the send (tag 5) to rank 1 in group 7 was not complete"), "{error}");
        // The message is gone; the next one arrives.
        let mut other = vec![0; 2_000_000];
        let receive = ranks[1].start_receive(Some(0), None, &mut other);
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
}

#[test]
fn a_receive_that_gives_up_midway_fails_the_send() {
    let ranks = world(2, false);
    let (data, mut other) = (bytes(5, 4_000_000), vec![0; 4_000_000]);
    let send = ranks[0].start_send(1, 5, &data);
    let message = Message { deadline: deadline(Some(Duration::from_millis(50))), ..ranks[1].message(Some(0), Some(5)) };
    ranks[0].group.failure.lock().unwrap().replace(Error::State("over".into()));
    // SAFETY: the memory lives until the request has ended.
    let receive = unsafe { Transfer::receive(&ranks[1].endpoint, &message, spans_mut(&mut other), None) }.unwrap();
    let (sent, received) = (send.wait(None), receive.wait(None));
    // Whoever was first; both end.
    assert!(sent.is_ok() == received.is_ok(), "{sent:?} {received:?}");
}

#[test]
fn a_lost_rank_fails_what_waits_for_it() {
    let lost = Lost(Arc::new((0..3).map(|_| AtomicBool::new(false)).collect()));
    let ranks = world_with(3, false, &lost);
    let (data, mut other) = (bytes(5, 100), vec![0; 100]);
    ranks[1].send(0, 0, &data);
    lost.0[1].store(true, Ordering::Relaxed);
    // What it has sent arrives.
    ranks[0].receive(Some(1), Some(0), &mut other).unwrap();
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
    let error = any.wait(None).unwrap_err();
    assert!(error.to_string().contains("in the receive (any tag) from any rank in group 7"), "{error}");
}

#[test]
fn a_send_to_a_rank_that_has_ended_fails_whatever_its_length() {
    for len in [0, 10, 100_000] {
        let lost = Lost(Arc::new((0..2).map(|_| AtomicBool::new(false)).collect()));
        let ranks = world_with(2, false, &lost);
        lost.0[1].store(true, Ordering::Relaxed);
        let data = bytes(0, len);
        // SAFETY: the data lives until the call has ended.
        let error =
            unsafe { ranks[0].endpoint.send_now(&ranks[0].message(Some(1), Some(4)), spans(&data)) }.unwrap_err();
        assert!(matches!(&error, Error::PeerLost(text) if text.contains("rank 1 has ended")), "{error}");
        let ranks = world(2, false);
        ranks[1].endpoint.close().unwrap();
        // SAFETY: as above.
        let error =
            unsafe { ranks[0].endpoint.send_now(&ranks[0].message(Some(1), Some(4)), spans(&data)) }.unwrap_err();
        assert!(matches!(&error, Error::PeerLost(text) if text.contains("rank 1 has called finalize")), "{error}");
    }
}

/// The memory of tensors with `len` elements each.
fn spans_of(tensors: &mut [(DType, Vec<u64>)], sends: bool) -> Spans {
    let mut spans = Spans::default();
    for (dtype, data) in tensors {
        let buffer = Buffer::in_place(data.as_mut_ptr().cast(), data.len() * 8 / dtype.size(), *dtype);
        spans.add_buffer(&buffer, sends).unwrap();
    }
    spans
}

#[test]
fn the_element_types_of_a_message_are_compared() {
    use DType::{F32, F64, I32, I64};
    for len in [0, 1, 100, 100_000] {
        for posted in [false, true] {
            for (sent, expected) in [
                (&[I64][..], &[F64][..]),
                (&[I32], &[F32]),
                (&[F32, I64], &[F32, F64]),
                (&[F32, I64], &[I64, F32]),
                (&[F32], &[F32, I64]),
                (&[F32, F32], &[F32]),
                (&[F32, I64, F32], &[F32, I64, F32]),
            ] {
                let ranks = world(2, false);
                let tensors = |types: &[DType], of: usize, value: u64| -> Vec<(DType, Vec<u64>)> {
                    types.iter().map(|&dtype| (dtype, vec![value; of / types.len()])).collect()
                };
                let all = len * 6;
                let (mut data, mut memory) = (tensors(sent, all, 7), tensors(expected, all, 0));
                let matches = len == 0 || sent == expected || (sent.len(), expected.len()) == (2, 1);
                let start = |data: &mut Vec<(DType, Vec<u64>)>| {
                    let message = ranks[0].message(Some(1), Some(2));
                    // SAFETY: the data lives until the call has ended.
                    unsafe { Transfer::send(&ranks[0].endpoint, &message, spans_of(data, true), None) }.unwrap()
                };
                let early = (!posted).then(|| start(&mut data));
                let message = ranks[1].message(Some(0), Some(2));
                let into = spans_of(&mut memory, false);
                // SAFETY: as above.
                let receive = unsafe { Transfer::receive(&ranks[1].endpoint, &message, into, None) }.unwrap();
                let send = early.unwrap_or_else(|| start(&mut data));
                match receive.wait(None) {
                    Ok(status) => assert!(matches && status.bytes == all * 8, "{sent:?} {expected:?}"),
                    Err(Error::Mismatch(text)) => {
                        assert!(!matches && text.contains("and the message has"), "{sent:?} {expected:?}: {text}");
                        assert!(memory.iter().all(|(_, data)| data.iter().all(|&value| value == 0)));
                    }
                    Err(error) => panic!("{error}"),
                }
                send.wait(None).unwrap();
                // The next message is another one.
                ranks[0].send(1, 2, &[5; 3]);
                let mut next = [0; 3];
                ranks[1].receive(Some(0), Some(2), &mut next).unwrap();
                assert_eq!(next, [5; 3]);
            }
        }
    }
}

/// A bug in a callback is not that of the thread that completes a message.
#[test]
fn a_callback_that_panics_disturbs_nobody() {
    let ranks = world(2, false);
    for len in [100, 100_000] {
        let (data, mut first, mut second) = (bytes(1, len), vec![0; len], vec![0; len]);
        let message = ranks[0].message(Some(1), Some(1));
        let bug: Then = Box::new(|_| panic!("a bug"));
        // SAFETY: the memory lives until the receive has ended.
        let receive = unsafe { Transfer::receive(&ranks[0].endpoint, &message, spans_mut(&mut first), Some(bug)) };
        let send = ranks[1].start_send(0, 1, &data);
        assert_eq!(receive.unwrap().wait(Some(Duration::from_secs(20))).unwrap().bytes, len);
        send.wait(None).unwrap();
        let send = ranks[1].start_send(0, 2, &data);
        ranks[0].receive(Some(1), Some(2), &mut second).unwrap();
        send.wait(None).unwrap();
        assert_eq!((first, second), (data.clone(), data));
    }
}

#[test]
fn who_has_seen_a_result_may_free_what_its_callback_uses() {
    let ranks = world(2, false);
    let (called, data, mut memory) = (Arc::new(AtomicBool::new(false)), bytes(1, 10), vec![0; 10]);
    let sets = Arc::clone(&called);
    let message = ranks[0].message(Some(1), Some(1));
    let slow: Then = Box::new(move |_| {
        thread::sleep(Duration::from_millis(100));
        sets.store(true, Ordering::SeqCst);
    });
    // SAFETY: the memory lives until the receive has ended.
    let receive =
        unsafe { Transfer::receive(&ranks[0].endpoint, &message, spans_mut(&mut memory), Some(slow)) }.unwrap();
    thread::scope(|scope| {
        let waits = [(); 2].map(|()| {
            scope.spawn(|| {
                receive.wait(None).unwrap();
                assert!(called.load(Ordering::SeqCst));
            })
        });
        ranks[1].send(0, 1, &data);
        waits.into_iter().for_each(|wait| wait.join().unwrap());
    });
}

/// A scope whose failure cannot be asked for: a bug under the lock of the endpoint.
struct Buggy(AtomicBool);

impl Scope for Buggy {
    fn context(&self) -> u64 {
        99
    }
    fn name(&self) -> String {
        "buggy".to_owned()
    }
    fn size(&self) -> usize {
        2
    }
    fn to_world(&self, rank: usize) -> usize {
        rank
    }
    fn of_world(&self, world: usize) -> Option<usize> {
        Some(world)
    }
    fn has_failed(&self) -> bool {
        false
    }
    fn failure(&self) -> Option<Error> {
        assert!(!self.0.load(Ordering::SeqCst), "a bug");
        None
    }
}

#[test]
fn a_panic_under_the_driver_ends_what_is_under_way() {
    let ranks = world(2, false);
    let scope = Arc::new(Buggy(AtomicBool::new(false)));
    let routes = ranks[0].routes_of(&scope);
    let (mut first, mut second) = (vec![0; 10], vec![0; 10]);
    let buggy = Message { group: &routes, ..ranks[0].message(Some(1), Some(1)) };
    // SAFETY: the memory lives until the receives have ended.
    let receive = unsafe { Transfer::receive(&ranks[0].endpoint, &buggy, spans_mut(&mut first), None) }.unwrap();
    let other = ranks[0].start_receive(Some(1), Some(2), &mut second);
    scope.0.store(true, Ordering::SeqCst);
    let ended = other.wait(Some(Duration::from_secs(20)));
    scope.0.store(false, Ordering::SeqCst);
    assert!(matches!(ended, Err(Error::Internal(_))), "{ended:?}");
    let message = ranks[0].message(Some(1), Some(3));
    // SAFETY: as above.
    let later = unsafe { Transfer::receive(&ranks[0].endpoint, &message, spans_mut(&mut second), None) };
    assert!(matches!(later.map(|_| ()), Err(Error::Internal(_))));
    drop(receive);
}

#[test]
fn invalid_ranks_and_a_failed_group_are_refused() {
    let ranks = world(2, false);
    // SAFETY: nothing is started.
    let refused =
        |message: &Message<'_>| unsafe { Transfer::send(&ranks[0].endpoint, message, Spans::default(), None) }.err();
    assert_eq!(
        refused(&ranks[0].message(Some(2), Some(0))),
        Some(Error::Invalid("send to rank 2 of group 7, which has 2".into()))
    );
    assert!(refused(&ranks[0].message(None, Some(0))).is_some());
    let larger = ranks[0].routes_of(&Arc::new(Group { context: 9, size: 3, failure: Mutex::default() }));
    let error = refused(&Message { group: &larger, ..ranks[0].message(Some(2), Some(0)) });
    let text = "send to rank 2 of group 9, which is on another host; there is no network for messages between hosts";
    assert_eq!(error, Some(Error::Invalid(text.into())));
    let mut other = [0; 4];
    let pending = ranks[0].start_receive(None, None, &mut other);
    let over = Error::Timeout("over".into());
    ranks[0].group.failure.lock().unwrap().replace(over.clone());
    assert_eq!(refused(&ranks[0].message(Some(1), Some(0))), Some(over.clone()));
    assert_eq!(pending.wait(None), Err(over));
}

#[test]
fn callbacks_run_without_a_wait() {
    let ranks = world(2, false);
    let data = bytes(6, 1_000_000);
    let mut other = vec![0; 1_000_000];
    let (sender, results) = std::sync::mpsc::channel();
    let tell = |name: &'static str| -> Option<Then> {
        let sender = sender.clone();
        Some(Box::new(move |result| sender.send((name, result)).unwrap()))
    };
    // SAFETY: the memory lives until both have ended.
    unsafe {
        Transfer::send(&ranks[0].endpoint, &ranks[0].message(Some(1), Some(1)), spans(&data), tell("send")).unwrap();
        Transfer::receive(
            &ranks[1].endpoint,
            &ranks[1].message(Some(0), Some(1)),
            spans_mut(&mut other),
            tell("receive"),
        )
        .unwrap();
    }
    let wait = || results.recv_timeout(Duration::from_secs(60)).unwrap();
    let ended = HashMap::from([wait(), wait()]);
    assert!(ended["send"].is_ok() && ended["receive"].is_ok());
    assert_eq!(other, data);
}

#[test]
fn many_threads_of_a_rank_send_and_receive() {
    for shares in [false, true] {
        let ranks = world(2, shares);
        run(&ranks, |number, rank| {
            thread::scope(|scope| {
                for tag in 0..6u32 {
                    scope.spawn(move || {
                        for round in 0..60 {
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
}

#[test]
fn the_thread_ends_when_nothing_is_under_way() {
    let ranks = world(2, false);
    let (data, mut other) = (bytes(1, 100_000), vec![0; 100_000]);
    let receive = ranks[1].start_receive(None, None, &mut other);
    let send = ranks[0].start_send(1, 0, &data);
    let until = Instant::now() + Duration::from_secs(60);
    while send.result().is_none() || receive.result().is_none() {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(other, data);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24)))]

    /// Any-source receives get every message once; messages of one sender and tag come in their order.
    #[test]
    fn messages_arrive_once_and_in_order(
        shares in any::<bool>(),
        shows in any::<bool>(),
        lists in prop::collection::vec(prop::collection::vec((0u32..3, 0usize..1_000_000, any::<bool>()), 0..20), 1..5),
        any_tag in any::<bool>(),
    ) {
        let ranks = world(lists.len() + 1, shares);
        if shows {
            ranks.iter().for_each(|rank| rank.endpoint.show_process());
        }
        let start = Barrier::new(ranks.len());
        let lists = &lists;
        run(&ranks, |number, rank| {
            start.wait();
            if number > 0 {
                // A third of the lengths is short.
                let messages: Vec<(u32, Vec<u8>)> = lists[number - 1].iter().enumerate().map(|(index, &(tag, len, short))| {
                    let mut data = bytes(number, if short { len % 5000 } else { len } + 8);
                    data[..8].copy_from_slice(&(index as u64).to_le_bytes());
                    (tag, data)
                }).collect();
                let sends: Vec<_> = messages.iter().map(|(tag, data)| rank.start_send(0, *tag, data)).collect();
                sends.iter().for_each(|send| assert!(send.wait(None).is_ok()));
                return;
            }
            let mut seen: HashMap<(usize, u32), i64> = HashMap::new();
            let mut left: HashMap<u32, usize> = HashMap::new();
            lists.iter().flatten().for_each(|&(tag, ..)| *left.entry(tag).or_default() += 1);
            let wanted: Vec<Option<u32>> = left.iter().flat_map(|(&tag, &count)| vec![if any_tag { None } else { Some(tag) }; count]).collect();
            let mut buffer = vec![0u8; 1_000_008];
            let mut total = 0;
            for tag in wanted {
                let status = rank.receive(None, tag, &mut buffer).unwrap();
                let index = i64::from_le_bytes(buffer[..8].try_into().unwrap());
                let (sent_tag, len, short) = lists[status.source - 1][index as usize];
                assert_eq!((status.tag, status.bytes), (sent_tag, if short { len % 5000 } else { len } + 8));
                assert_eq!(buffer[8..status.bytes], bytes(status.source, status.bytes)[8..]);
                let last = seen.insert((status.source, status.tag), index).unwrap_or(-1);
                assert!(last < index, "message {index} of rank {} after {last}", status.source);
                total += 1;
            }
            assert_eq!(total, lists.iter().map(Vec::len).sum::<usize>());
        });
    }
}

/// The deadline of a receive is checked although its rank always has other messages.
#[test]
fn traffic_does_not_hide_a_deadline() {
    let ranks = world(2, false);
    let (stop, stopped) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let data = bytes(1, 8);
            while !stop.load(Ordering::Relaxed) {
                ranks[1].send(0, 1, &data);
            }
            stopped.store(true, Ordering::Relaxed);
        });
        let mut other = [0u8; 8];
        let message =
            Message { deadline: deadline(Some(Duration::from_millis(100))), ..ranks[0].message(Some(1), Some(2)) };
        // SAFETY: the memory lives until the receive has ended.
        let receive = unsafe { Transfer::receive(&ranks[0].endpoint, &message, spans_mut(&mut other), None) }.unwrap();
        assert!(matches!(receive.wait(None), Err(Error::Timeout(_))));
        stop.store(true, Ordering::Relaxed);
        // The sender may wait for room.
        let last = ranks[0].start_receive(Some(1), Some(3), &mut other);
        while !stopped.load(Ordering::Relaxed) {
            assert!(last.test().is_none());
        }
    });
}
