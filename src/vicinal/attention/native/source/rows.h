// What happens to one query's row of products: logits, exponentials, dropout, and the way back.
#pragma once
#include "call.h"
#include "vectors.h"

namespace {

using vicinal::Call;

// Which lanes of a vector are keys of a query: all, the last ones or the first ones.
struct Whole {};
struct From {
  int64_t lane;
};
struct Until {
  int64_t lane;
};
template <class T> inline Vec<T> only(Whole, Vec<T> x, Vec<T>) { return x; }
template <class T> inline Vec<T> only(From lanes, Vec<T> x, Vec<T> rest) { return first<T>(lanes.lane) ? rest : x; }
template <class T> inline Vec<T> only(Until lanes, Vec<T> x, Vec<T> rest) { return first<T>(lanes.lane) ? x : rest; }

// Numbers in front of the first key of a row of logits, so that keys with a place begin with a whole vector; none where
// the row would take one vector more.
template <class T> inline int64_t lead_of(const Call& c) {
  constexpr int64_t L = LANES<T>;
  const int64_t lead = (L - c.prefix % L) % L;
  return (lead + c.keys + L - 1) / L == (c.keys + L - 1) / L ? lead : 0;
}

// Calls f(first key, its number in the prior's values, lanes) for all keys of a query, vector by vector.
template <class T, class F>
inline __attribute__((always_inline)) void over_keys(const Call& c, int64_t lead, int64_t query, F f) {
  constexpr int L = LANES<T>;
  const int64_t run = c.run, full = run / L * L;
  int64_t x = -lead;
  if (lead) f(x, c.neutral, From{lead}), x += L;
  for (; x + L <= c.prefix; x += L) f(x, c.neutral, Whole());
  if (x < c.prefix) f(x, c.neutral, Until{c.prefix - x});
  int64_t value = c.start[query];
  const int64_t step = value == c.neutral ? 0 : c.step;  // a query without a place
  for (int64_t key = c.prefix; key < c.keys; key += run, value += step) {
    for (int64_t x = 0; x < full; x += L) f(key + x, value + x, Whole());
    if (full < run) f(key + full, value + full, Until{run - full});
  }
}

// The logit of a product: times the prior's scale or the factor, plus its bias.
template <bool SCALE, bool BIAS, class T>
inline Vec<T> logit(const T* product, const T* scale, const T* bias, int64_t value, T factor) {
  Vec<T> x = load(product);
  if constexpr (SCALE)
    x = x * load(scale + value);
  else
    x = x * factor;
  if constexpr (BIAS) x = x + load(bias + value);
  return x;
}

// Products of a query to its logits, -inf around them; returns the largest. Both rows can be the same.
template <bool SCALE, bool BIAS, class T>
__attribute__((noinline)) T to_logits(const Call& c, int64_t lead, int64_t query, const T* products, const T* scale,
                                      const T* bias, T* logits) {
  const T factor = static_cast<T>(c.factor);
  const Vec<T> lowest = splat<T>(-__builtin_inf());
  Vec<T> most = lowest;
  over_keys<T>(c, lead, query, [&](int64_t key, int64_t value, auto lanes) {
    const Vec<T> x = logit<SCALE, BIAS, T>(products + key, scale, bias, value, factor);
    most = larger<T>(only<T>(lanes, x, most), most);
    if constexpr (std::is_same_v<decltype(lanes), Until>)  // numbers behind this run stay as they are
      store(logits + key, only<T>(lanes, x, load(logits + key)));
    else
      store(logits + key, only<T>(lanes, x, lowest));
  });
  store(logits + c.keys, lowest);
  return largest<T>(most);
}

// Adds a row of the mask; returns the largest logit.
template <class T> __attribute__((noinline)) T add_mask(int64_t keys, const T* mask, T* logits) {
  constexpr int L = LANES<T>;
  Vec<T> most = splat<T>(-__builtin_inf());
  int64_t j = 0;
  for (; j + L <= keys; j += L) {
    const Vec<T> x = load(logits + j) + load(mask + j);
    most = larger<T>(x, most);
    store(logits + j, x);
  }
  T found = largest<T>(most);
  for (; j < keys; ++j) {
    logits[j] += mask[j];
    found = logits[j] > found ? logits[j] : found;
  }
  return found;
}

// Logits of a query to exp(logit - most), in place; returns their sum.
template <class T> __attribute__((noinline)) T to_exponentials(int64_t keys, T most, T* row) {
  Vec<T> total{};
  for (int64_t j = 0; j < keys; j += LANES<T>) {
    const Vec<T> y = exp<T>(load(row + j) - most);
    total += y;
    store(row + j, y);
  }
  return sum<T>(total);
}

// Random numbers by counters: those of a pair of tokens depend on the seed and their indices only.
inline uint64_t row_key(uint64_t seed, uint64_t row) {  // splitmix64
  uint64_t z = seed + (row + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

inline uint32_t mixed(uint32_t x) {  // a bijection in which every bit of the input reaches every bit of the result
  x = (x ^ (x >> 16)) * 0x21f0aaadu;
  x = (x ^ (x >> 15)) * 0x735a2d97u;
  return x ^ (x >> 15);
}

// Drops weights of a query: times 0 with probability `dropout`, else times 1 / (1 - dropout), in place.
template <class T> __attribute__((noinline)) void drop(int64_t keys, uint64_t key, double dropout, T* row) {
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  const uint32_t dropped = static_cast<uint32_t>(dropout * 4294967296.0);
  const T kept = static_cast<T>(1.0 / (1.0 - dropout));
  for (int64_t j = 0; j < keys; ++j)
    row[j] *= mixed((static_cast<uint32_t>(j) * 0x9e3779b9u + low) ^ high) < dropped ? T(0) : kept;
}

// Adds the gradient of the logits of a query.
template <class T> void add_row(int64_t keys, const T* weights, const T* d_weights, T mean, double* total) {
  for (int64_t j = 0; j < keys; ++j) total[j] += weights[j] * (d_weights[j] - mean);
}

// The rows of a query in backward.
template <class T> struct QueryRows {
  T *products, *weights, *gradient;  // gradient: of the weights; on return that of the products
  T *d_scale, *d_bias;               // sums, in the layout of the prior's values
  double* d_mask;                    // the mask's row, or null
  bool ready;                        // whether `weights` holds them already
};

template <bool SCALE, bool BIAS, class T>
__attribute__((noinline)) void row_backward(const Call& c, int64_t lead, int64_t query, const QueryRows<T>& rows,
                                            const T* scale, const T* bias, T most, T share) {
  constexpr int L = LANES<T>;
  const T factor = static_cast<T>(c.factor);
  T *const products = rows.products, *const weights = rows.weights, *const gradient = rows.gradient;
  T *const d_scale = rows.d_scale, *const d_bias = rows.d_bias;
  Vec<T> total{}, weight{};
  if (rows.ready) {
    for (int64_t j = 0; j < c.keys; j += L) {
      Vec<T> y = load(weights + j), term = y * load(gradient + j);
      if (c.keys - j < L) {
        const Int<T> inside = first<T>(c.keys - j);
        y = inside ? y : Vec<T>{}, term = inside ? term : Vec<T>{};
      }
      total += term, weight += y;
    }
  } else {
    over_keys<T>(c, lead, query, [&](int64_t key, int64_t value, auto lanes) {
      const Vec<T> logits = logit<SCALE, BIAS, T>(products + key, scale, bias, value, factor);
      const Vec<T> y = only<T>(lanes, exp<T>(logits - most) * share, Vec<T>{});  // elsewhere there can be NaN too
      total += only<T>(lanes, y * load(gradient + key), Vec<T>{}), weight += y;
      store(weights + key, y);
    });
  }
  // Divided by the weights as they were rounded, so that gradients of the logits of a query add up to 0.
  const T mean = sum<T>(total) / sum<T>(weight);
  if (rows.d_mask) add_row<T>(c.keys, weights, gradient, mean, rows.d_mask);
  over_keys<T>(c, lead, query, [&](int64_t key, int64_t value, auto lanes) {
    const Vec<T> before = load(gradient + key);
    Vec<T> d = only<T>(lanes, load(weights + key) * (before - mean), Vec<T>{});
    if constexpr (SCALE) {
      const Vec<T> term = only<T>(lanes, d * load(products + key), Vec<T>{});
      store(d_scale + value, load(d_scale + value) + term);
    }
    if constexpr (BIAS) store(d_bias + value, load(d_bias + value) + d);
    if constexpr (SCALE)
      d = d * load(scale + value);
    else
      d = d * factor;
    store(gradient + key, only<T>(lanes, d, before));
  });
}

}  // namespace
