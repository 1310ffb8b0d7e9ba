// AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization") in one pass over memory, for one or many leaves.
//
//   g = grad * grad_scale;  mu' = b1 mu + (1 - b1) g;  nu' = b2 nu + (1 - b2) g g
//   update = -lr ((mu' / c1) / (sqrt(nu' / c2 + eps_root) + eps) + weight_decay param)
//
// The arithmetic is that of the torch operations in adamw.py, one rounding each and no contraction, so the result depends neither on the
// instruction set nor on where a leaf is cut, and (but for torch's own sqrt) not on whether the library is there. What is slow is memory:
// a block of 128 elements is prefetched some blocks ahead, half-precision gradients are widened in the first-level cache, and results that
// go to memory nobody has read (new tensors, the half-precision copy) are streamed past the caches.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "halves.h"
#include "portable.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

constexpr int kBlock = 128;           // elements
constexpr int64_t kAhead = 4;         // blocks between a prefetch and its use
constexpr int64_t kStream = 1 << 18;  // elements from which new results bypass the caches: they would not stay there

// ---- the rule, on one block in the first-level cache

template <class T>
struct Rule {
    T minus_lr, b1, b2, eps, eps_root, weight_decay, over_c1, over_c2, grad_scale, rest1, rest2;

    explicit Rule(const double* c)
        : minus_lr(T(-c[0])), b1(T(c[1])), b2(T(c[2])), eps(T(c[3])), eps_root(T(c[4])), weight_decay(T(c[5])), over_c1(T(1 / c[6])),
          over_c2(T(1 / c[7])), grad_scale(T(c[8])), rest1(T(1 - c[1])), rest2(T(1 - c[2])) {}
};

template <class T>
struct Inputs {
    const T *param, *mu, *nu, *grad;
};

template <class T>
struct Outputs {
    T *param, *mu, *nu;
};

template <class T, bool kAdd>
CLONES void step(const Rule<T>& given, const Inputs<T>& in, const Outputs<T>& out, int n) {
    const Rule<T> rule = given;
    const T *const param = in.param, *const mu = in.mu, *const nu = in.nu, *const grad = in.grad;
    T *const new_param = out.param, *const new_mu = out.mu, *const new_nu = out.nu;
    INDEPENDENT
    for (int i = 0; i < n; ++i) {
        const T g = grad[i] * rule.grad_scale;
        const T m = rule.b1 * mu[i] + rule.rest1 * g;
        const T v = rule.b2 * nu[i] + rule.rest2 * (g * g);
        const T direction = (m * rule.over_c1) / (square_root(v * rule.over_c2 + rule.eps_root) + rule.eps);
        const T update = rule.minus_lr * (direction + rule.weight_decay * param[i]);
        new_mu[i] = m;
        new_nu[i] = v;
        new_param[i] = kAdd ? param[i] + update : update;
    }
}

template <class From, class T>
CLONES void widen_all(const From* from, T* to, int n) {
    INDEPENDENT
    for (int i = 0; i < n; ++i) to[i] = static_cast<T>(widen(from[i]));
}

template <class T, class To>
CLONES void narrow_all(const T* from, To* to, int n) {
    INDEPENDENT
    for (int i = 0; i < n; ++i) narrow(from[i], to[i]);
}

template <class T>
void widen_block(int dtype, const void* from, T* to, int n) {
    switch (dtype) {
        case kFloat32: return widen_all(static_cast<const float*>(from), to, n);
        case kFloat64: return widen_all(static_cast<const double*>(from), to, n);
        case kBFloat16: return widen_all(static_cast<const BFloat16*>(from), to, n);
        default: return widen_all(static_cast<const Float16*>(from), to, n);
    }
}

template <class T>
void narrow_block(int dtype, const T* from, void* to, int n) {
    if (dtype == kBFloat16) return narrow_all(from, static_cast<BFloat16*>(to), n);
    narrow_all(from, static_cast<Float16*>(to), n);
}

// ---- memory

// Copies a finished block out of the first-level cache without reading the lines it overwrites, where the target's alignment allows it.
void stream(void* to, const void* from, size_t bytes) {
#if defined(__SSE2__)
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0 && bytes % 16 == 0) {
        __m128i* target = static_cast<__m128i*>(to);
        const __m128i* source = static_cast<const __m128i*>(from);
        for (size_t i = 0; i < bytes / 16; ++i) _mm_stream_si128(target + i, _mm_load_si128(source + i));
        return;
    }
#endif
    std::memcpy(to, from, bytes);
}

void end_streaming() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

template <bool kForWrite>
INLINE void prefetch(const void* block, size_t bytes) {
    const char* const start = static_cast<const char*>(block);
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(start + i, kForWrite);
}

size_t size_of(int dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }

// ---- one leaf

struct Leaf {
    const void *param, *mu, *nu, *grad;
    void *new_param, *new_mu, *new_nu, *model;
    int64_t size;
};

struct Kind {
    int state, grad, model;  // dtypes
    bool add;                // whether new_param is the parameter with the update added, or the update
};

template <class T>
struct Scratch {
    alignas(64) T grad[kBlock], param[kBlock], mu[kBlock], nu[kBlock];
    alignas(64) uint16_t model[kBlock];
};

template <class T>
class Runner {
  public:
    Runner(const Kind& kind, const double* coefficients) : kind_(kind), rule_(coefficients), same_(kind.grad == kind.state) {}

    // The elements [begin, end) of a leaf.
    void operator()(const Leaf& leaf, int64_t begin, int64_t end) {
        const bool streams = leaf.size >= kStream;
        const bool in_place = leaf.param == leaf.new_param && leaf.mu == leaf.new_mu && leaf.nu == leaf.new_nu;
        for (int64_t at = begin; at < end; at += kBlock) {
            const int n = static_cast<int>(std::min<int64_t>(kBlock, end - at));
            if (at + (kAhead + 1) * kBlock <= end) look_ahead(leaf, at + kAhead * kBlock, in_place);
            const Outputs<T> direct{place<T>(leaf.new_param, at), place<T>(leaf.new_mu, at), place<T>(leaf.new_nu, at)};
            if (in_place || !streams) {
                block(leaf, direct, at, n, streams);
            } else {
                block(leaf, {scratch_.param, scratch_.mu, scratch_.nu}, at, n, streams);
                stream(direct.param, scratch_.param, n * sizeof(T));
                stream(direct.mu, scratch_.mu, n * sizeof(T));
                stream(direct.nu, scratch_.nu, n * sizeof(T));
            }
        }
        if (streams) end_streaming();
    }

  private:
    template <class U>
    static U* place(void* base, int64_t at) { return static_cast<U*>(base) + at; }
    template <class U>
    static const U* place(const void* base, int64_t at) { return static_cast<const U*>(base) + at; }

    void look_ahead(const Leaf& leaf, int64_t at, bool in_place) const {
        const size_t bytes = kBlock * sizeof(T);
        const T *param = place<T>(leaf.param, at), *mu = place<T>(leaf.mu, at), *nu = place<T>(leaf.nu, at);
        if (in_place) {
            prefetch<true>(param, bytes), prefetch<true>(mu, bytes), prefetch<true>(nu, bytes);
        } else {
            prefetch<false>(param, bytes), prefetch<false>(mu, bytes), prefetch<false>(nu, bytes);
        }
        prefetch<false>(static_cast<const char*>(leaf.grad) + at * size_of(kind_.grad), kBlock * size_of(kind_.grad));
    }

    void block(const Leaf& leaf, const Outputs<T>& out, int64_t at, int n, bool streams) {
        const T* grad = place<T>(leaf.grad, at);
        if (!same_) {
            widen_block(kind_.grad, static_cast<const char*>(leaf.grad) + at * size_of(kind_.grad), scratch_.grad, n);
            grad = scratch_.grad;
        }
        const Inputs<T> in{place<T>(leaf.param, at), place<T>(leaf.mu, at), place<T>(leaf.nu, at), grad};
        (kind_.add ? step<T, true> : step<T, false>)(rule_, in, out, n);
        if (kind_.model != kNone) write_model(place<uint16_t>(leaf.model, at), out.param, n, streams);
    }

    void write_model(uint16_t* model, const T* param, int n, bool streams) {
        uint16_t* target = streams ? scratch_.model : model;
        narrow_block(kind_.model, param, target, n);
        if (streams) stream(model, target, n * sizeof(uint16_t));
    }

    Kind kind_;
    Rule<T> rule_;
    bool same_;
    Scratch<T> scratch_;
};

// ---- many leaves, one range of all their elements per thread

struct Leaves {
    int64_t count;
    const int64_t* sizes;
    const int64_t* addresses;  // [8, count]

    Leaf operator[](int64_t i) const {
        auto at = [&](int row) { return reinterpret_cast<void*>(addresses[row * count + i]); };
        return {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), sizes[i]};
    }
};

// Both neighbours of a cut round it alike, to a block of the leaf it falls in.
int64_t cut(int64_t position, int64_t size) {
    return position <= 0 ? 0 : position >= size ? size : position / kBlock * kBlock;
}

template <class T>
void run_range(const Leaves& leaves, const Kind& kind, const double* coefficients, int64_t begin, int64_t end) {
    Runner<T> run(kind, coefficients);
    int64_t start = 0;  // of the leaf, in the concatenation of all
    for (int64_t i = 0; i < leaves.count && start < end; start += leaves.sizes[i], ++i) {
        const int64_t size = leaves.sizes[i], first = cut(begin - start, size), last = cut(end - start, size);
        if (first < last) run(leaves[i], first, last);
    }
}

template <class T>
void run_all(const Leaves& leaves, const Kind& kind, const double* coefficients, int threads) {
    int64_t total = 0;
    for (int64_t i = 0; i < leaves.count; ++i) total += leaves.sizes[i];
    if (threads <= 1) return run_range<T>(leaves, kind, coefficients, 0, total);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int t = 0; t < threads; ++t) run_range<T>(leaves, kind, coefficients, total * t / threads, total * (t + 1) / threads);
}

}  // namespace

extern "C" {

// Updates one leaf or many. The arguments are one record of 64-bit integers, since a foreign call costs by the argument:
//   state, grad, model (dtypes, see halves.h; model is -1 for none), add (the update to the parameter, or return it), threads, count,
//   coefficients (address), sizes [count], addresses [8, count]: param, mu, nu, grad, new param or update, new mu, new nu, model.
// A new value may lie in the old one's place.
void functrain_adamw(const int64_t* record) {
    const Kind kind{static_cast<int>(record[0]), static_cast<int>(record[1]), static_cast<int>(record[2]), record[3] != 0};
    const int threads = static_cast<int>(record[4]);
    const int64_t count = record[5];
    const double* coefficients = reinterpret_cast<const double*>(record[6]);
    const Leaves leaves{count, record + 7, record + 7 + count};
    if (kind.state == kFloat64) {
        run_all<double>(leaves, kind, coefficients, threads);
    } else {
        run_all<float>(leaves, kind, coefficients, threads);
    }
}

}  // extern "C"
