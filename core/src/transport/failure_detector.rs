//! The failure detector between hosts: a lost process or a failed group on one host is known on all hosts within about
//! a second, not only at the deadline.
//!
//! The first rank of each host runs a thread with TCP connections to about 2 log2(hosts) other hosts
//! ([`super::detector_links`]). The thread monitors the processes of its host. It writes failures into the control
//! blocks of the host's groups and forwards them ([`super::detector_thread`]), so that they reach every host even when
//! some hosts are lost. A group is named by the hash of its key; a lost rank fails the groups that it is a member
//! of. A connection closed without a shutdown message means a lost host. TCP keepalive detects an unreachable host
//! within seconds.
//! Thread rule: a [`FailureDetector`] may be used from any thread.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::detector_links::{HostAddress, Listener, Unconnected, connect};
use super::detector_thread::{ABORT, DetectorThread, SHUTDOWN};
use crate::error::{Error, Result};
use crate::log::log_line;

pub use super::detector_thread::{HostGroups, MonitoredProcess};

/// The failure detector of a host. Dropping it sends a shutdown message, unless [`FailureDetector::mark_aborted`] was
/// called.
pub struct FailureDetector {
    stop: UnixStream,
    aborted: bool,
    thread: Option<JoinHandle<()>>,
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
        let detector_thread = DetectorThread::new(groups, stopped, peers, processes);
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

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;
    use std::sync::Mutex;
    use std::time::Instant;

    use super::*;
    use crate::lock::lock;
    use crate::transport::counter::START;
    use crate::transport::detector_thread::POLL_INTERVAL;
    use crate::transport::in_process;
    use crate::transport::region_control::RegionControl;
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
            region.open().unwrap();
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
        assert_eq!(hosts[4].2.departed(), None, "it has its own rounds");
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
