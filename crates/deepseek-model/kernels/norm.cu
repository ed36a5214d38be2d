// RMS norms. One block per row.
#include "common.cuh"

struct RmsNormArgs {
    uint64_t x;      // T [rows, width]
    uint64_t weight; // f32 [width]
    uint64_t out;    // T [rows, width]
    uint32_t width;
    float eps;
};

// out = x / sqrt(mean(x^2) + eps) * weight
template <typename T> __device__ void rms_norm(const RmsNormArgs &args) {
    __shared__ float scratch[32];
    const T *x = at<const T>(args.x) + (size_t)blockIdx.x * args.width;
    T *out = at<T>(args.out) + (size_t)blockIdx.x * args.width;
    const float *weight = at<const float>(args.weight);
    float sum = 0.0f;
    for (uint32_t c = threadIdx.x; c < args.width; c += blockDim.x) {
        const float v = load(x + c);
        sum += v * v;
    }
    const float inv = inverse_root(block_sum(sum, scratch) / (float)args.width + args.eps);
    for (uint32_t c = threadIdx.x; c < args.width; c += blockDim.x)
        store(out + c, load(x + c) * inv * weight[c]);
}
FOR_ACTIVATIONS(rms_norm, RmsNormArgs, 256)

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

// out = rmsnorm(sum_j pre[j] * streams[j]) * weight; the sum is rounded to T.
template <typename T> __device__ void collapse_norm(const CollapseNormArgs &args) {
    extern __shared__ float sums[]; // [h]
    __shared__ float scratch[32];
    const T *streams = at<const T>(args.streams) + (size_t)blockIdx.x * args.n * args.h;
    const float *pre = at<const float>(args.pre) + (size_t)blockIdx.x * args.n;
    const float *weight = at<const float>(args.weight);
    T *out = at<T>(args.out) + (size_t)blockIdx.x * args.h;
    float squares = 0.0f;
    for (uint32_t c = threadIdx.x; c < args.h; c += blockDim.x) {
        float sum = 0.0f;
        for (uint32_t j = 0; j < args.n; j++) sum += pre[j] * load(streams + (size_t)j * args.h + c);
        sum = rounded<T>(sum);
        sums[c] = sum;
        squares += sum * sum;
    }
    const float inv = inverse_root(block_sum(squares, scratch) / (float)args.h + args.eps);
    // Each thread reads back what it wrote itself.
    for (uint32_t c = threadIdx.x; c < args.h; c += blockDim.x)
        store(out + c, sums[c] * inv * weight[c]);
}
FOR_ACTIVATIONS(collapse_norm, CollapseNormArgs, 256)
