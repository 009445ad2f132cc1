#include <cstring>

#include "quant.hpp"
#include "values.hpp"

namespace ckstore {
namespace {

constexpr std::size_t kLanes = 8;

// Values are first classified by their upper twelve bits.
constexpr unsigned kCellBits = 12;
constexpr std::size_t kCells = std::size_t{1} << kCellBits;

// The cell of a float. Cells sort like the numbers.
CKSTORE_INLINE std::uint32_t cell_of(float value) {
    const std::uint32_t word = word_of(value);
    const std::uint32_t flipped = word >> 31 ? ~word : word | 0x80000000;
    return flipped >> (32 - kCellBits);
}

// Calls `body(index, value)` for each value times its factors, which are computed one tile at a time.
template <class Body>
CKSTORE_INLINE void for_scaled(const float *values, Scales scales, Matrix matrix, Body body) {
    for_rows(matrix, [&](std::size_t row, std::size_t left, std::size_t start, std::size_t width) {
        const float r = scales.rows[row];
        for (std::size_t at = 0; at < width; at += kTile) {
            const std::size_t count = width - at < kTile ? width - at : kTile;
            float scaled[kTile];
            for (std::size_t i = 0; i < count; ++i) {
                scaled[i] = (values[start + at + i] * r) * scales.cols[left + at + i];
            }
            for (std::size_t i = 0; i < count; ++i) {
                body(start + at + i, scaled[i]);
            }
        }
    });
}

// Position of the next symbol of each stream.
void set_places(Classes classes, std::size_t *places, Matrix matrix) {
    std::uint64_t sizes[kStreamMax];
    stream_sizes(classes, sizes, matrix);
    std::size_t at = 0;
    for (std::size_t stream = 0; stream < kStreamMax; ++stream) {
        places[stream] = at;
        at += static_cast<std::size_t>(sizes[stream]);
    }
}

// The columns of a part of a row, grouped by class.
class ColumnOrder {
public:
    void set(const std::uint8_t *classes, std::size_t count) {
        std::size_t at[kClasses] = {};
        for (std::size_t j = 0; j < count; ++j) {
            ++at[classes[j]];
        }
        std::size_t begin = 0;
        for (std::size_t c = 0; c < kClasses; ++c) {
            begins_[c] = begin;
            begin += at[c];
            at[c] = begins_[c];
        }
        begins_[kClasses] = begin;
        for (std::size_t j = 0; j < count; ++j) {
            cols_[at[classes[j]]++] = static_cast<std::uint16_t>(j);
        }
    }

    const std::uint16_t *of(std::size_t c) const { return cols_ + begins_[c]; }
    std::size_t count(std::size_t c) const { return begins_[c + 1] - begins_[c]; }

private:
    std::uint16_t cols_[kRowMax];
    std::size_t begins_[kClasses + 1];
};

// Calls `body(place, columns, first, count)` for each class of columns in each row: the position of its symbols in the
// streams, and their columns, relative to element `first`.
template <class Body>
CKSTORE_INLINE void for_segments(Classes classes, Matrix matrix, Body body) {
    std::size_t places[kStreamMax];
    set_places(classes, places, matrix);
    ColumnOrder order;
    bool is_whole = false;
    for_rows(matrix, [&](std::size_t row, std::size_t left, std::size_t start, std::size_t width) {
        if (width != matrix.row || !is_whole) {
            order.set(classes.cols + left, width);
            is_whole = width == matrix.row;
        }
        const std::uint8_t *streams = classes.stream_of + classes.rows[row];
        for (std::size_t c = 0; c < kClasses; ++c) {
            const std::size_t count = order.count(c);
            std::size_t &place = places[streams[c]];
            body(place, order.of(c), start, count);
            place += count;
        }
    });
}

// The `digits` symbols of one byte.
template <unsigned kDigits>
void pack_digits(const std::uint8_t *symbols, std::size_t bytes, std::uint8_t *out, unsigned lowest, unsigned alphabet) {
    for (std::size_t b = 0; b < bytes; ++b) {
        unsigned packed = 0;
        for (unsigned place = kDigits; place-- > 0;) {
            packed = packed * alphabet + ((symbols[b * kDigits + place] - lowest) & 0xFF);
        }
        out[b] = static_cast<std::uint8_t>(packed);
    }
}

// Eight bytes for each packed byte; its symbols come first.
struct DigitTable {
    std::uint8_t digits[kCodes][8];
    std::uint8_t is_wrong[kCodes];
};

void set_digits(DigitTable &table, unsigned lowest, unsigned alphabet, unsigned per_byte) {
    for (unsigned packed = 0; packed < kCodes; ++packed) {
        unsigned rest = packed;
        for (unsigned place = 0; place < 8; ++place) {
            const unsigned digit = place < per_byte ? rest % alphabet : 0;
            rest = place < per_byte ? rest / alphabet : rest;
            table.digits[packed][place] = static_cast<std::uint8_t>(lowest + digit);
        }
        table.is_wrong[packed] = rest != 0;
    }
}

template <unsigned kDigits>
bool unpack_digits(const std::uint8_t *packed, std::uint8_t *out, std::size_t count, const DigitTable &table,
                   unsigned lowest) {
    const std::size_t bytes = (count + kDigits - 1) / kDigits;
    unsigned wrong = 0;
    std::size_t b = 0;
    // Always writes eight bytes; those beyond the symbols are overwritten by the next byte.
    for (; b * kDigits + 8 <= count; ++b) {
        std::memcpy(out + b * kDigits, table.digits[packed[b]], 8);
        wrong |= table.is_wrong[packed[b]];
    }
    for (; b < bytes; ++b) {
        wrong |= table.is_wrong[packed[b]];
        for (unsigned place = 0; place < kDigits; ++place) {
            const std::size_t at = b * kDigits + place;
            const std::uint8_t symbol = table.digits[packed[b]][place];
            if (at < count) {
                out[at] = symbol;
            } else {
                wrong |= symbol != static_cast<std::uint8_t>(lowest);
            }
        }
    }
    return wrong == 0;
}

}  // namespace

void bin_values(const float *values, Scales scales, const float *bounds, std::size_t bound_count, std::uint8_t *out,
                Matrix matrix) {
    // Number of bounds in lower cells.
    std::uint8_t below[kCells];
    std::size_t next = 0;
    for (std::size_t cell = 0; cell < kCells; ++cell) {
        while (next < bound_count && cell_of(bounds[next]) < cell) {
            ++next;
        }
        below[cell] = static_cast<std::uint8_t>(next);
    }
    for_scaled(values, scales, matrix, [&](std::size_t index, float value) {
        std::size_t symbol = below[cell_of(value)];
        while (symbol < bound_count && bounds[symbol] <= value) {
            ++symbol;
        }
        out[index] = static_cast<std::uint8_t>(symbol);
    });
}

void sums_of_levels(const float *values, const std::uint8_t *symbols, Scales scales, double *out, Matrix matrix) {
    double sums[kLanes][kCodes] = {};
    std::uint64_t counts[kLanes][kCodes] = {};
    for_scaled(values, scales, matrix, [&](std::size_t index, float value) {
        sums[index % kLanes][symbols[index]] += static_cast<double>(value);
        ++counts[index % kLanes][symbols[index]];
    });
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::size_t l = 0; l < half; ++l) {
            for (std::size_t s = 0; s < kCodes; ++s) {
                sums[l][s] += sums[l + half][s];
                counts[l][s] += counts[l + half][s];
            }
        }
    }
    for (std::size_t s = 0; s < kCodes; ++s) {
        out[s] = static_cast<double>(counts[0][s]);
        out[kCodes + s] = sums[0][s];
    }
}

void class_counts(const std::uint8_t *symbols, Classes classes, std::uint32_t *counts, Matrix matrix) {
    std::memset(counts, 0, kClassSums * kCodes * sizeof *counts);
    for_rows(matrix, [&](std::size_t row, std::size_t left, std::size_t start, std::size_t width) {
        std::uint32_t *of_row = counts + classes.rows[row] * kCodes;
        const std::uint8_t *cols = classes.cols + left;
        for (std::size_t i = 0; i < width; ++i) {
            ++of_row[cols[i] * kCodes + symbols[start + i]];
        }
    });
}

void stream_sizes(Classes classes, std::uint64_t *sizes, Matrix matrix) {
    std::memset(sizes, 0, kStreamMax * sizeof *sizes);
    std::uint64_t of_cols[kClasses] = {};
    for (std::size_t j = 0; j < matrix.row; ++j) {
        ++of_cols[classes.cols[j]];
    }
    for_rows(matrix, [&](std::size_t row, std::size_t left, std::size_t, std::size_t width) {
        const std::uint8_t *streams = classes.stream_of + classes.rows[row];
        if (width == matrix.row) {
            for (std::size_t c = 0; c < kClasses; ++c) {
                sizes[streams[c]] += of_cols[c];
            }
        } else {
            for (std::size_t j = left; j < left + width; ++j) {
                ++sizes[streams[classes.cols[j]]];
            }
        }
    });
}

void split_streams(const std::uint8_t *symbols, Classes classes, std::uint8_t *out, Matrix matrix) {
    for_segments(classes, matrix, [&](std::size_t place, const std::uint16_t *cols, std::size_t first, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) {
            out[place + i] = symbols[first + cols[i]];
        }
    });
}

void merge_streams(const std::uint8_t *streams, Classes classes, std::uint8_t *out, Matrix matrix) {
    for_segments(classes, matrix, [&](std::size_t place, const std::uint16_t *cols, std::size_t first, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) {
            out[first + cols[i]] = streams[place + i];
        }
    });
}

void pack_symbols(const std::uint8_t *symbols, std::size_t count, std::uint8_t *out, unsigned lowest, unsigned alphabet,
                  unsigned per_byte) {
    constexpr void (*kPack[])(const std::uint8_t *, std::size_t, std::uint8_t *, unsigned, unsigned) = {
        pack_digits<1>, pack_digits<2>, pack_digits<3>, pack_digits<4>,
        pack_digits<5>, pack_digits<6>, pack_digits<7>, pack_digits<8>};
    const std::size_t whole = count / per_byte;
    kPack[per_byte - 1](symbols, whole, out, lowest, alphabet);
    if (whole * per_byte < count) {
        std::uint8_t last[8];
        std::memset(last, static_cast<int>(lowest), sizeof last);
        std::memcpy(last, symbols + whole * per_byte, count - whole * per_byte);
        kPack[per_byte - 1](last, 1, out + whole, lowest, alphabet);
    }
}

bool unpack_symbols(const std::uint8_t *packed, std::uint8_t *out, std::size_t count, unsigned lowest, unsigned alphabet,
                    unsigned per_byte) {
    constexpr bool (*kUnpack[])(const std::uint8_t *, std::uint8_t *, std::size_t, const DigitTable &, unsigned) = {
        unpack_digits<1>, unpack_digits<2>, unpack_digits<3>, unpack_digits<4>,
        unpack_digits<5>, unpack_digits<6>, unpack_digits<7>, unpack_digits<8>};
    DigitTable table;
    set_digits(table, lowest, alphabet, per_byte);
    return kUnpack[per_byte - 1](packed, out, count, table, lowest);
}

}  // namespace ckstore
