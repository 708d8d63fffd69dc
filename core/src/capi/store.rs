//! The store of a C program or a binding, as a [`Store`].

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::offset_of;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::transport::WaitContext;
use crate::transport::store::Store;

/// `DL_COMM_STORE_NOT_YET` of `dl_comm.h`.
const NOT_YET: c_int = 1;
/// How long a wait stays in the store before it looks at its limits, in seconds.
const SLICE_S: f64 = 0.1;
/// The size of the first buffer for a value.
const FIRST_BUFFER: usize = 4096;

type Set = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_void, usize) -> c_int;
type Get = unsafe extern "C" fn(*mut c_void, *const c_char, f64, *mut c_void, usize, *mut usize) -> c_int;
type Add = unsafe extern "C" fn(*mut c_void, *const c_char, i64, *mut i64) -> c_int;
type Remove = unsafe extern "C" fn(*mut c_void, *const c_char) -> c_int;
type Describe = unsafe extern "C" fn(*mut c_void) -> *const c_char;

/// `dl_comm_store_t`; see `dl_comm.h` for the contract.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CStore {
    /// The size of the caller's structure.
    pub size: usize,
    /// The first argument of the functions.
    pub context: *mut c_void,
    /// Stores a value.
    pub set: Option<Set>,
    /// Waits for a value.
    pub get: Option<Get>,
    /// Adds to a number.
    pub add: Option<Add>,
    /// Removes a key, or null.
    pub remove: Option<Remove>,
    /// Describes a failure, or null. Absent in the first version.
    pub error: Option<Describe>,
}

/// The size of the first version.
const FIRST_SIZE: usize = offset_of!(CStore, error);

/// A store whose functions are there. They are called by the header's contract.
struct Callbacks {
    context: *mut c_void,
    set: Set,
    get: Get,
    add: Add,
    remove: Option<Remove>,
    error: Option<Describe>,
}

// SAFETY: the header asks for functions that any thread may call with the context.
unsafe impl Send for Callbacks {}
// SAFETY: as above; several at once.
unsafe impl Sync for Callbacks {}

/// The store behind `store`.
///
/// # Errors
/// [`Error::Invalid`] if it is null or incomplete.
///
/// # Safety
/// `store` is NULL or valid; its functions and its context stay valid as long as the result lives.
pub(super) unsafe fn to_store(store: *const CStore) -> Result<Arc<dyn Store>> {
    // SAFETY: the caller's promise; `size` is the first field of every version.
    let size = unsafe { store.cast::<usize>().as_ref() }.copied();
    let Some(size) = size.filter(|size| *size >= FIRST_SIZE) else {
        return Err(Error::Invalid("the store is NULL, or its size is not sizeof(dl_comm_store_t)".into()));
    };
    // SAFETY: it has all fields up to its size.
    let (context, set, get, add, remove, error) = unsafe {
        let error = if size >= size_of::<CStore>() { (*store).error } else { None };
        ((*store).context, (*store).set, (*store).get, (*store).add, (*store).remove, error)
    };
    let (Some(set), Some(get), Some(add)) = (set, get, add) else {
        return Err(Error::Invalid("the store has no set, get or add".into()));
    };
    Ok(Arc::new(Callbacks { context, set, get, add, remove, error }))
}

fn c_key(key: &str) -> Result<CString> {
    CString::new(key).map_err(|_| Error::Internal("a key has a NUL".into()))
}

impl Callbacks {
    fn done(&self, code: c_int, what: &str, key: &str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the header's contract: NULL or a C string, valid until this thread's next call.
        let why = self.error.and_then(|error| unsafe {
            let text = error(self.context);
            (!text.is_null()).then(|| format!(": {}", CStr::from_ptr(text).to_string_lossy()))
        });
        let why = why.unwrap_or_default();
        Err(Error::Network(format!("{what} '{key}' of the store has failed with {code}{why}")))
    }

    /// The value of `key`; waits for it for at most `seconds`.
    fn get_within(&self, key: &str, seconds: f64) -> Result<Option<Vec<u8>>> {
        let c_key = c_key(key)?;
        let mut value = vec![0u8; FIRST_BUFFER];
        loop {
            let (mut len, buffer) = (0, value.as_mut_ptr().cast());
            // SAFETY: the header's contract; the buffer has the named capacity.
            let code = unsafe { (self.get)(self.context, c_key.as_ptr(), seconds, buffer, value.len(), &raw mut len) };
            if code == NOT_YET {
                return Ok(None);
            }
            self.done(code, "get of", key)?;
            if len <= value.len() {
                value.truncate(len);
                return Ok(Some(value));
            }
            value.resize(len, 0);
        }
    }
}

impl Store for Callbacks {
    fn set(&self, key: &str, value: &[u8], _wait_ctx: &WaitContext<'_>) -> Result<()> {
        let c_key = c_key(key)?;
        // SAFETY: the header's contract.
        self.done(
            unsafe { (self.set)(self.context, c_key.as_ptr(), value.as_ptr().cast(), value.len()) },
            "set of",
            key,
        )
    }

    fn try_get(&self, key: &str, _wait_ctx: &WaitContext<'_>) -> Result<Option<Vec<u8>>> {
        self.get_within(key, 0.0)
    }

    fn wait_for(&self, key: &str, wait_ctx: &WaitContext<'_>, awaited: &dyn Fn() -> String) -> Result<Vec<u8>> {
        loop {
            if let Some(value) = self.get_within(key, SLICE_S)? {
                return Ok(value);
            }
            wait_ctx.check(Duration::ZERO, awaited)?;
        }
    }

    fn add(&self, key: &str, by: i64, _wait_ctx: &WaitContext<'_>) -> Result<i64> {
        let (c_key, mut sum) = (c_key(key)?, 0);
        // SAFETY: the header's contract.
        self.done(unsafe { (self.add)(self.context, c_key.as_ptr(), by, &raw mut sum) }, "add of", key)?;
        Ok(sum)
    }

    fn delete(&self, key: &str, _wait_ctx: &WaitContext<'_>) -> Result<()> {
        let (c_key, Some(remove)) = (c_key(key)?, self.remove) else { return Ok(()) };
        // SAFETY: the header's contract.
        self.done(unsafe { remove(self.context, c_key.as_ptr()) }, "remove of", key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::store::MemoryStore;
    use crate::transport::wait_context::with_limits;
    use std::ffi::CStr;
    use std::{ptr, slice};

    unsafe fn memory<'a>(context: *mut c_void, key: *const c_char) -> (&'a MemoryStore, &'a str) {
        // SAFETY: the test's store and keys.
        unsafe { (&*context.cast(), CStr::from_ptr(key).to_str().unwrap()) }
    }

    unsafe extern "C" fn set(context: *mut c_void, key: *const c_char, value: *const c_void, len: usize) -> c_int {
        // SAFETY: as above.
        let ((store, key), value) = unsafe { (memory(context, key), slice::from_raw_parts(value.cast(), len)) };
        store.insert(key, value.to_vec());
        0
    }

    unsafe extern "C" fn get(
        context: *mut c_void,
        key: *const c_char,
        _timeout: f64,
        buffer: *mut c_void,
        capacity: usize,
        len: *mut usize,
    ) -> c_int {
        // SAFETY: as above.
        let (store, key) = unsafe { memory(context, key) };
        let Some(value) = store.value(key) else { return if key == "broken" { -5 } else { NOT_YET } };
        // SAFETY: the caller's buffer.
        unsafe {
            *len = value.len();
            if value.len() <= capacity {
                ptr::copy_nonoverlapping(value.as_ptr(), buffer.cast(), value.len());
            }
        }
        0
    }

    unsafe extern "C" fn add(context: *mut c_void, key: *const c_char, by: i64, sum: *mut i64) -> c_int {
        // SAFETY: as above.
        unsafe {
            let (store, key) = memory(context, key);
            *sum = store.increment(key, by).unwrap();
        }
        0
    }

    unsafe extern "C" fn error(_context: *mut c_void) -> *const c_char {
        c"no more".as_ptr()
    }

    #[test]
    fn callbacks_are_a_store() {
        let memory = MemoryStore::default();
        let context = (&raw const memory).cast_mut().cast();
        let size = size_of::<CStore>();
        let given =
            CStore { size, context, set: Some(set), get: Some(get), add: Some(add), remove: None, error: Some(error) };
        // SAFETY: the store outlives its use.
        let to_store = |given: &CStore| unsafe { to_store(given) };
        for broken in [CStore { size: FIRST_SIZE - 1, ..given }, CStore { get: None, ..given }] {
            assert!(matches!(to_store(&broken), Err(Error::Invalid(_))));
        }
        let store = to_store(&given).unwrap();
        let long = vec![7; 3 * FIRST_BUFFER];
        let limit = Some(Duration::from_millis(20));
        with_limits("the test", limit, None, &|| None, |ctx| {
            assert_eq!(store.try_get("long", ctx), Ok(None));
            store.set("long", &long, ctx)?;
            assert_eq!(store.get("long", ctx), Ok(long.clone()));
            assert_eq!((store.add("n", 2, ctx), store.add("n", -3, ctx)), (Ok(2), Ok(-1)));
            assert_eq!(store.delete("long", ctx), Ok(()));
            assert!(matches!(store.get("broken", ctx), Err(Error::Network(text)) if text.ends_with("-5: no more")));
            assert!(matches!(store.get("never", ctx), Err(Error::Timeout(text)) if text.contains("'never'")));
            let old = to_store(&CStore { size: FIRST_SIZE, ..given })?;
            assert!(matches!(old.get("broken", ctx), Err(Error::Network(text)) if text.ends_with("-5")));
            Ok(())
        })
        .unwrap();
    }
}
