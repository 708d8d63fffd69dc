//! The images of kernels for a GPU: those of the package, those in the user's [`super::cache`], or compiled by NVRTC.
//!
//! Thread rule: any thread; for [`load_module`] with a context current.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;

use cudarc::driver::result::module;
use cudarc::driver::sys;
use cudarc::nvrtc::sys as nvrtc;

use super::cache::{self, Cache};
use super::driver::{File, check};
use super::kernel_table::SOURCES;
use crate::error::{Error, Result};

/// Headers that the sources include.
const HEADERS: [(&CStr, &str); 5] = [
    (c"memory.cuh", include_str!("kernels/memory.cuh")),
    (c"numbers.cuh", include_str!("kernels/numbers.cuh")),
    (c"types.cuh", include_str!("kernels/types.cuh")),
    (c"accumulate.cuh", include_str!("kernels/accumulate.cuh")),
    (c"allreduce.cuh", include_str!("kernels/allreduce.cuh")),
];

/// The folder of images beside the core's library.
const FOLDER: &str = "kernels";

/// The module of `source` for GPUs of `architecture` (90 is 9.0), loaded into the current context.
pub(super) fn load_module(source: &str, architecture: i32) -> Result<sys::CUmodule> {
    let load = |image: &[u8]| {
        // SAFETY: an image by NVRTC; PTX ends with NUL.
        check("loading the kernels", unsafe { module::load_data(image.as_ptr().cast()) })
    };
    let package = library_folder().map(|folder| folder.join(FOLDER));
    let image = package.and_then(|folder| packaged(&folder, source, architecture));
    if let Some(module) = image.and_then(|image| load(&image).ok()) {
        return Ok(module);
    }
    require_nvrtc()?;
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

/// Compiles all kernels for GPUs of `architecture` into `folder`, for a package. Needs NVRTC, but no GPU. Returns the number
/// of files.
///
/// # Errors
/// [`Error::Invalid`] without a folder; [`Error::System`] without NVRTC, for an architecture that it does not know, and if
/// a file cannot be written.
pub fn compile_into(folder: &Path, architecture: i32) -> Result<usize> {
    if folder.as_os_str().is_empty() {
        return Err(Error::Invalid("the folder of kernels is empty".into()));
    }
    require_nvrtc()?;
    let target = Target::of(architecture)?;
    if !target.machine_code {
        return Err(Error::System(format!("this NVRTC does not know GPUs of compute capability {architecture}")));
    }
    let failed = |error| Error::system(format!("writing kernels into {}", folder.display()), error);
    fs::create_dir_all(folder).map_err(failed)?;
    for source in &SOURCES {
        let image = Program::new(source.text)?.compile_image(&target)?;
        fs::write(folder.join(file_name(source.text, architecture)), image).map_err(failed)?;
    }
    Ok(SOURCES.len())
}

/// The file of a package with the image of `source`: its name says what it was made of, except the version of NVRTC.
fn file_name(source: &str, architecture: i32) -> String {
    format!("{}-sm_{architecture}.cubin", cache::name(parts_of(source)))
}

/// The image in a package's `folder` for GPUs of `architecture`, or of an older one whose machine code they run: of the same major
/// version.
fn packaged(folder: &Path, source: &str, architecture: i32) -> Option<Vec<u8>> {
    let oldest = architecture / 10 * 10;
    (oldest..=architecture).rev().find_map(|older| fs::read(folder.join(file_name(source, older))).ok())
}

/// The folder of the library that has this code.
fn library_folder() -> Option<PathBuf> {
    File::with(library_folder as *const c_void)?.path.parent().map(Path::to_owned)
}

fn require_nvrtc() -> Result<()> {
    // SAFETY: only looks for the library.
    if unsafe { nvrtc::is_culib_present() } {
        return Ok(());
    }
    Err(Error::System(
        "NVRTC (libnvrtc.so), which compiles the kernels for the GPU, is not found; 'pip install nvidia-cuda-nvrtc' \
         brings it"
            .into(),
    ))
}

pub(super) fn c_string(text: &str) -> Result<CString> {
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
        Ok(cache::name([version.as_bytes(), self.architecture.as_bytes()].into_iter().chain(parts_of(source))))
    }
}

/// What the image of `source` depends on, besides the compiler and the architecture.
fn parts_of(source: &str) -> impl Iterator<Item = &[u8]> {
    let headers = HEADERS.iter().flat_map(|(name, text)| [name.to_bytes(), text.as_bytes()]);
    [source.as_bytes()].into_iter().chain(OPTIONS.iter().map(|option| option.as_bytes())).chain(headers)
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
    fn a_gpu_takes_the_newest_image_that_it_runs() {
        let folder = tempfile::tempdir().unwrap();
        let (path, source) = (folder.path(), SOURCES[0].text);
        for architecture in [80, 86, 90] {
            fs::write(path.join(file_name(source, architecture)), [u8::try_from(architecture).unwrap()]).unwrap();
        }
        for (architecture, found) in
            [(75, None), (80, Some(80)), (85, Some(80)), (89, Some(86)), (91, Some(90)), (100, None)]
        {
            assert_eq!(packaged(path, source, architecture), found.map(|image| vec![image]), "{architecture}");
        }
        // Kernels of another version of the package.
        assert_eq!(packaged(path, "another source", 80), None);
        assert_eq!(library_folder(), std::env::current_exe().unwrap().parent().map(Path::to_owned));
    }
}
