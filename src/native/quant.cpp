#include "quant.hpp"

#include <cmath>

#include "rounding.hpp"
#include "sums.hpp"
#include "values.hpp"

namespace ckstore {
namespace {

constexpr std::uint32_t kInfinity = 0x7F800000;
constexpr int kZeroCode = 128;

// Calls `body(start, count)` for each tile; all but the last have a constant length.
template <class Body>
CKSTORE_INLINE void for_tiles(std::size_t begin, std::size_t count, Body body) {
    std::size_t at = 0;
    for (; at + kTile <= count; at += kTile) {
        body(begin + at, kTile);
    }
    if (at < count) {
        body(begin + at, count - at);
    }
}

CKSTORE_INLINE std::uint32_t not_finite(float value) { return (word_of(value) & kInfinity) == kInfinity; }

template <int kKind>
CKSTORE_INLINE bool values_of(const std::uint8_t *source, float *out, std::size_t count) {
    std::uint32_t wrong = 0;
    for_tiles(0, count, [&](std::size_t start, std::size_t width) {
        load_values<kKind>(source, start, out + start, width);
        for (std::size_t i = 0; i < width; ++i) {
            wrong |= not_finite(out[start + i]);
        }
    });
    return wrong == 0;
}

template <int kKind>
CKSTORE_INLINE bool changes_of(const std::uint8_t *source, const std::uint8_t *base, float *out, std::size_t count) {
    std::uint32_t wrong = 0;
    for_tiles(0, count, [&](std::size_t start, std::size_t width) {
        float a[kTile], b[kTile];
        load_values<kKind>(source, start, a, width);
        load_values<kKind>(base, start, b, width);
        for (std::size_t i = 0; i < width; ++i) {
            const float change = a[i] - b[i];
            // A value that is not finite makes the change not finite as well.
            wrong |= not_finite(change);
            out[start + i] = change;
        }
    });
    return wrong == 0;
}

template <int kKind>
CKSTORE_INLINE bool quotients_of(const std::uint8_t *first, const std::uint8_t *second, float *out, std::size_t count,
                                 float clip) {
    std::uint32_t wrong = 0;
    for_tiles(0, count, [&](std::size_t start, std::size_t width) {
        float m[kTile], v[kTile];
        load_values<kKind>(first, start, m, width);
        load_values<kKind>(second, start, v, width);
        for (std::size_t i = 0; i < width; ++i) {
            wrong |= not_finite(m[i]) | not_finite(v[i]) | (v[i] < 0.0f);
            const float quotient = m[i] / std::sqrt(float_of(word_of(v[i]) & 0x7FFFFFFF));
            const float above = quotient > clip ? clip : quotient;
            const float within = above < -clip ? -clip : above;
            out[start + i] = m[i] == 0.0f ? 0.0f : within;
        }
    });
    return wrong == 0;
}

template <bool kSquared>
CKSTORE_INLINE void sum_all(const float *values, double *rows, double *cols, Matrix matrix) {
    for (std::size_t j = 0; j < matrix.row; ++j) {
        cols[j] = 0.0;
    }
    for_rows(matrix, [&](std::size_t row, std::size_t left, std::size_t start, std::size_t width) {
        rows[row] = sum_row<kSquared>(values + start, cols + left, width);
    });
}

// Sums per lane. For the maximum the lane does not matter.
struct LaneSums {
    double greatest[kTile] = {}, errors[kLanes] = {}, squares[kLanes] = {};
};

// Adds a tile. It is padded with zeros, which do not change the sums.
CKSTORE_INLINE void add_tile(const float *given, const float *made, LaneSums &sums) {
    double values[kTile], errors[kTile];
    for (std::size_t i = 0; i < kTile; ++i) {
        values[i] = static_cast<double>(given[i]);
        errors[i] = static_cast<double>(made[i]) - values[i];
    }
    for (std::size_t i = 0; i < kTile; ++i) {
        const double size = std::fabs(errors[i]);
        sums.greatest[i] = size > sums.greatest[i] ? size : sums.greatest[i];
    }
    add_squares<kTile>(errors, sums.errors);
    add_squares<kTile>(values, sums.squares);
}

template <int kKind>
CKSTORE_INLINE Measure measure_all(const std::uint8_t *source, const std::uint8_t *made, std::size_t count) {
    LaneSums sums;
    std::size_t start = 0;
    for (; start + kTile <= count; start += kTile) {
        float a[kTile], b[kTile];
        load_values<kKind>(source, start, a, kTile);
        load_values<kKind>(made, start, b, kTile);
        add_tile(a, b, sums);
    }
    if (start < count) {
        float a[kTile] = {}, b[kTile] = {};
        load_values<kKind>(source, start, a, count - start);
        load_values<kKind>(made, start, b, count - start);
        add_tile(a, b, sums);
    }
    double most = 0.0;
    for (std::size_t i = 0; i < kTile; ++i) {
        most = sums.greatest[i] > most ? sums.greatest[i] : most;
    }
    return {most, folded(sums.errors, kLanes), folded(sums.squares, kLanes)};
}

// Converts a tile of values to elements.
template <int kKind>
CKSTORE_INLINE void store_values(const float *values, std::uint8_t *destination, std::size_t start, std::size_t count) {
    std::uint32_t words[kTile];
    for (std::size_t i = 0; i < count; ++i) {
        words[i] = word_of(values[i]);
    }
    if constexpr (kKind == kValueFp32) {
        store_tile(words, destination + 4 * start, count);
    } else {
        std::uint8_t bytes[4 * kTile];
        store_tile(words, bytes, count);
        round_floats(bytes, destination + 2 * start, count, kKind == kValueBf16 ? kBf16 : kFp16);
    }
}

template <int kRule>
CKSTORE_INLINE float finished(float part, float base, float floor) {
    if constexpr (kRule == kFinishAdd) {
        return base + part;
    } else if constexpr (kRule == kFinishRoot) {
        return part * std::sqrt(base);
    } else if constexpr (kRule == kFinishFloor) {
        return part < floor ? floor : part;
    } else {
        return part;
    }
}

bool is_same(const float *values, std::size_t count) {
    for (std::size_t i = 1; i < count; ++i) {
        if (word_of(values[i]) != word_of(values[0])) {
            return false;
        }
    }
    return true;
}

template <int kKind, int kRule>
CKSTORE_INLINE void finish_all(const std::uint8_t *symbols, Scales scales, const float *codebook,
                               const std::uint8_t *base, std::uint8_t *destination, Matrix matrix, float floor) {
    constexpr bool kHasBase = kRule == kFinishAdd || kRule == kFinishRoot;
    const bool is_flat = is_same(scales.cols, matrix.row);
    float table[kCodes];
    bool is_made = false;
    std::uint32_t made_for = 0;
    for_rows(matrix, [&](std::size_t row, std::size_t left, std::size_t start, std::size_t width) {
        const float r = scales.rows[row];
        if (is_flat && (!is_made || word_of(r) != made_for)) {
            const float p = r * scales.cols[0];
            for (std::size_t s = 0; s < kCodes; ++s) {
                table[s] = p * codebook[s];
            }
            is_made = true;
            made_for = word_of(r);
        }
        for_tiles(0, width, [&](std::size_t at, std::size_t count) {
            const std::uint8_t *codes = symbols + start + at;
            const float *c = scales.cols + left + at;
            float values[kTile], others[kTile] = {};
            if constexpr (kHasBase) {
                load_values<kKind>(base, start + at, others, count);
            }
            if (is_flat) {
                for (std::size_t i = 0; i < count; ++i) {
                    values[i] = finished<kRule>(table[codes[i]], others[i], floor);
                }
            } else {
                for (std::size_t i = 0; i < count; ++i) {
                    values[i] = finished<kRule>((r * c[i]) * codebook[codes[i]], others[i], floor);
                }
            }
            if constexpr (kRule == kFinishFloor) {
                for (std::size_t i = 0; i < count; ++i) {
                    values[i] = r == 0.0f || c[i] == 0.0f ? 0.0f : values[i];
                }
            }
            store_values<kKind>(values, destination, start + at, count);
        });
    });
}

template <int kKind>
CKSTORE_INLINE void finish_kind(const std::uint8_t *symbols, Scales scales, const float *codebook,
                                const std::uint8_t *base, std::uint8_t *destination, Matrix matrix, int rule,
                                float floor) {
    switch (rule) {
        case kFinishAdd:
            return finish_all<kKind, kFinishAdd>(symbols, scales, codebook, base, destination, matrix, floor);
        case kFinishFloor:
            return finish_all<kKind, kFinishFloor>(symbols, scales, codebook, base, destination, matrix, floor);
        case kFinishRoot:
            return finish_all<kKind, kFinishRoot>(symbols, scales, codebook, base, destination, matrix, floor);
        default:
            return finish_all<kKind, kFinishPlain>(symbols, scales, codebook, base, destination, matrix, floor);
    }
}

// One multi-versioned function for each kind.
#define CKSTORE_KINDS(NAME, KIND)                                                                                     \
    CKSTORE_CLONES bool values_##NAME(const std::uint8_t *source, float *out, std::size_t count) {                    \
        return values_of<KIND>(source, out, count);                                                                   \
    }                                                                                                                 \
    CKSTORE_CLONES bool changes_##NAME(const std::uint8_t *source, const std::uint8_t *base, float *out,              \
                                       std::size_t count) {                                                           \
        return changes_of<KIND>(source, base, out, count);                                                            \
    }                                                                                                                 \
    CKSTORE_CLONES bool quotients_##NAME(const std::uint8_t *first, const std::uint8_t *second, float *out,           \
                                         std::size_t count, float clip) {                                             \
        return quotients_of<KIND>(first, second, out, count, clip);                                                   \
    }                                                                                                                 \
    CKSTORE_CLONES Measure measure_##NAME(const std::uint8_t *source, const std::uint8_t *made, std::size_t count) {  \
        return measure_all<KIND>(source, made, count);                                                                \
    }                                                                                                                 \
    CKSTORE_CLONES void finish_##NAME(const std::uint8_t *symbols, Scales scales, const float *codebook,              \
                                      const std::uint8_t *base, std::uint8_t *destination, Matrix matrix, int rule,   \
                                      float floor) {                                                                  \
        finish_kind<KIND>(symbols, scales, codebook, base, destination, matrix, rule, floor);                         \
    }

CKSTORE_KINDS(fp32, kValueFp32)
CKSTORE_KINDS(bf16, kValueBf16)
CKSTORE_KINDS(fp16, kValueFp16)

CKSTORE_CLONES void sum_squares(const float *values, double *rows, double *cols, Matrix matrix) {
    sum_all<true>(values, rows, cols, matrix);
}

CKSTORE_CLONES void sum_plain(const float *values, double *rows, double *cols, Matrix matrix) {
    sum_all<false>(values, rows, cols, matrix);
}

}  // namespace

bool float_values(const std::uint8_t *source, float *out, std::size_t count, int kind) {
    return kind == kValueFp32   ? values_fp32(source, out, count)
           : kind == kValueBf16 ? values_bf16(source, out, count)
                                : values_fp16(source, out, count);
}

bool float_changes(const std::uint8_t *source, const std::uint8_t *base, float *out, std::size_t count, int kind) {
    return kind == kValueFp32   ? changes_fp32(source, base, out, count)
           : kind == kValueBf16 ? changes_bf16(source, base, out, count)
                                : changes_fp16(source, base, out, count);
}

bool float_quotients(const std::uint8_t *first, const std::uint8_t *second, float *out, std::size_t count, int kind,
                     float clip) {
    return kind == kValueFp32   ? quotients_fp32(first, second, out, count, clip)
           : kind == kValueBf16 ? quotients_bf16(first, second, out, count, clip)
                                : quotients_fp16(first, second, out, count, clip);
}

void sums_of_values(const float *values, double *rows, double *cols, Matrix matrix, bool squared) {
    return squared ? sum_squares(values, rows, cols, matrix) : sum_plain(values, rows, cols, matrix);
}

CKSTORE_CLONES void quantize_values(const float *values, const float *inverses, std::uint8_t *out, Matrix matrix,
                                    float bias, int level_max) {
    const float limit = static_cast<float>(level_max + 1);
    for_rows(matrix, [&](std::size_t row, std::size_t, std::size_t start, std::size_t width) {
        const float inverse = inverses[row];
        for (std::size_t i = start; i < start + width; ++i) {
            const float scaled = std::fabs(values[i]) * inverse;
            const float level = scaled + bias;
            const bool is_inside = level < limit;
            const float kept = is_inside && level >= 0.0f ? level : 0.0f;
            const int whole = static_cast<int>(kept);
            const int code = kZeroCode + (values[i] < 0.0f ? -whole : whole);
            out[i] = static_cast<std::uint8_t>(is_inside ? code : 0);
        }
    });
}

Measure measure_values(const std::uint8_t *source, const std::uint8_t *made, std::size_t count, int kind) {
    return kind == kValueFp32   ? measure_fp32(source, made, count)
           : kind == kValueBf16 ? measure_bf16(source, made, count)
                                : measure_fp16(source, made, count);
}

void finish_values(const std::uint8_t *symbols, Scales scales, const float *codebook, const std::uint8_t *base,
                   std::uint8_t *destination, Matrix matrix, int kind, int rule, float floor) {
    if (kind == kValueFp32) {
        return finish_fp32(symbols, scales, codebook, base, destination, matrix, rule, floor);
    }
    if (kind == kValueBf16) {
        return finish_bf16(symbols, scales, codebook, base, destination, matrix, rule, floor);
    }
    return finish_fp16(symbols, scales, codebook, base, destination, matrix, rule, floor);
}

}  // namespace ckstore
