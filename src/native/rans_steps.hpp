// The loops over the steps of a block for several instruction sets, which all write the same bytes.
//
// A step is 64 bytes, one for each lane: lane l is byte 2 * l, lane 32 + l is byte 2 * l + 1. Encoding goes from
// the last step to the first and from lane 63 to lane 0, and appends words; decoding goes the other way and takes
// words from the end.

#pragma once

#include <cstddef>
#include <cstdint>

#include "rans_model.hpp"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define CKSTORE_RANS_VECTORS
#endif

namespace ckstore {

constexpr std::size_t kLanes = 64;
constexpr std::uint32_t kLow = 1u << 16;  // every state is in [kLow, 2^32)
constexpr std::size_t kStatesNbytes = 4 * kLanes;
// Encoding may write this many bytes beyond its last word.
constexpr std::size_t kWordsSlack = 64;

inline void put_u16(std::uint8_t *at, std::uint32_t value) {
    at[0] = static_cast<std::uint8_t>(value);
    at[1] = static_cast<std::uint8_t>(value >> 8);
}

inline void put_u32(std::uint8_t *at, std::uint32_t value) {
    put_u16(at, value & 0xFFFF);
    put_u16(at + 2, value >> 16);
}

inline std::uint32_t get_u16(const std::uint8_t *at) {
    return static_cast<std::uint32_t>(at[0]) | static_cast<std::uint32_t>(at[1]) << 8;
}

inline std::uint32_t get_u32(const std::uint8_t *at) { return get_u16(at) | get_u16(at + 2) << 16; }

// A body being decoded: the words in [words, end) that are left, taken from the end, and the destination of the next
// step. The 128 bytes before `words` may be read, but are never used.
struct Stream {
    const std::uint8_t *words, *end;
    const SlotTable *table;
    std::uint32_t *states;
    std::uint8_t *plane;
};

struct Loops {
    const char *name;

    // Sets to 0xFF the entry of every symbol that occurs.
    void (*see_others)(const std::uint8_t *bytes, std::size_t count, std::uint8_t *seen);

    // Encodes whole steps, starting with all states at kLow. Writes the final states. Returns the end of the words.
    std::uint8_t *(*encode_steps)(const std::uint8_t *plane, std::size_t steps, const Model &model,
                                  std::uint32_t *states, std::uint8_t *words);

    // Decodes whole steps of one or two streams (`count`). Returns false if words are missing. With AVX-512 two streams
    // take little longer than one, because each mostly waits for table loads.
    bool (*decode_steps)(Stream *streams, std::size_t count, std::size_t steps);

    // Writes a bitmap of the bytes that are not `common`, and these bytes. Returns their number, or any number above
    // `limit` if there are more. `bitmap` has room for whole words of 8 bytes, `others` for `limit` and one step.
    std::size_t (*take_others)(const std::uint8_t *plane, std::size_t count, std::uint8_t common, std::uint8_t *bitmap,
                               std::uint8_t *others, std::size_t limit);

    // The inverse. REQUIRES: The other bytes, one for each bit set in the bitmap, are at the end of the plane.
    void (*put_others)(std::uint8_t *plane, std::size_t count, std::uint8_t common, const std::uint8_t *bitmap,
                       std::size_t other_count);
};

// Portable loops, also for parts of a plane that are too short for vectors.
extern const Loops kPortableLoops;

#ifdef CKSTORE_RANS_VECTORS
extern const Loops kAvx2Loops, kAvx512Loops;
bool has_avx2();
bool has_avx512();
#endif

}  // namespace ckstore
