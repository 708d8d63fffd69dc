//! A call that is carried out again on other memory.

use smallvec::SmallVec;

use super::Call;
use crate::buffer::{Buffer, Tensor, View};
use crate::collective::check::{check_memory, check_overlap, is_plain};
use crate::collective::counts::Counts;
use crate::collective::operation::Op;

impl Call {
    /// Whether [`Call::rebind_buffers`] can reuse the call: everything in it is covered by that function's comparison.
    pub fn is_repeatable(&self) -> bool {
        self.producer.is_none()
            && self.signature == self.list_hash
            && self.counts == Counts::Even
            && self.names.is_empty()
            && self.schedule_position.is_empty()
    }

    /// Reuses the call for other memory if `op`, `name`, `by_name` and `views` equal those of its only tower. Returns false, and
    /// changes nothing, if they differ or if [`Call::new`] would reject the memory.
    pub fn rebind_buffers(&mut self, op: Op, name: &str, by_name: bool, views: &[View<'_>]) -> bool {
        let tower = match &self.replicas[..] {
            // A barrier.
            [] => &[][..],
            [tower] => tower,
            _ => return false,
        };
        // Skip memcmp for empty names: their dangling pointers make it slow.
        let same_name = self.name.len() == name.len() && (name.is_empty() || self.name == name);
        let matches = self.op == op && tower.len() == views.len() && same_name && self.by_name == by_name;
        if !matches || !tower.iter().zip(views).all(|(tensor, view)| tensor.matches(view)) {
            return false;
        }
        self.rebind_memory(views.iter().map(|view| (view.buffer.source_at(0), view.buffer.dst())))
    }

    /// Reuses the call of one tower for other memory: the sources and destinations of its tensors. Returns false, and
    /// changes nothing, if [`Call::new`] would reject it.
    #[inline]
    pub fn rebind_memory(&mut self, memory: impl Iterator<Item = (*const u8, *mut u8)> + Clone) -> bool {
        let tensors = self.replicas.iter_mut().flatten();
        if tensors.zip(memory.clone()).all(|(tensor, (src, dst))| tensor.buffer.is_at(src, dst)) {
            return true;
        }
        if let [tower] = &mut self.replicas[..]
            && let ([tensor], Some((src, dst))) = (&mut tower[..], memory.clone().next())
        {
            let buffer = tensor.buffer.moved_to(src, dst);
            if is_plain(self.op, &buffer, &self.config) {
                tensor.buffer = buffer;
                return true;
            }
        }
        self.rebind_other_memory(&memory.collect::<SmallVec<[_; 4]>>())
    }

    #[cold]
    fn rebind_other_memory(&mut self, memory: &[(*const u8, *mut u8)]) -> bool {
        let op = self.op;
        let before: SmallVec<[Buffer; 4]> = self.replicas.iter().flatten().map(|tensor| tensor.buffer).collect();
        for (tensor, &(src, dst)) in self.replicas.iter_mut().flatten().zip(memory) {
            tensor.buffer = tensor.buffer.moved_to(src, dst);
        }
        let is_valid = |(index, tensor): (usize, &Tensor)| {
            check_memory(op, &tensor.buffer, self.counts.of(index), &self.config).is_ok()
        };
        let passes = self.tensors(0).iter().enumerate().all(is_valid)
            && check_overlap(op, &self.replicas, &self.counts, &self.config).is_ok();
        if !passes {
            self.replicas.iter_mut().flatten().zip(before).for_each(|(tensor, buffer)| tensor.buffer = buffer);
        }
        passes
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::collective::call_config::CallConfig;
    use crate::dtype::DType;
    use crate::group_key::GroupKey;
    use crate::topology::Topology;

    #[test]
    fn a_call_takes_other_memory_and_refuses_bad_memory_every_time() {
        let config = CallConfig::new(&Topology::new(0, &[0, 0]), GroupKey::team(0), 1, 4096);
        let at = |src: usize, dst: usize| {
            let (src, dst) = (std::ptr::without_provenance(src), std::ptr::without_provenance_mut(dst));
            Buffer::new(src, dst, 16, DType::F32)
        };
        for tensors in [1usize, 2] {
            // The tensors are apart from each other.
            let list =
                |src: usize, dst: usize| (0..tensors).map(move |index| at(src + index * 8192, dst + index * 8192));
            let replicas = vec![list(4096, 4096).map(|buffer| Tensor::new(buffer, &[])).collect()];
            let mut call = Call::new(Op::MEAN, replicas, Counts::Even, "a", "", String::new(), config.clone()).unwrap();
            let mut rebind = |name: &str, src: usize, dst: usize| {
                let buffers: Vec<_> = list(src, dst).collect();
                let views: Vec<_> = buffers.iter().map(|&buffer| View { buffer, shape: &[] }).collect();
                call.rebind_buffers(Op::MEAN, name, false, &views)
            };
            assert!(rebind("a", 4096, 4096) && rebind("a", 4096, 4160) && !rebind("b", 4096, 4160));
            // Misaligned, or the result overlaps the source.
            for (src, dst) in [(4097, 4097), (4096, 4100)] {
                assert!(!rebind("a", src, dst) && !rebind("a", src, dst), "{src} {dst}");
            }
            let memory = |tensor: &Tensor| (tensor.buffer.source_at(0).addr(), tensor.buffer.dst().addr());
            assert!(
                call.tensors(0)
                    .iter()
                    .enumerate()
                    .all(|(index, tensor)| { memory(tensor) == (4096 + index * 8192, 4160 + index * 8192) })
            );
        }
    }
}
