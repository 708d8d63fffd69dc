//! The failure detector between hosts: a lost process or a failed group on one host is known on all hosts within about
//! a second, not only at the deadline.
//!
//! The first rank of each host runs a thread with TCP connections to about 2 log2(hosts) other hosts
//! ([`super::detector_links`]). The thread monitors the processes of its host. It writes failures into the failure
//! blocks of its groups ([`ShmRegion::set_failure`]) and forwards them, so that they reach every host even when some
//! hosts are lost. A connection closed without a shutdown message means a lost rank. TCP keepalive detects an
//! unreachable host within seconds.
//! Thread rule: a [`FailureDetector`] may be used from any thread.

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

use super::detector_links::{HostAddress, HostConnection, Listener, connect};
use super::process::Process;
use super::shm_region::ShmRegion;
use super::step::reached;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::log::log_line;

/// Interval at which the thread checks the groups of its host for failures.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Tells the thread to shut down.
const SHUTDOWN: &[u8] = b".";
/// Tells the thread to exit without a shutdown message, so that other hosts see a loss.
const ABORT: &[u8] = b"!";
/// Maximum length of a received line.
const MAX_LINE_BYTES: usize = 16 << 10;

/// The failure detector of a host. Dropping it sends a shutdown message, unless [`FailureDetector::mark_aborted`] was
/// called.
pub struct FailureDetector {
    teams: Arc<Mutex<MonitoredGroups>>,
    stop: UnixStream,
    aborted: bool,
    thread: Option<JoinHandle<()>>,
}

/// The regions of the monitored groups, and the first lost rank of the job.
#[derive(Default)]
struct MonitoredGroups {
    regions: Vec<(i32, Arc<ShmRegion>)>,
    lost: Option<Error>,
}

impl MonitoredGroups {
    /// The regions of group `team`.
    fn regions_of(&self, team: i32) -> impl Iterator<Item = &ShmRegion> {
        self.regions.iter().filter(move |(id, _)| *id == team).map(|(_, region)| &**region)
    }

    fn fail(&mut self, team: Option<i32>, error: &Error) {
        match team {
            Some(team) => self.regions_of(team).for_each(|region| region.set_failure(error)),
            None => self.regions.iter().for_each(|(_, region)| region.set_failure(error)),
        }
        if team.is_none() && self.lost.is_none() {
            self.lost = Some(error.clone());
        }
    }

    /// The groups in which a rank of this host waits long, with the sequence number of its round.
    fn stalled(&self) -> Vec<(i32, u32)> {
        self.regions.iter().filter_map(|(team, region)| Some((*team, region.stalled()?))).collect()
    }

    /// The departures of ranks of this host and the failures, for the other hosts.
    fn messages(&self) -> Vec<Message> {
        let mut messages = Vec::new();
        for &(team, ref region) in &self.regions {
            let departed = region.departed_ranks().into_iter();
            messages.extend(departed.map(|(rank, step)| Message::Departed { team, rank, step }));
            messages.extend(region.failure().map(|error| Message::failed(Some(team), &error)));
        }
        messages
    }
}

/// A message to the other hosts, as a line of JSON.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Message {
    /// A group has failed, or, without a group, a process was lost.
    Failed { team: Option<i32>, code: i32, text: String },
    /// A rank has left a group, with its last sequence number.
    Departed { team: i32, rank: usize, step: u32 },
    /// A rank waits long in round `step` of a group.
    Stalled { team: i32, step: u32 },
    /// The host has ended as planned.
    Shutdown,
}

impl Message {
    fn failed(team: Option<i32>, error: &Error) -> Message {
        Message::Failed { team, code: error.code(), text: error.detail().to_owned() }
    }
}

impl FailureDetector {
    /// Connects host `me` with its neighbours among `hosts`, and monitors the local `processes` (named, without this
    /// one). An unreachable neighbour is logged and skipped: its loss is noticed at the deadline, or through other
    /// hosts. Collective over the hosts.
    ///
    /// # Errors
    /// [`Error::System`] when a thread or socket pair cannot be created.
    pub fn start(
        listener: Listener,
        me: usize,
        hosts: &[HostAddress],
        key: u128,
        processes: Vec<(String, Arc<Process>)>,
    ) -> Result<FailureDetector> {
        let peers = connect(&listener, me, hosts, key);
        let refused = |error: std::io::Error| Error::system("starting the alert between hosts", error);
        let (stop, stopped) = UnixStream::pair().map_err(refused)?;
        let teams = Arc::<Mutex<MonitoredGroups>>::default();
        let detector_thread = DetectorThread {
            teams: Arc::clone(&teams),
            stopped,
            peers,
            processes,
            forwarded: HashSet::new(),
            stalled: HashMap::new(),
        };
        let thread =
            Builder::new().name("dlcomm-alert".into()).spawn(move || detector_thread.run()).map_err(refused)?;
        Ok(FailureDetector { teams, stop, aborted: false, thread: Some(thread) })
    }

    /// Reports failures to group `team` from now on, and at once the loss of a process, if any.
    pub fn watch(&self, team: i32, region: &Arc<ShmRegion>) {
        let mut teams = lock(&self.teams);
        teams.regions.push((team, Arc::clone(region)));
        if let Some(error) = &teams.lost {
            region.set_failure(error);
        }
    }

    /// The loss of a process on any host, as reported to all groups.
    pub fn lost(&self) -> Option<Error> {
        lock(&self.teams).lost.clone()
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
            log_line("the alert between hosts panicked");
        }
    }
}

/// The state of the thread.
struct DetectorThread {
    teams: Arc<Mutex<MonitoredGroups>>,
    stopped: UnixStream,
    peers: Vec<HostConnection>,
    processes: Vec<(String, Arc<Process>)>,
    /// Messages already forwarded.
    forwarded: HashSet<Message>,
    /// By group, the latest stalled sequence number that was forwarded.
    stalled: HashMap<i32, u32>,
}

impl DetectorThread {
    fn run(mut self) {
        loop {
            let last = self.sleep();
            let mut lost = Vec::new();
            // Check each process once: two checks would miss an exit between them.
            self.processes.retain(|(name, process)| match process.ended() {
                Some(how) => {
                    lost.push(format!("{name} {how}"));
                    false
                }
                None => true,
            });
            lost.into_iter().for_each(|lost| self.lost(lost));
            let stalled = lock(&self.teams).stalled();
            stalled.into_iter().for_each(|(team, step)| self.forward_stall(team, step));
            let messages = lock(&self.teams).messages();
            messages.into_iter().for_each(|message| self.forward(message));
            self.peers.iter_mut().for_each(flush);
            let mut index = 0;
            while index < self.peers.len() {
                match self.read_peer(index) {
                    PeerEvent::All => index += 1,
                    PeerEvent::End => {
                        let peer = self.peers.remove(index);
                        self.lost(format!("{} has ended, or its host is out of reach", peer.name));
                    }
                    PeerEvent::Shutdown => drop(self.peers.remove(index)),
                }
            }
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
        let ends = self.processes.iter().filter_map(|(_, process)| process.end());
        fds.extend(ends.map(|end| PollFd::from_borrowed_fd(end, PollFlags::IN)));
        let timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: i64::from(POLL_INTERVAL.subsec_nanos()) };
        // After a signal or an error, the next check comes soon.
        let _count = poll(&mut fds, Some(&timeout));
        !fds[0].revents().is_empty()
    }

    fn lost(&mut self, lost: String) {
        let error = Error::PeerLost(lost);
        lock(&self.teams).fail(None, &error);
        self.forward(Message::failed(None, &error));
    }

    /// Reports a long wait in round `step` of a group to all ranks of all hosts, unless it was reported for a later
    /// one.
    fn forward_stall(&mut self, team: i32, step: u32) {
        if self.stalled.get(&team).is_some_and(|&last| reached(last, step)) {
            return;
        }
        self.stalled.insert(team, step);
        lock(&self.teams).regions_of(team).for_each(|region| region.stall(step));
        self.send(&Message::Stalled { team, step });
    }

    /// Sends a message to the other hosts, once.
    fn forward(&mut self, message: Message) {
        if !self.forwarded.contains(&message) {
            self.send(&message);
            self.forwarded.insert(message);
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
                    Ok(message) => self.apply(message),
                    Err(_) => return PeerEvent::End,
                }
            }
            if self.peers[index].partial.len() > MAX_LINE_BYTES {
                return PeerEvent::End;
            }
        }
    }

    /// Handles a message of another host.
    fn apply(&mut self, message: Message) {
        match &message {
            Message::Stalled { team, step } => return self.forward_stall(*team, *step),
            Message::Departed { team, rank, step } => {
                lock(&self.teams).regions_of(*team).for_each(|region| region.depart(*rank, *step));
            }
            Message::Failed { team, code, text } => {
                lock(&self.teams).fail(*team, &Error::from_code(*code, text.clone()));
            }
            Message::Shutdown => {}
        }
        self.forward(message);
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
    use std::time::Instant;

    use crate::transport::step::START;
    use crate::transport::{Phase, in_process};

    fn start(count: usize) -> Vec<(FailureDetector, Arc<ShmRegion>)> {
        let listeners: Vec<Listener> = (0..count).map(|_| Listener::open("").unwrap()).collect();
        let address = |(host, listener): (usize, &Listener)| HostAddress {
            name: format!("rank {host}"),
            addresses: listener.address().split(',').map(|text| text.parse().unwrap()).collect(),
        };
        let hosts: Vec<HostAddress> = listeners.iter().enumerate().map(address).collect();
        let endpoints = in_process::world(&vec![1; count], 1, 4096, false).unwrap();
        std::thread::scope(|scope| {
            let started: Vec<_> = listeners
                .into_iter()
                .enumerate()
                .map(|(me, listener)| {
                    let hosts = &hosts;
                    scope.spawn(move || FailureDetector::start(listener, me, hosts, 7, Vec::new()).unwrap())
                })
                .collect();
            let detectors = started.into_iter().map(|detector| detector.join().unwrap());
            detectors.zip(endpoints).map(|(detector, endpoint)| (detector, endpoint.region)).collect()
        })
    }

    /// The region of a group of one rank.
    fn region() -> Arc<ShmRegion> {
        in_process::world(&[1], 1, 4096, false).unwrap().remove(0).region
    }

    fn wait_for(region: &ShmRegion) -> Error {
        let until = Instant::now() + Duration::from_secs(20);
        while Instant::now() < until {
            if let Some(error) = region.failure() {
                return error;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("no failure was told");
    }

    #[test]
    fn failures_and_losses_reach_every_host() {
        let mut hosts = start(5);
        for (detector, region) in &hosts {
            detector.watch(3, region);
        }
        hosts[4].1.set_failure(&Error::Timeout("too late".into()));
        for (_, region) in &hosts {
            assert_eq!(wait_for(region), Error::Timeout("too late".into()));
        }
        // Host 4 shuts down: no loss. Then a loss in group 4 of host 1 reaches group 4 of host 0.
        drop(hosts.remove(4));
        let (fourth, other) = (region(), region());
        hosts[0].0.watch(4, &fourth);
        hosts[1].0.watch(4, &other);
        std::thread::sleep(3 * POLL_INTERVAL);
        assert_eq!(fourth.failure(), None);
        other.set_failure(&Error::PeerLost("rank 9 has ended".into()));
        assert_eq!(wait_for(&fourth), Error::PeerLost("rank 9 has ended".into()));
    }

    #[test]
    fn many_failures_at_once_do_not_fail_another_group() {
        let hosts = start(2);
        let others: Vec<_> = (0..40).map(|_| region()).collect();
        let (bystander, seen) = (region(), region());
        hosts[1].0.watch(99, &bystander);
        // All are found in one check and sent in one burst.
        for (team, region) in (0..).zip(&others) {
            region.set_failure(&Error::Timeout("\u{1}".repeat(1000)));
            hosts[0].0.watch(team, region);
        }
        hosts[1].0.watch(39, &seen);
        wait_for(&seen);
        std::thread::sleep(3 * POLL_INTERVAL);
        assert_eq!(bystander.failure(), None);
    }

    #[test]
    fn departed_ranks_and_stalls_are_known_on_every_host() {
        let hosts = start(5);
        for (detector, region) in &hosts {
            detector.watch(3, region);
        }
        let (early, late) = (START.wrapping_add(1), START.wrapping_add(2));
        for (_, region) in &hosts[..4] {
            region.channel(0).raise(Phase::Packed, late);
        }
        hosts[4].1.channel(0).raise(Phase::Packed, early);
        hosts[0].1.stall(late);
        hosts[4].1.set_departed();
        let until = Instant::now() + Duration::from_secs(20);
        while hosts[1..].iter().any(|(_, region)| region.stalled() != Some(late))
            || hosts[..4].iter().any(|(_, region)| region.departed() != Some(4))
        {
            assert!(Instant::now() < until, "not every host knows");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(hosts[4].1.departed(), None, "it has its own steps");
    }

    #[test]
    fn a_broken_connection_is_a_loss_for_all_groups() {
        let (listener, other) = (Listener::open("").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let address = |name: &str, socket: &TcpListener| HostAddress {
            name: name.into(),
            addresses: vec![socket.local_addr().unwrap()],
        };
        let hosts = [address("rank 0", &listener.sockets[0]), address("rank 3", &other)];
        let accept = std::thread::spawn(move || {
            let (mut stream, _) = other.accept().unwrap();
            stream.read_exact(&mut [0; 24]).unwrap();
            stream.write_all(&(!7u128).to_le_bytes()).unwrap();
            stream
        });
        let detector = FailureDetector::start(listener, 0, &hosts, 7, Vec::new()).unwrap();
        let stream = accept.join().unwrap();
        let (early, late) = (region(), region());
        detector.watch(0, &early);
        drop(stream);
        let lost = Error::PeerLost("rank 3 has ended, or its host is out of reach".into());
        assert_eq!(wait_for(&early), lost);
        detector.watch(1, &late);
        assert_eq!(late.failure(), Some(lost));
    }

    #[test]
    fn a_stranger_at_the_address_is_not_accepted() {
        let (listener, stranger) = (Listener::open("").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = vec![stranger.local_addr().unwrap()];
        let hosts = [
            HostAddress { name: "rank 0".into(), addresses: vec![] },
            HostAddress { name: "rank 1".into(), addresses },
        ];
        let stranger_thread = std::thread::spawn(move || drop(stranger.accept().unwrap()));
        let detector = FailureDetector::start(listener, 0, &hosts, 7, Vec::new()).unwrap();
        stranger_thread.join().unwrap();
        let alone = region();
        detector.watch(0, &alone);
        std::thread::sleep(3 * POLL_INTERVAL);
        assert_eq!(alone.failure(), None);
    }
}
