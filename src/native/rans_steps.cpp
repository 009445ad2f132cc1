#include "rans_steps.hpp"

namespace ckstore {
namespace {

std::uint8_t *encode_portable(const std::uint8_t *plane, std::size_t steps, const Model &model, std::uint32_t *states,
                              std::uint8_t *words) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        states[lane] = kLow;
    }
    for (std::size_t step = steps; step-- > 0;) {
        const std::uint8_t *bytes = plane + step * kLanes;
        for (std::size_t lane = kLanes; lane-- > 0;) {
            const std::uint32_t symbol = bytes[byte_of_lane(lane)];
            const std::uint32_t freq = model.freq[symbol];
            const std::uint32_t state = states[lane];
            // Without a branch: whether a state is full is a coin toss that no predictor learns.
            const std::uint32_t is_full = (state >> 20) >= freq ? 1u : 0u;
            put_u16(words, state & 0xFFFF);
            words += 2 * is_full;
            const std::uint32_t kept = state >> (16 * is_full);
            states[lane] = ((kept / freq) << kScaleBits) + kept % freq + model.start[symbol];
        }
    }
    return words;
}

const std::uint8_t *decode_portable(const std::uint8_t *words, const std::uint8_t *end, const SlotTable &table,
                                    std::uint32_t *states, std::uint8_t *plane, std::size_t steps) {
    for (std::size_t step = 0; step < steps; ++step) {
        std::uint8_t *bytes = plane + step * kLanes;
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const std::uint32_t slot = table.slots[states[lane] & (kScale - 1)];
            const std::uint32_t state = (slot >> 16 & 0xFFF) * (states[lane] >> kScaleBits) + (slot & 0xFFF);
            bytes[byte_of_lane(lane)] = static_cast<std::uint8_t>((slot >> 12 & 0xF) | (slot >> 24 & 0xF0));
            const std::uint32_t needs = state < kLow ? 1u : 0u;
            const std::uint32_t refilled = state << 16 | get_u16(end - 2);
            const std::uint32_t mask = 0u - needs;
            states[lane] = (state & ~mask) | (refilled & mask);
            end -= 2 * needs;
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
