// Products of matrices by a register-blocked loop over packed panels, and eigenvectors of small symmetric matrices.
//
// Compiled with contraction. The only promise is that sums of integers below 2^24 are exact.

#include <cmath>
#include <cstring>
#include <type_traits>

#include "outer.hpp"
#include "target.hpp"

namespace ckstore {

namespace {

// A tile has as many sums as fit into the registers, which hides the latency of an addition.
constexpr std::size_t kCols = 32, kInner = 256;

// How factors are read: as they are, or as the nearest bf16.
struct Plain {
    static CKSTORE_INLINE float of(float value) { return value; }
    static CKSTORE_INLINE float of(std::int16_t value) { return static_cast<float>(value); }
};

struct Rounded {
    static CKSTORE_INLINE float of(float value) {
        std::uint32_t word;
        std::memcpy(&word, &value, sizeof word);
        word = (word + 0x7FFFu + ((word >> 16) & 1u)) & 0xFFFF0000u;
        std::memcpy(&value, &word, sizeof word);
        return value;
    }
};

// Columns of a part of the right matrix, stored contiguously in each row.
template <class Read, class Number>
CKSTORE_INLINE void pack_panel(const Number *right, Strides strides, std::size_t inner, std::size_t width, float *panel) {
    if (strides.col != 1) {
        for (std::size_t j = 0; j < kCols; ++j) {
            const Number *column = right + j * strides.col;
            for (std::size_t k = 0; k < inner; ++k) {
                panel[k * kCols + j] = j < width ? Read::of(column[k * strides.row]) : 0.0f;
            }
        }
        return;
    }
    for (std::size_t k = 0; k < inner; ++k) {
        for (std::size_t j = 0; j < kCols; ++j) {
            panel[k * kCols + j] = j < width ? Read::of(right[k * strides.row + j]) : 0.0f;
        }
    }
}

// One tile. Every sum is in the order of `k`, so the size of the tile does not change the result.
template <std::size_t kCount>
CKSTORE_INLINE void multiply_tile(const float *left, const float *panel, std::size_t inner, float *out, Strides strides,
                                  std::size_t width, bool is_first) {
    float sums[kCount][kCols] = {};
    for (std::size_t k = 0; k < inner; ++k) {
        for (std::size_t i = 0; i < kCount; ++i) {
            const float factor = left[i * kInner + k];
            for (std::size_t j = 0; j < kCols; ++j) {
                sums[i][j] += factor * panel[k * kCols + j];
            }
        }
    }
    if (strides.col != 1) {
        for (std::size_t j = 0; j < width; ++j) {
            float *column = out + j * strides.col;
            for (std::size_t i = 0; i < kCount; ++i) {
                column[i * strides.row] = is_first ? sums[i][j] : column[i * strides.row] + sums[i][j];
            }
        }
        return;
    }
    for (std::size_t i = 0; i < kCount; ++i) {
        float *row = out + i * strides.row;
        for (std::size_t j = 0; j < width; ++j) {
            row[j] = is_first ? sums[i][j] : row[j] + sums[i][j];
        }
    }
}

template <std::size_t kRows, class Read, class Number>
CKSTORE_INLINE void multiply_panels(const Number *left, const Number *right, Strides of_right, float *out,
                                    Strides of_out, std::size_t rows, std::size_t inner, std::size_t cols) {
    float panel[kInner * kCols], tile[kRows * kInner];
    for (std::size_t k = 0; k < inner; k += kInner) {
        const std::size_t depth = inner - k < kInner ? inner - k : kInner;
        for (std::size_t j = 0; j < cols; j += kCols) {
            const std::size_t width = cols - j < kCols ? cols - j : kCols;
            pack_panel<Read>(right + k * of_right.row + j * of_right.col, of_right, depth, width, panel);
            std::size_t i = 0;
            const auto multiply = [&](auto count) {
                constexpr std::size_t kCount = decltype(count)::value;
                for (; i + kCount <= rows; i += kCount) {
                    for (std::size_t r = 0; r < kCount; ++r) {
                        for (std::size_t d = 0; d < depth; ++d) {
                            tile[r * kInner + d] = Read::of(left[(i + r) * inner + k + d]);
                        }
                    }
                    multiply_tile<kCount>(tile, panel, depth, out + i * of_out.row + j * of_out.col, of_out, width,
                                          k == 0);
                }
            };
            multiply(std::integral_constant<std::size_t, kRows>());
            multiply(std::integral_constant<std::size_t, 4>());
            multiply(std::integral_constant<std::size_t, 1>());
        }
    }
}

CKSTORE_CLONES void multiply_words_narrow(const std::int16_t *left, const std::int16_t *right, Strides strides,
                                          float *out, std::size_t rows, std::size_t inner, std::size_t cols) {
    multiply_panels<4, Plain>(left, right, strides, out, strides, rows, inner, cols);
}

CKSTORE_CLONES void multiply_narrow(const float *left, const float *right, Strides of_right, float *out, Strides of_out,
                                    std::size_t rows, std::size_t inner, std::size_t cols, bool rounds) {
    if (rounds) {
        return multiply_panels<4, Rounded>(left, right, of_right, out, of_out, rows, inner, cols);
    }
    multiply_panels<4, Plain>(left, right, of_right, out, of_out, rows, inner, cols);
}

#if defined(CKSTORE_HAS_WIDE)
// 12 rows by 32 columns are 24 of the 32 registers of 64 bytes.
__attribute__((target("arch=x86-64-v4"))) void multiply_wide(const float *left, const float *right, Strides of_right,
                                                             float *out, Strides of_out, std::size_t rows,
                                                             std::size_t inner, std::size_t cols, bool rounds) {
    if (rounds) {
        return multiply_panels<12, Rounded>(left, right, of_right, out, of_out, rows, inner, cols);
    }
    multiply_panels<12, Plain>(left, right, of_right, out, of_out, rows, inner, cols);
}

bool has_wide() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"); }
#endif

// Applies the reflection 1 - beta v v^T to the rows of `z` from `first` on.
CKSTORE_INLINE void reflect_rows(double *z, const double *v, double beta, std::size_t first, std::size_t n, double *sums) {
    for (std::size_t j = 0; j < n; ++j) {
        sums[j] = 0.0;
    }
    for (std::size_t i = first; i < n; ++i) {
        for (std::size_t j = 0; j < n; ++j) {
            sums[j] += v[i] * z[i * n + j];
        }
    }
    for (std::size_t i = first; i < n; ++i) {
        const double factor = beta * v[i];
        for (std::size_t j = 0; j < n; ++j) {
            z[i * n + j] -= factor * sums[j];
        }
    }
}

// Householder reduction of `a` to a tridiagonal matrix with diagonal `d` and off-diagonal `e`. `z` accumulates the
// reflections.
CKSTORE_CLONES void make_tridiagonal(double *a, double *z, double *d, double *e, double *v, double *w, std::size_t n) {
    for (std::size_t k = 0; k + 2 < n; ++k) {
        double below = 0.0;
        for (std::size_t i = k + 1; i < n; ++i) {
            v[i] = a[i * n + k];
            below += v[i] * v[i];
        }
        d[k] = a[k * n + k];
        const double norm = std::sqrt(below);
        e[k] = v[k + 1] > 0.0 ? -norm : norm;
        v[k + 1] -= e[k];
        // beta = 2 / (v^T v).
        const double square = 2.0 * (below + (v[k + 1] + e[k]) * -e[k]);
        const double beta = square > 0.0 ? 2.0 / square : 0.0;
        if (beta == 0.0 || !std::isfinite(beta)) {
            e[k] = a[(k + 1) * n + k];
            continue;
        }
        // By rows, which equal the columns, because dependent sums take four times as long.
        for (std::size_t j = k + 1; j < n; ++j) {
            w[j] = 0.0;
        }
        for (std::size_t i = k + 1; i < n; ++i) {
            for (std::size_t j = k + 1; j < n; ++j) {
                w[j] += v[i] * a[i * n + j];
            }
        }
        double inner = 0.0;
        for (std::size_t i = k + 1; i < n; ++i) {
            w[i] *= beta;
            inner += w[i] * v[i];
        }
        const double half = 0.5 * beta * inner;
        for (std::size_t i = k + 1; i < n; ++i) {
            w[i] -= half * v[i];
        }
        for (std::size_t i = k + 1; i < n; ++i) {
            for (std::size_t j = k + 1; j < n; ++j) {
                a[i * n + j] -= v[i] * w[j] + w[i] * v[j];
            }
        }
        // From here on `w` is free from its start.
        reflect_rows(z, v, beta, k + 1, n, w);
    }
    if (n > 1) {
        d[n - 2] = a[(n - 2) * n + n - 2];
        e[n - 2] = a[(n - 1) * n + n - 2];
    }
    d[n - 1] = a[(n - 1) * n + n - 1];
    e[n - 1] = 0.0;
}

// One step of the implicit QL iteration on the block from `first` to `last`.
CKSTORE_CLONES void step_ql(double *z, double *d, double *e, std::size_t first, std::size_t last, std::size_t n) {
    const double half = (d[first + 1] - d[first]) / (2.0 * e[first]);
    // Not std::hypot, whose symbol in glibc 2.35 would keep wheels from older systems. Where the square overflows, the
    // shift below is 0, as good as the true one.
    const double root = std::sqrt(half * half + 1.0);
    double g = d[last] - d[first] + e[first] / (half + std::copysign(root, half));
    double s = 1.0, c = 1.0, p = 0.0;
    for (std::size_t i = last; i-- > first;) {
        const double f = s * e[i], b = c * e[i];
        // The largest entry is about 1, so squares that underflow below 1e-154 do not matter.
        const double r = std::sqrt(f * f + g * g);
        e[i + 1] = r;
        if (r == 0.0) {
            d[i + 1] -= p;
            e[last] = 0.0;
            return;
        }
        s = f / r;
        c = g / r;
        const double gap = d[i + 1] - p;
        const double t = (d[i] - gap) * s + 2.0 * c * b;
        p = s * t;
        d[i + 1] = gap + p;
        g = c * t - b;
        double *above = z + i * n, *below = z + (i + 1) * n;
        for (std::size_t j = 0; j < n; ++j) {
            const double x = below[j], y = above[j];
            below[j] = s * y + c * x;
            above[j] = c * y - s * x;
        }
    }
    d[first] -= p;
    e[first] = g;
    e[last] = 0.0;
}

}  // namespace

void multiply_floats_portably(const float *left, const float *right, float *out, std::size_t rows, std::size_t inner,
                              std::size_t cols, bool right_is_turned, bool out_is_turned, bool rounds) {
    const Strides of_right = right_is_turned ? Strides{1, inner} : Strides{cols, 1};
    const Strides of_out = out_is_turned ? Strides{1, rows} : Strides{cols, 1};
    if (inner == 0) {
        std::memset(out, 0, rows * cols * sizeof(float));
        return;
    }
    multiply_narrow(left, right, of_right, out, of_out, rows, inner, cols, rounds);
}

void multiply_floats(const float *left, const float *right, float *out, std::size_t rows, std::size_t inner,
                     std::size_t cols, bool right_is_turned, bool out_is_turned, bool rounds) {
#if defined(CKSTORE_HAS_WIDE)
    if (inner != 0 && has_pairs()) {
        return multiply_in_lanes(left, right, out, rows, inner, cols, right_is_turned, out_is_turned, rounds);
    }
    if (inner != 0 && has_wide()) {
        const Strides of_right = right_is_turned ? Strides{1, inner} : Strides{cols, 1};
        const Strides of_out = out_is_turned ? Strides{1, rows} : Strides{cols, 1};
        return multiply_wide(left, right, of_right, out, of_out, rows, inner, cols, rounds);
    }
#endif
    multiply_floats_portably(left, right, out, rows, inner, cols, right_is_turned, out_is_turned, rounds);
}

void multiply_words_portably(const std::int16_t *left, const std::int16_t *right, float *out, std::size_t rows,
                             std::size_t inner, std::size_t cols) {
    if (inner == 0) {
        std::memset(out, 0, rows * cols * sizeof(float));
        return;
    }
    multiply_words_narrow(left, right, Strides{cols, 1}, out, rows, inner, cols);
}

void multiply_words(const std::int16_t *left, const std::int16_t *right, float *out, std::size_t rows,
                    std::size_t inner, std::size_t cols) {
#if defined(CKSTORE_HAS_WIDE)
    if (inner != 0 && has_pairs()) {
        return multiply_words_in_lanes(left, right, out, rows, inner, cols);
    }
#endif
    multiply_words_portably(left, right, out, rows, inner, cols);
}

CKSTORE_CLONES void products_of_rows(const float *rows, double *out, std::size_t count, std::size_t inner) {
    constexpr std::size_t kDepth = 4;
    double part[kDepth][kRowProductsMax];
    std::memset(out, 0, count * count * sizeof(double));
    for (std::size_t k = 0; k < inner; k += kDepth) {
        for (std::size_t d = 0; d < kDepth; ++d) {
            for (std::size_t i = 0; i < count; ++i) {
                part[d][i] = k + d < inner ? static_cast<double>(rows[i * inner + k + d]) : 0.0;
            }
        }
        for (std::size_t i = 0; i < count; ++i) {
            const double a = part[0][i], b = part[1][i], c = part[2][i], d = part[3][i];
            double *row = out + i * count;
            for (std::size_t j = i; j < count; ++j) {
                row[j] += (a * part[0][j] + b * part[1][j]) + (c * part[2][j] + d * part[3][j]);
            }
        }
    }
}

CKSTORE_CLONES bool inverse_root(double *matrix, double *inverse, std::size_t n) {
    // By rows: a multiple of a row above is subtracted from each row, both in the factor and in its inverse.
    std::memset(inverse, 0, n * n * sizeof(double));
    for (std::size_t k = 0; k < n; ++k) {
        double *row = matrix + k * n, *of_inverse = inverse + k * n;
        const double pivot = row[k];
        if (!(pivot > 0.0) || !std::isfinite(pivot)) {
            return false;
        }
        const double factor = 1.0 / std::sqrt(pivot);
        of_inverse[k] = 1.0;
        for (std::size_t j = k; j < n; ++j) {
            row[j] *= factor;
        }
        for (std::size_t j = 0; j <= k; ++j) {
            of_inverse[j] *= factor;
        }
        for (std::size_t i = k + 1; i < n; ++i) {
            const double multiple = row[i];
            double *below = matrix + i * n, *inverse_below = inverse + i * n;
            for (std::size_t j = i; j < n; ++j) {
                below[j] -= multiple * row[j];
            }
            for (std::size_t j = 0; j <= k; ++j) {
                inverse_below[j] -= multiple * of_inverse[j];
            }
        }
    }
    return true;
}

bool symmetric_eigen(double *matrix, double *vectors, double *values, double *work, std::size_t n) {
    constexpr int kStepsMax = 60;
    constexpr double kEpsilon = 2.220446049250313e-16;
    std::memset(vectors, 0, n * n * sizeof(double));
    for (std::size_t i = 0; i < n; ++i) {
        vectors[i * n + i] = 1.0;
    }
    if (n == 0) {
        return true;
    }
    double most = 0.0;
    for (std::size_t i = 0; i < n * n; ++i) {
        if (!std::isfinite(matrix[i])) {
            return false;
        }
        most = std::fmax(most, std::fabs(matrix[i]));
    }
    if (most > 0.0) {
        // Scaled by a power of two, which is exact.
        most = std::ldexp(1.0, std::ilogb(most));
        for (std::size_t i = 0; i < n * n; ++i) {
            matrix[i] /= most;
        }
    }
    double *e = work;
    make_tridiagonal(matrix, vectors, values, e, work + n, work + 2 * n, n);
    // Relative to the whole matrix: if its rank is low, neighbouring entries are only rounding errors.
    double norm = 0.0;
    for (std::size_t i = 0; i < n; ++i) {
        norm = std::fmax(norm, std::fabs(values[i]) + std::fabs(e[i]));
    }
    for (std::size_t first = 0; first < n; ++first) {
        for (int step = 0;; ++step) {
            std::size_t last = first;
            while (last + 1 < n && std::fabs(e[last]) > kEpsilon * norm) {
                ++last;
            }
            if (last == first) {
                break;
            }
            if (step == kStepsMax) {
                return false;
            }
            step_ql(vectors, values, e, first, last, n);
        }
    }
    for (std::size_t i = 0; i < n; ++i) {
        values[i] *= most;
    }
    return true;
}

}  // namespace ckstore
