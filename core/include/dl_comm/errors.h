// The errors of the op libraries.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "dl_comm.h"

namespace dl_comm {

// The text of an error, in the format that dl_comm._base.errors parses. `code`: a DL_COMM_ERROR_* of dl_comm.h.
inline std::string error_text(int32_t code, std::string_view message) {
  return "dl_comm error " + std::to_string(code) + ": " + std::string(message);
}

// An error with a code of dl_comm.h. A binding throws it, or translates it to what its framework understands.
class Error : public std::runtime_error {
 public:
  // The message is all `parts`, one after the other.
  template <typename... Parts>
  explicit Error(int32_t code, const Parts&... parts) : runtime_error(text(code, parts...)), code_(code) {}

  int32_t code() const noexcept { return code_; }

  // What `what` says after the code.
  std::string_view message() const { return std::string_view(what()).substr(error_text(code_, "").size()); }

 private:
  template <typename... Parts>
  static std::string text(int32_t code, const Parts&... parts) {
    std::ostringstream message;
    (message << ... << parts);
    return error_text(code, message.str());
  }

  int32_t code_;
};

}  // namespace dl_comm
