// Inputs and outputs of one image and head as rows of the compute type, side by side: where a tensor lies so already
// it is used in place, else it is copied.
#pragma once
#include "call.h"
#include "half.h"
#include "product.h"

namespace {

using vicinal::Call;
using vicinal::Tokens;
using vicinal::Type;

// Calls f with a null pointer of the type in memory and the conversions from and to float.
template <class F> inline void with_type(Type type, F f) {
  switch (type) {
    case Type::bf16:
      return f(static_cast<uint16_t*>(nullptr), bfloat_to_float, float_to_bfloat);
    case Type::f16:
      return f(static_cast<uint16_t*>(nullptr), half_to_float, float_to_half);
    case Type::f64:
      return f(static_cast<double*>(nullptr), [](double x) { return x; }, [](double x) { return x; });
    default:
      return f(static_cast<float*>(nullptr), [](float x) { return x; }, [](float x) { return x; });
  }
}

template <class T> constexpr Type TYPE_OF = sizeof(T) == 8 ? Type::f64 : Type::f32;

constexpr int64_t CACHE_LINE = 64;
constexpr int64_t MOST_FETCHED = 64 * 1024;  // bytes of one tensor of a pair: of larger ones memory is a small part
constexpr int64_t QUERIES_PER_FETCH = 8;

template <class T> constexpr int64_t padded(int64_t dim) { return (dim + LANES<T> - 1) / LANES<T> * LANES<T>; }

// One tensor of a call, as rows of `dim` numbers that are followed by zeros up to a whole vector.
template <class T> class Staged {
 public:
  Staged(const Call& call, const Tokens& tensor, int64_t tokens, int64_t dim)
      : tensor_(tensor),
        tokens_(tokens),
        dim_(dim),
        order_(call.order),
        in_place_(tensor.type == TYPE_OF<T> && tensor.channel == 1 && dim % LANES<T> == 0 && !call.order),
        number_(tensor.type == Type::f64   ? 8
                : tensor.type == Type::f32 ? 4
                                           : 2),
        share_(tokens * dim * number_ <= MOST_FETCHED ? (tokens + call.queries - 1) / call.queries : 0) {}

  int64_t room() const { return in_place_ ? 0 : tokens_ * padded<T>(dim_); }
  void use(T* room) { room_ = room; }

  // Returns the rows of an input.
  Rows<const T> load(int64_t image, int64_t head) const {
    if (in_place_) return {base<T>(image, head), tensor_.token};
    const int64_t row = padded<T>(dim_);
    with_type(tensor_.type, [&](auto* type, auto read, auto) {
      const auto* from = base<std::remove_pointer_t<decltype(type)>>(image, head);
      for (int64_t i = 0; i < tokens_; ++i) {
        const auto* token = from + (order_ ? order_[i] : i) * tensor_.token;
        T* to = room_ + i * row;
        for (int64_t j = 0; j < dim_; ++j) to[j] = static_cast<T>(read(token[j * tensor_.channel]));
        for (int64_t j = dim_; j < row; ++j) to[j] = 0;
      }
    });
    return {room_, row};
  }

  // Fetches the share of the next queries in the tokens of another pair into the cache, while this one is computed.
  // Inlined by force: g++ takes calls of a function that only fetches for dead code.
  template <bool WRITE>
  inline __attribute__((always_inline)) void fetch(int64_t image, int64_t head, int64_t query) const {
    const int64_t first = query * share_, after = first + QUERIES_PER_FETCH * share_;
    const int64_t last = after < tokens_ ? after : tokens_;
    const int64_t step = tensor_.token * number_, bytes = dim_ * number_;
    const char* token = base<const char>(image * number_, head * number_) + first * step;
    for (int64_t i = first; i < last; ++i, token += step)
      for (int64_t byte = 0; byte < bytes; byte += CACHE_LINE) __builtin_prefetch(token + byte, WRITE, 2);
  }

  // Returns where the rows of an output are computed; `finish` takes those from `first` to `last` to their place.
  Rows<T> rows(int64_t image, int64_t head) const {
    if (in_place_) return {base<T>(image, head), tensor_.token};
    return {room_, padded<T>(dim_)};
  }

  void finish(int64_t image, int64_t head, int64_t first, int64_t last) const {
    if (in_place_) return;
    const int64_t row = padded<T>(dim_);
    with_type(tensor_.type, [&](auto* type, auto, auto write) {
      auto* to = base<std::remove_pointer_t<decltype(type)>>(image, head);
      for (int64_t i = first; i < last; ++i) {
        auto* token = to + (order_ ? order_[i] : i) * tensor_.token;
        for (int64_t j = 0; j < dim_; ++j) token[j * tensor_.channel] = write(room_[i * row + j]);
      }
    });
  }

 private:
  template <class M> M* base(int64_t image, int64_t head) const {
    return static_cast<M*>(tensor_.data) + image * tensor_.image + head * tensor_.head;
  }

  const Tokens& tensor_;
  int64_t tokens_, dim_;
  const int64_t* order_;
  bool in_place_;
  int64_t number_, share_;  // bytes of a number; tokens to fetch for each query of the pair before
  T* room_ = nullptr;
};

}  // namespace
