// Copies a state into a staging area, one unit at a time, on every thread that calls `copy_units`.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckstore {

// Shared by the threads that stage one state. Row i of `table` is three words: source, destination, length. Unit u has the rows from firsts[u] up to firsts[u + 1].
struct Units {
    const std::uint64_t *table;
    const std::uint64_t *firsts;
    std::size_t count;
    std::uint8_t *marks;
    std::uint64_t *turn;
    // An eventfd that wakes the thread waiting for marks, or -1.
    int bell;
};

// Takes units by incrementing `turn`, copies each one, and then marks it. Returns the number of units copied
// by this call.
std::size_t copy_units(const Units &units);

// A device runtime's function that starts a copy: destination, source, length, kind, stream. Returns 0 on success.
using Launch = int (*)(void *, const void *, std::size_t, int, void *);

// Calls it for each row of a table as in `Units`, until one call fails. Returns the error code of that call, or 0.
int launch_copies(Launch launch, const std::uint64_t *table, std::size_t count, int kind, void *stream);

}  // namespace ckstore
