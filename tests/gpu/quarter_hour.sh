#!/usr/bin/env bash
# What one GPU shows in a quarter of an hour:  tests/gpu/quarter_hour.sh [--dry-run] [WHEELS [STEP...]]
# Nine steps of at most 530 s together (tests/gpu/quarter_hour.py has them, and the numbers that each must show).
# WHEELS is a folder from tests/gpu/wheel.sh; "-", the default, tests the installed packages. A file libnccl.so.2.gz there, from
# tests/gpu/nccl_library.py, is the NCCL of the steps that need 2.30.
# --dry-run needs no GPU: the simulated driver or host memory, and shortened steps.
# PYTHON (python3) needs torch and NumPy; OUT (gpu_out) gets quarter_hour.json, the table of docs/gpu.md, and a log for each
# step. The exit status is 1 if a step failed or a number is not as it must be.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/gpu/common.sh

python=${PYTHON:-python3}
out=${OUT:-$PWD/gpu_out}
options=()
if [ "${1:-}" = --dry-run ]; then
  driver=$("$python" tests/fake_cuda_env.py) || exit 1
  options+=(--dry-run "$driver")
  shift
fi
mkdir -p "$out"
wheels=${1:--}
shift $(($# > 0))
[ $# -eq 0 ] || options+=(--steps "$@")
if [ "$wheels" != - ]; then
  install "$wheels" || exit 1
  if [ -f "$wheels/libnccl.so.2.gz" ]; then
    gzip -dc "$wheels/libnccl.so.2.gz" >"$prefix/libnccl.so.2" || exit 1
    options+=(--nccl "$prefix/libnccl.so.2")
  fi
fi
shared_memory
"$python" tests/gpu/quarter_hour.py "$out" "${options[@]}"
status=$?
"$python" tests/gpu/quarter_hour_table.py "$out/quarter_hour.json" | tee "$out/quarter_hour.md" || status=1
exit $status
