// Products of matrices with AVX-512 instructions that multiply pairs: two bf16 factors or two 16-bit words for each
// 32-bit sum. One instruction does twice as many products as with fp32.
//
// Both matrices are packed into lanes of 32 bits. Each lane has one float, or two neighbours along the inner dimension.

#include "outer.hpp"
#include "target.hpp"

#if defined(CKSTORE_HAS_WIDE)

#if defined(__GNUC__) && !defined(__clang__)
// The vector headers of GCC 12 use intentionally uninitialized registers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#define CKSTORE_PAIRS __attribute__((target("arch=x86-64-v4,avx512bf16,avx512vnni")))
#define CKSTORE_PAIRS_INLINE CKSTORE_PAIRS inline __attribute__((always_inline))

namespace ckstore {
namespace {

// 12 rows by two registers of columns are 24 of the 32 registers; rows of the left side are padded, so that they do
// not map to the same few cache lines.
constexpr std::size_t kRows = 12, kWidth = 16, kCols = 32, kLanes = 256, kLeftStride = kLanes + 16;
// Lanes of the side that stays in the second-level cache while the other side is streamed.
constexpr std::size_t kKeptLanes = 128 * kLeftStride;

CKSTORE_PAIRS_INLINE __mmask16 first_of(std::size_t count) {
    return static_cast<__mmask16>(count >= kWidth ? 0xFFFFu : (1u << count) - 1u);
}

// One float a lane.
struct Singles {
    using Number = float;
    using Sum = __m512;
    static constexpr std::size_t kStep = 1;

    static CKSTORE_PAIRS_INLINE Sum zero() { return _mm512_setzero_ps(); }
    static CKSTORE_PAIRS_INLINE Sum add(Sum sum, __m512i left, __m512i right) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right), sum);
    }
    static CKSTORE_PAIRS_INLINE __m512 floats(Sum sum) { return sum; }
    // Up to 16 lanes of contiguous numbers.
    static CKSTORE_PAIRS_INLINE __m512i along(const float *numbers, std::size_t count) {
        return _mm512_castps_si512(_mm512_maskz_loadu_ps(first_of(count), numbers));
    }
    // Up to 16 columns of one lane.
    static CKSTORE_PAIRS_INLINE __m512i across(const float *row, std::size_t, std::size_t count, std::size_t) {
        return along(row, count);
    }
};

// Two floats a lane, each rounded to bf16.
struct Halves {
    using Number = float;
    using Sum = __m512;
    static constexpr std::size_t kStep = 2;

    static CKSTORE_PAIRS_INLINE Sum zero() { return _mm512_setzero_ps(); }
    static CKSTORE_PAIRS_INLINE Sum add(Sum sum, __m512i left, __m512i right) {
        return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
    }
    static CKSTORE_PAIRS_INLINE __m512 floats(Sum sum) { return sum; }
    static CKSTORE_PAIRS_INLINE __m512i along(const float *numbers, std::size_t count) {
        const std::size_t more = count > kWidth ? count - kWidth : 0;
        const __m512 low = _mm512_maskz_loadu_ps(first_of(count), numbers);
        const __m512 high = _mm512_maskz_loadu_ps(first_of(more), numbers + (more ? kWidth : 0));
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    // `depth` is the number of rows. If it is odd, the last row has no neighbour.
    static CKSTORE_PAIRS_INLINE __m512i across(const float *row, std::size_t stride, std::size_t count,
                                               std::size_t depth) {
        const __mmask16 mask = first_of(count);
        const __m512 low = _mm512_maskz_loadu_ps(mask, row);
        const __m512 high = depth > 1 ? _mm512_maskz_loadu_ps(mask, row + stride) : _mm512_setzero_ps();
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        const __m512i one = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(both));
        const __m512i other = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1));
        return _mm512_or_si512(one, _mm512_slli_epi32(other, 16));
    }
};

// Two words of 16 bits a lane; sums are exact below 2^31.
struct Words {
    using Number = std::int16_t;
    // The exact type of the instruction, because GCC 12 spills sums of another type to memory at every step.
    using Sum = __v16si;
    static constexpr std::size_t kStep = 2;

    static CKSTORE_PAIRS_INLINE Sum zero() { return Sum{}; }
    static CKSTORE_PAIRS_INLINE Sum add(Sum sum, __m512i left, __m512i right) {
        return (Sum)_mm512_dpwssd_epi32((__m512i)sum, left, right);
    }
    static CKSTORE_PAIRS_INLINE __m512 floats(Sum sum) { return _mm512_cvtepi32_ps((__m512i)sum); }
    static CKSTORE_PAIRS_INLINE __m512i along(const std::int16_t *numbers, std::size_t count) {
        const __mmask32 mask = count >= 2 * kWidth ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
        return _mm512_maskz_loadu_epi16(mask, numbers);
    }
    static CKSTORE_PAIRS_INLINE __m512i across(const std::int16_t *row, std::size_t stride, std::size_t count,
                                               std::size_t depth) {
        const __mmask16 mask = first_of(count);
        const __m512i one = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row));
        const __m256i next = depth > 1 ? _mm256_maskz_loadu_epi16(mask, row + stride) : _mm256_setzero_si256();
        return _mm512_or_si512(one, _mm512_slli_epi32(_mm512_cvtepu16_epi32(next), 16));
    }
};

// One row of the left side, or one column of a transposed right side: `depth` numbers along the inner dimension.
template <class Kind>
CKSTORE_PAIRS_INLINE void pack_along(const typename Kind::Number *numbers, std::size_t depth, std::int32_t *lanes) {
    constexpr std::size_t kMost = kWidth * Kind::kStep;
    for (std::size_t k = 0; k < depth; k += kMost) {
        const std::size_t count = depth - k < kMost ? depth - k : kMost;
        _mm512_storeu_si512(lanes + k / Kind::kStep, Kind::along(numbers + k, count));
    }
}

// Columns of the right side, 32 for each lane of the inner dimension; columns beyond `width` are zero.
template <class Kind>
CKSTORE_PAIRS_INLINE void pack_panel(const typename Kind::Number *right, Strides strides, std::size_t depth,
                                     std::size_t width, std::int32_t *panel) {
    const std::size_t lanes = (depth + Kind::kStep - 1) / Kind::kStep;
    if (strides.col == 1) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            const std::size_t k = lane * Kind::kStep;
            for (std::size_t half = 0; half < kCols; half += kWidth) {
                const std::size_t count = width > half ? width - half : 0;
                const auto *row = right + k * strides.row + (count ? half : 0);
                _mm512_storeu_si512(panel + lane * kCols + half, Kind::across(row, strides.row, count, depth - k));
            }
        }
        return;
    }
    std::int32_t column[kLanes + kWidth];
    for (std::size_t j = 0; j < kCols; ++j) {
        if (j < width) {
            pack_along<Kind>(right + j * strides.col, depth, column);
        }
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            panel[lane * kCols + j] = j < width ? column[lane] : 0;
        }
    }
}

// Every sum is in the order of the lanes, so the size of the tile does not change the result.
template <class Kind, std::size_t kCount, std::size_t kHalves>
CKSTORE_PAIRS_INLINE void multiply_tile(const std::int32_t *left, std::size_t stride, const std::int32_t *panel,
                                        std::size_t lanes, float *out, Strides strides, std::size_t width,
                                        bool is_first) {
    typename Kind::Sum sums[kCount][kHalves];
    for (auto &row : sums) {
        for (auto &sum : row) {
            sum = Kind::zero();
        }
    }
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        __m512i right[kHalves];
        for (std::size_t h = 0; h < kHalves; ++h) {
            right[h] = _mm512_loadu_si512(panel + lane * kCols + h * kWidth);
        }
        for (std::size_t i = 0; i < kCount; ++i) {
            const __m512i factor = _mm512_set1_epi32(left[i * stride + lane]);
            for (std::size_t h = 0; h < kHalves; ++h) {
                sums[i][h] = Kind::add(sums[i][h], factor, right[h]);
            }
        }
    }
    if (strides.col == 1) {
        for (std::size_t i = 0; i < kCount; ++i) {
            for (std::size_t h = 0; h < kHalves; ++h) {
                const __mmask16 mask = first_of(width > h * kWidth ? width - h * kWidth : 0);
                float *at = out + i * strides.row + h * kWidth;
                const __m512 found = Kind::floats(sums[i][h]);
                _mm512_mask_storeu_ps(at, mask,
                                      is_first ? found : _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), found));
            }
        }
        return;
    }
    float found[kCount][kCols];
    for (std::size_t i = 0; i < kCount; ++i) {
        for (std::size_t h = 0; h < kHalves; ++h) {
            _mm512_storeu_ps(found[i] + h * kWidth, Kind::floats(sums[i][h]));
        }
    }
    for (std::size_t j = 0; j < width; ++j) {
        float *column = out + j * strides.col;
        for (std::size_t i = 0; i < kCount; ++i) {
            column[i] = is_first ? found[i][j] : column[i] + found[i][j];
        }
    }
}

// Any number of rows, `stride` lanes apart, by up to 32 columns.
template <class Kind>
CKSTORE_PAIRS void multiply_block(const std::int32_t *left, std::size_t stride, std::size_t rows,
                                  const std::int32_t *panel, std::size_t lanes, float *out, Strides strides,
                                  std::size_t width, bool is_first) {
    const auto multiply = [&](auto count) CKSTORE_PAIRS {
        constexpr std::size_t kCount = decltype(count)::value;
        while (rows >= kCount) {
            if (width > kWidth) {
                multiply_tile<Kind, kCount, 2>(left, stride, panel, lanes, out, strides, width, is_first);
            } else {
                multiply_tile<Kind, kCount, 1>(left, stride, panel, lanes, out, strides, width, is_first);
            }
            left += kCount * stride;
            out += kCount * strides.row;
            rows -= kCount;
        }
    };
    multiply(std::integral_constant<std::size_t, kRows>());
    multiply(std::integral_constant<std::size_t, 8>());
    multiply(std::integral_constant<std::size_t, 4>());
    multiply(std::integral_constant<std::size_t, 1>());
}

constexpr std::size_t least(std::size_t one, std::size_t other) { return one < other ? one : other; }

// A part of the inner dimension: the left rows stay in the cache, and columns are streamed.
template <class Kind>
CKSTORE_PAIRS void keep_left(const typename Kind::Number *left, const typename Kind::Number *right, Strides of_right,
                             float *out, Strides of_out, std::size_t rows, std::size_t inner, std::size_t cols,
                             std::size_t depth, bool is_first, std::int32_t *kept, std::int32_t *passing) {
    const std::size_t lanes = (depth + Kind::kStep - 1) / Kind::kStep, height = kKeptLanes / kLeftStride;
    for (std::size_t at = 0; at < rows; at += height) {
        const std::size_t count = least(rows - at, height);
        for (std::size_t i = 0; i < count; ++i) {
            pack_along<Kind>(left + (at + i) * inner, depth, kept + i * kLeftStride);
        }
        for (std::size_t j = 0; j < cols; j += kCols) {
            const std::size_t width = least(cols - j, kCols);
            pack_panel<Kind>(right + j * of_right.col, of_right, depth, width, passing);
            multiply_block<Kind>(kept, kLeftStride, count, passing, lanes, out + at * of_out.row + j * of_out.col,
                                 of_out, width, is_first);
        }
    }
}

// A part of the inner dimension: as many panels of columns as fit stay in the cache, and rows are streamed.
template <class Kind>
CKSTORE_PAIRS void keep_right(const typename Kind::Number *left, const typename Kind::Number *right, Strides of_right,
                              float *out, Strides of_out, std::size_t rows, std::size_t inner, std::size_t cols,
                              std::size_t depth, bool is_first, std::int32_t *kept, std::int32_t *passing) {
    const std::size_t lanes = (depth + Kind::kStep - 1) / Kind::kStep, breadth = kKeptLanes / (kCols * lanes) * kCols;
    for (std::size_t at = 0; at < cols; at += breadth) {
        const std::size_t end = least(at + breadth, cols);
        for (std::size_t j = at; j < end; j += kCols) {
            pack_panel<Kind>(right + j * of_right.col, of_right, depth, least(end - j, kCols), kept + (j - at) * lanes);
        }
        for (std::size_t i = 0; i < rows; i += kRows) {
            const std::size_t height = least(rows - i, kRows);
            for (std::size_t r = 0; r < height; ++r) {
                pack_along<Kind>(left + (i + r) * inner, depth, passing + r * kLeftStride);
            }
            for (std::size_t j = at; j < end; j += kCols) {
                multiply_block<Kind>(passing, kLeftStride, height, kept + (j - at) * lanes, lanes,
                                     out + i * of_out.row + j * of_out.col, of_out, least(end - j, kCols), is_first);
            }
        }
    }
}

template <class Kind>
CKSTORE_PAIRS void multiply_all(const typename Kind::Number *left, const typename Kind::Number *right,
                                Strides of_right, float *out, Strides of_out, std::size_t rows, std::size_t inner,
                                std::size_t cols) {
    constexpr std::size_t kDepth = kLanes * Kind::kStep;
    alignas(64) std::int32_t kept[kKeptLanes], passing[kCols * kLanes];
    // If the inner dimension is short, writing dominates, so write rows as completely as the cache allows.
    const bool keeps_left = rows <= cols && rows <= inner;
    for (std::size_t k = 0; k < inner; k += kDepth) {
        const std::size_t depth = least(inner - k, kDepth);
        const auto *from_left = left + k, *from_right = right + k * of_right.row;
        if (keeps_left) {
            keep_left<Kind>(from_left, from_right, of_right, out, of_out, rows, inner, cols, depth, k == 0, kept,
                            passing);
        } else {
            keep_right<Kind>(from_left, from_right, of_right, out, of_out, rows, inner, cols, depth, k == 0, kept,
                             passing);
        }
    }
}

}  // namespace

bool has_pairs() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

void multiply_in_lanes(const float *left, const float *right, float *out, std::size_t rows, std::size_t inner,
                       std::size_t cols, bool right_is_turned, bool out_is_turned, bool rounds) {
    const Strides of_right = right_is_turned ? Strides{1, inner} : Strides{cols, 1};
    const Strides of_out = out_is_turned ? Strides{1, rows} : Strides{cols, 1};
    if (rounds) {
        return multiply_all<Halves>(left, right, of_right, out, of_out, rows, inner, cols);
    }
    multiply_all<Singles>(left, right, of_right, out, of_out, rows, inner, cols);
}

void multiply_words_in_lanes(const std::int16_t *left, const std::int16_t *right, float *out, std::size_t rows,
                             std::size_t inner, std::size_t cols) {
    multiply_all<Words>(left, right, Strides{cols, 1}, out, Strides{cols, 1}, rows, inner, cols);
}

}  // namespace ckstore

#endif
