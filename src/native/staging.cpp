#include "staging.hpp"

#include <atomic>
#include <cstring>

#if defined(__linux__)
#include <unistd.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "target.hpp"

namespace ckstore {
namespace {

// Smaller copies go through the cache, where the next reader finds them.
constexpr std::size_t kStreamedMin = 256 * 1024;

#if defined(__SSE2__)

constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;

// Pages copied in parallel. Four are 1.5 times as fast as one on Intel Xeons. One is 1.3 times as fast as four on AMD
// Zen 5, whose prefetchers follow a single stream further.
bool copies_pages_in_turn() {
#if defined(__GNUC__)
    return __builtin_cpu_is("amd") != 0;
#else
    return false;
#endif
}

CKSTORE_INLINE void stream_line(const std::uint8_t *source, std::uint8_t *destination) {
    const auto *from = reinterpret_cast<const __m128i *>(source);
    auto *to = reinterpret_cast<__m128i *>(destination);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
}

// Copies whole groups of pages. Returns the number of bytes copied.
template <std::size_t kPages>
std::size_t stream_pages(const std::uint8_t *source, std::uint8_t *destination, std::size_t nbytes) {
    std::size_t done = 0;
    for (; done + kPages * kPage <= nbytes; done += kPages * kPage) {
        for (std::size_t line = 0; line < kPage; line += kLine) {
            for (std::size_t page = 0; page < kPages; ++page) {
                const std::size_t at = done + page * kPage + line;
                stream_line(source + at, destination + at);
            }
        }
    }
    return done;
}

// Bypasses the caches: another process reads the destination later, its lines need not be fetched before they are
// overwritten, and the cached data of the training stays in the cache.
void copy_streamed(const std::uint8_t *source, std::uint8_t *destination, std::size_t nbytes) {
    static const bool in_turn = copies_pages_in_turn();
    const std::size_t head = (kPage - reinterpret_cast<std::uintptr_t>(destination) % kPage) % kPage;
    std::memcpy(destination, source, head);
    const auto stream = in_turn ? stream_pages<1> : stream_pages<4>;
    const std::size_t done = head + stream(source + head, destination + head, nbytes - head);
    // Other threads and processes must see these bytes before the mark.
    _mm_sfence();
    std::memcpy(destination + done, source + done, nbytes - done);
}

#else

void copy_streamed(const std::uint8_t *source, std::uint8_t *destination, std::size_t nbytes) {
    std::memcpy(destination, source, nbytes);
}

#endif

void copy_row(const std::uint64_t *row) {
    const auto *source = reinterpret_cast<const std::uint8_t *>(static_cast<std::uintptr_t>(row[0]));
    auto *destination = reinterpret_cast<std::uint8_t *>(static_cast<std::uintptr_t>(row[1]));
    const auto nbytes = static_cast<std::size_t>(row[2]);
    if (nbytes >= kStreamedMin) {
        copy_streamed(source, destination, nbytes);
    } else if (nbytes != 0) {
        std::memcpy(destination, source, nbytes);
    }
}

void ring(int bell) {
#if defined(__linux__)
    if (bell >= 0) {
        const std::uint64_t one = 1;
        // A full counter means that the reader is already notified.
        [[maybe_unused]] const auto written = write(bell, &one, sizeof(one));
    }
#else
    static_cast<void>(bell);
#endif
}

}  // namespace

std::size_t copy_units(const Units &units) {
    // Plain memory, because Python threads share these words, and another process shares the marks.
    static_assert(sizeof(std::atomic<std::uint64_t>) == sizeof(std::uint64_t), "atomics are plain words");
    static_assert(sizeof(std::atomic<std::uint8_t>) == sizeof(std::uint8_t), "atomics are plain bytes");
    auto *turn = reinterpret_cast<std::atomic<std::uint64_t> *>(units.turn);
    auto *marks = reinterpret_cast<std::atomic<std::uint8_t> *>(units.marks);
    std::size_t copied = 0;
    for (;;) {
        // Check first, so that calls after the end do not increment forever.
        if (turn->load(std::memory_order_relaxed) >= units.count) {
            return copied;
        }
        const std::uint64_t unit = turn->fetch_add(1, std::memory_order_relaxed);
        if (unit >= units.count) {
            return copied;
        }
        for (std::uint64_t row = units.firsts[unit]; row < units.firsts[unit + 1]; ++row) {
            copy_row(units.table + 3 * row);
        }
        marks[unit].store(1, std::memory_order_release);
        ring(units.bell);
        ++copied;
    }
}

int launch_copies(Launch launch, const std::uint64_t *table, std::size_t count, int kind, void *stream) {
    for (std::size_t index = 0; index < count; ++index) {
        const std::uint64_t *row = table + 3 * index;
        const auto *source = reinterpret_cast<const void *>(static_cast<std::uintptr_t>(row[0]));
        auto *destination = reinterpret_cast<void *>(static_cast<std::uintptr_t>(row[1]));
        const int problem = launch(destination, source, static_cast<std::size_t>(row[2]), kind, stream);
        if (problem != 0) {
            return problem;
        }
    }
    return 0;
}

}  // namespace ckstore
