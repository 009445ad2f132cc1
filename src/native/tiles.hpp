// Shared by the loops over elements: tiles of words that stay in registers, and their byte planes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "target.hpp"

namespace ckstore {

// Elements per tile. Small enough for registers and the first-level cache, a multiple of every vector length, and
// constant, so that compilers vectorize the inner loops.
constexpr std::size_t kTile = 64;

template <class Word>
CKSTORE_INLINE Word from_little_endian(Word word) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    Word swapped = 0;
    for (std::size_t j = 0; j < sizeof(Word); ++j) {
        swapped = static_cast<Word>(swapped | static_cast<Word>(((word >> (8 * j)) & 0xFF) << (8 * (sizeof(Word) - 1 - j))));
    }
    return swapped;
#else
    return word;
#endif
}

// One element at a time in loops of constant length, because compilers replace longer copies by string instructions,
// which start slowly.
template <class Word>
CKSTORE_INLINE void load_tile(const std::uint8_t *source, Word *words, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        std::memcpy(&words[i], source + i * sizeof(Word), sizeof(Word));
        words[i] = from_little_endian(words[i]);
    }
}

template <class Word>
CKSTORE_INLINE void store_tile(const Word *words, std::uint8_t *destination, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        const Word word = from_little_endian(words[i]);
        std::memcpy(destination + i * sizeof(Word), &word, sizeof(Word));
    }
}

// Writes byte j of every word to `planes + j * stride`.
template <class Word>
CKSTORE_INLINE void split_words(const Word *words, std::uint8_t *planes, std::size_t stride, std::size_t count) {
    std::uint8_t bytes[kTile];
    for (std::size_t j = 0; j < sizeof(Word); ++j) {
        for (std::size_t i = 0; i < count; ++i) {
            bytes[i] = static_cast<std::uint8_t>(words[i] >> (8 * j));
        }
        std::memcpy(planes + j * stride, bytes, count);
    }
}

template <class Word>
CKSTORE_INLINE void merge_words(const std::uint8_t *const *planes, std::size_t start, Word *words, std::size_t count) {
    std::uint8_t bytes[sizeof(Word)][kTile];
    for (std::size_t j = 0; j < sizeof(Word); ++j) {
        std::memcpy(bytes[j], planes[j] + start, count);
    }
    for (std::size_t i = 0; i < count; ++i) {
        Word word = 0;
        for (std::size_t j = 0; j < sizeof(Word); ++j) {
            word = static_cast<Word>(word | static_cast<Word>(static_cast<Word>(bytes[j][i]) << (8 * j)));
        }
        words[i] = word;
    }
}

}  // namespace ckstore
