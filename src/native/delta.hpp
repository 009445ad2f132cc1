// Differences of elements and a base, zigzag-coded and split into byte planes in one pass, and the inverse.
//
// Elements are little-endian words of 1, 2, 4 or 8 bytes. `ordered` first maps floats to integers that sort like the
// floats. Nothing here allocates, throws or touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

// `planes` receives `width` planes of `count` bytes, one after another.
void split_delta(const std::uint8_t *source, const std::uint8_t *base, std::uint8_t *planes, std::size_t count,
                 std::size_t width, bool ordered);

// The destination may be the base itself. No other buffers may overlap.
void merge_delta(const std::uint8_t *const *planes, const std::uint8_t *base, std::uint8_t *destination,
                 std::size_t count, std::size_t width, bool ordered);

}  // namespace ckstore
