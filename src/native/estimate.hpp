// What the plane coder would make of byte planes, told from a sample of their elements.
//
// Integers up to the last division: every machine estimates alike. Nothing here allocates, throws or touches a
// Python object.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

// Writes the bits that the coder takes for each byte of each of `width` planes: 0 if all are alike, 8 if they are
// noise. `count` is at least 1.
void plane_bits(const std::uint8_t *source, double *bits, std::size_t count, std::size_t width, bool rotate);

// The same of what `split_delta` makes.
void delta_bits(const std::uint8_t *source, const std::uint8_t *base, double *bits, std::size_t count,
                std::size_t width, bool ordered);

}  // namespace ckstore
