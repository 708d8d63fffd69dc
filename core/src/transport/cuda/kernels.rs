//! The kernels of `kernels/`, compiled at run time for the GPU that is there, and how they are started. What was compiled is
//! kept for the next process ([`super::cache`]).
//!
//! Thread rule: may be used from any thread in whose context they are.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys;
use cudarc::nvrtc::sys as nvrtc;

use super::cache::{self, Cache};
use super::driver::{Address, check};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// What the sources include, by name.
const HEADERS: [(&CStr, &str); 3] = [
    (c"memory.cuh", include_str!("kernels/memory.cuh")),
    (c"types.cuh", include_str!("kernels/types.cuh")),
    (c"accumulate.cuh", include_str!("kernels/accumulate.cuh")),
];

const ALLREDUCE_MEAN: &str = include_str!("kernels/allreduce_mean.cu");
/// Compiled when the first call needs one.
const REDUCE_SUM: &str = include_str!("kernels/reduce_sum.cu");

/// The types, as in `DL_COMM_TYPES` of the headers.
const TYPES: [&str; 11] =
    ["f32", "f64", "f16", "bf16", "i8", "u8", "i32", "i64", "f32_precise", "f16_precise", "bf16_precise"];

/// The place of elements of `dtype` among the types, added up in float64 when `precise`.
fn place(dtype: DType, precise: bool) -> Result<usize> {
    Ok(match (dtype, precise) {
        (DType::F32, false) => 0,
        (DType::F64, _) => 1,
        (DType::F16, false) => 2,
        (DType::BF16, false) => 3,
        (DType::I8, _) => 4,
        (DType::U8, _) => 5,
        (DType::I32, _) => 6,
        (DType::I64, _) => 7,
        (DType::F32, true) => 8,
        (DType::F16, true) => 9,
        (DType::BF16, true) => 10,
        (DType::Bool, _) => return Err(Error::Internal("bool has no mean".into())),
    })
}

/// Threads of a block, the most that `memory.cuh` lets it have.
const THREADS: u32 = 256;
/// Blocks for each multiprocessor: as many as it runs at a time, by the registers that they have there.
const BLOCKS: u32 = 3;

/// Elements `first .. first + count` of piece `piece`, for one block. At most [`BlockRange::MAX_ELEMENTS`] of them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    /// The first element.
    pub first: u64,
    /// The piece, a place in the lists of addresses.
    pub piece: u32,
    /// How many elements.
    pub count: u32,
}

impl BlockRange {
    /// The most elements of an item.
    pub const MAX_ELEMENTS: usize = 32 << 10;
}

/// What a kernel gets: `KernelArgs` of the source.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct KernelArgs {
    /// Where the lists are in device memory; 0: in `table`.
    pub lists: Address,
    /// A 32-bit word in pinned host memory, at which each block looks before each item: it ends when the word is not 0.
    /// 0: there is none.
    pub stop: Address,
    /// Where in the lists, in bytes, its [`BlockRange`]s begin.
    pub items: u32,
    /// The same for the list that tells, for each piece, where it begins in each source.
    pub sources: u32,
    /// The same for where each piece begins in each target.
    pub targets: u32,
    /// The number of items.
    pub nitems: u32,
    /// The number of sources.
    pub nsources: u32,
    /// The number of targets.
    pub ntargets: u32,
    /// What the sum is divided by.
    pub divisor: u32,
    /// The most blocks of the kernel; 0: as many as the GPU runs at a time.
    pub blocks: u32,
    /// Lists that are short enough to be parameters, which have 4 KiB at most.
    pub table: [u64; KernelArgs::TABLE],
}

impl KernelArgs {
    /// The numbers of 64 bits in `table`.
    pub const TABLE: usize = 448;
}

/// The kernels for one kind of GPU, loaded into a context.
pub struct Kernels {
    capability: (i32, i32),
    /// The most blocks of a launch.
    blocks: u32,
    /// By type.
    means: Vec<Function>,
    copy: Function,
    sums: OnceLock<Result<Vec<Function>>>,
}

type Function = sys::CUfunction;

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Compiles the kernels for GPUs of `capability` with that many multiprocessors, and loads them into the current context.
    pub(super) fn compile(capability: (i32, i32), multiprocessors: u32) -> Result<Kernels> {
        let mut means = load(capability, ALLREDUCE_MEAN, "average", &["copy_bytes"])?;
        let copy = means.pop().ok_or_else(|| Error::Internal("no kernel was asked for".into()))?;
        let blocks = multiprocessors.max(1) * BLOCKS;
        Ok(Kernels { capability, blocks, means, copy, sums: OnceLock::new() })
    }

    /// Averages elements of `dtype`, in float64 when `precise`, by `work`, of which each element is `sources` added up and
    /// divided.
    ///
    /// # Errors
    /// [`Error::System`]; [`Error::Internal`] for bool, which has no mean.
    ///
    /// # Safety
    /// What `work` tells of is valid device memory until the kernel is done, and nobody else's.
    pub unsafe fn average(&self, dtype: DType, precise: bool, work: &KernelArgs, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.means[place(dtype, precise)?], work, stream) }
    }

    /// Adds elements of `dtype` up by `work`, which has one target of [`crate::reduce::Reduction::acc_size`] bytes for an
    /// element, and leaves them as they are. The first call may compile kernels.
    ///
    /// # Errors
    /// As for [`Kernels::average`].
    ///
    /// # Safety
    /// As for [`Kernels::average`]; the stream's context is the current one.
    pub unsafe fn sum(&self, dtype: DType, precise: bool, work: &KernelArgs, stream: sys::CUstream) -> Result<()> {
        let function = self.sums()?[place(dtype, precise)?];
        // SAFETY: the caller's promise.
        unsafe { self.launch(function, work, stream) }
    }

    /// Compiles the sums and loads them into the current context, unless that was done.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn load_sums(&self) -> Result<()> {
        self.sums().map(|_| ())
    }

    fn sums(&self) -> Result<&[Function]> {
        let sums = self.sums.get_or_init(|| load(self.capability, REDUCE_SUM, "sum", &[]));
        sums.as_deref().map_err(Error::clone)
    }

    /// Copies by `work`, of which elements are bytes and there is one source.
    ///
    /// # Errors
    /// [`Error::System`]
    ///
    /// # Safety
    /// As for [`Kernels::average`].
    pub unsafe fn copy(&self, work: &KernelArgs, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.copy, work, stream) }
    }

    /// # Safety
    /// As for [`Kernels::average`].
    unsafe fn launch(&self, function: Function, work: &KernelArgs, stream: sys::CUstream) -> Result<()> {
        if work.nitems == 0 {
            return Ok(());
        }
        let most = if work.blocks == 0 { u32::MAX } else { work.blocks };
        let blocks = work.nitems.min(most).min(self.blocks);
        let mut parameters = [ptr::from_ref(work).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's promise; the parameter is what the kernel takes, and copied before this returns.
        let code = unsafe {
            sys::cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check("starting a kernel", code)
    }
}

/// Compiles a source for GPUs of `capability`, and loads its kernels into the current context: what it does (`what`) for each
/// type, and `more`.
fn load((major, minor): (i32, i32), source: &str, what: &str, more: &[&str]) -> Result<Vec<Function>> {
    let module = module(source, major * 10 + minor)?;
    let find = |name: String| {
        let name = c_string(&name)?;
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded, and stays.
        let code = unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
        check("finding a kernel", code).map(|()| function)
    };
    let names = TYPES.iter().map(|dtype| format!("{what}_{dtype}"));
    names.chain(more.iter().map(|&name| name.to_owned())).map(find).collect()
}

/// A source, compiled for `architecture` unless that was done before, and loaded into the current context.
fn module(source: &str, architecture: i32) -> Result<sys::CUmodule> {
    // SAFETY: looks for the library, nothing else.
    if !unsafe { nvrtc::is_culib_present() } {
        return Err(Error::System(
            "NVRTC (libnvrtc.so), which compiles the kernels for the GPU, is not found; 'pip install nvidia-cuda-nvrtc' \
             brings it"
                .into(),
        ));
    }
    let load = |image: &[u8]| {
        let mut module = ptr::null_mut();
        // SAFETY: an image of NVRTC's, ended by NUL where it is text.
        let code = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
        check("loading the kernels", code).map(|()| module)
    };
    let target = Target::of(architecture)?;
    let name = target.name_of(source)?;
    let cache = Cache::open();
    if let Some(module) = cache.get(&name).and_then(|image| load(&image).ok()) {
        return Ok(module);
    }
    let image = Program::new(source)?.compile_image(&target)?;
    let module = load(&image)?;
    cache.put(&name, &image);
    Ok(module)
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Internal("the kernels have a NUL in them".into()))
}

/// What is compiled for.
struct Target {
    /// Machine code, or PTX for the newest architecture that NVRTC knows before the GPU's.
    machine_code: bool,
    architecture: String,
}

/// How, whatever for.
const OPTIONS: [&str; 5] = ["--std=c++17", "--fmad=false", "--prec-div=true", "--ftz=false", "--device-int128"];

impl Target {
    fn of(architecture: i32) -> Result<Target> {
        let known = known_architectures()?;
        if known.contains(&architecture) {
            let architecture = format!("--gpu-architecture=sm_{architecture}");
            return Ok(Target { machine_code: true, architecture });
        }
        let below = known.iter().filter(|&&known| known < architecture).max().ok_or_else(|| {
            Error::System(format!("this NVRTC compiles for newer GPUs only, not for compute capability {architecture}"))
        })?;
        Ok(Target { machine_code: false, architecture: format!("--gpu-architecture=compute_{below}") })
    }

    /// All that decides what becomes of a source, as a name.
    fn name_of(&self, source: &str) -> Result<String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the places are valid.
        compiled("asking for the version", unsafe { nvrtc::nvrtcVersion(&raw mut major, &raw mut minor) })?;
        let version = format!("{major}.{minor}");
        let mut parts = vec![version.as_bytes(), self.architecture.as_bytes(), source.as_bytes()];
        parts.extend(OPTIONS.iter().map(|option| option.as_bytes()));
        parts.extend(HEADERS.iter().flat_map(|(name, text)| [name.to_bytes(), text.as_bytes()]));
        Ok(cache::name(parts))
    }
}

/// A program of NVRTC, which is there.
struct Program(nvrtc::nvrtcProgram);

impl Program {
    fn new(source: &str) -> Result<Program> {
        let ended =
            |text: &str| CString::new(text).map_err(|_| Error::Internal("the kernels have a NUL in them".into()));
        let source = ended(source)?;
        let texts: Vec<CString> = HEADERS.iter().map(|(_, text)| ended(text)).collect::<Result<_>>()?;
        let headers: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        let names = HEADERS.map(|(name, _)| name.as_ptr());
        let mut program = ptr::null_mut();
        // SAFETY: texts ended by NUL, and as many names as headers.
        let code = unsafe {
            nvrtc::nvrtcCreateProgram(
                &raw mut program,
                source.as_ptr(),
                c"dl_comm.cu".as_ptr(),
                HEADERS.len() as c_int,
                headers.as_ptr(),
                names.as_ptr(),
            )
        };
        compiled("making a program of the kernels", code)?;
        Ok(Program(program))
    }

    /// What becomes of it.
    fn compile_image(&self, target: &Target) -> Result<Vec<u8>> {
        let options = [target.architecture.as_str()].into_iter().chain(OPTIONS).map(c_string);
        let options: Vec<CString> = options.collect::<Result<_>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).unwrap_or(0);
        // SAFETY: texts ended by NUL, as many as said.
        let code = unsafe { nvrtc::nvrtcCompileProgram(self.0, count, pointers.as_ptr()) };
        compiled("compiling the kernels", code).map_err(|error| Error::System(format!("{error}\n{}", self.log())))?;
        if target.machine_code {
            self.bytes(nvrtc::nvrtcGetCUBINSize, nvrtc::nvrtcGetCUBIN)
        } else {
            self.bytes(nvrtc::nvrtcGetPTXSize, nvrtc::nvrtcGetPTX)
        }
    }

    fn log(&self) -> String {
        let bytes = self.bytes(nvrtc::nvrtcGetProgramLogSize, nvrtc::nvrtcGetProgramLog);
        String::from_utf8_lossy(&bytes.unwrap_or_default()).trim_end_matches('\0').to_owned()
    }

    fn bytes(
        &self,
        size: unsafe fn(nvrtc::nvrtcProgram, *mut usize) -> nvrtc::nvrtcResult,
        get: unsafe fn(nvrtc::nvrtcProgram, *mut c_char) -> nvrtc::nvrtcResult,
    ) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program is alive, the place valid.
        compiled("asking for the kernels", unsafe { size(self.0, &raw mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: as many bytes as asked for.
        compiled("taking the kernels", unsafe { get(self.0, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and used no more.
        unsafe { nvrtc::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn known_architectures() -> Result<Vec<i32>> {
    let mut count = 0;
    // SAFETY: the place is valid.
    compiled("asking NVRTC", unsafe { nvrtc::nvrtcGetNumSupportedArchs(&raw mut count) })?;
    let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: as many numbers as asked for.
    compiled("asking NVRTC", unsafe { nvrtc::nvrtcGetSupportedArchs(known.as_mut_ptr()) })?;
    Ok(known)
}

fn compiled(what: &str, code: nvrtc::nvrtcResult) -> Result<()> {
    if code == nvrtc::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    Err(Error::System(format!("NVRTC: {what}: {code:?}")))
}
