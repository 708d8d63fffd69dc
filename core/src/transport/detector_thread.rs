//! The thread of the failure detector between hosts: what it learns of its host and from other hosts, what it forwards, and
//! what it writes into the control blocks of groups.
//!
//! Thread rule: a [`DetectorThread`] belongs to its thread.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

use super::counter::reached;
use super::detector_links::HostConnection;
use super::process::Process;
use super::region_control::RegionControl;
use crate::error::Error;

/// Interval at which the thread checks the groups of its host for failures.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Tells the thread to shut down.
pub(super) const SHUTDOWN: &[u8] = b".";
/// Tells the thread to exit without a shutdown message, so that other hosts see a loss.
pub(super) const ABORT: &[u8] = b"!";
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

/// A message to the other hosts, as a line of JSON. `group` is the hash of a group's key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum DetectorMessage {
    /// Ranks of the job are lost.
    Lost { ranks: Vec<usize>, text: String },
    /// A group has failed.
    Failed { group: u64, code: i32, text: String },
    /// A rank of a group has left it, with its last sequence number.
    Departed { group: u64, rank: usize, round: u32 },
    /// A rank waits long in round `round` of a group.
    Stalled { group: u64, round: u32 },
    /// The host has ended as planned.
    Shutdown,
}

/// A message about a group of this host.
enum GroupEvent {
    Failed(Error),
    Departed { rank: usize, round: u32 },
}

/// The state of the thread.
pub(super) struct DetectorThread {
    groups: Arc<dyn HostGroups>,
    stopped: UnixStream,
    peers: Vec<HostConnection>,
    processes: Vec<MonitoredProcess>,
    /// Messages already forwarded, with the time when they were seen last.
    seen: HashMap<DetectorMessage, Instant>,
    /// What other hosts have sent, by group. Applied in every check: the group may be made later on this host.
    received: HashMap<u64, (Vec<GroupEvent>, Instant)>,
    lost: Vec<(Vec<usize>, Error)>,
    /// By group, the latest stalled sequence number.
    stalled: HashMap<u64, (u32, Instant)>,
}

impl DetectorThread {
    /// The thread of a host with these neighbours, which monitors `processes` until `stopped` has [`SHUTDOWN`] or
    /// [`ABORT`].
    pub fn new(
        groups: Arc<dyn HostGroups>,
        stopped: UnixStream,
        peers: Vec<HostConnection>,
        processes: Vec<MonitoredProcess>,
    ) -> DetectorThread {
        let (seen, received, stalled) = (HashMap::new(), HashMap::new(), HashMap::new());
        DetectorThread { groups, stopped, peers, processes, seen, received, lost: Vec::new(), stalled }
    }

    /// Runs until it is stopped.
    pub fn run(mut self) {
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
                    self.send(&DetectorMessage::Shutdown);
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
                    GroupEvent::Departed { rank, round } => control.depart(*rank, *round),
                }
            }
            for (ranks, error) in lost.iter() {
                if ranks.iter().any(|&rank| control.contains(rank)) {
                    control.set_failure(error);
                }
            }
            let known = stalled.get(&group).map(|(round, _)| *round);
            match (control.stalled(), known) {
                (Some(round), known) if known.is_none_or(|known| known != round && reached(round, known)) => {
                    messages.push(DetectorMessage::Stalled { group, round });
                }
                (own, Some(known)) if own != Some(known) => control.stall(known),
                _ => {}
            }
            let departed = control.departed_ranks().into_iter();
            messages.extend(departed.map(|(rank, round)| DetectorMessage::Departed { group, rank, round }));
            let failed =
                |error: Error| DetectorMessage::Failed { group, code: error.code(), text: error.detail().to_owned() };
            messages.extend(control.failure().map(failed));
            control.all_departed()
        });
        for message in messages {
            self.forward(message);
        }
    }

    fn lost(&mut self, ranks: Vec<usize>, text: String) {
        self.forward(DetectorMessage::Lost { ranks: ranks.clone(), text: text.clone() });
        ranks.iter().for_each(|&rank| self.groups.add_lost(rank));
        self.lost.push((ranks, Error::PeerLost(text)));
    }

    /// Sends a message to the other hosts, once. Returns whether it was new.
    fn forward(&mut self, message: DetectorMessage) -> bool {
        if let DetectorMessage::Stalled { group, round } = message {
            let known = self.stalled.get(&group).map(|(round, _)| *round);
            if known.is_some_and(|known| reached(known, round)) {
                return false;
            }
            self.stalled.insert(group, (round, Instant::now()));
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

    fn send(&mut self, message: &DetectorMessage) {
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
                    Ok(DetectorMessage::Shutdown) => return PeerEvent::Shutdown,
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
    fn receive(&mut self, message: DetectorMessage) {
        let (group, event) = match &message {
            DetectorMessage::Lost { ranks, text } => {
                if !self.seen.contains_key(&message) {
                    self.lost(ranks.clone(), text.clone());
                }
                return;
            }
            DetectorMessage::Failed { group, code, text } => {
                (*group, GroupEvent::Failed(Error::from_code(*code, text.clone())))
            }
            DetectorMessage::Departed { group, rank, round } => {
                (*group, GroupEvent::Departed { rank: *rank, round: *round })
            }
            DetectorMessage::Stalled { .. } | DetectorMessage::Shutdown => {
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
