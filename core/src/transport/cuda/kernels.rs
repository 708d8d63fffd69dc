//! Compiles the kernels of `kernels/` for the GPU at run time, and launches them. [`super::cache`] keeps compiled
//! images for other processes.
//!
//! Thread rule: any thread, with their context current.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::result::{launch_kernel, module};
use cudarc::driver::sys;
use cudarc::nvrtc::sys as nvrtc;

use super::cache::{self, Cache};
use super::driver::{Address, Handle, check};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::reduce::{ReduceOp, Reduction};

/// Headers that the sources include.
const HEADERS: [(&CStr, &str); 3] = [
    (c"memory.cuh", include_str!("kernels/memory.cuh")),
    (c"types.cuh", include_str!("kernels/types.cuh")),
    (c"accumulate.cuh", include_str!("kernels/accumulate.cuh")),
];

const ALLREDUCE_MEAN: &str = include_str!("kernels/allreduce_mean.cu");
/// Compiled by the first call that needs it.
const REDUCE_SUM: &str = include_str!("kernels/reduce_sum.cu");

/// Suffixes of the kernel names, in the order of `DL_COMM_TYPES` in the headers.
const TYPES: [&str; 11] =
    ["f32", "f64", "f16", "bf16", "i8", "u8", "i32", "i64", "f32_precise", "f16_precise", "bf16_precise"];

/// Index in [`TYPES`] for `dtype`; with `precise`, sums are float64. `None` for a type without kernels.
fn type_index(dtype: DType, precise: bool) -> Option<usize> {
    Some(match (dtype, precise) {
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
        (DType::Bool | DType::I16 | DType::U16 | DType::U32 | DType::U64, _) => return None,
        (DType::Complex64 | DType::Complex128, _) => return None,
    })
}

/// Whether there are kernels for `reduction`: means, and sums, which are means with the divisor 1. Without kernels, it must
/// run on the host.
pub fn has_kernel(reduction: Reduction) -> bool {
    let Reduction { op, dtype, acc_f64, .. } = reduction;
    matches!(op, ReduceOp::Mean | ReduceOp::Sum) && type_index(kernel_type(op, dtype), acc_f64).is_some()
}

/// Whether there are kernels for the undivided sums of `reduction` that the host goes on with. It has other accumulators
/// for sums of integers.
pub fn has_partial_kernel(reduction: Reduction) -> bool {
    has_kernel(reduction) && (reduction.op == ReduceOp::Mean || reduction.dtype.is_float())
}

/// The type whose kernel runs `op` on elements of `dtype`: sums of integers wrap around, whatever their sign.
pub fn kernel_type(op: ReduceOp, dtype: DType) -> DType {
    match (op, dtype) {
        (ReduceOp::Sum, DType::U32) => DType::I32,
        (ReduceOp::Sum, DType::U64) => DType::I64,
        _ => dtype,
    }
}

/// The function for `dtype`.
fn of_type(functions: &[Function], dtype: DType, precise: bool) -> Result<Function> {
    let function = type_index(dtype, precise).and_then(|index| functions.get(index).copied());
    function.ok_or_else(|| Error::Internal(format!("there is no GPU kernel for {}", dtype.name())))
}

/// Threads per block; `memory.cuh` allows no more.
const THREADS: u32 = 256;
/// Blocks per multiprocessor that run at a time, limited by registers.
const BLOCKS: u32 = 3;

/// Elements `first .. first + count` of tensor range `piece`, for one block; at most [`BlockRange::MAX_ELEMENTS`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    /// The first element.
    pub first: u64,
    /// Index of the tensor range in the address lists.
    pub piece: u32,
    /// The number of elements.
    pub count: u32,
}

impl BlockRange {
    /// The maximum of `count`.
    pub const MAX_ELEMENTS: usize = 32 << 10;
}

/// Parameters of a kernel, as `KernelArgs` in `memory.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct KernelArgs {
    /// Device address of the lists; 0: they are in `table`.
    pub lists: Address,
    /// Address of a 32-bit stop flag in pinned host memory, or 0: [`KernelArgs::STOP_COPIES`] of it. Each block checks
    /// its copy before each item and ends if it is set.
    pub stop: Address,
    /// Offset of the [`BlockRange`]s in the lists, in bytes.
    pub items: u32,
    /// Offset of the addresses of each tensor range in each source, in bytes.
    pub sources: u32,
    /// Offset of the addresses of each tensor range in each target, in bytes.
    pub targets: u32,
    /// The number of items.
    pub nitems: u32,
    /// The number of sources.
    pub nsources: u32,
    /// The number of targets.
    pub ntargets: u32,
    /// Divisor of the sum.
    pub divisor: u32,
    /// 1: a stopped launch fills the rest of its targets with ones, NaN in each floating type.
    pub fills: u32,
    /// Short lists, passed as parameters (at most 4 KiB in all).
    pub table: [u64; KernelArgs::TABLE],
}

impl KernelArgs {
    /// Number of 64-bit entries in `table`.
    pub const TABLE: usize = 448;
    /// Copies of the stop flag, more than blocks run at a time. On an H100, reads of one line of host memory take
    /// 1.04 us each, one after the other.
    pub const STOP_COPIES: usize = 512;
    /// Bytes from one copy to the next: a line of the GPU's L2 cache.
    pub const STOP_STRIDE: usize = 128;
}

/// A launch.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// Its parameters.
    pub args: KernelArgs,
    /// Maximum number of blocks; 0: as many as the GPU runs at a time.
    pub max_blocks: u32,
}

/// The kernels for one compute capability, loaded into a context.
pub struct Kernels {
    capability: (i32, i32),
    /// Maximum number of blocks per launch.
    blocks: u32,
    /// In the order of [`TYPES`].
    means: Vec<Function>,
    copy: Function,
    sums: OnceLock<Result<Vec<Function>>>,
}

type Function = Handle<sys::CUfunc_st>;

impl Kernels {
    /// Compiles the kernels for `capability` and loads them into the current context.
    pub(super) fn compile(capability: (i32, i32), multiprocessors: u32) -> Result<Kernels> {
        let mut means = load(capability, ALLREDUCE_MEAN, "average", &["copy_bytes"])?;
        let copy = means.pop().ok_or_else(|| Error::Internal("no kernel was asked for".into()))?;
        let blocks = multiprocessors.max(1) * BLOCKS;
        Ok(Kernels { capability, blocks, means, copy, sums: OnceLock::new() })
    }

    /// Writes the mean of the sources of `args` to its targets. With `precise`, sums are float64.
    ///
    /// # Errors
    /// [`Error::System`]; [`Error::Internal`] for an element type without kernels; see [`has_kernel`].
    ///
    /// # Safety
    /// The memory of `args` is valid and not used otherwise until the kernel has finished.
    pub unsafe fn average(&self, dtype: DType, precise: bool, args: &Launch, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(of_type(&self.means, dtype, precise)?, args, stream) }
    }

    /// Writes the undivided sums of the sources of `args` to its one target, with
    /// [`crate::reduce::Reduction::acc_size`] bytes per element. The first call may compile kernels.
    ///
    /// # Errors
    /// As for [`Kernels::average`].
    ///
    /// # Safety
    /// As for [`Kernels::average`]; the stream's context is current.
    pub unsafe fn sum(&self, dtype: DType, precise: bool, args: &Launch, stream: sys::CUstream) -> Result<()> {
        let function = of_type(self.sums()?, dtype, precise)?;
        // SAFETY: the caller's promise.
        unsafe { self.launch(function, args, stream) }
    }

    /// Compiles the sum kernels and loads them into the current context, unless that was done before.
    pub fn load_sums(&self) -> Result<()> {
        self.sums().map(|_| ())
    }

    fn sums(&self) -> Result<&[Function]> {
        let sums = self.sums.get_or_init(|| load(self.capability, REDUCE_SUM, "sum", &[]));
        sums.as_deref().map_err(Error::clone)
    }

    /// Copies bytes: `args` counts bytes and has one source, or none if it only fills.
    ///
    /// # Safety
    /// As for [`Kernels::average`].
    pub unsafe fn copy(&self, args: &Launch, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.copy, args, stream) }
    }

    /// # Safety
    /// As for [`Kernels::average`].
    unsafe fn launch(&self, function: Function, launch: &Launch, stream: sys::CUstream) -> Result<()> {
        let Launch { args, max_blocks } = launch;
        if args.nitems == 0 {
            return Ok(());
        }
        let max_blocks = if *max_blocks == 0 { u32::MAX } else { *max_blocks };
        let blocks = args.nitems.min(max_blocks).min(self.blocks);
        let mut parameters = [ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's promise; the driver copies the parameter before it returns.
        let started = unsafe { launch_kernel(function.0, (blocks, 1, 1), (THREADS, 1, 1), 0, stream, &mut parameters) };
        check("starting a kernel", started)
    }
}

/// Compiles `source` for GPUs of `capability` and loads it into the current context. Returns the kernels `what`_type
/// for each type, then those named in `more`.
fn load((major, minor): (i32, i32), source: &str, what: &str, more: &[&str]) -> Result<Vec<Function>> {
    let module = load_module(source, major * 10 + minor)?;
    let find = |name: String| {
        // SAFETY: the module is loaded and is never unloaded.
        check("finding a kernel", unsafe { module::get_function(module, c_string(&name)?) }).map(Handle)
    };
    let names = TYPES.iter().map(|dtype| format!("{what}_{dtype}"));
    names.chain(more.iter().map(|&name| name.to_owned())).map(find).collect()
}

/// The module of `source` for `architecture`, from the cache or compiled, loaded into the current context.
fn load_module(source: &str, architecture: i32) -> Result<sys::CUmodule> {
    // SAFETY: only looks for the library.
    if !unsafe { nvrtc::is_culib_present() } {
        return Err(Error::System(
            "NVRTC (libnvrtc.so), which compiles the kernels for the GPU, is not found; 'pip install nvidia-cuda-nvrtc' \
             brings it"
                .into(),
        ));
    }
    let load = |image: &[u8]| {
        // SAFETY: an image by NVRTC; PTX ends with NUL.
        check("loading the kernels", unsafe { module::load_data(image.as_ptr().cast()) })
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

/// The target of a compilation.
struct Target {
    /// CUBIN if NVRTC knows the GPU's architecture, else PTX for the newest older one.
    machine_code: bool,
    architecture: String,
}

/// Options for every target.
const OPTIONS: [&str; 5] = ["--std=c++17", "--fmad=false", "--prec-div=true", "--ftz=false", "--device-int128"];

impl Target {
    fn of(architecture: i32) -> Result<Target> {
        let known = known_architectures()?;
        if known.contains(&architecture) {
            let architecture = format!("--gpu-architecture=sm_{architecture}");
            return Ok(Target { machine_code: true, architecture });
        }
        let older = known.iter().filter(|&&known| known < architecture).max().ok_or_else(|| {
            Error::System(format!("this NVRTC compiles for newer GPUs only, not for compute capability {architecture}"))
        })?;
        Ok(Target { machine_code: false, architecture: format!("--gpu-architecture=compute_{older}") })
    }

    /// Cache key: a hash of everything that the image depends on.
    fn name_of(&self, source: &str) -> Result<String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the out pointers are valid.
        compiled("asking for the version", unsafe { nvrtc::nvrtcVersion(&raw mut major, &raw mut minor) })?;
        let version = format!("{major}.{minor}");
        let mut parts = vec![version.as_bytes(), self.architecture.as_bytes(), source.as_bytes()];
        parts.extend(OPTIONS.iter().map(|option| option.as_bytes()));
        parts.extend(HEADERS.iter().flat_map(|(name, text)| [name.to_bytes(), text.as_bytes()]));
        Ok(cache::name(parts))
    }
}

/// An NVRTC program.
struct Program(nvrtc::nvrtcProgram);

impl Program {
    fn new(source: &str) -> Result<Program> {
        let source = c_string(source)?;
        let texts: Vec<CString> = HEADERS.iter().map(|(_, text)| c_string(text)).collect::<Result<_>>()?;
        let headers: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        let names = HEADERS.map(|(name, _)| name.as_ptr());
        let mut program = ptr::null_mut();
        // SAFETY: the texts end with NUL, and there are as many names as headers.
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

    /// Compiles the program to CUBIN or PTX.
    fn compile_image(&self, target: &Target) -> Result<Vec<u8>> {
        let options = [target.architecture.as_str()].into_iter().chain(OPTIONS).map(c_string);
        let options: Vec<CString> = options.collect::<Result<_>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).unwrap_or(0);
        // SAFETY: the texts end with NUL, and `count` is their number.
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
        // SAFETY: the program is alive, the out pointer valid.
        compiled("asking for the kernels", unsafe { size(self.0, &raw mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the buffer has the length that NVRTC asked for.
        compiled("taking the kernels", unsafe { get(self.0, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and not used again.
        unsafe { nvrtc::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn known_architectures() -> Result<Vec<i32>> {
    let mut count = 0;
    // SAFETY: the out pointer is valid.
    compiled("asking NVRTC", unsafe { nvrtc::nvrtcGetNumSupportedArchs(&raw mut count) })?;
    let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: the buffer has the length that NVRTC asked for.
    compiled("asking NVRTC", unsafe { nvrtc::nvrtcGetSupportedArchs(known.as_mut_ptr()) })?;
    Ok(known)
}

fn compiled(what: &str, code: nvrtc::nvrtcResult) -> Result<()> {
    if code == nvrtc::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    Err(Error::System(format!("NVRTC: {what}: {code:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_without_a_kernel_are_known() {
        const FLOATS: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];
        let mut names = Vec::new();
        for dtype in DType::ALL {
            for acc_f64 in [false, true] {
                let mean = Reduction { op: ReduceOp::Mean, dtype, acc_f64, wire_is_acc: false, divisor: 2 };
                let index = type_index(dtype, acc_f64);
                assert_eq!(has_kernel(mean), index.is_some(), "{mean:?}");
                names.extend(index.map(|index| TYPES[index]));
                assert!(!has_kernel(Reduction { op: ReduceOp::Max, ..mean }), "{dtype:?}");
                let (is_float, sum) = (FLOATS.contains(&dtype), Reduction { op: ReduceOp::Sum, ..mean });
                assert_eq!(has_partial_kernel(sum), is_float, "{dtype:?}");
                let sums_too = matches!(dtype, DType::U32 | DType::U64);
                assert_eq!(has_kernel(sum), index.is_some() || sums_too, "{dtype:?}");
            }
        }
        assert!(TYPES.iter().all(|name| names.contains(name)), "{names:?}");
        assert_eq!(type_index(DType::U16, false).or(type_index(DType::Complex64, true)), None);
        let error = of_type(&[], DType::U32, false).unwrap_err();
        assert!(matches!(error, Error::Internal(text) if text.contains("no GPU kernel for uint32")));
    }
}
