"""The stages of the gate. They start in this order, as far as ``after`` and the number of processors allow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob


@dataclass(frozen=True)
class Stage:
    """A command of the gate.

    It starts after the stages ``after`` have passed. ``limit_s``: it is killed then. ``fast``: part of
    ``tests/run.sh fast``.
    """

    name: str
    command: Sequence[str]
    after: tuple[str, ...] = ()
    limit_s: int = 600
    fast: bool = False


def bash(*lines: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]


def compiles(*command: str) -> list[str]:
    """A command that runs no test: it takes longer if freed memory is overwritten, which shows nothing of ours."""
    return ["env", "-u", "MALLOC_PERTURB_", *command]


def cargo(*arguments: str) -> list[str]:
    return ["cargo", *arguments, "--locked", "--quiet"]


def cargo_test(*arguments: str) -> str:
    """Compiles tests, and runs them."""
    return f"{' '.join(compiles(*cargo('test', '--no-run', *arguments)))}\n{' '.join(cargo('test', *arguments))}"


def clippy(*packages: str) -> list[str]:
    return [*compiles(*cargo("clippy", *packages, "--all-targets")), "--", "-D", "warnings"]


def pytest(*arguments: str) -> list[str]:
    return ["python", "-m", "pytest", "-q", *arguments]


def bindings(names: str, ranks: int) -> Stage:
    """The tests of some bindings on ranks. The compilers of torch and TensorFlow abort in one process."""
    frameworks = ",".join(name for name in names.split() if name in ("numpy", "torch", "tensorflow"))
    shared = [f"tests/parallel/test_{what}.py" for what in SHARED]
    files = shared + sorted(path for name in names.split() for path in glob(f"tests/parallel/test_{name}*.py"))
    # What takes long and depends little on the number of ranks runs on two; tests/heavy.sh runs all on one and three.
    which = ["-m", "not heavy" if ranks == 2 else "not heavy and not costly"]
    command = [
        "python",
        "tests/launch.py",
        str(ranks),
        "800",
        *pytest("-x", f"--frameworks={frameworks}", *which, *files),
    ]
    return Stage(f"{names.replace(' ', ', ')} on {ranks}", command, BUILT, limit_s=900, fast=ranks == 2)


def distributed(ranks: int) -> Stage:
    """``torch.distributed`` on ranks."""
    command = ["python", "tests/ranks.py", str(ranks), "400", *pytest("-x", "-m", "not heavy", "tests/c10d")]
    return Stage(f"torch.distributed on {ranks}", command, BUILT, fast=ranks == 2)


def programs(folder: str, jobs: int) -> list[str]:
    """Tests that start programs of their own and mostly wait for them: several at a time."""
    return pytest("-m", "not heavy", f"--numprocesses={jobs}", "--dist=loadgroup", folder)


SHARED = (
    "averages",
    "batch_norm",
    "collectives",
    "documentation",
    "helpers",
    "lists_with_counts",
    "parameter_server",
    "random_programs",
    "schedules",
)
"""The files of ``tests/parallel`` with tests for every framework."""
SETUP = ("set-up",)
LIBRARIES = ("--package=dl_comm_core", "--package=dl_comm_python")
"""In every command of cargo: with other packages their dependencies have other features, and compile anew."""
C_TESTS = ("c_api", "tf_ops", "cuda_kernels")
BUILT = ("op libraries",)

STAGES = [
    # The tools are there already: what needs no framework runs while pip downloads them.
    Stage(
        "set-up",
        compiles("examples/setup.sh", "torch", "tensorflow", "examples", "test", "docs"),
        limit_s=1500,
        fast=True,
    ),
    Stage(
        "format",
        bash(
            "cargo fmt --all --check",
            "ruff check python tests examples benchmarks",
            "ruff format --check python tests examples benchmarks",
            "git ls-files '*.c' '*.cc' '*.cu' '*.cuh' '*.h' | xargs clang-format --dry-run --Werror",
        ),
        fast=True,
    ),
    Stage(
        "core",
        bash('export LD_LIBRARY_PATH="$VENV/lib"', cargo_test(*LIBRARIES)),
        limit_s=900,
        fast=True,
    ),
    # The fuzzers run in tests/heavy.sh only. For a check, libFuzzer is not compiled.
    Stage(
        "lint Rust",
        ["env", f"CUSTOM_LIBFUZZER_PATH={os.path.abspath('fuzz/Cargo.toml')}"]
        + clippy(*LIBRARIES, "--package=dl_comm_fuzz"),
        ("core",),
        fast=True,
    ),
    Stage("op libraries", compiles("python", "-m", "dl_comm.build"), SETUP, limit_s=900, fast=True),
    # The package, and what it tells the type checker of a user.
    Stage("types", bash("mypy", "mypy tests/typing/user.py"), SETUP, fast=True),
    # The longest stage: beside it run the others, one after the other.
    Stage("programs", programs("tests/single", 3), BUILT, limit_s=1800),
    Stage(
        "C, TensorFlow's C API",
        bash(
            " ".join(clippy(*LIBRARIES, "--package=dl_comm_tests")),
            'export LD_LIBRARY_PATH="$VENV/lib"',
            cargo_test(*LIBRARIES, "--package=dl_comm_tests", *(f"--test={name}" for name in C_TESTS)),
        ),
        (*BUILT, "core"),
    ),
    *(
        bindings(names, ranks)
        for ranks in (2, 3, 1)
        for names in ("numpy torch", "tensorflow tf1 keras")
        # On three ranks TensorFlow shows little that the others do not; tests/heavy.sh runs it.
        if (names, ranks) != ("tensorflow tf1 keras", 3)
    ),
    *(distributed(ranks) for ranks in (2, 3, 1)),
    Stage("torch.distributed: programs", programs("tests/c10d", 2), BUILT),
    Stage("faults", programs("tests/faults", 2), BUILT),
    *(
        Stage(
            f"Horovod: {name} on 2",
            ["python", "tests/launch.py", "2", "400", *pytest("-x", f"tests/horovod/{path}")],
            BUILT,
        )
        for name, path in (("torch", "ranks"), ("TensorFlow", "ranks_tensorflow"))
    ),
    Stage("Horovod: programs", programs("tests/horovod/programs", 2), BUILT),
]
