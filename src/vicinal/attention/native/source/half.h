// bfloat16 and float16 to float and back. Rounded to the nearest number, ties to even.
#pragma once
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// Drops the lowest bits; the highest one can be a sign.
template <int COUNT> inline uint32_t rounded(uint32_t bits) {
  return (bits + (1u << (COUNT - 1)) - 1 + ((bits >> COUNT) & 1)) >> COUNT;
}

inline float bfloat_to_float(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

inline uint16_t float_to_bfloat(float x) { return x != x ? 0x7fc0 : static_cast<uint16_t>(rounded<16>(bits_of(x))); }

#if defined(__F16C__)
inline float half_to_float(uint16_t x) { return _cvtsh_ss(x); }

inline uint16_t float_to_half(float x) { return _cvtss_sh(x, 0); }
#else
// Not by _Float16, which clang++ has on newer CPUs only.
constexpr uint32_t EXPONENT_SHIFT = (127 - 15) << 23;  // between the exponents of both types

inline float half_to_float(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, rest = x & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | rest << 13);          // infinity, NaN
  if (rest >= 0x0400) return float_of(sign | ((rest << 13) + EXPONENT_SHIFT));  // normal
  return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));         // denormal
}

inline uint16_t float_to_half(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);   // NaN
  if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // at least 65520: infinity
  if (rest >= 0x38800000) return static_cast<uint16_t>(sign | rounded<13>(rest - EXPONENT_SHIFT));
  // Below 2^-14, halves are 2^-24 apart, and so are floats from 0.5 to 1.
  return static_cast<uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
}
#endif

}  // namespace
