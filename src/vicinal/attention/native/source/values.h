// Values of a prior in the layout that kernels read by runs, and their gradients on the way back.
#pragma once
#include <algorithm>
#include <vector>

#include "call.h"

namespace vicinal {

// Rows of a grid up to this width get a copy of the table for each column of queries, in which all keys of a query lie
// side by side: width times the numbers, and no short runs. Wider rows are runs that are long enough.
constexpr int64_t WIDEST_COPIED_ROW = 24;

// Where the values of each query are.
struct Layout {
  int64_t heads, height, width, prefix;  // height 0: values are over pairs of tokens
  bool per_offset, copied;
  int64_t size, neutral, run, step;
  std::vector<int64_t> start;

  Layout(int64_t heads, int64_t queries, int64_t keys, int64_t height, int64_t width, int64_t prefix, bool per_offset,
         bool any)
      : heads(heads),
        height(height),
        width(width),
        prefix(any ? prefix : 0),
        per_offset(per_offset),
        copied(per_offset && width <= WIDEST_COPIED_ROW),
        step(0),
        start(queries) {
    run = per_offset && !copied && any ? width : keys - this->prefix;
    neutral = !any          ? 0
              : !per_offset ? (queries - prefix) * run
                            : (2 * height - 1) * (copied ? width * width : 2 * width - 1);
    step = per_offset && !copied ? 2 * width - 1 : 0;
    size = neutral + (any ? std::max(run, this->prefix) : 0) + MAX_LANES;
    for (int64_t query = 0; query < queries; ++query) start[query] = any ? first_value(query - prefix) : 0;
  }

  int64_t first_value(int64_t patch) const {
    if (patch < 0) return neutral;
    if (!per_offset) return patch * run;
    const int64_t y = patch / width, x = patch % width;
    return copied ? (x * (2 * height - 1) + height - 1 - y) * width : (height - 1 - y) * step + width - 1 - x;
  }

  int64_t given() const { return per_offset ? (2 * height - 1) * (2 * width - 1) : neutral; }  // numbers of a head

  // Calls f(number in the layout, number in what the prior gives) for the values of one head.
  template <class F> void each(F f) const {
    const int64_t columns = 2 * width - 1;
    if (!copied) {
      for (int64_t i = 0; i < given(); ++i) f(i, i);
      return;
    }
    for (int64_t x = 0; x < width; ++x)
      for (int64_t row = 0; row < 2 * height - 1; ++row)
        for (int64_t key = 0; key < width; ++key)
          f((x * (2 * height - 1) + row) * width + key, row * columns + key - x + width - 1);
  }

  // Writes the values of all heads times a factor; `neutral_value` for tokens without a place.
  template <class T> void write(const T* values, double factor, double neutral_value, T* to) const {
    for (int64_t head = 0; head < heads; ++head, values += given(), to += size) {
      each([&](int64_t i, int64_t from) { to[i] = static_cast<T>(values[from] * factor); });
      std::fill(to + neutral, to + size, static_cast<T>(neutral_value));
    }
  }

  // Adds the sums of all workers, times a factor, to `total`, (heads, given()), which starts at 0.
  void gather(const Call& call, const double* sums, int64_t workers, double factor, double* total) const {
    for (int64_t head = 0; head < heads; ++head, total += given())
      for (int64_t worker = 0; worker < workers; ++worker) {
        if (call.head_major && !computes(call, worker, workers, head)) continue;  // the slot is of another pair
        const double* from = sums + call.slot(worker, head) * size;
        each([&](int64_t i, int64_t to) { total[to] += from[i] * factor; });
      }
  }

  static bool computes(const Call& call, int64_t worker, int64_t workers, int64_t head) {
    const int64_t pairs = call.batch * call.heads;
    const int64_t begin = pairs * worker / workers, end = pairs * (worker + 1) / workers;
    return begin < (head + 1) * call.batch && end > head * call.batch;
  }
};

}  // namespace vicinal
