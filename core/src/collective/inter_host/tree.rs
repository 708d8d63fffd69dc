//! The order in which the hosts' partial sums are added: a tree over the hosts in their order. Pure.
//!
//! It is the tree of recursive doubling (Thakur, Rabenseifner and Gropp, 2005). With n hosts and 2^k the largest power
//! of two up to n, the first 2 (n - 2^k) hosts fold in pairs: one host of a pair sends its data to the other, which takes
//! part in the rounds. The first and the second host of each pair take turns, from slice to slice: so no link carries
//! more than the others.
//! The 2^k core hosts are then added in pairs of neighbors, pairs of pairs, and so on. For up to three hosts the order
//! is sequential.

/// The role of a host before and after the rounds of the core hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// A core host without a folded partner.
    Core,
    /// A core host that adds this host's data and sends it the result.
    FoldsIn(usize),
    /// A host that sends its data to this core host.
    FoldedInto(usize),
}

/// The tree, seen by one host.
#[derive(Debug, Clone)]
pub(super) struct ReductionTree {
    hosts: usize,
    /// This host's index among the core hosts, if it is one.
    tree_rank: Option<usize>,
    pub role: Role,
    /// The host of each pair that takes part in the rounds: 0 or 1.
    turn: usize,
}

impl ReductionTree {
    /// The tree over `hosts` hosts, seen by host `me`. `turn`: which host of each pair takes part in the rounds.
    pub fn new(hosts: usize, me: usize, turn: usize) -> ReductionTree {
        let tree = ReductionTree { hosts, tree_rank: None, role: Role::Core, turn };
        let (is_paired, partner) = (me < 2 * tree.pairs(), me ^ 1);
        let (tree_rank, role) = match is_paired {
            true if me % 2 == turn => (Some(me / 2), Role::FoldsIn(partner)),
            true => (None, Role::FoldedInto(partner)),
            false => (Some(me - tree.pairs()), Role::Core),
        };
        ReductionTree { tree_rank, role, ..tree }
    }

    /// The number of rounds of the core hosts.
    pub fn rounds(&self) -> usize {
        self.hosts.ilog2() as usize
    }

    /// The number of folded hosts.
    fn pairs(&self) -> usize {
        self.hosts - (1 << self.rounds())
    }

    /// The core host with index `tree_rank`.
    fn at(&self, tree_rank: usize) -> usize {
        if tree_rank < self.pairs() { 2 * tree_rank + self.turn } else { tree_rank + self.pairs() }
    }

    /// This core host's partner in round `round`, and whether this host's data is the first operand.
    pub fn partner(&self, round: usize) -> (usize, bool) {
        let tree_rank = self.tree_rank.unwrap_or(0);
        (self.at(tree_rank ^ (1 << round)), tree_rank & (1 << round) == 0)
    }

    /// All additions in order: the data of the second host is added to that of the first. The last one completes the
    /// sum.
    pub fn add_order(&self) -> Vec<(usize, usize)> {
        let mut additions: Vec<(usize, usize)> = (0..self.pairs()).map(|pair| (2 * pair, 2 * pair + 1)).collect();
        // The sum of a pair is with its first host.
        let first = ReductionTree { turn: 0, ..*self };
        for round in 0..self.rounds() {
            let low = (0..1 << self.rounds()).step_by(2 << round);
            additions.extend(low.map(|tree_rank| (first.at(tree_rank), first.at(tree_rank + (1 << round)))));
        }
        additions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The order of the sum over `hosts` hosts, as a text with parentheses.
    fn sum(hosts: usize) -> String {
        let mut parts: Vec<String> = (0..hosts).map(|host| host.to_string()).collect();
        for (low, high) in ReductionTree::new(hosts, 0, hosts % 2).add_order() {
            parts[low] = format!("({} {})", parts[low], parts[high]);
        }
        parts.swap_remove(0)
    }

    #[test]
    fn hosts_are_added_in_order() {
        assert_eq!(sum(2), "(0 1)");
        assert_eq!(sum(3), "((0 1) 2)");
        assert_eq!(sum(4), "((0 1) (2 3))");
        assert_eq!(sum(5), "(((0 1) 2) (3 4))");
        assert_eq!(sum(7), "(((0 1) (2 3)) ((4 5) 6))");
        for hosts in 2..40 {
            let digits =
                |text: &str| text.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect();
            let order: Vec<usize> = digits(&sum(hosts));
            assert_eq!(order, (0..hosts).collect::<Vec<_>>());
        }
    }

    #[test]
    fn partners_agree_on_pairs_and_order() {
        for (hosts, turn) in (2..40).flat_map(|hosts| [(hosts, 0), (hosts, 1)]) {
            let trees: Vec<ReductionTree> = (0..hosts).map(|host| ReductionTree::new(hosts, host, turn)).collect();
            for (host, tree) in trees.iter().enumerate() {
                match tree.role {
                    Role::FoldsIn(other) => assert_eq!(trees[other].role, Role::FoldedInto(host)),
                    Role::FoldedInto(other) => assert_eq!(trees[other].role, Role::FoldsIn(host)),
                    Role::Core => {}
                }
                if tree.tree_rank.is_some() {
                    for round in 0..tree.rounds() {
                        let (other, low) = tree.partner(round);
                        assert_eq!(trees[other].partner(round), (host, !low));
                        assert_eq!(low, host < other);
                    }
                }
            }
        }
    }
}
