#include "rans_blocks.hpp"

#include <cstring>

namespace ckstore {
namespace {

bool open_body(Piece coded, const SlotTable *table, std::uint8_t *plane, std::size_t count, Body &body) {
    body.steps = count / kLanes;
    body.rest_nbytes = count % kLanes;
    if (coded.nbytes < kStatesNbytes + body.rest_nbytes || (coded.nbytes - body.rest_nbytes) % 2 != 0) {
        return false;
    }
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        body.states[lane] = get_u32(coded.at + 4 * lane);
        if (body.states[lane] < kLow) {
            return false;
        }
    }
    body.rest = coded.at + kStatesNbytes;
    body.stream = {body.rest + body.rest_nbytes, coded.at + coded.nbytes, table, body.states, plane};
    return true;
}

bool is_at_end(const Body &body) {
    if (body.stream.end != body.stream.words) {
        return false;
    }
    // Encoding starts with every state at its minimum, so decoding must end there.
    for (std::uint32_t state : body.states) {
        if (state != kLow) {
            return false;
        }
    }
    return true;
}

}  // namespace

const SlotTable *TableReader::table_of(Mode mode, Piece &body) {
    if (mode == kOwnTable) {
        Model model;
        const std::size_t nbytes = read_table(body.at, body.nbytes, model);
        if (nbytes == 0) {
            return nullptr;
        }
        newest_ = 1 - newest_;
        set_slots(model, tables_[newest_]);
        is_there_ = true;
        body.skip(nbytes);
    }
    return is_there_ ? &tables_[newest_] : nullptr;
}

bool Bodies::add(Piece coded, const SlotTable *table, std::uint8_t *plane, std::size_t count) {
    if (table == nullptr || !open_body(coded, table, plane, count, waiting_[count_])) {
        return false;
    }
    ++count_;
    return count_ < 2 || finish();
}

bool Bodies::finish() {
    const std::size_t count = count_;
    count_ = 0;
    std::size_t together = 0;
    if (count == 2) {
        together = waiting_[0].steps < waiting_[1].steps ? waiting_[0].steps : waiting_[1].steps;
        Stream streams[2] = {waiting_[0].stream, waiting_[1].stream};
        if (!loops_.decode_steps(streams, 2, together)) {
            return false;
        }
        waiting_[0].stream = streams[0];
        waiting_[1].stream = streams[1];
    }
    for (std::size_t i = 0; i < count; ++i) {
        Body &body = waiting_[i];
        if (!loops_.decode_steps(&body.stream, 1, body.steps - together) || !is_at_end(body)) {
            return false;
        }
        std::memcpy(body.stream.plane, body.rest, body.rest_nbytes);
    }
    return true;
}

bool decode_blocks(Piece payload, std::uint8_t *plane, std::size_t count, TableReader &tables, Bodies &bodies) {
    for (std::size_t begin = 0; begin < count; begin += kRansBlock) {
        const std::size_t block = count - begin < kRansBlock ? count - begin : kRansBlock;
        if (payload.nbytes < kBlockHeader) {
            return false;
        }
        const std::uint32_t header = get_u32(payload.at);
        const std::uint32_t mode = header & 0xFF;
        payload.skip(kBlockHeader);
        Piece body{payload.at, header >> 8};
        if (body.nbytes > payload.nbytes) {
            return false;
        }
        payload.skip(body.nbytes);
        if (mode == kRaw && body.nbytes == block) {
            std::memcpy(plane + begin, body.at, block);
        } else if (mode == kConst && body.nbytes == 1) {
            std::memset(plane + begin, body.at[0], block);
        } else if (mode == kOwnTable || mode == kSameTable) {
            const SlotTable *table = tables.table_of(static_cast<Mode>(mode), body);
            if (!bodies.add(body, table, plane + begin, block)) {
                return false;
            }
        } else {
            return false;
        }
    }
    return payload.nbytes == 0;
}

bool rans_decode(const std::uint8_t *payload, std::size_t nbytes, std::uint8_t *plane, std::size_t count,
                 const Loops &loops) {
    TableReader tables;
    Bodies bodies(loops);
    return decode_blocks({payload, nbytes}, plane, count, tables, bodies) && bodies.finish();
}

}  // namespace ckstore
