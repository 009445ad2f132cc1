// How often each symbol of a block occurs: weighed, scaled to a table, priced, written and read.

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

// What decoding looks up by slot: low word = slot - start | low half of the symbol << 12, high word =
// frequency | high half of the symbol << 12; and the symbol itself.
struct SlotTable {
    alignas(64) std::uint32_t slots[kScale];
    std::uint8_t symbols[kScale];
};

// What coding a block costs, in 1/256 bits, where a symbol has no code.
constexpr std::uint64_t kNoCode = ~std::uint64_t{0};

// Counts the symbols of runs of 64 bytes, one in 2^spacing, scattered; returns how many were counted.
std::uint32_t count_sample(const std::uint8_t *bytes, std::size_t count, unsigned spacing, std::uint32_t *counts);

// Weighs the symbols of a block: those of a long one by a sample, but every symbol that occurs weighs something.
// Returns their sum.
std::uint32_t weigh(const std::uint8_t *bytes, std::size_t count, std::uint32_t *weights, const Loops &loops);

// Scales weights to frequencies: at least 1 for a symbol that occurs. Two or more symbols must occur.
void set_model(const std::uint32_t *weights, std::uint32_t total, Model &model);

std::uint64_t bits_with(const Model &model, const std::uint32_t *weights);

std::size_t write_table(const Model &model, std::uint8_t *out);

// Reads a table; returns its length, or 0 if no writer makes it.
std::size_t read_table(const std::uint8_t *in, std::size_t nbytes, Model &model);

void set_slots(const Model &model, SlotTable &table);

}  // namespace ckstore
