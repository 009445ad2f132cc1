// Loops over plain bytes. Nothing here allocates, throws or touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

// Source and destination must not overlap.
void copy_bytes(const std::uint8_t *source, std::uint8_t *destination, std::size_t nbytes);

bool equal_bytes(const std::uint8_t *a, const std::uint8_t *b, std::size_t nbytes);

// Returns true if all bytes are equal, or if there are none.
bool is_constant(const std::uint8_t *source, std::size_t nbytes);

// Counts how often each of the 256 values occurs, modulo 2^32.
void histogram(const std::uint8_t *source, std::size_t nbytes, std::uint32_t *counts);

}  // namespace ckstore
