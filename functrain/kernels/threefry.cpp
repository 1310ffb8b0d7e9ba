// Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") in JAX's partitionable layout: the
// element with row-major index i of the whole draw is the cipher of the count (i >> 32, i), so any window of a draw can be filled alone.
//
// Arithmetic is the one of the torch operations in threefry.py, step by step and without fused multiply-add, so that both give the same
// bits. Counts, words and values of a block stay in the first-level cache; loops have a fixed length and no branch, and vectorise.

#include <cstdint>
#include <cstring>

#include "portable.h"

namespace {

constexpr int kBlock = 256;  // elements
constexpr int kMaxRank = 64;

enum Kind : int { kBits32 = 0, kBits64 = 1, kUniform = 2, kNormal = 3, kBernoulli = 4 };

INLINE uint32_t rotate(uint32_t x, int distance) { return (x << distance) | (x >> (32 - distance)); }

template <int... distances>
INLINE void rounds(uint32_t& x0, uint32_t& x1) {
    ((x0 += x1, x1 = rotate(x1, distances) ^ x0), ...);
}

// The cipher of one count (x0, x1) under a key, in place.
INLINE void cipher(uint32_t k0, uint32_t k1, uint32_t& x0, uint32_t& x1) {
    const uint32_t k2 = k0 ^ k1 ^ 0x1BD11BDAu;
    x0 += k0;
    x1 += k1;
    rounds<13, 15, 26, 6>(x0, x1);
    x0 += k1;
    x1 += k2 + 1u;
    rounds<17, 29, 16, 24>(x0, x1);
    x0 += k2;
    x1 += k0 + 2u;
    rounds<13, 15, 26, 6>(x0, x1);
    x0 += k0;
    x1 += k1 + 3u;
    rounds<17, 29, 16, 24>(x0, x1);
    x0 += k1;
    x1 += k2 + 4u;
    rounds<13, 15, 26, 6>(x0, x1);
    x0 += k2;
    x1 += k0 + 5u;
}

INLINE float unit(uint32_t bits) { return static_cast<float>(static_cast<int32_t>(bits >> 9)) * 0x1p-23f; }

INLINE float as_float(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE int32_t as_int(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// log(1 + t) for -1 < t <= 0 within one unit in the last place: the reduction and polynomial of FreeBSD's s_log1pf.c.
INLINE float log1p_negative(float t) {
    const float u = 1.0f + t;
    const int32_t shifted = as_int(u) + (0x3f800000 - 0x3f3504f3);
    const float k = static_cast<float>((shifted >> 23) - 127);
    const float f = as_float((shifted & 0x007fffff) + 0x3f3504f3) - 1.0f;
    const float correction = (t - (u - 1.0f)) / u;
    const float s = f / (2.0f + f);
    const float z = s * s;
    const float w = z * z;
    const float even = w * (0.40000972152f + w * 0.24279078841f);
    const float odd = z * (0.66666662693f + w * 0.28498786688f);
    const float half_square = 0.5f * f * f;
    return s * (half_square + (odd + even)) + (k * 9.0580006145e-06f + correction) - half_square + f + k * 6.9313812256e-01f;
}

template <int n>
INLINE float polynomial(const float (&coefficients)[n], float v) {
    float p = coefficients[0];
    for (int i = 1; i < n; ++i) p = p * v + coefficients[i];
    return p;
}

// The inverse of erf, infinite at -1 and 1 and NaN beyond: Giles (2010), "Approximating the erfinv function", single precision.
// Both branches are computed: a choice of coefficients would become a jump.
INLINE float erfinv(float x) {
    constexpr float central[] = {2.81022636e-08f, 3.43273939e-07f,  -3.5233877e-06f, -4.39150654e-06f, 0.00021858087f,
                                 -0.00125372503f, -0.00417768164f, 0.246640727f,    1.50140941f};
    constexpr float tail[] = {-0.000200214257f, 0.000100950558f, 0.00134934322f, -0.00367342844f, 0.00573950773f,
                              -0.0076224613f,   0.00943887047f,  1.00167406f,    2.83297682f};
    const float w = -log1p_negative(-(x * x));
    const float inner = polynomial(central, w - 2.5f) * x;
    const float outer = polynomial(tail, __builtin_sqrtf(w) - 3.0f) * x;
    const float finite = w < 5.0f ? inner : outer;
    const float size = __builtin_fabsf(x);
    const float end = size == 1.0f ? x * __builtin_inff() : __builtin_nanf("");
    return size < 1.0f ? finite : end;
}

// A window of a draw as equally long runs of consecutive indices.
struct Runs {
    int outer = 0;                 // dimensions that are stepped through
    int64_t count[kMaxRank];       // per outer dimension
    int64_t stride[kMaxRank];      // per outer dimension, in elements of the whole draw
    int64_t origin = 0;            // index of the window's first element
    int64_t length = 1;            // elements of a run
    int64_t elements = 1;          // elements of the window
};

Runs make_runs(int rank, const int64_t* shape, const int64_t* start, const int64_t* size) {
    Runs runs;
    int64_t strides[kMaxRank];
    int64_t stride = 1;
    for (int d = rank - 1; d >= 0; --d) {
        strides[d] = stride;
        runs.origin += start[d] * stride;
        runs.elements *= size[d];
        stride *= shape[d];
    }
    int d = rank - 1;
    for (; d >= 0; --d) {
        runs.length *= size[d];
        if (size[d] != shape[d]) break;
    }
    runs.outer = d > 0 ? d : 0;
    for (int i = 0; i < runs.outer; ++i) {
        runs.count[i] = size[i];
        runs.stride[i] = strides[i];
    }
    return runs;
}

int64_t run_base(const Runs& runs, int64_t run) {
    int64_t base = runs.origin;
    for (int d = runs.outer - 1; d >= 0; --d) {
        base += (run % runs.count[d]) * runs.stride[d];
        run /= runs.count[d];
    }
    return base;
}

struct Block {
    alignas(64) uint32_t high[kBlock];
    alignas(64) uint32_t low[kBlock];
    alignas(64) int64_t value[kBlock];  // room for the widest result
};

// `m` consecutive counts.
CLONES void fill_run(uint32_t base_high, uint32_t base_low, int m, uint32_t* __restrict high, uint32_t* __restrict low) {
    for (int i = 0; i < m; ++i) {
        low[i] = base_low + static_cast<uint32_t>(i);
        high[i] = base_high + (low[i] < base_low ? 1u : 0u);
    }
}

// Counts of `n` elements of a window from its local position `position` on.
void fill_counts(const Runs& runs, int64_t position, int n, Block& block) {
    int done = 0;
    while (done < n) {
        const int64_t run = (position + done) / runs.length;
        const int64_t within = (position + done) % runs.length;
        const uint64_t base = static_cast<uint64_t>(run_base(runs, run) + within);
        const int64_t left = runs.length - within;
        const int m = left < n - done ? static_cast<int>(left) : n - done;
        fill_run(static_cast<uint32_t>(base >> 32), static_cast<uint32_t>(base), m, block.high + done, block.low + done);
        done += m;
    }
}

CLONES void cipher_block(uint32_t k0, uint32_t k1, uint32_t* __restrict high, uint32_t* __restrict low) {
    for (int i = 0; i < kBlock; ++i) {
        uint32_t x0 = high[i], x1 = low[i];
        cipher(k0, k1, x0, x1);
        high[i] = x0;
        low[i] = x1;
    }
}

CLONES void xor_block(const uint32_t* __restrict high, uint32_t* __restrict low) {
    for (int i = 0; i < kBlock; ++i) low[i] ^= high[i];
}

CLONES void bits64_block(const uint32_t* __restrict high, const uint32_t* __restrict low, uint64_t* __restrict out) {
    for (int i = 0; i < kBlock; ++i) out[i] = static_cast<uint64_t>(high[i]) << 32 | low[i];
}

CLONES void unit_block(const uint32_t* __restrict bits, float* __restrict out) {
    for (int i = 0; i < kBlock; ++i) out[i] = unit(bits[i]);
}

// In double the product is exact: one rounding, like the fused multiply-add of XLA.
CLONES void uniform_block(const uint32_t* __restrict bits, double low, double span, float* __restrict out) {
    const float bottom = static_cast<float>(low);
    for (int i = 0; i < kBlock; ++i) {
        const float value = static_cast<float>(static_cast<double>(unit(bits[i])) * span + low);
        out[i] = value < bottom ? bottom : value;
    }
}

CLONES void normal_block(const uint32_t* __restrict bits, float* __restrict out) {
    for (int i = 0; i < kBlock; ++i) out[i] = 1.41421356237f * erfinv(unit(bits[i]) * 2.0f + (-1.0f + 0x1p-24f));
}

CLONES void bernoulli_block(const uint32_t* __restrict bits, float p, uint8_t* __restrict out) {
    for (int i = 0; i < kBlock; ++i) out[i] = unit(bits[i]) < p ? 1 : 0;
}

CLONES void erfinv_block(const float* __restrict x, float* __restrict out) {
    for (int i = 0; i < kBlock; ++i) out[i] = erfinv(x[i]);
}

// Two words a value to integers of a range: `low + (upper * 2^width + lower) % span`, where a span of 0 counts all words.
template <typename Word>
void integers_block(const Word* upper, const Word* lower, int64_t low, Word span, int64_t* out) {
    const auto remainder = [span](Word x) { return span ? static_cast<Word>(x % span) : x; };
    const Word root = remainder(static_cast<Word>(Word{1} << (sizeof(Word) * 4)));
    const Word multiplier = remainder(static_cast<Word>(root * root));
    for (int i = 0; i < kBlock; ++i) {
        const Word offset = remainder(static_cast<Word>(remainder(upper[i]) * multiplier + remainder(lower[i])));
        out[i] = static_cast<int64_t>(static_cast<uint64_t>(low) + offset);
    }
}

// Turns the words of a block into values; returns the bytes of one value.
int finish_block(int kind, double low, double span, Block& block) {
    if (kind == kBits64) {
        bits64_block(block.high, block.low, reinterpret_cast<uint64_t*>(block.value));
        return 8;
    }
    xor_block(block.high, block.low);
    float* values = reinterpret_cast<float*>(block.value);
    switch (kind) {
        case kBits32:
            std::memcpy(block.value, block.low, sizeof block.low);
            return 4;
        case kUniform:
            if (low == 0.0 && span == 1.0) {
                unit_block(block.low, values);
            } else {
                uniform_block(block.low, low, span, values);
            }
            return 4;
        case kNormal:
            normal_block(block.low, values);
            return 4;
        default:
            bernoulli_block(block.low, static_cast<float>(low), reinterpret_cast<uint8_t*>(block.value));
            return 1;
    }
}

// The words of the `n` elements of a window from `position` on; what follows them in the block is the cipher of nothing in particular.
void draw_block(uint32_t k0, uint32_t k1, const Runs& runs, int64_t position, int n, Block& block) {
    if (n < kBlock) std::memset(&block, 0, sizeof block);
    fill_counts(runs, position, n, block);
    cipher_block(k0, k1, block.high, block.low);
}

// Calls `work(first, key, position, n)` for all blocks of the windows of draws, one draw a key: where its first element goes in the result,
// the two words of its key, its place in the window, how many elements it has.
template <typename Work>
void for_each_block(const int64_t* keys, int64_t key_count, const Runs& runs, [[maybe_unused]] int threads, const Work& work) {
    const int64_t blocks_per_key = (runs.elements + kBlock - 1) / kBlock;
    const int64_t blocks = blocks_per_key * key_count;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && blocks > 128)
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t which = b / blocks_per_key;
        const int64_t position = (b % blocks_per_key) * kBlock;
        const int64_t left = runs.elements - position;
        work(which * runs.elements + position, keys + 2 * which, position, left < kBlock ? static_cast<int>(left) : kBlock);
    }
}

}  // namespace

extern "C" {

// The first two fill `out` [key_count, *size] with the window (start, size) of draws of a shape, one draw a key; keys are [key_count, 2]
// words. They return 0, or 1 for more dimensions than they know.

// `low` is the lower bound of a uniform or the probability of a Bernoulli draw, `span` the width of a uniform's range.
int functrain_threefry_fill(const int64_t* keys, int64_t key_count, int rank, const int64_t* shape, const int64_t* start,
                            const int64_t* size, int kind, double low, double span, void* out, int threads) {
    if (rank > kMaxRank) return 1;
    const Runs runs = make_runs(rank, shape, start, size);
    for_each_block(keys, key_count, runs, threads, [&](int64_t first, const int64_t* key, int64_t position, int n) {
        Block block;
        draw_block(static_cast<uint32_t>(key[0]), static_cast<uint32_t>(key[1]), runs, position, n, block);
        const int bytes = finish_block(kind, low, span, block);
        std::memcpy(static_cast<char*>(out) + first * bytes, block.value, static_cast<size_t>(n) * bytes);
    });
    return 0;
}

// int64 from words of 32 or 64 bits, the upper and the lower ones from two keys that are split off.
int functrain_threefry_integers(const int64_t* keys, int64_t key_count, int rank, const int64_t* shape, const int64_t* start,
                                const int64_t* size, int64_t low, int64_t span, int width, int64_t* out, int threads) {
    if (rank > kMaxRank) return 1;
    const Runs runs = make_runs(rank, shape, start, size);
    for_each_block(keys, key_count, runs, threads, [&](int64_t first, const int64_t* key, int64_t position, int n) {
        Block words[2];
        for (uint32_t i = 0; i < 2; ++i) {
            uint32_t k0 = 0, k1 = i;
            cipher(static_cast<uint32_t>(key[0]), static_cast<uint32_t>(key[1]), k0, k1);
            draw_block(k0, k1, runs, position, n, words[i]);
            finish_block(width == 64 ? kBits64 : kBits32, 0, 0, words[i]);
        }
        int64_t values[kBlock];
        if (width == 64) {
            const auto *upper = reinterpret_cast<uint64_t*>(words[0].value), *lower = reinterpret_cast<uint64_t*>(words[1].value);
            integers_block(upper, lower, low, static_cast<uint64_t>(span), values);
        } else {
            integers_block(words[0].low, words[1].low, low, static_cast<uint32_t>(span), values);
        }
        std::memcpy(out + first, values, sizeof(int64_t) * static_cast<size_t>(n));
    });
    return 0;
}

// out[i] = the cipher of the count data[i] under keys[i]; keys and out are [n, 2] words, data [n].
int functrain_threefry_fold_in(const int64_t* keys, const int64_t* data, int64_t n, int64_t* out) {
    for (int64_t i = 0; i < n; ++i) {
        const uint64_t count = static_cast<uint64_t>(data[i]);
        uint32_t x0 = static_cast<uint32_t>(count >> 32), x1 = static_cast<uint32_t>(count);
        cipher(static_cast<uint32_t>(keys[2 * i]), static_cast<uint32_t>(keys[2 * i + 1]), x0, x1);
        out[2 * i] = x0;
        out[2 * i + 1] = x1;
    }
    return 0;
}

// out[i] = the inverse of erf at x[i].
int functrain_threefry_erfinv(const float* x, int64_t n, float* out, int threads) {
    const int64_t blocks = (n + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && blocks > 128)
    for (int64_t b = 0; b < blocks; ++b) {
        alignas(64) float values[kBlock] = {};
        alignas(64) float results[kBlock];
        const int64_t left = n - b * kBlock;
        const size_t bytes = sizeof(float) * static_cast<size_t>(left < kBlock ? left : kBlock);
        std::memcpy(values, x + b * kBlock, bytes);
        erfinv_block(values, results);
        std::memcpy(out + b * kBlock, results, bytes);
    }
    return 0;
}

}  // extern "C"
