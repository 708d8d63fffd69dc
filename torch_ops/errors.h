// Errors of the op library, in the format that dl_comm._errors parses.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>

namespace dl_comm::torch_ops {

// Returns an exception that torch converts to a Python RuntimeError. `code`: a DL_COMM_ERROR_* of dl_comm.h.
template <typename... Parts>
std::runtime_error make_error(int32_t code, const Parts&... parts) {
  std::ostringstream text;
  text << "dl_comm error " << code << ": ";
  (text << ... << parts);
  return std::runtime_error(text.str());
}

}  // namespace dl_comm::torch_ops
