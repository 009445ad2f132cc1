// Python bindings of the plane coders; included only by module.cpp.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <string>
#include <vector>

#include "binding.hpp"
#include "rans.hpp"
#include "sparse.hpp"

namespace {

std::size_t plane_bound(std::size_t nbytes) { return ckstore::rans_bound(nbytes); }

const ckstore::Loops &fastest() { return *ckstore::loops_here()[0]; }

const ckstore::Loops &loops_of(const std::string &name) {
    const ckstore::Loops *const found = ckstore::loops_named(name.c_str());
    if (found == nullptr) {
        throw nb::value_error("this processor has no loops of that name");
    }
    return *found;
}

std::vector<std::string> coder_loops() {
    std::vector<std::string> names;
    for (const ckstore::Loops *const *loops = ckstore::loops_here(); *loops != nullptr; ++loops) {
        names.push_back(ckstore::name_of(**loops));
    }
    return names;
}

std::size_t encode_plane(const ckstore::Loops &loops, nb::handle plane, nb::handle out) {
    Bytes from(plane, false);
    Bytes to(out, true);
    if (to.nbytes() < ckstore::rans_bound(from.nbytes())) {
        throw nb::value_error("room has less than the length that plane_bound asks for");
    }
    nb::gil_scoped_release unlocked;
    return ckstore::rans_encode(from.data(), from.nbytes(), to.data(), loops);
}

bool decode_plane(const ckstore::Loops &loops, nb::handle payload, nb::handle plane) {
    Bytes from(payload, false);
    Bytes to(plane, true);
    nb::gil_scoped_release unlocked;
    return ckstore::rans_decode(from.data(), from.nbytes(), to.data(), to.nbytes(), loops);
}

std::size_t encode_sparse(const ckstore::Loops &loops, nb::handle plane, nb::handle out) {
    Bytes from(plane, false);
    Bytes to(out, true);
    if (to.nbytes() < ckstore::rans_bound(from.nbytes())) {
        throw nb::value_error("room has less than the length that plane_bound asks for");
    }
    nb::gil_scoped_release unlocked;
    return ckstore::sparse_encode(from.data(), from.nbytes(), to.data(), loops);
}

bool decode_sparse(const ckstore::Loops &loops, nb::handle payload, nb::handle plane, nb::handle bitmap) {
    Bytes from(payload, false);
    Bytes to(plane, true);
    Bytes bits(bitmap, true);
    if (bits.nbytes() < (to.nbytes() + 7) / 8) {
        throw nb::value_error("bitmap has less than an eighth of the length of the plane");
    }
    nb::gil_scoped_release unlocked;
    return ckstore::sparse_decode(from.data(), from.nbytes(), to.data(), to.nbytes(), bits.data(), loops);
}

inline void define_coders(nb::module_ &module) {
    using nb::handle, std::string;
    using namespace nb::literals;
    module.def("encode_plane", [](handle plane, handle out) { return encode_plane(fastest(), plane, out); }, "plane"_a,
               "out"_a);
    module.def("decode_plane", [](handle payload, handle plane) { return decode_plane(fastest(), payload, plane); },
               "payload"_a, "plane"_a);
    module.def("encode_sparse", [](handle plane, handle out) { return encode_sparse(fastest(), plane, out); },
               "plane"_a, "out"_a);
    module.def("decode_sparse",
               [](handle payload, handle plane, handle bitmap) {
                   return decode_sparse(fastest(), payload, plane, bitmap);
               },
               "payload"_a, "plane"_a, "bitmap"_a);
    module.def("encode_plane_by",
               [](const string &loops, handle plane, handle out) { return encode_plane(loops_of(loops), plane, out); },
               "loops"_a, "plane"_a, "out"_a);
    module.def("decode_plane_by",
               [](const string &loops, handle payload, handle plane) {
                   return decode_plane(loops_of(loops), payload, plane);
               },
               "loops"_a, "payload"_a, "plane"_a);
    module.def("encode_sparse_by",
               [](const string &loops, handle plane, handle out) { return encode_sparse(loops_of(loops), plane, out); },
               "loops"_a, "plane"_a, "out"_a);
    module.def("decode_sparse_by",
               [](const string &loops, handle payload, handle plane, handle bitmap) {
                   return decode_sparse(loops_of(loops), payload, plane, bitmap);
               },
               "loops"_a, "payload"_a, "plane"_a, "bitmap"_a);
    module.def("plane_bound", &plane_bound, "nbytes"_a);
    module.def("coder_loops", &coder_loops);
}

}  // namespace
