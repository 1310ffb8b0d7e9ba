// What differs between compilers and machines, in one place.
#pragma once

// CLONES: compile this function for several instruction sets, chosen when the library is loaded. It needs GNU's indirect functions; without
// them the baseline is what there is. What it calls should be INLINE, so that the clone's instruction set reaches it. The levels are named
// by feature: "arch=skylake-avx512" would be chosen on that very processor alone.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#if __GNUC__ >= 12
#define CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#endif
#else
#define CLONES
#endif

#if defined(__GNUC__)
#define INLINE __attribute__((always_inline)) inline
#else
#define INLINE inline
#endif

// INDEPENDENT: no iteration of the next loop touches what another one writes. An output may be the very place of an input.
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

// Correctly rounded, and without a call that would set errno.
INLINE float square_root(float x) { return __builtin_sqrtf(x); }
INLINE double square_root(double x) { return __builtin_sqrt(x); }
