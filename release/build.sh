#!/usr/bin/env bash
# What a release is: a wheel that needs no compiler, for Linux with glibc 2.28 or later (RHEL 8, Debian 10, Ubuntu 20.04), and the
# source distribution.
#   release/build.sh [FOLDER [REQUIREMENT...]]     into FOLDER (dist); the requirements are those of tests/full_wheel.sh
# The wheel is for the processor of python3, or $PYTHON: x86-64 or aarch64. That may be an interpreter for aarch64 that runs in an
# emulator (docs/wheels.md): then Debian's cross compilers, and Rust's target, do the work at full speed.
# This machine may have a newer glibc, whose functions have newer versions. So the linker gets a list of the functions of
# glibc 2.28, made by the package ziglang, and C++ a header as it was then. Needs what tests/full_wheel.sh needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
glibc=2.28
folder=${1:-dist}
shift $(($# < 1 ? $# : 1))
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

machine=$("$python" -c 'import platform; print(platform.machine())')
if [ "$machine" != "$(uname -m)" ]; then
  source release/cross.sh "$machine"
  python3 -m venv "$work/native"
  "$work/native/bin/pip" install -q libclang
  LIBCLANG_PATH=$(echo "$work"/native/lib/python*/site-packages/clang/native)
  export LIBCLANG_PATH
fi

"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install -q ziglang build
echo 'int main(void) { return 0; }' >"$work/empty.c"
export ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig
"$work/tools/bin/python" -m ziglang cc -target "$machine-linux-gnu.$glibc" "$work/empty.c" -o "$work/empty"
mkdir "$work/lib"
find "$work/zig" \( -name 'lib*.so.[0-9]' -o -name libc_nonshared.a \) -exec cp {} "$work/lib" \;
for library in "$work"/lib/lib*.so.[0-9]; do
  ln -s "${library##*/}" "${library%.[0-9]}"
done
rm "$work/lib/libc.so"
echo "GROUP ( $work/lib/libc.so.6 $work/lib/libc_nonshared.a )" >"$work/lib/libc.so"
# The same for C++ (GLIBCXX_3.4.24, of GCC 8): what is newer in the compiler's library is compiled in, or taken in its older version.
# glibc 2.32 added a variable that is true before the first thread starts; without it, reference counts are always atomic.
mkdir -p "$work/include/sys"
printf '#pragma once\nstatic const char __libc_single_threaded = 0;\n' >"$work/include/sys/single_threaded.h"
cat >"$work/include/older.h" <<'EOF'
#ifdef __cplusplus
#include <bits/c++config.h>
// Templates of the library are instantiated here.
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#include <new>
namespace std {
__attribute__((weak, noreturn, visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
EOF

# The libraries of the compiler, which the target has in its own version, may need newer functions.
export RUSTFLAGS="-C link-arg=-L$work/lib -C link-arg=-Wl,--allow-shlib-undefined"
export LDFLAGS="-L$work/lib -Wl,--allow-shlib-undefined" CPLUS_INCLUDE_PATH=$work/include
export CXXFLAGS="-include $work/include/older.h"
tests/full_wheel.sh build "$work/wheel" "$@"
wheel=$(echo "$work"/wheel/*.whl)
case $wheel in
  *manylinux_2_2[0-8]_"$machine"* | *manylinux_2_1[0-9]_"$machine"*) ;;
  *) echo "the wheel needs a newer glibc than $glibc: ${wheel##*/}" >&2 && exit 1 ;;
esac
unset RUSTFLAGS LDFLAGS CPLUS_INCLUDE_PATH CXXFLAGS
mkdir -p "$folder"
"$work/tools/bin/python" -m build -q --sdist --outdir "$folder" .
mv "$wheel" "$folder"
ls -l "$folder"
