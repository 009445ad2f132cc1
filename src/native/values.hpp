// Rows of a chunk, and its elements of two and four bytes as fp32.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "quant.hpp"
#include "tiles.hpp"

namespace ckstore {

CKSTORE_INLINE float float_of(std::uint32_t word) {
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

CKSTORE_INLINE std::uint32_t word_of(float value) {
    std::uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    return word;
}

CKSTORE_INLINE std::uint32_t from_fp16(std::uint32_t half) {
    const std::uint32_t magnitude = half & 0x7FFF;
    const std::uint32_t normal = (magnitude << 13) + 0x38000000;
    // The smallest subnormal is 2^-24; the product is exact.
    const std::uint32_t subnormal = word_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 5.9604644775390625e-08f);
    const std::uint32_t special = (magnitude << 13) + 0x70000000;
    const std::uint32_t finite = magnitude < 0x400 ? subnormal : normal;
    return (magnitude >= 0x7C00 ? special : finite) | (half & 0x8000) << 16;
}

// Calls `body(row, column, start, count)` for each row of a matrix, or for the part of it in the chunk.
template <class Body>
CKSTORE_INLINE void for_rows(Matrix matrix, Body body) {
    std::size_t start = 0, left = matrix.phase;
    for (std::size_t row = 0; start < matrix.count; ++row) {
        const std::size_t width = matrix.row - left < matrix.count - start ? matrix.row - left : matrix.count - start;
        body(row, left, start, width);
        start += width;
        left = 0;
    }
}

// Reads at most one tile: `count` elements from element `start` on.
template <int kKind>
CKSTORE_INLINE void load_values(const std::uint8_t *source, std::size_t start, float *values, std::size_t count) {
    if constexpr (kKind == kValueFp32) {
        for (std::size_t i = 0; i < count; ++i) {
            std::uint32_t word;
            std::memcpy(&word, source + 4 * (start + i), 4);
            values[i] = float_of(from_little_endian(word));
        }
    } else {
        for (std::size_t i = 0; i < count; ++i) {
            std::uint16_t half;
            std::memcpy(&half, source + 2 * (start + i), 2);
            const std::uint32_t wide = from_little_endian(half);
            values[i] = float_of(kKind == kValueBf16 ? wide << 16 : from_fp16(wide));
        }
    }
}

}  // namespace ckstore
