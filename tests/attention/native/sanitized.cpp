// Runs forward and backward on many shapes, for AddressSanitizer and UndefinedBehaviorSanitizer. No torch: results are
// compared with the formula elsewhere; here every number must be finite, and every access inside of its array.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "call.h"
#include "values.h"

using namespace vicinal;

#define JOIN(a, b) a##b
#define FUNCTION(variant) JOIN(kernels_, variant)

namespace {

struct Shape {
  int64_t batch, heads, height, width, prefix, dim, value_dim;
  bool per_offset, scale, bias, mask, order;
  double dropout;
  int64_t more_keys = 0;  // than queries, without a grid
};

double uniform() { return std::rand() / (RAND_MAX + 1.0) - 0.5; }

// Exactly as many numbers as the tensor has, on the heap, so that the sanitizer sees each access beyond it.
template <class M> std::vector<M> filled(int64_t count) {
  std::vector<M> x(count);
  for (M& each : x) {
    if constexpr (sizeof(M) == 2) {  // the first half of a float: a number below 2 as bfloat16 and as float16
      const float number = static_cast<float>(uniform());
      std::memcpy(&each, reinterpret_cast<const char*>(&number) + 2, 2);
    } else {
      each = static_cast<M>(uniform());
    }
  }
  return x;
}

template <class M> Tokens tokens(std::vector<M>& x, Type type, int64_t heads, int64_t count, int64_t dim) {
  return {x.data(), type, count * heads * dim, dim, heads * dim, 1};
}

template <class M> bool finite(const std::vector<M>& x, Type type = Type::f64) {
  const int exponent = type == Type::bf16 ? 0x7f80 : 0x7c00;
  for (M each : x) {
    if constexpr (sizeof(M) == 2) {
      if ((each & exponent) == exponent) return false;
    } else if (!std::isfinite(static_cast<double>(each))) {
      return false;
    }
  }
  return true;
}

// T is the type in which is computed, M the one in memory.
template <class T, class M = T> bool run(const Kernels* kernels, const Shape& s, Type type, int64_t workers) {
  const int64_t n = s.prefix + s.height * s.width, keys = n + s.more_keys;
  const int64_t all = s.batch * s.heads * n, all_keys = s.batch * s.heads * keys;
  auto q = filled<M>(all * s.dim), k = filled<M>(all_keys * s.dim), v = filled<M>(all_keys * s.value_dim);
  auto out = filled<M>(all * s.value_dim), g = filled<M>(all * s.value_dim);
  auto dq = filled<M>(all * s.dim), dk = filled<M>(all_keys * s.dim), dv = filled<M>(all_keys * s.value_dim);
  auto norms = filled<T>(2 * all), mask = filled<T>(s.heads * n * keys);
  const bool placed = !s.more_keys;
  Layout layout(s.heads, n, keys, placed ? s.height : 0, placed ? s.width : 0, placed ? s.prefix : 0,
                placed && s.per_offset, s.scale || s.bias);
  auto values = filled<T>(s.heads * layout.given());
  std::vector<T> scale(s.heads * layout.size), bias(s.heads * layout.size);
  if (s.scale || s.bias) {
    layout.write(values.data(), 0.3, 0.3, scale.data());
    layout.write(values.data(), 1.0, 0.0, bias.data());
  }
  std::vector<int64_t> order(n);
  for (int64_t i = 0; i < n; ++i) order[i] = n - 1 - i;
  Call call{};
  call.batch = s.batch, call.heads = s.heads, call.queries = n, call.keys = keys, call.dim = s.dim,
  call.value_dim = s.value_dim;
  call.q = tokens(q, type, s.heads, n, s.dim), call.k = tokens(k, type, s.heads, keys, s.dim),
  call.v = tokens(v, type, s.heads, keys, s.value_dim);
  call.dq = tokens(dq, type, s.heads, n, s.dim), call.dk = tokens(dk, type, s.heads, keys, s.dim),
  call.dv = tokens(dv, type, s.heads, keys, s.value_dim);
  call.out = tokens(out, type, s.heads, n, s.value_dim);
  call.order = s.order && placed ? order.data() : nullptr;
  call.scale = s.scale ? scale.data() : nullptr, call.bias = s.bias ? bias.data() : nullptr;
  call.start = layout.start.data(), call.size = layout.size, call.neutral = layout.neutral, call.prefix = layout.prefix;
  call.run = layout.run, call.step = layout.step, call.factor = 0.3;
  call.head_major = !layout.per_offset && (s.scale || s.bias);
  std::vector<double> d_scale(call.slots(workers) * call.size), d_bias(d_scale.size()), d_mask(workers * mask.size());
  call.d_scale = s.scale ? d_scale.data() : nullptr, call.d_bias = s.bias ? d_bias.data() : nullptr;
  if (s.mask) {
    call.mask = mask.data(), call.mask_head = n * keys, call.mask_query = keys, call.mask_period = 1;
    call.d_mask = d_mask.data(), call.mask_size = static_cast<int64_t>(mask.size());
  }
  call.dropout = s.dropout, call.seed = 7, call.norms = norms.data();
  const auto each_worker = [&](Run kernel) {
    const int64_t items = s.batch * s.heads * call.parts;
    for (int64_t worker = 0; worker < workers; ++worker)
      kernel(call, items * worker / workers, items * (worker + 1) / workers, worker);
  };
  call.parts = workers > 1 ? 3 : 1;
  each_worker(sizeof(T) == 8 ? kernels->forward_f64 : kernels->forward_f32);
  call.out = tokens(g, type, s.heads, n, s.value_dim), call.parts = 1;
  each_worker(sizeof(T) == 8 ? kernels->backward_f64 : kernels->backward_f32);
  std::vector<double> total(s.heads * layout.given());
  if (s.scale) layout.gather(call, d_scale.data(), workers, 1.0, total.data());
  return finite(out, type) && finite(dq, type) && finite(dk, type) && finite(dv, type) && finite(total) &&
         finite(d_mask);
}

bool run_all_types(const Kernels* kernels, const Shape& s) {
  return run<float>(kernels, s, Type::f32, 2) && run<double>(kernels, s, Type::f64, 1) &&
         run<float, uint16_t>(kernels, s, Type::bf16, 2) && run<float, uint16_t>(kernels, s, Type::f16, 1);
}

}  // namespace

int main() {
  const Kernels* kernels = FUNCTION(VICINAL_VARIANT)();
  int count = 0;
  for (const auto& [height, width] : {std::pair<int64_t, int64_t>{1, 1}, {3, 5}, {8, 8}, {2, 30}})
    for (int64_t prefix : {0, 9})
      for (int64_t dim : {7, 16})
        for (int kind = 0; kind < 16; ++kind) {
          const bool mask = kind & 4, order = kind & 8;
          Shape s{3,
                  2,
                  height,
                  width,
                  prefix,
                  dim,
                  dim + kind % 3,
                  (kind & 3) != 3,
                  (kind & 1) != 0,
                  kind % 3 > 0,
                  mask,
                  order,
                  kind % 5 ? 0.0 : 0.3};
          for (int64_t more_keys : {0, 7}) {
            s.more_keys = more_keys;
            if (run_all_types(kernels, s)) continue;
            std::printf("not finite: %d x %d, prefix %d, dim %d, kind %d, %d more keys\n", int(height), int(width),
                        int(prefix), int(dim), kind, int(more_keys));
            return 1;
          }
          ++count;
        }
  std::printf("%d shapes\n", count);
  return 0;
}
