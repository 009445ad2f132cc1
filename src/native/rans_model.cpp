#include "rans_model.hpp"

#include <cstring>

#include "bytes.hpp"
#include "rans_steps.hpp"

namespace ckstore {
namespace {

// Blocks of at least the first length are sampled, and of at least the second one more sparsely, in runs of 64 bytes.
constexpr std::size_t kSampledFrom = 16 * 1024;
constexpr std::size_t kSampledLessFrom = 128 * 1024;
constexpr unsigned kSpacing = 2;
constexpr unsigned kSpacingLess = 4;
constexpr std::size_t kRun = 64;

void set_starts(Model &model) {
    std::uint32_t at = 0;
    for (std::size_t s = 0; s < kSymbols; ++s) {
        model.start[s] = static_cast<std::uint16_t>(at);
        at += model.freq[s];
    }
}

// Scattered, so that the sample does not follow the columns of a matrix.
std::size_t run_of_group(std::size_t group, unsigned spacing) {
    return (static_cast<std::uint32_t>(group) * 0x9E3779B1u) >> (32 - spacing);
}

// log2(kScale / freq) in 1/256 bits, rounded up. Uses integers only, so that every machine decides the same.
std::uint32_t cost_of(std::uint32_t freq) {
    unsigned whole = kScaleBits;
    while (!(freq >> whole)) {
        --whole;
    }
    std::uint64_t mantissa = static_cast<std::uint64_t>(freq) << (31 - whole);
    std::uint32_t fraction = 0;
    for (int bit = 0; bit < 8; ++bit) {
        mantissa = (mantissa * mantissa) >> 31;
        fraction <<= 1;
        if (mantissa >> 32) {
            fraction |= 1;
            mantissa >>= 1;
        }
    }
    return (kScaleBits << 8) - ((whole << 8) | fraction);
}

struct Costs {
    std::uint32_t of[kScale];
    Costs() {
        of[0] = 0;
        for (std::uint32_t freq = 1; freq < kScale; ++freq) {
            of[freq] = cost_of(freq);
        }
    }
};

const Costs &costs() {
    static const Costs table;
    return table;
}

}  // namespace

std::uint32_t count_sample(const std::uint8_t *bytes, std::size_t count, unsigned spacing, std::uint32_t *counts) {
    // Several tables, because equal neighbours in one table would wait for each other's increment.
    std::uint32_t tables[4][kSymbols];
    std::memset(tables, 0, sizeof tables);
    const std::size_t groups = count / (kRun << spacing);
    for (std::size_t group = 0; group < groups; ++group) {
        const std::uint8_t *run = bytes + ((group << spacing) + run_of_group(group, spacing)) * kRun;
        for (std::size_t i = 0; i < kRun; i += 8) {
            std::uint64_t word;
            std::memcpy(&word, run + i, sizeof word);
            for (unsigned j = 0; j < 8; ++j) {
                ++tables[j % 4][(word >> (8 * j)) & 0xFF];
            }
        }
    }
    for (std::size_t s = 0; s < kSymbols; ++s) {
        counts[s] = tables[0][s] + tables[1][s] + tables[2][s] + tables[3][s];
    }
    return static_cast<std::uint32_t>(groups * kRun);
}

std::uint32_t weigh(const std::uint8_t *bytes, std::size_t count, std::uint32_t *weights, const Loops &loops) {
    if (count < kSampledFrom) {
        histogram(bytes, count, weights);
        return static_cast<std::uint32_t>(count);
    }
    const unsigned spacing = count < kSampledLessFrom ? kSpacing : kSpacingLess;
    count_sample(bytes, count, spacing, weights);
    std::uint8_t seen[kSymbols];
    for (std::size_t s = 0; s < kSymbols; ++s) {
        seen[s] = weights[s] != 0 ? 0xFF : 0;
    }
    loops.see_others(bytes, count, seen);
    std::uint32_t total = 0;
    for (std::size_t s = 0; s < kSymbols; ++s) {
        weights[s] = weights[s] != 0 ? weights[s] << spacing : seen[s] & 1u;
        total += weights[s];
    }
    return total;
}

void set_model(const std::uint32_t *weights, std::uint32_t total, Model &model) {
    std::int32_t rest = static_cast<std::int32_t>(kScale);
    for (std::size_t s = 0; s < kSymbols; ++s) {
        const std::uint32_t scaled = (weights[s] * kScale + total / 2) / total;
        model.freq[s] = static_cast<std::uint16_t>(weights[s] != 0 && scaled == 0 ? 1 : scaled);
        rest -= model.freq[s];
    }
    // The difference to kScale goes to the most frequent symbol, the lowest one of equals.
    while (rest != 0) {
        std::size_t largest = 0;
        for (std::size_t s = 1; s < kSymbols; ++s) {
            if (model.freq[s] > model.freq[largest]) {
                largest = s;
            }
        }
        // Every symbol keeps a frequency of at least 1, and no single symbol pays the whole difference.
        const std::int32_t least = -static_cast<std::int32_t>(model.freq[largest] / 2);
        const std::int32_t change = rest < least ? least : rest;
        model.freq[largest] = static_cast<std::uint16_t>(model.freq[largest] + change);
        rest -= change;
    }
    set_starts(model);
}

std::uint64_t bits_with(const Model &model, const std::uint32_t *weights) {
    std::uint64_t bits = 0;
    for (std::size_t s = 0; s < kSymbols; ++s) {
        if (weights[s] != 0) {
            if (model.freq[s] == 0) {
                return kNoCode;
            }
            bits += static_cast<std::uint64_t>(weights[s]) * costs().of[model.freq[s]];
        }
    }
    return bits;
}

std::size_t write_table(const Model &model, std::uint8_t *out) {
    std::memset(out, 0, kSymbols / 8);
    std::size_t at = kSymbols / 8;
    for (std::size_t s = 0; s < kSymbols; ++s) {
        if (model.freq[s] != 0) {
            out[s >> 3] = static_cast<std::uint8_t>(out[s >> 3] | 1u << (s & 7));
            put_u16(out + at, model.freq[s]);
            at += 2;
        }
    }
    return at;
}

std::size_t read_table(const std::uint8_t *in, std::size_t nbytes, Model &model) {
    if (nbytes < kSymbols / 8) {
        return 0;
    }
    std::size_t at = kSymbols / 8;
    std::uint32_t sum = 0;
    for (std::size_t s = 0; s < kSymbols; ++s) {
        model.freq[s] = 0;
        if (in[s >> 3] >> (s & 7) & 1) {
            if (nbytes - at < 2) {
                return 0;
            }
            const std::uint32_t freq = get_u16(in + at);
            at += 2;
            if (freq == 0 || freq >= kScale) {
                return 0;
            }
            model.freq[s] = static_cast<std::uint16_t>(freq);
            sum += freq;
        }
    }
    if (sum != kScale) {
        return 0;
    }
    set_starts(model);
    return at;
}

void set_slots(const Model &model, SlotTable &table) {
    std::size_t at = 0;
    for (std::uint32_t s = 0; s < kSymbols; ++s) {
        const std::uint32_t freq = model.freq[s];
        const std::uint32_t common = (s & 0xF) << 12 | freq << 16 | (s & 0xF0) << 24;
        std::memset(table.symbols + at, static_cast<int>(s), freq);
        for (std::uint32_t i = 0; i < freq; ++i) {
            table.slots[at++] = common | i;
        }
    }
}

}  // namespace ckstore
