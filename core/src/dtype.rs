//! The element types of tensors: names, sizes, codes. Pure.

use crate::error::{Error, Result};

/// Defines [`DType`] from a table; the order is that of the codes.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $dtype:ident = $code:literal, $name:literal, $size:literal, $align:literal;)*) => {
        /// An element type; the discriminants are those of `dlDataType_t`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DType {
            $($(#[$doc])* $dtype = $code,)*
        }

        impl DType {
            /// All element types, ordered by code.
            pub const ALL: [DType; [$($code),*].len()] = [$(DType::$dtype),*];

            /// Size of one element in bytes.
            #[inline]
            pub fn size(self) -> usize {
                // For short calls a table is faster than a jump.
                const SIZES: [usize; DType::ALL.len()] = [$($size),*];
                SIZES[self as usize]
            }

            /// Alignment of an element in bytes.
            #[inline]
            pub fn align(self) -> usize {
                const ALIGNMENTS: [usize; DType::ALL.len()] = [$($align),*];
                ALIGNMENTS[self as usize]
            }

            /// The name in error messages.
            pub fn name(self) -> &'static str {
                match self {
                    $(DType::$dtype => $name,)*
                }
            }
        }
    };
}

dtypes! {
    /// IEEE binary16.
    F16 = 0, "float16", 2, 2;
    /// bfloat16: the upper half of a binary32.
    BF16 = 1, "bfloat16", 2, 2;
    /// IEEE binary32.
    F32 = 2, "float32", 4, 4;
    /// IEEE binary64.
    F64 = 3, "float64", 8, 8;
    /// Signed, 8 bits.
    I8 = 4, "int8", 1, 1;
    /// Unsigned, 8 bits.
    U8 = 5, "uint8", 1, 1;
    /// Signed, 32 bits.
    I32 = 6, "int32", 4, 4;
    /// Signed, 64 bits.
    I64 = 7, "int64", 8, 8;
    /// One byte, 0 or 1; has bit operations only.
    Bool = 8, "bool", 1, 1;
    /// Unsigned, 16 bits.
    U16 = 9, "uint16", 2, 2;
    /// Unsigned, 32 bits.
    U32 = 10, "uint32", 4, 4;
    /// Unsigned, 64 bits.
    U64 = 11, "uint64", 8, 8;
    /// Signed, 16 bits.
    I16 = 12, "int16", 2, 2;
    /// Real and imaginary part, each an IEEE binary32.
    Complex64 = 13, "complex64", 8, 4;
    /// Real and imaginary part, each an IEEE binary64.
    Complex128 = 14, "complex128", 16, 8;
}

impl DType {
    /// The type with this `dlDataType_t` code.
    ///
    /// # Errors
    /// [`Error::DType`] for an unknown code.
    #[inline(always)]
    pub fn from_code(code: i32) -> Result<DType> {
        match usize::try_from(code).ok().and_then(|index| DType::ALL.get(index)) {
            Some(&dtype) => Ok(dtype),
            None => Err(unknown(code)),
        }
    }

    /// Whether it is floating point; complex numbers are not.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
    }

    /// Whether an element can be NaN: floating point and complex numbers. All bits are set in one of its NaNs.
    pub fn has_nan(self) -> bool {
        self.is_float() || matches!(self, DType::Complex64 | DType::Complex128)
    }
}

#[cold]
fn unknown(code: i32) -> Error {
    let last = DType::ALL.len() - 1;
    Error::DType(format!("no element type has the code {code}; dl_comm.h lists 0 to {last}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_positions() {
        for (code, dtype) in (0..).zip(DType::ALL) {
            assert_eq!(dtype as i32, code);
            assert_eq!(DType::from_code(code), Ok(dtype));
        }
        assert!(matches!(DType::from_code(15), Err(Error::DType(text)) if text.contains("0 to 14")));
        assert!(DType::from_code(-1).is_err());
    }

    #[test]
    fn elements_are_powers_of_two_and_aligned() {
        for dtype in DType::ALL {
            assert!(dtype.size().is_power_of_two() && dtype.size().is_multiple_of(dtype.align()), "{dtype:?}");
        }
    }
}
