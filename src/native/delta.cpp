#include "delta.hpp"

#include "tiles.hpp"

namespace ckstore {
namespace {

template <class Word>
constexpr unsigned kBits = 8 * sizeof(Word);

template <class Word>
constexpr Word kTop = static_cast<Word>(Word{1} << (kBits<Word> - 1));

// All ones if the top bit is set, else zero.
template <class Word>
CKSTORE_INLINE Word spread_top(Word word) {
    return static_cast<Word>(0 - static_cast<Word>(word >> (kBits<Word> - 1)));
}

// Maps floats to integers that sort like the floats: inverts negative ones, sets the top bit of the others.
template <class Word, bool kOrdered>
CKSTORE_INLINE Word in_order(Word word) {
    if constexpr (kOrdered) {
        return static_cast<Word>(word ^ static_cast<Word>(spread_top(word) | kTop<Word>));
    } else {
        return word;
    }
}

template <class Word, bool kOrdered>
CKSTORE_INLINE Word out_of_order(Word word) {
    if constexpr (kOrdered) {
        return static_cast<Word>(word ^ static_cast<Word>(static_cast<Word>(~spread_top(word)) | kTop<Word>));
    } else {
        return word;
    }
}

template <class Word, bool kOrdered>
CKSTORE_INLINE Word residual(Word word, Word base) {
    const Word difference = static_cast<Word>(in_order<Word, kOrdered>(word) - in_order<Word, kOrdered>(base));
    return static_cast<Word>(static_cast<Word>(difference << 1) ^ spread_top(difference));
}

template <class Word, bool kOrdered>
CKSTORE_INLINE Word restored(Word residual, Word base) {
    const Word difference =
        static_cast<Word>(static_cast<Word>(residual >> 1) ^ static_cast<Word>(0 - static_cast<Word>(residual & 1)));
    return out_of_order<Word, kOrdered>(static_cast<Word>(difference + in_order<Word, kOrdered>(base)));
}

template <class Word, bool kOrdered>
CKSTORE_INLINE void split_tile(const std::uint8_t *source, const std::uint8_t *base, std::uint8_t *planes,
                               std::size_t stride, std::size_t count) {
    Word words[kTile];
    Word others[kTile];
    load_tile(source, words, count);
    load_tile(base, others, count);
    for (std::size_t i = 0; i < count; ++i) {
        words[i] = residual<Word, kOrdered>(words[i], others[i]);
    }
    split_words(words, planes, stride, count);
}

template <class Word, bool kOrdered>
CKSTORE_INLINE void merge_tile(const std::uint8_t *const *planes, std::size_t start, const std::uint8_t *base,
                               std::uint8_t *destination, std::size_t count) {
    Word words[kTile];
    Word others[kTile];
    merge_words(planes, start, words, count);
    load_tile(base, others, count);
    for (std::size_t i = 0; i < count; ++i) {
        words[i] = restored<Word, kOrdered>(words[i], others[i]);
    }
    store_tile(words, destination, count);
}

template <class Word, bool kOrdered>
CKSTORE_INLINE void split_all(const std::uint8_t *source, const std::uint8_t *base, std::uint8_t *planes,
                              std::size_t count) {
    std::size_t start = 0;
    for (; start + kTile <= count; start += kTile) {
        const std::size_t at = start * sizeof(Word);
        split_tile<Word, kOrdered>(source + at, base + at, planes + start, count, kTile);
    }
    if (start < count) {
        const std::size_t at = start * sizeof(Word);
        split_tile<Word, kOrdered>(source + at, base + at, planes + start, count, count - start);
    }
}

template <class Word, bool kOrdered>
CKSTORE_INLINE void merge_all(const std::uint8_t *const *planes, const std::uint8_t *base, std::uint8_t *destination,
                              std::size_t count) {
    std::size_t start = 0;
    for (; start + kTile <= count; start += kTile) {
        const std::size_t at = start * sizeof(Word);
        merge_tile<Word, kOrdered>(planes, start, base + at, destination + at, kTile);
    }
    if (start < count) {
        const std::size_t at = start * sizeof(Word);
        merge_tile<Word, kOrdered>(planes, start, base + at, destination + at, count - start);
    }
}

// One multi-versioned function for each width and order, so that everything inlined is compiled for its processor.
#define CKSTORE_DELTA(NAME, WORD, ORDERED)                                                                        \
    CKSTORE_CLONES void split_##NAME(const std::uint8_t *source, const std::uint8_t *base, std::uint8_t *planes,  \
                                     std::size_t count) {                                                         \
        split_all<WORD, ORDERED>(source, base, planes, count);                                                    \
    }                                                                                                             \
    CKSTORE_CLONES void merge_##NAME(const std::uint8_t *const *planes, const std::uint8_t *base,                 \
                                     std::uint8_t *destination, std::size_t count) {                              \
        merge_all<WORD, ORDERED>(planes, base, destination, count);                                               \
    }

CKSTORE_DELTA(u8, std::uint8_t, false)
CKSTORE_DELTA(u8_ordered, std::uint8_t, true)
CKSTORE_DELTA(u16, std::uint16_t, false)
CKSTORE_DELTA(u16_ordered, std::uint16_t, true)
CKSTORE_DELTA(u32, std::uint32_t, false)
CKSTORE_DELTA(u32_ordered, std::uint32_t, true)
CKSTORE_DELTA(u64, std::uint64_t, false)
CKSTORE_DELTA(u64_ordered, std::uint64_t, true)

#define CKSTORE_DISPATCH(WHAT, ...)                                                          \
    switch (width) {                                                                         \
        case 1: return ordered ? WHAT##_u8_ordered(__VA_ARGS__) : WHAT##_u8(__VA_ARGS__);    \
        case 2: return ordered ? WHAT##_u16_ordered(__VA_ARGS__) : WHAT##_u16(__VA_ARGS__);  \
        case 4: return ordered ? WHAT##_u32_ordered(__VA_ARGS__) : WHAT##_u32(__VA_ARGS__);  \
        default: return ordered ? WHAT##_u64_ordered(__VA_ARGS__) : WHAT##_u64(__VA_ARGS__); \
    }

}  // namespace

void split_delta(const std::uint8_t *source, const std::uint8_t *base, std::uint8_t *planes, std::size_t count,
                 std::size_t width, bool ordered) {
    CKSTORE_DISPATCH(split, source, base, planes, count)
}

void merge_delta(const std::uint8_t *const *planes, const std::uint8_t *base, std::uint8_t *destination,
                 std::size_t count, std::size_t width, bool ordered) {
    CKSTORE_DISPATCH(merge, planes, base, destination, count)
}

}  // namespace ckstore
