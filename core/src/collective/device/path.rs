//! Which way the data of calls on device memory goes: what every rank tells of its GPU, and what follows. Pure but for the
//! gathering of a rank's own facts.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use super::super::rounds::Told;
use super::peers::probe;
use crate::error::{Error, Result};
use crate::topology::Topology;
use crate::transport::cuda::{Context, nccl_version};

/// Who waits for the other ranks while the data is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The stream, for numbers in host memory.
    Stream,
    /// The host, where the driver has no such operation.
    Host,
}

/// A way for the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// There is one rank.
    Alone,
    /// NCCL between all ranks.
    Nccl,
    /// Kernels on memory that the ranks of a host see in each other.
    Ipc(Wait),
    /// The same within each host, and through host memory between them.
    Across(Wait),
    /// Through host memory.
    Staged,
}

impl Path {
    /// As `DL_COMM_GPU_PATH` and `topology()` name it.
    pub fn name(self) -> &'static str {
        match self {
            Path::Alone => "alone",
            Path::Nccl => "nccl",
            Path::Ipc(_) => "ipc",
            Path::Across(_) => "ipc+staged",
            Path::Staged => "staged",
        }
    }

    /// Who waits, where kernels work on memory of several ranks.
    pub fn wait(self) -> Option<Wait> {
        match self {
            Path::Ipc(wait) | Path::Across(wait) => Some(wait),
            Path::Alone | Path::Nccl | Path::Staged => None,
        }
    }
}

/// What the environment asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The best there is.
    Auto,
    /// This one, or an error.
    Nccl,
    /// This one within each host, or an error.
    Ipc,
    /// This one.
    Staged,
}

impl Wanted {
    /// The name of a path.
    ///
    /// # Errors
    /// [`Error::Invalid`]
    pub fn parse(text: &str) -> Result<Wanted> {
        Wanted::ALL
            .into_iter()
            .find(|wanted| wanted.name() == text)
            .ok_or_else(|| Error::Invalid(format!("DL_COMM_GPU_PATH is '{text}'; set it to auto, nccl, ipc or staged")))
    }

    const ALL: [Wanted; 4] = [Wanted::Auto, Wanted::Nccl, Wanted::Ipc, Wanted::Staged];

    /// As it is asked for.
    pub fn name(self) -> &'static str {
        match self {
            Wanted::Auto => "auto",
            Wanted::Nccl => "nccl",
            Wanted::Ipc => "ipc",
            Wanted::Staged => "staged",
        }
    }
}

/// What a rank tells of its GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    /// The same for all processes that use the GPU.
    uuid: String,
    /// The version of NCCL, or why there is none.
    nccl: std::result::Result<i32, String>,
    /// Who can wait, or why no other process can see this one's memory.
    ipc: std::result::Result<Wait, String>,
}

impl Facts {
    /// Those of this process.
    pub fn gather(context: &Arc<Context>) -> Facts {
        let words = |error: Error| shortened(error.detail());
        Facts { uuid: context.uuid(), nccl: nccl_version().map_err(words), ipc: probe(context).map_err(words) }
    }

    /// NCCL has refused on this rank.
    pub fn lacks_nccl(&mut self, why: &str) {
        self.nccl = Err(shortened(why));
    }

    pub fn encode(&self) -> String {
        let wait = match &self.ipc {
            Ok(Wait::Stream) => json!("stream"),
            Ok(Wait::Host) => json!("host"),
            Err(why) => json!({"none": why}),
        };
        let nccl = match &self.nccl {
            Ok(version) => json!(version),
            Err(why) => json!(why),
        };
        json!([self.uuid, nccl, wait]).to_string()
    }

    fn decode(text: &str) -> Option<Facts> {
        let value: Value = serde_json::from_str(text).ok()?;
        let ipc = match &value[2] {
            Value::String(wait) if wait == "stream" => Ok(Wait::Stream),
            Value::String(_) => Ok(Wait::Host),
            none => Err(none["none"].as_str()?.to_owned()),
        };
        let nccl = match &value[1] {
            Value::Number(version) => Ok(i32::try_from(version.as_i64()?).ok()?),
            why => Err(why.as_str()?.to_owned()),
        };
        Some(Facts { uuid: value[0].as_str()?.to_owned(), nccl, ipc })
    }
}

/// All that a rank tells has to fit a text of a round; the log of a compiler does not.
fn shortened(words: &str) -> String {
    words.chars().take(300).collect()
}

/// What the ranks do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decision {
    pub path: Path,
    /// Why it is no better one; empty when there is none.
    pub why: String,
    /// Whether no two ranks share a GPU.
    pub own_gpus: bool,
    /// Why the path that was asked for cannot be had.
    refused: Option<String>,
}

impl Decision {
    pub fn encode(&self) -> String {
        let wait = self.path.wait() == Some(Wait::Host);
        json!([self.path.name(), wait, self.why, self.refused, self.own_gpus]).to_string()
    }

    /// # Errors
    /// [`Error::System`] when the path that was asked for cannot be had.
    pub fn decode(text: &str) -> Result<Decision> {
        let value: Value = serde_json::from_str(text).unwrap_or_default();
        let words = |index: usize| value[index].as_str().map(str::to_owned);
        if let Some(refused) = words(3) {
            return Err(Error::Invalid(refused));
        }
        let wait = if value[1] == true { Wait::Host } else { Wait::Stream };
        let path = match value[0].as_str() {
            Some("alone") => Path::Alone,
            Some("nccl") => Path::Nccl,
            Some("ipc") => Path::Ipc(wait),
            Some("ipc+staged") => Path::Across(wait),
            Some("staged") => Path::Staged,
            _ => return Err(Error::Internal("what the ranks told of their GPUs is not legible".into())),
        };
        Ok(Decision { path, why: words(2).unwrap_or_default(), own_gpus: value[4] == true, refused: None })
    }
}

/// What follows from the facts of all ranks: the same on every one.
pub(super) fn decide(told: &Told, wanted: Wanted, topology: &Topology) -> Decision {
    let facts: Option<Vec<Facts>> = told.iter().map(|(_, text)| Facts::decode(text)).collect();
    let Some(facts) = facts.filter(|facts| facts.len() == topology.size()) else {
        let refused = Some("the ranks could not tell each other of their GPUs".into());
        return Decision { path: Path::Staged, why: String::new(), own_gpus: false, refused };
    };
    let own_gpus = sharers(&facts).is_none();
    let decided = |path, why: &str| Decision { path, why: why.to_owned(), own_gpus, refused: None };
    if facts.len() == 1 {
        return decided(Path::Alone, "");
    }
    let (nccl, ipc) = (no_nccl(&facts), no_ipc(&facts, topology));
    let refuse = |name: &str, why: &str| Decision {
        refused: Some(format!("DL_COMM_GPU_PATH is {name}, but {why}")),
        ..decided(Path::Staged, "")
    };
    let kernels = |wait| if topology.hosts() > 1 { Path::Across(wait) } else { Path::Ipc(wait) };
    match (wanted, nccl, ipc) {
        (Wanted::Staged, _, _) => decided(Path::Staged, "DL_COMM_GPU_PATH asks for it"),
        (Wanted::Nccl, Some(why), _) => refuse("nccl", &why),
        (Wanted::Nccl | Wanted::Auto, None, _) => decided(Path::Nccl, ""),
        (Wanted::Ipc, _, Err(why)) => refuse("ipc", &why),
        (Wanted::Ipc, _, Ok(wait)) => decided(kernels(wait), "DL_COMM_GPU_PATH asks for it"),
        (Wanted::Auto, Some(why), Ok(wait)) => decided(kernels(wait), &format!("not nccl: {why}")),
        (Wanted::Auto, Some(no_nccl), Err(no_ipc)) => {
            decided(Path::Staged, &format!("not nccl: {no_nccl}; not ipc: {no_ipc}"))
        }
    }
}

/// Two ranks that share a GPU, if there are any.
fn sharers(facts: &[Facts]) -> Option<(usize, usize)> {
    let mut owners: BTreeMap<&str, usize> = BTreeMap::new();
    facts.iter().enumerate().find_map(|(rank, fact)| owners.insert(&fact.uuid, rank).map(|one| (one, rank)))
}

/// Why NCCL cannot carry the team, if it cannot.
fn no_nccl(facts: &[Facts]) -> Option<String> {
    if let Some((one, other)) = sharers(facts) {
        return Some(format!("ranks {one} and {other} share a GPU"));
    }
    for (rank, fact) in facts.iter().enumerate() {
        match (&fact.nccl, &facts[0].nccl) {
            (Err(why), _) => return Some(format!("rank {rank}: {why}")),
            (Ok(version), Ok(first)) if version != first => {
                return Some(format!("rank {rank} has NCCL {version} and rank 0 has {first}"));
            }
            _ => {}
        }
    }
    None
}

/// Who waits where the ranks see each other's memory, or why they do not.
fn no_ipc(facts: &[Facts], topology: &Topology) -> std::result::Result<Wait, String> {
    if topology.hosts() > 1 && topology.hosts() == topology.size() {
        return Err("every rank is on a host of its own".into());
    }
    let mut all = Wait::Stream;
    for (rank, fact) in facts.iter().enumerate() {
        match &fact.ipc {
            Ok(Wait::Stream) => {}
            Ok(Wait::Host) => all = Wait::Host,
            Err(why) => return Err(format!("rank {rank}: {why}")),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fact(uuid: &str) -> Facts {
        Facts { uuid: uuid.into(), nccl: Ok(22809), ipc: Ok(Wait::Stream) }
    }

    fn decision(facts: &[Facts], hosts: &[usize], wanted: Wanted) -> Decision {
        let told: Vec<(usize, String)> = facts.iter().map(Facts::encode).enumerate().collect();
        let topology = Topology::new(0, hosts);
        let decision = decide(&told, wanted, &topology);
        assert!(decision.refused.is_some() || Decision::decode(&decision.encode()) == Ok(decision.clone()));
        decision
    }

    #[test]
    fn a_gpu_for_each_rank_is_for_nccl_and_a_shared_one_for_ipc() {
        let own = [fact("a"), fact("b")];
        assert_eq!(decision(&own, &[0, 0], Wanted::Auto).path, Path::Nccl);
        assert_eq!(decision(&own, &[0, 1], Wanted::Auto).path, Path::Nccl);
        assert_eq!(decision(&own, &[0, 0], Wanted::Ipc).path, Path::Ipc(Wait::Stream));
        assert_eq!(decision(&own, &[0, 0], Wanted::Staged).path, Path::Staged);
        let shared = decision(&[fact("a"), fact("a")], &[0, 0], Wanted::Auto);
        assert_eq!(shared.path, Path::Ipc(Wait::Stream));
        assert!(shared.why.contains("ranks 0 and 1 share a GPU"), "{}", shared.why);
        assert_eq!(decision(&[fact("a")], &[0], Wanted::Nccl).path, Path::Alone);
    }

    #[test]
    fn between_hosts_go_slices_where_hosts_have_several_ranks() {
        let shared = [fact("a"), fact("a"), fact("b")];
        assert_eq!(decision(&shared, &[0, 0, 1], Wanted::Auto).path, Path::Across(Wait::Stream));
        assert_eq!(decision(&shared, &[0, 0, 1], Wanted::Ipc).path, Path::Across(Wait::Stream));
        assert_eq!(decision(&shared, &[0, 0, 1], Wanted::Staged).path, Path::Staged);
        let host = Facts { ipc: Ok(Wait::Host), ..fact("b") };
        assert_eq!(decision(&[fact("a"), fact("a"), host], &[0, 0, 1], Wanted::Auto).path, Path::Across(Wait::Host));
        let alone = decision(&[fact("a"), fact("b")], &[0, 1], Wanted::Auto);
        assert_eq!(alone.path, Path::Nccl);
    }

    #[test]
    fn what_one_rank_lacks_nobody_uses() {
        let lacking = Facts { nccl: Err("no library".into()), ..fact("b") };
        let decided = decision(&[fact("a"), lacking.clone()], &[0, 0], Wanted::Auto);
        assert_eq!(decided.path, Path::Ipc(Wait::Stream));
        assert!(decided.why.contains("rank 1: no library"), "{}", decided.why);
        assert_eq!(decision(&[fact("a"), lacking.clone()], &[0, 1], Wanted::Auto).path, Path::Staged);
        let older = Facts { nccl: Ok(22000), ..fact("b") };
        assert_eq!(decision(&[fact("a"), older], &[0, 0], Wanted::Auto).path, Path::Ipc(Wait::Stream));
        let host = Facts { ipc: Ok(Wait::Host), ..fact("a") };
        assert_eq!(decision(&[fact("a"), host], &[0, 0], Wanted::Auto).path, Path::Ipc(Wait::Host));
        let blind = Facts { ipc: Err("a container".into()), ..fact("a") };
        let staged = decision(&[fact("a"), blind], &[0, 0], Wanted::Auto);
        assert_eq!(staged.path, Path::Staged);
        assert!(staged.why.contains("not ipc: rank 1: a container"), "{}", staged.why);
    }

    #[test]
    fn what_was_asked_for_and_cannot_be_had_is_refused_with_the_reason() {
        let shared = [fact("a"), fact("a")];
        let error = Decision::decode(&decision(&shared, &[0, 0], Wanted::Nccl).encode()).unwrap_err();
        assert!(error.to_string().contains("DL_COMM_GPU_PATH is nccl, but ranks 0 and 1 share a GPU"), "{error}");
        let error = Decision::decode(&decision(&shared, &[0, 1], Wanted::Ipc).encode()).unwrap_err();
        assert!(error.to_string().contains("a host of its own"), "{error}");
        assert!(Wanted::parse("fast").is_err());
        assert!(Wanted::ALL.into_iter().all(|wanted| Wanted::parse(wanted.name()) == Ok(wanted)));
    }
}
