// The engram gate. One block per row and stream.
#include "common.cuh"

struct EngramGateArgs {
    uint64_t streams;      // T [rows, n, h]
    uint64_t key_value;    // T [rows, n h + h]
    uint64_t query_weight; // f32 [n, h]
    uint64_t key_weight;   // f32 [n, h]
    uint64_t out;          // T [rows, n, h]
    uint32_t n;
    uint32_t h;
    float eps;
    uint32_t pad;
};

// out[j] = streams[j] + sigmoid(+-sqrt(max(|dot_j|, 1e-6))) * value
template <typename T> __device__ void engram_gate(const EngramGateArgs &args) {
    __shared__ float scratch[32];
    const uint32_t h = args.h, j = blockIdx.x % args.n;
    const size_t row = blockIdx.x / args.n;
    const T *stream = at<const T>(args.streams) + (size_t)blockIdx.x * h;
    const T *keys = at<const T>(args.key_value) + row * (args.n + 1) * h;
    const T *key = keys + (size_t)j * h, *value = keys + (size_t)args.n * h;
    const float *query_weight = at<const float>(args.query_weight) + (size_t)j * h;
    const float *key_weight = at<const float>(args.key_weight) + (size_t)j * h;
    float product = 0.0f, stream_squares = 0.0f, key_squares = 0.0f;
    for (uint32_t c = threadIdx.x; c < h; c += blockDim.x) {
        const float s = load(stream + c), k = load(key + c);
        product += s * (query_weight[c] * key_weight[c]) * k;
        stream_squares += s * s;
        key_squares += k * k;
    }
    product = block_sum(product, scratch);
    const float stream_inv = inverse_root(block_sum(stream_squares, scratch) / (float)h + args.eps);
    const float key_inv = inverse_root(block_sum(key_squares, scratch) / (float)h + args.eps);
    const float dot = product * (stream_inv * key_inv) / sqrtf((float)h);
    // Not fmaxf, which would make a number of NaN.
    const float size = fabsf(dot) < 1e-6f ? 1e-6f : fabsf(dot);
    const float gate = sigmoid(copysignf(sqrtf(size), dot));
    T *out = at<T>(args.out) + (size_t)blockIdx.x * h;
    for (uint32_t c = threadIdx.x; c < h; c += blockDim.x)
        store(out + c, load(stream + c) + gate * load(value + c));
}
FOR_ACTIVATIONS(engram_gate, EngramGateArgs, 256)
