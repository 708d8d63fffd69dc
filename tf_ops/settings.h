// What a call is, as one attribute `settings`, because each attribute costs an eager call half a microsecond.
//
// It is text: the numbers that the op documents, the name of the call, which must be the same on all ranks, and the
// names of the tensors for error messages, one per line. NUL characters separate these three, spaces the numbers.
// Pure functions, callable from any thread.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "dl_comm.h"
#include "tf_ops/convert.h"

namespace dl_comm {

// Reads the settings of an op into its name, labels and numbers. They are float64 on the way, so an integer must be
// below 2^53.
template <class Context, class... Numbers>
absl::Status read_settings(Context* context, std::string& name, std::string& labels, Numbers&... numbers) {
  std::string text;
  const absl::Status status = context->GetAttr("settings", &text);
  if (!status.ok()) return status;
  const std::vector<absl::string_view> parts = absl::StrSplit(text, absl::MaxSplits('\0', 2));
  const std::vector<absl::string_view> fields = absl::StrSplit(parts[0], ' ');
  auto field = fields.begin();
  const auto read = [&field](auto& number) {
    double value = 0;
    if (!absl::SimpleAtod(*field++, &value)) return false;
    number = static_cast<std::remove_reference_t<decltype(number)>>(value);
    return true;
  };
  if (parts.size() != 3 || fields.size() != sizeof...(numbers) || !(read(numbers) && ...)) {
    return to_status(DL_COMM_ERROR_INVALID, absl::StrCat("invalid settings of an op: ", absl::CEscape(text)));
  }
  name = std::string(parts[1]);
  labels = std::string(parts[2]);
  return status;
}

}  // namespace dl_comm
