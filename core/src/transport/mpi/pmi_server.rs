//! The process manager of one rank: a thread that answers the MPI library ([`super::pmi`]) over a pair of sockets, and
//! exchanges values with the other ranks through a [`Store`].
//!
//! Thread rule: one server at a time in a process. Its thread runs until the process ends, or MPI is finalized.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread;

use super::pmi::{Action, BARRIER_DONE, Pmi, Values};
use crate::codec::{decode, encode};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::log::{log_last_line, log_line};
use crate::topology::Topology;
use crate::transport::store::{Store, allgather, missing_ranks};
use crate::transport::wait_context::with_limits;

/// The most bytes of a request.
const MAX_LINE: u64 = 64 << 10;

/// The part of a server that its owner sees.
pub struct PmiServer {
    exchange: Arc<Exchange>,
}

/// The exchange of values among all ranks.
struct Exchange {
    /// `None` once MPI has started: then nothing may keep the store in use.
    store: Mutex<Option<Arc<dyn Store>>>,
    rank: usize,
    size: usize,
    /// The barrier that this rank has reached.
    barrier: Mutex<u64>,
}

impl PmiServer {
    /// Starts a server for job `name`. Returns it and the descriptor for the MPI library, which closes it.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn start(name: &str, topology: &Topology, store: Arc<dyn Store>) -> Result<(PmiServer, OwnedFd)> {
        let (theirs, ours) = UnixStream::pair().map_err(|error| Error::system("making a pair of sockets", error))?;
        let (rank, size) = (topology.rank(), topology.size());
        let exchange = Arc::new(Exchange { store: Mutex::new(Some(store)), rank, size, barrier: Mutex::default() });
        let (mut pmi, shared) = (Pmi::new(name, topology), Arc::clone(&exchange));
        let serve = move || {
            if let Err(error) = serve(&ours, &mut pmi, &shared) {
                log_line(&format!("answering MPI's start: {error}"));
            }
        };
        let started = thread::Builder::new().name("dlcomm-pmi".into()).spawn(serve);
        started.map_err(Error::no_thread)?;
        Ok((PmiServer { exchange }, theirs.into()))
    }

    /// A function that names the ranks for which this one waits.
    pub fn missing(&self) -> impl Fn() -> String + Send + use<> {
        let exchange = Arc::clone(&self.exchange);
        move || exchange.missing().unwrap_or_else(|| "ranks of other hosts".into())
    }

    /// MPI has started: no rank needs values any more.
    pub fn started(&self) {
        drop(lock(&self.exchange.store).take());
    }
}

/// Answers requests until the MPI library closes its end.
fn serve(stream: &UnixStream, pmi: &mut Pmi, exchange: &Exchange) -> std::io::Result<()> {
    let (mut reader, mut writer) = (BufReader::new(stream), stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        if reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        match pmi.request(&String::from_utf8_lossy(&line)) {
            Action::Nothing => {}
            Action::Send(answer) => writer.write_all(answer.as_bytes())?,
            Action::Barrier => match exchange.barrier(pmi.take_puts()) {
                Ok(values) => {
                    pmi.add(values);
                    writer.write_all(BARRIER_DONE.as_bytes())?;
                }
                Err(error) => {
                    log_last_line(&format!("MPI_Init: {error}; this process ends with status 1"));
                    // As at a deadline of MPI_Init: no answer makes it return.
                    // SAFETY: _exit skips exit handlers, which may wait for the blocked thread.
                    unsafe { libc::_exit(1) };
                }
            },
            Action::End(answer) => return writer.write_all(answer.as_bytes()),
        }
    }
}

fn prefix(barrier: u64) -> String {
    format!("pmi/{barrier}")
}

impl Exchange {
    /// Waits for all ranks, and returns the values of all of them. The owner of the server has a deadline.
    fn barrier(&self, puts: Values) -> Result<Values> {
        let number = {
            let mut barrier = lock(&self.barrier);
            *barrier += 1;
            *barrier
        };
        // Once MPI has started, only ranks that end together have a barrier: nobody depends on it.
        let Some(store) = lock(&self.store).clone() else { return Ok(Values::new()) };
        let record = encode(&puts)?;
        let all = with_limits("MPI_Init", None, None, &|| None, |ctx| {
            allgather(&*store, &prefix(number), self.rank, self.size, &record, ctx)
        })?;
        let values: Vec<Values> = all.iter().map(|record| decode(record)).collect::<Result<_>>()?;
        Ok(values.into_iter().flatten().collect())
    }

    /// Names the ranks that have not reached this rank's barrier. `None` outside of a barrier.
    fn missing(&self) -> Option<String> {
        let store = lock(&self.store).clone()?;
        let number = *lock(&self.barrier);
        (number > 0).then(|| missing_ranks(&*store, self.size, |rank| format!("{}/{rank}", prefix(number))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::store::MemoryStore;
    use std::time::Duration;

    fn client(descriptor: OwnedFd) -> BufReader<UnixStream> {
        let stream = UnixStream::from(descriptor);
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        BufReader::new(stream)
    }

    fn ask(client: &mut BufReader<UnixStream>, request: &str) -> String {
        client.get_mut().write_all(request.as_bytes()).unwrap();
        let mut line = String::new();
        client.read_line(&mut line).unwrap();
        line
    }

    #[test]
    fn ranks_get_the_values_of_others_after_a_barrier() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        thread::scope(|scope| {
            for rank in 0..3 {
                let store = Arc::clone(&store);
                scope.spawn(move || {
                    let topology = Topology::new(rank, &[0, 0, 1]);
                    let (server, descriptor) = PmiServer::start("job", &topology, store).unwrap();
                    let mut mpi = client(descriptor);
                    for round in 0..3 {
                        let put = format!("cmd=put kvsname=job key=k{rank} value=v{rank}.{round}\n");
                        assert_eq!(ask(&mut mpi, &put), "cmd=put_result rc=0\n");
                        assert_eq!(ask(&mut mpi, "cmd=barrier_in\n"), BARRIER_DONE);
                        for other in 0..3 {
                            let got = ask(&mut mpi, &format!("cmd=get kvsname=job key=k{other}\n"));
                            assert_eq!(got, format!("cmd=get_result rc=0 value=v{other}.{round}\n"));
                        }
                    }
                    server.started();
                    assert_eq!(ask(&mut mpi, "cmd=barrier_in\n"), BARRIER_DONE, "does not use the store");
                    assert_eq!(ask(&mut mpi, "cmd=finalize\n"), "cmd=finalize_ack rc=0\n");
                    let mut rest = String::new();
                    assert_eq!(mpi.read_line(&mut rest).unwrap(), 0, "the server has closed its end");
                });
            }
        });
        assert_eq!(Arc::strong_count(&store), 1, "nobody keeps it");
    }

    #[test]
    fn a_missing_rank_is_named() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        let (server, descriptor) = PmiServer::start("job", &Topology::new(0, &[0, 1, 2]), store).unwrap();
        let missing = server.missing();
        assert_eq!(missing(), "ranks of other hosts");
        let mut mpi = client(descriptor);
        mpi.get_mut().write_all(b"cmd=barrier_in\n").unwrap();
        while missing() != "rank 1, rank 2" {
            thread::yield_now();
        }
        // Its thread waits for ever.
        std::mem::forget(server);
    }
}
