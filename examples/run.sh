#!/usr/bin/env bash
# Sets everything up, then trains MNIST on two processes:  examples/run.sh [EXAMPLE] [OPTION...]
# EXAMPLE is torch_mnist (the default), tf_mnist, tf1_mnist, estimator_mnist, keras_mnist or numpy_mnist; the options are
# the example's (--data-dir, --epochs, ...). RANKS sets the number of processes. The last line compares the speed with that of one
# process, which has all processors.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

example=torch_mnist
if [[ ${1:-} == *_mnist ]]; then
  example=$1
  shift
fi
case $example in
  torch_mnist) extras=(torch examples) ;;
  tf_mnist | tf1_mnist | keras_mnist) extras=(tensorflow examples) ;;
  estimator_mnist) extras=(tf1 examples) ;;
  numpy_mnist) extras=(examples) ;;
  *) echo "no example $example; there are: $(cd examples && echo *_mnist)" >&2; exit 2 ;;
esac
examples/setup.sh "${extras[@]}"
venv=${DL_COMM_VENV:-.venv}
ranks=${RANKS:-2}
started_by=()
[[ $example == estimator_mnist ]] && started_by=(-m dl_comm.tf1)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
train() { # RANKS OPTION...
  "$venv/bin/mpiexec" -n "$1" "$venv/bin/python" "${started_by[@]}" "examples/$example/train.py" "${@:2}"
}

echo "dl_comm: training examples/$example on $ranks processes"
train "$ranks" "$@" | tee "$log"
[ "$ranks" -gt 1 ] || exit 0
echo "dl_comm: an epoch on one process, to compare"
train 1 "$@" --epochs 1 --checkpoint "" >>"$log"
awk -v ranks="$ranks" '/^images\/s: / { rate[n++] = $2 } END {
  printf "dl_comm: %d images/s on 1 process, %d on %d: %.2f times on this machine\n", rate[1], rate[0], ranks, rate[0] / rate[1] }' "$log"
