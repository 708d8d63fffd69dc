// Errors of the op library, in the words that the Python side recognises.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>

namespace dl_comm::torch_ops {

// An exception that torch hands to Python as a RuntimeError. `code` is one of DL_COMM_ERROR_* of dl_comm.h.
template <typename... Words>
std::runtime_error make_error(int32_t code, const Words&... words) {
  std::ostringstream text;
  text << "dl_comm error " << code << ": ";
  (text << ... << words);
  return std::runtime_error(text.str());
}

}  // namespace dl_comm::torch_ops
