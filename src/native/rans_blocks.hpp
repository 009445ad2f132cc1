// Blocks of the plane coder (docs/FORMAT.md, section 9), and the decoding of their coded bodies in pairs.

#pragma once

#include <cstddef>
#include <cstdint>

#include "rans.hpp"
#include "rans_model.hpp"
#include "rans_steps.hpp"

namespace ckstore {

enum Mode : std::uint8_t { kRaw = 0, kConst = 1, kOwnTable = 2, kSameTable = 3 };

constexpr std::size_t kBlockHeader = 4;  // mode (u8), length of the body (u24)

// A piece of a payload.
struct Piece {
    const std::uint8_t *at;
    std::size_t nbytes;

    void skip(std::size_t count) {
        at += count;
        nbytes -= count;
    }
};

// The last table of a plane, and the one before it, which a waiting body may still need.
class TableReader {
public:
    // Returns the table of a block, or null if there is none. Reads the block's own table from the body.
    const SlotTable *table_of(Mode mode, Piece &body);

private:
    SlotTable tables_[2];
    std::size_t newest_ = 0;
    bool is_there_ = false;
};

// The rest of a coded body, and the destination of its bytes.
struct Body {
    Stream stream;
    std::uint32_t states[kLanes];
    std::size_t steps;
    const std::uint8_t *rest;
    std::size_t rest_nbytes;
};

// Decodes coded bodies two at a time, also of different planes.
class Bodies {
public:
    explicit Bodies(const Loops &loops) : loops_(loops) {}

    // Opens a body, and decodes it together with a waiting one. Returns false if it is invalid.
    bool add(Piece coded, const SlotTable *table, std::uint8_t *plane, std::size_t count);

    // Decodes the waiting body.
    bool finish();

private:
    Body waiting_[2];
    std::size_t count_ = 0;
    const Loops &loops_;
};

// Decodes the blocks of a plane, which are all of `payload`. A body may stay waiting, and still needs the tables.
bool decode_blocks(Piece payload, std::uint8_t *plane, std::size_t count, TableReader &tables, Bodies &bodies);

}  // namespace ckstore
