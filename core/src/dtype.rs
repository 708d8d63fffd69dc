//! The element types of tensors: names, sizes, codes. Pure.

use crate::error::{Error, Result};

/// An element type; the discriminants are those of `dlDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum DType {
    /// IEEE binary16.
    F16 = 0,
    /// bfloat16: the upper half of a binary32.
    BF16 = 1,
    /// IEEE binary32.
    F32 = 2,
    /// IEEE binary64.
    F64 = 3,
    /// Signed, 8 bits.
    I8 = 4,
    /// Unsigned, 8 bits.
    U8 = 5,
    /// Signed, 32 bits.
    I32 = 6,
    /// Signed, 64 bits.
    I64 = 7,
    /// One byte, 0 or 1; has no mean.
    Bool = 8,
}

impl DType {
    /// All element types, ordered by code.
    pub const ALL: [DType; 9] =
        [DType::F16, DType::BF16, DType::F32, DType::F64, DType::I8, DType::U8, DType::I32, DType::I64, DType::Bool];

    /// The type with this `dlDataType_t` code.
    ///
    /// # Errors
    /// [`Error::DType`] for an unknown code.
    pub fn from_code(code: i32) -> Result<DType> {
        let found = usize::try_from(code).ok().and_then(|index| DType::ALL.get(index).copied());
        found.ok_or_else(|| Error::DType(format!("no element type has the code {code}; dl_comm.h lists 0 to 8")))
    }

    /// Size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 | DType::Bool => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// The name in error messages.
    pub fn name(self) -> &'static str {
        match self {
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            DType::F32 => "float32",
            DType::F64 => "float64",
            DType::I8 => "int8",
            DType::U8 => "uint8",
            DType::I32 => "int32",
            DType::I64 => "int64",
            DType::Bool => "bool",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_positions() {
        for (code, dtype) in (0..).zip(DType::ALL) {
            assert_eq!(DType::from_code(code), Ok(dtype));
        }
        assert!(DType::from_code(9).is_err());
        assert!(DType::from_code(-1).is_err());
    }
}
