#include "planes.hpp"

#include <cstring>
#include <type_traits>

#include "target.hpp"

namespace ckstore {
namespace {

// Elements handled at once: small enough to stay in registers and the first-level cache, a multiple of every
// vector length, and a constant, so that compilers turn the inner loops into vector code.
constexpr std::size_t kTile = 64;

// Elements compared before the verdict is looked at.
constexpr std::size_t kBlock = 4096;

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

// One element at a time, in loops of constant length: for larger pieces compilers put in string instructions,
// which are slow to start.
template <class Word>
CKSTORE_INLINE void load_tile(const std::uint8_t *source, Word *words, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        std::memcpy(&words[i], source + i * sizeof(Word), sizeof(Word));
    }
}

template <class Word>
CKSTORE_INLINE void store_tile(const Word *words, std::uint8_t *destination, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        std::memcpy(destination + i * sizeof(Word), &words[i], sizeof(Word));
    }
}

template <class Word, bool kRotate>
CKSTORE_INLINE void split_tile(const std::uint8_t *source, std::uint8_t *planes, std::size_t stride, std::size_t count) {
    Word words[kTile];
    std::uint8_t bytes[kTile];
    load_tile(source, words, count);
    for (std::size_t i = 0; i < count; ++i) {
        words[i] = turned<Word, kRotate>(from_little_endian(words[i]));
    }
    for (std::size_t j = 0; j < sizeof(Word); ++j) {
        for (std::size_t i = 0; i < count; ++i) {
            bytes[i] = static_cast<std::uint8_t>(words[i] >> (8 * j));
        }
        std::memcpy(planes + j * stride, bytes, count);
    }
}

template <class Word, bool kRotate>
CKSTORE_INLINE void merge_tile(const std::uint8_t *const *planes, std::size_t start, Word *words, std::size_t count) {
    std::uint8_t bytes[sizeof(Word)][kTile];
    for (std::size_t j = 0; j < sizeof(Word); ++j) {
        std::memcpy(bytes[j], planes[j] + start, count);
    }
    for (std::size_t i = 0; i < count; ++i) {
        Word word = 0;
        for (std::size_t j = 0; j < sizeof(Word); ++j) {
            word = static_cast<Word>(word | static_cast<Word>(static_cast<Word>(bytes[j][i]) << (8 * j)));
        }
        words[i] = from_little_endian(turned_back<Word, kRotate>(word));
    }
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
    Word words[kTile];
    std::size_t start = 0;
    for (; start + kTile <= count; start += kTile) {
        merge_tile<Word, kRotate>(planes, start, words, kTile);
        store_tile(words, destination + start * sizeof(Word), kTile);
    }
    if (start < count) {
        merge_tile<Word, kRotate>(planes, start, words, count - start);
        store_tile(words, destination + start * sizeof(Word), count - start);
    }
}

template <class Word, bool kRotate>
CKSTORE_INLINE bool equal_all(const std::uint8_t *const *planes, const std::uint8_t *source, std::size_t count) {
    Word words[kTile];
    Word given[kTile];
    Word difference = 0;
    std::size_t start = 0;
    for (; start + kTile <= count; start += kTile) {
        merge_tile<Word, kRotate>(planes, start, words, kTile);
        load_tile(source + start * sizeof(Word), given, kTile);
        for (std::size_t i = 0; i < kTile; ++i) {
            difference = static_cast<Word>(difference | static_cast<Word>(words[i] ^ given[i]));
        }
        if (start % kBlock == 0 && difference != 0) {
            return false;
        }
    }
    if (start < count) {
        merge_tile<Word, kRotate>(planes, start, words, count - start);
        if (std::memcmp(words, source + start * sizeof(Word), (count - start) * sizeof(Word)) != 0) {
            return false;
        }
    }
    return difference == 0;
}

// One cloned function for each width and rotation: what is inlined into it is compiled for its processor.
#define CKSTORE_PLANES(NAME, WORD, ROTATE)                                                                     \
    CKSTORE_CLONES void split_##NAME(const std::uint8_t *source, std::uint8_t *planes, std::size_t count) {    \
        split_all<WORD, ROTATE>(source, planes, count);                                                        \
    }                                                                                                          \
    CKSTORE_CLONES void merge_##NAME(const std::uint8_t *const *planes, std::uint8_t *destination,             \
                                     std::size_t count) {                                                      \
        merge_all<WORD, ROTATE>(planes, destination, count);                                                   \
    }                                                                                                          \
    CKSTORE_CLONES bool equal_##NAME(const std::uint8_t *const *planes, const std::uint8_t *source,            \
                                     std::size_t count) {                                                      \
        return equal_all<WORD, ROTATE>(planes, source, count);                                                 \
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

bool planes_equal(const std::uint8_t *const *planes, const std::uint8_t *source, std::size_t count, std::size_t width,
                  bool rotate) {
    CKSTORE_DISPATCH(equal, planes, source, count)
}

}  // namespace ckstore
