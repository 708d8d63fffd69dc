#!/usr/bin/env bash
# Tests dl_comm on the GPUs of this machine:  tests/gpu/run.sh [WHEELS [PART...]]  or  tests/gpu/run.sh WHEELS stage N...
# WHEELS is a folder from tests/gpu/wheel.sh, installed into a temporary folder for this run; "-" tests the installed
# packages. Parts: auto ipc staged nccl (the tests on that path), distributed (torch.distributed), hosts, faults, mnist,
# memcheck, benchmark; all by default.
# Stages (1 to 10) are lists of parts in the recommended order for a new machine, each of ten minutes at most (README.md).
# PYTHON (python3) needs torch and NumPy; RANKS are the numbers of ranks ("1 2 3 4"); BENCH are options of
# benchmarks.allreduce; OUT (gpu_out) gets the log and results.json; each run appends to it.
# DL_COMM_TEST_DEVICE=cpu runs the same tests on host memory. Prints a line for each step; the exit status is 1 if one failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/gpu/common.sh

wheels=${1:--}
shift $(($# > 0))
stages=()
if [ "${1:-}" = stage ]; then
  stages=("${@:2}")
  [ ${#stages[@]} -gt 0 ] || { echo "run.sh: missing stage number (1 to 10)" >&2; exit 2; }
  set --
fi
parts=("$@")
[ $# -gt 0 ] || [ ${#stages[@]} -gt 0 ] || parts=(auto ipc staged nccl distributed hosts faults mnist memcheck benchmark)
export OUT=${OUT:-$PWD/gpu_out}
python=${PYTHON:-python3}
ranks=(${RANKS:-1 2 3 4})
device=${DL_COMM_TEST_DEVICE:-cuda}
bench=${BENCH:---ranks 2 --sizes 4K 256M --dtypes f32 bf16 --kinds buffer latency}
on_ranks=(tests/gpu/test_gpu_{average,calls,collectives,arrays,streams,training}.py)
for part in "${parts[@]}"; do
  case $part in
    auto | ipc | staged | nccl | distributed | hosts | faults | mnist | memcheck | benchmark) ;;
    *) echo "run.sh: no part $part" >&2; exit 2 ;;
  esac
done
for stage in "${stages[@]}"; do
  case $stage in
    [1-9] | 10) ;;
    *) echo "run.sh: no stage $stage" >&2; exit 2 ;;
  esac
done
mkdir -p "$OUT"
: >"$OUT/summary.txt"
: >"$OUT/steps.txt"
exec > >(tee "$OUT/log.txt") 2>&1
tee=$!

finish() { # STATUS: prints the summary after the log is complete
  exec >&- 2>&-
  wait "$tee"
  exit "$1"
}

failed=0
stage=
until= # when the stage's ten minutes end, in seconds since the start
note() { # NAME STATUS SECONDS WHY: for results.json
  printf '%s\t%s\t%s\t%s\t%s\n' "$stage" "$1" "$2" "$3" "$4" >>"$OUT/steps.txt"
}

step() { # NAME COMMAND...: runs it and records the result
  local name=$1 since=$SECONDS word
  shift
  if [ -n "$until" ] && [ $((until - SECONDS)) -lt 10 ]; then
    leave_out "$name" "the time of the stage is over"
    failed=1
    return
  fi
  echo
  echo "== $name ($(date +%H:%M:%S))"
  if "$@"; then word=passed; else word=FAILED && failed=1; fi
  echo "$name: $word ($((SECONDS - since)) s)" | tee -a "$OUT/summary.txt"
  note "$name" "${word,,}" $((SECONDS - since)) ""
}

leave_out() { # NAME WHY
  echo "$1: left out, $2" | tee -a "$OUT/summary.txt"
  note "$1" "left out" 0 "$2"
}

at_most() { # SECONDS: this limit, or the rest of the stage's time
  if [ -n "$until" ] && [ $((until - SECONDS)) -lt "$1" ]; then echo $((until - SECONDS)); else echo "$1"; fi
}

test_on() { # RANKS SECONDS ARGUMENT...: pytest on ranks
  local count=$1 seconds
  seconds=$(at_most "$2")
  shift 2
  "$python" tests/launch.py "$count" "$seconds" "$python" -m pytest -q --tb=short --maxfail=5 "$@"
}

has_mps() { # whether there are a GPU and NVIDIA's Multi-Process Service (MPS)
  [ "$gpus" -gt 0 ] && command -v nvidia-cuda-mps-control >/dev/null
}

nccl_runs_on() { # RANKS: whether NCCL can; before 2.30 it needs a GPU for each rank
  [ "$1" -le "$gpus" ] || { has_mps && "$python" -c 'import ctypes, torch
version = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
raise SystemExit(version.value < 23000)'; }
}

by_path() { # PATH [TEXT]: the tests on that path, and a label
  local count run
  for count in "${ranks[@]}"; do
    run=(test_on)
    if [ "$1" = nccl ] && ! nccl_runs_on "$count"; then
      leave_out "nccl on $count ranks" "found $gpus GPUs; NCCL needs one for each rank, or NCCL 2.30 and MPS"
      continue
    fi
    [ "$1" != nccl ] || [ "$count" -le "$gpus" ] || run=(with_mps test_on)
    DL_COMM_GPU_PATH=$1 NCCL_MULTI_RANK_GPU_ENABLE=1 step "$1 on $count ranks${2:+, $2}" \
      "${run[@]}" "$count" 240 "${on_ranks[@]}"
  done
}

distributed() { # the backend of torch.distributed, which starts its ranks without MPI
  local count
  for count in "${ranks[@]}"; do
    step "torch.distributed on $count ranks" "$python" tests/ranks.py "$count" "$(at_most 240)" \
      "$python" -m pytest -q --tb=short --maxfail=5 tests/gpu/test_gpu_distributed.py
  done
}

hosts() { # the averages on 4 ranks, two of which have another host name: ipc within the two, slices between them
  local inside='if [ $((PMI_RANK / 2)) = 1 ]; then exec unshare --uts sh -c "hostname another; exec \"\$@\"" sh "$@"; fi; exec "$@"'
  if ! unshare --uts true 2>/dev/null; then
    leave_out hosts "this process may not set host names"
    return
  fi
  DL_COMM_GPU_PATH=ipc step "two hosts, 4 ranks" "$python" tests/launch.py 4 "$(at_most 300)" bash -c "$inside" bash \
    "$python" -m pytest -q --tb=short --maxfail=5 tests/gpu/test_gpu_average.py
}

alone() { # SECONDS FILE: tests that start their own ranks
  timeout -k 10 "$(at_most "$1")" "$python" -m pytest -q --tb=short "$2"
}

memcheck() { # one allocation for each tensor, so that an access beyond its end is detected
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
  if [ "$device" = cpu ] || [ -z "$sanitizer" ]; then
    leave_out memcheck "no compute-sanitizer or no GPU"
    return
  fi
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 DL_COMM_TIMEOUT_S=200 step "memcheck on 2 ranks" "$python" tests/launch.py 2 "$(at_most 400)" \
    "$sanitizer" --tool memcheck --report-api-errors no --error-exitcode 86 --print-limit 20 \
    "$python" -m pytest -q --tb=short --maxfail=1 -k "not large and not thousands" tests/gpu/test_gpu_average.py
}

benchmark() { # [NAME [PREFIX]]: benchmarks.allreduce with $BENCH, results in a folder of that name
  local name=${1:-benchmark}
  if [ "$device" = cpu ] || ! "$python" -m benchmarks.allreduce --help 2>/dev/null | grep -q -- --device; then
    leave_out "$name" "no GPU, or benchmarks.allreduce has no --device"
    return
  fi
  # shellcheck disable=SC2086 # split into words
  step "$name" ${2:-} timeout -k 10 "$(at_most 560)" "$python" -m benchmarks.allreduce --device cuda $bench --out "$OUT/$name"
}

with_mps() { # COMMAND...: runs it with MPS, which runs kernels of several processes at a time
  local status
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  nvidia-cuda-mps-control -d && "$@"
  status=$?
  echo quit | nvidia-cuda-mps-control
  rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  return $status
}

driver() { # compares the driver with the fake driver
  local nccl
  if [ "$device" = cpu ]; then
    leave_out driver "no GPU"
    return
  fi
  nccl=$("$python" -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null)
  LD_LIBRARY_PATH=${nccl:+$nccl/lib:}${LD_LIBRARY_PATH:-} step driver timeout -k 10 "$(at_most 60)" \
    "$python" tests/fake_cuda/programs.py asynchronous
}

describe() { # prints the machine
  [ "$device" = cpu ] || nvidia-smi || return 1
  uname -r && df -hT /dev/shm "${TMPDIR:-/tmp}"
}

run_part() { # PART
  local path
  case $1 in
    auto | ipc | staged | nccl) by_path "$1" ;;
    distributed) distributed ;;
    hosts) hosts ;;
    faults)
      for path in ipc staged; do DL_COMM_GPU_PATH=$path step "faults by $path" alone 280 tests/gpu/test_gpu_faults.py; done
      # Without MPS, whose other processes fail too if one is killed.
      if nccl_runs_on 2; then
        DL_COMM_GPU_PATH=nccl NCCL_MULTI_RANK_GPU_ENABLE=1 step "faults by nccl" alone 280 tests/gpu/test_gpu_faults.py
      fi
      ;;
    mnist) step mnist alone 220 tests/gpu/test_gpu_mnist.py ;;
    memcheck) memcheck ;;
    benchmark) benchmark ;;
  esac
}

run_stage() { # NUMBER
  local setting
  stage=$1
  until=$((SECONDS + 580))
  echo
  echo "=== stage $stage"
  case $stage in
    1) step machine describe ;;
    2) driver ;;
    3) ranks=(${RANKS:-1}) && run_part auto ;;
    4) ranks=(${RANKS:-2}) && run_part ipc ;;
    5) ranks=(${RANKS:-2}) && run_part staged ;;
    6) run_part benchmark ;;
    7) run_part faults ;;
    8)
      ranks=(${RANKS:-2})
      for setting in expandable_segments:True backend:cudaMallocAsync; do
        PYTORCH_CUDA_ALLOC_CONF=$setting by_path ipc "$setting"
      done
      ;;
    9)
      ranks=(${RANKS:-3 4})
      for part in ipc distributed hosts mnist; do run_part "$part"; done
      ;;
    10)
      run_part memcheck
      if has_mps; then benchmark benchmark_mps with_mps; else leave_out benchmark_mps "no GPU or no MPS"; fi
      ranks=(${RANKS:-2}) && run_part nccl
      ;;
  esac
}

if [ "$wheels" != - ]; then install "$wheels" || finish 1; fi
gpus=$([ "$device" = cpu ] || nvidia-smi -L 2>/dev/null | grep -c .)
gpus=${gpus:-0}
nvidia-smi -L 2>/dev/null
df -h /dev/shm
shared_memory
step "import" "$python" -c '
import sys, numpy, torch, dl_comm, dl_comm.torch
from dl_comm._libraries.build import packaged_library
print("python", sys.version.split()[0], "numpy", numpy.__version__, "torch", torch.__version__, "CUDA", torch.version.cuda)
print("GPUs", torch.cuda.device_count(), "dl_comm", dl_comm.__file__, "operations", packaged_library("torch"))'
# Everything else would fail too.
if [ $failed -eq 0 ]; then
  for part in "${parts[@]}"; do run_part "$part"; done
  for number in "${stages[@]}"; do run_stage "$number"; done
fi
"$python" tests/gpu/results.py "$OUT" || failed=1
echo
cat "$OUT/summary.txt"
finish $failed
