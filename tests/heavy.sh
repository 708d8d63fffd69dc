#!/usr/bin/env bash
# Checks that are too slow for the gate: Loom, the thread sanitizer, the fuzzers (docs/verification.md describes them), the slowest
# programs, repeated faults, and the soak test. Needs the environment of tests/run.sh (run that first); checks without their
# tool are skipped with a message.
# tests/heavy.sh [loom|tsan|properties|aarch64|fuzz|ranks|random|programs|c10d|faults|soak]...
# FUZZ_SECONDS (60): for each fuzzer. FAULT_ROUNDS (20). SOAK_MINUTES (20).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source tests/environment.sh
[ -x "$venv/bin/python" ] || { echo "no $venv: run tests/run.sh first" >&2 && exit 1; }
export LD_LIBRARY_PATH="$venv/lib" DL_COMM_DUMP_DIR=none

cases=("$@")
[ $# -gt 0 ] || cases=(loom tsan properties aarch64 fuzz ranks random programs c10d faults soak)
target=x86_64-unknown-linux-gnu

loom() { # Loom: all interleavings within the bounds of core/tests/loom*.rs
  CARGO_TARGET_DIR=target/loom RUSTFLAGS="--cfg loom" \
    timeout 3000 cargo test --release --locked -p dl_comm_core --test loom --test loom_zero_copy --test loom_hosts \
    --test loom_mailbox --test loom_cached --test loom_block_lock -- --nocapture
}

tsan() { # ranks as threads under the thread sanitizer, with an instrumented standard library
  [ -d "$(rustc --print sysroot)/lib/rustlib/src/rust/library" ] ||
    { echo "skipped: needs 'rustup component add rust-src'" && return 2; }
  # RUSTC_BOOTSTRAP makes a stable compiler accept options that only nightly has.
  RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=target/tsan RUSTFLAGS="-Zsanitizer=thread" timeout 1800 cargo test --locked \
    -Zbuild-std --target "$target" -p dl_comm_core --test collectives --test matching --test schedules --test failures \
    --test parameter_server --test concurrent_calls \
    -- --skip a_broadcast_may_write_the_same_memory_twice # by several threads, with equal bytes
}

properties() { # all random cases of the property tests, of which the gate runs a third, and the C programs as C++ on 1 to 3 ranks
  export DL_COMM_TEST_CASES=all
  timeout 1800 cargo test --locked -p dl_comm_core -p dl_comm_python &&
    timeout 900 cargo test --locked -p dl_comm_core -p dl_comm_python -p dl_comm_tests --test c_api --test cuda_kernels
}

aarch64() { # the Rust code for the other kind of processor, whose char is unsigned, for example
  [ -d "$(rustc --print target-libdir --target aarch64-unknown-linux-gnu)" ] && command -v aarch64-linux-gnu-g++ >/dev/null ||
    { echo "skipped: needs 'rustup target add aarch64-unknown-linux-gnu', and on Debian g++-aarch64-linux-gnu" && return 2; }
  # Nothing is linked, so the headers of this machine's MPI do.
  source release/cross.sh aarch64
  CARGO_TARGET_DIR=target/aarch64 cargo clippy --locked --package=dl_comm_core --package=dl_comm_python -- -D warnings
}

fuzz() {
  cargo fuzz --version >/dev/null 2>&1 || { echo "skipped: needs 'cargo install cargo-fuzz'" && return 2; }
  local name
  # MPI leaks memory at exit. RUSTC_BOOTSTRAP as above.
  export ASAN_OPTIONS=detect_leaks=0 RUSTC_BOOTSTRAP=1
  for name in $(cargo fuzz list); do
    timeout $((${FUZZ_SECONDS:-60} + 900)) cargo fuzz run "$name" -- \
      -max_total_time="${FUZZ_SECONDS:-60}" -timeout=20 -max_len=4096 -rss_limit_mb=4096 -verbosity=0 || return 1
  done
}

ranks() { # the tests of the bindings that the gate runs on two ranks only, or not at all
  local ranks names files name which
  export DL_COMM_CACHE="$PWD/build/cache" DL_COMM_TEST_EVERYTHING=1
  python -m dl_comm.build || return 1 # takes longer than a test may
  for ranks in 1 2 3; do
    for names in "numpy torch" "tensorflow tf1 keras"; do
      # The last two are TensorFlow's.
      files=(--frameworks="${names% tf1 keras}" tests/parallel/test_{averages,batch_norm,collectives,documentation,helpers,lists_with_counts,parameter_server,schedules}.py)
      for name in $names; do files+=(tests/parallel/test_"$name"*.py); done
      which="costly or heavy"
      [ "$ranks $names" != "3 tensorflow tf1 keras" ] || which="" # the gate runs none of them
      python tests/launch.py "$ranks" 1200 python -m pytest -x -q -m "$which" "${files[@]}" || return 1
    done
  done
}

random() { # random programs against a model, on every framework
  local ranks
  export DL_COMM_CACHE="$PWD/build/cache" DL_COMM_TEST_EVERYTHING=1
  python -m dl_comm.build || return 1 # takes longer than a test may
  for ranks in 1 2 3 4; do
    python tests/launch.py "$ranks" 1800 python -m pytest -x -q -m heavy tests/parallel/test_random_programs.py || return 1
  done
}

programs() { # the tests that start programs and that the gate skips
  export DL_COMM_CACHE="$PWD/build/cache" DL_COMM_TEST_EVERYTHING=1
  python -m dl_comm.build || return 1 # takes longer than a test may
  env -u LD_LIBRARY_PATH python -m pytest -q -m heavy -n 4 --timeout=900 --dist=loadgroup tests/single tests/horovod/programs
}

c10d() { # all tests of torch.distributed on up to four ranks, its faults again and again
  local ranks
  export DL_COMM_CACHE="$PWD/build/cache"
  python -m dl_comm.build torch || return 1 # takes longer than a test may
  for ranks in 1 2 3 4; do
    python tests/ranks.py "$ranks" 900 python -m pytest -q tests/c10d || return 1
  done
  DL_COMM_TEST_ROUNDS="${FAULT_ROUNDS:-20}" python -m pytest -q tests/c10d
}

faults() { # every fault, in every binding, on one host and on two
  DL_COMM_TEST_ROUNDS="${FAULT_ROUNDS:-20}" python -m pytest -q tests/faults
}

soak() { # random calls on two and three ranks: checks values and memory growth
  local ranks minutes=${SOAK_MINUTES:-10}
  for ranks in 2 3; do
    python tests/launch.py "$ranks" $((minutes * 60 + 300)) python tests/soak.py --minutes "$minutes" || return 1
  done
}

for case in "${cases[@]}"; do
  echo "== $case ($(date +%H:%M:%S))"
  case $case in
    loom | tsan | properties | aarch64 | fuzz | ranks | random | programs | c10d | faults | soak) ("$case") ;;
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
