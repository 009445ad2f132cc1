#include "rans_steps.hpp"

#ifdef CKSTORE_RANS_VECTORS

#if defined(__GNUC__) && !defined(__clang__)
// The vector headers of GCC 12 use intentionally uninitialized registers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <cstring>

#define CKSTORE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,bmi2,popcnt")))

namespace ckstore {
namespace {

// 32 lanes of a step are processed together as 32 words; even lanes are the low words of double words.
constexpr std::size_t kWords = 32;
constexpr __mmask32 kOdd = 0xAAAAAAAAu;

// A table of 256 bytes in four registers, indexed by byte.
struct Lookup {
    __m512i quarter[4];
};

CKSTORE_AVX512 inline Lookup load_lookup(const std::uint8_t *bytes) {
    Lookup lookup;
    for (int i = 0; i < 4; ++i) {
        lookup.quarter[i] = _mm512_loadu_si512(bytes + 64 * i);
    }
    return lookup;
}

CKSTORE_AVX512 inline __m512i look_up(const Lookup &lookup, __m512i bytes, __mmask64 upper) {
    return _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(lookup.quarter[0], bytes, lookup.quarter[1]),
                                  _mm512_permutex2var_epi8(lookup.quarter[2], bytes, lookup.quarter[3]));
}

// Words that count down from 31, because decoding expands from the top what encoding compresses upwards.
CKSTORE_AVX512 inline __m512i mirror() {
    alignas(64) std::uint16_t places[kWords];
    for (std::size_t i = 0; i < kWords; ++i) {
        places[i] = static_cast<std::uint16_t>(kWords - 1 - i);
    }
    return _mm512_load_si512(places);
}

// Slightly less than the reciprocal. The margin of 2^-21 exceeds all rounding errors, so that a quotient, which is
// below 2^20, is exact or one too small. One Newton step squares the initial error of 2^-14.
CKSTORE_AVX512 inline __m512 reciprocal_of(__m512i freq) {
    const __m512 divisor = _mm512_cvtepi32_ps(freq);
    const __m512 rough = _mm512_rcp14_ps(divisor);
    const __m512 error = _mm512_fnmadd_ps(divisor, rough, _mm512_set1_ps(1.0f - 0x1p-21f));
    return _mm512_fmadd_ps(rough, error, rough);
}

// Encoding data of one symbol in each of sixteen lanes.
struct Codes {
    __m512i freq, start;
    __m512 reciprocal;
};

// Divides by the frequency, and combines quotient, remainder and start, in sixteen lanes.
CKSTORE_AVX512 inline __m512i put_together(__m512i state, const Codes &codes) {
    const __m512i freq = codes.freq;
    const __m512i quotient = _mm512_cvttps_epu32(_mm512_mul_ps(_mm512_cvtepu32_ps(state), codes.reciprocal));
    // The remainder is below 2^13, so low words suffice, and their product is faster.
    const __m512i rest = _mm512_maskz_sub_epi16(~kOdd, state, _mm512_mullo_epi16(quotient, freq));
    const __mmask16 is_over = _mm512_cmpge_epu32_mask(rest, freq);
    const __m512i next = _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(quotient, kScaleBits), codes.start), rest);
    return _mm512_mask_add_epi32(next, is_over, next, _mm512_sub_epi32(_mm512_set1_epi32(kScale), freq));
}

// States of 32 lanes.
struct Pair {
    __m512i even, odd;
};

// Encodes one symbol in each of 32 lanes; `freq` are their frequencies as words.
CKSTORE_AVX512 inline void push(Pair &pair, __m512i freq, const Codes &even_codes, const Codes &odd_codes,
                                std::uint8_t *&words) {
    const __m512i high = _mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(pair.even, 16), pair.odd);
    const __m512i low = _mm512_mask_blend_epi16(kOdd, pair.even, _mm512_slli_epi32(pair.odd, 16));
    const __mmask32 is_full = _mm512_cmpge_epu16_mask(_mm512_srli_epi16(high, 4), freq);
    // Stores the whole vector, because a masked store is slow; the excess is overwritten later.
    _mm512_storeu_si512(words, _mm512_maskz_compress_epi16(is_full, low));
    words += 2 * static_cast<unsigned>(__builtin_popcount(is_full));
    const __m512i kept_low = _mm512_mask_mov_epi16(low, is_full, high);
    const __m512i kept_high = _mm512_maskz_mov_epi16(~is_full, high);
    const __m512i even = _mm512_mask_blend_epi16(kOdd, kept_low, _mm512_slli_epi32(kept_high, 16));
    const __m512i odd = _mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(kept_low, 16), kept_high);
    pair.even = put_together(even, even_codes);
    pair.odd = put_together(odd, odd_codes);
}

// Codes of arbitrary symbols, looked up by byte.
struct ManySymbols {
    Lookup freq_low, freq_high, start_low, start_high;

    CKSTORE_AVX512 explicit ManySymbols(const Model &model) {
        std::uint8_t bytes[4][kSymbols];
        for (std::size_t s = 0; s < kSymbols; ++s) {
            bytes[0][s] = static_cast<std::uint8_t>(model.freq[s]);
            bytes[1][s] = static_cast<std::uint8_t>(model.freq[s] >> 8);
            bytes[2][s] = static_cast<std::uint8_t>(model.start[s]);
            bytes[3][s] = static_cast<std::uint8_t>(model.start[s] >> 8);
        }
        freq_low = load_lookup(bytes[0]);
        freq_high = load_lookup(bytes[1]);
        start_low = load_lookup(bytes[2]);
        start_high = load_lookup(bytes[3]);
    }

    CKSTORE_AVX512 static void push_words(Pair &pair, __m512i freq, __m512i start, std::uint8_t *&words) {
        const __m512i word_mask = _mm512_set1_epi32(0xFFFF);
        const __m512i even = _mm512_and_si512(freq, word_mask);
        const __m512i odd = _mm512_srli_epi32(freq, 16);
        push(pair, freq, {even, _mm512_and_si512(start, word_mask), reciprocal_of(even)},
             {odd, _mm512_srli_epi32(start, 16), reciprocal_of(odd)}, words);
    }

    CKSTORE_AVX512 void push_step(Pair *pairs, __m512i symbols, std::uint8_t *&words) const {
        const __m512i byte_mask = _mm512_set1_epi16(0xFF);
        const __mmask64 upper = _mm512_movepi8_mask(symbols);
        const __m512i fl = look_up(freq_low, symbols, upper);
        const __m512i fh = look_up(freq_high, symbols, upper);
        const __m512i sl = look_up(start_low, symbols, upper);
        const __m512i sh = look_up(start_high, symbols, upper);
        push_words(pairs[1], _mm512_or_si512(_mm512_srli_epi16(fl, 8), _mm512_andnot_si512(byte_mask, fh)),
                   _mm512_or_si512(_mm512_srli_epi16(sl, 8), _mm512_andnot_si512(byte_mask, sh)), words);
        push_words(pairs[0], _mm512_or_si512(_mm512_and_si512(fl, byte_mask), _mm512_slli_epi16(fh, 8)),
                   _mm512_or_si512(_mm512_and_si512(sl, byte_mask), _mm512_slli_epi16(sh, 8)), words);
    }
};

// Codes of at most 32 symbols, looked up by rank, which is faster. Exponents of weights have at most 32 symbols.
struct FewSymbols {
    static constexpr std::size_t kMax = 32;
    Lookup ranks;
    __m512i code[2];  // frequency, start << 16
    __m512 reciprocal[2];

    CKSTORE_AVX512 explicit FewSymbols(const Model &model) {
        std::uint8_t rank_of[kSymbols] = {};
        std::uint32_t codes[kMax] = {};
        std::size_t rank = 0;
        for (std::size_t s = 0; s < kSymbols; ++s) {
            if (model.freq[s] != 0) {
                rank_of[s] = static_cast<std::uint8_t>(rank);
                codes[rank++] = model.freq[s] | static_cast<std::uint32_t>(model.start[s]) << 16;
            }
        }
        ranks = load_lookup(rank_of);
        for (int i = 0; i < 2; ++i) {
            code[i] = _mm512_loadu_si512(codes + 16 * i);
            reciprocal[i] = reciprocal_of(_mm512_and_si512(code[i], _mm512_set1_epi32(0xFFFF)));
        }
    }

    // The instruction uses only the lowest five bits of an index.
    CKSTORE_AVX512 void push_ranks(Pair &pair, __m512i even, __m512i odd, std::uint8_t *&words) const {
        const __m512i word_mask = _mm512_set1_epi32(0xFFFF);
        const __m512i even_code = _mm512_permutex2var_epi32(code[0], even, code[1]);
        const __m512i odd_code = _mm512_permutex2var_epi32(code[0], odd, code[1]);
        push(pair, _mm512_mask_blend_epi16(kOdd, even_code, _mm512_slli_epi32(odd_code, 16)),
             {_mm512_and_si512(even_code, word_mask), _mm512_srli_epi32(even_code, 16),
              _mm512_permutex2var_ps(reciprocal[0], even, reciprocal[1])},
             {_mm512_and_si512(odd_code, word_mask), _mm512_srli_epi32(odd_code, 16),
              _mm512_permutex2var_ps(reciprocal[0], odd, reciprocal[1])},
             words);
    }

    CKSTORE_AVX512 void push_step(Pair *pairs, __m512i symbols, std::uint8_t *&words) const {
        const __m512i found = look_up(ranks, symbols, _mm512_movepi8_mask(symbols));
        push_ranks(pairs[1], _mm512_srli_epi32(found, 8), _mm512_srli_epi32(found, 24), words);
        push_ranks(pairs[0], found, _mm512_srli_epi32(found, 16), words);
    }
};

template <class Symbols>
CKSTORE_AVX512 inline std::uint8_t *encode_with(const Symbols &table, const std::uint8_t *plane, std::size_t steps,
                                                std::uint32_t *states, std::uint8_t *words) {
    const __m512i mirrored = mirror();
    Pair pairs[2];
    for (Pair &pair : pairs) {
        pair.even = pair.odd = _mm512_set1_epi32(kLow);
    }
    for (std::size_t step = steps; step-- > 0;) {
        table.push_step(pairs, _mm512_permutexvar_epi16(mirrored, _mm512_loadu_si512(plane + step * kLanes)), words);
    }
    for (std::size_t p = 0; p < 2; ++p) {
        std::uint32_t even[kWords / 2];
        std::uint32_t odd[kWords / 2];
        _mm512_storeu_si512(even, pairs[p].even);
        _mm512_storeu_si512(odd, pairs[p].odd);
        for (std::size_t j = 0; j < kWords / 2; ++j) {
            states[kWords * p + kWords - 1 - 2 * j] = even[j];
            states[kWords * p + kWords - 2 - 2 * j] = odd[j];
        }
    }
    return words;
}

// States of 32 lanes as high and low words.
struct Halves {
    __m512i high, low;
};

// Decodes one symbol in each of 32 lanes. Returns them as words, and takes the needed words from the end.
CKSTORE_AVX512 inline __m512i pop(Halves &halves, const SlotTable &table, __m512i mirrored, const std::uint8_t *&end) {
    const __m512i slot_mask = _mm512_set1_epi32(kScale - 1);
    const __m512i word_mask = _mm512_set1_epi16(kScale - 1);
    const __m512i even = _mm512_i32gather_epi32(_mm512_and_si512(halves.low, slot_mask), table.slots, 4);
    const __m512i odd =
        _mm512_i32gather_epi32(_mm512_and_si512(_mm512_srli_epi32(halves.low, 16), slot_mask), table.slots, 4);
    const __m512i first = _mm512_mask_blend_epi16(kOdd, even, _mm512_slli_epi32(odd, 16));
    const __m512i second = _mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(even, 16), odd);
    const __m512i freq = _mm512_and_si512(second, word_mask);
    // freq * (state >> 12) + slot - start, in halves: the product of the high word, shifted up by four bits, and a
    // remainder of at most 4095 * 15 + 4094, which fits into a word.
    const __m512i rest = _mm512_add_epi16(_mm512_mullo_epi16(freq, _mm512_srli_epi16(halves.low, 12)),
                                          _mm512_and_si512(first, word_mask));
    const __m512i product = _mm512_mullo_epi16(freq, halves.high);
    const __m512i low = _mm512_add_epi16(_mm512_slli_epi16(product, 4), rest);
    __m512i high = _mm512_shldi_epi16(_mm512_mulhi_epu16(freq, halves.high), product, 4);
    high = _mm512_mask_add_epi16(high, _mm512_cmplt_epu16_mask(low, rest), high, _mm512_set1_epi16(1));
    const __mmask32 needs = _mm512_testn_epi16_mask(high, high);
    const __m512i fresh = _mm512_permutexvar_epi16(mirrored, _mm512_loadu_si512(end - 2 * kWords));
    halves.low = _mm512_mask_expand_epi16(low, needs, fresh);
    halves.high = _mm512_mask_mov_epi16(high, needs, low);
    end -= 2 * static_cast<unsigned>(__builtin_popcount(needs));
    // The upper bits of each word hold half of the symbol: (first >> 12) | (second >> 8 & 0xF0).
    return _mm512_or_si512(_mm512_srli_epi16(first, 12),
                           _mm512_and_si512(_mm512_srli_epi16(second, 8), _mm512_set1_epi16(0xF0)));
}

// States of a stream, kept in registers while its steps are decoded.
struct Lanes {
    Halves halves[2];
    const std::uint8_t *end;

    CKSTORE_AVX512 void load(const Stream &stream) {
        alignas(64) std::uint16_t high[kLanes];
        alignas(64) std::uint16_t low[kLanes];
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            high[lane] = static_cast<std::uint16_t>(stream.states[lane] >> 16);
            low[lane] = static_cast<std::uint16_t>(stream.states[lane]);
        }
        for (std::size_t p = 0; p < 2; ++p) {
            halves[p].high = _mm512_load_si512(high + kWords * p);
            halves[p].low = _mm512_load_si512(low + kWords * p);
        }
        end = stream.end;
    }

    CKSTORE_AVX512 void store(Stream &stream) const {
        alignas(64) std::uint16_t high[kLanes];
        alignas(64) std::uint16_t low[kLanes];
        for (std::size_t p = 0; p < 2; ++p) {
            _mm512_store_si512(high + kWords * p, halves[p].high);
            _mm512_store_si512(low + kWords * p, halves[p].low);
        }
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            stream.states[lane] = static_cast<std::uint32_t>(high[lane]) << 16 | low[lane];
        }
        stream.end = end;
    }
};

template <std::size_t kCount>
CKSTORE_AVX512 inline bool decode_streams(Stream *streams, std::size_t steps) {
    const __m512i mirrored = mirror();
    Lanes lanes[kCount];
    for (std::size_t i = 0; i < kCount; ++i) {
        lanes[i].load(streams[i]);
    }
    for (std::size_t step = 0; step < steps; ++step) {
        __m512i first[kCount];
        for (std::size_t i = 0; i < kCount; ++i) {
            first[i] = pop(lanes[i].halves[0], *streams[i].table, mirrored, lanes[i].end);
        }
        for (std::size_t i = 0; i < kCount; ++i) {
            const __m512i second = pop(lanes[i].halves[1], *streams[i].table, mirrored, lanes[i].end);
            _mm512_storeu_si512(streams[i].plane + step * kLanes, _mm512_or_si512(first[i], _mm512_slli_epi16(second, 8)));
            // A step takes at most 128 bytes, and 128 bytes before the words may be read.
            if (lanes[i].end < streams[i].words) {
                return false;
            }
        }
    }
    for (std::size_t i = 0; i < kCount; ++i) {
        lanes[i].store(streams[i]);
        streams[i].plane += steps * kLanes;
    }
    return true;
}

// A mask of the first `count` bytes of a vector, fewer than 64.
CKSTORE_AVX512 inline __mmask64 first_bytes(std::size_t count) { return ~(~0ull << count); }

// Writes the other bytes in `bytes` that are inside the mask, and their bits. Returns their number.
CKSTORE_AVX512 inline std::size_t take_step(__m512i bytes, __mmask64 inside, __m512i commons, std::uint8_t *bitmap,
                                            std::uint8_t *others) {
    const std::uint64_t set = _mm512_mask_cmpneq_epi8_mask(inside, bytes, commons);
    std::memcpy(bitmap, &set, sizeof set);
    _mm512_storeu_si512(others, _mm512_maskz_compress_epi8(set, bytes));
    return static_cast<std::size_t>(__builtin_popcountll(set));
}

CKSTORE_AVX512 void see_others(const std::uint8_t *bytes, std::size_t count, std::uint8_t *seen) {
    Lookup lookup = load_lookup(seen);
    std::size_t i = 0;
    for (; i + 64 <= count; i += 64) {
        const __m512i symbols = _mm512_loadu_si512(bytes + i);
        const __m512i found = look_up(lookup, symbols, _mm512_movepi8_mask(symbols));
        // Taken at most once for each symbol.
        if (_mm512_testn_epi8_mask(found, found) != 0) {
            for (std::size_t j = 0; j < 64; ++j) {
                seen[bytes[i + j]] = 0xFF;
            }
            lookup = load_lookup(seen);
        }
    }
    for (; i < count; ++i) {
        seen[bytes[i]] = 0xFF;
    }
}

CKSTORE_AVX512 std::uint8_t *encode_steps(const std::uint8_t *plane, std::size_t steps, const Model &model,
                                          std::uint32_t *states, std::uint8_t *words) {
    std::size_t symbols = 0;
    for (std::size_t s = 0; s < kSymbols; ++s) {
        symbols += model.freq[s] != 0 ? 1 : 0;
    }
    return symbols <= FewSymbols::kMax ? encode_with(FewSymbols(model), plane, steps, states, words)
                                       : encode_with(ManySymbols(model), plane, steps, states, words);
}

CKSTORE_AVX512 bool decode_steps(Stream *streams, std::size_t count, std::size_t steps) {
    return count == 1 ? decode_streams<1>(streams, steps) : decode_streams<2>(streams, steps);
}

CKSTORE_AVX512 std::size_t take_others(const std::uint8_t *plane, std::size_t count, std::uint8_t common,
                                       std::uint8_t *bitmap, std::uint8_t *others, std::size_t limit) {
    const __m512i commons = _mm512_set1_epi8(static_cast<char>(common));
    std::size_t taken = 0;
    std::size_t i = 0;
    for (; i + 64 <= count && taken <= limit; i += 64) {
        taken += take_step(_mm512_loadu_si512(plane + i), ~0ull, commons, bitmap + i / 8, others + taken);
    }
    if (i < count && taken <= limit) {
        const __mmask64 inside = first_bytes(count - i);
        const __m512i bytes = _mm512_maskz_loadu_epi8(inside, plane + i);
        taken += take_step(bytes, inside, commons, bitmap + i / 8, others + taken);
    }
    return taken;
}

CKSTORE_AVX512 void put_others(std::uint8_t *plane, std::size_t count, std::uint8_t common,
                               const std::uint8_t *bitmap, std::size_t other_count) {
    const __m512i commons = _mm512_set1_epi8(static_cast<char>(common));
    // The other bytes left never exceed the plane bytes left, so they are read before they are overwritten.
    const std::uint8_t *next = plane + count - other_count;
    std::size_t i = 0;
    for (; i + 64 <= count && next + 64 <= plane + count; i += 64) {
        std::uint64_t bits;
        std::memcpy(&bits, bitmap + i / 8, sizeof bits);
        _mm512_storeu_si512(plane + i, _mm512_mask_expand_epi8(commons, bits, _mm512_loadu_si512(next)));
        next += __builtin_popcountll(bits);
    }
    for (; i < count; ++i) {
        const std::uint32_t is_other = bitmap[i / 8] >> (i % 8) & 1u;
        const std::uint8_t byte = is_other ? *next : common;
        plane[i] = byte;
        next += is_other;
    }
}

}  // namespace

const Loops kAvx512Loops = {"avx512", see_others, encode_steps, decode_steps, take_others, put_others};

bool has_avx512() {
    static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
                            __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    return has;
}

}  // namespace ckstore

#endif
