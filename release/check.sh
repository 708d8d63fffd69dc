#!/usr/bin/env bash
# Checks what release/build.sh has made as a user gets it: in new environments, without a compiler, Rust and CMake on the PATH.
#   release/check.sh [FOLDER [REQUIREMENT...]]    FOLDER (dist) has the wheel and the source distribution. The requirements are
#                                                 numpy, torch==2.15.0, ...: by default numpy and the newest of each framework in
#                                                 the wheel. Each trains on 2 ranks; TensorFlow with Keras.
# Then a wheel is built from the source distribution, for which this machine's compilers are used, and runs with NumPy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath "${1:-dist}")
shift $(($# < 1 ? $# : 1))
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fails() { echo "release/check.sh: $*" >&2 && exit 1; }

shopt -s nullglob
machine=$("$python" -c 'import platform; print(platform.machine())')
wheels=("$folder"/dl_comm-*"$machine".whl) sources=("$folder"/dl_comm-*.tar.gz)
[ ${#wheels[@]} -eq 1 ] || fails "$folder has ${#wheels[@]} wheels of dl_comm for $machine instead of 1"
[ ${#sources[@]} -eq 1 ] || fails "$folder has ${#sources[@]} source distributions of dl_comm instead of 1"
wheel=${wheels[0]##*/} source=${sources[0]##*/}
[[ $wheel == *manylinux_2_28_* || $wheel == *manylinux_2_2[0-7]_* ]] || fails "$wheel is not for glibc 2.28"
version=${wheel#dl_comm-}
[ "${version%%-*}" = "$(basename "${source#dl_comm-}" .tar.gz)" ] || fails "$wheel and $source have two versions"

# As README says: by name, from a folder of wheels.
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --find-links "$folder" --only-binary dl_comm dl_comm
"$work/venv/bin/dl-comm" --help >/dev/null
if [ $# -eq 0 ]; then
  mapfile -t newest < <("$work/venv/bin/python" -c 'from dl_comm._libraries import build
for library, framework in (("torch.distributed", "torch"), ("tensorflow", "tensorflow-cpu")):
    for abi in build.prebuilt_abis(library)[-1:]:
        print(framework, abi.split("-")[1], sep="==", end=".*\n" if framework == "torch" else "\n")')
  set -- numpy "${newest[@]}"
fi
rm -rf "$work/venv"
tests/full_wheel.sh test "$folder/$wheel" "$@"

"$python" -m venv "$work/venv"
"$work/venv/bin/pip" wheel -q --no-deps -w "$work/built" "$folder/$source"
"$work/venv/bin/pip" install -q "$work"/built/dl_comm-*.whl
mkdir "$work/elsewhere" && cp tests/launch.py tests/smoke.py "$work/elsewhere"
(cd "$work/elsewhere" && "$work/venv/bin/python" launch.py 2 600 "$work/venv/bin/python" smoke.py)
echo "release/check.sh: $wheel and $source work"
