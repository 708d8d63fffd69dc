# source release/cross.sh MACHINE: Debian's cross compilers and Rust's target for another processor, such as aarch64, in variables for
# cargo, CMake and MPICH's mpicc. Build scripts run on this machine, so they need the libclang of its Python (LIBCLANG_PATH).
_target=$1-unknown-linux-gnu
export CARGO_BUILD_TARGET=$_target CC=$1-linux-gnu-gcc CXX=$1-linux-gnu-g++ MPICH_CC=$1-linux-gnu-gcc
_linker=CARGO_TARGET_${_target^^}_LINKER
export "${_linker//-/_}=$CC"
export "BINDGEN_EXTRA_CLANG_ARGS_${_target//-/_}=-isystem $($CC -print-file-name=include) -isystem /usr/$1-linux-gnu/include"
