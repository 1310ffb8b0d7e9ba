// bfloat16 and float16 to and from float32 in integer arithmetic, which vectorises on any instruction set. Rounds to nearest even; NaN
// becomes the quiet NaN that torch writes; no step makes a float32 denormal, so flush-to-zero modes change nothing.
#pragma once

#include <cstdint>
#include <cstring>

#include "portable.h"

enum DType : int { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3, kNone = -1 };

INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }
INLINE float widen(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

INLINE float widen(Float16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    const uint32_t magnitude = x.bits & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t special = normal + (112u << 23);  // infinity and NaN: the exponent is all ones
    const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t finite = magnitude < 0x0400u ? small : normal;
    return float_of(sign | (magnitude >= 0x7c00u ? special : finite));
}

INLINE void narrow(float x, BFloat16& out) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

INLINE void narrow(float x, Float16& out) {
    const uint32_t bits = bits_of(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal results: drop 13 bits of the mantissa; a carry may run into the exponent, up to infinity.
    const uint32_t normal = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    // Denormal results are multiples of 2^-24: adding 0.5 (whose last place is 2^-24) rounds to one and leaves it in the low bits.
    const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t finite = magnitude < (113u << 23) ? small : normal;
    const uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    out.bits = static_cast<uint16_t>(sign | (magnitude >= (143u << 23) ? large : finite));
}

// A float64 value is rounded to float32 on the way, as torch does it.
INLINE void narrow(double x, BFloat16& out) { narrow(static_cast<float>(x), out); }
INLINE void narrow(double x, Float16& out) { narrow(static_cast<float>(x), out); }
