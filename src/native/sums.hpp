// Sums in interleaved lanes that are then added in halves, an order that every machine can reproduce.

#pragma once

#include <cstddef>
#include <cstring>

#include "target.hpp"

namespace ckstore {

constexpr std::size_t kLanes = 8, kRowLanes = 16;

CKSTORE_INLINE double folded(const double *lanes, std::size_t count) {
    double sums[kRowLanes];
    std::memcpy(sums, lanes, count * sizeof *lanes);
    for (std::size_t half = count / 2; half > 0; half /= 2) {
        for (std::size_t l = 0; l < half; ++l) {
            sums[l] += sums[l + half];
        }
    }
    return sums[0];
}

// Adds the values of a row, or their squares, to the sums of their columns. Returns the sum of the row.
template <bool kSquared>
CKSTORE_INLINE double sum_row(const float *x, double *column, std::size_t width) {
    double lanes[kRowLanes] = {};
    std::size_t j = 0;
    for (; j + kRowLanes <= width; j += kRowLanes) {
        for (std::size_t l = 0; l < kRowLanes; ++l) {
            const double value = static_cast<double>(x[j + l]);
            const double term = kSquared ? value * value : value;
            lanes[l] += term;
            column[j + l] += term;
        }
    }
    for (std::size_t l = 0; j < width; ++j, ++l) {
        const double value = static_cast<double>(x[j]);
        const double term = kSquared ? value * value : value;
        lanes[l] += term;
        column[j] += term;
    }
    return folded(lanes, kRowLanes);
}

// Adds the squares of a tile to the lanes. The tile is padded with zeros, which do not change the sums.
template <std::size_t kCount>
CKSTORE_INLINE void add_squares(const double *values, double *lanes) {
    double squares[kCount];
    for (std::size_t i = 0; i < kCount; ++i) {
        squares[i] = values[i] * values[i];
    }
    for (std::size_t l = 0; l < kLanes; ++l) {
        double sum = lanes[l];
        for (std::size_t i = 0; i < kCount; i += kLanes) {
            sum += squares[i + l];
        }
        lanes[l] = sum;
    }
}

}  // namespace ckstore
