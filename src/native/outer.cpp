// What becomes of a product: elements of a chunk.

#include "outer.hpp"

#include <cmath>
#include <cstring>

#include "rounding.hpp"
#include "values.hpp"

namespace ckstore {

namespace {

constexpr std::size_t kPart = 256;
constexpr float kRatioMin = 1.0f / 16, kLeast = 1.17549435082228750797e-38f;

// What a part of a row becomes; `others` are the elements of the base.
template <int kRule>
CKSTORE_INLINE float finish_part(const float *product, float row, const float *cols, const float *others, float scale,
                                 float limit, float *values, std::size_t count) {
    float greatest = 0.0f;
    for (std::size_t i = 0; i < count; ++i) {
        float value = product[i] * scale;
        if constexpr (kRule == kOuterAdd) {
            value = others[i] + value;
        } else if constexpr (kRule == kOuterRoot) {
            value = value < -limit ? -limit : value;
            value = value > limit ? limit : value;
            const float magnitude = std::fabs(value);
            greatest = magnitude > greatest ? magnitude : greatest;
            value = value * std::sqrt(others[i]);
        } else {
            const float ratio = value + 1.0f;
            const float root = (ratio < kRatioMin ? kRatioMin : ratio) * (row * cols[i]);
            const float square = root * root;
            value = row == 0.0f || cols[i] == 0.0f ? 0.0f : square < kLeast ? kLeast : square;
        }
        values[i] = value;
    }
    return greatest;
}

template <int kRule>
CKSTORE_INLINE float finish_rows(const float *product, Scales scales, const std::uint8_t *base,
                                 std::uint8_t *destination, Matrix matrix, int kind, float scale, float limit) {
    float values[kPart] = {}, others[kPart] = {}, greatest = 0.0f;
    for_rows(matrix, [&](std::size_t row, std::size_t left, std::size_t start, std::size_t width) {
        for (std::size_t at = 0; at < width; at += kPart) {
            const std::size_t count = width - at < kPart ? width - at : kPart;
            if constexpr (kRule != kOuterSquare) {
                kind == kValueFp32   ? load_values<kValueFp32>(base, start + at, others, count)
                : kind == kValueBf16 ? load_values<kValueBf16>(base, start + at, others, count)
                                     : load_values<kValueFp16>(base, start + at, others, count);
            }
            const float factor = kRule == kOuterSquare ? scales.rows[row] : 0.0f;
            const float *cols = kRule == kOuterSquare ? scales.cols + left + at : others;
            const float *of_row = product + row * matrix.row + left + at;
            const float found = finish_part<kRule>(of_row, factor, cols, others, scale, limit, values, count);
            greatest = found > greatest ? found : greatest;
            std::uint32_t words[kPart];
            std::memcpy(words, values, sizeof words);
            std::uint8_t stored[4 * kPart];
            store_tile(words, stored, count);
            if (kind == kValueFp32) {
                std::memcpy(destination + 4 * (start + at), stored, 4 * count);
            } else {
                round_floats(stored, destination + 2 * (start + at), count, kind);
            }
        }
    });
    return greatest;
}

// One function for each rule, each in several versions.
#define CKSTORE_RULE(NAME, RULE)                                                                                     \
    CKSTORE_CLONES float NAME(const float *product, Scales scales, const std::uint8_t *base,                         \
                              std::uint8_t *destination, Matrix matrix, int kind, float scale, float limit) {        \
        return finish_rows<RULE>(product, scales, base, destination, matrix, kind, scale, limit);                    \
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
