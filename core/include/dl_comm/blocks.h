// The blocks of a collective's tensors: their checks and their lengths. Pure.
//
// A tensor is cut into blocks, or joined from them, along its first axis: its rows. `counts` has the rows of each
// rank's block, in rank order, those of the first tensor first; without counts all blocks are equal. Every check throws
// an Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <vector>

#include "dl_comm/codes.h"
#include "dl_comm/errors.h"

namespace dl_comm {

// Numbers that the caller keeps: the shape of a tensor, or counts.
struct Extents {
  Extents() = default;
  Extents(const int64_t* data, std::size_t size) : data(data), size(size) {}
  template <typename List>
  Extents(const List& list) : data(list.data()), size(list.size()) {}

  const int64_t* begin() const { return data; }
  const int64_t* end() const { return data + size; }
  bool empty() const { return size == 0; }
  int64_t operator[](int64_t index) const { return data[index]; }

  const int64_t* data = nullptr;
  std::size_t size = 0;
};

inline std::ostream& operator<<(std::ostream& out, Extents extents) {
  out << '[';
  for (const int64_t& extent : extents) out << (&extent == extents.begin() ? "" : ", ") << extent;
  return out << ']';
}

// How messages name a tensor: by its place in the list, or by a word.
struct TensorTitle {
  TensorTitle(std::size_t index) : index(index) {}
  TensorTitle(const char* word) : word(word) {}

  std::size_t index = 0;
  const char* word = nullptr;
};

inline std::ostream& operator<<(std::ostream& out, TensorTitle title) {
  return title.word != nullptr ? out << title.word : out << "tensor " << title.index;
}

// The elements of a row.
inline int64_t row_length(Extents shape) {
  int64_t length = 1;
  for (std::size_t axis = 1; axis < shape.size; ++axis) length *= shape.data[axis];
  return length;
}

// Counts of rows as lengths in elements.
inline std::vector<std::size_t> in_elements(Extents counts, int64_t row) {
  std::vector<std::size_t> lengths;
  lengths.reserve(counts.size);
  for (const int64_t count : counts) lengths.push_back(static_cast<std::size_t>(count * row));
  return lengths;
}

// Checks that there is a count for each of `ranks` ranks; returns their sum. `title`: what the caller calls them.
inline int64_t sum_of_counts(Extents counts, int64_t ranks, const char* title = "counts") {
  int64_t sum = 0;
  bool valid = static_cast<int64_t>(counts.size) == ranks;
  for (const int64_t count : counts) valid = valid && count >= 0 && !__builtin_add_overflow(sum, count, &sum);
  if (valid) return sum;
  throw Error(DL_COMM_ERROR_INVALID, "invalid ", title, ": ", counts, " (expected ", ranks,
              " extents, one for each rank)");
}

// Checks that a tensor of this shape, which is not a scalar, can be cut into a block for each rank.
inline void check_cut(Extents shape, Extents counts, int64_t ranks, TensorTitle tensor, const char* title = "counts") {
  if (counts.empty()) {
    if (shape[0] % ranks == 0) return;
    throw Error(DL_COMM_ERROR_INVALID, tensor, " has the shape ", shape, "; its first axis must be a multiple of the ",
                ranks, " ranks");
  }
  const int64_t sum = sum_of_counts(counts, ranks, title);
  if (shape[0] != sum)
    throw Error(DL_COMM_ERROR_INVALID, tensor, " has the shape ", shape, "; the ", title, " ", counts, " have the sum ",
                sum);
}

// The rows of a result, and of the block that a rank contributes or receives, by which the ranks' calls are compared.
struct Rows {
  int64_t result;
  int64_t block;
};

// A rank's part in one call. It refers to the counts, which the caller keeps: those of all tensors, or of one (`of`).
struct BlockCall {
  const CollectiveKind& kind;
  int64_t rank;
  int64_t ranks;
  int64_t root;
  Extents send;     // the counts; in an all-to-all, those of the blocks that the rank sends
  Extents receive;  // in an all-to-all, those of the blocks that it receives

  bool reads() const { return kind.root != Root::kSource || rank == root; }
  bool writes() const { return kind.root != Root::kTarget || rank == root; }

  // The same with the counts of one tensor only.
  BlockCall of(std::size_t tensor) const {
    const auto part = [&](Extents all) {
      return all.empty() ? all
                         : Extents(all.data + static_cast<int64_t>(tensor) * ranks, static_cast<std::size_t>(ranks));
    };
    return {kind, rank, ranks, root, part(send), part(receive)};
  }

  // Checks the counts of a call of `tensors` tensors.
  void check_counts(std::size_t tensors) const {
    if (kind.exchanges() && send.empty() != receive.empty())
      throw Error(DL_COMM_ERROR_INVALID,
                  send.empty() ? "receive_counts without send_counts" : "send_counts without receive_counts",
                  "; give both");
    if (send.empty()) return;
    for (const Extents counts : {send, kind.exchanges() ? receive : send}) {
      if (tensors > 1 && counts.size != tensors * static_cast<std::size_t>(ranks))
        throw Error(DL_COMM_ERROR_INVALID, "invalid counts: ", counts, " (expected ", ranks,
                    " extents, one for each rank, for each of the ", tensors, " tensors)");
    }
    if (tensors == 1) return check_sums();
    for (std::size_t tensor = 0; tensor < tensors; ++tensor) of(tensor).check_sums();
  }

  // Checks the counts of one tensor.
  void check_sums() const {
    sum_of_counts(send, ranks);
    if (kind.exchanges()) sum_of_counts(receive, ranks);
  }

  // The rows of a tensor that is this rank's block. A scalar is a block of one row.
  int64_t block_rows(Extents shape, TensorTitle tensor) const {
    const int64_t rows = shape.empty() ? 1 : shape[0];
    if (!send.empty() && rows != send[rank])
      throw Error(DL_COMM_ERROR_INVALID, tensor, " has the shape ", shape, "; counts has ", send[rank],
                  " for this rank");
    return rows;
  }

  // The rows for an input of this shape, where the shapes of input and output differ, after `check_counts`.
  Rows rows(Extents shape, TensorTitle tensor) const {
    if (kind.joins()) {
      const int64_t block = block_rows(shape, tensor);
      return {send.empty() ? block * ranks : sum_of_counts(send, ranks), block};
    }
    if (shape.empty())
      throw Error(DL_COMM_ERROR_INVALID, tensor, " is a scalar; it has no first axis to cut into blocks");
    // With counts, a tensor that is not read, in a scatter, may have any rows.
    if (reads() || send.empty()) check_cut(shape, send, ranks, tensor);
    const int64_t block = send.empty() ? shape[0] / ranks : send[rank];
    if (!kind.exchanges()) return {block, block};
    return {send.empty() ? shape[0] : sum_of_counts(receive, ranks), block};
  }
};

}  // namespace dl_comm
