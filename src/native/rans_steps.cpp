#include "rans_steps.hpp"

namespace ckstore {
namespace {

// The lanes of the even bytes of a step, then those of the odd ones.
constexpr std::size_t kHalves = 2;
constexpr std::size_t kHalf = kLanes / kHalves;

std::uint8_t *encode_portable(const std::uint8_t *plane, std::size_t steps, const Model &model, std::uint32_t *states,
                              std::uint8_t *words) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        states[lane] = kLow;
    }
    for (std::size_t step = steps; step-- > 0;) {
        for (std::size_t half = kHalves; half-- > 0;) {
            const std::uint8_t *bytes = plane + step * kLanes + half;
            std::uint32_t *own = states + half * kHalf;
            for (std::size_t i = kHalf; i-- > 0;) {
                const std::uint32_t symbol = bytes[kHalves * i];
                const std::uint32_t freq = model.freq[symbol];
                const std::uint32_t state = own[i];
                // Without a branch: whether a state is full is a coin toss that no predictor learns.
                const std::uint32_t is_full = (state >> 20) >= freq ? 1u : 0u;
                put_u16(words, state & 0xFFFF);
                words += 2 * is_full;
                const std::uint32_t kept = state >> (16 * is_full);
                const std::uint32_t quotient = kept / freq;
                own[i] = kept + quotient * (kScale - freq) + model.start[symbol];
            }
        }
    }
    return words;
}

const std::uint8_t *decode_portable(const std::uint8_t *words, const std::uint8_t *end, const SlotTable &table,
                                    std::uint32_t *states, std::uint8_t *plane, std::size_t steps) {
    for (std::size_t step = 0; step < steps; ++step) {
        for (std::size_t half = 0; half < kHalves; ++half) {
            std::uint8_t *bytes = plane + step * kLanes + half;
            std::uint32_t *own = states + half * kHalf;
            for (std::size_t i = 0; i < kHalf; ++i) {
                const std::uint32_t slot = own[i] & (kScale - 1);
                const std::uint32_t entry = table.slots[slot];
                bytes[kHalves * i] = table.symbols[slot];
                const std::uint32_t state = (entry >> 16 & 0xFFF) * (own[i] >> kScaleBits) + (entry & 0xFFF);
                const std::uint32_t needs = state < kLow ? 1u : 0u;
                const std::uint32_t word = get_u16(end - 2) & (0u - needs);
                own[i] = state << (16 * needs) | word;
                end -= 2 * needs;
            }
        }
        // A step takes at most 128 bytes, and so many before the words may be read.
        if (end < words) {
            return nullptr;
        }
    }
    return end;
}

}  // namespace

void see_others(const std::uint8_t *bytes, std::size_t count, std::uint8_t *seen, bool vectors) {
#ifdef CKSTORE_RANS_AVX512
    if (vectors && has_avx512()) {
        return see_others_avx512(bytes, count, seen);
    }
#endif
    (void)vectors;
    for (std::size_t i = 0; i < count; ++i) {
        seen[bytes[i]] = 0xFF;
    }
}

std::uint8_t *encode_steps(const std::uint8_t *plane, std::size_t steps, const Model &model, std::uint32_t *states,
                           std::uint8_t *words, bool vectors) {
#ifdef CKSTORE_RANS_AVX512
    if (vectors && has_avx512()) {
        return encode_steps_avx512(plane, steps, model, states, words);
    }
#endif
    (void)vectors;
    return encode_portable(plane, steps, model, states, words);
}

const std::uint8_t *decode_steps(const std::uint8_t *words, const std::uint8_t *end, const SlotTable &table,
                                 std::uint32_t *states, std::uint8_t *plane, std::size_t steps, bool vectors) {
#ifdef CKSTORE_RANS_AVX512
    if (vectors && has_avx512()) {
        return decode_steps_avx512(words, end, table, states, plane, steps);
    }
#endif
    (void)vectors;
    return decode_portable(words, end, table, states, plane, steps);
}

}  // namespace ckstore
