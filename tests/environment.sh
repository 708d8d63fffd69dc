# Sourced by the scripts of this folder: the environment that tests/run.sh makes, and what Rust needs of it. cargo takes
# the mpicc of the environment, or MPICC.
venv=${DL_COMM_VENV:-.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
version=$("${PYTHON:-python3}" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
export PATH="$venv/bin:$HOME/.cargo/bin:$PATH"
export PYO3_PYTHON="$venv/bin/python" DL_COMM_TEST_PYTHON="$venv/bin/python"
LIBCLANG_PATH="${LIBCLANG_PATH:-$venv/lib/$version/site-packages/clang/native}"
BINDGEN_EXTRA_CLANG_ARGS="-isystem $(cc -print-file-name=include)"
export LIBCLANG_PATH BINDGEN_EXTRA_CLANG_ARGS
# NumPy's threads for algebra would spin at each start of an interpreter: a tenth of a second of a processor.
export OPENBLAS_NUM_THREADS=1
