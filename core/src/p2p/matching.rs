//! Matching of messages and receives. Pure.
//!
//! A message goes to the first posted receive that fits; a receive takes the first message that fits. Each context (a
//! group) has lists of its own.

use std::collections::VecDeque;

use crate::hashed_map::HashedMap;

/// Sources (ranks of the job) and tags that a receive accepts; `None` for any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    /// The source.
    pub source: Option<usize>,
    /// The tag.
    pub tag: Option<u32>,
}

impl Pattern {
    fn fits(self, source: usize, tag: u32) -> bool {
        self.source.is_none_or(|wanted| wanted == source) && self.tag.is_none_or(|wanted| wanted == tag)
    }
}

/// The receives `R` and messages `M` of one context, each with what it is matched by.
struct Context<R, M> {
    posted: VecDeque<(Pattern, R)>,
    early: VecDeque<(usize, u32, M)>,
}

/// Receives without a message, and messages without a receive.
pub struct Matching<R, M> {
    contexts: HashedMap<Context<R, M>>,
}

impl<R, M> Default for Matching<R, M> {
    fn default() -> Self {
        Matching { contexts: HashedMap::default() }
    }
}

impl<R, M> Matching<R, M> {
    fn context(&mut self, context: u64) -> &mut Context<R, M> {
        let empty = || Context { posted: VecDeque::new(), early: VecDeque::new() };
        self.contexts.entry(context).or_insert_with(empty)
    }

    /// Whether the context has neither receives nor messages.
    #[inline]
    pub fn is_empty(&self, context: u64) -> bool {
        self.contexts.get(&context).is_none_or(|context| context.posted.is_empty() && context.early.is_empty())
    }

    /// Removes the first receive that fits a message.
    pub fn receive_for(&mut self, context: u64, source: usize, tag: u32) -> Option<R> {
        let posted = &mut self.contexts.get_mut(&context)?.posted;
        let index = posted.iter().position(|(pattern, _)| pattern.fits(source, tag))?;
        posted.remove(index).map(|(_, receive)| receive)
    }

    /// Removes the first message that fits a receive, with its source and tag.
    pub fn message_for(&mut self, context: u64, pattern: Pattern) -> Option<(usize, u32, M)> {
        let early = &mut self.contexts.get_mut(&context)?.early;
        let index = early.iter().position(|&(source, tag, _)| pattern.fits(source, tag))?;
        early.remove(index)
    }

    /// Adds a receive that no message fits.
    pub fn post(&mut self, context: u64, pattern: Pattern, receive: R) {
        self.context(context).posted.push_back((pattern, receive));
    }

    /// Adds a message that no receive fits.
    pub fn keep(&mut self, context: u64, source: usize, tag: u32, message: M) {
        self.context(context).early.push_back((source, tag, message));
    }

    /// The posted receives.
    pub fn posted(&self) -> impl Iterator<Item = (Pattern, &R)> {
        self.contexts.values().flat_map(|context| context.posted.iter().map(|(pattern, receive)| (*pattern, receive)))
    }

    /// Removes the early message of `source` that is the one.
    pub fn forget_message(&mut self, context: u64, source: usize, is_it: impl Fn(&M) -> bool) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.early.retain(|(from, _, message)| *from != source || !is_it(message));
        }
    }

    /// Removes the posted receives for which `fails` has an error, and forgets contexts without anything.
    pub fn fail_receives<E>(&mut self, mut fails: impl FnMut(Pattern, &R) -> Option<E>) -> Vec<(Pattern, R, E)> {
        let mut failed = Vec::new();
        for context in self.contexts.values_mut() {
            let mut index = 0;
            while let Some((pattern, receive)) = context.posted.get(index) {
                match fails(*pattern, receive) {
                    None => index += 1,
                    Some(error) => {
                        failed.extend(context.posted.remove(index).map(|(pattern, receive)| (pattern, receive, error)));
                    }
                }
            }
        }
        self.contexts.retain(|_, context| !context.posted.is_empty() || !context.early.is_empty());
        failed
    }

    /// Removes the early messages for which `fails` has an error.
    pub fn fail_messages<E>(&mut self, mut fails: impl FnMut(&M) -> Option<E>) -> Vec<(M, E)> {
        let mut failed = Vec::new();
        for context in self.contexts.values_mut() {
            let mut index = 0;
            while let Some((_, _, message)) = context.early.get(index) {
                match fails(message) {
                    None => index += 1,
                    Some(error) => failed.extend(context.early.remove(index).map(|(_, _, message)| (message, error))),
                }
            }
        }
        failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against the definition: whenever a message and a receive fit, the earliest pair is matched.
        #[test]
        fn the_first_that_fits_is_matched(steps in prop::collection::vec((any::<bool>(), 0u64..2, 0usize..3, 0u32..3, any::<bool>(), any::<bool>()), 0..60)) {
            let mut matching = Matching::<usize, usize>::default();
            let (mut posted, mut early) = (Vec::new(), Vec::new());
            for (number, (sends, context, source, tag, any_source, any_tag)) in steps.into_iter().enumerate() {
                let pattern = Pattern { source: (!any_source).then_some(source), tag: (!any_tag).then_some(tag) };
                if sends {
                    let fits = |&(other, pattern, _): &(u64, Pattern, usize)| other == context && pattern.fits(source, tag);
                    let expected = posted.iter().position(fits).map(|index| posted.remove(index).2);
                    prop_assert_eq!(matching.receive_for(context, source, tag), expected);
                    if expected.is_none() {
                        early.push((context, source, tag, number));
                        matching.keep(context, source, tag, number);
                    }
                } else {
                    let fits = |&(other, source, tag, _): &(u64, usize, u32, usize)| other == context && pattern.fits(source, tag);
                    let expected = early.iter().position(fits).map(|index| early.remove(index)).map(|(_, source, tag, number)| (source, tag, number));
                    prop_assert_eq!(matching.message_for(context, pattern), expected);
                    if expected.is_none() {
                        posted.push((context, pattern, number));
                        matching.post(context, pattern, number);
                    }
                }
            }
        }
    }
}
