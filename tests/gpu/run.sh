#!/usr/bin/env bash
# Tests dl_comm on the GPUs of this machine:  tests/gpu/run.sh [WHEELS [PART...]]
# WHEELS is a folder made by tests/gpu/wheel.sh, installed beside this Python for the run only; - is what is installed
# already. Parts: auto ipc staged nccl (averages by that path), hosts, faults, mnist, memcheck, benchmark; all by default.
# PYTHON (python3) needs torch and NumPy; RANKS are the numbers of ranks ("1 2 3 4"); OUT gets the log (gpu_out).
# DL_COMM_TEST_DEVICE=cpu runs the same tests on host memory. Ends with a line for each step, and with 1 if one failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

wheels=${1:--}
shift $(($# > 0))
parts=("$@")
[ $# -gt 0 ] || parts=(auto ipc staged nccl hosts faults mnist memcheck benchmark)
export OUT=${OUT:-$PWD/gpu_out}
python=${PYTHON:-python3}
ranks=(${RANKS:-1 2 3 4})
device=${DL_COMM_TEST_DEVICE:-cuda}
on_ranks=(tests/gpu/test_gpu_{average,calls,streams,training}.py)
for part in "${parts[@]}"; do
  case $part in
    auto | ipc | staged | nccl | hosts | faults | mnist | memcheck | benchmark) ;;
    *) echo "run.sh: no part $part" >&2; exit 2 ;;
  esac
done
mkdir -p "$OUT"
: >"$OUT/summary.txt"
exec > >(tee "$OUT/log.txt") 2>&1
tee=$!

finish() { # STATUS: the last words, all of which are in the log
  exec >&- 2>&-
  wait "$tee"
  exit "$1"
}

install() { # into a folder that looks like an environment: MPI's library lies where the core looks for it
  local module
  prefix=$(mktemp -d)
  # Not a local variable: it is read at the end.
  trap 'rm -rf "$prefix"' EXIT
  # Not --target, which leaves out what a wheel has for lib/, such as libmpi.so.12.
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --ignore-installed \
    --prefix "$prefix" "$wheels"/*.whl || return 1
  module=$(find "$prefix" -name _dl_comm.abi3.so)
  MPIEXEC=$(find "$prefix" -path '*/bin/mpiexec')
  [ -n "$module" ] && [ -n "$MPIEXEC" ] || { echo "run.sh: $wheels lacks dl_comm or mpich" && return 1; }
  PYTHONPATH=$(dirname "$(dirname "$module")")${PYTHONPATH:+:$PYTHONPATH}
  # The core finds MPI by itself; this keeps another MPI on the machine from going first.
  LD_LIBRARY_PATH=$(dirname "$(find "$prefix" -name libmpi.so.12)")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  PATH=$(dirname "$MPIEXEC"):$PATH
  export MPIEXEC PYTHONPATH LD_LIBRARY_PATH PATH
}

failed=0
step() { # NAME COMMAND...: runs it, and notes what came of it
  local name=$1 since=$SECONDS word
  shift
  echo
  echo "== $name ($(date +%H:%M:%S))"
  if "$@"; then word=passed; else word=FAILED && failed=1; fi
  echo "$name: $word ($((SECONDS - since)) s)" | tee -a "$OUT/summary.txt"
}

leave_out() { # NAME WHY
  echo "$1: left out, $2" | tee -a "$OUT/summary.txt"
}

test_on() { # RANKS SECONDS ARGUMENT...: pytest on ranks
  local count=$1 seconds=$2
  shift 2
  "$python" tests/launch.py "$count" "$seconds" "$python" -m pytest -q --tb=short --maxfail=5 "$@"
}

by_path() { # PATH: the tests of averages
  local count
  for count in "${ranks[@]}"; do
    if [ "$1" = nccl ] && [ "$count" -gt "$gpus" ]; then
      leave_out "nccl on $count ranks" "there are $gpus GPUs, and NCCL wants one for each rank"
      continue
    fi
    DL_COMM_GPU_PATH=$1 step "$1 on $count ranks" test_on "$count" 240 "${on_ranks[@]}"
  done
}

hosts() { # the averages on 4 ranks, two of which have another host name: ipc within the two, slices between them
  local inside='if [ $((PMI_RANK / 2)) = 1 ]; then exec unshare --uts sh -c "hostname another; exec \"\$@\"" sh "$@"; fi; exec "$@"'
  if ! unshare --uts true 2>/dev/null; then
    leave_out hosts "this process may not give ranks another host name"
    return
  fi
  DL_COMM_GPU_PATH=ipc step "two hosts, 4 ranks" "$python" tests/launch.py 4 300 bash -c "$inside" bash \
    "$python" -m pytest -q --tb=short --maxfail=5 tests/gpu/test_gpu_average.py
}

alone() { # SECONDS FILE: tests that start ranks themselves
  timeout -k 10 "$1" "$python" -m pytest -q --tb=short "$2"
}

memcheck() { # each tensor in an allocation of its own, so that one byte too far is seen
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
  if [ "$device" = cpu ] || [ -z "$sanitizer" ]; then
    leave_out memcheck "there is no compute-sanitizer, or no GPU"
    return
  fi
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 DL_COMM_TIMEOUT_S=200 step "memcheck on 2 ranks" "$python" tests/launch.py 2 400 \
    "$sanitizer" --tool memcheck --error-exitcode 86 --print-limit 20 \
    "$python" -m pytest -q --tb=short --maxfail=1 -k "not large and not thousands" tests/gpu/test_gpu_average.py
}

benchmark() {
  if [ "$device" = cpu ] || ! "$python" -m benchmarks.allreduce --help 2>/dev/null | grep -q -- --device; then
    leave_out benchmark "there is no GPU, or benchmarks.allreduce has no --device"
    return
  fi
  step benchmark timeout -k 10 200 "$python" -m benchmarks.allreduce --device cuda --quick --out "$OUT/benchmark"
}

if [ "$wheels" != - ]; then install || finish 1; fi
gpus=$([ "$device" = cpu ] || nvidia-smi -L 2>/dev/null | grep -c .)
gpus=${gpus:-0}
nvidia-smi -L 2>/dev/null
df -h /dev/shm
# The ranks meet there; containers often have 64 MB.
free=$(df --output=avail -k /dev/shm | tail -1)
if [ "$free" -lt $((1 << 20)) ]; then export DL_COMM_SHM_DIR=${TMPDIR:-/tmp}; fi
step "import" "$python" -c '
import sys, numpy, torch, dl_comm, dl_comm.torch
from dl_comm._build import packaged_library
print("python", sys.version.split()[0], "numpy", numpy.__version__, "torch", torch.__version__, "CUDA", torch.version.cuda)
print("GPUs", torch.cuda.device_count(), "dl_comm", dl_comm.__file__, "operations", packaged_library("torch"))'
# Nothing else can work then.
[ $failed -eq 0 ] || finish 1

for part in "${parts[@]}"; do
  case $part in
    auto | ipc | staged | nccl) by_path "$part" ;;
    hosts) hosts ;;
    faults)
      for path in ipc staged; do DL_COMM_GPU_PATH=$path step "faults by $path" alone 280 tests/gpu/test_gpu_faults.py; done
      [ "$gpus" -lt 2 ] || DL_COMM_GPU_PATH=nccl step "faults by nccl" alone 280 tests/gpu/test_gpu_faults.py
      ;;
    mnist) step mnist alone 220 tests/gpu/test_gpu_mnist.py ;;
    memcheck) memcheck ;;
    benchmark) benchmark ;;
  esac
done
echo
cat "$OUT/summary.txt"
finish $failed
