// What a call is, as one attribute `settings`, because each attribute costs an eager call half a microsecond.
//
// It is text: the numbers that the op documents, the name of the call, which must be the same on all ranks, and the
// names of the tensors for error messages, one per line. NUL characters separate these three, spaces the numbers.
// Pure functions, callable from any thread.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <system_error>
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

// Reads the settings of an op into its name, labels and numbers.
template <class Context, class... Numbers>
absl::Status read_settings(Context* context, std::string& name, std::string& labels, Numbers&... numbers) {
  std::string text;
  const absl::Status status = context->GetAttr("settings", &text);
  if (!status.ok()) return status;
  const std::vector<absl::string_view> parts = absl::StrSplit(text, absl::MaxSplits('\0', 2));
  const std::vector<absl::string_view> fields = absl::StrSplit(parts[0], ' ');
  auto field = fields.begin();
  const auto read = [&field](auto& number) {
    using Number = std::remove_reference_t<decltype(number)>;
    const absl::string_view text = *field++;
    if constexpr (std::is_floating_point_v<Number>) {
      return absl::SimpleAtod(text, &number);
    } else {
      // Not as float64, which cuts integers from 2^53 on.
      int64_t value = 0;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      number = static_cast<Number>(value);
      return error == std::errc() && end == text.data() + text.size() && number == value;
    }
  };
  if (parts.size() != 3 || fields.size() != sizeof...(numbers) || !(read(numbers) && ...)) {
    return to_status(DL_COMM_ERROR_INVALID, absl::StrCat("invalid settings of an op: ", absl::CEscape(text)));
  }
  name = std::string(parts[1]);
  labels = std::string(parts[2]);
  return status;
}

}  // namespace dl_comm
