#include "planes.hpp"

#include "tiles.hpp"

namespace ckstore {
namespace {

template <class Word, bool kRotate>
CKSTORE_INLINE Word turned(Word word) {
    if constexpr (kRotate) {
        return static_cast<Word>(static_cast<Word>(word << 1) | static_cast<Word>(word >> (8 * sizeof(Word) - 1)));
    } else {
        return word;
    }
}

template <class Word, bool kRotate>
CKSTORE_INLINE Word turned_back(Word word) {
    if constexpr (kRotate) {
        return static_cast<Word>(static_cast<Word>(word >> 1) | static_cast<Word>(word << (8 * sizeof(Word) - 1)));
    } else {
        return word;
    }
}

template <class Word, bool kRotate>
CKSTORE_INLINE void split_tile(const std::uint8_t *source, std::uint8_t *planes, std::size_t stride, std::size_t count) {
    Word words[kTile];
    load_tile(source, words, count);
    for (std::size_t i = 0; i < count; ++i) {
        words[i] = turned<Word, kRotate>(words[i]);
    }
    split_words(words, planes, stride, count);
}

template <class Word, bool kRotate>
CKSTORE_INLINE void merge_tile(const std::uint8_t *const *planes, std::size_t start, std::uint8_t *destination,
                               std::size_t count) {
    Word words[kTile];
    merge_words(planes, start, words, count);
    for (std::size_t i = 0; i < count; ++i) {
        words[i] = turned_back<Word, kRotate>(words[i]);
    }
    store_tile(words, destination, count);
}

template <class Word, bool kRotate>
CKSTORE_INLINE void split_all(const std::uint8_t *source, std::uint8_t *planes, std::size_t count) {
    std::size_t start = 0;
    for (; start + kTile <= count; start += kTile) {
        split_tile<Word, kRotate>(source + start * sizeof(Word), planes + start, count, kTile);
    }
    if (start < count) {
        split_tile<Word, kRotate>(source + start * sizeof(Word), planes + start, count, count - start);
    }
}

template <class Word, bool kRotate>
CKSTORE_INLINE void merge_all(const std::uint8_t *const *planes, std::uint8_t *destination, std::size_t count) {
    std::size_t start = 0;
    for (; start + kTile <= count; start += kTile) {
        merge_tile<Word, kRotate>(planes, start, destination + start * sizeof(Word), kTile);
    }
    if (start < count) {
        merge_tile<Word, kRotate>(planes, start, destination + start * sizeof(Word), count - start);
    }
}

// One multi-versioned function for each width and rotation, so that everything inlined is compiled for its processor.
#define CKSTORE_PLANES(NAME, WORD, ROTATE)                                                                     \
    CKSTORE_CLONES void split_##NAME(const std::uint8_t *source, std::uint8_t *planes, std::size_t count) {    \
        split_all<WORD, ROTATE>(source, planes, count);                                                        \
    }                                                                                                          \
    CKSTORE_CLONES void merge_##NAME(const std::uint8_t *const *planes, std::uint8_t *destination,             \
                                     std::size_t count) {                                                      \
        merge_all<WORD, ROTATE>(planes, destination, count);                                                   \
    }

CKSTORE_PLANES(u8, std::uint8_t, false)
CKSTORE_PLANES(u8_rotated, std::uint8_t, true)
CKSTORE_PLANES(u16, std::uint16_t, false)
CKSTORE_PLANES(u16_rotated, std::uint16_t, true)
CKSTORE_PLANES(u32, std::uint32_t, false)
CKSTORE_PLANES(u32_rotated, std::uint32_t, true)
CKSTORE_PLANES(u64, std::uint64_t, false)
CKSTORE_PLANES(u64_rotated, std::uint64_t, true)

#define CKSTORE_DISPATCH(WHAT, ...)                                              \
    switch (width) {                                                             \
        case 1: return rotate ? WHAT##_u8_rotated(__VA_ARGS__) : WHAT##_u8(__VA_ARGS__);    \
        case 2: return rotate ? WHAT##_u16_rotated(__VA_ARGS__) : WHAT##_u16(__VA_ARGS__);  \
        case 4: return rotate ? WHAT##_u32_rotated(__VA_ARGS__) : WHAT##_u32(__VA_ARGS__);  \
        default: return rotate ? WHAT##_u64_rotated(__VA_ARGS__) : WHAT##_u64(__VA_ARGS__); \
    }

}  // namespace

void split_planes(const std::uint8_t *source, std::uint8_t *planes, std::size_t count, std::size_t width, bool rotate) {
    CKSTORE_DISPATCH(split, source, planes, count)
}

void merge_planes(const std::uint8_t *const *planes, std::uint8_t *destination, std::size_t count, std::size_t width,
                  bool rotate) {
    CKSTORE_DISPATCH(merge, planes, destination, count)
}

}  // namespace ckstore
