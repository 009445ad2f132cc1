// The plane coder: order-0 rANS over byte planes, 64 lanes, 12-bit probabilities, 16-bit renormalisation.
//
// docs/FORMAT.md, section 9, is the layout. Every variant makes the same bytes. Nothing here allocates, throws
// or touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

// Plane bytes coded together, with one table; the last block of a plane may be shorter.
constexpr std::size_t kRansBlock = 256 * 1024;

// Returns the most bytes that `rans_encode` writes for `count` plane bytes.
std::size_t rans_bound(std::size_t count);

// Codes a plane; returns the bytes that count of what it wrote to `out`, which has room for `rans_bound(count)`.
// Without `vectors` the portable loops do it.
std::size_t rans_encode(const std::uint8_t *plane, std::size_t count, std::uint8_t *out, bool vectors);

// Decodes exactly `count` bytes; returns false for every payload that does not hold them, and never reads or
// writes beyond its arguments.
bool rans_decode(const std::uint8_t *payload, std::size_t nbytes, std::uint8_t *plane, std::size_t count, bool vectors);

// Names the loops that this processor runs: "avx512" or "portable".
const char *rans_variant();

}  // namespace ckstore
