// Python bindings of the loops around products; included only by module.cpp, after module_outer.hpp.

#pragma once

#include "directions.hpp"
#include "module_outer.hpp"

namespace {

// Length of each of `count` vectors in a buffer.
std::size_t checked_length(std::size_t numbers, std::size_t vectors) {
    require(numbers == 0 ? vectors == 0 : vectors != 0 && numbers % vectors == 0, "lengths differ");
    return vectors == 0 ? 0 : numbers / vectors;
}

nb::tuple take_roots(nb::handle values, nb::handle rows, nb::handle cols, std::size_t row, std::size_t phase) {
    Bytes from(values, true), above(rows, true), beside(cols, true);
    const ckstore::Matrix matrix = checked_matrix(checked_count(from.nbytes(), sizeof(float)), row, phase);
    require_edges(matrix, above, beside, sizeof(double));
    float *x = numbers_of<float>(from);
    double *row_sums = numbers_of<double>(above), *col_sums = numbers_of<double>(beside);
    ckstore::Extremes found;
    {
        InLoop loop;
        found = ckstore::take_roots(x, row_sums, col_sums, matrix);
    }
    return nb::make_tuple(found.least, found.greatest);
}

void subtract_ones(nb::handle values, nb::handle rows, nb::handle cols, std::size_t row, std::size_t phase) {
    Bytes from(values, true), above(rows, false), beside(cols, false);
    const ckstore::Matrix matrix = checked_matrix(checked_count(from.nbytes(), sizeof(float)), row, phase);
    require_edges(matrix, above, beside, sizeof(float));
    const ckstore::Scales scales{numbers_of<float>(above), numbers_of<float>(beside)};
    float *x = numbers_of<float>(from);
    InLoop loop;
    ckstore::subtract_ones(x, scales, matrix);
}

nb::tuple missed_squares(nb::handle values, nb::handle product, double scale) {
    Bytes given(values, false), made(product, false);
    const std::size_t count = checked_count(given.nbytes(), sizeof(float));
    require_equal(made.nbytes(), given.nbytes());
    const float *a = numbers_of<float>(given), *b = numbers_of<float>(made);
    ckstore::Squares found;
    {
        InLoop loop;
        found = ckstore::missed_squares(a, b, static_cast<float>(scale), count);
    }
    return nb::make_tuple(found.missed, found.given);
}

double round_vectors(nb::handle vectors, nb::handle factors, nb::handle out) {
    Bytes from(vectors, false), counts(factors, false), to(out, true);
    const std::size_t numbers = checked_count(from.nbytes(), sizeof(float));
    const std::size_t count = checked_count(counts.nbytes(), sizeof(float));
    require_equal(to.nbytes(), numbers * sizeof(std::int16_t));
    const std::size_t length = checked_length(numbers, count);
    const float *values = numbers_of<float>(from), *multiples = numbers_of<float>(counts);
    std::int16_t *words = numbers_of<std::int16_t>(to);
    InLoop loop;
    return static_cast<double>(ckstore::round_vectors(values, multiples, words, count, length));
}

void split_zigzag(nb::handle words, nb::handle low, nb::handle high, nb::handle sums) {
    Bytes from(words, false), lower(low, true), upper(high, true), squares(sums, true);
    const std::size_t numbers = checked_count(from.nbytes(), sizeof(std::int16_t));
    const std::size_t count = checked_count(squares.nbytes(), sizeof(double));
    require_equal(lower.nbytes(), numbers);
    require_equal(upper.nbytes(), numbers);
    const std::size_t length = checked_length(numbers, count);
    const std::int16_t *values = numbers_of<std::int16_t>(from);
    double *found = numbers_of<double>(squares);
    InLoop loop;
    ckstore::split_zigzag(values, lower.data(), upper.data(), found, count, length);
}

void define_directions(nb::module_ &module) {
    using namespace nb::literals;
    module.def("take_roots", &take_roots, "values"_a, "rows_out"_a, "cols_out"_a, "row"_a, "phase"_a);
    module.def("subtract_ones", &subtract_ones, "values"_a, "rows"_a, "cols"_a, "row"_a, "phase"_a);
    module.def("missed_squares", &missed_squares, "values"_a, "product"_a, "scale"_a);
    module.def("round_vectors", &round_vectors, "vectors"_a, "factors"_a, "out"_a);
    module.def("split_zigzag", &split_zigzag, "words"_a, "low"_a, "high"_a, "sums"_a);
}

}  // namespace
