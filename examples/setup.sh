#!/usr/bin/env bash
# Sets up a virtual environment with dl_comm, built from this checkout:  examples/setup.sh [EXTRA...]
# Extras are those of pyproject.toml: torch tensorflow tf1 examples test docs. The environment is .venv, or $DL_COMM_VENV; it is
# made with python3, or $PYTHON. Running it again brings it up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${DL_COMM_VENV:-.venv}
python=${PYTHON:-python3}
lacks() {
  echo "dl_comm: $1" >&2
  exit 1
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || lacks "Python 3.10 or later is needed (PYTHON names it)"
cargo=$(command -v cargo || echo "$HOME/.cargo/bin/cargo")
[ -x "$cargo" ] || lacks "a Rust toolchain is needed: https://rustup.rs"
# rustup's cargo is there also when it has no toolchain to run.
said=$("$cargo" --version 2>&1) || lacks "a Rust toolchain is needed, but $cargo does not run: ${said%%$'\n'*} (rustup default stable)"
command -v "${CXX:-c++}" >/dev/null || lacks "a C++ compiler is needed, for instance g++"

if [ ! -x "$venv/bin/python" ]; then
  echo "dl_comm: making $venv"
  "$python" -m venv "$venv"
fi
# tf1 asks for the distribution tensorflow, in whose place tensorflow-cpu does.
extras=$(IFS=,; echo "${*/#tf1/tensorflow}")
echo "dl_comm: building and installing into $venv${extras:+ with $extras} (the first time the core builds for about two minutes)"
wheels=$(mktemp -d)
building=
trap '[ -z "$building" ] || kill -- "-$building" 2>/dev/null || true; rm -rf "$wheels"' EXIT
trap 'exit 130' INT TERM
pip() { "$venv/bin/python" -m pip "$@" --disable-pip-version-check; }
install() { "$venv/bin/python" examples/install.py "$@"; }
# A broken download ends pip, which does not go on with it.
build() { pip wheel -q --no-deps -w "$wheels" . || { sleep 5 && pip wheel -q --no-deps -w "$wheels" .; }; }

# The core builds while the frameworks are downloaded. The build ignores Ctrl-C, as all that runs in the background: it gets a
# process group, which is killed.
set -m
build >"$wheels/log" 2>&1 &
building=$! since=$SECONDS
set +m
frameworks=()
for extra in "$@"; do
  case $extra in
    torch) frameworks+=(torch) ;;
    tensorflow) frameworks+=(tensorflow-cpu) ;;
    tf1) frameworks+=(tensorflow) ;;
  esac
done
# Without a GPU: a torch without CUDA, where the package index has one.
if [[ " $* " == *" torch "* ]] && ! compgen -G "/dev/nvidia[0-9]*" >/dev/null && ! pip show -q torch 2>/dev/null; then
  cpu=$(pip index versions torch 2>/dev/null | grep -o '[0-9.]*+cpu' | head -n 1 || true)
  [ -z "$cpu" ] || frameworks=("${frameworks[@]/%torch/torch==$cpu}")
fi
[ ${#frameworks[@]} -eq 0 ] || install "${frameworks[@]}"
while kill -0 "$building" 2>/dev/null; do
  [ $(((SECONDS - since) % 10)) -ne 0 ] || echo "dl_comm: building the core, $((SECONDS - since)) s"
  sleep 1
done
wait "$building" || { cat "$wheels/log" >&2 && lacks "the core could not be built"; }
# The wheel of another state of this checkout has the same version.
install -q --no-deps --force-reinstall "$wheels"/dl_comm-*.whl
install "$(echo "$wheels"/dl_comm-*.whl)${extras:+[$extras]}"
case " $* " in *" test "* | *" tf1 "*) install --no-deps "tf_keras>=2.16" ;; esac
