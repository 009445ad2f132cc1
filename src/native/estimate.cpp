#include "estimate.hpp"

#include <cstring>

#include "delta.hpp"
#include "planes.hpp"
#include "rans_model.hpp"
#include "target.hpp"

namespace ckstore {
namespace {

// The sample is everything, or one run in each sixteenth.
constexpr std::size_t kRuns = 16;
constexpr std::size_t kRunNbytes = 1024;

// One run in four is sampled first, to detect noise early.
constexpr std::size_t kFirstRuns = 4;
// Fewer bytes are not enough to detect noise.
constexpr std::size_t kFirstCount = 1024;
// 2^7.9: in noise, fewer than one in this many pairs of bytes are equal.
constexpr std::uint64_t kNoisePairs = 238;

struct Run {
    std::size_t start, count;
};

// Scattered within the sixteenths, so that the sample does not follow the columns of a matrix.
Run run_of(std::size_t index, std::size_t count, std::size_t width) {
    const std::size_t part = count / kRuns;
    const std::size_t length = kRunNbytes / width;
    if (count <= kRuns * length) {
        const std::size_t start = index * part;
        return {start, index == kRuns - 1 ? count - start : part};
    }
    const std::uint64_t spread = (index + 1) * 2654435761u;
    return {index * part + static_cast<std::size_t>(spread % (part - length + 1)), length};
}

// Separate tables for neighbours, because equal ones in one table would wait for each other's store.
constexpr std::size_t kTables = 4;

// How often each byte occurs in each plane.
struct Counts {
    std::uint32_t tables[kWidthMax][kTables][kSymbols];
    std::uint32_t totals[kWidthMax];
    bool is_noise[kWidthMax];
};

void count_bytes(const std::uint8_t *bytes, std::size_t count, std::uint32_t (*tables)[kSymbols]) {
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        std::uint64_t word;
        std::memcpy(&word, bytes + i, sizeof word);
        for (unsigned j = 0; j < 8; ++j) {
            ++tables[j % kTables][(word >> (8 * j)) & 0xFF];
        }
    }
    for (; i < count; ++i) {
        ++tables[0][bytes[i]];
    }
}

// Adds the tables of a plane into the first one.
CKSTORE_CLONES void fold(Counts &counts, std::size_t plane) {
    for (std::size_t t = 1; t < kTables; ++t) {
        for (std::size_t s = 0; s < kSymbols; ++s) {
            counts.tables[plane][0][s] += counts.tables[plane][t][s];
            counts.tables[plane][t][s] = 0;
        }
    }
}

CKSTORE_CLONES bool looks_like_noise(const std::uint32_t *counts, std::uint64_t total) {
    std::uint64_t pairs = 0;
    for (std::size_t s = 0; s < kSymbols; ++s) {
        pairs += static_cast<std::uint64_t>(counts[s]) * counts[s];
    }
    return total >= kFirstCount && (pairs - total) * kNoisePairs < total * (total - 1);
}

double bits_of(const std::uint32_t *counts, std::uint32_t total) {
    for (std::size_t s = 0; s < kSymbols; ++s) {
        if (counts[s] == total) {
            return 0.0;
        }
    }
    Model model;
    set_model(counts, total, model);
    return static_cast<double>(bits_with(model, counts)) / (256.0 * total);
}

// `split` writes the planes of the run, one after another.
template <class Split>
void estimate(Split split, double *bits, std::size_t count, std::size_t width) {
    Counts counts;
    std::memset(counts.tables, 0, width * sizeof counts.tables[0]);
    std::memset(counts.totals, 0, sizeof counts.totals);
    std::memset(counts.is_noise, 0, sizeof counts.is_noise);
    std::uint8_t planes[kRunNbytes + kWidthMax * kRuns];
    for (std::size_t turn = 0; turn < kRuns; ++turn) {
        // Runs 0, 4, 8 and 12 come first, then 1, 5, ...
        const Run run = run_of(turn * kFirstRuns % kRuns + turn / kFirstRuns, count, width);
        split(run, planes);
        for (std::size_t j = 0; j < width; ++j) {
            if (!counts.is_noise[j]) {
                count_bytes(planes + j * run.count, run.count, counts.tables[j]);
                counts.totals[j] += static_cast<std::uint32_t>(run.count);
            }
        }
        if (turn == kFirstRuns - 1) {
            for (std::size_t j = 0; j < width; ++j) {
                fold(counts, j);
                counts.is_noise[j] = looks_like_noise(counts.tables[j][0], counts.totals[j]);
            }
        }
    }
    for (std::size_t j = 0; j < width; ++j) {
        if (counts.is_noise[j]) {
            bits[j] = 8.0;
            continue;
        }
        fold(counts, j);
        bits[j] = bits_of(counts.tables[j][0], counts.totals[j]);
    }
}

}  // namespace

void plane_bits(const std::uint8_t *source, double *bits, std::size_t count, std::size_t width, bool rotate) {
    estimate([=](Run run, std::uint8_t *planes) { split_planes(source + run.start * width, planes, run.count, width, rotate); },
             bits, count, width);
}

void delta_bits(const std::uint8_t *source, const std::uint8_t *base, double *bits, std::size_t count,
                std::size_t width, bool ordered) {
    estimate(
        [=](Run run, std::uint8_t *planes) {
            const std::size_t at = run.start * width;
            split_delta(source + at, base + at, planes, run.count, width, ordered);
        },
        bits, count, width);
}

}  // namespace ckstore
