// Python bindings of the loops over products; included only by module.cpp, after module_quant.hpp.

#pragma once

#include "module_quant.hpp"
#include "outer.hpp"

namespace {

constexpr std::size_t kSideMax = std::size_t{1} << 31;

template <auto kMultiply>
void multiply_floats(nb::handle left, nb::handle right, nb::handle out, std::size_t rows, std::size_t inner,
                     std::size_t cols, bool right_is_turned, bool out_is_turned, bool rounds) {
    Bytes one(left, false), other(right, false), to(out, true);
    require(rows < kSideMax && inner < kSideMax && cols < kSideMax, "a matrix has too many rows or columns");
    require_equal(one.nbytes(), rows * inner * sizeof(float));
    require_equal(other.nbytes(), inner * cols * sizeof(float));
    require_equal(to.nbytes(), rows * cols * sizeof(float));
    const float *a = numbers_of<float>(one), *b = numbers_of<float>(other);
    float *c = numbers_of<float>(to);
    InLoop loop;
    kMultiply(a, b, c, rows, inner, cols, right_is_turned, out_is_turned, rounds);
}

template <auto kMultiply>
void multiply_words(nb::handle left, nb::handle right, nb::handle out, std::size_t rows, std::size_t inner,
                    std::size_t cols) {
    Bytes one(left, false), other(right, false), to(out, true);
    require(rows < kSideMax && inner < kSideMax && cols < kSideMax, "a matrix has too many rows or columns");
    require_equal(one.nbytes(), rows * inner * sizeof(std::int16_t));
    require_equal(other.nbytes(), inner * cols * sizeof(std::int16_t));
    require_equal(to.nbytes(), rows * cols * sizeof(float));
    const std::int16_t *a = numbers_of<std::int16_t>(one), *b = numbers_of<std::int16_t>(other);
    float *c = numbers_of<float>(to);
    InLoop loop;
    kMultiply(a, b, c, rows, inner, cols);
}

bool symmetric_eigen(nb::handle matrix, nb::handle vectors, nb::handle values, nb::handle work) {
    Bytes square(matrix, true), rows(vectors, true), found(values, true), room(work, true);
    const std::size_t n = checked_count(found.nbytes(), 8);
    require(n <= 4096, "a matrix has too many rows or columns");
    require_equal(square.nbytes(), n * n * sizeof(double));
    require_equal(rows.nbytes(), square.nbytes());
    require_equal(room.nbytes(), 3 * n * sizeof(double));
    double *a = numbers_of<double>(square), *z = numbers_of<double>(rows), *d = numbers_of<double>(found);
    double *space = numbers_of<double>(room);
    InLoop loop;
    return ckstore::symmetric_eigen(a, z, d, space, n);
}

void products_of_rows(nb::handle rows, nb::handle out, std::size_t count, std::size_t inner) {
    Bytes from(rows, false), to(out, true);
    require(count <= ckstore::kRowProductsMax && inner < kSideMax, "a matrix has too many rows or columns");
    require_equal(from.nbytes(), count * inner * sizeof(float));
    require_equal(to.nbytes(), count * count * sizeof(double));
    const float *values = numbers_of<float>(from);
    double *sums = numbers_of<double>(to);
    InLoop loop;
    ckstore::products_of_rows(values, sums, count, inner);
}

bool inverse_root(nb::handle matrix, nb::handle inverse) {
    Bytes square(matrix, true), out(inverse, true);
    std::size_t n = 0;
    while (n * n * sizeof(double) < square.nbytes() && n <= 4096) {
        ++n;
    }
    require(n <= 4096, "a matrix has too many rows or columns");
    require_equal(square.nbytes(), n * n * sizeof(double));
    require_equal(out.nbytes(), square.nbytes());
    double *a = numbers_of<double>(square), *b = numbers_of<double>(out);
    InLoop loop;
    return ckstore::inverse_root(a, b, n);
}

double finish_outer(nb::handle product, nb::handle rows, nb::handle cols, nb::handle base, nb::handle destination,
                    std::size_t row, std::size_t phase, int kind, int rule, double scale, double limit) {
    Bytes whole(product, false), above(rows, false), beside(cols, false), other(base, false), to(destination, true);
    const ckstore::Matrix matrix = checked_matrix(checked_values(to.nbytes(), kind), row, phase);
    require(rule >= ckstore::kOuterAdd && rule <= ckstore::kOuterSquare, "rule must be 0, 1 or 2");
    require_equal(whole.nbytes(), matrix.row_count() * matrix.row * sizeof(float));
    const bool is_square = rule == ckstore::kOuterSquare;
    require_equal(above.nbytes(), is_square ? matrix.row_count() * sizeof(float) : 0);
    require_equal(beside.nbytes(), is_square ? matrix.row * sizeof(float) : 0);
    require_equal(other.nbytes(), is_square ? 0 : to.nbytes());
    const float *values = numbers_of<float>(whole);
    const ckstore::Scales scales{numbers_of<float>(above), numbers_of<float>(beside)};
    InLoop loop;
    return static_cast<double>(ckstore::finish_outer(values, scales, other.data(), to.data(), matrix, kind, rule,
                                                     static_cast<float>(scale), static_cast<float>(limit)));
}

void define_products(nb::module_ &module) {
    using namespace nb::literals;
    module.def("multiply_floats", &multiply_floats<ckstore::multiply_floats>, "left"_a, "right"_a, "out"_a, "rows"_a,
               "inner"_a, "cols"_a, "right_is_turned"_a = false, "out_is_turned"_a = false, "rounds"_a = false);
    module.def("multiply_floats_portably", &multiply_floats<ckstore::multiply_floats_portably>, "left"_a, "right"_a,
               "out"_a, "rows"_a, "inner"_a, "cols"_a, "right_is_turned"_a = false, "out_is_turned"_a = false,
               "rounds"_a = false);
    module.def("multiply_words", &multiply_words<ckstore::multiply_words>, "left"_a, "right"_a, "out"_a, "rows"_a,
               "inner"_a, "cols"_a);
    module.def("multiply_words_portably", &multiply_words<ckstore::multiply_words_portably>, "left"_a, "right"_a,
               "out"_a, "rows"_a, "inner"_a, "cols"_a);
    module.def("symmetric_eigen", &symmetric_eigen, "matrix"_a, "vectors"_a, "values"_a, "work"_a);
    module.def("products_of_rows", &products_of_rows, "rows"_a, "out"_a, "count"_a, "inner"_a);
    module.def("inverse_root", &inverse_root, "matrix"_a, "inverse"_a);
    module.def("finish_outer", &finish_outer, "product"_a, "rows"_a, "cols"_a, "base"_a, "destination"_a, "row"_a,
               "phase"_a, "kind"_a, "rule"_a, "scale"_a, "limit"_a);
}

}  // namespace
