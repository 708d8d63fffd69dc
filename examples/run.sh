#!/usr/bin/env bash
# Sets everything up, then trains MNIST on two processes:  examples/run.sh [EXAMPLE] [OPTION...]
# EXAMPLE is torch_mnist (the default), tf_mnist, tf1_mnist, estimator_mnist, keras_mnist or numpy_mnist; the options are
# the example's (--data-dir, --epochs, ...). RANKS sets the number of processes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

example=torch_mnist
if [[ ${1:-} == *_mnist ]]; then
  example=$1
  shift
fi
case $example in
  torch_mnist) extras=(torch examples) ;;
  tf_mnist | tf1_mnist | estimator_mnist | keras_mnist) extras=(tensorflow examples) ;;
  numpy_mnist) extras=(examples) ;;
  *) echo "no example $example; there are: $(cd examples && echo *_mnist)" >&2; exit 2 ;;
esac
examples/setup.sh "${extras[@]}"
venv=${DL_COMM_VENV:-.venv}
echo "dl_comm: training examples/$example on ${RANKS:-2} processes"
started_by=()
[[ $example == estimator_mnist ]] && started_by=(-m dl_comm.tf1)
exec "$venv/bin/mpiexec" -n "${RANKS:-2}" "$venv/bin/python" "${started_by[@]}" "examples/$example/train.py" "$@"
