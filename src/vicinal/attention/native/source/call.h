// One call of attention, as binding.cpp describes it to a kernel. No torch header, so that a kernel builds in seconds.
//
//   out = softmax(softmax_scale * (q k^T) * scale + bias + mask) v
//
// Scale and bias are of the prior. For one head they are `size` numbers; the values between query i and the keys that
// have a place begin at `start[i]`: runs of `run` neighboring keys, `step` numbers apart. Keys without a place come
// first, `prefix` of them, and meet the numbers from `neutral` on.
#pragma once
#include <cstdint>

namespace vicinal {

enum class Type : int64_t { f32, f64, bf16, f16 };

// A tensor (batch, heads, tokens, channels) and its strides, in numbers.
struct Tokens {
  void* data = nullptr;
  Type type = Type::f32;
  int64_t image = 0, head = 0, token = 0, channel = 0;
};

struct Call {
  int64_t batch, heads, queries, keys, dim, value_dim;
  Tokens q, k, v, out;  // in backward, out is the gradient of the output
  Tokens dq, dk, dv;
  const int64_t* order;  // token at each position of the prior; null if tokens are in that order

  const void *scale, *bias;  // (heads, size) in the compute type, null for none; scale times `factor`
  const int64_t* start;      // (queries)
  int64_t size, neutral, prefix, run, step;
  double factor;             // softmax_scale
  double *d_scale, *d_bias;  // sums over pairs, a slot of `size` numbers for each head of a worker; null if not wanted

  const void* mask;                                        // null, or terms in the compute type; keys lie side by side
  int64_t mask_image, mask_head, mask_query, mask_period;  // strides; the mask of image i is that of i % mask_period
  double* d_mask;                                          // in the shape of the mask, `mask_size` numbers a worker
  int64_t mask_size;

  double dropout;
  uint64_t seed;

  void* norms;        // (batch, heads, queries, 2): largest logit, and 1 / sum of exponentials; null if not wanted
  bool head_major;    // whether all images of a head are computed before the next head
  int64_t parts = 1;  // in which forward computes the queries of a pair: several if there are few pairs

  // Pairs of an image and a head are numbered in the order in which they are computed.
  int64_t image_of(int64_t pair) const { return head_major ? pair % batch : pair / heads; }
  int64_t head_of(int64_t pair) const { return head_major ? pair / batch : pair % heads; }
  // Workers compute neighboring pairs. Slots of different workers are different ones.
  int64_t slot(int64_t worker, int64_t head) const { return head_major ? worker + head : worker * heads + head; }
  int64_t slots(int64_t workers) const { return head_major ? workers + heads : workers * heads; }
};

// Computes the pairs from `begin` to `end` as one of several workers; forward the parts of pairs.
using Run = void (*)(const Call&, int64_t begin, int64_t end, int64_t worker);

struct Kernels {
  const char* variant;
  Run forward_f32, backward_f32, forward_f64, backward_f64;
};

const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();

constexpr int64_t MAX_LANES = 16;  // numbers in the widest vector: tables have that many more behind the last

}  // namespace vicinal
