//! A send to the parameter server, or a receive from it. Plain data.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::layout::Layout;
use super::rule::Rule;
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::group::Timeout;

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Action {
    /// Sends updates.
    Send(Rule),
    /// Receives the values.
    Receive,
}

impl Action {
    /// Whether it sends the caller's elements.
    pub fn sends_elements(self) -> bool {
        matches!(self, Action::Send(rule) if rule.has_elements())
    }
}

/// An operation on tensors of a server that follow each other.
pub struct Operation {
    /// What it does.
    pub action: Action,
    /// The tensors, by their position in the server's list.
    pub tensors: Range<usize>,
    /// The caller's memory for each: the source of a send, the destination of a receive. Empty if the rule takes no
    /// elements.
    pub buffers: Vec<Buffer>,
    /// The deadline.
    pub timeout: Timeout,
}

impl Operation {
    /// Its name in messages.
    pub fn describe(&self) -> String {
        let Range { start, end } = self.tensors;
        let what = match self.action {
            Action::Send(_) => "a send to",
            Action::Receive => "a receive from",
        };
        match end - start {
            1 => format!("{what} the parameter server (tensor {start})"),
            _ => format!("{what} the parameter server (tensors {start} to {})", end - 1),
        }
    }

    /// Stands for its name and its bytes, which depend on nothing else.
    pub fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (matches!(self.action, Action::Send(_)), self.has_elements(), &self.tensors).hash(&mut hasher);
        hasher.finish()
    }

    /// The bytes of the caller's memory.
    pub fn bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.len() * buffer.dtype().size()).sum()
    }

    /// Whether it has the caller's memory.
    pub fn has_elements(&self) -> bool {
        self.action == Action::Receive || self.action.sends_elements()
    }

    /// The memory of the caller's elements from `element` of tensor `tensor` on; null if there are none.
    pub fn memory(&self, tensor: usize, element: usize) -> *mut u8 {
        let Some(buffer) = self.buffers.get(tensor - self.tensors.start) else { return std::ptr::null_mut() };
        match self.action {
            Action::Send(_) => buffer.source_at(element).cast_mut(),
            Action::Receive => buffer.dst().wrapping_add(element * buffer.dtype().size()),
        }
    }

    /// Checks the operation against the tensors of the server.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::DType`], which name the tensor.
    pub(super) fn check(&self, layout: &Layout) -> Result<()> {
        let (tensors, Range { start, end }) = (layout.tensors(), self.tensors.clone());
        let Some(stored) = tensors.get(start..end).filter(|stored| !stored.is_empty()) else {
            return Err(Error::Invalid(format!(
                "there are no tensors {start} to {end} in a parameter server of {}",
                tensors.len()
            )));
        };
        if let Action::Send(rule) = self.action {
            stored.iter().try_for_each(|stored| rule.check(stored.dtype))?;
        }
        if !self.has_elements() {
            return Ok(());
        }
        if self.buffers.len() != stored.len() {
            return Err(Error::Invalid(format!(
                "{} has {} buffers; it needs one for each tensor",
                self.describe(),
                self.buffers.len()
            )));
        }
        for (index, (buffer, stored)) in self.buffers.iter().zip(stored).enumerate() {
            let index = start + index;
            if buffer.dtype() != stored.dtype {
                return Err(Error::DType(format!(
                    "tensor {index} of the parameter server has elements of {}, not {}",
                    stored.dtype.name(),
                    buffer.dtype().name()
                )));
            }
            if buffer.len() != stored.len {
                return Err(Error::Invalid(format!(
                    "tensor {index} of the parameter server has {} elements, not {}",
                    stored.len,
                    buffer.len()
                )));
            }
            match self.action {
                Action::Send(_) => buffer.check_source()?,
                Action::Receive => buffer.check_destination_of(buffer.len())?,
            }
        }
        Ok(())
    }
}
