// Rounds fp32 elements to bf16 or fp16, ties to even. Uses integers, so that every machine gets the same result.
//
// Elements are little-endian. Nothing here allocates, throws or touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

constexpr int kBf16 = 1;
constexpr int kFp16 = 2;

// `destination` receives `count` elements of two bytes.
void round_floats(const std::uint8_t *source, std::uint8_t *destination, std::size_t count, int kind);

// Returns true if `rounded` is what `round_floats` makes of `source`. Stops shortly after the first difference.
bool is_rounding(const std::uint8_t *source, const std::uint8_t *rounded, std::size_t count, int kind);

}  // namespace ckstore
