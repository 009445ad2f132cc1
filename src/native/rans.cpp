#include "rans.hpp"

#include <cstring>

#include "rans_blocks.hpp"
#include "rans_model.hpp"
#include "rans_steps.hpp"

namespace ckstore {
namespace {

std::size_t put_block(std::uint8_t *out, Mode mode, std::size_t body_nbytes) {
    put_u32(out, static_cast<std::uint32_t>(mode | body_nbytes << 8));
    return kBlockHeader + body_nbytes;
}

std::size_t put_raw(std::uint8_t *out, const std::uint8_t *plane, std::size_t count) {
    std::memcpy(out + kBlockHeader, plane, count);
    return put_block(out, kRaw, count);
}

// Encodes one block after its table: 64 states, bytes beyond the last full step, words. Returns its length.
std::size_t encode_body(const std::uint8_t *plane, std::size_t count, const Model &model, std::uint8_t *out,
                        const Loops &loops) {
    const std::size_t steps = count / kLanes;
    const std::size_t rest = count % kLanes;
    std::memcpy(out + kStatesNbytes, plane + steps * kLanes, rest);
    std::uint32_t states[kLanes];
    const std::uint8_t *const end = loops.encode_steps(plane, steps, model, states, out + kStatesNbytes + rest);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        put_u32(out + 4 * lane, states[lane]);
    }
    return static_cast<std::size_t>(end - out);
}

// The table of the last block with a table of its own, if any.
struct Kept {
    Model model;
    bool is_there = false;
};

std::size_t encode_block(const std::uint8_t *plane, std::size_t count, Kept &kept, std::uint8_t *out,
                         const Loops &loops) {
    std::uint32_t weights[kSymbols];
    const std::uint32_t total = weigh(plane, count, weights, loops);
    if (weights[plane[0]] == total) {
        out[kBlockHeader] = plane[0];
        return put_block(out, kConst, 1);
    }
    Model own;
    set_model(weights, total, own);
    std::uint8_t table[kTableMax];
    const std::size_t table_nbytes = write_table(own, table);
    const std::uint64_t own_bits = bits_with(own, weights) + (static_cast<std::uint64_t>(table_nbytes) << 11);
    const std::uint64_t same_bits = kept.is_there ? bits_with(kept.model, weights) : kNoCode;
    const bool is_same = same_bits <= own_bits;
    const std::uint64_t expected = (is_same ? same_bits : own_bits) >> 11;
    // Store plain if coding saves less than one fiftieth.
    const std::size_t worth = count - count / 50;
    if (expected + kStatesNbytes >= worth) {
        return put_raw(out, plane, count);
    }
    std::size_t at = kBlockHeader;
    if (!is_same) {
        std::memcpy(out + at, table, table_nbytes);
        at += table_nbytes;
    }
    const Model &model = is_same ? kept.model : own;
    const std::size_t nbytes = at - kBlockHeader + encode_body(plane, count, model, out + at, loops);
    // The estimate from the sample may be wrong.
    if (nbytes >= worth) {
        return put_raw(out, plane, count);
    }
    if (!is_same) {
        kept.model = own;
        kept.is_there = true;
    }
    return put_block(out, is_same ? kSameTable : kOwnTable, nbytes);
}

}  // namespace

std::size_t rans_bound(std::size_t count) {
    const std::size_t blocks = (count + kRansBlock - 1) / kRansBlock;
    // Coding may expand each byte to a word before the block is stored plain instead.
    const std::size_t last = count < kRansBlock ? count : kRansBlock;
    return count + blocks * kBlockHeader + last + kTableMax + kStatesNbytes + kWordsSlack;
}

std::size_t rans_encode(const std::uint8_t *plane, std::size_t count, std::uint8_t *out, const Loops &loops) {
    Kept kept;
    std::size_t at = 0;
    for (std::size_t begin = 0; begin < count; begin += kRansBlock) {
        const std::size_t nbytes = count - begin < kRansBlock ? count - begin : kRansBlock;
        at += encode_block(plane + begin, nbytes, kept, out + at, loops);
    }
    return at;
}

}  // namespace ckstore
