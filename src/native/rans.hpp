// The plane coder: order-0 rANS over byte planes, 64 lanes, 12-bit probabilities, 16-bit renormalisation.
//
// docs/FORMAT.md, section 9, is the layout. Every set of loops makes the same bytes. Nothing here allocates, throws
// or touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

// The inner loops in one set of instructions (rans_steps.hpp): "avx512", "avx2" or "portable".
struct Loops;

// Those that this processor can run, the fastest first; a null pointer ends them.
const Loops *const *loops_here();

// Returns null where there are none of that name, or this processor cannot run them.
const Loops *loops_named(const char *name);

const char *name_of(const Loops &loops);

// Plane bytes coded together, with one table; the last block of a plane may be shorter.
constexpr std::size_t kRansBlock = 256 * 1024;

// Returns the most bytes that `rans_encode` writes for `count` plane bytes.
std::size_t rans_bound(std::size_t count);

// Codes a plane; returns the bytes that count of what it wrote to `out`, which has room for `rans_bound(count)`.
std::size_t rans_encode(const std::uint8_t *plane, std::size_t count, std::uint8_t *out, const Loops &loops);

// Decodes exactly `count` bytes; returns false for every payload that does not hold them, and never reads or
// writes beyond its arguments.
bool rans_decode(const std::uint8_t *payload, std::size_t nbytes, std::uint8_t *plane, std::size_t count,
                 const Loops &loops);

}  // namespace ckstore
