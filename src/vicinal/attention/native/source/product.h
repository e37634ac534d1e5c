// Matrix products with sums in registers, and what they need of their inputs.
#pragma once
#include "vectors.h"

namespace {

template <class T> struct Left {  // read number by number, so transposes and strides are the same to it
  const T* at;
  int64_t row, step;
};
template <class T> struct Right {  // read by vectors: panels of 2 vectors
  const T* at;
  int64_t step, panel;
};
template <class T> struct Rows {
  T* at;
  int64_t row;
};

// c (+)= a b for ROWS x (VECS vectors) of c.
template <class T, int ROWS, int VECS>
inline __attribute__((always_inline)) void tile(int64_t depth, Left<T> a, const T* b, int64_t b_step, Rows<T> c,
                                                bool add) {
  constexpr int L = LANES<T>;
  Vec<T> sums[ROWS][VECS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < VECS; ++j) sums[i][j] = Vec<T>{};
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k, a.at += a.step, b += b_step) {
    Vec<T> right[VECS];
    for (int j = 0; j < VECS; ++j) right[j] = load(b + j * L);
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < VECS; ++j) sums[i][j] += a.at[i * a.row] * right[j];
  }
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < VECS; ++j) {
      T* to = c.at + i * c.row + j * L;
      store(to, add ? load(to) + sums[i][j] : sums[i][j]);
    }
}

template <class T, int VECS, int ROWS>
inline void last_rows(int64_t rows, int64_t depth, Left<T> a, const T* b, int64_t b_step, Rows<T> c, bool add) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return tile<T, ROWS, VECS>(depth, a, b, b_step, c, add);
    last_rows<T, VECS, ROWS - 1>(rows, depth, a, b, b_step, c, add);
  }
}

template <class T, int VECS>
__attribute__((noinline)) void panel(int64_t rows, int64_t depth, Left<T> a, const T* b, int64_t b_step, Rows<T> c,
                                     bool add) {
  for (; rows >= TILE_ROWS; rows -= TILE_ROWS) {
    tile<T, TILE_ROWS, VECS>(depth, a, b, b_step, c, add);
    a.at += TILE_ROWS * a.row, c.at += TILE_ROWS * c.row;
  }
  last_rows<T, VECS, TILE_ROWS - 1>(rows, depth, a, b, b_step, c, add);
}

// The one matrix product that all seven of attention are: c (+)= a b. The last columns are written up to a vector.
// Long sums are sums of shorter ones, whose rounding errors are smaller.
template <class T>
void product(int64_t rows, int64_t columns, int64_t depth, Left<T> a, Right<T> b, Rows<T> c, bool add = false) {
  constexpr int L = LANES<T>;
  constexpr int64_t PART = 128;
  for (int64_t j = 0; j < columns; j += 2 * L, b.at += b.panel, c.at += 2 * L)
    for (int64_t k = 0; k == 0 || k < depth; k += PART) {
      const int64_t part = depth - k < PART ? depth - k : PART;
      const Left<T> from{a.at + k * a.step, a.row, a.step};
      columns - j > L ? panel<T, 2>(rows, part, from, b.at + k * b.step, b.step, c, add || k)
                      : panel<T, 1>(rows, part, from, b.at + k * b.step, b.step, c, add || k);
    }
}

// One step of the transpose of L x L numbers: blocks of STEP off the diagonal change places.
template <class T, int STEP, int... I> inline void swap_blocks(Vec<T>* x, std::integer_sequence<int, I...>) {
  constexpr int L = LANES<T>;
  for (int i = 0; i < L; ++i)
    if (!(i & STEP)) {
      const Vec<T> a = x[i], b = x[i + STEP];
      x[i] = __builtin_shufflevector(a, b, (I & STEP ? L + I - STEP : I)...);
      x[i + STEP] = __builtin_shufflevector(a, b, (I & STEP ? L + I : I + STEP)...);
    }
}

template <class T, int STEP = 1> inline void transpose(Vec<T>* x) {
  if constexpr (STEP < LANES<T>) {
    swap_blocks<T, STEP>(x, std::make_integer_sequence<int, LANES<T>>());
    transpose<T, STEP * 2>(x);
  }
}

// x^T in panels of 2 vectors of tokens; 0 for `lead` tokens before the first, and behind the last.
template <class T> void pack(Rows<const T> x, int64_t tokens, int64_t dim, int64_t lead, T* packed) {
  constexpr int L = LANES<T>, P = 2 * L;
  for (int64_t i = 0; i < lead + tokens; i += L)
    for (int64_t j = 0; j < dim; j += L) {
      Vec<T> block[L];
      const int64_t token = i - lead;
      const T* from = x.at + token * x.row + j;
      if (token >= 0 && token + L <= tokens)
        for (int64_t t = 0; t < L; ++t) block[t] = load(from + t * x.row);
      else
        for (int64_t t = 0; t < L; ++t)
          block[t] = token + t >= 0 && token + t < tokens ? load(from + t * x.row) : Vec<T>{};
      transpose<T>(block);
      const int64_t left = dim - j < L ? dim - j : L;
      for (int64_t t = 0; t < left; ++t) store(packed + (i / P * dim + j + t) * P + i % P, block[t]);
    }
}

}  // namespace
