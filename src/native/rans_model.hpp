// The model of a block: count its symbols, scale the counts to a table, estimate the cost, write and read the table.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

struct Loops;  // rans_steps.hpp

constexpr unsigned kScaleBits = 12;
constexpr std::uint32_t kScale = 1u << kScaleBits;
constexpr std::size_t kSymbols = 256;
constexpr std::size_t kTableMax = kSymbols / 8 + 2 * kSymbols;

// Frequencies that sum to kScale, and where each symbol's slots begin.
struct Model {
    std::uint16_t freq[kSymbols];
    std::uint16_t start[kSymbols];
};

// Decoding table, indexed by slot: low word = slot - start | low half of the symbol << 12, high word =
// frequency | high half of the symbol << 12; and the symbol itself.
struct SlotTable {
    alignas(64) std::uint32_t slots[kScale];
    std::uint8_t symbols[kScale];
};

// Cost of a block, in 1/256 bits, if one of its symbols has no code.
constexpr std::uint64_t kNoCode = ~std::uint64_t{0};

// Counts the symbols in one of 2^spacing runs of 64 bytes, scattered. Returns the number of symbols counted.
std::uint32_t count_sample(const std::uint8_t *bytes, std::size_t count, unsigned spacing, std::uint32_t *counts);

// Computes symbol weights, for a long block from a sample. Every symbol that occurs has a positive weight. Returns the
// sum of the weights.
std::uint32_t weigh(const std::uint8_t *bytes, std::size_t count, std::uint32_t *weights, const Loops &loops);

// Scales weights to frequencies of at least 1 for each symbol that occurs. REQUIRES: At least two symbols occur.
void set_model(const std::uint32_t *weights, std::uint32_t total, Model &model);

std::uint64_t bits_with(const Model &model, const std::uint32_t *weights);

std::size_t write_table(const Model &model, std::uint8_t *out);

// Reads a table. Returns its length, or 0 if it is invalid.
std::size_t read_table(const std::uint8_t *in, std::size_t nbytes, Model &model);

void set_slots(const Model &model, SlotTable &table);

}  // namespace ckstore
