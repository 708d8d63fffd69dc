#!/usr/bin/env bash
# The one gate: sets everything up, then runs every check and test, and ends with a table of what each stage took.
#   tests/run.sh               all of it; what CI runs
#   tests/run.sh fast          less than four minutes after set-up, for people at work
#   tests/run.sh STAGE...      some stages of tests/stages.py, in the environment of an earlier run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The shell's environment must not affect the results: keep only the variables in CONTRIBUTING.md.
if [ "${1:-}" != --scrubbed ]; then
  kept=()
  for name in HOME PATH LANG TMPDIR PYTHON MPICC CC CXX MPIEXEC MPIEXEC_ARGS DL_COMM_VENV DL_COMM_TEST_MNIST \
    DL_COMM_TEST_ROUNDS CARGO_HOME RUSTUP_HOME PIP_INDEX_URL PIP_CONFIG_FILE SSL_CERT_FILE \
    http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [ -z "${!name+set}" ] || kept+=("$name=${!name}")
  done
  exec env -i "${kept[@]}" bash tests/run.sh --scrubbed "$@"
fi
shift

source tests/environment.sh
# All optional packages are installed: tests fail instead of skipping.
export DL_COMM_TEST_EVERYTHING=1
# A cache of this checkout, so that its op libraries are built anew.
export DL_COMM_CACHE="$PWD/build/cache"
# glibc overwrites memory that is freed, so that a read of it fails every time.
export MALLOC_PERTURB_=165
# Compilations from scratch take longer if cargo keeps what shortens the next one.
export CARGO_INCREMENTAL=0

if [ $# -eq 0 ] || [ "$1" = fast ]; then
  # First the tools and what Rust needs, so that its checks run while the frameworks are downloaded.
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  mapfile -t tools < <("$venv/bin/python" tests/tools.py)
  "$venv/bin/python" examples/install.py -q "${tools[@]}"
fi
# Keras imports what is hidden there, for wrappers that no test uses: a third of the time that TensorFlow takes to start.
export PYTHONPATH="$PWD/tests/absent"
export VENV=$venv
exec "$venv/bin/python" tests/gate.py "$@"
