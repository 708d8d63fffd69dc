"""Builds the op libraries: C++ against the installed framework, about a minute, no Rust.

Libraries built after the install are in a cache, in a folder named by framework and version, Python, dl_comm and its
core. Ranks that start together build once: one holds a lock, the others wait for it.

The process loads code from the cache. So it checks first that no other user can have written it, and that it is intact
(size and hash, stored by the build).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dl_comm import _dl_comm
from dl_comm._base import log
from dl_comm._base.cuda import preload
from dl_comm._base.paths import CORE, PACKAGE, SOURCES
from dl_comm._dl_comm import __version__
from dl_comm._libraries.frameworks import framework_version


@dataclasses.dataclass(frozen=True)
class _Library:
    file: str
    option: str
    """The name in the CMake option ``DL_COMM_WITH_...``."""
    framework: str


_LIBRARIES = {
    "torch": _Library("libdl_comm_torch.so", "TORCH", "torch"),
    "torch.distributed": _Library("libdl_comm_c10d.so", "C10D", "torch"),
    "tensorflow": _Library("libdl_comm_tf.so", "TF", "tensorflow"),
}
_TORCH_CUDA = "libdl_comm_torch_cuda.so"
_MANIFEST = "built.json"
"""In each folder of the cache: size and hash of each library. Written last."""
_PROGRESS_S = 10.0
"""How often a build says that it goes on."""
_PREBUILT = "prebuilt"
"""The folder of a package with libraries for other frameworks than those of its build: a folder for each ABI."""
KERNELS = "kernels"
"""The folder of a package with kernels for GPUs (core/src/transport/cuda/compiler.rs)."""
CAPABILITIES = (80, 90, 100, 120)
"""Compute capabilities: Ampere and Ada, Hopper, and both of Blackwell. A GPU runs what is for an older minor one."""
_STABLE_TORCH = (2, 10)
"""The oldest supported torch: TORCH_TARGET_VERSION in torch_ops/CMakeLists.txt."""


def libraries(framework: str) -> list[str]:
    """The names of the libraries for ``framework``."""
    return [name for name, library in _LIBRARIES.items() if library.framework == framework]


def packaged_library(name: str) -> Path | None:
    """The library in the package, if it works with the framework that is installed now: built at install, or before.

    The libraries for TensorFlow and for ``torch.distributed`` work with one version. That for torch uses the stable ABI
    and works with every version from ``_STABLE_TORCH`` on. A torch with CUDA also needs the CUDA library, which a build
    for a CPU torch lacks.
    """
    version = framework_version(_LIBRARIES[name].framework)
    library = PACKAGE / _LIBRARIES[name].file
    built_for = PACKAGE / f"{library.name}.built-for"
    if library.exists() and built_for.exists():
        if name == "torch" and _has_stable_abi(version) and _has_cuda_part(PACKAGE):
            return library
        if name != "torch" and built_for.read_text().strip() == version:
            return library
    abi = abi_of(name, version)
    prebuilt = PACKAGE / _PREBUILT / (abi or "none") / library.name
    return prebuilt if prebuilt.exists() and (name != "torch" or _has_cuda_part(prebuilt.parent)) else None


def _has_cuda_part(folder: Path) -> bool:
    """Whether the torch library in ``folder`` has the library that the installed torch needs for CUDA, if any."""
    return (folder / _TORCH_CUDA).exists() or not _torch_has_cuda()


def abi_of(name: str, version: str) -> str | None:
    """What the library ``name`` for this version of the framework (``torch-2.11.0+cu130``) works with; None: only that.

    TensorFlow's ABI changes with each version, that of ``torch.distributed`` with each minor version, for the CPU and
    CUDA alike. Versions that are no releases have an ABI of their own.
    """
    if name == "torch":
        return "torch" if _has_stable_abi(version) else None
    release = re.fullmatch(r"(torch|tensorflow|tensorflow-cpu)-(\d+\.\d+)(\.\d+)(\+(?:cu|cpu|rocm).*)?", version)
    if release is None:
        return None
    framework, minor, patch, _ = release.groups()
    return f"torch-{minor}" if framework == "torch" else f"tensorflow-{minor}{patch}"


def prebuilt_abis(name: str) -> list[str]:
    """What the prebuilt libraries ``name`` of this package work with."""
    return sorted(path.parent.name for path in (PACKAGE / _PREBUILT).glob(f"*/{_LIBRARIES[name].file}"))


def build_into(name: str, folder: Path) -> Path:
    """Builds the library for the installed framework in ``folder`` of a package, unless it is there.

    Raises:
        ImportError: The build failed, or the framework's version is no release.
    """
    version = framework_version(_LIBRARIES[name].framework)
    abi = abi_of(name, version)
    if abi is None:
        raise ImportError(f"{version} is no release: a library for it works with this installation only")
    library = folder / abi / _LIBRARIES[name].file
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        _build(name, library.parent, "$ORIGIN/../..")
        (library.parent / _MANIFEST).unlink()
    return library


def compile_kernels(folder: Path) -> int:
    """Compiles the kernels for the GPUs of :data:`CAPABILITIES` into ``folder``; returns the number of files.

    A package has them in its folder :data:`KERNELS`; else the first call that needs one compiles it.

    Raises:
        CommError: NVRTC is not installed, or does not know a capability.
    """
    preload()
    return sum(_dl_comm.compile_kernels(str(folder), capability) for capability in CAPABILITIES)


def _has_stable_abi(version: str) -> bool:
    """Whether this torch (``torch-2.11.0+cu130``) has the stable ABI that the library needs."""
    found = re.search(r"-(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= _STABLE_TORCH


def _torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA. Does not import torch."""
    found = importlib.util.find_spec("torch")
    return bool(found and found.origin and (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists())


def cache_dir() -> Path:
    """The folder of built libraries: ``DL_COMM_CACHE``, else ``dl_comm`` in the user's cache folder."""
    chosen = os.environ.get("DL_COMM_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dl_comm"


def existing_library(name: str) -> Path | None:
    """The library for the installed framework version, if it exists; builds nothing.

    One in the cache comes first, so that ``dl_comm.build --force`` can replace one of the package that does not load.
    """
    folder = cache_dir() / _key(name)
    try:
        _check_permissions(folder)
    except (OSError, ImportError):
        return packaged_library(name)
    return folder / _LIBRARIES[name].file if _is_intact(folder) else packaged_library(name)


def cached_library(name: str, force: bool = False) -> Path:
    """The library in the cache; builds it if it is missing or damaged, or with ``force``.

    Raises:
        ImportError: The build failed; the message has the reason and the fix.
    """
    folder = cache_dir() / _key(name)
    library = folder / _LIBRARIES[name].file
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_permissions(folder)
        if _is_intact(folder) and not force:
            return library
        with _locked(folder / "lock"):
            if force or not _is_intact(folder):
                if (folder / _MANIFEST).exists() and not force:
                    log.warn(f"{folder} is damaged")
                for leftover in folder.glob("build.*"):  # of a killed build; this process holds the lock
                    shutil.rmtree(leftover)
                _build(name, folder)
    except OSError as error:
        raise ImportError(
            f"dl_comm cannot store the op library for {name} in {folder}: {error}; set DL_COMM_CACHE to a folder "
            "that supports writing and locking"
        ) from error
    return library


def _key(name: str) -> str:
    core = hashlib.sha256(CORE.read_bytes())
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        core.update(source.read_bytes())
    # The library finds the core by its path, so the path of the package is part of the key.
    core.update(str(PACKAGE).encode())
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    library = _LIBRARIES[name]
    serves = f"{framework_version(library.framework)}-{library.option.lower()}-{python}"
    return f"{serves}-dl_comm-{__version__}-{core.hexdigest()[:16]}"


def _check_permissions(folder: Path) -> None:
    """Checks that only this user, root, or the user who installed dl_comm can write to ``folder``.

    Raises:
        ImportError: Another user can; the message has the fix.
    """
    trusted = {os.geteuid(), 0, PACKAGE.stat().st_uid}
    for place, others in ((folder.parent, stat.S_IWOTH), (folder, stat.S_IWGRP | stat.S_IWOTH)):
        about = place.lstat() if place == folder else place.stat()
        sticky = place != folder and about.st_mode & stat.S_ISVTX
        if about.st_uid not in trusted or (about.st_mode & others and not sticky) or not stat.S_ISDIR(about.st_mode):
            raise ImportError(
                f"dl_comm does not load op libraries from {place}: another user can write there; set DL_COMM_CACHE to "
                "your own folder, or remove this one"
            )


def _is_intact(folder: Path) -> bool:
    """Whether the libraries in ``folder`` are complete: a full disk or an interrupted copy damages them."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        return bool(manifest) and all(_size_and_hash(folder / name) == about for name, about in manifest.items())
    except (OSError, ValueError, AttributeError):  # the manifest is missing or damaged
        return False


def _size_and_hash(library: Path) -> list[int | str]:
    content = library.read_bytes()
    return [len(content), hashlib.sha256(content).hexdigest()]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(name: str, folder: Path, core_folder: str = str(PACKAGE)) -> None:
    # CMake reads CXX itself; it may contain arguments.
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    version, prebuilt = framework_version(_LIBRARIES[name].framework), prebuilt_abis(name)
    which = f"this package has it for {', '.join(prebuilt)}" if prebuilt else "this package has none"
    if compiler is None and "CXX" not in os.environ:
        raise ImportError(
            f"no C++ compiler found, and dl_comm's op library for {name} is not built for {version} ({which}): "
            "install one (for example g++), set CXX, or run 'python -m dl_comm.build' where one is installed"
        )
    why = f": {which}" if prebuilt else ""
    log.warn(f"building {_LIBRARIES[name].file} for {version} (once, about a minute){why}")
    with tempfile.TemporaryDirectory(prefix="build.", dir=folder) as build:
        options = [
            f"-DDL_COMM_WITH_{library.option}={'ON' if each == name else 'OFF'}" for each, library in _LIBRARIES.items()
        ]
        configure = [
            _tool("cmake"),
            *("-S", str(SOURCES), "-B", build, f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"),
            *(f"-DCMAKE_INSTALL_PREFIX={build}/out", "-DDL_COMM_INSTALL_DIR=."),
            *(f"-DDL_COMM_CORE_LIBRARY={CORE}", f"-DCMAKE_INSTALL_RPATH={core_folder}"),
            *options,
        ]
        ninja = _tool("ninja", required=False)
        if "CXX" not in os.environ:
            configure += [f"-DCMAKE_CXX_COMPILER={compiler}"]
        if ninja:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        _run(configure, name)
        _run([_tool("cmake"), "--build", build], name)
        _run([_tool("cmake"), "--install", build, "--strip"], name)
        libraries = sorted(Path(build, "out").glob("*.so"))
        manifest = Path(build, _MANIFEST)
        manifest.write_text(json.dumps({library.name: _size_and_hash(library) for library in libraries}))
        # A rename is atomic. The manifest is last, because it makes the folder valid.
        for file in (*libraries, manifest):
            os.replace(file, folder / file.name)


def _tool(name: str, required: bool = True) -> str:
    in_scripts = Path(sysconfig.get_path("scripts"), name)
    found = str(in_scripts) if in_scripts.exists() else shutil.which(name)
    if found is None and required:
        raise ImportError(f"{name} not found: run 'pip install {name}'")
    return found or ""


def _run(command: list[str], name: str) -> None:
    """Runs a program, and logs every ``_PROGRESS_S`` that it still does."""
    began = time.monotonic()
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=_PROGRESS_S)
                break
            except subprocess.TimeoutExpired:
                log.warn(f"building {_LIBRARIES[name].file}: {time.monotonic() - began:.0f} s")
            except BaseException:
                process.kill()
                raise
    if process.returncode != 0:
        tail = "\n".join(output.splitlines()[-40:])
        raise ImportError(f"building dl_comm's op library for {name} failed:\n$ {' '.join(command)}\n{tail}")
