// Python bindings of the loops of the quantizers; included only by module.cpp.

#pragma once

#include <nanobind/nanobind.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "binding.hpp"
#include "quant.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Sets round-to-nearest and full subnormal arithmetic for its scope, because a trainer may have changed them for the
// thread.
class IeeeArithmetic {
public:
#if defined(__x86_64__)
    IeeeArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~IeeeArithmetic() { _mm_setcsr(before_); }

private:
    unsigned before_;
#elif defined(__aarch64__)
    IeeeArithmetic() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
    }
    ~IeeeArithmetic() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

private:
    std::uint64_t before_;
#else
    IeeeArithmetic() {}
    ~IeeeArithmetic() {}
#endif
};

// Releases the GIL and sets IEEE arithmetic; destroyed in reverse order.
struct InLoop {
    nb::gil_scoped_release unlocked;
    IeeeArithmetic arithmetic;
};

void require(bool holds, const char *what) {
    if (!holds) {
        throw nb::value_error(what);
    }
}

std::size_t checked_values(std::size_t nbytes, int kind) {
    require(kind >= ckstore::kValueFp32 && kind <= ckstore::kValueFp16, "kind must be 0, 1 or 2, for a width of 4 or 2 bytes");
    return checked_count(nbytes, ckstore::value_width(kind));
}

template <class Number>
Number *numbers_of(const Bytes &buffer) {
    require(reinterpret_cast<std::uintptr_t>(buffer.data()) % alignof(Number) == 0, "a buffer of numbers is not aligned");
    return reinterpret_cast<Number *>(buffer.data());
}

ckstore::Matrix checked_matrix(std::size_t count, std::size_t row, std::size_t phase) {
    require(row >= ckstore::kRowMin && row <= ckstore::kRowMax && phase < row, "row is out of range, or phase is not below row");
    return {count, row, phase};
}

// Factors of rows and columns, or their classes, of `width` bytes each.
void require_edges(const ckstore::Matrix &matrix, const Bytes &rows, const Bytes &cols, std::size_t width) {
    require_equal(rows.nbytes(), matrix.row_count() * width);
    require_equal(cols.nbytes(), matrix.row * width);
}

bool float_values(nb::handle source, nb::handle out, int kind) {
    Bytes from(source, false), to(out, true);
    const std::size_t count = checked_values(from.nbytes(), kind);
    require_equal(to.nbytes(), count * sizeof(float));
    float *values = numbers_of<float>(to);
    InLoop loop;
    return ckstore::float_values(from.data(), values, count, kind);
}

bool float_changes(nb::handle source, nb::handle base, nb::handle out, int kind) {
    Bytes from(source, false), other(base, false), to(out, true);
    const std::size_t count = checked_values(from.nbytes(), kind);
    require_equal(other.nbytes(), from.nbytes());
    require_equal(to.nbytes(), count * sizeof(float));
    float *values = numbers_of<float>(to);
    InLoop loop;
    return ckstore::float_changes(from.data(), other.data(), values, count, kind);
}

bool float_quotients(nb::handle first, nb::handle second, nb::handle out, int kind, double clip) {
    Bytes above(first, false), below(second, false), to(out, true);
    const std::size_t count = checked_values(above.nbytes(), kind);
    require_equal(below.nbytes(), above.nbytes());
    require_equal(to.nbytes(), count * sizeof(float));
    require(clip > 0, "clip must be above 0");
    float *values = numbers_of<float>(to);
    InLoop loop;
    return ckstore::float_quotients(above.data(), below.data(), values, count, kind, static_cast<float>(clip));
}

void sums_of_values(nb::handle values, nb::handle rows_out, nb::handle cols_out, std::size_t row, std::size_t phase,
                    bool squared) {
    Bytes from(values, false), rows(rows_out, true), cols(cols_out, true);
    const ckstore::Matrix matrix = checked_matrix(checked_count(from.nbytes(), 4), row, phase);
    require_edges(matrix, rows, cols, sizeof(double));
    const float *x = numbers_of<float>(from);
    double *above = numbers_of<double>(rows), *beside = numbers_of<double>(cols);
    InLoop loop;
    ckstore::sums_of_values(x, above, beside, matrix, squared);
}

void quantize_values(nb::handle values, nb::handle inverses, nb::handle out, std::size_t row, std::size_t phase,
                     double bias, int level_max) {
    Bytes from(values, false), scales(inverses, false), to(out, true);
    const ckstore::Matrix matrix = checked_matrix(checked_count(from.nbytes(), 4), row, phase);
    require_equal(to.nbytes(), matrix.count);
    require_equal(scales.nbytes(), matrix.row_count() * sizeof(float));
    require(level_max >= 1 && level_max <= 127 && bias > -128 && bias < 1, "level_max must be 1 to 127, and bias between -128 and 1");
    const float *x = numbers_of<float>(from), *steps = numbers_of<float>(scales);
    InLoop loop;
    ckstore::quantize_values(x, steps, to.data(), matrix, static_cast<float>(bias), level_max);
}

void bin_values(nb::handle values, nb::handle rows, nb::handle cols, nb::handle bounds, nb::handle out,
                std::size_t row, std::size_t phase) {
    Bytes from(values, false), above(rows, false), beside(cols, false), edges(bounds, false), to(out, true);
    const ckstore::Matrix matrix = checked_matrix(checked_count(from.nbytes(), 4), row, phase);
    require_equal(to.nbytes(), matrix.count);
    require_edges(matrix, above, beside, sizeof(float));
    const std::size_t bound_count = checked_count(edges.nbytes(), 4);
    const float *limits = numbers_of<float>(edges), *x = numbers_of<float>(from);
    bool is_ascending = bound_count <= ckstore::kBoundsMax;
    for (std::size_t i = 1; is_ascending && i < bound_count; ++i) {
        is_ascending = !(limits[i] < limits[i - 1]);
    }
    require(is_ascending, "bounds must be at most 255 ascending numbers");
    const ckstore::Scales scales{numbers_of<float>(above), numbers_of<float>(beside)};
    InLoop loop;
    ckstore::bin_values(x, scales, limits, bound_count, to.data(), matrix);
}

void sums_of_levels(nb::handle values, nb::handle symbols, nb::handle rows, nb::handle cols, nb::handle out,
                    std::size_t row, std::size_t phase) {
    Bytes from(values, false), codes(symbols, false), above(rows, false), beside(cols, false), to(out, true);
    const ckstore::Matrix matrix = checked_matrix(checked_count(from.nbytes(), 4), row, phase);
    require_equal(codes.nbytes(), matrix.count);
    require_equal(to.nbytes(), 2 * ckstore::kCodes * sizeof(double));
    require_edges(matrix, above, beside, sizeof(float));
    const ckstore::Scales scales{numbers_of<float>(above), numbers_of<float>(beside)};
    const float *x = numbers_of<float>(from);
    double *sums = numbers_of<double>(to);
    InLoop loop;
    ckstore::sums_of_levels(x, codes.data(), scales, sums, matrix);
}

void finish_values(nb::handle symbols, nb::handle rows, nb::handle cols, nb::handle codebook, nb::handle base,
                   nb::handle destination, std::size_t row, std::size_t phase, int kind, int rule, double floor) {
    Bytes codes(symbols, false), above(rows, false), beside(cols, false), table(codebook, false), other(base, false);
    Bytes to(destination, true);
    const ckstore::Matrix matrix = checked_matrix(checked_values(to.nbytes(), kind), row, phase);
    require_equal(codes.nbytes(), matrix.count);
    require_equal(table.nbytes(), ckstore::kCodes * sizeof(float));
    require(rule >= ckstore::kFinishAdd && rule <= ckstore::kFinishPlain, "rule must be a number from 0 to 3");
    const bool has_base = rule == ckstore::kFinishAdd || rule == ckstore::kFinishRoot;
    require(other.nbytes() == (has_base ? to.nbytes() : 0), "the base has the wrong length");
    require_edges(matrix, above, beside, sizeof(float));
    const ckstore::Scales scales{numbers_of<float>(above), numbers_of<float>(beside)};
    const float *entries = numbers_of<float>(table);
    InLoop loop;
    ckstore::finish_values(codes.data(), scales, entries, other.data(), to.data(), matrix, kind, rule,
                           static_cast<float>(floor));
}

nb::tuple measure_values(nb::handle source, nb::handle made, int kind) {
    Bytes from(source, false), other(made, false);
    const std::size_t count = checked_values(from.nbytes(), kind);
    require_equal(other.nbytes(), from.nbytes());
    ckstore::Measure found;
    {
        InLoop loop;
        found = ckstore::measure_values(from.data(), other.data(), count, kind);
    }
    return nb::make_tuple(found.greatest, found.errors, found.values);
}

// Classes and streams of one call, opened and checked.
class OpenClasses {
public:
    OpenClasses(nb::handle rows, nb::handle cols) : rows_(rows, false), cols_(cols, false) {}
    OpenClasses(nb::handle rows, nb::handle cols, nb::handle stream_of) : OpenClasses(rows, cols) {
        streams_.open(stream_of, false);
        require_equal(streams_.nbytes(), ckstore::kClassSums);
        require(all_below(streams_, ckstore::kStreamMax), "streams are numbers below 16");
    }

    ckstore::Classes of(const ckstore::Matrix &matrix) const {
        require_edges(matrix, rows_, cols_, 1);
        require(all_below(rows_, ckstore::kClasses) && all_below(cols_, ckstore::kClasses), "classes are numbers below 16");
        return {rows_.data(), cols_.data(), streams_.data()};
    }

private:
    static bool all_below(const Bytes &numbers, std::size_t bound) {
        unsigned most = 0;
        for (std::size_t i = 0; i < numbers.nbytes(); ++i) {
            most = numbers.data()[i] > most ? numbers.data()[i] : most;
        }
        return most < bound;
    }

    Bytes rows_, cols_, streams_;
};

void class_counts(nb::handle symbols, nb::handle row_classes, nb::handle col_classes, nb::handle out, std::size_t row,
                  std::size_t phase) {
    Bytes codes(symbols, false), to(out, true);
    const OpenClasses opened(row_classes, col_classes);
    const ckstore::Matrix matrix = checked_matrix(codes.nbytes(), row, phase);
    require_equal(to.nbytes(), ckstore::kClassSums * ckstore::kCodes * sizeof(std::uint32_t));
    const ckstore::Classes classes = opened.of(matrix);
    std::uint32_t *counts = numbers_of<std::uint32_t>(to);
    InLoop loop;
    ckstore::class_counts(codes.data(), classes, counts, matrix);
}

void stream_sizes(nb::handle row_classes, nb::handle col_classes, nb::handle stream_of, nb::handle out,
                  std::size_t count, std::size_t row, std::size_t phase) {
    Bytes to(out, true);
    const OpenClasses opened(row_classes, col_classes, stream_of);
    const ckstore::Matrix matrix = checked_matrix(count, row, phase);
    require_equal(to.nbytes(), ckstore::kStreamMax * sizeof(std::uint64_t));
    const ckstore::Classes classes = opened.of(matrix);
    std::uint64_t *sizes = numbers_of<std::uint64_t>(to);
    InLoop loop;
    ckstore::stream_sizes(classes, sizes, matrix);
}

template <void (*kLoop)(const std::uint8_t *, ckstore::Classes, std::uint8_t *, ckstore::Matrix)>
void move_symbols(nb::handle source, nb::handle row_classes, nb::handle col_classes, nb::handle stream_of,
                  nb::handle out, std::size_t row, std::size_t phase) {
    Bytes from(source, false), to(out, true);
    require_equal(from.nbytes(), to.nbytes());
    const OpenClasses opened(row_classes, col_classes, stream_of);
    const ckstore::Matrix matrix = checked_matrix(to.nbytes(), row, phase);
    const ckstore::Classes classes = opened.of(matrix);
    InLoop loop;
    kLoop(from.data(), classes, to.data(), matrix);
}

void check_packing(std::size_t count, std::size_t packed, unsigned lowest, unsigned alphabet, unsigned per_byte) {
    bool is_base = alphabet >= 2 && alphabet <= 256 && per_byte >= 1 && per_byte <= 8;
    unsigned most = 1;
    for (unsigned place = 0; is_base && place < per_byte; ++place) {
        most *= alphabet;
        is_base = most <= 256;
    }
    require(is_base && lowest <= 256 - alphabet, "per_byte symbols do not fit into a byte");
    require_equal(packed, (count + per_byte - 1) / per_byte);
}

void pack_symbols(nb::handle symbols, nb::handle out, unsigned lowest, unsigned alphabet, unsigned per_byte) {
    Bytes from(symbols, false), to(out, true);
    check_packing(from.nbytes(), to.nbytes(), lowest, alphabet, per_byte);
    InLoop loop;
    ckstore::pack_symbols(from.data(), from.nbytes(), to.data(), lowest, alphabet, per_byte);
}

bool unpack_symbols(nb::handle packed, nb::handle out, unsigned lowest, unsigned alphabet, unsigned per_byte) {
    Bytes from(packed, false), to(out, true);
    check_packing(to.nbytes(), from.nbytes(), lowest, alphabet, per_byte);
    InLoop loop;
    return ckstore::unpack_symbols(from.data(), to.data(), to.nbytes(), lowest, alphabet, per_byte);
}

void define_quantizers(nb::module_ &module) {
    using namespace nb::literals;
    module.def("float_values", &float_values, "source"_a, "out"_a, "kind"_a);
    module.def("float_changes", &float_changes, "source"_a, "base"_a, "out"_a, "kind"_a);
    module.def("float_quotients", &float_quotients, "first"_a, "second"_a, "out"_a, "kind"_a, "clip"_a);
    module.def("sums_of_values", &sums_of_values, "values"_a, "rows_out"_a, "cols_out"_a, "row"_a, "phase"_a,
               "squared"_a);
    module.def("quantize_values", &quantize_values, "values"_a, "inverses"_a, "out"_a, "row"_a, "phase"_a, "bias"_a,
               "level_max"_a);
    module.def("bin_values", &bin_values, "values"_a, "rows"_a, "cols"_a, "bounds"_a, "out"_a, "row"_a, "phase"_a);
    module.def("sums_of_levels", &sums_of_levels, "values"_a, "symbols"_a, "rows"_a, "cols"_a, "out"_a, "row"_a,
               "phase"_a);
    module.def("finish_values", &finish_values, "symbols"_a, "rows"_a, "cols"_a, "codebook"_a, "base"_a,
               "destination"_a, "row"_a, "phase"_a, "kind"_a, "rule"_a, "floor"_a);
    module.def("measure_values", &measure_values, "source"_a, "made"_a, "kind"_a);
    module.def("class_counts", &class_counts, "symbols"_a, "row_classes"_a, "col_classes"_a, "out"_a, "row"_a,
               "phase"_a);
    module.def("stream_sizes", &stream_sizes, "row_classes"_a, "col_classes"_a, "stream_of"_a, "out"_a, "count"_a,
               "row"_a, "phase"_a);
    module.def("split_streams", &move_symbols<&ckstore::split_streams>, "symbols"_a, "row_classes"_a, "col_classes"_a,
               "stream_of"_a, "out"_a, "row"_a, "phase"_a);
    module.def("merge_streams", &move_symbols<&ckstore::merge_streams>, "streams"_a, "row_classes"_a, "col_classes"_a,
               "stream_of"_a, "out"_a, "row"_a, "phase"_a);
    module.def("pack_symbols", &pack_symbols, "symbols"_a, "out"_a, "lowest"_a, "alphabet"_a, "per_byte"_a);
    module.def("unpack_symbols", &unpack_symbols, "packed"_a, "out"_a, "lowest"_a, "alphabet"_a, "per_byte"_a);
}

}  // namespace
