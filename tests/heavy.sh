#!/usr/bin/env bash
# The checks that are too slow for the gate: the model of the shared memory, the thread sanitizer, the fuzzers (what they
# cover is in docs/model.md), the slowest programs, the faults again and again, and the soak. Needs the environment of
# tests/run.sh (run that first); a check whose tool is not there is skipped, with words.
# tests/heavy.sh [model|tsan|fuzz|programs|faults|soak]...
# FUZZ_SECONDS: for each fuzzer, 60 unless set. FAULT_ROUNDS: 20. SOAK_MINUTES: 20.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$(cd "${DL_COMM_VENV:-.venv}" && pwd) || exit 1
export PATH="$venv/bin:$HOME/.cargo/bin:$PATH" LD_LIBRARY_PATH="$venv/lib"
export MPICC="${MPICC:-$venv/bin/mpicc}" PYO3_PYTHON="$venv/bin/python" DL_COMM_DUMP_DIR=none
LIBCLANG_PATH="${LIBCLANG_PATH:-$(python -c 'import clang; print(clang.__path__[0])')/native}"
BINDGEN_EXTRA_CLANG_ARGS="-isystem $(cc -print-file-name=include)"
export LIBCLANG_PATH BINDGEN_EXTRA_CLANG_ARGS

cases=("$@")
[ $# -gt 0 ] || cases=(model tsan fuzz programs faults soak)
target=x86_64-unknown-linux-gnu

nightly() { # whether there is a nightly toolchain, with the sources of the standard library
  [ -d "$(rustc +nightly --print sysroot 2>/dev/null)/lib/rustlib/src/rust/library" ]
}

model() { # every order of the ranks' steps, within the bounds of core/tests/model.rs
  CARGO_TARGET_DIR=target/model RUSTFLAGS="--cfg loom" \
    timeout 900 cargo test --release --locked -p dl_comm_core --test model -- --nocapture
}

tsan() { # the ranks as threads, under the thread sanitizer; the standard library is built with it too
  nightly || { echo "skipped: needs 'rustup toolchain install nightly --component rust-src'" && return 2; }
  CARGO_TARGET_DIR=target/tsan RUSTFLAGS="-Zsanitizer=thread" timeout 1800 cargo +nightly test --locked \
    -Zbuild-std --target "$target" -p dl_comm_core --test collectives --test matching --test schedules --test failures
}

fuzz() {
  nightly && cargo fuzz --version >/dev/null 2>&1 || { echo "skipped: needs nightly and 'cargo install cargo-fuzz'" && return 2; }
  local name
  # The leaks are MPI's, at the end of the process.
  export ASAN_OPTIONS=detect_leaks=0
  for name in $(cargo +nightly fuzz list); do
    timeout $((${FUZZ_SECONDS:-60} + 900)) cargo +nightly fuzz run "$name" -- \
      -max_total_time="${FUZZ_SECONDS:-60}" -timeout=20 -max_len=4096 -rss_limit_mb=4096 -verbosity=0 || return 1
  done
}

programs() { # those of tests/single that the gate leaves out
  DL_COMM_TEST_EVERYTHING=1 DL_COMM_CACHE="$PWD/build/cache" env -u LD_LIBRARY_PATH python -m pytest -q -m heavy tests/single
}

faults() { # every fault, on every binding, on one host and on two
  DL_COMM_TEST_ROUNDS="${FAULT_ROUNDS:-20}" python -m pytest -q tests/faults
}

soak() { # random calls on three ranks: right values, and memory that does not grow
  python tests/launch.py 3 $((${SOAK_MINUTES:-20} * 60 + 300)) python tests/soak.py --minutes "${SOAK_MINUTES:-20}"
}

for case in "${cases[@]}"; do
  echo "== $case ($(date +%H:%M:%S))"
  case $case in
    model | tsan | fuzz | programs | faults | soak) ("$case") ;;
    *) echo "no case $case" && false ;;
  esac
  case $? in
    0) results+=("$case: passed") ;;
    2) results+=("$case: skipped") ;;
    *) results+=("$case: FAILED") ;;
  esac
done
printf '%s\n' "${results[@]}"
[[ ${results[*]} != *FAILED* ]]
