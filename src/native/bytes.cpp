#include "bytes.hpp"

#include <cstring>

namespace ckstore {

void copy_bytes(const std::uint8_t *source, std::uint8_t *destination, std::size_t nbytes) {
    if (nbytes != 0) {
        std::memcpy(destination, source, nbytes);
    }
}

bool equal_bytes(const std::uint8_t *a, const std::uint8_t *b, std::size_t nbytes) {
    return nbytes == 0 || std::memcmp(a, b, nbytes) == 0;
}

bool is_constant(const std::uint8_t *source, std::size_t nbytes) {
    // All bytes are equal if and only if every byte equals its neighbour.
    return nbytes < 2 || std::memcmp(source, source + 1, nbytes - 1) == 0;
}

void histogram(const std::uint8_t *source, std::size_t nbytes, std::uint32_t *counts) {
    // Four tables, because equal neighbours in one table would wait for each other's store.
    std::uint32_t tables[4][256] = {};
    std::size_t i = 0;
    for (; i + 8 <= nbytes; i += 8) {
        std::uint64_t word;
        std::memcpy(&word, source + i, sizeof(word));
        for (unsigned j = 0; j < 8; ++j) {
            ++tables[j % 4][(word >> (8 * j)) & 0xFF];
        }
    }
    for (; i < nbytes; ++i) {
        ++tables[0][source[i]];
    }
    for (std::size_t value = 0; value < 256; ++value) {
        counts[value] = tables[0][value] + tables[1][value] + tables[2][value] + tables[3][value];
    }
}

}  // namespace ckstore
