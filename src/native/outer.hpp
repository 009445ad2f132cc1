// Products of narrow matrices, and the elements that they encode.
//
// The numpy reference in ckstore/codec/kernels defines each loop. `multiply_floats` sums in its own order, so results
// agree only if every sum is exact, as with integers below 2^24. Results of `finish_outer` are bit-identical.
// Nothing here allocates, throws or touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

#include "quant.hpp"

namespace ckstore {

enum OuterRule : int { kOuterAdd = 0, kOuterRoot = 1, kOuterSquare = 2 };

// Distances between neighbouring elements of a matrix, in elements.
struct Strides {
    std::size_t row, col;
};

// Row-major matrices: left has `rows` x `inner`, right `inner` x `cols`, out `rows` x `cols` elements; a
// turned matrix is stored by columns. If `rounds`, factors are rounded to bf16, to the nearest, ties to even.
void multiply_floats(const float *left, const float *right, float *out, std::size_t rows, std::size_t inner,
                     std::size_t cols, bool right_is_turned, bool out_is_turned, bool rounds);

// The same for integers whose sums stay below 2^24.
void multiply_words(const std::int16_t *left, const std::int16_t *right, float *out, std::size_t rows,
                    std::size_t inner, std::size_t cols);

// The same with instructions that every processor has.
void multiply_floats_portably(const float *left, const float *right, float *out, std::size_t rows, std::size_t inner,
                              std::size_t cols, bool right_is_turned, bool out_is_turned, bool rounds);
void multiply_words_portably(const std::int16_t *left, const std::int16_t *right, float *out, std::size_t rows,
                             std::size_t inner, std::size_t cols);

// The products in lanes of 32 bits, on a processor that `has_pairs`; see products_avx512.cpp.
bool has_pairs();
void multiply_in_lanes(const float *left, const float *right, float *out, std::size_t rows, std::size_t inner,
                       std::size_t cols, bool right_is_turned, bool out_is_turned, bool rounds);
void multiply_words_in_lanes(const std::int16_t *left, const std::int16_t *right, float *out, std::size_t rows,
                             std::size_t inner, std::size_t cols);

// Writes the eigenvectors of a symmetric matrix of n x n elements as the rows of `vectors`, and the eigenvalues.
// `work` has 3 n elements, and the matrix is overwritten. Returns true if all were found.
bool symmetric_eigen(double *matrix, double *vectors, double *values, double *work, std::size_t n);

// Writes the products of `count` rows with each other, summed in double: the upper half of count x count elements, and
// 0 below. `count` is at most `kRowProductsMax`.
constexpr std::size_t kRowProductsMax = 1024;
void products_of_rows(const float *rows, double *out, std::size_t count, std::size_t inner);

// Writes the inverse of the lower triangle whose product with its transpose is a matrix of n x n elements, of which the
// upper half is read and overwritten. Returns false if it does not exist.
bool inverse_root(double *matrix, double *inverse, std::size_t n);

// `product` has whole rows; `base` may be `destination`. Returns the largest magnitude of a quotient (kOuterRoot).
float finish_outer(const float *product, Scales scales, const std::uint8_t *base, std::uint8_t *destination,
                   Matrix matrix, int kind, int rule, float scale, float limit);

}  // namespace ckstore
