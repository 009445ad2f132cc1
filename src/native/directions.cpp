#include "directions.hpp"

#include <cmath>
#include <type_traits>

#include "sums.hpp"
#include "values.hpp"

namespace ckstore {
namespace {

// Adding and subtracting it rounds a number below 2^22 to the nearest integer, ties to even.
constexpr float kRounder = 12582912.0f;
// Larger than every word, and still rounded correctly.
constexpr float kBeyond = 1048576.0f;

CKSTORE_INLINE float rounded(float value) {
    const float above = value > -kBeyond ? value : -kBeyond;
    const float within = above > kBeyond ? kBeyond : above;
    return (within + kRounder) - kRounder;
}

// Rounds one tile, and updates the largest magnitude at each index of the tile.
CKSTORE_INLINE void round_tile(const float *vector, float factor, std::int16_t *out, float *greatest,
                               std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        const float whole = rounded(vector[i] * factor);
        const float magnitude = std::fabs(whole);
        greatest[i] = magnitude > greatest[i] ? magnitude : greatest[i];
        out[i] = static_cast<std::int16_t>(static_cast<std::int32_t>(whole));
    }
}

CKSTORE_INLINE void split_tile(const std::int16_t *words, std::uint8_t *low, std::uint8_t *high, double *lanes,
                               std::size_t count) {
    double values[kTile] = {};
    for (std::size_t i = 0; i < count; ++i) {
        const std::int32_t word = words[i];
        const auto folded_over = static_cast<std::uint32_t>((word * 2) ^ (word >> 15));
        low[i] = static_cast<std::uint8_t>(folded_over);
        high[i] = static_cast<std::uint8_t>(folded_over >> 8);
        values[i] = static_cast<double>(word);
    }
    add_squares<kTile>(values, lanes);
}

CKSTORE_INLINE void missed_tile(const float *values, const float *product, float scale, double *missed, double *given,
                                std::size_t count) {
    double errors[kTile] = {}, sizes[kTile] = {};
    for (std::size_t i = 0; i < count; ++i) {
        const float made = product[i] * scale;
        sizes[i] = static_cast<double>(values[i]);
        errors[i] = static_cast<double>(made) - sizes[i];
    }
    add_squares<kTile>(errors, missed);
    add_squares<kTile>(sizes, given);
}

}  // namespace

CKSTORE_CLONES Extremes take_roots(float *values, double *rows, double *cols, Matrix matrix) {
    float least[kTile], greatest[kTile];
    std::uint32_t is_none[kTile] = {};
    for (std::size_t i = 0; i < kTile; ++i) {
        least[i] = greatest[i] = matrix.count ? values[0] : 0.0f;
    }
    for (std::size_t j = 0; j < matrix.row; ++j) {
        cols[j] = 0.0;
    }
    for_rows(matrix, [&](std::size_t row, std::size_t left, std::size_t start, std::size_t width) {
        float *x = values + start;
        const auto take = [&](std::size_t at, auto count) {
            for (std::size_t i = 0; i < count; ++i) {
                const float value = x[at + i];
                is_none[i] |= value != value;
                least[i] = value < least[i] ? value : least[i];
                greatest[i] = value > greatest[i] ? value : greatest[i];
                x[at + i] = std::sqrt(value);
            }
        };
        std::size_t at = 0;
        for (; at + kTile <= width; at += kTile) {
            take(at, std::integral_constant<std::size_t, kTile>());
        }
        take(at, width - at);
        rows[row] = sum_row<false>(x, cols + left, width);
    });
    Extremes found{least[0], greatest[0]};
    std::uint32_t is_wrong = 0;
    for (std::size_t i = 0; i < kTile; ++i) {
        is_wrong |= is_none[i];
        found.least = least[i] < found.least ? least[i] : found.least;
        found.greatest = greatest[i] > found.greatest ? greatest[i] : found.greatest;
    }
    if (is_wrong) {
        found.least = found.greatest = float_of(0x7FC00000);
    }
    return found;
}

CKSTORE_CLONES void subtract_ones(float *values, Scales scales, Matrix matrix) {
    for_rows(matrix, [&](std::size_t row, std::size_t left, std::size_t start, std::size_t width) {
        const float above = scales.rows[row];
        const float *beside = scales.cols + left;
        float *x = values + start;
        for (std::size_t i = 0; i < width; ++i) {
            x[i] = (x[i] * above) * beside[i] - 1.0f;
        }
    });
}

CKSTORE_CLONES Squares missed_squares(const float *values, const float *product, float scale, std::size_t count) {
    double missed[kLanes] = {}, given[kLanes] = {};
    std::size_t at = 0;
    for (; at + kTile <= count; at += kTile) {
        missed_tile(values + at, product + at, scale, missed, given, kTile);
    }
    missed_tile(values + at, product + at, scale, missed, given, count - at);
    return {folded(missed, kLanes), folded(given, kLanes)};
}

CKSTORE_CLONES float round_vectors(const float *vectors, const float *factors, std::int16_t *out, std::size_t count,
                                   std::size_t length) {
    float greatest[kTile] = {};
    for (std::size_t row = 0; row < count; ++row) {
        const float *vector = vectors + row * length;
        std::int16_t *words = out + row * length;
        std::size_t at = 0;
        for (; at + kTile <= length; at += kTile) {
            round_tile(vector + at, factors[row], words + at, greatest, kTile);
        }
        round_tile(vector + at, factors[row], words + at, greatest, length - at);
    }
    float most = 0.0f;
    for (std::size_t i = 0; i < kTile; ++i) {
        most = greatest[i] > most ? greatest[i] : most;
    }
    return most;
}

CKSTORE_CLONES void split_zigzag(const std::int16_t *words, std::uint8_t *low, std::uint8_t *high, double *sums,
                                 std::size_t count, std::size_t length) {
    for (std::size_t row = 0; row < count; ++row) {
        const std::size_t start = row * length;
        double lanes[kLanes] = {};
        std::size_t at = 0;
        for (; at + kTile <= length; at += kTile) {
            split_tile(words + start + at, low + start + at, high + start + at, lanes, kTile);
        }
        split_tile(words + start + at, low + start + at, high + start + at, lanes, length - at);
        // Sums of squares of words are integers below 2^53, so the order does not matter.
        sums[row] = folded(lanes, kLanes);
    }
}

}  // namespace ckstore
