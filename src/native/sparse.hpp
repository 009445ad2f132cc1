// Planes in which most bytes are equal: a bitmap of the other bytes, and these bytes, both coded by the plane coder.
//
// docs/FORMAT.md, section 9, defines the layout. Every set of loops writes the same bytes. Nothing here allocates,
// throws or touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

struct Loops;  // rans.hpp

// Shorter planes use the plane coder.
constexpr std::size_t kSparseFrom = 64 * 1024;

// Encodes a plane. Returns the coded length, or 0 if the plane is too short or not sparse. `out` has
// `rans_bound(count)` bytes.
std::size_t sparse_encode(const std::uint8_t *plane, std::size_t count, std::uint8_t *out, const Loops &loops);

// Decodes exactly `count` bytes. Returns false for an invalid payload. `bitmap` is scratch memory of an eighth of
// `count`, rounded up.
bool sparse_decode(const std::uint8_t *payload, std::size_t nbytes, std::uint8_t *plane, std::size_t count,
                   std::uint8_t *bitmap, const Loops &loops);

}  // namespace ckstore
