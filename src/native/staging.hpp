// Copies a state from where it lies into a staging area, a unit at a time, on as many threads as call.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

// What the threads of one staging share. Row i of `table` is three words: source address, destination address, length;
// the rows of unit u are those from firsts[u] up to firsts[u + 1].
struct Units {
    const std::uint64_t *table;
    const std::uint64_t *firsts;
    std::size_t count;
    std::uint8_t *marks;
    std::uint64_t *turn;
    // An eventfd that tells whoever waits for marks, or -1.
    int bell;
};

// Takes units by counting `turn` up until there are no more, copies each, and marks it when its bytes are there.
// Returns how many this call has copied.
std::size_t copy_units(const Units &units);

// A device runtime's function that begins a copy: destination, source, length, kind, stream. 0: it has begun.
using Launch = int (*)(void *, const void *, std::size_t, int, void *);

// Calls it for each row of a table as in `Units`, until one fails; returns what that returned, or 0.
int launch_copies(Launch launch, const std::uint64_t *table, std::size_t count, int kind, void *stream);

}  // namespace ckstore
