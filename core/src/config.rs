//! The `DL_COMM_*` environment variables, read once at init into a plain struct. An invalid value is an error that
//! names the variable, never a silent default.

use std::time::Duration;

use xxhash_rust::xxh3::xxh3_128;

use crate::affinity::Affinity;
use crate::collective::device::{DeviceSettings, PathSetting};
use crate::collective::{AlgorithmSetting, Selection};
use crate::error::{Error, Result};
use crate::plugin::Cooldown;

/// The most threads of a group.
pub const MAX_THREADS: usize = 256;

/// Settings of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `DL_COMM_DEFAULT_NTHREADS`: threads of the default team.
    pub default_nthreads: usize,
    /// `DL_COMM_DEFAULT_PREC_LEVEL`: 0 accumulates float16 and float32 in float32, 1 in float64.
    pub default_prec_level: u8,
    /// `DL_COMM_TIMEOUT_S`: deadline of a call; `None` (0) is no deadline.
    pub timeout: Option<Duration>,
    /// `DL_COMM_STALL_WARN_S`: a longer wait logs the awaited ranks once; `None` (0) disables the warning.
    pub stall_warn: Option<Duration>,
    /// `DL_COMM_MATCH_TIMEOUT_S`: how long an unmatched call waits for its counterparts.
    pub match_timeout: Duration,
    /// `DL_COMM_CHUNK_KB`, in bytes: the chunk size of one thread; `None`: by the number of ranks of a host.
    pub chunk_bytes: Option<usize>,
    /// `DL_COMM_ALGORITHM`: the allreduce algorithm between hosts.
    pub algorithm: AlgorithmSetting,
    /// `DL_COMM_SELECTION`: at which lengths calls take another path.
    pub selection: Selection,
    /// `DL_COMM_AFFINITY`: CPUs of group threads.
    pub affinity: Affinity,
    /// `DL_COMM_COOLDOWN`: meaning of a negative `ksteps` of `config_team`, `after` or `last`.
    pub cooldown: Cooldown,
    /// `DL_COMM_LOCAL_RANK`: the rank on this host that whoever has set `DL_COMM_RANK` expects.
    pub local_rank: Option<usize>,
    /// `DL_COMM_ALONE`: 1 makes the process a job of one rank, whatever started it.
    pub alone: bool,
    /// `DL_COMM_SHM_DIR`: directory of the shared memory segments.
    pub shm_dir: String,
    /// `DL_COMM_SOCKET_IFNAME`: network interface of the failure detector and of the store; empty for any.
    pub interface: String,
    /// `DL_COMM_DUMP_DIR`: directory of the dumps that ranks write after a failure.
    pub dump_dir: DumpDir,
    /// `DL_COMM_TIMELINE`: directory of the timeline; empty for no timeline.
    pub timeline: String,
    /// `DL_COMM_GPU_PATH`, `DL_COMM_PIPELINE_CHUNK_KB`, `DL_COMM_NUM_CUDA_STREAMS`: execution of calls on GPU memory.
    pub device: DeviceSettings,
}

/// Directory of dumps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DumpDir {
    /// A folder per job in the system's temporary directory.
    Temporary,
    /// This directory.
    Folder(String),
    /// No dumps, except on request of the program.
    Disabled,
}

/// Who has given a process its rank in a [`Rendezvous`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankSource {
    /// `DL_COMM_RANK`.
    Variables,
    /// `JOB_COMPLETION_INDEX` of an indexed job of Kubernetes.
    Kubernetes,
    /// The program.
    Arguments,
}

/// How plain processes find each other without a launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendezvous {
    /// Where the rank comes from.
    pub source: RankSource,
    /// `DL_COMM_RANK`: this process's rank.
    pub rank: usize,
    /// `DL_COMM_SIZE`: the number of ranks.
    pub size: usize,
    /// `DL_COMM_ADDR`: host and port on which rank 0 listens.
    pub address: String,
    /// A hash of `DL_COMM_JOB_KEY`, the secret of the job.
    pub key: Option<u128>,
}

impl Rendezvous {
    /// Parses the variables returned by `lookup`; `None` if none is set.
    ///
    /// # Errors
    /// [`Error::Invalid`] if only some are set, or one is invalid.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Rendezvous>> {
        let get = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let ours = ["DL_COMM_RANK", "DL_COMM_SIZE", "DL_COMM_ADDR", "DL_COMM_JOB_KEY"];
        // An index alone is that of a job of independent processes.
        if ours.into_iter().all(|name| get(name).is_none()) {
            return Ok(None);
        }
        let (source, rank_name) = if get("DL_COMM_RANK").is_none() && get("JOB_COMPLETION_INDEX").is_some() {
            (RankSource::Kubernetes, "JOB_COMPLETION_INDEX")
        } else {
            (RankSource::Variables, "DL_COMM_RANK")
        };
        let names = [rank_name, "DL_COMM_SIZE", "DL_COMM_ADDR"];
        let [Some(rank), Some(size), Some(address)] = names.map(get) else {
            let missing: Vec<&str> = names.into_iter().filter(|name| get(name).is_none()).collect();
            let why = format!("{} are set together; not set: {}", names.join(", "), missing.join(", "));
            return Err(Error::Invalid(why));
        };
        let number = |name: &str, text: &str, what: &str| {
            text.trim().parse::<u32>().map_err(|_| Error::Invalid(format!("{name} is '{text}'; set it to {what}")))
        };
        let rank = number(rank_name, &rank, "the rank of this process, from 0")? as usize;
        let size = number("DL_COMM_SIZE", &size, "the number of ranks")? as usize;
        if rank >= size {
            return Err(Error::Invalid(format!(
                "{rank_name} is {rank}; it is from 0 to DL_COMM_SIZE - 1 ({size} - 1)"
            )));
        }
        Rendezvous::new(source, rank, size, &address, &get("DL_COMM_JOB_KEY").unwrap_or_default()).map(Some)
    }

    /// Rank `rank` of `size`, which is larger; rank 0 listens on `address`. `secret` is that of the job; empty: none.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the address is not `host:port`.
    pub fn new(source: RankSource, rank: usize, size: usize, address: &str, secret: &str) -> Result<Rendezvous> {
        let address = address.trim().to_owned();
        if address
            .rsplit_once(':')
            .is_none_or(|(host, port)| host.is_empty() || !port.parse().is_ok_and(|port: u16| port > 0))
        {
            let name = if source == RankSource::Arguments { "the address" } else { "DL_COMM_ADDR" };
            return Err(Error::Invalid(format!("{name} is '{address}'; set it to host:port of rank 0")));
        }
        let key = (!secret.is_empty()).then(|| xxh3_128(secret.as_bytes()));
        Ok(Rendezvous { source, rank, size, address, key })
    }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            default_nthreads: 2,
            default_prec_level: 0,
            timeout: Some(Duration::from_secs(300)),
            stall_warn: Some(Duration::from_secs(60)),
            match_timeout: Duration::from_secs(30),
            chunk_bytes: None,
            algorithm: AlgorithmSetting::Auto,
            selection: Selection::default(),
            affinity: Affinity::None,
            cooldown: Cooldown::After,
            local_rank: None,
            alone: false,
            shm_dir: "/dev/shm".into(),
            interface: String::new(),
            dump_dir: DumpDir::Temporary,
            timeline: String::new(),
            device: DeviceSettings::default(),
        }
    }
}

impl Config {
    /// Reads the environment variables of the process.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the variable and its valid values.
    pub fn from_env() -> Result<Config> {
        Config::from_lookup(|name| std::env::var(name).ok())
    }

    /// Reads the variables through `lookup`; an empty value counts as unset.
    ///
    /// # Errors
    /// As [`Config::from_env`].
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Config> {
        let get = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let defaults = Config::default();
        let integer = |name: &str, min: usize, max: usize, default: usize| match get(name) {
            None => Ok(default),
            Some(text) => {
                text.trim().parse::<usize>().ok().filter(|value| (min..=max).contains(value)).ok_or_else(|| {
                    Error::Invalid(format!("{name} is '{text}'; set it to a whole number from {min} to {max}"))
                })
            }
        };
        let of = |name: &'static str| move |error: Error| Error::Invalid(format!("{name}: {}", error.detail()));
        let seconds = |name: &str, default: Option<Duration>| match get(name) {
            None => Ok(default),
            Some(text) => match text.trim().parse::<f64>() {
                Ok(0.0) => Ok(None),
                Ok(value) if value > 0.0 && value <= 1e9 => Ok(Some(Duration::from_secs_f64(value))),
                _ => {
                    Err(Error::Invalid(format!("{name} is '{text}'; set it to a number of seconds, or 0 for no limit")))
                }
            },
        };
        // The bindings read it when they make buckets; a wrong value is reported at the start, on all ranks.
        if let Some(text) = get("DL_COMM_BUCKET_MB")
            && !text.trim().parse::<f64>().is_ok_and(|size| size > 0.0 && size.is_finite())
        {
            return Err(Error::Invalid(format!(
                "DL_COMM_BUCKET_MB is '{text}'; set it to the size of a bucket in MiB, a positive number"
            )));
        }
        Ok(Config {
            default_nthreads: integer("DL_COMM_DEFAULT_NTHREADS", 1, MAX_THREADS, defaults.default_nthreads)?,
            default_prec_level: u8::from(integer("DL_COMM_DEFAULT_PREC_LEVEL", 0, 1, 0)? == 1),
            timeout: seconds("DL_COMM_TIMEOUT_S", defaults.timeout)?,
            stall_warn: seconds("DL_COMM_STALL_WARN_S", defaults.stall_warn)?,
            match_timeout: seconds("DL_COMM_MATCH_TIMEOUT_S", Some(defaults.match_timeout))?.unwrap_or_default(),
            chunk_bytes: match get("DL_COMM_CHUNK_KB") {
                None => None,
                Some(_) => Some(integer("DL_COMM_CHUNK_KB", 4, 1 << 18, 0)? << 10),
            },
            algorithm: get("DL_COMM_ALGORITHM")
                .map_or(Ok(defaults.algorithm), |name| AlgorithmSetting::parse(&name))
                .map_err(of("DL_COMM_ALGORITHM"))?,
            selection: get("DL_COMM_SELECTION")
                .map_or(Ok(defaults.selection), |text| Selection::parse(&text))
                .map_err(of("DL_COMM_SELECTION"))?,
            affinity: get("DL_COMM_AFFINITY").map_or(Ok(defaults.affinity), |text| Affinity::parse(&text))?,
            cooldown: match get("DL_COMM_COOLDOWN").as_deref() {
                None => defaults.cooldown,
                Some("after") => Cooldown::After,
                Some("last") => Cooldown::Last,
                Some(text) => {
                    return Err(Error::Invalid(format!("DL_COMM_COOLDOWN is '{text}'; set it to 'after' or 'last'")));
                }
            },
            local_rank: get("DL_COMM_LOCAL_RANK").map(|_| integer("DL_COMM_LOCAL_RANK", 0, 1 << 20, 0)).transpose()?,
            alone: integer("DL_COMM_ALONE", 0, 1, 0)? == 1,
            shm_dir: get("DL_COMM_SHM_DIR").unwrap_or(defaults.shm_dir),
            interface: get("DL_COMM_SOCKET_IFNAME").unwrap_or_default(),
            dump_dir: match get("DL_COMM_DUMP_DIR") {
                None => defaults.dump_dir,
                Some(text) if text == "none" => DumpDir::Disabled,
                Some(text) => DumpDir::Folder(text),
            },
            timeline: get("DL_COMM_TIMELINE").unwrap_or_default(),
            device: DeviceSettings {
                path: get("DL_COMM_GPU_PATH")
                    .map_or(Ok(defaults.device.path), |name| PathSetting::parse(&name))
                    .map_err(of("DL_COMM_GPU_PATH"))?,
                chunk: integer("DL_COMM_PIPELINE_CHUNK_KB", 4, 1 << 18, defaults.device.chunk >> 10)? << 10,
                streams: integer("DL_COMM_NUM_CUDA_STREAMS", 1, 64, defaults.device.streams)?,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Algorithm;
    use crate::collective::selection::Limit;

    fn with(name: &'static str, value: &'static str) -> Result<Config> {
        Config::from_lookup(move |asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn unset_variables_give_the_defaults() {
        assert_eq!(Config::from_lookup(|_| None), Ok(Config::default()));
        assert_eq!(with("DL_COMM_TIMEOUT_S", ""), Ok(Config::default()));
    }

    #[test]
    fn values_are_parsed() {
        assert_eq!(with("DL_COMM_TIMEOUT_S", "0").unwrap().timeout, None);
        assert_eq!(with("DL_COMM_TIMEOUT_S", "0.5").unwrap().timeout, Some(Duration::from_millis(500)));
        assert_eq!(with("DL_COMM_DEFAULT_NTHREADS", "5").unwrap().default_nthreads, 5);
        assert_eq!(with("DL_COMM_LOCAL_RANK", "0").unwrap().local_rank, Some(0));
        assert_eq!(with("DL_COMM_CHUNK_KB", "64").unwrap().chunk_bytes, Some(65536));
        assert_eq!(with("DL_COMM_COOLDOWN", "last").unwrap().cooldown, Cooldown::Last);
        assert_eq!(with("DL_COMM_ALGORITHM", "ring").unwrap().algorithm, AlgorithmSetting::Always(Algorithm::Ring));
        let limits = with("DL_COMM_SELECTION", "reduce.one_round=64K").unwrap().selection;
        assert_eq!(limits, Selection::default().with(Limit::ReduceOneRound, 64 << 10));
        assert_eq!(with("DL_COMM_MATCH_TIMEOUT_S", "0").unwrap().match_timeout, Duration::ZERO);
        assert_eq!(with("DL_COMM_GPU_PATH", "ipc").unwrap().device.path, PathSetting::Ipc);
        assert_eq!(with("DL_COMM_PIPELINE_CHUNK_KB", "64").unwrap().device.chunk, 65536);
        assert_eq!(with("DL_COMM_NUM_CUDA_STREAMS", "3").unwrap().device.streams, 3);
        assert_eq!(with("DL_COMM_DUMP_DIR", "none").unwrap().dump_dir, DumpDir::Disabled);
        assert_eq!(with("DL_COMM_DUMP_DIR", "/x").unwrap().dump_dir, DumpDir::Folder("/x".into()));
    }

    #[test]
    fn plain_processes_need_rank_size_and_address() {
        let from = |set: &[(&str, &str)]| {
            Rendezvous::from_lookup(|asked| {
                set.iter().find(|(name, _)| *name == asked).map(|(_, value)| (*value).to_owned())
            })
        };
        let (rank, size, address) = (("DL_COMM_RANK", "1"), ("DL_COMM_SIZE", "2"), ("DL_COMM_ADDR", "localhost:7000"));
        assert_eq!(from(&[]), Ok(None));
        let found = from(&[rank, size, address]).unwrap().unwrap();
        let source = RankSource::Variables;
        assert_eq!(found, Rendezvous { source, rank: 1, size: 2, address: "localhost:7000".into(), key: None });
        let index = ("JOB_COMPLETION_INDEX", "0");
        let kubernetes = from(&[index, size, address]).unwrap().unwrap();
        assert_eq!((kubernetes.source, kubernetes.rank), (RankSource::Kubernetes, 0));
        assert_eq!(from(&[index, rank, size, address]).unwrap().unwrap().rank, 1, "several ranks in a pod");
        assert_eq!(from(&[index]), Ok(None), "a job of independent processes");
        let without_size = from(&[index, address]).unwrap_err().to_string();
        assert!(without_size.ends_with("not set: DL_COMM_SIZE"), "{without_size}");
        let key = |secret| from(&[rank, size, address, ("DL_COMM_JOB_KEY", secret)]).unwrap().unwrap().key.unwrap();
        assert_ne!(key("a"), key("b"));
        for (set, named) in [
            (&[rank][..], "not set: DL_COMM_SIZE, DL_COMM_ADDR"),
            (&[("DL_COMM_JOB_KEY", "a")], "not set: DL_COMM_RANK"),
            (&[("DL_COMM_RANK", "2"), size, address], "DL_COMM_RANK is 2"),
            (&[("DL_COMM_RANK", "x"), size, address], "DL_COMM_RANK is 'x'"),
            (&[rank, ("DL_COMM_SIZE", "-1"), address], "DL_COMM_SIZE is '-1'"),
            (&[rank, size, ("DL_COMM_ADDR", "host")], "DL_COMM_ADDR is 'host'"),
            (&[rank, size, ("DL_COMM_ADDR", "host:0")], "DL_COMM_ADDR is 'host:0'"),
        ] {
            assert!(matches!(from(set), Err(Error::Invalid(text)) if text.contains(named)), "{set:?}");
        }
    }

    #[test]
    fn invalid_values_name_the_variable() {
        for (name, value) in [
            ("DL_COMM_TIMEOUT_S", "soon"),
            ("DL_COMM_TIMEOUT_S", "-1"),
            ("DL_COMM_TIMEOUT_S", "nan"),
            ("DL_COMM_DEFAULT_NTHREADS", "0"),
            ("DL_COMM_DEFAULT_PREC_LEVEL", "2"),
            ("DL_COMM_CHUNK_KB", "1.5"),
            ("DL_COMM_MATCH_TIMEOUT_S", "-3"),
            ("DL_COMM_ALGORITHM", "fastest"),
            ("DL_COMM_SELECTION", "some"),
            ("DL_COMM_AFFINITY", "some"),
            ("DL_COMM_COOLDOWN", "5"),
            ("DL_COMM_ALONE", "yes"),
            ("DL_COMM_LOCAL_RANK", "-1"),
            ("DL_COMM_GPU_PATH", "fast"),
            ("DL_COMM_PIPELINE_CHUNK_KB", "1"),
            ("DL_COMM_NUM_CUDA_STREAMS", "0"),
            ("DL_COMM_BUCKET_MB", "0"),
            ("DL_COMM_BUCKET_MB", "nan"),
        ] {
            let error = with(name, value).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
    }
}
