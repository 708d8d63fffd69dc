#!/usr/bin/env bash
# Trains with frameworks on top of torch.distributed, and as PyTorch's reference scripts do, on two processes, with the
# process-group backend dl_comm and with gloo: the losses must be the same. Each case has a temporary environment on top of
# that of tests/run.sh (run that first).
# tests/frameworks.sh [lightning|accelerate|transformers|imagenet|torchvision]...
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base=$(cd "${DL_COMM_VENV:-.venv}" && pwd) || exit 1
cases=("$@")
[ $# -gt 0 ] || cases=(lightning accelerate transformers imagenet torchvision)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 DL_COMM_DUMP_DIR=none
# mpi4py, which Lightning asks for MPI, looks in the temporary environment and there.
export LD_LIBRARY_PATH="$base/lib"

environment() { # PACKAGE...: a Python with these packages and those of the base
  "$base/bin/python" -m venv "$work/venv" || return 1
  local site
  site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/base.pth"
  # The torch of the base stays: pip takes the versions that fit it.
  "$work/venv/bin/python" -m pip install -q "$@" \
    "torch==$("$base/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("torch"))')"
}

train() { # CASE BACKEND START: prints the loss
  local command=() options=()
  rm -rf "$work/folder" && mkdir "$work/folder" || return 1
  case $3 in
    torchrun) command=("$work/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2) ;;
    dl-comm-run) command=("$base/bin/dl-comm-run" -n 2 "$work/venv/bin/python") ;;
    dl-comm-env) command=("$base/bin/mpiexec" -n 2 "$base/bin/dl-comm" env "$work/venv/bin/python") ;;
    itself) command=("$work/venv/bin/python") ;;
    spawn) command=("$work/venv/bin/python") options=(--multiprocessing-distributed) ;;
  esac
  timeout -k 5 300 "${command[@]}" "tests/frameworks/$1_train.py" "$2" "$work/folder" "${options[@]}" \
    >"$work/$2.txt" 2>&1 &&
    grep -qx "backend $2" "$work/$2.txt" && grep -oP '^loss \K.*' "$work/$2.txt"
}

same() { # CASE START...: compares the losses of both backends, with ours by each start
  local case=$1 ours theirs start
  shift
  theirs=$(train "$case" gloo "$1") || { tail -40 "$work/gloo.txt" && return 1; }
  for start in "$@"; do
    ours=$(train "$case" dl_comm "$start") || { tail -40 "$work/dl_comm.txt" && return 1; }
    echo "$case by $start: loss $ours with dl_comm, $theirs with gloo"
    "$base/bin/python" -c 'import math, sys; sys.exit(not math.isclose(*map(float, sys.argv[1:]), rel_tol=1e-4))' \
      "$ours" "$theirs" || return 1
  done
}

for case in "${cases[@]}"; do
  echo "== $case ($(date +%H:%M:%S))"
  case $case in
    lightning) environment "$case" && same "$case" itself ;; # it starts its processes
    accelerate) environment "$case" && same "$case" torchrun dl-comm-run dl-comm-env ;;
    transformers) environment accelerate transformers && same "$case" torchrun dl-comm-run dl-comm-env ;;
    imagenet) environment torchvision && same "$case" torchrun dl-comm-run dl-comm-env spawn ;;
    torchvision) environment "$case" && same "$case" torchrun dl-comm-run dl-comm-env ;;
    *) echo "no case $case" && false ;;
  esac
  # shellcheck disable=SC2181
  if [ $? -eq 0 ]; then results+=("$case: passed"); else results+=("$case: FAILED"); fi
  rm -rf "$work/venv"
done
printf '%s\n' "${results[@]}"
[[ ${results[*]} != *FAILED* ]]
