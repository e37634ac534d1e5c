// Vectors as compiler extensions (g++ and clang++), their width by the variant, and exponentials.
//
// All names have internal linkage: the variants of this source are linked into one library, and the linker must not
// merge a function built for AVX-512 with one that an older CPU runs.
#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, TILE_ROWS = 14;  // 14 x 2 sums and 2 columns: 30 of 32 registers
#elif defined(__AVX2__)
constexpr int BYTES = 32, TILE_ROWS = 6;  // 6 x 2 sums, 2 columns and a broadcast: 15 of 16 registers
#elif defined(__aarch64__)
constexpr int BYTES = 16, TILE_ROWS = 8;
#else
constexpr int BYTES = 16, TILE_ROWS = 4;
#endif

template <class T> struct Vectors;

template <> struct Vectors<float> {
  typedef float Vec __attribute__((vector_size(BYTES), aligned(4), may_alias));
  typedef int32_t Int __attribute__((vector_size(BYTES), aligned(4), may_alias));
  static constexpr float SHIFT = 12582912.f;  // 1.5 * 2^23: the low bits of a sum with it are the nearest whole number
  static constexpr int MANTISSA = 23;
  static constexpr float LOWEST = -44.0f;  // e^-44 is close to the square root of the smallest normal number
  static constexpr float LN2_HIGH = 0.693145751953125f, LN2_LOW = 1.42860682e-6f;
  // e^x for |x| <= ln(2) / 2 by Chebyshev interpolation: relative error 2.5e-9.
  static constexpr float POWERS[] = {
      1.394110843e-3f, 8.375126398e-3f, 4.16663529e-2f, 0.1666641551f, 0.5000000047f, 1.000000038f, 1.0f};
};

template <> struct Vectors<double> {
  typedef double Vec __attribute__((vector_size(BYTES), aligned(8), may_alias));
  typedef int64_t Int __attribute__((vector_size(BYTES), aligned(8), may_alias));
  static constexpr double SHIFT = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int MANTISSA = 52;
  static constexpr double LOWEST = -354.0;
  static constexpr double LN2_HIGH = 0.6931471803691238, LN2_LOW = 1.9082149292705878e-10;
  // Relative error 6e-20.
  static constexpr double POWERS[] = {2.09215799649503001e-9,
                                      2.51148695286577649e-8,
                                      2.75572519041749126e-7,
                                      2.75572249583926227e-6,
                                      2.48015873501107956e-5,
                                      1.98412699092171014e-4,
                                      1.38888888888718882e-3,
                                      8.33333333330952708e-3,
                                      4.16666666666666922e-2,
                                      0.166666666666667024,
                                      0.5,
                                      0.999999999999999998,
                                      1.0};
};

template <class T> using Vec = typename Vectors<T>::Vec;
template <class T> using Int = typename Vectors<T>::Int;
template <class T> constexpr int LANES = BYTES / sizeof(T);

template <class T> inline Vec<T> load(const T* p) { return *reinterpret_cast<const Vec<T>*>(p); }
template <class T> inline void store(T* p, Vec<T> x) { *reinterpret_cast<Vec<T>*>(p) = x; }
template <class T> inline Vec<T> splat(T x) { return Vec<T>{} + x; }
template <class T> inline Vec<T> larger(Vec<T> a, Vec<T> b) { return a > b ? a : b; }  // b if one is NaN

// True in the first n lanes.
template <class T> inline Int<T> first(int64_t n) {
  Int<T> lane;
  for (int i = 0; i < LANES<T>; ++i) lane[i] = i;
  return lane < static_cast<std::conditional_t<sizeof(T) == 4, int32_t, int64_t>>(n);
}

// Combines all lanes: halves, quarters, and so on, change places.
template <class T, int WIDTH, class F, int... I>
inline Vec<T> combined(Vec<T> x, F f, std::integer_sequence<int, I...> lanes) {
  if constexpr (WIDTH == 0)
    return x;
  else
    return combined<T, WIDTH / 2>(f(x, __builtin_shufflevector(x, x, (I ^ WIDTH)...)), f, lanes);
}

template <class T, class F> inline T reduce(Vec<T> x, F f) {
  return combined<T, LANES<T> / 2>(x, f, std::make_integer_sequence<int, LANES<T>>())[0];
}
template <class T> inline T sum(Vec<T> x) {
  return reduce<T>(x, [](Vec<T> a, Vec<T> b) { return a + b; });
}
template <class T> inline T largest(Vec<T> x) { return reduce<T>(x, larger<T>); }

// e^t for t <= 0 or hardly above it; exactly 0 below e^LOWEST, so that products of two results are normal. NaN stays.
template <class T> inline Vec<T> exp(Vec<T> t) {
  using V = Vectors<T>;
  constexpr T LOG2E = 1.4426950408889634;
  const Vec<T> clipped = t < V::LOWEST ? splat<T>(V::LOWEST) : t;
  const Vec<T> shifted = clipped * LOG2E + V::SHIFT;
  const Vec<T> whole = shifted - V::SHIFT;
  const Vec<T> x = clipped - whole * V::LN2_HIGH - whole * V::LN2_LOW;  // Cody and Waite: the first product is exact
  Vec<T> y = splat<T>(V::POWERS[0]);
  for (size_t i = 1; i < sizeof(V::POWERS) / sizeof(T); ++i) y = y * x + V::POWERS[i];
  y = (Vec<T>)((Int<T>)y + ((Int<T>)shifted << V::MANTISSA));
  return t < V::LOWEST ? Vec<T>{} : y;
}

// Denormal numbers are 0 while this lives: many CPUs compute them more than ten times slower.
class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }  // flush to zero, denormals are zero
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | (1ull << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

// Memory of one thread, kept between calls: fresh pages cost more than what is computed in them.
class Buffer {
 public:
  ~Buffer() { __builtin_free(data_); }
  template <class T> T* room(int64_t numbers) {
    const int64_t bytes = (numbers * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64 + 64;
    if (bytes > bytes_) {
      __builtin_free(data_);
      data_ = __builtin_malloc(bytes);
      bytes_ = data_ ? bytes : 0;
      if (!data_) __builtin_trap();
    }
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(data_) + 63) / 64 * 64);
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace
