// Estimates the coded size of byte planes from a sample of their elements.
//
// Uses integers up to the last division, so that every machine gets the same result. Nothing here allocates, throws or
// touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

// Writes the coded bits per byte of each of `width` planes: 0 if all bytes are equal, 8 for noise. `count` is at least
// 1.
void plane_bits(const std::uint8_t *source, double *bits, std::size_t count, std::size_t width, bool rotate);

// The same for the planes of `split_delta`.
void delta_bits(const std::uint8_t *source, const std::uint8_t *base, double *bits, std::size_t count,
                std::size_t width, bool ordered);

}  // namespace ckstore
