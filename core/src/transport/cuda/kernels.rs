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
const HEADERS: [(&CStr, &str); 4] = [
    (c"memory.cuh", include_str!("kernels/memory.cuh")),
    (c"types.cuh", include_str!("kernels/types.cuh")),
    (c"accumulate.cuh", include_str!("kernels/accumulate.cuh")),
    (c"allreduce.cuh", include_str!("kernels/allreduce.cuh")),
];

/// Kernels that are compiled together. [`Set::Means`] are always needed, the others by the first call that needs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    /// Frequent means, and copies of bytes.
    Means,
    /// Means of other integers.
    Integers,
    Minima,
    Maxima,
    Products,
    /// Operators on bits.
    Bits,
    /// Undivided sums.
    Sums,
}

/// The source of a set, the first part of its kernels' names, and the last parts, as in `types.cuh`.
struct Source {
    text: &'static str,
    what: &'static str,
    types: &'static [&'static str],
}

const FREQUENT: &[&str] =
    &["f32", "f64", "f16", "bf16", "i8", "u8", "i32", "i64", "f32_precise", "f16_precise", "bf16_precise", COPY];
const ORDERED: &[&str] = &["f32", "f64", "f16", "bf16", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"];
/// The kernel that copies, at the end of [`Set::Means`].
const COPY: &str = "copy_bytes";

/// In the order of [`Set`].
const SOURCES: [Source; 7] = [
    Source { text: include_str!("kernels/allreduce_mean.cu"), what: "average_", types: FREQUENT },
    Source {
        text: include_str!("kernels/allreduce_integers.cu"),
        what: "average_",
        types: &["i16", "u16", "u32", "u64"],
    },
    Source { text: include_str!("kernels/allreduce_min.cu"), what: "min_", types: ORDERED },
    Source { text: include_str!("kernels/allreduce_max.cu"), what: "max_", types: ORDERED },
    Source {
        text: include_str!("kernels/allreduce_product.cu"),
        what: "product_",
        types: &[
            "f32",
            "f64",
            "f16",
            "bf16",
            "f32_precise",
            "f16_precise",
            "bf16_precise",
            "bits8",
            "bits16",
            "bits32",
            "bits64",
        ],
    },
    Source { text: include_str!("kernels/allreduce_bits.cu"), what: "bit_", types: &["and", "or", "xor"] },
    Source {
        text: include_str!("kernels/reduce_sum.cu"),
        what: "sum_",
        types: FREQUENT.split_at(FREQUENT.len() - 1).0,
    },
];

/// The last part of the names of kernels for a floating type; with `precise`, accumulators are float64.
fn float_name(dtype: DType, precise: bool) -> Option<&'static str> {
    Some(match (dtype, precise) {
        (DType::F32, false) => "f32",
        (DType::F64, _) => "f64",
        (DType::F16, false) => "f16",
        (DType::BF16, false) => "bf16",
        (DType::F32, true) => "f32_precise",
        (DType::F16, true) => "f16_precise",
        (DType::BF16, true) => "bf16_precise",
        _ => return None,
    })
}

fn integer_name(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::I8 => "i8",
        DType::U8 => "u8",
        DType::I16 => "i16",
        DType::U16 => "u16",
        DType::I32 => "i32",
        DType::U32 => "u32",
        DType::I64 => "i64",
        DType::U64 => "u64",
        _ => return None,
    })
}

/// The kernel of an operator on elements of [`kernel_type`], as its set and the last part of its name.
fn kernel_of(op: ReduceOp, dtype: DType, precise: bool) -> Option<(Set, &'static str)> {
    let number = |precise| float_name(dtype, precise).or_else(|| integer_name(dtype));
    match op {
        ReduceOp::Sum | ReduceOp::Mean => {
            number(precise).map(|name| (if FREQUENT.contains(&name) { Set::Means } else { Set::Integers }, name))
        }
        ReduceOp::Min => number(false).map(|name| (Set::Minima, name)),
        ReduceOp::Max => number(false).map(|name| (Set::Maxima, name)),
        ReduceOp::Product => float_name(dtype, precise)
            .or_else(|| {
                Some(match integer_name(dtype)? {
                    "i8" | "u8" => "bits8",
                    "i16" | "u16" => "bits16",
                    "i32" | "u32" => "bits32",
                    _ => "bits64",
                })
            })
            .map(|name| (Set::Products, name)),
        ReduceOp::BitAnd => Some((Set::Bits, "and")),
        ReduceOp::BitOr => Some((Set::Bits, "or")),
        ReduceOp::BitXor => Some((Set::Bits, "xor")),
        _ => None,
    }
}

/// Whether there are kernels for `reduction`: sums are means with the divisor 1. Without kernels, it must run on the host.
pub fn has_kernel(reduction: Reduction) -> bool {
    let Reduction { op, dtype, acc_f64, .. } = reduction;
    kernel_of(op, kernel_type(op, dtype), acc_f64).is_some()
}

/// Whether there are kernels for the undivided sums of `reduction` that the host goes on with. It has other accumulators
/// for sums of integers.
pub fn has_partial_kernel(reduction: Reduction) -> bool {
    let Reduction { op, dtype, acc_f64, .. } = reduction;
    let is_sum = op == ReduceOp::Mean || op == ReduceOp::Sum && dtype.is_float();
    is_sum && kernel_of(op, dtype, acc_f64).is_some_and(|(set, _)| set == Set::Means)
}

/// The type whose kernel runs `op` on elements of `dtype`: sums of integers wrap around, whatever their sign, and complex
/// numbers are two elements. Operators on bits run on bytes.
pub fn kernel_type(op: ReduceOp, dtype: DType) -> DType {
    match (op, dtype) {
        (ReduceOp::Sum, DType::U32) => DType::I32,
        (ReduceOp::Sum, DType::U64) => DType::I64,
        (ReduceOp::Sum | ReduceOp::Mean, DType::Complex64) => DType::F32,
        (ReduceOp::Sum | ReduceOp::Mean, DType::Complex128) => DType::F64,
        (ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor, _) => DType::U8,
        _ => dtype,
    }
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
    /// In the order of [`SOURCES`] and of their types.
    sets: [OnceLock<Result<Vec<Function>>>; SOURCES.len()],
}

type Function = Handle<sys::CUfunc_st>;

impl Kernels {
    /// Compiles the kernels for `capability` that are always needed, and loads them into the current context.
    pub(super) fn compile(capability: (i32, i32), multiprocessors: u32) -> Result<Kernels> {
        let blocks = multiprocessors.max(1) * BLOCKS;
        let kernels = Kernels { capability, blocks, sets: Default::default() };
        kernels.load(Set::Means)?;
        Ok(kernels)
    }

    /// Writes what `op` makes of the sources of `args` to its targets; `dtype` is that of [`kernel_type`]. With `precise`,
    /// accumulators are float64. The first call of an operator may compile kernels.
    ///
    /// # Errors
    /// [`Error::System`]; [`Error::Internal`] for an element type without kernels; see [`has_kernel`].
    ///
    /// # Safety
    /// The memory of `args` is valid and not used otherwise until the kernel has finished; the stream's context is current.
    pub unsafe fn reduce(
        &self,
        (op, dtype, precise): (ReduceOp, DType, bool),
        args: &Launch,
        stream: sys::CUstream,
    ) -> Result<()> {
        let (set, name) = kernel_of(op, dtype, precise).ok_or_else(|| lacking(dtype))?;
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.function(set, name)?, args, stream) }
    }

    /// Writes the undivided sums of the sources of `args` to its one target, with
    /// [`crate::reduce::Reduction::acc_size`] bytes per element. The first call may compile kernels.
    ///
    /// # Errors
    /// As for [`Kernels::reduce`].
    ///
    /// # Safety
    /// As for [`Kernels::reduce`].
    pub unsafe fn sum(&self, dtype: DType, precise: bool, args: &Launch, stream: sys::CUstream) -> Result<()> {
        let (_, name) = kernel_of(ReduceOp::Sum, dtype, precise).ok_or_else(|| lacking(dtype))?;
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.function(Set::Sums, name)?, args, stream) }
    }

    /// Compiles the sum kernels and loads them into the current context, unless that was done before.
    pub fn load_sums(&self) -> Result<()> {
        self.load(Set::Sums).map(|_| ())
    }

    fn load(&self, set: Set) -> Result<&[Function]> {
        let kept = &self.sets[set as usize];
        kept.get_or_init(|| load(self.capability, &SOURCES[set as usize])).as_deref().map_err(Error::clone)
    }

    fn function(&self, set: Set, name: &str) -> Result<Function> {
        let functions = self.load(set)?;
        let index = SOURCES[set as usize].types.iter().position(|of| *of == name);
        index
            .and_then(|index| functions.get(index).copied())
            .ok_or_else(|| Error::Internal(format!("there is no GPU kernel {}{name}", SOURCES[set as usize].what)))
    }

    /// Copies bytes: `args` counts bytes and has one source, or none if it only fills.
    ///
    /// # Safety
    /// As for [`Kernels::reduce`].
    pub unsafe fn copy(&self, args: &Launch, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.function(Set::Means, COPY)?, args, stream) }
    }

    /// # Safety
    /// As for [`Kernels::reduce`].
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

fn lacking(dtype: DType) -> Error {
    Error::Internal(format!("there is no GPU kernel for {}", dtype.name()))
}

/// Compiles a source for GPUs of a capability and loads it into the current context. Returns its kernels in the order of
/// their types.
fn load((major, minor): (i32, i32), source: &Source) -> Result<Vec<Function>> {
    let module = load_module(source.text, major * 10 + minor)?;
    let find = |name: &&str| {
        let name = if *name == COPY { c_string(name) } else { c_string(&format!("{}{name}", source.what)) }?;
        // SAFETY: the module is loaded and is never unloaded.
        check("finding a kernel", unsafe { module::get_function(module, name) }).map(Handle)
    };
    source.types.iter().map(find).collect()
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
    fn all_reductions_without_factors_have_kernels() {
        const FLOATS: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];
        let mut kernels = Vec::new();
        for op in ReduceOp::ALL {
            for dtype in DType::ALL.into_iter().filter(|dtype| op.check(*dtype).is_ok()) {
                for acc_f64 in [false, true] {
                    let reduction = Reduction { op, dtype, acc_f64, wire_is_acc: false, divisor: 2 };
                    assert_eq!(has_kernel(reduction), op.factors().is_none(), "{reduction:?}");
                    kernels.extend(kernel_of(op, kernel_type(op, dtype), acc_f64));
                    let frequent = FLOATS.contains(&dtype)
                        || op == ReduceOp::Mean && [DType::I8, DType::U8, DType::I32, DType::I64].contains(&dtype);
                    let partial = frequent && [ReduceOp::Sum, ReduceOp::Mean].contains(&op);
                    assert_eq!(has_partial_kernel(reduction), partial, "{reduction:?}");
                }
            }
        }
        let all = [Set::Means, Set::Integers, Set::Minima, Set::Maxima, Set::Products, Set::Bits];
        for (set, source) in all.into_iter().zip(&SOURCES) {
            let known = |name: &&str| *name == COPY || kernels.contains(&(set, name));
            assert!(source.types.iter().all(known), "{set:?}");
            assert!(
                kernels.iter().filter(|(of, _)| *of == set).all(|(_, name)| source.types.contains(name)),
                "{set:?}"
            );
        }
        assert_eq!(SOURCES[Set::Sums as usize].what, "sum_");
    }
}
