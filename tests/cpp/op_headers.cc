// The pure headers of the op libraries, for tests/single/test_op_headers.py. Without arguments, prints the tables of
// codes.h. Else checks a call, and prints the rows of its result and of its block and the lengths of its blocks, or the
// error:
//   op_headers COLLECTIVE RANK RANKS ROOT SHAPE SEND_COUNTS RECEIVE_COUNTS    (the last three as "2,3", or "" for none)
#include <cstdint>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "dl_comm/blocks.h"
#include "dl_comm/codes.h"
#include "dl_comm/errors.h"

namespace {

using namespace dl_comm;

std::vector<int64_t> numbers(const std::string& text) {
  std::vector<int64_t> found;
  std::istringstream rest(text);
  for (std::string number; std::getline(rest, number, ',');) found.push_back(std::stoll(number));
  return found;
}

void print_tables() {
  const char* const pattern[2][2] = {{"Line", "Gather"}, {"Scatter", "Exchange"}};
  const char* const root[] = {"None", "Source", "Target"};
  for (const CollectiveKind& kind : kCollectives)
    std::cout << kind.name << ' ' << kind.code << ' '
              << pattern[kind.in == Blocks::kPerRank][kind.out == Blocks::kPerRank] << ' '
              << (kind.reduces ? "true" : "false") << ' ' << root[static_cast<int>(kind.root)] << '\n';
  for (const Operator& entry : kOperators) {
    std::cout << entry.name << ' ' << entry.code << ' ' << entry.scaled << '\n';
  }
}

const CollectiveKind& named(std::string_view name) {
  for (const CollectiveKind& kind : kCollectives)
    if (kind.name == name) return kind;
  throw Error(DL_COMM_ERROR_INVALID, "no collective is named ", name);
}

// The shapes of the tensors stand between semicolons.
void print_call(char** words) {
  std::vector<std::vector<int64_t>> shapes;
  std::istringstream list(std::string(words[5]) + ';');
  for (std::string shape; std::getline(list, shape, ';');) shapes.push_back(numbers(shape.c_str()));
  const std::vector<int64_t> send = numbers(words[6]);
  const std::vector<int64_t> receive = numbers(words[7]);
  const BlockCall call{named(words[1]), std::stoll(words[2]), std::stoll(words[3]), std::stoll(words[4]), send,
                       receive};
  call.check_counts(shapes.size());
  for (std::size_t tensor = 0; tensor < shapes.size(); ++tensor) {
    const BlockCall one = call.of(tensor);
    const Rows rows = one.rows(shapes[tensor], tensor);
    std::cout << rows.result << ' ' << rows.block << '\n';
    for (const Extents counts : {one.send, one.receive})
      for (const std::size_t length : in_elements(counts, row_length(shapes[tensor]))) std::cout << length << ' ';
  }
}

}  // namespace

int main(int count, char** words) {
  static_assert(find_collective(DL_COMM_ALLTOALL)->exchanges() && find_collective(0) == nullptr);
  try {
    if (count == 8)
      print_call(words);
    else
      print_tables();
  } catch (const Error& error) {
    std::cout << error.code() << ' ' << error.message() << '\n' << error.what();
  }
}
