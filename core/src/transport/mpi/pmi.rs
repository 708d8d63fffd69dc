//! The answers of a process manager to an MPI library that starts: PMI-1, MPICH's "simple PMI". One request and one
//! answer a line, of fields `key=value` between spaces; `cmd` is the first.
//!
//! Values that a rank puts reach the others at its next barrier, all at once. So a job of any size exchanges each value
//! once, and every `get` is answered from memory. Pure.

use std::collections::HashMap;
use std::fmt::Write;

use crate::topology::Topology;

/// The most bytes of a name of values, of a key, and of a value. As MPICH's launcher announces them: libraries have
/// buffers of these sizes.
const MAX_NAME: usize = 256;
const MAX_KEY: usize = 64;
const MAX_VALUE: usize = 1024;

/// The first and the last line of a request of several lines, in MPICH's format for MPI_Comm_spawn.
const FIRST_LINE: &str = "mcmd=";
const LAST_LINE: &str = "endcmd";

/// The key under which an MPI library finds the host of every rank.
const MAPPING: &str = "PMI_process_mapping";

/// Keys and their values.
pub type Values = Vec<(String, String)>;

/// What to do about a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// The request goes on.
    Nothing,
    /// Send this line.
    Send(String),
    /// Exchange the values of [`Pmi::take_puts`] with all ranks, then send [`BARRIER_DONE`].
    Barrier,
    /// Send this line; no request follows.
    End(String),
}

/// The answer to a barrier that all ranks have reached.
pub const BARRIER_DONE: &str = "cmd=barrier_out rc=0\n";

/// The state of one rank's connection.
pub struct Pmi {
    /// The name of the job's values; other jobs have others.
    name: String,
    size: usize,
    values: HashMap<String, String>,
    puts: Values,
    /// Whether the lines up to [`LAST_LINE`] belong to one request.
    in_lines: bool,
}

impl Pmi {
    /// The connection of a rank of job `name`, whose ranks are placed as in `topology`.
    pub fn new(name: &str, topology: &Topology) -> Pmi {
        let mapping = process_mapping(topology);
        // A library without a mapping compares host names.
        let values = (mapping.len() <= MAX_VALUE).then(|| (MAPPING.to_owned(), mapping)).into_iter().collect();
        Pmi { name: name.to_owned(), size: topology.size(), values, puts: Vec::new(), in_lines: false }
    }

    /// The action for a request line; without an end, it is longer than any request.
    pub fn request(&mut self, line: &str) -> Action {
        if !line.ends_with('\n') {
            return Action::End("cmd=unknown rc=-1 msg=too_long\n".into());
        }
        let line = line.trim_end_matches(['\n', '\r']);
        if self.in_lines || line.starts_with(FIRST_LINE) {
            self.in_lines = line != LAST_LINE;
            let answer = || Action::Send("cmd=unknown rc=-1 msg=not_supported\n".into());
            return if self.in_lines { Action::Nothing } else { answer() };
        }
        let Some(rest) = line.strip_prefix("cmd=") else {
            return Action::Send("cmd=unknown rc=-1 msg=no_command\n".into());
        };
        let command = rest.split(' ').next().unwrap_or_default();
        let send = |fields: String| Action::Send(format!("cmd={fields}\n"));
        match command {
            "init" => send("response_to_init pmi_version=1 pmi_subversion=1 rc=0".into()),
            "get_maxes" => {
                send(format!("maxes rc=0 kvsname_max={MAX_NAME} keylen_max={MAX_KEY} vallen_max={MAX_VALUE}"))
            }
            "get_appnum" => send("appnum rc=0 appnum=0".into()),
            "get_my_kvsname" => send(format!("my_kvsname rc=0 kvsname={}", self.name)),
            "get_universe_size" => send(format!("universe_size rc=0 size={}", self.size)),
            "put" => match self.put(rest) {
                Ok(()) => send("put_result rc=0".into()),
                Err(why) => send(format!("put_result rc=-1 msg={why}")),
            },
            "get" => match field(rest, "key").and_then(|key| self.values.get(key)) {
                Some(value) => send(format!("get_result rc=0 value={value}")),
                None => send("get_result rc=-1 msg=key_not_found".into()),
            },
            "barrier_in" => Action::Barrier,
            "finalize" => Action::End("cmd=finalize_ack rc=0\n".into()),
            other => send(format!("{} rc=-1 msg=not_supported", &other[..other.floor_char_boundary(MAX_KEY)])),
        }
    }

    fn put(&mut self, request: &str) -> Result<(), &'static str> {
        let key = field(request, "key").ok_or("no_key")?;
        // The last field: it may have spaces.
        let (_, value) = request.split_once(" value=").ok_or("no_value")?;
        if key.len() > MAX_KEY || value.len() > MAX_VALUE {
            return Err("too_long");
        }
        self.puts.push((key.to_owned(), value.to_owned()));
        Ok(())
    }

    /// The values that this rank has put since the last barrier.
    pub fn take_puts(&mut self) -> Values {
        std::mem::take(&mut self.puts)
    }

    /// Adds the values of all ranks, after a barrier.
    pub fn add(&mut self, values: impl IntoIterator<Item = (String, String)>) {
        self.values.extend(values);
    }
}

/// The value of field `name`.
fn field<'a>(request: &'a str, name: &str) -> Option<&'a str> {
    request.split(' ').find_map(|field| field.strip_prefix(name)?.strip_prefix('='))
}

/// The hosts of the ranks, in rank order, as blocks `(first host, hosts, ranks on each)`.
fn process_mapping(topology: &Topology) -> String {
    let mut blocks: Vec<(usize, usize, usize)> = Vec::new();
    let hosts = (0..topology.size()).filter_map(|rank| topology.position(rank)).map(|position| position.host);
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for host in hosts {
        match runs.last_mut() {
            Some((last, ranks)) if *last == host => *ranks += 1,
            _ => runs.push((host, 1)),
        }
    }
    for (host, ranks) in runs {
        match blocks.last_mut() {
            Some((first, hosts, each)) if *first + *hosts == host && *each == ranks => *hosts += 1,
            _ => blocks.push((host, 1, ranks)),
        }
    }
    let mut text = "(vector".to_owned();
    for (first, hosts, ranks) in blocks {
        // Writing to a String cannot fail.
        let _written = write!(text, ",({first},{hosts},{ranks})");
    }
    text + ")"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pmi(keys: &[u8]) -> Pmi {
        Pmi::new("kvs", &Topology::new(0, keys))
    }

    fn sent(action: Action) -> String {
        let Action::Send(line) = action else { unreachable!("{action:?}") };
        assert!(line.starts_with("cmd=") && line.ends_with('\n') && line.lines().count() == 1, "{line}");
        line.trim_end().to_owned()
    }

    #[test]
    fn a_start_as_mpich_does_it() {
        let (mut zero, mut one) = (pmi(&[1, 1]), pmi(&[1, 1]));
        let mut ask = |line: &str| sent(zero.request(line));
        assert_eq!(
            ask("cmd=init pmi_version=1 pmi_subversion=1\n"),
            "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
        );
        assert_eq!(ask("cmd=get_maxes\n"), "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024");
        assert_eq!(ask("cmd=get_my_kvsname\n"), "cmd=my_kvsname rc=0 kvsname=kvs");
        assert_eq!(ask("cmd=get_universe_size\n"), "cmd=universe_size rc=0 size=2");
        assert_eq!(ask("cmd=get_appnum\n"), "cmd=appnum rc=0 appnum=0");
        assert_eq!(ask("cmd=get kvsname=kvs key=PMI_process_mapping\n"), "cmd=get_result rc=0 value=(vector,(0,1,2))");
        assert_eq!(ask("cmd=put kvsname=kvs key=bc-0 value=a=b c\n"), "cmd=put_result rc=0");
        assert_eq!(
            ask("cmd=get kvsname=kvs key=bc-0\n"),
            "cmd=get_result rc=-1 msg=key_not_found",
            "until the barrier"
        );
        assert_eq!(one.request("cmd=barrier_in\n"), Action::Barrier);
        one.add(zero.take_puts());
        assert_eq!(sent(one.request("cmd=get kvsname=kvs key=bc-0\n")), "cmd=get_result rc=0 value=a=b c");
        assert!(zero.take_puts().is_empty());
        assert_eq!(one.request("cmd=finalize\n"), Action::End("cmd=finalize_ack rc=0\n".into()));
    }

    #[test]
    fn malformed_requests_get_an_error() {
        let mut pmi = pmi(&[1]);
        let long = format!("cmd=put kvsname=kvs key=k value={}\n", "x".repeat(MAX_VALUE + 1));
        for (line, answer) in [
            ("\n", "cmd=unknown rc=-1"),
            ("cmd=\n", "cmd= rc=-1"),
            ("cmd=spawn nprocs=2\n", "cmd=spawn rc=-1"),
            ("cmd=put kvsname=kvs value=1\n", "cmd=put_result rc=-1 msg=no_key"),
            ("cmd=put kvsname=kvs key=k\n", "cmd=put_result rc=-1 msg=no_value"),
            (&long, "cmd=put_result rc=-1 msg=too_long"),
            ("cmd=get\n", "cmd=get_result rc=-1"),
            ("cmd=get key=\n", "cmd=get_result rc=-1"),
        ] {
            assert!(sent(pmi.request(line)).starts_with(answer), "{line}");
        }
        let endless = format!("cmd={}", "ä".repeat(1000));
        assert!(sent(pmi.request(&format!("{endless}\n"))).len() < 100);
        assert!(matches!(pmi.request(&endless), Action::End(answer) if answer.contains("too_long")));
        for line in ["mcmd=spawn\n", "nprocs=2\n", "cmd=get\n", "argcnt=0\n"] {
            assert_eq!(pmi.request(line), Action::Nothing, "{line}");
        }
        assert!(sent(pmi.request("endcmd\n")).starts_with("cmd=unknown rc=-1"));
        assert!(sent(pmi.request("cmd=get_appnum\n")).starts_with("cmd=appnum"));
        assert!(pmi.take_puts().is_empty());
    }

    #[test]
    fn mappings_have_a_block_for_each_run_of_ranks() {
        let mapping = |keys: &[u8]| process_mapping(&Topology::new(0, keys));
        assert_eq!(mapping(&[7]), "(vector,(0,1,1))");
        assert_eq!(mapping(&[7, 7, 7]), "(vector,(0,1,3))");
        assert_eq!(mapping(&[1, 1, 1, 2, 2]), "(vector,(0,1,3),(1,1,2))");
        assert_eq!(mapping(&[1, 1, 2, 2, 3, 3]), "(vector,(0,3,2))");
        assert_eq!(mapping(&[1, 2, 1, 2]), "(vector,(0,2,1),(0,2,1))");
        assert_eq!(mapping(&[1, 2, 2, 1]), "(vector,(0,1,1),(1,1,2),(0,1,1))");
        let all = Topology::new(0, &(0..2000u32).map(|rank| rank % 2 + rank % 3).collect::<Vec<_>>());
        let mut long = Pmi::new("kvs", &all);
        assert!(sent(long.request("cmd=get key=PMI_process_mapping\n")).contains("rc=-1"), "too long to send");
    }
}
