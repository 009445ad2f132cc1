// Loops of the quantizers: elements to values, their sums, symbols and symbol streams, and back to elements.
//
// The numpy reference in ckstore/codec/kernels defines each loop. Results are bit-identical, so this file must not be
// compiled with contraction of multiplications and additions, or with fast math.
// Nothing here allocates, throws or touches a Python object.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

enum ValueKind : int { kValueFp32 = 0, kValueBf16 = 1, kValueFp16 = 2 };
enum FinishRule : int { kFinishAdd = 0, kFinishFloor = 1, kFinishRoot = 2, kFinishPlain = 3 };

constexpr std::size_t kRowMin = 16, kRowMax = std::size_t{1} << 16;
constexpr std::size_t kStreamMax = 16, kClasses = 16, kClassSums = 2 * kClasses - 1;
constexpr std::size_t kCodes = 256;
constexpr std::size_t kBoundsMax = 255;

// Position of a chunk in its matrix.
struct Matrix {
    std::size_t count, row, phase;

    std::size_t row_count() const { return count == 0 ? 0 : (phase + count + row - 1) / row; }
};

struct Scales {
    const float *rows, *cols;
};

struct Classes {
    const std::uint8_t *rows, *cols, *stream_of;
};

struct Measure {
    double greatest, errors, values;
};

constexpr std::size_t value_width(int kind) { return kind == kValueFp32 ? 4 : 2; }

bool float_values(const std::uint8_t *source, float *out, std::size_t count, int kind);
bool float_changes(const std::uint8_t *source, const std::uint8_t *base, float *out, std::size_t count, int kind);
bool float_quotients(const std::uint8_t *first, const std::uint8_t *second, float *out, std::size_t count, int kind,
                     float clip);
void sums_of_values(const float *values, double *rows, double *cols, Matrix matrix, bool squared);
void quantize_values(const float *values, const float *inverses, std::uint8_t *out, Matrix matrix, float bias,
                     int level_max);
// `bounds` are ascending, at most kBoundsMax.
void bin_values(const float *values, Scales scales, const float *bounds, std::size_t bound_count, std::uint8_t *out,
                Matrix matrix);
// `out` receives 256 counts, then 256 sums.
void sums_of_levels(const float *values, const std::uint8_t *symbols, Scales scales, double *out, Matrix matrix);
Measure measure_values(const std::uint8_t *source, const std::uint8_t *made, std::size_t count, int kind);
// `base` may be `destination`.
void finish_values(const std::uint8_t *symbols, Scales scales, const float *codebook, const std::uint8_t *base,
                   std::uint8_t *destination, Matrix matrix, int kind, int rule, float floor);

// REQUIRES: Classes are below kClasses and streams below kStreamMax.
void class_counts(const std::uint8_t *symbols, Classes classes, std::uint32_t *counts, Matrix matrix);
void stream_sizes(Classes classes, std::uint64_t *sizes, Matrix matrix);
void split_streams(const std::uint8_t *symbols, Classes classes, std::uint8_t *out, Matrix matrix);
void merge_streams(const std::uint8_t *streams, Classes classes, std::uint8_t *out, Matrix matrix);
void pack_symbols(const std::uint8_t *symbols, std::size_t count, std::uint8_t *out, unsigned lowest, unsigned alphabet,
                  unsigned per_byte);
bool unpack_symbols(const std::uint8_t *packed, std::uint8_t *out, std::size_t count, unsigned lowest, unsigned alphabet,
                    unsigned per_byte);

}  // namespace ckstore
