// Python bindings of the loops: each one checks lengths, holds the buffers, releases the GIL and calls one loop.

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "binding.hpp"
#include "bytes.hpp"
#include "delta.hpp"
#include "estimate.hpp"
#include "module_coders.hpp"
#include "module_quant.hpp"
#include "module_outer.hpp"
#include "module_directions.hpp"
#include "planes.hpp"
#include "rounding.hpp"
#include "staging.hpp"

namespace {

// The planes of one call, opened and checked: `width` buffers of `count` bytes.
class Planes {
public:
    Planes(nb::sequence given, std::size_t count, std::size_t width) {
        if (nb::len(given) != width) {
            throw nb::value_error("as many planes are needed as an element has bytes");
        }
        for (std::size_t j = 0; j < width; ++j) {
            nb::object plane = given[j];
            held_[j].open(plane, false);
            require_equal(held_[j].nbytes(), count);
            pointers_[j] = held_[j].data();
        }
    }

    const std::uint8_t *const *pointers() const { return pointers_; }

private:
    Bytes held_[ckstore::kWidthMax];
    const std::uint8_t *pointers_[ckstore::kWidthMax] = {};
};

void split_planes(nb::handle source, nb::handle planes_out, std::size_t width, bool rotate) {
    Bytes from(source, false);
    Bytes to(planes_out, true);
    std::size_t count = checked_count(from.nbytes(), width);
    require_equal(from.nbytes(), to.nbytes());
    nb::gil_scoped_release unlocked;
    ckstore::split_planes(from.data(), to.data(), count, width, rotate);
}

void merge_planes(nb::sequence planes, nb::handle destination, std::size_t width, bool rotate) {
    Bytes to(destination, true);
    std::size_t count = checked_count(to.nbytes(), width);
    Planes from(planes, count, width);
    nb::gil_scoped_release unlocked;
    ckstore::merge_planes(from.pointers(), to.data(), count, width, rotate);
}

void split_delta(nb::handle source, nb::handle base, nb::handle planes_out, std::size_t width, bool ordered) {
    Bytes from(source, false);
    Bytes reference(base, false);
    Bytes to(planes_out, true);
    std::size_t count = checked_count(from.nbytes(), width);
    require_equal(from.nbytes(), reference.nbytes());
    require_equal(from.nbytes(), to.nbytes());
    nb::gil_scoped_release unlocked;
    ckstore::split_delta(from.data(), reference.data(), to.data(), count, width, ordered);
}

void merge_delta(nb::sequence planes, nb::handle base, nb::handle destination, std::size_t width, bool ordered) {
    Bytes reference(base, false);
    Bytes to(destination, true);
    std::size_t count = checked_count(to.nbytes(), width);
    require_equal(reference.nbytes(), to.nbytes());
    Planes from(planes, count, width);
    nb::gil_scoped_release unlocked;
    ckstore::merge_delta(from.pointers(), reference.data(), to.data(), count, width, ordered);
}

std::size_t checked_roundings(std::size_t nbytes, std::size_t rounded_nbytes, int kind) {
    if (kind != ckstore::kBf16 && kind != ckstore::kFp16) {
        throw nb::value_error("kind must be 1 or 2, for a width of 2 bytes");
    }
    std::size_t count = checked_count(nbytes, 4);
    require_equal(2 * rounded_nbytes, nbytes);
    return count;
}

void round_floats(nb::handle source, nb::handle destination, int kind) {
    Bytes from(source, false);
    Bytes to(destination, true);
    std::size_t count = checked_roundings(from.nbytes(), to.nbytes(), kind);
    nb::gil_scoped_release unlocked;
    ckstore::round_floats(from.data(), to.data(), count, kind);
}

bool is_rounding(nb::handle source, nb::handle rounded, int kind) {
    Bytes from(source, false);
    Bytes other(rounded, false);
    std::size_t count = checked_roundings(from.nbytes(), other.nbytes(), kind);
    nb::gil_scoped_release unlocked;
    return ckstore::is_rounding(from.data(), other.data(), count, kind);
}

nb::list list_of(const double *bits, std::size_t width) {
    nb::list found;
    for (std::size_t j = 0; j < width; ++j) {
        found.append(bits[j]);
    }
    return found;
}

std::size_t checked_sample(std::size_t nbytes, std::size_t width) {
    std::size_t count = checked_count(nbytes, width);
    if (count == 0) {
        throw nb::value_error("a sample has no length of zero");
    }
    return count;
}

nb::list plane_bits(nb::handle source, std::size_t width, bool rotate) {
    Bytes from(source, false);
    std::size_t count = checked_sample(from.nbytes(), width);
    double bits[ckstore::kWidthMax];
    {
        nb::gil_scoped_release unlocked;
        ckstore::plane_bits(from.data(), bits, count, width, rotate);
    }
    return list_of(bits, width);
}

nb::list delta_bits(nb::handle source, nb::handle base, std::size_t width, bool ordered) {
    Bytes from(source, false);
    Bytes reference(base, false);
    std::size_t count = checked_sample(from.nbytes(), width);
    require_equal(from.nbytes(), reference.nbytes());
    double bits[ckstore::kWidthMax];
    {
        nb::gil_scoped_release unlocked;
        ckstore::delta_bits(from.data(), reference.data(), bits, count, width, ordered);
    }
    return list_of(bits, width);
}

void copy_bytes(nb::handle source, nb::handle destination) {
    Bytes from(source, false);
    Bytes to(destination, true);
    require_equal(from.nbytes(), to.nbytes());
    nb::gil_scoped_release unlocked;
    ckstore::copy_bytes(from.data(), to.data(), from.nbytes());
}

bool equal_bytes(nb::handle a, nb::handle b) {
    Bytes one(a, false);
    Bytes other(b, false);
    if (one.nbytes() != other.nbytes()) {
        return false;
    }
    nb::gil_scoped_release unlocked;
    return ckstore::equal_bytes(one.data(), other.data(), one.nbytes());
}

bool is_constant(nb::handle source) {
    Bytes from(source, false);
    nb::gil_scoped_release unlocked;
    return ckstore::is_constant(from.data(), from.nbytes());
}

void histogram(nb::handle source, nb::handle counts_out) {
    Bytes from(source, false);
    Bytes to(counts_out, true);
    require_equal(to.nbytes(), 256 * sizeof(std::uint32_t));
    if (reinterpret_cast<std::uintptr_t>(to.data()) % alignof(std::uint32_t) != 0) {
        throw nb::value_error("counts are not aligned");
    }
    nb::gil_scoped_release unlocked;
    ckstore::histogram(from.data(), from.nbytes(), reinterpret_cast<std::uint32_t *>(to.data()));
}

std::uint64_t *words_of(const Bytes &buffer) {
    if (reinterpret_cast<std::uintptr_t>(buffer.data()) % alignof(std::uint64_t) != 0) {
        throw nb::value_error("words are not aligned");
    }
    return reinterpret_cast<std::uint64_t *>(buffer.data());
}

std::size_t copy_units(nb::handle table, nb::handle firsts, nb::handle marks, nb::handle turn, int bell) {
    Bytes rows(table, false);
    Bytes starts(firsts, false);
    Bytes done(marks, true);
    Bytes next(turn, true);
    const std::size_t count = done.nbytes();
    require_equal(starts.nbytes(), (count + 1) * sizeof(std::uint64_t));
    require_equal(next.nbytes(), sizeof(std::uint64_t));
    const ckstore::Units units{words_of(rows), words_of(starts), count, done.data(), words_of(next), bell};
    for (std::size_t unit = 0; unit < count; ++unit) {
        if (units.firsts[unit] > units.firsts[unit + 1]) {
            throw nb::value_error("units overlap");
        }
    }
    require_equal(rows.nbytes(), units.firsts[count] * 3 * sizeof(std::uint64_t));
    nb::gil_scoped_release unlocked;
    return ckstore::copy_units(units);
}

int launch_copies(std::uintptr_t function, nb::handle table, int kind, std::uintptr_t stream) {
    Bytes rows(table, false);
    require_equal(rows.nbytes() % (3 * sizeof(std::uint64_t)), 0);
    if (function == 0) {
        throw nb::value_error("there is no function at address 0");
    }
    const std::uint64_t *words = words_of(rows);
    const std::size_t count = rows.nbytes() / (3 * sizeof(std::uint64_t));
    nb::gil_scoped_release unlocked;
    return ckstore::launch_copies(
        reinterpret_cast<ckstore::Launch>(function), words, count, kind, reinterpret_cast<void *>(stream));
}

}  // namespace

NB_MODULE(_native, module) {
    using namespace nb::literals;
    module.doc() = "Compiled versions of the loops in ckstore.codec.kernels; each loop runs without the GIL.";
    module.def("split_planes", &split_planes, "source"_a, "planes_out"_a, "width"_a, "rotate"_a);
    module.def("merge_planes", &merge_planes, "planes"_a, "destination"_a, "width"_a, "rotate"_a);
    module.def("split_delta", &split_delta, "source"_a, "base"_a, "planes_out"_a, "width"_a, "ordered"_a);
    module.def("merge_delta", &merge_delta, "planes"_a, "base"_a, "destination"_a, "width"_a, "ordered"_a);
    module.def("round_floats", &round_floats, "source"_a, "destination"_a, "kind"_a);
    module.def("is_rounding", &is_rounding, "source"_a, "rounded"_a, "kind"_a);
    module.def("plane_bits", &plane_bits, "source"_a, "width"_a, "rotate"_a);
    module.def("delta_bits", &delta_bits, "source"_a, "base"_a, "width"_a, "ordered"_a);
    module.def("copy_bytes", &copy_bytes, "source"_a, "destination"_a);
    module.def("copy_units", &copy_units, "table"_a, "firsts"_a, "marks"_a, "turn"_a, "bell"_a);
    module.def("launch_copies", &launch_copies, "function"_a, "table"_a, "kind"_a, "stream"_a);
    module.def("equal_bytes", &equal_bytes, "a"_a, "b"_a);
    module.def("is_constant", &is_constant, "source"_a);
    module.def("histogram", &histogram, "source"_a, "counts_out"_a);
    define_coders(module);
    define_quantizers(module);
    define_products(module);
    define_directions(module);
}
