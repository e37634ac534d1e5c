// Attention under a prior and its gradients, one image and head at a time, with logits that stay in the cache.
// Compiled once for each variant of CPU.
#include "call.h"
#include "rows.h"
#include "staging.h"

namespace {

using vicinal::Kernels;

constexpr int64_t BLOCK_BYTES =
    96 * 1024;                     // of logits at a time: with the weights and gradients of backward, half of L2
constexpr int64_t MIN_ROWS = 36;   // products that sum over the rows of a block are slow for fewer
constexpr int64_t SHORT_SUM = 64;  // as many gradients are added in the compute type, and then in double

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Rows of logits: the numbers in front of a row, the distance of rows, and how many are computed at a time.
template <class T> struct Block {
  int64_t lead, stride, rows;

  explicit Block(const Call& c) : lead(lead_of<T>(c)) {
    constexpr int64_t P = 2 * LANES<T>;
    stride =
        ((lead + c.keys + LANES<T> + P - 1) / P * P) | P;  // odd multiples of a panel: rows do not share a cache set
    const int64_t most = BLOCK_BYTES / static_cast<int64_t>(sizeof(T)) / stride / TILE_ROWS * TILE_ROWS;
    rows = most < MIN_ROWS ? MIN_ROWS : most;
    const int64_t blocks = (c.queries + rows - 1) / rows;
    const int64_t even = (c.queries + blocks - 1) / blocks;
    rows = smaller(c.queries, (even + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS);
  }
};

template <class T> const T* values_of(const void* values, const Call& c, int64_t head) {
  return values ? static_cast<const T*>(values) + head * c.size : nullptr;
}

template <class T> int64_t mask_row(const Call& c, int64_t image, int64_t head, int64_t query) {
  return image % c.mask_period * c.mask_image + head * c.mask_head + query * c.mask_query;
}

inline uint64_t drop_key(const Call& c, int64_t image, int64_t head, int64_t query) {
  return row_key(c.seed, static_cast<uint64_t>((image * c.heads + head) * c.queries + query));
}

// Exponentials of the logits of one query, in place of its products; returns 1 / their sum.
template <class T, bool SCALE, bool BIAS>
T softmax_row(const Call& c, int64_t lead, int64_t image, int64_t head, int64_t query, T* row, T* norm) {
  const T *scale = values_of<T>(c.scale, c, head), *bias = values_of<T>(c.bias, c, head);
  T most = to_logits<SCALE, BIAS, T>(c, lead, query, row, scale, bias, row), share = 0;
  if (c.mask) most = add_mask<T>(c.keys, static_cast<const T*>(c.mask) + mask_row<T>(c, image, head, query), row);
  if (most == static_cast<T>(-__builtin_inf())) {  // no key is left: weights of 0
    for (int64_t j = 0; j < c.keys; ++j) row[j] = row[j] != row[j] ? row[j] : T(0);
  } else {
    share = T(1) / to_exponentials<T>(lead + c.keys, most, row - lead);
  }
  if (norm) norm[0] = most, norm[1] = share;
  if (c.dropout > 0) drop<T>(c.keys, drop_key(c, image, head, query), c.dropout, row);
  return share;
}

template <class T, bool SCALE, bool BIAS> void forward(const Call& c, int64_t begin, int64_t end, int64_t) {
  const FlushDenormals flush;
  static thread_local Buffer memory;
  const Block<T> block(c);
  constexpr int64_t P = 2 * LANES<T>;
  Staged<T> q(c, c.q, c.queries, c.dim), k(c, c.k, c.keys, c.dim), v(c, c.v, c.keys, c.value_dim);
  Staged<T> out(c, c.out, c.queries, c.value_dim);
  const int64_t packed = block.stride * c.dim, logits = block.rows * block.stride;
  T* room = memory.room<T>(packed + logits + block.rows + q.room() + k.room() + v.room() + out.room() + LANES<T>);
  T *const k_packed = room, *const products = k_packed + packed, *const shares = products + logits;
  T* const keyed = products + block.lead;  // the first key of the first row
  room = shares + block.rows + LANES<T>;
  for (Staged<T>* each : {&q, &k, &v, &out}) each->use(room), room += each->room();
  for (int64_t item = begin; item < end; ++item) {
    const int64_t pair = item / c.parts, part = item % c.parts, next = smaller(item + 1, end - 1) / c.parts;
    const int64_t first = c.queries * part / c.parts, last = c.queries * (part + 1) / c.parts;
    const int64_t image = c.image_of(pair), head = c.head_of(pair);
    const auto queries = q.load(image, head), keys = k.load(image, head), values = v.load(image, head);
    const int64_t next_image = c.image_of(next), next_head = c.head_of(next);
    const auto result = out.rows(image, head);
    T* norms = c.norms ? static_cast<T*>(c.norms) + 2 * (image * c.heads + head) * c.queries : nullptr;
    pack<T>(keys, c.keys, c.dim, block.lead, k_packed);
    for (int64_t start = first; start < last; start += block.rows) {
      const int64_t rows = smaller(block.rows, last - start);
      product<T>(rows, block.lead + c.keys, c.dim, {queries.at + start * queries.row, queries.row, 1},
                 {k_packed, P, P * c.dim}, {products, block.stride});
      for (int64_t r = 0; r < rows; ++r) {
        if ((start + r) % QUERIES_PER_FETCH == 0) {
          for (const Staged<T>* each : {&q, &k, &v}) each->template fetch<false>(next_image, next_head, start + r);
          out.template fetch<true>(next_image, next_head, start + r);
        }
        shares[r] = softmax_row<T, SCALE, BIAS>(c, block.lead, image, head, start + r, keyed + r * block.stride,
                                                norms ? norms + 2 * (start + r) : nullptr);
      }
      T* to = result.at + start * result.row;
      product<T>(rows, c.value_dim, c.keys, {keyed, block.stride, 1}, {values.at, values.row, P}, {to, result.row});
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t j = 0; j < c.value_dim; j += LANES<T>)
          store(to + r * result.row + j, load(to + r * result.row + j) * shares[r]);
    }
    out.finish(image, head, first, last);
  }
}

// Sums of the gradients of the prior's values: in the compute type for a few images, then in double.
template <class T> class ValueSums {
 public:
  ValueSums(const Call& c, double* sums, int64_t worker, T* room) : c_(c), sums_(sums), worker_(worker), local_(room) {
    for (int64_t i = 0; sums_ && i < size(c); ++i) local_[i] = 0;
  }
  static int64_t size(const Call& c) { return (c.head_major ? 1 : c.heads) * c.size; }

  T* of(int64_t head) const { return local_ + (c_.head_major ? 0 : head * c_.size); }

  void flush(int64_t head) {
    if (!sums_) return;
    T* from = of(head);
    double* to = sums_ + c_.slot(worker_, head) * c_.size;
    for (int64_t i = 0; i < c_.neutral; ++i) to[i] += from[i], from[i] = 0;
  }

 private:
  const Call& c_;
  double* sums_;
  int64_t worker_;
  T* local_;
};

// Weights and gradients of the products of one query.
template <class T, bool SCALE, bool BIAS>
void backward_row(const Call& c, int64_t lead, int64_t image, int64_t head, int64_t query, QueryRows<T> rows,
                  const T* norm) {
  const T *scale = values_of<T>(c.scale, c, head), *bias = values_of<T>(c.bias, c, head);
  const T most = norm[0], share = norm[1];
  if (share == 0) {  // no key was left
    for (int64_t j = 0; j < c.keys; ++j) rows.weights[j] = rows.gradient[j] = 0;
    return;
  }
  const uint64_t key = c.dropout > 0 ? drop_key(c, image, head, query) : 0;
  rows.ready = c.mask != nullptr;
  if (c.mask) {
    to_logits<SCALE, BIAS, T>(c, lead, query, rows.products, scale, bias, rows.weights);
    add_mask<T>(c.keys, static_cast<const T*>(c.mask) + mask_row<T>(c, image, head, query), rows.weights);
    to_exponentials<T>(c.keys, most, rows.weights);
    for (int64_t j = 0; j < c.keys; ++j) rows.weights[j] *= share;
  }
  if (c.dropout > 0) drop<T>(c.keys, key, c.dropout, rows.gradient);
  row_backward<SCALE, BIAS, T>(c, lead, query, rows, scale, bias, most, share);
  if (c.dropout > 0) drop<T>(c.keys, key, c.dropout, rows.weights);
}

template <class T, bool SCALE, bool BIAS> void backward(const Call& c, int64_t begin, int64_t end, int64_t worker) {
  const FlushDenormals flush;
  static thread_local Buffer memory;
  const Block<T> block(c);
  constexpr int64_t P = 2 * LANES<T>;
  Staged<T> q(c, c.q, c.queries, c.dim), k(c, c.k, c.keys, c.dim), v(c, c.v, c.keys, c.value_dim);
  Staged<T> g(c, c.out, c.queries, c.value_dim), dq(c, c.dq, c.queries, c.dim);
  Staged<T> dk(c, c.dk, c.keys, c.dim), dv(c, c.dv, c.keys, c.value_dim);
  const int64_t k_size = block.stride * c.dim, v_size = block.stride * c.value_dim,
                row_size = block.rows * 3 * block.stride;
  const int64_t sums = ValueSums<T>::size(c), d_scales = SCALE ? sums : 0, d_biases = BIAS ? sums : 0;
  int64_t total = k_size + v_size + row_size + d_scales + d_biases + LANES<T>;
  for (const Staged<T>* each : {&q, &k, &v, &g, &dq, &dk, &dv}) total += each->room();
  T* room = memory.room<T>(total);
  T *const k_packed = room, *const v_packed = k_packed + k_size;
  // A row is products, weights and their gradients; pointers are to the first key.
  const int64_t pitch = 3 * block.stride;
  T *const products = v_packed + v_size + block.lead, *const weights = products + block.stride,
           *const gradient = weights + block.stride;
  room = v_packed + v_size + row_size + LANES<T>;
  ValueSums<T> d_scale(c, SCALE ? c.d_scale : nullptr, worker, room),
      d_bias(c, BIAS ? c.d_bias : nullptr, worker, room + d_scales);
  room += d_scales + d_biases;
  for (Staged<T>* each : {&q, &k, &v, &g, &dq, &dk, &dv}) each->use(room), room += each->room();
  double* d_mask = c.d_mask ? c.d_mask + worker * c.mask_size : nullptr;
  const int64_t images_per_sum = c.queries < SHORT_SUM ? SHORT_SUM / c.queries : 1;
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t image = c.image_of(pair), head = c.head_of(pair);
    const auto queries = q.load(image, head), keys = k.load(image, head), values = v.load(image, head);
    const int64_t next = smaller(pair + 1, end - 1), next_image = c.image_of(next), next_head = c.head_of(next);
    const auto grads = g.load(image, head);
    const auto to_q = dq.rows(image, head), to_k = dk.rows(image, head), to_v = dv.rows(image, head);
    const T* norms = static_cast<const T*>(c.norms) + 2 * (image * c.heads + head) * c.queries;
    pack<T>(keys, c.keys, c.dim, block.lead, k_packed);
    pack<T>(values, c.keys, c.value_dim, block.lead, v_packed);
    for (int64_t start = 0; start < c.queries; start += block.rows) {
      const int64_t rows = smaller(block.rows, c.queries - start);
      const T *from = queries.at + start * queries.row, *go = grads.at + start * grads.row;
      product<T>(rows, block.lead + c.keys, c.dim, {from, queries.row, 1}, {k_packed, P, P * c.dim},
                 {products - block.lead, pitch});
      product<T>(rows, block.lead + c.keys, c.value_dim, {go, grads.row, 1}, {v_packed, P, P * c.value_dim},
                 {gradient - block.lead, pitch});
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = r * pitch;
        if ((start + r) % QUERIES_PER_FETCH == 0) {
          for (const Staged<T>* each : {&q, &k, &v, &g}) each->template fetch<false>(next_image, next_head, start + r);
          for (const Staged<T>* each : {&dq, &dk, &dv}) each->template fetch<true>(next_image, next_head, start + r);
        }
        double* mask = d_mask ? d_mask + mask_row<T>(c, image, head, start + r) : nullptr;
        backward_row<T, SCALE, BIAS>(
            c, block.lead, image, head, start + r,
            {products + at, weights + at, gradient + at, d_scale.of(head), d_bias.of(head), mask, false},
            norms + 2 * (start + r));
      }
      product<T>(rows, c.dim, c.keys, {gradient, pitch, 1}, {keys.at, keys.row, P},
                 {to_q.at + start * to_q.row, to_q.row});
      product<T>(c.keys, c.dim, rows, {gradient, 1, pitch}, {from, queries.row, P}, {to_k.at, to_k.row}, start > 0);
      product<T>(c.keys, c.value_dim, rows, {weights, 1, pitch}, {go, grads.row, P}, {to_v.at, to_v.row}, start > 0);
    }
    dq.finish(image, head, 0, c.queries);
    for (const Staged<T>* each : {&dk, &dv}) each->finish(image, head, 0, c.keys);
    const bool last = pair + (c.head_major ? 1 : c.heads) >= end;
    const bool leaves = c.head_major && (pair + 1 >= end || c.head_of(pair + 1) != head);
    if (last || leaves || image % images_per_sum == images_per_sum - 1) d_scale.flush(head), d_bias.flush(head);
  }
}

template <class T> void run_forward(const Call& c, int64_t begin, int64_t end, int64_t worker) {
  const auto run = c.scale  ? c.bias ? forward<T, true, true> : forward<T, true, false>
                   : c.bias ? forward<T, false, true>
                            : forward<T, false, false>;
  run(c, begin, end, worker);
}

template <class T> void run_backward(const Call& c, int64_t begin, int64_t end, int64_t worker) {
  const auto run = c.scale  ? c.bias ? backward<T, true, true> : backward<T, true, false>
                   : c.bias ? backward<T, false, true>
                            : backward<T, false, false>;
  run(c, begin, end, worker);
}

#define TEXT(x) #x
#define NAME(x) TEXT(x)
#define JOIN(a, b) a##b
#define FUNCTION(variant) JOIN(kernels_, variant)

const Kernels KERNELS{NAME(VICINAL_VARIANT), run_forward<float>, run_backward<float>, run_forward<double>,
                      run_backward<double>};

}  // namespace

namespace vicinal {
const Kernels* FUNCTION(VICINAL_VARIANT)() { return &KERNELS; }
}  // namespace vicinal
