// Products of narrow matrices, and the elements that they stand for.
//
// ckstore.kernels.outer_on_numpy says what each loop does. `multiply_floats` sums in an order of its own: twins agree
// where every sum is exact, as it is of integers below 2^24. The results of `finish_outer` are the same bit for bit.
// Nothing here allocates, throws or touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

#include "quant.hpp"

namespace ckstore {

enum OuterRule : int { kOuterAdd = 0, kOuterRoot = 1, kOuterSquare = 2 };

// How many numbers lie between neighbours of a matrix.
struct Strides {
    std::size_t row, col;
};

// Row-major matrices: left has `rows` x `inner`, right `inner` x `cols`, out `rows` x `cols` elements; what is turned
// lies by columns. Where it `rounds`, factors are rounded to bf16, to the nearest and ties to even.
void multiply_floats(const float *left, const float *right, float *out, std::size_t rows, std::size_t inner,
                     std::size_t cols, bool right_is_turned, bool out_is_turned, bool rounds);

// The same of integers, whose sums stay below 2^24.
void multiply_words(const std::int16_t *left, const std::int16_t *right, float *out, std::size_t rows,
                    std::size_t inner, std::size_t cols);

// The same by loops that any processor runs.
void multiply_floats_portably(const float *left, const float *right, float *out, std::size_t rows, std::size_t inner,
                              std::size_t cols, bool right_is_turned, bool out_is_turned, bool rounds);
void multiply_words_portably(const std::int16_t *left, const std::int16_t *right, float *out, std::size_t rows,
                             std::size_t inner, std::size_t cols);

// The products by lanes of 32 bits, where the processor `has_pairs`; see products_avx512.cpp.
bool has_pairs();
void multiply_in_lanes(const float *left, const float *right, float *out, std::size_t rows, std::size_t inner,
                       std::size_t cols, bool right_is_turned, bool out_is_turned, bool rounds);
void multiply_words_in_lanes(const std::int16_t *left, const std::int16_t *right, float *out, std::size_t rows,
                             std::size_t inner, std::size_t cols);

// Writes the eigenvectors of a symmetric matrix of n x n elements as the rows of `vectors`, and their values; `work` has
// 3 n elements, and the matrix is used up. Returns whether all were found.
bool symmetric_eigen(double *matrix, double *vectors, double *values, double *work, std::size_t n);

// Writes the products of `count` rows with each other, summed in double: the upper half of count x count elements, and
// 0 below. `count` is at most `kRowProductsMax`.
constexpr std::size_t kRowProductsMax = 1024;
void products_of_rows(const float *rows, double *out, std::size_t count, std::size_t inner);

// Writes the inverse of the lower triangle whose product with its transpose is a matrix of n x n elements, of which the
// upper half is read and used up. Returns whether there is one.
bool inverse_root(double *matrix, double *inverse, std::size_t n);

// `product` has whole rows; `base` may be `destination`. Returns the greatest magnitude of a quotient (kOuterRoot).
float finish_outer(const float *product, Scales scales, const std::uint8_t *base, std::uint8_t *destination,
                   Matrix matrix, int kind, int rule, float scale, float limit);

}  // namespace ckstore
