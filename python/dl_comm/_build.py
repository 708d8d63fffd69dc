"""Builds the op libraries: C++ against the installed framework, about a minute, no Rust.

Libraries that were built after the install live in a cache, in a folder named by what they depend on: framework and its
version, Python, dl_comm and its core. Ranks that start together build once: one holds a lock, the others wait for it.

What is in the cache is loaded into the process, so it is checked before: that nobody else can have put it there, and
that it is whole (size and hash, which the build has noted).
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
from pathlib import Path

from dl_comm._dl_comm import __version__
from dl_comm._frameworks import framework_version
from dl_comm._paths import CORE, PACKAGE, SOURCES

_LIBRARY = {"torch": "libdl_comm_torch.so", "tensorflow": "libdl_comm_tf.so"}
_OPTION = {"torch": "TORCH", "tensorflow": "TF"}
_TORCH_CUDA = "libdl_comm_torch_cuda.so"
_MANIFEST = "built.json"
"""In a folder of the cache: the size and the hash of each library. Written last."""
_STABLE_TORCH = (2, 10)
"""The oldest torch that has what the library uses: TORCH_TARGET_VERSION in torch_ops/CMakeLists.txt."""


def packaged_library(framework: str) -> Path | None:
    """The library that was built at install, if it serves the framework that is installed now.

    TensorFlow's is for the one version that it was built for. torch's uses the stable ABI, so it is for every version
    from ``_STABLE_TORCH`` on; a torch with CUDA needs the library for CUDA too, which a build for one without lacks.
    """
    library = PACKAGE / _LIBRARY[framework]
    built_for = PACKAGE / f"{_LIBRARY[framework]}.built-for"
    if not library.exists() or not built_for.exists():
        return None
    if framework == "torch":
        serves = _has_stable_abi(framework_version("torch")) and (
            (PACKAGE / _TORCH_CUDA).exists() or not _torch_has_cuda()
        )
    else:
        serves = built_for.read_text().strip() == framework_version(framework)
    return library if serves else None


def _has_stable_abi(version: str) -> bool:
    """Whether this torch (``torch-2.11.0+cu130``) has the stable ABI that the library was compiled for."""
    found = re.search(r"-(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= _STABLE_TORCH


def _torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA; torch is not imported for that."""
    found = importlib.util.find_spec("torch")
    return bool(found and found.origin and (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists())


def cache_dir() -> Path:
    """The folder of built libraries: ``DL_COMM_CACHE``, else ``dl_comm`` in the user's cache folder."""
    chosen = os.environ.get("DL_COMM_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dl_comm"


def existing_library(framework: str) -> Path | None:
    """The library for the framework version that is installed now, if it was built already; builds nothing."""
    folder = cache_dir() / _key(framework)
    return packaged_library(framework) or (folder / _LIBRARY[framework] if _is_intact(folder) else None)


def cached_library(framework: str, force: bool = False) -> Path:
    """The library in the cache, built first where it is not there (or ``force``).

    Raises:
        ImportError: It cannot be built; the text says why and what to do.
    """
    folder = cache_dir() / _key(framework)
    library = folder / _LIBRARY[framework]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_permissions(folder)
        if _is_intact(folder) and not force:
            return library
        with _locked(folder / "lock"):
            if force or not _is_intact(folder):
                if (folder / _MANIFEST).exists() and not force:
                    print(f"dl_comm: {folder} is damaged", file=sys.stderr)
                for leftover in folder.glob("build.*"):  # of a build that was killed; we hold the lock
                    shutil.rmtree(leftover)
                _build(framework, folder)
    except OSError as error:
        raise ImportError(
            f"dl_comm cannot keep the operations for {framework} in {folder}: {error}; set DL_COMM_CACHE to a folder "
            "that can be written to and locked"
        ) from error
    return library


def _key(framework: str) -> str:
    core = hashlib.sha256(CORE.read_bytes())
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        core.update(source.read_bytes())
    # The library finds the core by its path, so the place of the package counts too.
    core.update(str(PACKAGE).encode())
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return f"{framework_version(framework)}-{python}-dl_comm-{__version__}-{core.hexdigest()[:16]}"


def _check_permissions(folder: Path) -> None:
    """Makes sure that only this user, root, or who installed dl_comm can have put something into ``folder``.

    Raises:
        ImportError: Another user could; the text says what to do.
    """
    trusted = {os.geteuid(), 0, PACKAGE.stat().st_uid}
    for place, others in ((folder.parent, stat.S_IWOTH), (folder, stat.S_IWGRP | stat.S_IWOTH)):
        about = place.lstat() if place == folder else place.stat()
        sticky = place != folder and about.st_mode & stat.S_ISVTX
        if about.st_uid not in trusted or (about.st_mode & others and not sticky) or not stat.S_ISDIR(about.st_mode):
            raise ImportError(
                f"dl_comm does not load operations from {place}: another user can write there; set DL_COMM_CACHE to a "
                "folder of yours, or remove this one"
            )


def _is_intact(folder: Path) -> bool:
    """Whether the libraries in ``folder`` are as they were built: a full disk, or a copy cut short, leaves others."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        return bool(manifest) and all(_size_and_hash(folder / name) == about for name, about in manifest.items())
    except (OSError, ValueError, AttributeError):  # not there, or damaged itself
        return False


def _size_and_hash(library: Path) -> list[int | str]:
    content = library.read_bytes()
    return [len(content), hashlib.sha256(content).hexdigest()]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(framework: str, folder: Path) -> None:
    # CMake reads CXX, which may have arguments, by itself.
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None and "CXX" not in os.environ:
        raise ImportError(
            f"dl_comm's operations for {framework} must be compiled once for the installed version, and no C++ "
            "compiler was found: install one (for instance g++), set CXX, or build where there is one: "
            "'python -m dl_comm.build'"
        )
    print(
        f"dl_comm: building the operations for {framework_version(framework)} (once, about a minute)", file=sys.stderr
    )
    with tempfile.TemporaryDirectory(prefix="build.", dir=folder) as build:
        options = [
            f"-DDL_COMM_WITH_{name}={'ON' if name == _OPTION[framework] else 'OFF'}" for name in _OPTION.values()
        ]
        configure = [
            _tool("cmake"),
            *("-S", str(SOURCES), "-B", build, f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"),
            *(f"-DCMAKE_INSTALL_PREFIX={build}/out", "-DDL_COMM_INSTALL_DIR=."),
            *(f"-DDL_COMM_CORE_LIBRARY={CORE}", f"-DCMAKE_INSTALL_RPATH={PACKAGE}"),
            *options,
        ]
        ninja = _tool("ninja", required=False)
        if "CXX" not in os.environ:
            configure += [f"-DCMAKE_CXX_COMPILER={compiler}"]
        if ninja:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        _run(configure, framework)
        _run([_tool("cmake"), "--build", build], framework)
        _run([_tool("cmake"), "--install", build], framework)
        libraries = sorted(Path(build, "out").glob("*.so"))
        manifest = Path(build, _MANIFEST)
        manifest.write_text(json.dumps({library.name: _size_and_hash(library) for library in libraries}))
        # A rename is atomic. What others look for comes last.
        for file in (*libraries, manifest):
            os.replace(file, folder / file.name)


def _tool(name: str, required: bool = True) -> str:
    in_scripts = Path(sysconfig.get_path("scripts"), name)
    found = str(in_scripts) if in_scripts.exists() else shutil.which(name)
    if found is None and required:
        raise ImportError(f"{name} was not found; 'pip install {name}' brings it")
    return found or ""


def _run(command: list[str], framework: str) -> None:
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-40:])
        raise ImportError(f"building dl_comm's operations for {framework} failed:\n$ {' '.join(command)}\n{tail}")
