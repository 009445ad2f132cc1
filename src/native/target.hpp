// Several machine-code versions of one function; the loader chooses the best one for the processor.

#pragma once

#if defined(__GNUC__)
#define CKSTORE_INLINE inline __attribute__((always_inline))
#else
#define CKSTORE_INLINE inline
#endif

// Needs indirect functions (ifunc) of the loader: x86-64 Linux with glibc.
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(CKSTORE_NO_CLONES)
#define CKSTORE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CKSTORE_CLONES
#endif

// Functions for AVX-512 can be compiled into the same module.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define CKSTORE_HAS_WIDE
#endif
