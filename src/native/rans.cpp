#include "rans.hpp"

#include <cstring>

#include "rans_model.hpp"
#include "rans_steps.hpp"

namespace ckstore {
namespace {

// What a block is; see docs/FORMAT.md, section 9.
enum Mode : std::uint8_t { kRaw = 0, kConst = 1, kOwnTable = 2, kSameTable = 3 };

constexpr std::size_t kBlockHeader = 4;  // mode (u8), length of the body (u24)

std::size_t put_block(std::uint8_t *out, Mode mode, std::size_t body_nbytes) {
    put_u32(out, static_cast<std::uint32_t>(mode | body_nbytes << 8));
    return kBlockHeader + body_nbytes;
}

std::size_t put_raw(std::uint8_t *out, const std::uint8_t *plane, std::size_t count) {
    std::memcpy(out + kBlockHeader, plane, count);
    return put_block(out, kRaw, count);
}

// Codes one block behind its table: 64 states, bytes that fill no step, words. Returns its length.
std::size_t encode_body(const std::uint8_t *plane, std::size_t count, const Model &model, std::uint8_t *out,
                        bool vectors) {
    const std::size_t steps = count / kLanes;
    const std::size_t rest = count % kLanes;
    std::memcpy(out + kStatesNbytes, plane + steps * kLanes, rest);
    std::uint32_t states[kLanes];
    const std::uint8_t *const end = encode_steps(plane, steps, model, states, out + kStatesNbytes + rest, vectors);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        put_u32(out + 4 * lane, states[lane]);
    }
    return static_cast<std::size_t>(end - out);
}

bool decode_body(const std::uint8_t *body, std::size_t nbytes, const SlotTable &table, std::uint8_t *plane,
                 std::size_t count, bool vectors) {
    const std::size_t steps = count / kLanes;
    const std::size_t rest = count % kLanes;
    if (nbytes < kStatesNbytes + rest || (nbytes - rest) % 2 != 0) {
        return false;
    }
    std::uint32_t states[kLanes];
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        states[lane] = get_u32(body + 4 * lane);
        if (states[lane] < kLow) {
            return false;
        }
    }
    const std::uint8_t *const words = body + kStatesNbytes + rest;
    if (decode_steps(words, body + nbytes, table, states, plane, steps, vectors) != words) {
        return false;
    }
    // Coding began with every state at its lowest, so decoding must end there.
    for (std::uint32_t state : states) {
        if (state != kLow) {
            return false;
        }
    }
    std::memcpy(plane + steps * kLanes, body + kStatesNbytes, rest);
    return true;
}

// The table of the last block that had its own, if there was one.
struct Kept {
    Model model;
    bool is_there = false;
};

std::size_t encode_block(const std::uint8_t *plane, std::size_t count, Kept &kept, std::uint8_t *out, bool vectors) {
    std::uint32_t weights[kSymbols];
    const std::uint32_t total = weigh(plane, count, weights, vectors);
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
    // Not worth a decoder's time: less than one part in fifty.
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
    const std::size_t nbytes = at - kBlockHeader + encode_body(plane, count, model, out + at, vectors);
    // A sample may deceive.
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
    // While a block is coded each of its bytes may become a word, before plain bytes turn out to be shorter.
    const std::size_t last = count < kRansBlock ? count : kRansBlock;
    return count + blocks * kBlockHeader + last + kTableMax + kStatesNbytes + kWordsSlack;
}

std::size_t rans_encode(const std::uint8_t *plane, std::size_t count, std::uint8_t *out, bool vectors) {
    Kept kept;
    std::size_t at = 0;
    for (std::size_t begin = 0; begin < count; begin += kRansBlock) {
        const std::size_t nbytes = count - begin < kRansBlock ? count - begin : kRansBlock;
        at += encode_block(plane + begin, nbytes, kept, out + at, vectors);
    }
    return at;
}

bool rans_decode(const std::uint8_t *payload, std::size_t nbytes, std::uint8_t *plane, std::size_t count,
                 bool vectors) {
    SlotTable table;
    bool has_table = false;
    std::size_t at = 0;
    for (std::size_t begin = 0; begin < count; begin += kRansBlock) {
        const std::size_t block = count - begin < kRansBlock ? count - begin : kRansBlock;
        if (nbytes - at < kBlockHeader) {
            return false;
        }
        const std::uint32_t header = get_u32(payload + at);
        const std::uint32_t mode = header & 0xFF;
        std::size_t body_nbytes = header >> 8;
        at += kBlockHeader;
        if (body_nbytes > nbytes - at) {
            return false;
        }
        const std::uint8_t *body = payload + at;
        at += body_nbytes;
        if (mode == kRaw && body_nbytes == block) {
            std::memcpy(plane + begin, body, block);
            continue;
        }
        if (mode == kConst && body_nbytes == 1) {
            std::memset(plane + begin, body[0], block);
            continue;
        }
        if (mode == kOwnTable) {
            Model model;
            const std::size_t table_nbytes = read_table(body, body_nbytes, model);
            if (table_nbytes == 0) {
                return false;
            }
            set_slots(model, table);
            has_table = true;
            body += table_nbytes;
            body_nbytes -= table_nbytes;
        } else if (mode != kSameTable || !has_table) {
            return false;
        }
        if (!decode_body(body, body_nbytes, table, plane + begin, block, vectors)) {
            return false;
        }
    }
    return at == nbytes;
}

const char *rans_variant() {
#ifdef CKSTORE_RANS_AVX512
    if (has_avx512()) {
        return "avx512";
    }
#endif
    return "portable";
}

}  // namespace ckstore
