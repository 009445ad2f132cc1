#include "sparse.hpp"

#include <cstring>

#include "rans.hpp"
#include "rans_blocks.hpp"
#include "rans_model.hpp"
#include "rans_steps.hpp"
#include "target.hpp"

namespace ckstore {
namespace {

constexpr std::size_t kHeader = 9;      // common byte (u8), number of others (u32), length of coded bitmap (u32)
constexpr std::size_t kOthersPart = 4;  // at most one byte in four differs
constexpr unsigned kSpacing = 6;        // one run in 64 is sampled to find the common byte

CKSTORE_CLONES std::size_t count_bits(const std::uint8_t *bitmap, std::size_t nbytes) {
    std::size_t bits = 0;
    std::size_t i = 0;
    for (; i + 8 <= nbytes; i += 8) {
        std::uint64_t word;
        std::memcpy(&word, bitmap + i, sizeof word);
        // Counts the bits of pairs, half-bytes, bytes, and the word.
        word -= word >> 1 & 0x5555555555555555u;
        word = (word & 0x3333333333333333u) + (word >> 2 & 0x3333333333333333u);
        word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0Fu;
        bits += word * 0x0101010101010101u >> 56;
    }
    for (; i < nbytes; ++i) {
        for (std::uint32_t byte = bitmap[i]; byte != 0; byte &= byte - 1) {
            ++bits;
        }
    }
    return bits;
}

}  // namespace

std::size_t sparse_encode(const std::uint8_t *plane, std::size_t count, std::uint8_t *out, const Loops &loops) {
    if (count < kSparseFrom) {
        return 0;
    }
    std::uint32_t counts[kSymbols];
    const std::uint32_t total = count_sample(plane, count, kSpacing, counts);
    std::size_t common = 0;
    for (std::size_t s = 1; s < kSymbols; ++s) {
        common = counts[s] > counts[common] ? s : common;
    }
    if (total - counts[common] > total / kOthersPart) {
        return 0;
    }
    // Bitmap and other bytes are at the end of `out`; their coded form ends long before that.
    const std::size_t limit = count / kOthersPart;
    const std::size_t bitmap_nbytes = (count + 7) / 8;
    std::uint8_t *const others = out + rans_bound(count) - limit - kLanes;
    std::uint8_t *const bitmap = others - bitmap_nbytes - sizeof(std::uint64_t);
    const std::size_t other_count =
        loops.take_others(plane, count, static_cast<std::uint8_t>(common), bitmap, others, limit);
    if (other_count > limit || other_count == 0) {
        return 0;
    }
    const std::size_t coded = rans_encode(bitmap, bitmap_nbytes, out + kHeader, loops);
    const std::size_t nbytes =
        kHeader + coded + rans_encode(others, other_count, out + kHeader + coded, loops);
    out[0] = static_cast<std::uint8_t>(common);
    put_u32(out + 1, static_cast<std::uint32_t>(other_count));
    put_u32(out + 5, static_cast<std::uint32_t>(coded));
    return nbytes;
}

bool sparse_decode(const std::uint8_t *payload, std::size_t nbytes, std::uint8_t *plane, std::size_t count,
                   std::uint8_t *bitmap, const Loops &loops) {
    if (nbytes < kHeader) {
        return false;
    }
    const std::size_t other_count = get_u32(payload + 1);
    const std::size_t coded = get_u32(payload + 5);
    const std::size_t bitmap_nbytes = (count + 7) / 8;
    if (other_count == 0 || other_count > count || coded > nbytes - kHeader) {
        return false;
    }
    const Piece coded_bitmap{payload + kHeader, coded};
    const Piece coded_others{payload + kHeader + coded, nbytes - kHeader - coded};
    TableReader bitmap_tables;
    TableReader tables;
    Bodies bodies(loops);
    // The other bytes are decoded to the end of the plane and then spread.
    if (!decode_blocks(coded_bitmap, bitmap, bitmap_nbytes, bitmap_tables, bodies) ||
        !decode_blocks(coded_others, plane + count - other_count, other_count, tables, bodies) || !bodies.finish()) {
        return false;
    }
    const bool has_bits_beyond = count % 8 != 0 && bitmap[bitmap_nbytes - 1] >> (count % 8) != 0;
    if (has_bits_beyond || count_bits(bitmap, bitmap_nbytes) != other_count) {
        return false;
    }
    loops.put_others(plane, count, payload[0], bitmap, other_count);
    return true;
}

}  // namespace ckstore
