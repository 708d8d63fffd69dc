#!/usr/bin/env bash
# Sets everything up, then runs every check and test: the one gate.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The shell's environment must not affect the results: keep only the variables in CONTRIBUTING.md.
if [ "${1:-}" != --scrubbed ]; then
  kept=()
  for name in HOME PATH LANG TMPDIR PYTHON MPICC CC CXX MPIEXEC MPIEXEC_ARGS DL_COMM_VENV DL_COMM_TEST_MNIST \
    DL_COMM_TEST_ROUNDS CARGO_HOME RUSTUP_HOME PIP_INDEX_URL PIP_CONFIG_FILE SSL_CERT_FILE \
    http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [ -z "${!name+set}" ] || kept+=("$name=${!name}")
  done
  exec env -i "${kept[@]}" bash tests/run.sh --scrubbed
fi

step() {
  echo
  echo "== $* ($(date +%H:%M:%S))"
}

step "set-up"
examples/setup.sh torch tensorflow examples test docs
venv=$(cd "${DL_COMM_VENV:-.venv}" && pwd)
export PATH="$venv/bin:$HOME/.cargo/bin:$PATH"
export MPICC="${MPICC:-$venv/bin/mpicc}" PYO3_PYTHON="$venv/bin/python" DL_COMM_TEST_PYTHON="$venv/bin/python"
LIBCLANG_PATH="${LIBCLANG_PATH:-$(python -c 'import clang; print(clang.__path__[0])')/native}"
BINDGEN_EXTRA_CLANG_ARGS="-isystem $(cc -print-file-name=include)"
export LIBCLANG_PATH BINDGEN_EXTRA_CLANG_ARGS
# All optional packages are installed: tests fail instead of skipping.
export DL_COMM_TEST_EVERYTHING=1
# A cache of this checkout, so that its op libraries are built anew.
export DL_COMM_CACHE="$PWD/build/cache"
# glibc overwrites memory that is freed, so that a read of it fails every time.
export MALLOC_PERTURB_=165

step "format and lint: Rust"
cargo fmt --all --check
cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
# The fuzzers are a workspace of their own, and run in tests/heavy.sh only.
cargo check --manifest-path fuzz/Cargo.toml --target-dir target --locked --quiet
step "format and lint: Python, C++"
ruff check python tests examples benchmarks
ruff format --check python tests examples benchmarks
mypy
git ls-files '*.c' '*.cc' '*.cu' '*.cuh' '*.h' | xargs clang-format --dry-run --Werror

step "op libraries"
python -m dl_comm.build

step "Rust and C tests"
LD_LIBRARY_PATH="$venv/lib" cargo test --workspace --locked --quiet

# Separate processes: the compilers of torch and TensorFlow abort in one process.
for ranks in 1 2 3; do
  for bindings in "numpy torch" "tensorflow tf1 keras"; do
    step "Python tests on $ranks rank(s): $bindings"
    files=()
    for binding in $bindings; do files+=(tests/parallel/test_"$binding"*.py); done
    python tests/launch.py "$ranks" 900 python -m pytest -x -q "${files[@]}"
  done
done

for ranks in 1 2 3; do
  step "torch.distributed on $ranks rank(s)"
  python tests/ranks.py "$ranks" 400 python -m pytest -x -q -m "not heavy" tests/c10d
done
step "torch.distributed: scripts and faults"
python -m pytest -q -m "not heavy" tests/c10d

step "Python tests that start programs"
python -m pytest -q -m "not heavy" --durations=25 tests/single
step "faults"
python -m pytest -q -m "not heavy" --durations=10 tests/faults

step "all passed"
