//! The names of a call's tensors: for messages, and to compare between ranks.

use std::borrow::Cow;
use std::iter;

/// Ends the names for messages. What follows must be the same on all ranks.
const SEPARATOR: char = '\u{1f}';

/// A line with a name for each tensor, or nothing. A second list may follow after [`SEPARATOR`], with a line for each
/// tensor: the names that the ranks compare, as part of the call's signature. If that list is empty, they compare the
/// names for messages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorNames {
    text: String,
    /// The bytes of the names for messages.
    shown: usize,
}

impl TensorNames {
    /// Whether there are no names.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Both lists, as they were given.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The names for messages, by tensor.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.text[..self.shown].lines()
    }

    /// The names that the ranks compare, a line each; None if they compare none.
    pub fn compared(&self) -> Option<&str> {
        let compared = self.text[self.shown..].strip_prefix(SEPARATOR)?;
        Some(if compared.is_empty() { &self.text[..self.shown] } else { compared })
    }

    /// The name of a tensor and how messages show it: with the name that the ranks compare, if it is another one.
    pub fn described(&self) -> impl Iterator<Item = Cow<'_, str>> {
        let mut compared = self.compared().unwrap_or_default().lines();
        let mut shown = self.lines();
        iter::from_fn(move || {
            let (shown, compared) = (shown.next(), compared.next());
            let name = shown.or(compared)?;
            Some(match compared {
                Some(compared) if !compared.is_empty() && compared != name => format!("{name} = {compared}").into(),
                _ => name.into(),
            })
        })
    }
}

impl From<String> for TensorNames {
    fn from(text: String) -> TensorNames {
        let shown = text.find(SEPARATOR).unwrap_or(text.len());
        TensorNames { text, shown }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_list_is_compared_and_the_first_one_shown() {
        let names = |text: &str| TensorNames::from(text.to_owned());
        let described = |names: &TensorNames| names.described().map(Cow::into_owned).collect::<Vec<_>>();
        let plain = names("a\nb");
        assert_eq!((plain.compared(), described(&plain)), (None, vec!["a".to_owned(), "b".to_owned()]));
        let same = names("a\nb\u{1f}");
        assert_eq!((same.compared(), described(&same)), (Some("a\nb"), described(&plain)));
        let other = names("dense_7\nb\u{1f}dense\nb");
        assert_eq!(other.compared(), Some("dense\nb"));
        assert_eq!(other.lines().collect::<Vec<_>>(), ["dense_7", "b"]);
        assert_eq!(described(&other), ["dense_7 = dense", "b"]);
        assert_eq!(names("").compared(), None);
    }
}
