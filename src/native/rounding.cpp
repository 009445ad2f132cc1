#include "rounding.hpp"

#include "tiles.hpp"

namespace ckstore {
namespace {

constexpr std::uint32_t kInfinity = 0x7F800000;

// Elements compared before the result is checked.
constexpr std::size_t kBlock = 4096;

CKSTORE_INLINE std::uint32_t to_bf16(std::uint32_t word) {
    const std::uint32_t nearest = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
    return (word & 0x7FFFFFFF) > kInfinity ? 0x7FC0 : nearest;
}

CKSTORE_INLINE std::uint32_t to_fp16(std::uint32_t word) {
    const std::uint32_t magnitude = word & 0x7FFFFFFF;
    // Exponent bias 15 instead of 127, and 13 bits of the mantissa rounded away.
    const std::uint32_t normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    // Next to 0.5, the unit in the last place equals that of fp16 subnormals, so the addition rounds to it.
    const std::uint32_t below = magnitude < 0x38800000 ? magnitude : 0x38800000;
    float small;
    std::memcpy(&small, &below, sizeof small);
    small += 0.5f;
    std::uint32_t sum;
    std::memcpy(&sum, &small, sizeof sum);
    std::uint32_t rounded = magnitude < 0x38800000 ? sum - 0x3F000000 : normal;
    rounded = magnitude >= 0x477FF000 ? 0x7C00 : rounded;
    rounded = magnitude > kInfinity ? 0x7E00 | ((magnitude >> 13) & 0x3FF) : rounded;
    return rounded | ((word >> 16) & 0x8000);
}

template <int kKind>
CKSTORE_INLINE void round_tile(const std::uint8_t *source, std::uint16_t *rounded, std::size_t count) {
    std::uint32_t words[kTile];
    load_tile(source, words, count);
    for (std::size_t i = 0; i < count; ++i) {
        rounded[i] = static_cast<std::uint16_t>(kKind == kBf16 ? to_bf16(words[i]) : to_fp16(words[i]));
    }
}

template <int kKind>
CKSTORE_INLINE void round_all(const std::uint8_t *source, std::uint8_t *destination, std::size_t count) {
    std::uint16_t rounded[kTile];
    std::size_t start = 0;
    for (; start + kTile <= count; start += kTile) {
        round_tile<kKind>(source + 4 * start, rounded, kTile);
        store_tile(rounded, destination + 2 * start, kTile);
    }
    if (start < count) {
        round_tile<kKind>(source + 4 * start, rounded, count - start);
        store_tile(rounded, destination + 2 * start, count - start);
    }
}

template <int kKind>
CKSTORE_INLINE bool equal_all(const std::uint8_t *source, const std::uint8_t *rounded, std::size_t count) {
    std::uint16_t made[kTile];
    std::uint16_t given[kTile];
    std::uint16_t difference = 0;
    std::size_t start = 0;
    for (; start + kTile <= count; start += kTile) {
        round_tile<kKind>(source + 4 * start, made, kTile);
        load_tile(rounded + 2 * start, given, kTile);
        for (std::size_t i = 0; i < kTile; ++i) {
            difference = static_cast<std::uint16_t>(difference | (made[i] ^ given[i]));
        }
        if (start % kBlock == 0 && difference != 0) {
            return false;
        }
    }
    if (start < count) {
        round_tile<kKind>(source + 4 * start, made, count - start);
        load_tile(rounded + 2 * start, given, count - start);
        for (std::size_t i = 0; i < count - start; ++i) {
            difference = static_cast<std::uint16_t>(difference | (made[i] ^ given[i]));
        }
    }
    return difference == 0;
}

#define CKSTORE_ROUNDING(NAME, KIND)                                                                                \
    CKSTORE_CLONES void round_##NAME(const std::uint8_t *source, std::uint8_t *destination, std::size_t count) {    \
        round_all<KIND>(source, destination, count);                                                                \
    }                                                                                                               \
    CKSTORE_CLONES bool equal_##NAME(const std::uint8_t *source, const std::uint8_t *rounded, std::size_t count) {  \
        return equal_all<KIND>(source, rounded, count);                                                             \
    }

CKSTORE_ROUNDING(bf16, kBf16)
CKSTORE_ROUNDING(fp16, kFp16)

}  // namespace

void round_floats(const std::uint8_t *source, std::uint8_t *destination, std::size_t count, int kind) {
    return kind == kBf16 ? round_bf16(source, destination, count) : round_fp16(source, destination, count);
}

bool is_rounding(const std::uint8_t *source, const std::uint8_t *rounded, std::size_t count, int kind) {
    return kind == kBf16 ? equal_bf16(source, rounded, count) : equal_fp16(source, rounded, count);
}

}  // namespace ckstore
