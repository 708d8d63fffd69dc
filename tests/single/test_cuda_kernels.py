"""The CUDA kernels compile for every supported GPU without messages, into the expected code.

``tests/rust/cuda_kernels.rs`` tests their results. These tests need no GPU, but NVRTC: torch installs version 13, the
``test`` extra version 12, the last one for compute capabilities 7.0 and 7.2.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvrtc import Compiled, Failed, NotInstalled, Nvrtc

FOLDER = Path(__file__).parents[2] / "core/src/transport/cuda/kernels"
HEADERS = {path.name: path.read_text() for path in FOLDER.glob("*.cuh")}
SOURCES = sorted(path.name for path in FOLDER.glob("*.cu"))
OPTIONS = ["--std=c++17", "--fmad=false", "--prec-div=true", "--ftz=false", "--device-int128"]
LIBRARIES = {"12": "cuda_nvrtc/lib/libnvrtc.so.12", "13": "cu13/lib/libnvrtc.so.13"}
# The oldest target of each version, and a common one.
NEEDED = {"12": {70, 72, 90}, "13": {75, 90}}
# Version 12 always warns about 7.0 and 7.2.
DEPRECATED = re.compile(r"nvrtc: warning: Architectures prior to \S+ are deprecated .*")


@pytest.fixture(params=["12", pytest.param("13", marks=pytest.mark.heavy)])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def nvrtc(version: str) -> Nvrtc:
    try:
        return Nvrtc(LIBRARIES[version])
    except NotInstalled as absent:
        if os.environ.get("DL_COMM_TEST_EVERYTHING"):
            raise
        pytest.skip(f"needs NVRTC {version}: {absent}")


# The kernels of a source: first parts of their names, and the list of their last parts (or one name).
NAMES = {
    "allreduce_mean.cu": {"average_": "TYPES", "copy_bytes": ""},
    "allreduce_integers.cu": {"average_": "OTHER_INTEGERS"},
    "allreduce_min.cu": {"min_": "ORDERED_TYPES"},
    "allreduce_max.cu": {"max_": "ORDERED_TYPES"},
    "allreduce_product.cu": {"product_": "PRODUCT_TYPES"},
    "allreduce_bits.cu": {"": "BIT_OPERATORS"},
    "allreduce_scaled_mean.cu": {"scaled_average_": "FLOAT_TYPES"},
    "allreduce_scaled_min.cu": {"scaled_min_": "FLOAT_TYPES"},
    "allreduce_scaled_max.cu": {"scaled_max_": "FLOAT_TYPES"},
    "allreduce_scaled_product.cu": {"scaled_product_": "FLOAT_TYPES"},
    "allreduce_scaled_integers.cu": {
        "scaled_average_": "WIDE_INTEGERS",
        **dict.fromkeys(["scaled_min_", "scaled_max_", "scaled_product_"], "ORDERED_INTEGERS"),
    },
    "reduce_sum.cu": {"sum_": "TYPES"},
}


def listed(types: str) -> list[str]:
    """The names in a list of types, and in the lists that it names."""
    text = HEADERS["types.cuh"].split(f"#define DL_COMM_{types}(X)")[1].split("#define")[0]
    inner = re.findall(r"DL_COMM_(\w+)\(X\)", text)
    return re.findall(r"X\((\w+), [^\n]+\)", text) + [name for each in inner for name in listed(each)]


def kernels(source: str) -> list[str]:
    """The kernels of the source, by the lists of types."""
    return [first + last for first, types in NAMES[source].items() for last in (listed(types) if types else [""])]


def bodies(ptx: str) -> dict[str, str]:
    """The PTX of every kernel, by name."""
    parts = re.split(r"\.entry\s+(\w+)\s*\(", ptx)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def compiled(nvrtc: Nvrtc, source: str, architecture: str) -> Compiled:
    options = [f"--gpu-architecture={architecture}", *OPTIONS]
    result = nvrtc.compile((FOLDER / source).read_text(), source, options, HEADERS)
    said = DEPRECATED.sub("", result.log).strip()
    assert not said, f"{architecture}: {said}"
    assert sorted(bodies(result.ptx)) == sorted(kernels(source)), architecture
    return result


@pytest.mark.heavy
@pytest.mark.parametrize("source", SOURCES)
def test_the_kernels_compile_for_every_gpu(nvrtc: Nvrtc, version: str, source: str) -> None:
    architectures = [number for number in nvrtc.architectures() if number >= 70]
    assert set(architectures) >= NEEDED[version]
    for number in architectures:
        assert compiled(nvrtc, source, f"sm_{number}").cubin


@pytest.mark.heavy
def test_for_an_h100_they_are_machine_code_that_a_driver_loads(nvrtc: Nvrtc, fake_cuda: Path, tmp_path: Path) -> None:
    files = []
    for architecture in ("sm_90", "sm_80"):
        cubin = compiled(nvrtc, "allreduce_mean.cu", architecture).cubin
        assert cubin.startswith(b"\x7fELF")
        files.append(tmp_path / architecture)
        files[-1].write_bytes(cubin)
    program = Path(__file__).parents[1] / "fake_cuda/programs.py"
    env = {**os.environ, "LD_LIBRARY_PATH": str(fake_cuda), "FAKE_CUDA_CAPABILITY": "90"}
    command = [sys.executable, str(program), "machine_code", *map(str, files)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def assert_exact_in_registers(name: str, ptx: str) -> None:
    # An array with an unknown index would be in local memory.
    assert ".local" not in ptx, name
    # Rounds like the CPU.
    assert not re.search(r"\b(fma|mad)\.\w*\.?f\d\d|\.ftz|\.approx|div\.full", ptx), name


@pytest.mark.heavy
def test_the_ptx_has_the_expected_instructions(nvrtc: Nvrtc) -> None:
    results = {source: compiled(nvrtc, source, "compute_80") for source in SOURCES if source != "reduce_sum.cu"}
    assert not any(result.cubin for result in results.values())
    every = {name: ptx for result in results.values() for name, ptx in bodies(result.ptx).items()}
    for name, ptx in every.items():
        # 16 bytes at a time; four vectors (two of two sources) are loaded before anything is stored.
        moves = re.findall(r"(ld\.global\.cs|st\.global)\.v4\.u32", ptx)
        assert "LLLLSS" in "".join("L" if move.startswith("ld") else "S" for move in moves), name
        assert_exact_in_registers(name, ptx)
    for name in ("average_f32", "average_f16", "average_bf16"):
        assert "div.rn.f32" in every[name], name


def test_the_ptx_of_sums_stores_16_bytes_at_a_time(nvrtc: Nvrtc) -> None:
    for name, ptx in bodies(compiled(nvrtc, "reduce_sum.cu", "compute_80").ptx).items():
        assert "st.global.v4.u32" in ptx, name
        assert_exact_in_registers(name, ptx)


@pytest.mark.heavy
def test_no_register_is_spilled(nvrtc: Nvrtc) -> None:
    """A thread has enough registers with three blocks on a multiprocessor.

    float16 and bfloat16 that are added up in float64 (eight sums of a vector, and its quotients) spill a little, and
    so do short integers with factors, which are multiplied in float64.
    """
    spill = re.compile(r"\w+f16_precise|scaled_\w+_[iu](8|16)")
    options = ["--gpu-architecture=sm_90", *OPTIONS, "--ptxas-options=-v"]
    for source in SOURCES:
        log = nvrtc.compile((FOLDER / source).read_text(), source, options, HEADERS).log
        spilled = re.findall(r"properties for (\w+)\s.*?(\d+) bytes spill stores, (\d+) bytes spill loads", log)
        # Functions that are not inlined have names of C++.
        assert sorted(name for name, *_ in spilled if not name.startswith("_Z")) == sorted(kernels(source)), log
        for name, stores, loads in spilled:
            if not spill.fullmatch(name):
                assert (stores, loads) == ("0", "0"), f"{name}: {log}"


def test_a_compile_error_has_the_log(nvrtc: Nvrtc) -> None:
    with pytest.raises(Failed, match=r"wrong\.cu\(1\): error: .*nothing"):
        nvrtc.compile('extern "C" __global__ void wrong() { nothing; }', "wrong.cu", ["--gpu-architecture=compute_80"])
