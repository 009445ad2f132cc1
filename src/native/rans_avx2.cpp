// The loops with vectors of 256 bits, for processors without AVX-512.
//
// Tables are read with scalar loads. Gathers are not faster on AMD processors, and microcode slows them down on many
// Intel processors (CVE-2022-40982).

#include "rans_steps.hpp"

#ifdef CKSTORE_RANS_VECTORS

#include <immintrin.h>

#include <cstring>

#define CKSTORE_AVX2 __attribute__((target("avx2,fma,popcnt")))

namespace ckstore {
namespace {

constexpr std::size_t kEight = 8;                 // lanes of a vector
constexpr std::size_t kGroups = kLanes / kEight;  // vectors of a step
constexpr std::size_t kHalf = kGroups / 2;        // vectors of the even bytes, which come first
constexpr std::uint8_t kZero = 0x80;              // a shuffle index that gives zero

// Shuffles that pack or spread, one for every subset of eight.
struct Shuffles {
    // Moves the words of the chosen lanes to the front, highest lane first, the order in which encoding appends them.
    alignas(64) std::uint8_t pack_words[256][2 * kEight];
    // Gives each chosen lane a word, starting with the last word, the order in which decoding takes them; others get 0.
    alignas(64) std::uint8_t spread_words[256][2 * kEight];
    // Moves chosen bytes to the front, and the first bytes to chosen positions.
    alignas(64) std::uint8_t pack_bytes[256][kEight];
    alignas(64) std::uint8_t spread_bytes[256][kEight];

    constexpr Shuffles() : pack_words(), spread_words(), pack_bytes(), spread_bytes() {
        for (std::size_t choice = 0; choice < 256; ++choice) {
            fill_bytes(choice);
            fill_words(choice);
        }
    }

private:
    constexpr void fill_bytes(std::size_t choice) {
        std::size_t chosen = 0;
        for (std::size_t i = 0; i < kEight; ++i) {
            pack_bytes[choice][i] = spread_bytes[choice][i] = kZero;
            if (choice >> i & 1) {
                pack_bytes[choice][chosen] = static_cast<std::uint8_t>(i);
                spread_bytes[choice][i] = static_cast<std::uint8_t>(chosen++);
            }
        }
    }

    constexpr void fill_words(std::size_t choice) {
        std::size_t below = 0, above = 0;
        for (std::size_t i = 0; i < kEight; ++i) {
            const std::size_t lane = kEight - 1 - i;
            pack_words[choice][2 * i] = pack_words[choice][2 * i + 1] = kZero;
            spread_words[choice][2 * i] = spread_words[choice][2 * i + 1] = kZero;
            if (choice >> i & 1) {
                const std::size_t word = kEight - 1 - below++;
                spread_words[choice][2 * i] = static_cast<std::uint8_t>(2 * word);
                spread_words[choice][2 * i + 1] = static_cast<std::uint8_t>(2 * word + 1);
            }
            if (choice >> lane & 1) {
                pack_words[choice][2 * above] = static_cast<std::uint8_t>(2 * lane);
                pack_words[choice][2 * above++ + 1] = static_cast<std::uint8_t>(2 * lane + 1);
            }
        }
    }
};

constexpr Shuffles kShuffles;

CKSTORE_AVX2 inline __m128i load_8(const void *at) { return _mm_loadl_epi64(static_cast<const __m128i *>(at)); }
CKSTORE_AVX2 inline __m128i load_16(const void *at) { return _mm_loadu_si128(static_cast<const __m128i *>(at)); }
CKSTORE_AVX2 inline __m256i load_32(const void *at) { return _mm256_loadu_si256(static_cast<const __m256i *>(at)); }
CKSTORE_AVX2 inline void store_8(void *at, __m128i value) { _mm_storel_epi64(static_cast<__m128i *>(at), value); }
CKSTORE_AVX2 inline void store_16(void *at, __m128i value) { _mm_storeu_si128(static_cast<__m128i *>(at), value); }
CKSTORE_AVX2 inline void store_32(void *at, __m256i value) { _mm256_storeu_si256(static_cast<__m256i *>(at), value); }

// Returns a bit for each negative lane.
CKSTORE_AVX2 inline std::uint32_t signs_of(__m256i lanes) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
}

CKSTORE_AVX2 inline std::size_t bits_in(std::uint32_t choice) {
    return static_cast<std::size_t>(__builtin_popcount(choice));
}

// Encoding data of a symbol: its frequency, start << 16, and slightly less than the reciprocal of its frequency. The
// margin of 2^-21 exceeds all rounding errors, so that a quotient, which is below 2^20, is exact or one too small.
struct alignas(8) Code {
    std::uint32_t freq_and_start;
    float reciprocal;
};

struct Codes {
    Code of[kSymbols];

    explicit Codes(const Model &model) {
        for (std::size_t s = 0; s < kSymbols; ++s) {
            of[s].freq_and_start = model.freq[s] | static_cast<std::uint32_t>(model.start[s]) << 16;
            of[s].reciprocal = model.freq[s] == 0 ? 0.0f : (1.0f - 0x1p-21f) / static_cast<float>(model.freq[s]);
        }
    }

    CKSTORE_AVX2 __m128 two(const std::uint8_t *bytes) const {
        const __m128 first = _mm_castsi128_ps(load_8(of + bytes[0]));
        return _mm_loadh_pi(first, reinterpret_cast<const __m64 *>(of + bytes[2]));
    }
};

// Encodes eight symbols, those of every other byte, in eight lanes.
CKSTORE_AVX2 inline void push(__m256i &state, const Codes &codes, const std::uint8_t *bytes, std::uint8_t *&words) {
    const __m256 outer = _mm256_insertf128_ps(_mm256_castps128_ps256(codes.two(bytes)), codes.two(bytes + 8), 1);
    const __m256 inner = _mm256_insertf128_ps(_mm256_castps128_ps256(codes.two(bytes + 4)), codes.two(bytes + 12), 1);
    const __m256i freq_and_start = _mm256_castps_si256(_mm256_shuffle_ps(outer, inner, 0x88));
    const __m256 reciprocal = _mm256_shuffle_ps(outer, inner, 0xDD);
    const __m256i word_mask = _mm256_set1_epi32(0xFFFF);
    const __m256i freq = _mm256_and_si256(freq_and_start, word_mask);
    const __m256i has_room = _mm256_cmpgt_epi32(freq, _mm256_srli_epi32(state, 20));
    const std::uint32_t full = signs_of(has_room) ^ 0xFF;
    const __m256i low = _mm256_and_si256(state, word_mask);
    const __m128i low_words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    // Stores the whole vector; the excess is overwritten later.
    store_16(words, _mm_shuffle_epi8(low_words, load_16(kShuffles.pack_words[full])));
    words += 2 * bits_in(full);
    const __m256i kept = _mm256_blendv_epi8(_mm256_srli_epi32(state, 16), state, has_room);
    // AVX2 converts only signed integers, so convert the halves and combine them with one rounding.
    const __m256 value = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(kept, 16)), _mm256_set1_ps(0x1p16f),
                                         _mm256_cvtepi32_ps(_mm256_and_si256(kept, word_mask)));
    const __m256i quotient = _mm256_cvttps_epi32(_mm256_mul_ps(value, reciprocal));
    // The remainder is below 2^13, so low words suffice, and their product is faster.
    const __m256i rest = _mm256_and_si256(_mm256_sub_epi16(kept, _mm256_mullo_epi16(quotient, freq)), word_mask);
    const __m256i is_right = _mm256_cmpgt_epi32(freq, rest);
    const __m256i next = _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(quotient, kScaleBits), rest),
                                          _mm256_srli_epi32(freq_and_start, 16));
    const __m256i one_more = _mm256_sub_epi32(_mm256_set1_epi32(kScale), freq);
    state = _mm256_add_epi32(next, _mm256_andnot_si256(is_right, one_more));
}

CKSTORE_AVX2 std::uint8_t *encode_steps(const std::uint8_t *plane, std::size_t steps, const Model &model,
                                        std::uint32_t *states, std::uint8_t *words) {
    const Codes codes(model);
    __m256i own[kGroups];
    for (__m256i &state : own) {
        state = _mm256_set1_epi32(static_cast<int>(kLow));
    }
    for (std::size_t step = steps; step-- > 0;) {
        for (std::size_t g = kGroups; g-- > 0;) {
            push(own[g], codes, plane + step * kLanes + 2 * kEight * (g % kHalf) + g / kHalf, words);
        }
    }
    for (std::size_t g = 0; g < kGroups; ++g) {
        store_32(states + kEight * g, own[g]);
    }
    return words;
}

CKSTORE_AVX2 inline __m128i four_slots(const std::uint32_t *slots, __m128i at) {
    const auto low = static_cast<std::uint64_t>(_mm_cvtsi128_si64(at));
    const auto high = static_cast<std::uint64_t>(_mm_extract_epi64(at, 1));
    __m128i found = _mm_cvtsi32_si128(static_cast<int>(slots[static_cast<std::uint32_t>(low)]));
    found = _mm_insert_epi32(found, static_cast<int>(slots[low >> 32]), 1);
    found = _mm_insert_epi32(found, static_cast<int>(slots[static_cast<std::uint32_t>(high)]), 2);
    return _mm_insert_epi32(found, static_cast<int>(slots[high >> 32]), 3);
}

// Decodes a symbol in each of eight lanes and takes the words they need. Returns their table entries.
CKSTORE_AVX2 inline __m256i pop(__m256i &state, const SlotTable &table, const std::uint8_t *&end) {
    const __m256i slot_mask = _mm256_set1_epi32(kScale - 1);
    const __m256i slot = _mm256_and_si256(state, slot_mask);
    const __m256i entry =
        _mm256_inserti128_si256(_mm256_castsi128_si256(four_slots(table.slots, _mm256_castsi256_si128(slot))),
                                four_slots(table.slots, _mm256_extracti128_si256(slot, 1)), 1);
    const __m256i freq = _mm256_and_si256(_mm256_srli_epi32(entry, 16), slot_mask);
    const __m256i next = _mm256_add_epi32(_mm256_mullo_epi32(freq, _mm256_srli_epi32(state, kScaleBits)),
                                          _mm256_and_si256(entry, slot_mask));
    const __m256i needs = _mm256_cmpeq_epi32(_mm256_srli_epi32(next, 16), _mm256_setzero_si256());
    const std::uint32_t needy = signs_of(needs);
    const __m128i words = _mm_shuffle_epi8(load_16(end - 2 * kEight), load_16(kShuffles.spread_words[needy]));
    end -= 2 * bits_in(needy);
    const __m256i shift = _mm256_and_si256(needs, _mm256_set1_epi32(16));
    state = _mm256_or_si256(_mm256_sllv_epi32(next, shift), _mm256_cvtepu16_epi32(words));
    return entry;
}

// Returns the symbols of 16 lanes as words. The upper bits of each word of an entry hold half of the symbol.
CKSTORE_AVX2 inline __m256i symbols_of(__m256i first, __m256i second) {
    const __m256i weights = _mm256_set1_epi32(16 << 16 | 1);
    const __m256i low = _mm256_madd_epi16(_mm256_srli_epi16(first, 12), weights);
    const __m256i high = _mm256_madd_epi16(_mm256_srli_epi16(second, 12), weights);
    // The pack instruction works on halves of a vector.
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
}

CKSTORE_AVX2 bool decode_stream(Stream &stream, std::size_t steps) {
    const SlotTable &table = *stream.table;
    const std::uint8_t *end = stream.end;
    __m256i own[kGroups];
    for (std::size_t g = 0; g < kGroups; ++g) {
        own[g] = load_32(stream.states + kEight * g);
    }
    for (std::size_t step = 0; step < steps; ++step) {
        __m256i even[kHalf / 2];
        for (std::size_t g = 0; g < kHalf; g += 2) {
            const __m256i first = pop(own[g], table, end);
            even[g / 2] = symbols_of(first, pop(own[g + 1], table, end));
        }
        for (std::size_t g = 0; g < kHalf; g += 2) {
            const __m256i first = pop(own[kHalf + g], table, end);
            const __m256i odd = symbols_of(first, pop(own[kHalf + g + 1], table, end));
            store_32(stream.plane + 2 * kEight * g, _mm256_or_si256(even[g / 2], _mm256_slli_epi16(odd, 8)));
        }
        // A step takes at most 128 bytes, and 128 bytes before the words may be read.
        if (end < stream.words) {
            return false;
        }
        stream.plane += kLanes;
    }
    for (std::size_t g = 0; g < kGroups; ++g) {
        store_32(stream.states + kEight * g, own[g]);
    }
    stream.end = end;
    return true;
}

// Sequentially, because two tables fill the first-level cache of many processors.
CKSTORE_AVX2 bool decode_steps(Stream *streams, std::size_t count, std::size_t steps) {
    for (std::size_t i = 0; i < count; ++i) {
        if (!decode_stream(streams[i], steps)) {
            return false;
        }
    }
    return true;
}

// Set of symbols seen, one bit each. The low half of a symbol selects a byte, in `upper` if the highest bit of the
// symbol is set; the rest of its high half selects the bit.
struct Seen {
    __m256i lower, upper;

    CKSTORE_AVX2 explicit Seen(const std::uint8_t *seen) {
        std::uint8_t bits[2][16] = {};
        for (std::size_t s = 0; s < kSymbols; ++s) {
            bits[s >> 7][s & 15] |= static_cast<std::uint8_t>((seen[s] & 1) << (s >> 4 & 7));
        }
        lower = _mm256_broadcastsi128_si256(load_16(bits[0]));
        upper = _mm256_broadcastsi128_si256(load_16(bits[1]));
    }

    CKSTORE_AVX2 bool has_all(__m256i symbols) const {
        // A shuffle index with the highest bit set gives zero.
        const __m256i index_mask = _mm256_set1_epi8(static_cast<char>(0x8F));
        const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
        const __m256i bits = _mm256_broadcastsi128_si256(_mm_set1_epi64x(static_cast<long long>(0x8040201008040201u)));
        const __m256i index = _mm256_and_si256(symbols, index_mask);
        const __m256i row = _mm256_or_si256(_mm256_shuffle_epi8(lower, index),
                                            _mm256_shuffle_epi8(upper, _mm256_xor_si256(index, top)));
        const __m256i column = _mm256_and_si256(_mm256_srli_epi16(symbols, 4), _mm256_set1_epi8(7));
        const __m256i found = _mm256_and_si256(row, _mm256_shuffle_epi8(bits, column));
        return _mm256_movemask_epi8(_mm256_cmpeq_epi8(found, _mm256_setzero_si256())) == 0;
    }
};

CKSTORE_AVX2 void see_others(const std::uint8_t *bytes, std::size_t count, std::uint8_t *seen) {
    Seen known(seen);
    std::size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        // Taken at most once for each symbol.
        if (!known.has_all(load_32(bytes + i))) {
            kPortableLoops.see_others(bytes + i, 32, seen);
            known = Seen(seen);
        }
    }
    kPortableLoops.see_others(bytes + i, count - i, seen);
}

CKSTORE_AVX2 std::size_t take_others(const std::uint8_t *plane, std::size_t count, std::uint8_t common,
                                     std::uint8_t *bitmap, std::uint8_t *others, std::size_t limit) {
    const __m256i commons = _mm256_set1_epi8(static_cast<char>(common));
    std::size_t taken = 0;
    std::size_t i = 0;
    for (; i + 32 <= count && taken <= limit; i += 32) {
        const __m256i is_common = _mm256_cmpeq_epi8(load_32(plane + i), commons);
        const std::uint32_t set = ~static_cast<std::uint32_t>(_mm256_movemask_epi8(is_common));
        std::memcpy(bitmap + i / 8, &set, sizeof set);
        for (std::size_t part = 0; part < 32; part += kEight) {
            const std::uint32_t choice = set >> part & 0xFF;
            store_8(others + taken, _mm_shuffle_epi8(load_8(plane + i + part), load_8(kShuffles.pack_bytes[choice])));
            taken += bits_in(choice);
        }
    }
    if (taken > limit) {
        return taken;
    }
    return taken + kPortableLoops.take_others(plane + i, count - i, common, bitmap + i / 8, others + taken,
                                              limit - taken);
}

CKSTORE_AVX2 void put_others(std::uint8_t *plane, std::size_t count, std::uint8_t common, const std::uint8_t *bitmap,
                             std::size_t other_count) {
    const __m128i commons = _mm_set1_epi8(static_cast<char>(common));
    // The other bytes left never exceed the plane bytes left, so they are read before they are overwritten.
    const std::uint8_t *next = plane + count - other_count;
    std::size_t i = 0;
    for (; i + kEight <= count && next + kEight <= plane + count; i += kEight) {
        const __m128i shuffle = load_8(kShuffles.spread_bytes[bitmap[i / 8]]);
        store_8(plane + i, _mm_blendv_epi8(_mm_shuffle_epi8(load_8(next), shuffle), commons, shuffle));
        next += bits_in(bitmap[i / 8]);
    }
    kPortableLoops.put_others(plane + i, count - i, common, bitmap + i / 8,
                              static_cast<std::size_t>(plane + count - next));
}

}  // namespace

const Loops kAvx2Loops = {"avx2", see_others, encode_steps, decode_steps, take_others, put_others};

bool has_avx2() {
    static const bool has =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt");
    return has;
}

}  // namespace ckstore

#endif
