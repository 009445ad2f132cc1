// The native loops under the address and undefined-behaviour sanitizers: round trips, and hostile payloads.
//
// Every buffer is as long as it is said to be and lies on the heap, so that the sanitizer sees each byte beyond.
// Usage: sanitized ROUNDS SEED. Prints what was done; any fault ends it with an error.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "bytes.hpp"
#include "delta.hpp"
#include "directions.hpp"
#include "estimate.hpp"
#include "outer.hpp"
#include "planes.hpp"
#include "quant.hpp"
#include "rans.hpp"
#include "rounding.hpp"
#include "sparse.hpp"

namespace {

std::mt19937_64 random_words;

std::size_t below(std::size_t bound) { return bound == 0 ? 0 : random_words() % bound; }

// Exactly so many bytes.
class Heap {
public:
    explicit Heap(std::size_t nbytes) : bytes_(new std::uint8_t[nbytes]), nbytes_(nbytes) {}
    Heap(const std::uint8_t *from, std::size_t nbytes) : Heap(nbytes) {
        if (nbytes != 0) {
            std::memcpy(bytes_.get(), from, nbytes);
        }
    }

    std::uint8_t *data() const { return bytes_.get(); }
    std::size_t nbytes() const { return nbytes_; }
    std::uint8_t &operator[](std::size_t at) const { return bytes_[at]; }
    bool operator==(const Heap &other) const {
        return nbytes_ == other.nbytes_ && ckstore::equal_bytes(data(), other.data(), nbytes_);
    }

private:
    std::unique_ptr<std::uint8_t[]> bytes_;
    std::size_t nbytes_;
};

void require(bool holds, const char *what) {
    if (!holds) {
        std::fprintf(stderr, "wrong: %s\n", what);
        std::exit(1);
    }
}

Heap noise(std::size_t nbytes) {
    Heap made(nbytes);
    for (std::size_t i = 0; i < nbytes; ++i) {
        made[i] = static_cast<std::uint8_t>(random_words());
    }
    return made;
}

// A plane of a few symbols, most of which are the first one if it is sparse.
Heap plane_of(std::size_t nbytes, bool is_sparse) {
    Heap plane(nbytes);
    const std::size_t symbols = 1 + below(255);
    for (std::size_t i = 0; i < nbytes; ++i) {
        const bool is_common = is_sparse && below(10) != 0;
        plane[i] = static_cast<std::uint8_t>(is_common ? 3 : std::min(below(symbols + 1), below(symbols + 1)));
    }
    return plane;
}

std::size_t length() {
    const std::size_t kind = below(8);
    return kind == 0 ? below(3) : kind == 1 ? below(400'000) : kind == 2 ? 262'144 + below(3) : below(9'000);
}

bool decode(const Heap &payload, const Heap &plane, bool is_sparse, const ckstore::Loops &loops) {
    if (is_sparse) {
        const Heap bitmap((plane.nbytes() + 7) / 8);
        return ckstore::sparse_decode(payload.data(), payload.nbytes(), plane.data(), plane.nbytes(), bitmap.data(),
                                      loops);
    }
    return ckstore::rans_decode(payload.data(), payload.nbytes(), plane.data(), plane.nbytes(), loops);
}

Heap encode(const Heap &plane, bool is_sparse, const ckstore::Loops &loops) {
    const Heap room(ckstore::rans_bound(plane.nbytes()));
    const auto encoder = is_sparse ? ckstore::sparse_encode : ckstore::rans_encode;
    return {room.data(), encoder(plane.data(), plane.nbytes(), room.data(), loops)};
}

// Returns how many hostile payloads were judged.
std::size_t attack_plane(bool is_sparse) {
    const Heap plane = plane_of(is_sparse ? ckstore::kSparseFrom + below(90'000) : length(), is_sparse);
    const ckstore::Loops &fastest = *ckstore::loops_here()[0];
    const Heap payload = encode(plane, is_sparse, fastest);
    if (payload.nbytes() == 0) {
        return 0;
    }
    for (const ckstore::Loops *const *loops = ckstore::loops_here(); *loops != nullptr; ++loops) {
        require(payload == encode(plane, is_sparse, **loops), "loops make different bytes");
        const Heap back(plane.nbytes());
        require(decode(payload, back, is_sparse, **loops) && back == plane, "a plane does not come back");
    }
    constexpr std::size_t kAttacks = 6;
    for (std::size_t attack = 0; attack < kAttacks; ++attack) {
        const Heap hostile(payload.data(), attack == 5 ? below(payload.nbytes()) : payload.nbytes());
        const std::size_t reach = attack < 3 ? std::min<std::size_t>(hostile.nbytes(), 300) : hostile.nbytes();
        for (std::size_t change = 1 + below(3); change > 0 && reach > 0; --change) {
            hostile[below(reach)] = static_cast<std::uint8_t>(random_words());
        }
        const std::size_t nbytes = attack == 4 ? plane.nbytes() + below(130) : plane.nbytes();
        const Heap one(nbytes);
        const bool is_right = decode(hostile, one, is_sparse, fastest);
        for (const ckstore::Loops *const *loops = ckstore::loops_here() + 1; *loops != nullptr; ++loops) {
            const Heap other(nbytes);
            require(is_right == decode(hostile, other, is_sparse, **loops), "loops judge differently");
            require(!is_right || one == other, "loops decode differently");
        }
    }
    return kAttacks;
}

void split_and_merge(std::size_t width, bool flag) {
    const std::size_t count = below(5) == 0 ? below(40'000) : below(300);
    const Heap source = noise(count * width);
    const Heap base = noise(count * width);
    const Heap planes(count * width);
    const std::uint8_t *starts[ckstore::kWidthMax];
    for (std::size_t j = 0; j < width; ++j) {
        starts[j] = planes.data() + j * count;
    }
    const Heap back(count * width);
    ckstore::split_planes(source.data(), planes.data(), count, width, flag);
    ckstore::merge_planes(starts, back.data(), count, width, flag);
    require(back == source, "elements do not come back");
    ckstore::split_delta(source.data(), base.data(), planes.data(), count, width, flag);
    ckstore::merge_delta(starts, base.data(), back.data(), count, width, flag);
    require(back == source, "elements do not come back from a base");
    const Heap onto(base.data(), base.nbytes());
    ckstore::merge_delta(starts, onto.data(), onto.data(), count, width, flag);
    require(onto == source, "elements do not come back onto a base");
    if (count != 0) {
        double bits[ckstore::kWidthMax];
        ckstore::plane_bits(source.data(), bits, count, width, flag);
        ckstore::delta_bits(source.data(), base.data(), bits, count, width, flag);
        require(bits[0] >= 0.0 && bits[width - 1] <= 8.01, "an estimate is out of bounds");
    }
}

void round_and_compare(int kind) {
    const std::size_t count = below(5) == 0 ? below(40'000) : below(300);
    const Heap source = noise(4 * count);
    const Heap rounded(2 * count);
    ckstore::round_floats(source.data(), rounded.data(), count, kind);
    require(ckstore::is_rounding(source.data(), rounded.data(), count, kind), "a rounding is not known again");
}

void look_at_bytes() {
    const Heap source = noise(length());
    const Heap copy(source.nbytes());
    std::uint32_t counts[256];
    ckstore::copy_bytes(source.data(), copy.data(), source.nbytes());
    ckstore::histogram(source.data(), source.nbytes(), counts);
    require(copy == source, "a copy differs");
    require(source.nbytes() < 300 || !ckstore::is_constant(source.data(), source.nbytes()), "noise is constant");
}

// Exactly so many numbers.
template <class Number>
class Numbers {
public:
    explicit Numbers(std::size_t count) : numbers_(new Number[count]()), count_(count) {}

    Number *data() const { return numbers_.get(); }
    Number &operator[](std::size_t at) const { return numbers_[at]; }
    std::size_t count() const { return count_; }

private:
    std::unique_ptr<Number[]> numbers_;
    std::size_t count_;
};

Numbers<float> floats(std::size_t count) {
    Numbers<float> made(count);
    for (std::size_t i = 0; i < count; ++i) {
        made[i] = (static_cast<float>(below(2001)) - 1000.0f) * 0.001f;
    }
    return made;
}

Numbers<std::uint8_t> numbers_below(std::size_t count, std::size_t bound) {
    Numbers<std::uint8_t> made(count);
    for (std::size_t i = 0; i < count; ++i) {
        made[i] = static_cast<std::uint8_t>(below(bound));
    }
    return made;
}

// Values of any kind through every loop of the quantizers; hostile elements and symbols are as good as others.
void quantize_and_finish(int kind) {
    const ckstore::Matrix whole{below(5000), 16 + below(300), 0};
    const ckstore::Matrix matrix{whole.count, whole.row, below(whole.row)};
    const std::size_t rows = matrix.row_count(), nbytes = matrix.count * ckstore::value_width(kind);
    const Heap plain = noise(nbytes), base = noise(nbytes), made(nbytes);
    const Numbers<float> values(matrix.count), above = floats(rows), beside = floats(matrix.row), book = floats(256);
    const ckstore::Scales scales{above.data(), beside.data()};
    ckstore::float_changes(plain.data(), base.data(), values.data(), matrix.count, kind);
    ckstore::float_quotients(plain.data(), base.data(), values.data(), matrix.count, kind, 3.0f);
    ckstore::float_values(plain.data(), values.data(), matrix.count, kind);
    ckstore::measure_values(plain.data(), base.data(), matrix.count, kind);
    const Numbers<double> row_sums(rows), col_sums(matrix.row), totals(512);
    ckstore::sums_of_values(values.data(), row_sums.data(), col_sums.data(), matrix, below(2) == 0);
    const Numbers<std::uint8_t> symbols(matrix.count);
    ckstore::quantize_values(values.data(), above.data(), symbols.data(), matrix, 0.4f, 1 + static_cast<int>(below(127)));
    const Numbers<float> bounds = floats(below(256));
    std::sort(bounds.data(), bounds.data() + bounds.count());
    ckstore::bin_values(values.data(), scales, bounds.data(), bounds.count(), symbols.data(), matrix);
    ckstore::sums_of_levels(values.data(), symbols.data(), scales, totals.data(), matrix);
    for (int rule = ckstore::kFinishAdd; rule <= ckstore::kFinishPlain; ++rule) {
        const bool has_base = rule == ckstore::kFinishAdd || rule == ckstore::kFinishRoot;
        ckstore::finish_values(symbols.data(), scales, book.data(), has_base ? base.data() : nullptr, made.data(), matrix,
                               kind, rule, 0.001f);
    }
    ckstore::finish_values(symbols.data(), scales, book.data(), base.data(), base.data(), matrix, kind, 0, 0.0f);
}

// Values, or any bits that four bytes have.
Numbers<float> any_floats(std::size_t count) {
    Numbers<float> made = floats(count);
    if (count != 0 && below(2) == 0) {
        const Heap hostile = noise(count * sizeof(float));
        std::memcpy(made.data(), hostile.data(), count * sizeof(float));
    }
    return made;
}

// What encoders do around products, with any values.
void round_and_split() {
    const std::size_t row = 16 + below(300);
    const ckstore::Matrix matrix{below(5000), row, below(row)};
    const Numbers<float> values = any_floats(matrix.count), others = any_floats(matrix.count);
    const Numbers<float> above = any_floats(matrix.row_count()), beside = any_floats(row);
    const Numbers<double> row_sums(matrix.row_count()), col_sums(row);
    ckstore::missed_squares(values.data(), others.data(), 0.01f, matrix.count);
    ckstore::take_roots(values.data(), row_sums.data(), col_sums.data(), matrix);
    ckstore::subtract_ones(values.data(), {above.data(), beside.data()}, matrix);
    const std::size_t count = below(20), length = 1 + below(300);
    const Numbers<float> vectors = any_floats(count * length), factors = any_floats(count);
    Numbers<std::int16_t> words(count * length);
    ckstore::round_vectors(vectors.data(), factors.data(), words.data(), count, length);
    const Numbers<std::uint8_t> low(count * length), high(count * length);
    const Numbers<double> sums(count);
    for (std::size_t i = 0; i < words.count() && below(8) != 0; ++i) {
        words[i] = static_cast<std::int16_t>(static_cast<int>(below(65536)) - 32768);
    }
    ckstore::split_zigzag(words.data(), low.data(), high.data(), sums.data(), count, length);
    for (std::size_t i = 0; i < count; ++i) {
        std::int64_t sum = 0;
        for (std::size_t j = i * length; j < (i + 1) * length; ++j) {
            const int folded = low[j] | high[j] << 8;
            require(words[j] == ((folded >> 1) ^ -(folded & 1)), "words came back");
            sum += std::int64_t{words[j]} * words[j];
        }
        require(sums[i] == static_cast<double>(sum), "squares were summed");
    }
}

// Symbols into streams and bytes and back; bytes that hold no symbols are told.
void pack_and_unpack() {
    const std::size_t row = 16 + below(300);
    const ckstore::Matrix matrix{below(5000), row, below(row)};
    const unsigned alphabet = 2 + static_cast<unsigned>(below(255));
    const unsigned lowest = static_cast<unsigned>(below(257 - alphabet));
    unsigned most = 1;
    for (unsigned power = alphabet * alphabet; power <= 256 && most < 8; power *= alphabet) {
        ++most;
    }
    const unsigned per_byte = 1 + static_cast<unsigned>(below(most));
    Numbers<std::uint8_t> symbols = numbers_below(matrix.count, alphabet);
    for (std::size_t i = 0; i < matrix.count; ++i) {
        symbols[i] = static_cast<std::uint8_t>(symbols[i] + lowest);
    }
    const Numbers<std::uint8_t> above = numbers_below(matrix.row_count(), 16), beside = numbers_below(row, 16);
    const Numbers<std::uint8_t> stream_of = numbers_below(ckstore::kClassSums, 1 + below(16));
    const ckstore::Classes classes{above.data(), beside.data(), stream_of.data()};
    const Numbers<std::uint8_t> split(matrix.count), merged(matrix.count), back(matrix.count);
    const Numbers<std::uint32_t> counts(ckstore::kClassSums * ckstore::kCodes);
    const Numbers<std::uint8_t> packed((matrix.count + per_byte - 1) / per_byte);
    ckstore::class_counts(symbols.data(), classes, counts.data(), matrix);
    ckstore::split_streams(symbols.data(), classes, split.data(), matrix);
    ckstore::pack_symbols(split.data(), matrix.count, packed.data(), lowest, alphabet, per_byte);
    require(ckstore::unpack_symbols(packed.data(), back.data(), matrix.count, lowest, alphabet, per_byte), "own symbols");
    ckstore::merge_streams(back.data(), classes, merged.data(), matrix);
    require(std::equal(merged.data(), merged.data() + matrix.count, symbols.data()), "symbols came back");
    const Heap hostile = noise(packed.count());
    ckstore::unpack_symbols(hostile.data(), back.data(), matrix.count, lowest, alphabet, per_byte);
}

// Products of any shape, by vectors and portably: of integers both are exact.
void multiply_and_take_roots() {
    const std::size_t rows = below(50), cols = below(50), inner = below(4) == 0 ? below(1200) : below(70);
    Numbers<std::int16_t> words(rows * inner), others(inner * cols);
    Numbers<float> left(rows * inner), right(inner * cols), out(rows * cols), again(rows * cols);
    for (std::size_t i = 0; i < left.count(); ++i) {
        left[i] = static_cast<float>(words[i] = static_cast<std::int16_t>(static_cast<int>(below(199)) - 99));
    }
    for (std::size_t i = 0; i < right.count(); ++i) {
        right[i] = static_cast<float>(others[i] = static_cast<std::int16_t>(static_cast<int>(below(99)) - 49));
    }
    for (const bool turned : {false, true}) {
        for (const bool rounds : {false, true}) {
            ckstore::multiply_floats(left.data(), right.data(), out.data(), rows, inner, cols, turned, turned, rounds);
            ckstore::multiply_floats_portably(left.data(), right.data(), again.data(), rows, inner, cols, turned, turned,
                                              rounds);
            require(std::equal(out.data(), out.data() + out.count(), again.data()), "products differ");
        }
    }
    ckstore::multiply_words(words.data(), others.data(), out.data(), rows, inner, cols);
    ckstore::multiply_words_portably(words.data(), others.data(), again.data(), rows, inner, cols);
    require(std::equal(out.data(), out.data() + out.count(), again.data()), "products of words differ");
    Numbers<double> square(rows * rows), inverse(rows * rows), vectors(rows * rows), values(rows), work(3 * rows);
    ckstore::products_of_rows(left.data(), square.data(), rows, inner);
    for (std::size_t i = 0; i < rows; ++i) {
        square[i * rows + i] += 1.0;
        for (std::size_t j = 0; j < i; ++j) {
            square[i * rows + j] = square[j * rows + i];
        }
    }
    Numbers<double> used(rows * rows);
    std::copy(square.data(), square.data() + square.count(), used.data());
    require(ckstore::inverse_root(used.data(), inverse.data(), rows), "a positive matrix has a root");
    require(ckstore::symmetric_eigen(square.data(), vectors.data(), values.data(), work.data(), rows), "eigenvectors");
}

}  // namespace

int main(int argc, char **argv) {
    const long rounds = argc > 1 ? std::atol(argv[1]) : 100;
    random_words.seed(argc > 2 ? static_cast<std::uint64_t>(std::atol(argv[2])) : 1);
    std::size_t hostile = 0;
    for (long round = 0; round < rounds; ++round) {
        hostile += attack_plane(false);
        hostile += attack_plane(true);
        for (const std::size_t width : {1, 2, 4, 8}) {
            split_and_merge(width, round % 2 == 0);
        }
        round_and_compare(round % 2 == 0 ? ckstore::kBf16 : ckstore::kFp16);
        look_at_bytes();
        quantize_and_finish(static_cast<int>(round % 3));
        pack_and_unpack();
        multiply_and_take_roots();
        round_and_split();
    }
    std::printf("%ld rounds, %zu hostile payloads, loops:", rounds, hostile);
    for (const ckstore::Loops *const *loops = ckstore::loops_here(); *loops != nullptr; ++loops) {
        std::printf(" %s", ckstore::name_of(**loops));
    }
    std::printf("\n");
    return 0;
}
