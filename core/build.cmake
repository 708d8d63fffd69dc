# Builds the core and the Python module with cargo, and installs them with what C programs and op libraries need of them.
set(staged "${CMAKE_BINARY_DIR}/dl_comm")
set(DL_COMM_CORE_LIBRARY "${staged}/libdl_comm.so.0")
set(DL_COMM_BRIDGE_DIR "${staged}/bridge")
file(MAKE_DIRECTORY "${staged}")

find_program(CARGO cargo HINTS "$ENV{HOME}/.cargo/bin")
if(NOT CARGO)
  message(FATAL_ERROR "dl_comm is built with Rust: install a toolchain (https://rustup.rs), so that 'cargo' is on the PATH")
endif()
if(DEFINED ENV{MPICC})
  set(mpicc "$ENV{MPICC}")
else()
  # Not cached: pip's isolated build environments come and go.
  unset(mpicc CACHE)
  get_filename_component(python_bin "${Python_EXECUTABLE}" DIRECTORY)
  find_program(mpicc mpicc HINTS "${python_bin}")
  if(NOT mpicc)
    message(FATAL_ERROR "no mpicc on the PATH: 'pip install mpich' brings one, or set MPICC to another MPI's")
  endif()
endif()
# Another MPI needs another build, so each MPI has a cargo folder of its own. Its location may change from build to build
# (pip's environments) and is passed for linking only. At run time a chosen MPI is found at its current location, the
# default MPI next to the package.
execute_process(COMMAND "${mpicc}" -show OUTPUT_VARIABLE mpi_flags OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "-I[^ ]+" mpi_includes "${mpi_flags}")
string(REGEX MATCHALL "-L[^ ]+" mpi_libraries "${mpi_flags}")
list(TRANSFORM mpi_includes REPLACE "^-I" "")
list(TRANSFORM mpi_libraries REPLACE "^-L" "")
find_file(mpi_header mpi.h PATHS ${mpi_includes} NO_CACHE)
if(mpi_header)
  file(SHA256 "${mpi_header}" mpi_identity)
else()
  string(SHA256 mpi_identity "${mpi_flags}")
endif()
string(SUBSTRING "${mpi_identity}" 0 8 mpi_identity)
list(JOIN mpi_libraries ":" mpi_search)
if(DEFINED ENV{MPICC})
  set(mpi_runpath "${mpi_search}")
endif()

execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import clang, pathlib; print(pathlib.Path(clang.__path__[0], 'native'), end='')"
  OUTPUT_VARIABLE libclang ERROR_QUIET)
execute_process(COMMAND "${CMAKE_C_COMPILER}" -print-file-name=include
  OUTPUT_VARIABLE compiler_headers OUTPUT_STRIP_TRAILING_WHITESPACE)
set(cargo_env "MPICC=${mpicc}" "BINDGEN_EXTRA_CLANG_ARGS=-isystem ${compiler_headers}" "CXX=${CMAKE_CXX_COMPILER}"
  "CC=${CMAKE_C_COMPILER}" "DL_COMM_BRIDGE_DIR=${DL_COMM_BRIDGE_DIR}" "DL_COMM_LIB_DIR=${staged}"
  "DL_COMM_MPI_SEARCH=${mpi_search}" "DL_COMM_MPI_RUNPATH=${mpi_runpath}"
  "PYO3_BUILD_EXTENSION_MODULE=1" "PYO3_PYTHON=${Python_EXECUTABLE}")
if(libclang AND NOT DEFINED ENV{LIBCLANG_PATH})
  list(APPEND cargo_env "LIBCLANG_PATH=${libclang}")
endif()
set(cargo_build "${CMAKE_COMMAND}" -E env ${cargo_env} "${CARGO}" build --release --locked
  --manifest-path "${CMAKE_SOURCE_DIR}/Cargo.toml" --target-dir "${CMAKE_BINARY_DIR}/cargo-${mpi_identity}")
# For another machine than this one cargo has a folder for each target.
set(built "${CMAKE_BINARY_DIR}/cargo-${mpi_identity}/$ENV{CARGO_BUILD_TARGET}/release")

# cargo knows what is up to date, so both run at every build.
add_custom_target(dl_comm_core ALL
  COMMAND ${cargo_build} -p dl_comm_core
  COMMAND "${CMAKE_COMMAND}" -E copy_if_different "${built}/libdl_comm_core.so" "${DL_COMM_CORE_LIBRARY}"
  COMMAND "${CMAKE_COMMAND}" -E create_symlink libdl_comm.so.0 "${staged}/libdl_comm.so"
  BYPRODUCTS "${DL_COMM_CORE_LIBRARY}" "${DL_COMM_BRIDGE_DIR}/dl_comm_core/src/ffi.rs.cc"
    "${DL_COMM_BRIDGE_DIR}/src/cxx.cc"
  USES_TERMINAL VERBATIM)
add_custom_target(dl_comm_python ALL
  COMMAND ${cargo_build} -p dl_comm_python
  COMMAND "${CMAKE_COMMAND}" -E copy_if_different "${built}/lib_dl_comm.so" "${staged}/_dl_comm.abi3.so"
  USES_TERMINAL VERBATIM)
add_dependencies(dl_comm_python dl_comm_core)

configure_file(core/dl_comm.pc.in "${staged}/dl_comm.pc" @ONLY)
install(PROGRAMS "${DL_COMM_CORE_LIBRARY}" "${staged}/_dl_comm.abi3.so" DESTINATION "${DL_COMM_INSTALL_DIR}")
install(FILES core/include/dl_comm.h DESTINATION "${DL_COMM_INSTALL_DIR}/include")
install(FILES core/dl_comm-config.cmake DESTINATION "${DL_COMM_INSTALL_DIR}/cmake")
install(FILES "${staged}/dl_comm.pc" DESTINATION "${DL_COMM_INSTALL_DIR}/pkgconfig")
# For building op libraries later.
install(FILES CMakeLists.txt DESTINATION "${DL_COMM_INSTALL_DIR}/_src")
install(DIRECTORY torch_ops tf_ops DESTINATION "${DL_COMM_INSTALL_DIR}/_src")
install(DIRECTORY core/include DESTINATION "${DL_COMM_INSTALL_DIR}/_src/core")
install(DIRECTORY "${DL_COMM_BRIDGE_DIR}" DESTINATION "${DL_COMM_INSTALL_DIR}/_src")

# Manual pages, where `man` finds them beside the environment's programs: one page, and a name for each function.
if(DEFINED SKBUILD_DATA_DIR)
  install(FILES docs/man/dl_comm.3 DESTINATION "${SKBUILD_DATA_DIR}/share/man/man3")
  file(STRINGS core/include/dl_comm.h prototypes REGEX "^[a-z].* \\**dl_[a-z_]+\\(")
  foreach(prototype IN LISTS prototypes)
    string(REGEX REPLACE ".*[ *](dl_[a-z_]+)\\(.*" "\\1" function "${prototype}")
    file(WRITE "${staged}/man/${function}.3" ".so man3/dl_comm.3\n")
    install(FILES "${staged}/man/${function}.3" DESTINATION "${SKBUILD_DATA_DIR}/share/man/man3")
  endforeach()
endif()
