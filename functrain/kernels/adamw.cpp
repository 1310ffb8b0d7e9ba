// AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization") in one pass over memory, for one or many leaves.
//
//   g = grad * grad_scale;  mu' = b1 mu + (1 - b1) g;  nu' = b2 nu + (1 - b2) g g
//   update = -lr ((mu' / c1) / (sqrt(nu' / c2 + eps_root) + eps) + weight_decay param)
//
// The arithmetic is that of the torch operations in adamw.py, one rounding each and no contraction, so the result depends neither on the
// instruction set nor on where a leaf is cut, and (but for torch's own sqrt) not on whether the library is there. What is slow is memory:
// each block is prefetched some blocks ahead (a fifth faster on one thread), half-precision numbers are converted in the same loop, and
// results that go to memory nobody has read (new tensors, the half-precision copy) are streamed past the caches.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "halves.h"
#include "portable.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr int kBlock = 64;            // elements
constexpr int64_t kAhead = 8;         // blocks between a prefetch and its use
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
struct Block {
    const T *param, *mu, *nu;
    const void* grad;
    T *new_param, *new_mu, *new_nu;
    void* model;
};

struct NoModel {};

template <class T>
INLINE void narrow(T, NoModel&) {}

// Gradients of type G, a half-precision copy of type M. Conversions are in the loop: they fill the time in which it waits for the divider.
template <class T, class G, class M, bool kAdd>
CLONES void step(const Rule<T>& given, const Block<T>& block, int n) {
    const Rule<T> rule = given;
    const T *const param = block.param, *const mu = block.mu, *const nu = block.nu;
    const G* const grad = static_cast<const G*>(block.grad);
    T *const new_param = block.new_param, *const new_mu = block.new_mu, *const new_nu = block.new_nu;
    M* const model = static_cast<M*>(block.model);
    INDEPENDENT
    for (int i = 0; i < n; ++i) {
        const T g = static_cast<T>(widen(grad[i])) * rule.grad_scale;
        const T m = rule.b1 * mu[i] + rule.rest1 * g;
        const T v = rule.b2 * nu[i] + rule.rest2 * (g * g);
        const T direction = (m * rule.over_c1) / (square_root(v * rule.over_c2 + rule.eps_root) + rule.eps);
        const T update = rule.minus_lr * (direction + rule.weight_decay * param[i]);
        const T result = kAdd ? param[i] + update : update;
        new_mu[i] = m;
        new_nu[i] = v;
        new_param[i] = result;
        if (!std::is_same<M, NoModel>::value) narrow(result, model[i]);
    }
}

struct Kind {
    int state, grad, model;  // dtypes
    bool add;                // whether new_param is the parameter with the update added, or the update
};

template <class T>
using Step = void (*)(const Rule<T>&, const Block<T>&, int);

template <class T, class G>
Step<T> choose_model(const Kind& kind) {
    if (!kind.add) return step<T, G, NoModel, false>;
    switch (kind.model) {
        case kBFloat16: return step<T, G, BFloat16, true>;
        case kFloat16: return step<T, G, Float16, true>;
        default: return step<T, G, NoModel, true>;
    }
}

template <class T>
Step<T> choose(const Kind& kind) {
    switch (kind.grad) {
        case kFloat32: return choose_model<T, float>(kind);
        case kFloat64: return choose_model<T, double>(kind);
        case kBFloat16: return choose_model<T, BFloat16>(kind);
        default: return choose_model<T, Float16>(kind);
    }
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

// Asks for large pages under a new result: without them a page fault every 4 KB costs several times the arithmetic. A hint on Linux.
void expect_writes(void* start, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t kHuge = 1 << 21;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(start) + kHuge - 1) & ~(kHuge - 1);
    const uintptr_t last = (reinterpret_cast<uintptr_t>(start) + bytes) & ~(kHuge - 1);
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
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

    bool in_place() const { return param == new_param && mu == new_mu && nu == new_nu; }
};

template <class T>
class Runner {
  public:
    Runner(const Kind& kind, const double* coefficients)
        : rule_(coefficients), step_(choose<T>(kind)), grad_bytes_(size_of(kind.grad)), has_model_(kind.model != kNone) {}

    // The elements [begin, end) of a leaf.
    void operator()(const Leaf& leaf, int64_t begin, int64_t end) {
        const bool streams = leaf.size >= kStream;
        const bool in_place = leaf.in_place();
        for (int64_t at = begin; at < end; at += kBlock) {
            if (at + (kAhead + 1) * kBlock <= end) look_ahead(block(leaf, at + kAhead * kBlock), in_place);
            const int n = static_cast<int>(std::min<int64_t>(kBlock, end - at));
            run(block(leaf, at), n, streams && !in_place, streams && has_model_);
        }
        if (streams) end_streaming();
    }

  private:
    Block<T> block(const Leaf& leaf, int64_t at) const {
        auto in = [at](const void* base) { return static_cast<const T*>(base) + at; };
        auto out = [at](void* base) { return static_cast<T*>(base) + at; };
        return {in(leaf.param), in(leaf.mu), in(leaf.nu), static_cast<const char*>(leaf.grad) + at * grad_bytes_,
                out(leaf.new_param), out(leaf.new_mu), out(leaf.new_nu), static_cast<uint16_t*>(leaf.model) + at};
    }

    // INLINE is needed: a function that only prefetches has no effect in the eyes of GCC, which drops calls of it.
    INLINE void look_ahead(const Block<T>& block, bool in_place) const {
        for (const T* array : {block.param, block.mu, block.nu}) {
            in_place ? prefetch<true>(array, kBlock * sizeof(T)) : prefetch<false>(array, kBlock * sizeof(T));
        }
        prefetch<false>(block.grad, kBlock * grad_bytes_);
    }

    // Results that are to be streamed are made in the first-level cache.
    void run(const Block<T>& block, int n, bool stream_state, bool stream_model) {
        Block<T> near = block;
        if (stream_state) near.new_param = param_, near.new_mu = mu_, near.new_nu = nu_;
        if (stream_model) near.model = model_;
        step_(rule_, near, n);
        if (stream_state) {
            stream(block.new_param, param_, n * sizeof(T));
            stream(block.new_mu, mu_, n * sizeof(T));
            stream(block.new_nu, nu_, n * sizeof(T));
        }
        if (stream_model) stream(block.model, model_, n * sizeof(uint16_t));
    }

    Rule<T> rule_;
    Step<T> step_;
    int64_t grad_bytes_;
    bool has_model_;
    alignas(64) T param_[kBlock], mu_[kBlock], nu_[kBlock];
    alignas(64) uint16_t model_[kBlock];
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
    for (int64_t i = 0; i < leaves.count; ++i) {
        total += leaves.sizes[i];
        const Leaf leaf = leaves[i];
        if (leaf.in_place()) continue;
        for (void* fresh : {leaf.new_param, leaf.new_mu, leaf.new_nu}) expect_writes(fresh, leaf.size * sizeof(T));
    }
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
