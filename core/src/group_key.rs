//! The key and the members of a group. Plain data.

use std::fmt;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use crate::error::{Error, Result};

/// The name of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GroupName {
    /// The group of all ranks for broadcasts, barriers and allreduces outside of training.
    Control,
    /// A team, by number.
    Team(i32),
    /// A group with the name that its members gave.
    Named(Arc<str>),
}

impl GroupName {
    /// The end of a call's title in messages: ` on team 3`; empty for the control group.
    pub fn suffix(&self) -> String {
        if *self == GroupName::Control { String::new() } else { format!(" on {self}") }
    }

    /// What a rank has done that takes part in no further call.
    pub fn departure(&self) -> &'static str {
        match self {
            GroupName::Control | GroupName::Team(_) => "has called finalize",
            GroupName::Named(_) => "has freed the group",
        }
    }

    /// The start of the name of a thread, which Linux keeps to 15 characters.
    pub fn thread_label(&self) -> String {
        match self {
            GroupName::Control => "dlcomm-c".into(),
            GroupName::Team(team) => format!("dlcomm-{team}"),
            GroupName::Named(_) => "dlcomm-g".into(),
        }
    }

    /// Its name in JSON: the number of a team (-1 for the control group), or the text.
    pub fn json(&self) -> serde_json::Value {
        match self {
            GroupName::Control => (-1).into(),
            GroupName::Team(team) => (*team).into(),
            GroupName::Named(name) => (**name).into(),
        }
    }
}

impl fmt::Display for GroupName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GroupName::Control => write!(formatter, "the control team"),
            GroupName::Team(team) => write!(formatter, "team {team}"),
            GroupName::Named(name) => write!(formatter, "group '{name}'"),
        }
    }
}

/// Names a group on all its members, and nowhere else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupKey {
    name: GroupName,
    hash: u64,
}

impl GroupKey {
    /// The key of the group number `generation` that was made with this name and these members.
    pub fn new(name: GroupName, members: &Members, generation: u64) -> GroupKey {
        let mut hash = Xxh3::new();
        hash.update(name.to_string().as_bytes());
        hash.update(&generation.to_le_bytes());
        if let Members::List { world, .. } = members {
            world.iter().for_each(|rank| hash.update(&(*rank as u64).to_le_bytes()));
        }
        // 0 marks a free entry of a directory.
        GroupKey { name, hash: hash.digest().max(1) }
    }

    /// The key of team `team`, or of the control group for -1. Both have all ranks of the job as members.
    pub fn team(team: i32) -> GroupKey {
        let name = if team < 0 { GroupName::Control } else { GroupName::Team(team) };
        GroupKey::new(name, &Members::World { size: 0, me: 0 }, 0)
    }

    /// The name.
    pub fn name(&self) -> &GroupName {
        &self.name
    }

    /// A hash of name, members and generation. Not 0.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The number of the group in timelines and the plugin's lines: that of a team, -1 for the control group, and a
    /// number above those of teams for other groups.
    pub fn number(&self) -> i32 {
        match self.name {
            GroupName::Control => -1,
            GroupName::Team(team) => team,
            GroupName::Named(_) => (self.hash >> 33) as i32 | 1 << 30,
        }
    }
}

/// The members of a group, as seen by one of them. The only place where ranks are translated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Members {
    /// All ranks of the job, in order.
    World {
        /// The number of ranks.
        size: usize,
        /// This rank.
        me: usize,
    },
    /// Some ranks.
    List {
        /// The rank in the job of each member.
        world: Arc<[usize]>,
        /// The rank of this process in the group.
        me: usize,
    },
}

impl Members {
    /// The members `ranks` (ranks of a job of `size` ranks), of which rank `me` of the job is one.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a rank is not in the job or listed twice, or `me` is not listed.
    pub fn list(ranks: &[usize], me: usize, size: usize) -> Result<Members> {
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if let Some(rank) = sorted.iter().find(|&&rank| rank >= size) {
            return Err(Error::Invalid(format!("ranks: there is no rank {rank} in a job of {size}")));
        }
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Invalid(format!("ranks: rank {} is listed twice", pair[0])));
        }
        let me = ranks.iter().position(|&rank| rank == me).ok_or_else(|| {
            Error::Invalid(format!("ranks: rank {me}, which makes the group, is not listed; only members make a group"))
        })?;
        Ok(Members::List { world: ranks.into(), me })
    }

    /// The number of members.
    pub fn size(&self) -> usize {
        match self {
            Members::World { size, .. } => *size,
            Members::List { world, .. } => world.len(),
        }
    }

    /// The rank of this process in the group.
    pub fn me(&self) -> usize {
        match self {
            Members::World { me, .. } | Members::List { me, .. } => *me,
        }
    }

    /// The rank in the job of the group's rank `rank`.
    ///
    /// # Panics
    /// If there is no such member.
    pub fn to_world(&self, rank: usize) -> usize {
        match self {
            Members::World { .. } => rank,
            Members::List { world, .. } => world[rank],
        }
    }

    /// The rank in the group of the job's rank `rank`, if it is a member.
    pub fn of_world(&self, rank: usize) -> Option<usize> {
        match self {
            Members::World { size, .. } => (rank < *size).then_some(rank),
            Members::List { world, .. } => world.iter().position(|&member| member == rank),
        }
    }

    /// The ranks in the job of all members, in order.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        (0..self.size()).map(|rank| self.to_world(rank))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn wrong_lists_are_refused() {
        let refused = |ranks: &[usize], text: &str| {
            let refused = Members::list(ranks, 1, 4);
            assert!(matches!(&refused, Err(Error::Invalid(found)) if found.contains(text)), "{refused:?}");
        };
        refused(&[1, 4], "no rank 4");
        refused(&[1, 2, 1], "rank 1 is listed twice");
        refused(&[0, 2], "rank 1, which makes the group, is not listed");
        refused(&[], "not listed");
    }

    proptest! {
        #[test]
        fn translations_are_inverse(size in 1usize..9, seed: u64, me in 0usize..9) {
            let mut ranks: Vec<usize> = (0..size).filter(|rank| seed >> rank & 1 == 1 || *rank == me % size).collect();
            let turn = (seed >> 32) as usize % ranks.len();
            ranks.rotate_left(turn);
            let members = Members::list(&ranks, me % size, size);
            let members = members.map_err(|error| TestCaseError::fail(error.to_string()))?;
            prop_assert_eq!(members.to_world(members.me()), me % size);
            prop_assert_eq!(members.iter().collect::<Vec<_>>(), ranks);
            for rank in 0..size {
                prop_assert!(members.of_world(rank).is_none_or(|member| members.to_world(member) == rank));
            }
            let world = Members::World { size, me: me % size };
            prop_assert!((0..size).all(|rank| world.of_world(rank) == Some(rank) && world.to_world(rank) == rank));
            prop_assert_eq!(world.of_world(size), None);
        }
    }

    #[test]
    fn keys_differ_by_name_members_and_generation() {
        let world = Members::World { size: 3, me: 0 };
        let list = |ranks: &[usize]| Members::List { world: ranks.into(), me: 0 };
        let named = |name: &str| GroupName::Named(name.into());
        let keys = [
            GroupKey::new(named("a"), &world, 0),
            GroupKey::new(named("a"), &world, 1),
            GroupKey::new(named("b"), &world, 0),
            GroupKey::new(named("a"), &list(&[0, 1]), 0),
            GroupKey::new(named("a"), &list(&[1, 0]), 0),
            GroupKey::new(GroupName::Team(0), &world, 0),
        ];
        let mut hashes: Vec<u64> = keys.iter().map(GroupKey::hash).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), keys.len());
    }
}
