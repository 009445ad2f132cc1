// Computes the elements of a chunk from a product.

#include "outer.hpp"

#include <cmath>
#include <type_traits>

#include "rounding.hpp"
#include "values.hpp"

namespace ckstore {

namespace {

constexpr float kRatioMin = 1.0f / 16, kLeast = 1.17549435082228750797e-38f;

// Writes a tile of a row. `others` are the elements of the base, `greatest` the largest magnitudes of quotients.
template <int kRule>
CKSTORE_INLINE void finish_tile(const float *product, float row, const float *cols, const float *others, float scale,
                                float limit, float *values, float *greatest, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        float value = product[i] * scale;
        if constexpr (kRule == kOuterAdd) {
            value = others[i] + value;
        } else if constexpr (kRule == kOuterRoot) {
            value = value < -limit ? -limit : value;
            value = value > limit ? limit : value;
            const float magnitude = std::fabs(value);
            greatest[i] = magnitude > greatest[i] ? magnitude : greatest[i];
            value = value * std::sqrt(others[i]);
        } else {
            const float ratio = value + 1.0f;
            const float root = (ratio < kRatioMin ? kRatioMin : ratio) * (row * cols[i]);
            const float square = root * root;
            value = row == 0.0f || cols[i] == 0.0f ? 0.0f : square < kLeast ? kLeast : square;
        }
        values[i] = value;
    }
}

template <int kRule, int kKind>
CKSTORE_INLINE float finish_rows(const float *product, Scales scales, const std::uint8_t *base,
                                 std::uint8_t *destination, Matrix matrix, float scale, float limit) {
    float greatest[kTile] = {};
    for_rows(matrix, [&](std::size_t row, std::size_t left, std::size_t start, std::size_t width) {
        const float factor = kRule == kOuterSquare ? scales.rows[row] : 0.0f;
        const float *of_row = product + row * matrix.row + left;
        const auto finish = [&](std::size_t at, auto count) {
            float values[kTile], others[kTile];
            if constexpr (kRule != kOuterSquare) {
                load_values<kKind>(base, start + at, others, count);
            }
            const float *cols = kRule == kOuterSquare ? scales.cols + left + at : others;
            finish_tile<kRule>(of_row + at, factor, cols, others, scale, limit, values, greatest, count);
            std::uint32_t words[kTile];
            for (std::size_t i = 0; i < count; ++i) {
                words[i] = word_of(values[i]);
            }
            if constexpr (kKind == kValueFp32) {
                store_tile(words, destination + 4 * (start + at), count);
            } else {
                std::uint8_t stored[4 * kTile];
                store_tile(words, stored, count);
                round_floats(stored, destination + 2 * (start + at), count, kKind == kValueBf16 ? kBf16 : kFp16);
            }
        };
        std::size_t at = 0;
        for (; at + kTile <= width; at += kTile) {
            finish(at, std::integral_constant<std::size_t, kTile>());
        }
        if (at < width) {
            finish(at, width - at);
        }
    });
    float most = 0.0f;
    for (std::size_t i = 0; i < kTile; ++i) {
        most = greatest[i] > most ? greatest[i] : most;
    }
    return most;
}

// One multi-versioned function for each rule.
#define CKSTORE_RULE(NAME, RULE)                                                                                     \
    CKSTORE_CLONES float NAME(const float *product, Scales scales, const std::uint8_t *base,                         \
                              std::uint8_t *destination, Matrix matrix, int kind, float scale, float limit) {        \
        return kind == kValueFp32                                                                                    \
                   ? finish_rows<RULE, kValueFp32>(product, scales, base, destination, matrix, scale, limit)         \
               : kind == kValueBf16                                                                                  \
                   ? finish_rows<RULE, kValueBf16>(product, scales, base, destination, matrix, scale, limit)         \
                   : finish_rows<RULE, kValueFp16>(product, scales, base, destination, matrix, scale, limit);        \
    }

CKSTORE_RULE(finish_add, kOuterAdd)
CKSTORE_RULE(finish_root, kOuterRoot)
CKSTORE_RULE(finish_square, kOuterSquare)
#undef CKSTORE_RULE

}  // namespace

float finish_outer(const float *product, Scales scales, const std::uint8_t *base, std::uint8_t *destination,
                   Matrix matrix, int kind, int rule, float scale, float limit) {
    return rule == kOuterAdd    ? finish_add(product, scales, base, destination, matrix, kind, scale, limit)
           : rule == kOuterRoot ? finish_root(product, scales, base, destination, matrix, kind, scale, limit)
                                : finish_square(product, scales, base, destination, matrix, kind, scale, limit);
}

}  // namespace ckstore
