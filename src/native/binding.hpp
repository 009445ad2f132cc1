// Shared by the Python bindings of the loops: held buffers, and checks of their lengths.

#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace nb = nanobind;

namespace {

// A contiguous buffer, held so that its owner can neither free nor resize it while the GIL is released.
class Bytes {
public:
    Bytes() = default;
    Bytes(nb::handle owner, bool is_writable) { open(owner, is_writable); }
    ~Bytes() {
        if (is_open_) {
            PyBuffer_Release(&view_);
        }
    }
    Bytes(const Bytes &) = delete;
    Bytes &operator=(const Bytes &) = delete;

    void open(nb::handle owner, bool is_writable) {
        if (PyObject_GetBuffer(owner.ptr(), &view_, is_writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
            PyErr_Clear();
            throw nb::value_error(is_writable ? "not a writable contiguous buffer" : "not a contiguous buffer");
        }
        is_open_ = true;
    }

    std::uint8_t *data() const { return static_cast<std::uint8_t *>(view_.buf); }
    std::size_t nbytes() const { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_{};
    bool is_open_ = false;
};

std::size_t checked_count(std::size_t nbytes, std::size_t width) {
    if (width != 1 && width != 2 && width != 4 && width != 8) {
        throw nb::value_error("width must be 1, 2, 4 or 8");
    }
    if (nbytes % width != 0) {
        throw nb::value_error("length is no multiple of the width");
    }
    return nbytes / width;
}

void require_equal(std::size_t a, std::size_t b) {
    if (a != b) {
        throw nb::value_error("lengths differ");
    }
}

}  // namespace
