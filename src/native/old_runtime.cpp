// Lets a wheel that GCC 12 or later compiled run on systems with an older libstdc++ (GCC 8, manylinux_2_28).
//
// Since GCC 12 the headers call two functions that only libstdc++ 12 and later export (CXXABI_1.3.13). They are defined
// here by the copy constructor and the destructor that every libstdc++ since GCC 4.4 exports. Compiled with
// CKSTORE_OLD_RUNTIME=ON only, which `make wheel` sets.

#if !defined(__GNUC__) || defined(__clang__) || !defined(__ELF__)
#error "CKSTORE_OLD_RUNTIME is for GCC and libstdc++ on Linux"
#endif

// With a version in the name, the linker takes these from libstdc++, never the inline copies of other object files.
__asm__(".symver ckstore_copy_exception_ptr, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver ckstore_drop_exception_ptr, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");

extern "C" {

void ckstore_copy_exception_ptr(void *copy, const void *original);
void ckstore_drop_exception_ptr(void *pointer);

// std::exception_ptr::_M_addref. The copy is never destroyed, so its reference stays.
__attribute__((visibility("hidden"))) void _ZNSt15__exception_ptr13exception_ptr9_M_addrefEv(void *self) {
    void *copy = nullptr;
    ckstore_copy_exception_ptr(&copy, self);
}

// std::exception_ptr::_M_release
__attribute__((visibility("hidden"))) void _ZNSt15__exception_ptr13exception_ptr10_M_releaseEv(void *self) {
    ckstore_drop_exception_ptr(self);
}

}  // extern "C"
