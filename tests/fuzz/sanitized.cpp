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
#include "estimate.hpp"
#include "planes.hpp"
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

bool decode(const Heap &payload, const Heap &plane, bool is_sparse, bool vectors) {
    if (is_sparse) {
        const Heap bitmap((plane.nbytes() + 7) / 8);
        return ckstore::sparse_decode(payload.data(), payload.nbytes(), plane.data(), plane.nbytes(), bitmap.data(),
                                      vectors);
    }
    return ckstore::rans_decode(payload.data(), payload.nbytes(), plane.data(), plane.nbytes(), vectors);
}

Heap encode(const Heap &plane, bool is_sparse, bool vectors) {
    const Heap room(ckstore::rans_bound(plane.nbytes()));
    const auto loop = is_sparse ? ckstore::sparse_encode : ckstore::rans_encode;
    return {room.data(), loop(plane.data(), plane.nbytes(), room.data(), vectors)};
}

// Returns how many hostile payloads were judged.
std::size_t attack_plane(bool is_sparse) {
    const Heap plane = plane_of(is_sparse ? ckstore::kSparseFrom + below(90'000) : length(), is_sparse);
    const Heap payload = encode(plane, is_sparse, true);
    require(payload == encode(plane, is_sparse, false), "loops make different bytes");
    if (payload.nbytes() == 0) {
        return 0;
    }
    for (const bool vectors : {false, true}) {
        const Heap back(plane.nbytes());
        require(decode(payload, back, is_sparse, vectors) && back == plane, "a plane does not come back");
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
        const Heap other(nbytes);
        const bool is_right = decode(hostile, one, is_sparse, true);
        require(is_right == decode(hostile, other, is_sparse, false), "loops judge differently");
        require(!is_right || one == other, "loops decode differently");
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
    }
    std::printf("%ld rounds, %zu hostile payloads, loops: %s and portable\n", rounds, hostile, ckstore::rans_variant());
    return 0;
}
