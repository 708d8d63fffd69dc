use super::*;
use crate::transport::store::{MemoryStore, allgather};
use crate::transport::wait_context::with_limits;
use proptest::prelude::*;
use std::io::Read;

const KEY: u128 = 7;

/// Runs `work` with a deadline that no test should reach, or with `limit`.
fn within<T>(limit: Option<Duration>, work: impl FnOnce(&WaitContext<'_>) -> Result<T>) -> Result<T> {
    with_limits("the test", limit.or(Some(Duration::from_secs(60))), None, &|| None, work)
}

fn serve() -> (ServedStore, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (ServedStore::start(vec![listener], 7, Admission::Key(KEY)).unwrap(), address)
}

fn client(address: SocketAddr) -> TcpStore {
    TcpStore::new(vec![address], Admission::Key(KEY), 1)
}

#[test]
fn all_gather_over_threads_and_connections() {
    for size in 1..=7 {
        let (served, address) = serve();
        let clients: Vec<TcpStore> = (1..size).map(|_| client(address)).collect();
        let clients = clients.iter().map(|client| client as &dyn Store);
        let stores: Vec<&dyn Store> = [&served as &dyn Store].into_iter().chain(clients).collect();
        thread::scope(|scope| {
            for (rank, &store) in stores.iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..20 {
                        let record = vec![round; rank * 3];
                        let records =
                            within(None, |ctx| allgather(store, &format!("{round}"), rank, size, &record, ctx))
                                .unwrap();
                        assert_eq!(records, (0..size).map(|rank| vec![round; rank * 3]).collect::<Vec<_>>());
                    }
                });
            }
        });
        // Each exchange removes its keys.
        for key in ["0/all", "0/all/readers", "3/0", "19/all"] {
            assert_eq!(within(None, |ctx| served.try_get(key, ctx)), Ok(None), "{key} of {size}");
        }
    }
}

#[test]
fn a_wait_does_not_block_other_threads_of_the_process() {
    let (served, address) = serve();
    let client = client(address);
    thread::scope(|scope| {
        let waits: Vec<_> = (0..4).map(|_| scope.spawn(|| within(None, |ctx| client.get("late", ctx)))).collect();
        for number in 0..100 {
            assert_eq!(within(None, |ctx| client.add("number", 1, ctx)), Ok(number + 1));
        }
        within(None, |ctx| served.set("late", b"value", ctx)).unwrap();
        for wait in waits {
            assert_eq!(wait.join().unwrap(), Ok(b"value".to_vec()));
        }
    });
}

#[test]
fn a_passed_deadline_cancels_the_wait_and_the_store_goes_on() {
    let (_served, address) = serve();
    let client = client(address);
    let late = within(Some(Duration::from_millis(50)), |ctx| client.wait_for("never", ctx, &|| "rank 7".into()));
    assert!(matches!(late, Err(Error::Timeout(text)) if text.contains("waiting for rank 7")));
    within(None, |ctx| client.set("never", b"now", ctx)).unwrap();
    assert_eq!(within(None, |ctx| client.get("never", ctx)), Ok(b"now".to_vec()));
}

#[test]
fn the_end_of_a_client_fails_the_waits_that_it_has_named() {
    let (served, address) = serve();
    let [ends, waits, keeps] = [(); 3].map(|()| client(address));
    within(None, |ctx| ends.fail_waits_at_end("job/", Some("rank 1 has ended"), ctx)).unwrap();
    within(None, |ctx| keeps.fail_waits_at_end("job/", Some("rank 2 has ended"), ctx)).unwrap();
    within(None, |ctx| keeps.fail_waits_at_end("job/", None, ctx)).unwrap();
    drop(keeps);
    within(None, |ctx| served.set("job/there", b"value", ctx)).unwrap();
    let lost = |result: Result<Vec<u8>>| assert_eq!(result, Err(Error::PeerLost("rank 1 has ended".into())));
    thread::scope(|scope| {
        let first = scope.spawn(|| within(None, |ctx| waits.get("job/a", ctx)));
        let second = scope.spawn(|| within(None, |ctx| served.get("job/b", ctx)));
        let other = scope.spawn(|| within(None, |ctx| waits.get("other", ctx)));
        thread::sleep(Duration::from_millis(100));
        drop(ends);
        lost(first.join().unwrap());
        lost(second.join().unwrap());
        within(None, |ctx| served.set("other", b"value", ctx)).unwrap();
        assert_eq!(other.join().unwrap(), Ok(b"value".to_vec()));
    });
    lost(within(None, |ctx| waits.get("job/c", ctx)));
    for store in [&waits as &dyn Store, &served] {
        let look = |key: &'static str| within(None, |ctx| store.try_get(key, ctx));
        assert_eq!(look("job/c"), Err(Error::PeerLost("rank 1 has ended".into())));
        assert_eq!((look("job/there"), look("other/c")), (Ok(Some(b"value".to_vec())), Ok(None)));
    }
    assert_eq!(within(None, |ctx| waits.get("job/there", ctx)), Ok(b"value".to_vec()));
}

#[test]
fn lost_and_wrong_clients_leave_the_others_alone() {
    let (served, address) = serve();
    let good = client(address);
    within(None, |ctx| good.set("a", b"1", ctx)).unwrap();
    // A wrong key, a silent connection, garbage after the handshake, and one that ends while it waits.
    let wrong = TcpStore::new(vec![address], Admission::Key(KEY + 1), 1);
    let refused = within(None, |ctx| wrong.try_get("a", ctx));
    assert!(matches!(refused, Err(Error::Network(text)) if text.contains("key of the job")));
    let silent = TcpStream::connect(address).unwrap();
    let mut garbage = good.dial_address(&address).unwrap();
    garbage.set_nonblocking(false).unwrap();
    garbage.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    garbage.write_all(&[0xff; 64]).unwrap();
    assert_eq!(garbage.read(&mut [0; 1]).unwrap_or(0), 0, "the server drops it");
    let mut waiting = good.dial_address(&address).unwrap();
    let mut frames = Frames::default();
    frames.push(&(0u64, Request::Wait("b".into()))).unwrap();
    frames.flush(&mut waiting).unwrap();
    drop(waiting);
    within(None, |ctx| served.set("b", b"2", ctx)).unwrap();
    assert_eq!(within(None, |ctx| good.get("b", ctx)), Ok(b"2".to_vec()));
    drop(silent);
}

#[test]
fn the_end_of_the_server_sends_the_last_answers_and_fails_later_requests() {
    let (served, address) = serve();
    let client = client(address);
    thread::scope(|scope| {
        let first = scope.spawn(|| within(None, |ctx| client.get("last", ctx)));
        let never = scope.spawn(|| within(None, |ctx| client.get("never", ctx)));
        while lock(&client.state).replies.len() < 2 {
            thread::yield_now();
        }
        // The server has the earlier requests of a connection when it answers a later one.
        within(None, |ctx| client.set("x", b"", ctx)).unwrap();
        within(None, |ctx| served.set("last", b"word", ctx)).unwrap();
        drop(served);
        assert_eq!(first.join().unwrap(), Ok(b"word".to_vec()));
        assert!(matches!(never.join().unwrap(), Err(Error::PeerLost(text)) if text.contains("store of rank 0")));
    });
    assert!(matches!(within(None, |ctx| client.set("x", b"", ctx)), Err(Error::PeerLost(_))));
}

#[test]
fn a_client_waits_for_the_server_to_start() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let absent = client(address);
    let late = within(Some(Duration::from_millis(50)), |ctx| absent.connect(ctx));
    assert!(
        matches!(late, Err(Error::Timeout(text)) if text.contains("rank 0") && text.contains(&address.to_string()))
    );
    thread::scope(|scope| {
        let connected = scope.spawn(|| within(None, |ctx| absent.connect(ctx)));
        thread::sleep(Duration::from_millis(20));
        let listener = TcpListener::bind(address).unwrap();
        let _served = ServedStore::start(vec![listener], 7, Admission::Key(KEY)).unwrap();
        assert_eq!(connected.join().unwrap(), Ok(()));
    });
}

/// As the listeners of a job that ends, while a rank starts again.
#[test]
fn listeners_that_end_at_once_do_not_end_the_search() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let store = TcpStore::new(vec![address], Admission::OwnUser, 1);
    thread::scope(|scope| {
        let connected = scope.spawn(|| within(None, |ctx| store.connect(ctx)));
        for _ in 0..20 {
            let listener = TcpListener::bind(address).unwrap();
            poll_until(&mut [PollFd::new(&listener, PollFlags::IN)], Some(ATTEMPT)).unwrap();
        }
        let _served = ServedStore::start(vec![TcpListener::bind(address).unwrap()], 7, Admission::OwnUser).unwrap();
        assert_eq!(connected.join().unwrap(), Ok(()));
    });
}

/// An operation on one of three keys.
#[derive(Debug, Clone)]
enum Operation {
    Set(u8, Vec<u8>),
    Get(u8),
    Add(u8, i64),
    Delete(u8),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        (0..3u8, prop::collection::vec(any::<u8>(), 0..10)).prop_map(|(key, value)| Operation::Set(key, value)),
        (0..3u8).prop_map(Operation::Get),
        (0..3u8, any::<i64>()).prop_map(|(key, by)| Operation::Add(key, by)),
        (0..3u8).prop_map(Operation::Delete),
    ]
}

fn apply(store: &dyn Store, operation: &Operation) -> String {
    within(None, |ctx| {
        Ok(match operation {
            Operation::Set(key, value) => format!("{:?}", store.set(&key.to_string(), value, ctx)),
            Operation::Get(key) => format!("{:?}", store.try_get(&key.to_string(), ctx)),
            Operation::Add(key, by) => format!("{:?}", store.add(&key.to_string(), *by, ctx)),
            Operation::Delete(key) => format!("{:?}", store.delete(&key.to_string(), ctx)),
        })
    })
    .unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(crate::cases::cases(40)))]
    #[test]
    fn any_order_gives_what_one_store_in_memory_gives(operations in prop::collection::vec((0..3usize, operation()), 1..60)) {
        let (served, address) = serve();
        let (first, second) = (client(address), client(address));
        let stores: [&dyn Store; 3] = [&served, &first, &second];
        let memory = MemoryStore::default();
        for (number, operation) in &operations {
            prop_assert_eq!(apply(stores[*number], operation), apply(&memory, operation));
        }
    }
}
