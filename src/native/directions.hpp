// What encoders do around products: values become what directions are looked for in, and directions become words.
//
// ckstore.kernels.directions_on_numpy says what each loop does; results are the same bit for bit, so nothing here may be
// compiled with contraction of multiplications and additions, or with fast mathematics.
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

// Takes the root of every value and sums the roots of rows and columns; returns the extremes of the values, which
// are NaN where one of them is.
Extremes take_roots(float *values, double *rows, double *cols, Matrix matrix);

// Every value becomes itself times its row's scale times its column's, less 1.
void subtract_ones(float *values, Scales scales, Matrix matrix);

// Squares of what a product misses of values, and of the values.
Squares missed_squares(const float *values, const float *product, float scale, std::size_t count);

// Rounds `count` vectors of `length`, each times its factor, to words; returns the greatest magnitude. Of words that do
// not hold it nothing is said.
float round_vectors(const float *vectors, const float *factors, std::int16_t *out, std::size_t count,
                    std::size_t length);

// Zigzags words and splits them into bytes; `sums` receives the sum of the squares of each of `count` vectors.
void split_zigzag(const std::int16_t *words, std::uint8_t *low, std::uint8_t *high, double *sums, std::size_t count,
                  std::size_t length);

}  // namespace ckstore
