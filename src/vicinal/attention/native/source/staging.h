// Inputs and outputs of one image and head as rows of the compute type, side by side: where a tensor lies so already
// it is used in place, else it is copied.
#pragma once
#include "call.h"
#include "product.h"

namespace {

using vicinal::Tokens;
using vicinal::Type;

inline float half_to_float(uint16_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x);
#else
  _Float16 y;
  __builtin_memcpy(&y, &x, 2);
  return static_cast<float>(y);
#endif
}

inline uint16_t float_to_half(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#else
  const _Float16 y = static_cast<_Float16>(x);
  uint16_t bits;
  __builtin_memcpy(&bits, &y, 2);
  return bits;
#endif
}

inline float bfloat_to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  __builtin_memcpy(&y, &bits, 4);
  return y;
}

inline uint16_t float_to_bfloat(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to the nearest, ties to even
}

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

template <class T> constexpr int64_t padded(int64_t dim) { return (dim + LANES<T> - 1) / LANES<T> * LANES<T>; }

// One tensor of a call, as rows of `dim` numbers that are followed by zeros up to a whole vector.
template <class T> class Staged {
 public:
  Staged(const Tokens& tensor, int64_t tokens, int64_t dim, const int64_t* order)
      : tensor_(tensor),
        tokens_(tokens),
        dim_(dim),
        order_(order),
        in_place_(tensor.type == TYPE_OF<T> && tensor.channel == 1 && dim % LANES<T> == 0 && !order) {}

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

  // Returns where the rows of an output are computed; `finish` takes them to their place.
  Rows<T> rows(int64_t image, int64_t head) const {
    if (in_place_) return {base<T>(image, head), tensor_.token};
    return {room_, padded<T>(dim_)};
  }

  void finish(int64_t image, int64_t head) const {
    if (in_place_) return;
    const int64_t row = padded<T>(dim_);
    with_type(tensor_.type, [&](auto* type, auto, auto write) {
      auto* to = base<std::remove_pointer_t<decltype(type)>>(image, head);
      for (int64_t i = 0; i < tokens_; ++i) {
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
  T* room_ = nullptr;
};

}  // namespace
