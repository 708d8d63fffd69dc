//! The bytes of values that ranks exchange: serde and postcard.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// The bytes of `value`.
///
/// # Errors
/// [`Error::Internal`]
pub fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>> {
    postcard::to_allocvec(value).map_err(|error| Error::Internal(format!("cannot encode a message: {error}")))
}

/// The value at the start of `bytes`.
///
/// # Errors
/// [`Error::Internal`] when there is none.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| Error::Internal(format!("cannot decode a message: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_and_other_bytes_are_errors() {
        let value = (3u64, Some("x y".to_owned()), vec![Ok::<i32, String>(-1), Err("no".to_owned())]);
        let mut bytes = encode(&value).unwrap_or_default();
        bytes.push(0);
        assert_eq!(decode(&bytes), Ok(value));
        assert!(decode::<(u64, Option<String>)>(&[1, 1, 200]).is_err());
        assert!(decode::<u64>(&[]).is_err());
    }
}
