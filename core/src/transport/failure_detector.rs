//! The failure detector between hosts: a lost process or a failed group on one host is known on all hosts within about
//! a second, not only at the deadline.
//!
//! The first rank of each host runs a thread with TCP connections to about 2 log2(hosts) other hosts
//! ([`super::detector_links`]). The thread monitors the processes of its host. It writes failures into the control
//! blocks of the host's groups ([`RegionControl::set_failure`]) and forwards them, so that they reach every host even
//! when some hosts are lost. A group is named by the hash of its key; a lost rank fails the groups that it is a member
//! of. A connection closed without a shutdown message means a lost host. TCP keepalive detects an unreachable host
//! within seconds.
//! Thread rule: a [`FailureDetector`] may be used from any thread.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

use super::detector_links::{HostAddress, HostConnection, Listener, Unconnected, connect};
use super::process::Process;
use super::region_control::RegionControl;
use super::step::reached;
use crate::error::{Error, Result};
use crate::log::log_line;

/// Interval at which the thread checks the groups of its host for failures.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Tells the thread to shut down.
const SHUTDOWN: &[u8] = b".";
/// Tells the thread to exit without a shutdown message, so that other hosts see a loss.
const ABORT: &[u8] = b"!";
/// Maximum length of a received line.
const MAX_LINE_BYTES: usize = 16 << 10;
/// How long a message is kept after it was seen last: no host forwards it for the first time after that.
const MEMORY: Duration = Duration::from_secs(60);
/// Number of messages from which on old ones are forgotten.
const MAX_MESSAGES: usize = 1000;

/// The groups of a host.
pub trait HostGroups: Send + Sync {
    /// Calls `visit` with the hash of the key and the control block of each group of the host's ranks. If it returns
    /// true, the group is not visited again.
    fn visit(&self, visit: &mut dyn FnMut(u64, &RegionControl) -> bool);

    /// Reports to the ranks of the host that a rank of the job is lost.
    fn add_lost(&self, rank: usize);
}

/// A process of this host.
pub struct MonitoredProcess {
    /// Its rank in the job.
    pub rank: usize,
    /// The name for messages.
    pub name: String,
    /// The process.
    pub process: Arc<Process>,
}

/// The failure detector of a host. Dropping it sends a shutdown message, unless [`FailureDetector::mark_aborted`] was
/// called.
pub struct FailureDetector {
    stop: UnixStream,
    aborted: bool,
    thread: Option<JoinHandle<()>>,
}

/// A message to the other hosts, as a line of JSON. `group` is the hash of a group's key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Message {
    /// Ranks of the job are lost.
    Lost { ranks: Vec<usize>, text: String },
    /// A group has failed.
    Failed { group: u64, code: i32, text: String },
    /// A rank of a group has left it, with its last sequence number.
    Departed { group: u64, rank: usize, step: u32 },
    /// A rank waits long in round `step` of a group.
    Stalled { group: u64, step: u32 },
    /// The host has ended as planned.
    Shutdown,
}

impl FailureDetector {
    /// Connects host `me` with its neighbours among `hosts`, and monitors the local `processes` (without this one). An
    /// unreachable neighbour is logged and skipped: its loss is noticed at the deadline, or through other hosts.
    /// Collective over the hosts.
    ///
    /// # Errors
    /// [`Error::System`] when a thread or socket pair cannot be created.
    pub fn start(
        listener: Listener,
        me: usize,
        hosts: &[HostAddress],
        key: u128,
        processes: Vec<MonitoredProcess>,
        groups: Arc<dyn HostGroups>,
    ) -> Result<FailureDetector> {
        let (peers, unconnected) = connect(&listener, me, hosts, key, Duration::MAX, &|| false);
        unconnected.iter().for_each(Unconnected::warn);
        let refused = |error: std::io::Error| Error::system("starting the failure detector between hosts", error);
        let (stop, stopped) = UnixStream::pair().map_err(refused)?;
        let detector_thread = DetectorThread {
            groups,
            stopped,
            peers,
            processes,
            seen: HashMap::new(),
            received: HashMap::new(),
            lost: Vec::new(),
            stalled: HashMap::new(),
        };
        let thread =
            Builder::new().name("dlcomm-alert".into()).spawn(move || detector_thread.run()).map_err(refused)?;
        Ok(FailureDetector { stop, aborted: false, thread: Some(thread) })
    }

    /// Skips the shutdown message: other hosts report this process as lost, because they may still wait for it.
    pub fn mark_aborted(&mut self) {
        self.aborted = true;
    }
}

impl Drop for FailureDetector {
    fn drop(&mut self) {
        // The thread exits early only after an error that it logged.
        let _sent = self.stop.write_all(if self.aborted { ABORT } else { SHUTDOWN });
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log_line("the failure detector between hosts panicked");
        }
    }
}

/// A message about a group of this host.
enum GroupEvent {
    Failed(Error),
    Departed { rank: usize, step: u32 },
}

/// The state of the thread.
struct DetectorThread {
    groups: Arc<dyn HostGroups>,
    stopped: UnixStream,
    peers: Vec<HostConnection>,
    processes: Vec<MonitoredProcess>,
    /// Messages already forwarded, with the time when they were seen last.
    seen: HashMap<Message, Instant>,
    /// What other hosts have sent, by group. Applied in every check: the group may be made later on this host.
    received: HashMap<u64, (Vec<GroupEvent>, Instant)>,
    lost: Vec<(Vec<usize>, Error)>,
    /// By group, the latest stalled sequence number.
    stalled: HashMap<u64, (u32, Instant)>,
}

impl DetectorThread {
    fn run(mut self) {
        loop {
            let last = self.sleep();
            let mut lost = Vec::new();
            // Check each process once: two checks would miss an exit between them.
            self.processes.retain(|MonitoredProcess { rank, name, process }| match process.ended() {
                Some(how) => {
                    lost.push((*rank, format!("{name} {how}")));
                    false
                }
                None => true,
            });
            lost.into_iter().for_each(|(rank, text)| self.lost(vec![rank], text));
            self.check_groups();
            self.peers.iter_mut().for_each(flush);
            let mut index = 0;
            while index < self.peers.len() {
                match self.read_peer(index) {
                    PeerEvent::All => index += 1,
                    PeerEvent::End => {
                        let peer = self.peers.remove(index);
                        self.lost(peer.ranks, format!("{} has ended, or its host is out of reach", peer.name));
                    }
                    PeerEvent::Shutdown => drop(self.peers.remove(index)),
                }
            }
            self.check_groups();
            self.forget();
            // Exit only here, after earlier events were sent.
            if last {
                let mut signal = [0; 1];
                if self.stopped.read_exact(&mut signal).is_ok() && signal == SHUTDOWN {
                    self.send(&Message::Shutdown);
                }
                return;
            }
        }
    }

    /// Sleeps until an event or the poll interval. Returns whether to exit.
    fn sleep(&self) -> bool {
        let mut fds = vec![PollFd::new(&self.stopped, PollFlags::IN)];
        let events =
            |peer: &HostConnection| if peer.unsent.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        fds.extend(self.peers.iter().map(|peer| PollFd::new(&*peer.stream, events(peer))));
        let ends = self.processes.iter().filter_map(|monitored| monitored.process.end());
        fds.extend(ends.map(|end| PollFd::from_borrowed_fd(end, PollFlags::IN)));
        let timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: i64::from(POLL_INTERVAL.subsec_nanos()) };
        // After a signal or an error, the next check comes soon.
        let _count = poll(&mut fds, Some(&timeout));
        !fds[0].revents().is_empty()
    }

    /// Applies to the groups of this host what is known, and forwards what they report.
    fn check_groups(&mut self) {
        let mut messages = Vec::new();
        let DetectorThread { groups, received, lost, stalled, .. } = self;
        groups.visit(&mut |group, control| {
            for event in received.get(&group).iter().flat_map(|(events, _)| events) {
                match event {
                    GroupEvent::Failed(error) => control.set_failure(error),
                    GroupEvent::Departed { rank, step } => control.depart(*rank, *step),
                }
            }
            for (ranks, error) in lost.iter() {
                if ranks.iter().any(|&rank| control.contains(rank)) {
                    control.set_failure(error);
                }
            }
            let known = stalled.get(&group).map(|(step, _)| *step);
            match (control.stalled(), known) {
                (Some(step), known) if known.is_none_or(|known| known != step && reached(step, known)) => {
                    messages.push(Message::Stalled { group, step });
                }
                (own, Some(known)) if own != Some(known) => control.stall(known),
                _ => {}
            }
            let departed = control.departed_ranks().into_iter();
            messages.extend(departed.map(|(rank, step)| Message::Departed { group, rank, step }));
            let failed = |error: Error| Message::Failed { group, code: error.code(), text: error.detail().to_owned() };
            messages.extend(control.failure().map(failed));
            control.all_departed()
        });
        for message in messages {
            self.forward(message);
        }
    }

    fn lost(&mut self, ranks: Vec<usize>, text: String) {
        self.forward(Message::Lost { ranks: ranks.clone(), text: text.clone() });
        ranks.iter().for_each(|&rank| self.groups.add_lost(rank));
        self.lost.push((ranks, Error::PeerLost(text)));
    }

    /// Sends a message to the other hosts, once. Returns whether it was new.
    fn forward(&mut self, message: Message) -> bool {
        if let Message::Stalled { group, step } = message {
            let known = self.stalled.get(&group).map(|(step, _)| *step);
            if known.is_some_and(|known| reached(known, step)) {
                return false;
            }
            self.stalled.insert(group, (step, Instant::now()));
            self.send(&message);
            return true;
        }
        if let Some(seen) = self.seen.get_mut(&message) {
            *seen = Instant::now();
            return false;
        }
        self.send(&message);
        self.seen.insert(message, Instant::now());
        true
    }

    /// Forgets old messages: a job may make any number of groups.
    fn forget(&mut self) {
        if self.seen.len() + self.stalled.len() + self.received.len() > MAX_MESSAGES {
            self.seen.retain(|_, seen| seen.elapsed() < MEMORY);
            self.stalled.retain(|_, (_, seen)| seen.elapsed() < MEMORY);
            self.received.retain(|_, (_, seen)| seen.elapsed() < MEMORY);
        }
    }

    fn send(&mut self, message: &Message) {
        // Numbers and text are always valid JSON.
        let line = format!("{}\n", serde_json::to_string(message).unwrap_or_default());
        for peer in &mut self.peers {
            peer.unsent.extend_from_slice(line.as_bytes());
            flush(peer);
        }
    }

    /// Reads and handles the messages of a peer.
    fn read_peer(&mut self, index: usize) -> PeerEvent {
        let mut bytes = [0; 4096];
        loop {
            let peer = &mut self.peers[index];
            match (&*peer.stream).read(&mut bytes) {
                Ok(0) => return PeerEvent::End,
                Ok(count) => peer.partial.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return PeerEvent::All,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return PeerEvent::End,
            }
            // Parse each line: one read may return many.
            while let Some(end) = self.peers[index].partial.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.peers[index].partial.drain(..=end).collect();
                match serde_json::from_slice(&line) {
                    Ok(Message::Shutdown) => return PeerEvent::Shutdown,
                    Ok(message) => self.receive(message),
                    Err(_) => return PeerEvent::End,
                }
            }
            if self.peers[index].partial.len() > MAX_LINE_BYTES {
                return PeerEvent::End;
            }
        }
    }

    /// Handles a message of another host. The next check applies it to the group.
    fn receive(&mut self, message: Message) {
        let (group, event) = match &message {
            Message::Lost { ranks, text } => {
                if !self.seen.contains_key(&message) {
                    self.lost(ranks.clone(), text.clone());
                }
                return;
            }
            Message::Failed { group, code, text } => {
                (*group, GroupEvent::Failed(Error::from_code(*code, text.clone())))
            }
            Message::Departed { group, rank, step } => (*group, GroupEvent::Departed { rank: *rank, step: *step }),
            Message::Stalled { .. } | Message::Shutdown => {
                self.forward(message);
                return;
            }
        };
        if self.forward(message) {
            let (events, seen) = self.received.entry(group).or_insert_with(|| (Vec::new(), Instant::now()));
            events.push(event);
            *seen = Instant::now();
        }
    }
}

/// Sends as much of the unsent data as the socket accepts. Reading the connection detects a broken one.
fn flush(peer: &mut HostConnection) {
    while !peer.unsent.is_empty() {
        match (&*peer.stream).write(&peer.unsent) {
            Ok(count) => drop(peer.unsent.drain(..count)),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(_) => peer.unsent.clear(),
        }
    }
}

/// Result of reading from a peer.
enum PeerEvent {
    /// All received messages were handled.
    All,
    /// Lost: the connection closed without a shutdown message.
    End,
    /// The peer shut down.
    Shutdown,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::sync::Mutex;

    use crate::lock::lock;
    use crate::transport::in_process;
    use crate::transport::step::START;
    use crate::transport::{Phase, ShmRegion};

    /// The groups of a host of one rank.
    #[derive(Default)]
    struct Groups {
        regions: Mutex<Vec<(u64, Arc<ShmRegion>)>>,
        lost: Mutex<Vec<usize>>,
    }

    impl Groups {
        fn add(&self, group: u64, region: &Arc<ShmRegion>) {
            lock(&self.regions).push((group, Arc::clone(region)));
        }
    }

    impl HostGroups for Groups {
        fn visit(&self, visit: &mut dyn FnMut(u64, &RegionControl) -> bool) {
            lock(&self.regions).retain(|(group, region)| !visit(*group, region.control()));
        }

        fn add_lost(&self, rank: usize) {
            lock(&self.lost).push(rank);
        }
    }

    fn start(count: usize) -> Vec<(FailureDetector, Arc<Groups>, Arc<ShmRegion>)> {
        let listeners: Vec<Listener> = (0..count).map(|_| Listener::open("").unwrap()).collect();
        let address = |(host, listener): (usize, &Listener)| HostAddress {
            name: format!("rank {host}"),
            ranks: vec![host],
            addresses: listener.address().split(',').map(|text| text.parse().unwrap()).collect(),
        };
        let hosts: Vec<HostAddress> = listeners.iter().enumerate().map(address).collect();
        let endpoints = in_process::world(&vec![1; count], 1, 4096, in_process::Access::Slots).unwrap();
        std::thread::scope(|scope| {
            let started: Vec<_> = listeners
                .into_iter()
                .enumerate()
                .map(|(me, listener)| {
                    let hosts = &hosts;
                    scope.spawn(move || {
                        let groups = Arc::<Groups>::default();
                        let watched = Arc::clone(&groups) as Arc<dyn HostGroups>;
                        (FailureDetector::start(listener, me, hosts, 7, Vec::new(), watched).unwrap(), groups)
                    })
                })
                .collect();
            let detectors = started.into_iter().map(|detector| detector.join().unwrap());
            detectors.zip(endpoints).map(|((detector, groups), endpoint)| (detector, groups, endpoint.region)).collect()
        })
    }

    /// The region of a group of one rank; with `members`, a group of these ranks of the job.
    fn region(members: Option<&[u32]>) -> Arc<ShmRegion> {
        in_process::single(members).unwrap()
    }

    fn wait_for(region: &ShmRegion) -> Error {
        let until = Instant::now() + Duration::from_secs(20);
        while Instant::now() < until {
            if let Some(error) = region.control().failure() {
                return error;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("no failure was reported");
    }

    #[test]
    fn failures_and_losses_reach_every_host() {
        let mut hosts = start(5);
        for (_, groups, region) in &hosts {
            groups.add(3, region);
        }
        hosts[4].2.control().set_failure(&Error::Timeout("too late".into()));
        for (_, _, region) in &hosts {
            assert_eq!(wait_for(region), Error::Timeout("too late".into()));
        }
        // Host 4 shuts down: no loss. Then a loss in group 4 of host 1 reaches group 4 of host 0.
        drop(hosts.remove(4));
        let (fourth, other) = (region(None), region(None));
        hosts[0].1.add(4, &fourth);
        hosts[1].1.add(4, &other);
        std::thread::sleep(3 * POLL_INTERVAL);
        assert_eq!(fourth.control().failure(), None);
        other.control().set_failure(&Error::PeerLost("rank 9 has ended".into()));
        assert_eq!(wait_for(&fourth), Error::PeerLost("rank 9 has ended".into()));
    }

    #[test]
    fn many_failures_at_once_do_not_fail_another_group() {
        let hosts = start(2);
        let others: Vec<_> = (0..40).map(|_| region(None)).collect();
        let (bystander, seen) = (region(None), region(None));
        hosts[1].1.add(99, &bystander);
        // All are found in one check and sent in one burst.
        for (group, region) in (0..).zip(&others) {
            region.control().set_failure(&Error::Timeout("\u{1}".repeat(1000)));
            hosts[0].1.add(group, region);
        }
        hosts[1].1.add(39, &seen);
        wait_for(&seen);
        std::thread::sleep(3 * POLL_INTERVAL);
        assert_eq!(bystander.control().failure(), None);
    }

    #[test]
    fn a_failure_reaches_a_group_that_is_made_later() {
        let hosts = start(2);
        hosts[0].1.add(5, &hosts[0].2);
        hosts[0].2.control().set_failure(&Error::Timeout("early".into()));
        std::thread::sleep(3 * POLL_INTERVAL);
        hosts[1].1.add(5, &hosts[1].2);
        assert_eq!(wait_for(&hosts[1].2), Error::Timeout("early".into()));
    }

    #[test]
    fn departed_ranks_and_stalls_are_known_on_every_host() {
        let hosts = start(5);
        for (_, groups, region) in &hosts {
            groups.add(3, region);
        }
        let (early, late) = (START.wrapping_add(1), START.wrapping_add(2));
        for (_, _, region) in &hosts[..4] {
            region.channel(0).raise(Phase::Packed, late);
        }
        hosts[4].2.channel(0).raise(Phase::Packed, early);
        hosts[0].2.control().stall(late);
        let until = Instant::now() + Duration::from_secs(20);
        while hosts[1..].iter().any(|(_, _, region)| region.control().stalled() != Some(late)) {
            assert!(Instant::now() < until, "not every host knows of the stall");
            std::thread::sleep(Duration::from_millis(10));
        }
        hosts[4].2.set_departed();
        while hosts[..4].iter().any(|(_, _, region)| region.departed() != Some(4)) {
            assert!(Instant::now() < until, "not every host knows of the departure");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(hosts[4].2.departed(), None, "it has its own steps");
        assert!(lock(&hosts[4].1.regions).is_empty(), "a group without ranks on a host is not visited again");
    }

    #[test]
    fn a_lost_host_fails_the_groups_with_its_ranks() {
        let (listener, other) = (Listener::open("").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let address = |rank: usize, socket: &TcpListener| HostAddress {
            name: format!("rank {rank}"),
            ranks: vec![rank],
            addresses: vec![socket.local_addr().unwrap()],
        };
        let hosts = [address(0, &listener.sockets[0]), address(3, &other)];
        let accept = std::thread::spawn(move || {
            let (mut stream, _) = other.accept().unwrap();
            stream.read_exact(&mut [0; 24]).unwrap();
            stream.write_all(&(!7u128).to_le_bytes()).unwrap();
            stream
        });
        let groups = Arc::<Groups>::default();
        let watched = Arc::clone(&groups) as Arc<dyn HostGroups>;
        let _detector = FailureDetector::start(listener, 0, &hosts, 7, Vec::new(), watched).unwrap();
        let stream = accept.join().unwrap();
        let (early, late, listed, others) =
            (region(None), region(None), region(Some(&[0, 3])), region(Some(&[0, 1, 2])));
        groups.add(1, &early);
        groups.add(2, &listed);
        groups.add(3, &others);
        drop(stream);
        let lost = Error::PeerLost("rank 3 has ended, or its host is out of reach".into());
        assert_eq!([wait_for(&early), wait_for(&listed)], [lost.clone(), lost.clone()]);
        groups.add(4, &late);
        assert_eq!(wait_for(&late), lost);
        assert_eq!(others.control().failure(), None, "rank 3 is no member");
        assert_eq!(*lock(&groups.lost), [3]);
    }

    #[test]
    fn a_stranger_at_the_address_is_not_accepted() {
        let (listener, stranger) = (Listener::open("").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = vec![stranger.local_addr().unwrap()];
        let hosts = [
            HostAddress { name: "rank 0".into(), ranks: vec![0], addresses: vec![] },
            HostAddress { name: "rank 1".into(), ranks: vec![1], addresses },
        ];
        let stranger_thread = std::thread::spawn(move || drop(stranger.accept().unwrap()));
        let groups = Arc::<Groups>::default();
        let watched = Arc::clone(&groups) as Arc<dyn HostGroups>;
        let _detector = FailureDetector::start(listener, 0, &hosts, 7, Vec::new(), watched).unwrap();
        stranger_thread.join().unwrap();
        let alone = region(None);
        groups.add(1, &alone);
        std::thread::sleep(3 * POLL_INTERVAL);
        assert_eq!(alone.control().failure(), None);
    }
}
