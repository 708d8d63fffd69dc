//! Creation of parameter servers.
//!
//! Thread rule: any thread. The members of a group make their servers in the same order.

use xxhash_rust::xxh3::xxh3_64;

use super::collectives::{CollectiveRequest, SmallCallOptions, run};
use super::group_creation::{GroupOptions, create_group_if};
use super::point_to_point::prepare_messages;
use crate::buffer::{Buffer, View};
use crate::collective::Op;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{CallOptions, Group, Timeout};
use crate::parameter_server::{Layout, OwnMemory, ParameterServer, Rule, Shards};
use crate::transport::wait_context::with_limits;

/// The most tensors that the name of a server lists.
const LISTED: usize = 60;

/// The name of the group of a server, by which ranks with other tensors differ.
fn name(layout: &Result<Layout>) -> String {
    let Ok(layout) = layout else { return "parameter server of invalid tensors".into() };
    let (text, count) = (layout.describe(), layout.tensors().len());
    if text.len() <= LISTED {
        return format!("parameter server of {text}");
    }
    let first: String = text.chars().take(LISTED).collect();
    format!("parameter server of {count} tensors: {first}..., {:016x}", xxh3_64(text.as_bytes()))
}

/// Makes a parameter server of `tensors`, if this rank could read its arguments, on the members of `group`. Its shards begin with the values of their owners.
/// Collective.
///
/// # Errors
/// Those of [`Layout::new`] and of creating a group, which differ if the tensors do; [`Error::System`] if a rank has not
/// enough shared memory.
pub fn create_parameter_server(
    group: &Group,
    tensors: Result<Vec<Buffer>>,
    timeout: Timeout,
) -> Result<ParameterServer> {
    let ranks = group.topology().size();
    let specs = |tensors: &Vec<Buffer>| tensors.iter().map(|tensor| (tensor.len(), tensor.dtype())).collect::<Vec<_>>();
    let tensors = tensors.and_then(|tensors| tensors.iter().try_for_each(Buffer::check_source).map(|()| tensors));
    let layout = tensors.as_ref().map_err(Error::clone).and_then(|tensors| Layout::new(&specs(tensors), ranks));
    let world: Vec<usize> = (0..ranks).map(|rank| group.to_world(rank)).collect();
    let options = GroupOptions { timeout: Some(group.timeout()), ..GroupOptions::default() };
    let group = create_group_if(&name(&layout), &world, &options, layout.as_ref().map(drop).map_err(Error::clone))?;
    let (layout, tensors) = (layout?, tensors?);
    let rank = group.rank();
    let own = own_memory(&group, &layout, &tensors).and_then(|own| {
        prepare_messages(&group)?;
        Ok(own)
    });
    // 0: this rank has none.
    let mine = own.as_ref().ok().and_then(OwnMemory::offset).map_or(0, |offset| offset + 1);
    let offsets = all_gather(&group, mine, timeout)?;
    let own = own?;
    if let Some(other) = offsets.iter().position(|&offset| offset == 0) {
        let name = group.rank_name(other);
        return Err(Error::System(format!("{name} has no memory for its shards of the parameter server")));
    }
    let arenas = group.peer_memory().ok_or_else(no_memory)?;
    let (topology, bytes) = (group.topology(), layout.bytes());
    let address = |other: usize| {
        let position = topology.position(other).filter(|position| position.host == topology.host());
        match position {
            Some(_) if other == rank => Ok(Some(own.address())),
            Some(position) => {
                arenas.resolve(position.local_rank, offsets[other] - 1, bytes).map(Some).ok_or_else(no_memory)
            }
            None => Ok(None),
        }
    };
    let memory = (0..ranks).map(address).collect::<Result<Vec<_>>>();
    // Whoever cannot reach the others' memory, or start a thread, ends the server on all ranks.
    memory
        .and_then(|memory| {
            // SAFETY: the arenas live as long as the group, and the owners free their memory when all have left it.
            let shards = unsafe { Shards::new(layout, memory) };
            ParameterServer::start(std::sync::Arc::clone(&group), shards, own)
        })
        .inspect_err(|error| group.fail(error))
}

fn no_memory() -> Error {
    Error::System("the shared memory of the parameter server cannot be reached".into())
}

/// The memory of this rank's shards, with its values.
fn own_memory(group: &Group, layout: &Layout, tensors: &[Buffer]) -> Result<OwnMemory> {
    let (rank, ranks) = (group.rank(), layout.ranks());
    let own = OwnMemory::new(group.peer_memory().ok_or_else(no_memory)?, layout.bytes())?;
    let memory = (0..ranks).map(|other| (other == rank).then(|| own.address())).collect();
    // SAFETY: new memory of this length, which nobody else knows.
    let shards = unsafe { Shards::new(layout.clone(), memory) };
    with_limits("the start of a parameter server", None, None, &|| None, |wait| {
        for (index, tensor) in tensors.iter().enumerate() {
            let shard = shards.shard(index, rank);
            let from = tensor.source_at(shard.start);
            // SAFETY: the caller's memory has the elements of the tensor.
            unsafe { shards.update(rank, index, 0..shard.len(), Rule::Copy, from, wait) }?;
        }
        Ok(())
    })?;
    Ok(own)
}

fn all_gather(group: &std::sync::Arc<Group>, mine: u64, timeout: Timeout) -> Result<Vec<u64>> {
    let mut all = vec![0; group.topology().size()];
    let buffer = Buffer::new((&raw const mine).cast(), all.as_mut_ptr().cast(), 1, DType::U64);
    let name = "start of the parameter server";
    let options = || Ok(CallOptions { name: name.to_owned(), timeout, ..CallOptions::default() });
    let view = View { buffer, shape: &[] };
    // SAFETY: the numbers are used by nobody else.
    unsafe {
        run(
            group,
            CollectiveRequest::Collective(Op::ALLGATHER),
            &[view],
            Some(SmallCallOptions { name, by_name: false, timeout }),
            options,
        )
    }?;
    Ok(all)
}
