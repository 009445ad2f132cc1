// Planes most of whose bytes are the same: a bitmap of the others, and the others, each by the plane coder.
//
// docs/FORMAT.md, section 9, is the layout. Every set of loops makes the same bytes. Nothing here allocates, throws
// or touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

struct Loops;  // rans.hpp

// Shorter planes are left to the plane coder.
constexpr std::size_t kSparseFrom = 64 * 1024;

// Codes a plane and returns its length, or 0 where the plane is not sparse or too short. `out` has room for
// `rans_bound(count)` bytes.
std::size_t sparse_encode(const std::uint8_t *plane, std::size_t count, std::uint8_t *out, const Loops &loops);

// Decodes exactly `count` bytes; returns false for every payload that does not hold them. `bitmap` is memory of
// an eighth of that, rounded up.
bool sparse_decode(const std::uint8_t *payload, std::size_t nbytes, std::uint8_t *plane, std::size_t count,
                   std::uint8_t *bitmap, const Loops &loops);

}  // namespace ckstore
