// The plane coder: order-0 rANS over byte planes, 64 lanes, 12-bit probabilities, 16-bit renormalisation.
//
// docs/FORMAT.md, section 9, defines the layout. Every set of loops writes the same bytes. Nothing here allocates,
// throws or touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

// The inner loops for one instruction set (rans_steps.hpp): "avx512", "avx2" or "portable".
struct Loops;

// The sets that this processor can run, fastest first, ended by a null pointer.
const Loops *const *loops_here();

// Returns null if the name is unknown or this processor cannot run the set.
const Loops *loops_named(const char *name);

const char *name_of(const Loops &loops);

// Plane bytes per block, which has one table. The last block of a plane may be shorter.
constexpr std::size_t kRansBlock = 256 * 1024;

// Returns the maximum number of bytes that `rans_encode` writes for `count` plane bytes.
std::size_t rans_bound(std::size_t count);

// Encodes a plane into `out`, which has `rans_bound(count)` bytes. Returns the coded length.
std::size_t rans_encode(const std::uint8_t *plane, std::size_t count, std::uint8_t *out, const Loops &loops);

// Decodes exactly `count` bytes. Returns false for an invalid payload. Never reads or writes outside of its arguments.
bool rans_decode(const std::uint8_t *payload, std::size_t nbytes, std::uint8_t *plane, std::size_t count,
                 const Loops &loops);

}  // namespace ckstore
