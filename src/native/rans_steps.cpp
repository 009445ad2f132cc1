#include "rans_steps.hpp"

#include <cstring>

#include "rans.hpp"

namespace ckstore {
namespace {

// The lanes of the even bytes of a step, then those of the odd ones.
constexpr std::size_t kHalves = 2;
constexpr std::size_t kHalf = kLanes / kHalves;

std::uint8_t *encode_steps(const std::uint8_t *plane, std::size_t steps, const Model &model, std::uint32_t *states,
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
                // Without a branch, because whether a state is full is unpredictable.
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

bool decode_stream(Stream &stream, std::size_t steps) {
    const std::uint8_t *end = stream.end;
    for (std::size_t step = 0; step < steps; ++step) {
        for (std::size_t half = 0; half < kHalves; ++half) {
            std::uint8_t *bytes = stream.plane + half;
            std::uint32_t *own = stream.states + half * kHalf;
            for (std::size_t i = 0; i < kHalf; ++i) {
                const std::uint32_t slot = own[i] & (kScale - 1);
                const std::uint32_t entry = stream.table->slots[slot];
                bytes[kHalves * i] = stream.table->symbols[slot];
                const std::uint32_t state = (entry >> 16 & 0xFFF) * (own[i] >> kScaleBits) + (entry & 0xFFF);
                const std::uint32_t needs = state < kLow ? 1u : 0u;
                const std::uint32_t word = get_u16(end - 2) & (0u - needs);
                own[i] = state << (16 * needs) | word;
                end -= 2 * needs;
            }
        }
        // A step takes at most 128 bytes, and 128 bytes before the words may be read.
        if (end < stream.words) {
            return false;
        }
        stream.plane += kLanes;
    }
    stream.end = end;
    return true;
}

bool decode_steps(Stream *streams, std::size_t count, std::size_t steps) {
    for (std::size_t i = 0; i < count; ++i) {
        if (!decode_stream(streams[i], steps)) {
            return false;
        }
    }
    return true;
}

void see_others(const std::uint8_t *bytes, std::size_t count, std::uint8_t *seen) {
    for (std::size_t i = 0; i < count; ++i) {
        seen[bytes[i]] = 0xFF;
    }
}

std::size_t take_others(const std::uint8_t *plane, std::size_t count, std::uint8_t common, std::uint8_t *bitmap,
                        std::uint8_t *others, std::size_t limit) {
    std::size_t taken = 0;
    for (std::size_t begin = 0; begin < count && taken <= limit; begin += 8) {
        const std::size_t bits = count - begin < 8 ? count - begin : 8;
        std::uint32_t set = 0;
        for (std::size_t i = 0; i < bits; ++i) {
            const std::uint8_t byte = plane[begin + i];
            const std::uint32_t is_other = byte != common ? 1u : 0u;
            others[taken] = byte;
            taken += is_other;
            set |= is_other << i;
        }
        bitmap[begin / 8] = static_cast<std::uint8_t>(set);
    }
    return taken;
}

void put_others(std::uint8_t *plane, std::size_t count, std::uint8_t common, const std::uint8_t *bitmap,
                std::size_t other_count) {
    const std::uint8_t *next = plane + count - other_count;
    for (std::size_t i = 0; i < count; ++i) {
        // The other bytes left never exceed the plane bytes left.
        const std::uint32_t is_other = bitmap[i / 8] >> (i % 8) & 1u;
        const std::uint8_t byte = is_other ? *next : common;
        plane[i] = byte;
        next += is_other;
    }
}

}  // namespace

const Loops kPortableLoops = {"portable", see_others, encode_steps, decode_steps, take_others, put_others};

const Loops *const *loops_here() {
    static const struct Here {
        const Loops *loops[4] = {};
        Here() {
            std::size_t count = 0;
#ifdef CKSTORE_RANS_VECTORS
            if (has_avx512()) {
                loops[count++] = &kAvx512Loops;
            }
            if (has_avx2()) {
                loops[count++] = &kAvx2Loops;
            }
#endif
            loops[count] = &kPortableLoops;
        }
    } here;
    return here.loops;
}

const char *name_of(const Loops &loops) { return loops.name; }

const Loops *loops_named(const char *name) {
    for (const Loops *const *at = loops_here(); *at != nullptr; ++at) {
        if (std::strcmp((*at)->name, name) == 0) {
            return *at;
        }
    }
    return nullptr;
}

}  // namespace ckstore
