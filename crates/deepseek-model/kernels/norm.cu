// RMS norms. One block per row, of a thread for every 16 bytes of it if a block may have as many.
#include "streams.cuh"

// out = x / sqrt(mean(x^2) + eps) * weight, of a row of `width`. `wide_at(c)` gives values c on of x,
// zeros behind the row's end; it is asked once for each.
template <typename T, bool ALIGNED, typename WideAt>
__device__ void norm_row(T *out, const float *weight, uint32_t width, float eps, WideAt wide_at) {
    constexpr uint32_t COUNT = Wide<T>::COUNT;
    extern __shared__ uint4 held[]; // [width in wides]: x; each thread reads back what it wrote itself
    __shared__ float scratch[32];
    float squares = 0.0f;
    for (uint32_t c = threadIdx.x * COUNT; c < width; c += blockDim.x * COUNT) {
        const Wide<T> x = wide_at(c);
#pragma unroll
        for (uint32_t v = 0; v < COUNT; v++) squares += x.get(v) * x.get(v);
        held[c / COUNT] = make_uint4(x.words[0], x.words[1], x.words[2], x.words[3]);
    }
    const float inv = inverse_root(block_sum(squares, scratch) / (float)width + eps);
    for (uint32_t c = threadIdx.x * COUNT; c < width; c += blockDim.x * COUNT) {
        const uint4 raw = held[c / COUNT];
        Wide<T> x = {{raw.x, raw.y, raw.z, raw.w}};
        float weights[COUNT];
        load_beside<T, ALIGNED>(weights, weight, c, width);
#pragma unroll
        for (uint32_t v = 0; v < COUNT; v++) x.set(v, x.get(v) * inv * weights[v]);
        store_within<T, ALIGNED>(out, c, width, x);
    }
}

struct RmsNormArgs {
    uint64_t x;      // T [rows, width]
    uint64_t weight; // f32 [width]
    uint64_t out;    // T [rows, width]
    uint32_t width;
    float eps;
};

template <typename T, bool ALIGNED> __device__ void rms_norm_row(const RmsNormArgs &args) {
    const uint32_t width = args.width;
    const T *x = at<const T>(args.x) + (size_t)blockIdx.x * width;
    T *out = at<T>(args.out) + (size_t)blockIdx.x * width;
    norm_row<T, ALIGNED>(out, at<const float>(args.weight), width, args.eps,
                         [=](uint32_t c) { return load_within<T, ALIGNED>(x, c, width); });
}

template <typename T> __device__ void rms_norm(const RmsNormArgs &args) {
    if (rows_aligned<T>(args.x | args.weight | args.out, args.width))
        rms_norm_row<T, true>(args);
    else
        rms_norm_row<T, false>(args);
}
FOR_ACTIVATIONS(rms_norm, RmsNormArgs, 1024)

struct CollapseNormArgs {
    uint64_t streams; // T [rows, n, h]
    uint64_t pre;     // f32 [rows, n]
    uint64_t weight;  // f32 [h]
    uint64_t out;     // T [rows, h]
    uint32_t n;
    uint32_t h;
    float eps;
    uint32_t pad;
};

template <typename T, bool ALIGNED> __device__ void collapse_norm_row(const CollapseNormArgs &args) {
    const uint32_t n = args.n, h = args.h;
    const T *streams = at<const T>(args.streams) + (size_t)blockIdx.x * n * h;
    const float *pre = at<const float>(args.pre) + (size_t)blockIdx.x * n;
    T *out = at<T>(args.out) + (size_t)blockIdx.x * h;
    const auto collapsed = [=](uint32_t c) {
        float sums[Wide<T>::COUNT] = {};
        // Unrolled, the loads of the streams do not wait for each other.
#pragma unroll 4
        for (uint32_t j = 0; j < n; j++) {
            const Wide<T> x = load_within<T, ALIGNED>(streams + (size_t)j * h, c, h);
            const float weight = pre[j];
#pragma unroll
            for (uint32_t v = 0; v < Wide<T>::COUNT; v++) sums[v] += weight * x.get(v);
        }
        Wide<T> wide = Wide<T>::zeros();
#pragma unroll
        for (uint32_t v = 0; v < Wide<T>::COUNT; v++) wide.set(v, sums[v]);
        return wide;
    };
    norm_row<T, ALIGNED>(out, at<const float>(args.weight), h, args.eps, collapsed);
}

// out = rmsnorm(sum_j pre[j] * streams[j]) * weight; the sum is rounded to T.
template <typename T> __device__ void collapse_norm(const CollapseNormArgs &args) {
    if (rows_aligned<T>(args.streams | args.weight | args.out, args.h))
        collapse_norm_row<T, true>(args);
    else
        collapse_norm_row<T, false>(args);
}
FOR_ACTIVATIONS(collapse_norm, CollapseNormArgs, 1024)

struct ExpandNormArgs {
    uint64_t y;         // T [rows, h]
    uint64_t streams;   // T [rows, n, h]
    uint64_t post_comb; // f32 [rows, n + n n]
    uint64_t pre;       // f32 [rows, n]
    uint64_t weight;    // f32 [h]
    uint64_t expanded;  // T [rows, n, h], written as expand does
    uint64_t out;       // T [rows, h], written as collapse_norm does of that
    uint32_t n;         // 1 to 4
    uint32_t h;
    float eps;
    uint32_t pad;
};

template <typename T, bool ALIGNED, uint32_t N>
__device__ void expand_norm_row(const ExpandNormArgs &args) {
    const uint32_t h = args.h;
    const size_t row = blockIdx.x;
    const T *y = at<const T>(args.y) + row * h, *streams = at<const T>(args.streams) + row * N * h;
    const float *post_comb = at<const float>(args.post_comb) + row * (N + N * N);
    const float *pre = at<const float>(args.pre) + row * N;
    T *expanded = at<T>(args.expanded) + row * N * h;
    const auto collapsed = [=](uint32_t c) {
        Wide<T> wides[N], sum = Wide<T>::zeros();
        write_back<T, ALIGNED, N>(wides, y, streams, post_comb, expanded, c, h);
#pragma unroll
        for (uint32_t v = 0; v < Wide<T>::COUNT; v++) {
            float value = 0.0f;
#pragma unroll
            for (uint32_t j = 0; j < N; j++) value += __ldg(pre + j) * wides[j].get(v);
            sum.set(v, value);
        }
        return sum;
    };
    norm_row<T, ALIGNED>(at<T>(args.out) + row * h, at<const float>(args.weight), h, args.eps,
                         collapsed);
}

template <typename T, bool ALIGNED> __device__ void expand_norm_of(const ExpandNormArgs &args) {
    switch (args.n) {
    case 1: return expand_norm_row<T, ALIGNED, 1>(args);
    case 2: return expand_norm_row<T, ALIGNED, 2>(args);
    case 3: return expand_norm_row<T, ALIGNED, 3>(args);
    case 4: return expand_norm_row<T, ALIGNED, 4>(args);
    }
}

// Both in one launch, which reads the expanded streams where it makes them.
template <typename T> __device__ void expand_norm(const ExpandNormArgs &args) {
    const uint64_t addresses = args.y | args.streams | args.weight | args.expanded | args.out;
    if (rows_aligned<T>(addresses, args.h))
        expand_norm_of<T, true>(args);
    else
        expand_norm_of<T, false>(args);
}
FOR_ACTIVATIONS(expand_norm, ExpandNormArgs, 640)
