//! In which order the hosts' parts are added up, whoever does it: a tree over the hosts, in their order. Pure.
//!
//! It is that of recursive doubling (Thakur, Rabenseifner and Gropp, 2005). Of n hosts, 2^k being the largest power of two
//! that is not larger, the first 2 (n - 2^k) give way in pairs, the second host of each to the first; of the 2^k hosts that
//! are left, neighbours are added up, then pairs of neighbours, and so on. Up to three hosts that is one after the other.

/// What a host does beside the rounds of those that are left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Nothing.
    Core,
    /// It takes that host's part, and gives it the result.
    FoldsIn(usize),
    /// It gives its part to that host.
    FoldedInto(usize),
}

/// The tree, as one host sees it.
#[derive(Debug, Clone)]
pub(super) struct ReductionTree {
    hosts: usize,
    /// This host's number among those that are left, if it is.
    tree_rank: Option<usize>,
    pub role: Role,
}

impl ReductionTree {
    /// The tree over `hosts` hosts, seen by host `me`.
    pub fn new(hosts: usize, me: usize) -> ReductionTree {
        let tree = ReductionTree { hosts, tree_rank: None, role: Role::Core };
        let (place, role) = match (me < 2 * tree.pairs(), me % 2) {
            (true, 0) => (Some(me / 2), Role::FoldsIn(me + 1)),
            (true, _) => (None, Role::FoldedInto(me - 1)),
            (false, _) => (Some(me - tree.pairs()), Role::Core),
        };
        ReductionTree { tree_rank: place, role, ..tree }
    }

    /// How many rounds those that are left have.
    pub fn rounds(&self) -> usize {
        self.hosts.ilog2() as usize
    }

    /// How many hosts give way.
    fn pairs(&self) -> usize {
        self.hosts - (1 << self.rounds())
    }

    /// The host at `place` among those that are left.
    fn at(&self, place: usize) -> usize {
        if place < self.pairs() { 2 * place } else { place + self.pairs() }
    }

    /// With whom this host, one of those that are left, shares round `round`, and whether its part comes before theirs.
    pub fn partner(&self, round: usize) -> (usize, bool) {
        let place = self.tree_rank.unwrap_or(0);
        (self.at(place ^ (1 << round)), place & (1 << round) == 0)
    }

    /// All additions in order, of the part of the second host to that of the first; the last makes the whole.
    pub fn add_order(&self) -> Vec<(usize, usize)> {
        let mut additions: Vec<(usize, usize)> = (0..self.pairs()).map(|pair| (2 * pair, 2 * pair + 1)).collect();
        for round in 0..self.rounds() {
            let first = (0..1 << self.rounds()).step_by(2 << round);
            additions.extend(first.map(|place| (self.at(place), self.at(place + (1 << round)))));
        }
        additions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum of `hosts` hosts in words.
    fn sum(hosts: usize) -> String {
        let mut parts: Vec<String> = (0..hosts).map(|host| host.to_string()).collect();
        for (low, high) in ReductionTree::new(hosts, 0).add_order() {
            parts[low] = format!("({} {})", parts[low], parts[high]);
        }
        parts.swap_remove(0)
    }

    #[test]
    fn hosts_are_added_up_in_their_order() {
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
    fn partners_are_of_one_mind() {
        for hosts in 2..40 {
            let trees: Vec<ReductionTree> = (0..hosts).map(|host| ReductionTree::new(hosts, host)).collect();
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
