#!/usr/bin/env bash
# Builds wheels for tests/gpu/run.sh on a GPU machine without a network:  tests/gpu/wheel.sh PYTHON_VERSION [FOLDER]
# dl_comm (from this checkout, with torch's op libraries), its MPICH, and pytest, for Python PYTHON_VERSION (such as 3.12) on
# x86-64, in FOLDER (gpu_wheels). The GPU machine must have torch and NumPy.
# The building Python (PYTHON, python3) needs torch >= 2.10 with CUDA, scikit-build-core, libclang, mpich and pytest; its
# version does not matter: dl_comm's module is abi3, and torch's libraries use the stable ABI.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

version=${1:?"usage: tests/gpu/wheel.sh PYTHON_VERSION [FOLDER]"}
folder=${2:-gpu_wheels}
python=${PYTHON:-python3}
most=60 # MiB

lacks() {
  echo "wheel.sh: $1" >&2
  exit 1
}
[[ $version =~ ^3\.[0-9]+$ ]] || lacks "'$version' is no version of Python such as 3.12"
"$python" -c 'import scikit_build_core, clang, torch; assert torch.version.cuda' ||
  lacks "$python needs scikit-build-core, libclang and a torch with CUDA (pip install scikit-build-core libclang torch)"

mkdir -p "$folder"
rm -f "$folder"/*.whl
# A separate build folder, because these settings would stay in the CMake cache of other builds. Without MPICC, the library
# finds MPI in the environment of its installation, not on this machine.
env -u MPICC "$python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w "$folder" \
  -Cbuild-dir=build/gpu_wheel -Ccmake.define.DL_COMM_WITH_TORCH=ON -Ccmake.define.DL_COMM_WITH_TF=OFF .
# The MPI must be that of the core's build; pip selects it for the GPU machine.
mpich=$("$python" -c 'import importlib.metadata as m; print(m.version("mpich"))')
platforms=()
for glibc in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$version" \
  "${platforms[@]}" -d "$folder" "mpich==$mpich" pytest iniconfig pluggy packaging pygments

DL_COMM_TEST_WHEEL=$(realpath "$folder"/dl_comm-*.whl) "$python" -m pytest -q -k for_other_machines tests/single/test_wheel.py
ls -l "$folder"
size=$(du -cm "$folder"/*.whl | tail -1 | cut -f1)
echo "wheel.sh: $folder has $size MiB"
[ "$size" -lt "$most" ] || lacks "that is more than $most MiB"
