// Byte planes of little-endian elements: split, merge.
//
// Elements are 1, 2, 4 or 8 bytes wide. Plane j holds byte j of every element; with rotation the word is
// rotated left by one bit first, so that the exponent of fp32 and bf16 fills the top plane. Nothing here
// allocates, throws or touches a Python object. Source and destination must not overlap.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

constexpr std::size_t kWidthMax = 8;

// `planes` receives `width` planes of `count` bytes, one after another.
void split_planes(const std::uint8_t *source, std::uint8_t *planes, std::size_t count, std::size_t width, bool rotate);

void merge_planes(const std::uint8_t *const *planes, std::uint8_t *destination, std::size_t count, std::size_t width,
                  bool rotate);

}  // namespace ckstore
