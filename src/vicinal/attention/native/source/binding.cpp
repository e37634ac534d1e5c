// torch's side of the kernels: checks, memory, threads, and the operators of the library `vicinal_native`.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstring>
#include <numeric>
#include <string>

#include "call.h"
#include "threads.h"
#include "values.h"

namespace {

using at::Tensor;
using std::optional;
using namespace vicinal;

constexpr int64_t MIN_PRODUCTS_PER_WORKER = 1 << 16;  // multiplications: a parallel region takes microseconds
constexpr int64_t PAIRS_PER_WORKER = 8;               // from here on, one pair more for some workers hardly matters
constexpr int64_t MIN_QUERIES = 24;                   // of a part of a pair: each part packs all keys

const std::vector<const Kernels*>& all_kernels() {  // the last is the best
  static const std::vector<const Kernels*> found{
      kernels_portable(),
#ifdef VICINAL_HAS_AVX2
      kernels_avx2(),
#endif
#ifdef VICINAL_HAS_AVX512
      kernels_avx512(),
#endif
  };
  return found;
}

const Kernels* chosen = all_kernels().back();

std::vector<std::string> variants() {
  std::vector<std::string> names;
  for (const Kernels* each : all_kernels()) names.emplace_back(each->variant);
  return names;
}

void set_variant(const std::string& name) {
  for (const Kernels* each : all_kernels())
    if (name == each->variant) {
      chosen = each;
      return;
    }
  TORCH_CHECK(false, "no such variant: ", name);
}

Type type_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return Type::f64;
    case at::kBFloat16:
      return Type::bf16;
    case at::kHalf:
      return Type::f16;
    case at::kFloat:
      return Type::f32;
    default:
      TORCH_CHECK(false, "attention takes floating-point numbers, given ", x.scalar_type());
  }
}

Tokens tokens_of(const Tensor& x) {
  return {x.data_ptr(), type_of(x), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

at::ScalarType compute_type(const Tensor& q) { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// What all operators are given besides q, k and v; see operators.py.
struct Options {
  optional<Tensor> scale, bias, mask, order;
  int64_t height, width, prefix;
  bool per_offset;
  double softmax_scale, dropout;
  int64_t seed;
};

// A call with the memory that it points to.
class Prepared {
 public:
  Prepared(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options, bool training)
      : type(compute_type(q)),
        layout(q.size(1), q.size(2), k.size(2), options.height, options.width, options.prefix, options.per_offset,
               options.scale.has_value() || options.bias.has_value()),
        call{} {
    TORCH_CHECK(k.size(0) == q.size(0) && k.size(1) == q.size(1) && k.size(3) == q.size(3) && v.size(2) == k.size(2),
                "q, k and v do not fit");
    TORCH_CHECK(!options.height || q.size(2) == options.prefix + options.height * options.width,
                "tokens do not fill the grid");
    call.batch = q.size(0), call.heads = q.size(1), call.queries = q.size(2), call.keys = k.size(2);
    call.dim = q.size(3), call.value_dim = v.size(3);
    call.q = tokens_of(q), call.k = tokens_of(k), call.v = tokens_of(v);
    call.factor = options.softmax_scale;
    call.size = layout.size, call.neutral = layout.neutral, call.prefix = layout.prefix;
    call.run = layout.run, call.step = layout.step, call.start = layout.start.data();
    call.scale = values(options.scale, call.factor, call.factor, scale_);
    call.bias = values(options.bias, 1.0, 0.0, bias_);
    call.dropout = options.dropout, call.seed = static_cast<uint64_t>(options.seed);
    // A free number per pair: the sums of one head at a time are what a worker can hold.
    call.head_major = !layout.per_offset && (call.scale || call.bias);
    if (options.order) {
      TORCH_CHECK(call.queries == call.keys && options.order->numel() == call.queries, "order has another length");
      order_ = options.order->to(at::kLong).contiguous();
      call.order = order_.data_ptr<int64_t>();
    }
    if (options.mask) set_mask(*options.mask);
    workers = workers_for(call.batch * call.heads);
    if (training) norms = at::empty({call.batch, call.heads, call.queries, 2}, q.options().dtype(type));
    if (training) call.norms = norms.data_ptr();
  }

  // Whether there is nothing to compute: results are empty, or 0 where queries have no key.
  bool empty() const { return !call.batch || !call.heads || !call.queries || !call.keys; }

  // Splits the queries of each pair, in forward, so that all workers get the same share of a few pairs.
  void split_queries() {
    const int64_t pairs = call.batch * call.heads, threads = workers_for(pairs * call.queries);
    if (empty() || pairs >= threads * PAIRS_PER_WORKER) return;
    call.parts = std::clamp<int64_t>(call.queries / MIN_QUERIES, 1, threads / std::gcd(pairs, threads));
    workers = std::min(threads, pairs * call.parts);
  }

  void run(Run kernel) const {
    if (empty()) return;
    const int64_t items = call.batch * call.heads * call.parts;
    // Masks with a row for every image have gradients that heads share: then a worker takes whole images.
    const int64_t unit = whole_images ? call.heads : 1, units = items / unit;
    run_workers(workers, [&](int64_t worker) {
      kernel(call, units * worker / workers * unit, units * (worker + 1) / workers * unit, worker);
    });
  }

  bool is_double() const { return type == at::kDouble; }

  at::ScalarType type;
  Layout layout;
  Call call;
  int64_t workers = 1;
  bool whole_images = false;
  Tensor norms, mask;

 private:
  int64_t workers_for(int64_t most) const {
    const int64_t products = call.batch * call.heads * call.queries * call.keys * (call.dim + call.value_dim);
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), products / MIN_PRODUCTS_PER_WORKER);
    return std::max<int64_t>(std::min(threads, most), 1);
  }

  const void* values(const optional<Tensor>& given, double factor, double neutral, Tensor& kept) {
    if (!given) return nullptr;
    const Tensor from = given->to(type).contiguous();
    TORCH_CHECK(from.numel() == call.heads * layout.given(), "the prior's values have another size");
    kept = at::empty({call.heads, layout.size}, from.options());
    if (is_double())
      layout.write(from.data_ptr<double>(), factor, neutral, kept.data_ptr<double>());
    else
      layout.write(from.data_ptr<float>(), factor, neutral, kept.data_ptr<float>());
    return kept.data_ptr();
  }

  void set_mask(const Tensor& given) {
    TORCH_CHECK(given.dim() == 4 && given.size(3) == call.keys, "mask must be (images, heads, queries, keys)");
    TORCH_CHECK(call.batch % given.size(0) == 0, "mask has another number of images");
    mask = given.to(type);
    if (mask.stride(3) != 1 || !mask.is_non_overlapping_and_dense()) mask = mask.contiguous();
    call.mask = mask.data_ptr(), call.mask_period = mask.size(0);
    call.mask_image = mask.size(0) > 1 ? mask.stride(0) : 0;
    call.mask_head = mask.size(1) > 1 ? mask.stride(1) : 0;
    call.mask_query = mask.size(2) > 1 ? mask.stride(2) : 0;
    call.mask_size = mask.numel();
  }

  Tensor scale_, bias_, order_;
};

std::tuple<Tensor, Tensor> forward_of(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options,
                                      bool training) {
  Prepared prepared(q, k, v, options, training);
  Call& call = prepared.call;
  const Tensor out = at::empty({call.batch, call.queries, call.heads, call.value_dim}, q.options());
  if (prepared.empty()) out.zero_();
  prepared.split_queries();
  call.out = tokens_of(out.transpose(1, 2));
  prepared.run(prepared.is_double() ? chosen->forward_f64 : chosen->forward_f32);
  return {out, training ? prepared.norms : at::empty({0}, q.options().dtype(prepared.type))};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of scale, bias and mask; empty where not wanted

Gradients backward_of(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dq,
                      const Tensor& dk, const Tensor& dv, const Tensor& norms, const Options& options,
                      at::ArrayRef<bool> wanted) {
  Prepared prepared(q, k, v, options, false);
  Call& call = prepared.call;
  call.out = tokens_of(g), call.dq = tokens_of(dq), call.dk = tokens_of(dk), call.dv = tokens_of(dv);
  call.norms = norms.data_ptr();
  if (prepared.empty())
    for (const Tensor& each : {dq, dk, dv}) each.zero_();
  const auto doubles = q.options().dtype(at::kDouble);
  Tensor sums[2], d_mask = at::empty({0}, doubles);
  if (options.mask && wanted[2]) {
    prepared.whole_images = call.mask_period == call.batch && call.batch > 1;
    if (prepared.whole_images) call.mask_size = 0, call.head_major = false;
    const int64_t copies = prepared.whole_images ? 1 : prepared.workers;
    std::vector<int64_t> shape{copies};
    for (int64_t each : prepared.mask.sizes()) shape.push_back(each);
    d_mask = at::zeros(shape, doubles);
    // The gradient has the strides of a contiguous mask.
    prepared.mask = prepared.mask.contiguous(), call.mask = prepared.mask.data_ptr();
    const auto& m = prepared.mask;
    call.mask_image = m.size(0) > 1 ? m.stride(0) : 0, call.mask_head = m.size(1) > 1 ? m.stride(1) : 0;
    call.mask_query = m.size(2) > 1 ? m.stride(2) : 0;
    call.d_mask = d_mask.data_ptr<double>();
  }
  for (int64_t i = 0; i < 2; ++i)
    if ((i ? options.bias : options.scale) && wanted[i]) {
      sums[i] = at::zeros({call.slots(prepared.workers), call.size}, doubles);
      (i ? call.d_bias : call.d_scale) = sums[i].data_ptr<double>();
    }
  prepared.run(prepared.is_double() ? chosen->backward_f64 : chosen->backward_f32);
  Tensor totals[2];
  for (int64_t i = 0; i < 2; ++i) {
    const auto& given = i ? options.bias : options.scale;
    totals[i] = at::empty({0}, doubles);
    if (!sums[i].defined()) continue;
    Tensor total = at::zeros({call.heads, prepared.layout.given()}, doubles);
    const double factor = i ? 1.0 : options.softmax_scale;
    prepared.layout.gather(call, sums[i].data_ptr<double>(), prepared.workers, factor, total.data_ptr<double>());
    totals[i] = total.view(given->sizes()).to(given->scalar_type());
  }
  if (call.d_mask) d_mask = (prepared.whole_images ? d_mask[0] : d_mask.sum(0)).to(options.mask->scalar_type());
  return {totals[0], totals[1], d_mask};
}

#define OPTIONS                                                                                     \
  const optional<Tensor>&scale, const optional<Tensor>&bias, const optional<Tensor>&mask,           \
      const optional<Tensor>&order, int64_t height, int64_t width, int64_t prefix, bool per_offset, \
      double softmax_scale, double dropout, int64_t seed
#define GIVEN {scale, bias, mask, order, height, width, prefix, per_offset, softmax_scale, dropout, seed}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, OPTIONS, bool training) {
  return forward_of(q, k, v, GIVEN, training);
}

Tensor new_gradient(const Tensor& x) {  // (batch, heads, tokens, dim), in memory as projections give them
  return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Tensor& g, const Tensor& q, const Tensor& k,
                                                                    const Tensor& v, const Tensor& norms, OPTIONS,
                                                                    std::array<bool, 3> wanted) {
  const Tensor dq = new_gradient(q), dk = new_gradient(k), dv = new_gradient(v);
  const auto [d_scale, d_bias, d_mask] = backward_of(g.transpose(1, 2), q, k, v, dq, dk, dv, norms, GIVEN, wanted);
  return {dq, dk, dv, d_scale, d_bias, d_mask};
}

// q, k and v, each (batch, heads, tokens, dim), as views of (batch, tokens, 3 * heads * dim).
std::array<Tensor, 3> unpack(const Tensor& qkv, int64_t heads) {
  const int64_t dim = qkv.size(2) / 3 / heads;
  TORCH_CHECK(qkv.dim() == 3 && qkv.size(2) == 3 * heads * dim, "qkv must be (batch, tokens, 3 * heads * dim)");
  const Tensor parts = qkv.view({qkv.size(0), qkv.size(1), 3, heads, dim}).permute({2, 0, 3, 1, 4});
  return {parts[0], parts[1], parts[2]};
}

std::tuple<Tensor, Tensor> forward_packed(const Tensor& qkv, int64_t heads, OPTIONS, bool training) {
  const auto [q, k, v] = unpack(qkv, heads);
  return forward_of(q, k, v, GIVEN, training);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_packed(const Tensor& g, const Tensor& qkv, int64_t heads,
                                                           const Tensor& norms, OPTIONS, std::array<bool, 3> wanted) {
  const auto [q, k, v] = unpack(qkv, heads);
  const Tensor d_qkv = at::empty(qkv.sizes(), qkv.options());
  const auto [dq, dk, dv] = unpack(d_qkv, heads);
  const auto [d_scale, d_bias, d_mask] = backward_of(g.transpose(1, 2), q, k, v, dq, dk, dv, norms, GIVEN, wanted);
  return {d_qkv, d_scale, d_bias, d_mask};
}

// A kernel for CPUs, which dispatch modes (FlopCounterMode, fake tensors) see as one operator.
template <class F> torch::CppFunction on_cpu(F f) { return torch::dispatch(c10::DispatchKey::CPU, f); }

}  // namespace

TORCH_LIBRARY(vicinal_native, library) {
  library.def("variants", &variants);
  library.def("set_variant", &set_variant);
  library.def("forward", on_cpu(TORCH_FN(forward)));
  library.def("backward", on_cpu(TORCH_FN(backward)));
  library.def("forward_packed", on_cpu(TORCH_FN(forward_packed)));
  library.def("backward_packed", on_cpu(TORCH_FN(backward_packed)));
}
