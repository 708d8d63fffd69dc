# torch in the environment of Python_EXECUTABLE: DL_COMM_TORCH_DIR, DL_COMM_TORCH_CPU (libtorch_cpu).
#
# Finds the headers without importing torch (which takes seconds) and without find_package(Torch) (which needs
# a CUDA toolkit if torch was built with CUDA). Python loads libtorch_cpu.so before this library.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
          "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin), end='')"
  OUTPUT_VARIABLE DL_COMM_TORCH_DIR
  RESULT_VARIABLE DL_COMM_TORCH_RESULT)
if(NOT DL_COMM_TORCH_RESULT EQUAL 0)
  message(FATAL_ERROR "${Python_EXECUTABLE} does not find torch")
endif()
if(NOT EXISTS "${DL_COMM_TORCH_DIR}/include/torch/csrc/stable/c/shim.h")
  message(FATAL_ERROR "the torch in ${DL_COMM_TORCH_DIR} has no stable ABI: dl_comm needs torch 2.10 or later")
endif()
find_library(DL_COMM_TORCH_CPU torch_cpu PATHS "${DL_COMM_TORCH_DIR}/lib" NO_DEFAULT_PATH NO_CACHE REQUIRED)
