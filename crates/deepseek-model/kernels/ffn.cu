// The pointwise parts of the experts. Choices and places are those of experts.cu.
#include "wide.cuh"

struct SwigluArgs {
    uint64_t hidden; // T [rows, 2 m]: gate, then up
    uint64_t out;    // T [rows, m]
    uint32_t rows;
    uint32_t m;
    float limit; // INFINITY: none
    uint32_t pad;
};

// One thread per 16 bytes of a row of the result.
template <typename T, bool ALIGNED> __device__ void swiglu_wide(const SwigluArgs &args) {
    constexpr uint32_t COUNT = Wide<T>::COUNT;
    const uint32_t m = args.m, wides = (m + COUNT - 1) / COUNT;
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / wides;
    if (row >= args.rows) return;
    const uint32_t c = i % wides * COUNT;
    const T *hidden = at<const T>(args.hidden) + row * 2 * m;
    Wide<T> gate = load_within<T, ALIGNED>(hidden, c, m);
    const Wide<T> up = load_within<T, ALIGNED>(hidden + m, c, m);
#pragma unroll
    for (uint32_t v = 0; v < COUNT; v++) gate.set(v, gated(gate.get(v), up.get(v), args.limit));
    store_within<T, ALIGNED>(at<T>(args.out) + row * m, c, m, gate);
}

template <typename T> __device__ void swiglu(const SwigluArgs &args) {
    if (rows_aligned<T>(args.hidden | args.out, args.m))
        swiglu_wide<T, true>(args);
    else
        swiglu_wide<T, false>(args);
}
FOR_ACTIVATIONS(swiglu, SwigluArgs, 256)

struct CombineArgs {
    uint64_t results; // T [choices, h], by place
    uint64_t place;   // u32 [rows, k]; NONE adds nothing
    uint64_t weights; // f32 [rows, k]
    uint64_t shared;  // T [rows, h]
    uint64_t out;     // T [rows, h]
    uint32_t k;
    uint32_t h;
    uint32_t row_blocks; // blocks of a row: each takes 16 bytes per thread
    uint32_t pad;
};

// Results that are loaded together.
#define TOGETHER 4

template <typename T, bool ALIGNED> __device__ void combine_wide(const CombineArgs &args) {
    typedef Wide<T> W;
    const uint32_t h = args.h, k = args.k;
    const size_t row = blockIdx.x / args.row_blocks;
    const uint32_t c = (blockIdx.x % args.row_blocks * blockDim.x + threadIdx.x) * W::COUNT;
    if (c >= h) return;
    const uint32_t *place = at<const uint32_t>(args.place) + row * k;
    const float *weights = at<const float>(args.weights) + row * k;
    const W shared = load_within<T, ALIGNED>(at<const T>(args.shared) + row * h, c, h);
    float sums[W::COUNT];
#pragma unroll
    for (uint32_t v = 0; v < W::COUNT; v++) sums[v] = shared.get(v);
    for (uint32_t start = 0; start < k; start += TOGETHER) {
        uint32_t places[TOGETHER];
        W results[TOGETHER];
#pragma unroll
        for (uint32_t j = 0; j < TOGETHER; j++) places[j] = start + j < k ? place[start + j] : NONE;
#pragma unroll
        for (uint32_t j = 0; j < TOGETHER; j++) {
            const T *result = at<const T>(args.results) + (size_t)places[j] * h;
            results[j] = places[j] != NONE ? load_within<T, ALIGNED>(result, c, h) : W::zeros();
        }
#pragma unroll
        for (uint32_t j = 0; j < TOGETHER; j++) {
            if (places[j] == NONE) continue;
            const float weight = weights[start + j];
            // As the CPU adds: no fused product.
#pragma unroll
            for (uint32_t v = 0; v < W::COUNT; v++)
                sums[v] = __fadd_rn(sums[v], __fmul_rn(weight, results[j].get(v)));
        }
    }
    W out = W::zeros();
#pragma unroll
    for (uint32_t v = 0; v < W::COUNT; v++) out.set(v, sums[v]);
    store_within<T, ALIGNED>(at<T>(args.out) + row * h, c, h, out);
}

// out = shared + sum_j weights[j] * results[place[j]], in the order of the choices.
template <typename T> __device__ void combine(const CombineArgs &args) {
    if (rows_aligned<T>(args.results | args.shared | args.out, args.h))
        combine_wide<T, true>(args);
    else
        combine_wide<T, false>(args);
}
FOR_ACTIVATIONS(combine, CombineArgs, 128)
