// Loops of the low-rank encoder around its matrix products: prepare the values, and round the directions to words.
//
// The numpy reference in ckstore/codec/kernels defines each loop. Results are bit-identical, so this file must not be
// compiled with contraction of multiplications and additions, or with fast math.
// Nothing here allocates, throws or touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

#include "quant.hpp"

namespace ckstore {

struct Extremes {
    float least, greatest;
};

struct Squares {
    double missed, given;
};

// Replaces every value by its square root, and sums the roots of each row and column. Returns the smallest and largest
// value, or NaN if a value is NaN.
Extremes take_roots(float *values, double *rows, double *cols, Matrix matrix);

// Replaces every value by its product with its row and column scale, minus 1.
void subtract_ones(float *values, Scales scales, Matrix matrix);

// Sums the squares of the differences of values and a product, and the squares of the values.
Squares missed_squares(const float *values, const float *product, float scale, std::size_t count);

// Rounds `count` vectors of `length`, each times its factor, to words. Returns the largest magnitude. The output
// is undefined if a magnitude does not fit into a word.
float round_vectors(const float *vectors, const float *factors, std::int16_t *out, std::size_t count,
                    std::size_t length);

// Zigzag-codes words and splits them into bytes; `sums` receives the sum of the squares of each of `count` vectors.
void split_zigzag(const std::int16_t *words, std::uint8_t *low, std::uint8_t *high, double *sums, std::size_t count,
                  std::size_t length);

}  // namespace ckstore
