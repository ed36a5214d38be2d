// The pointwise parts of the experts.
#include "common.cuh"

struct SwigluArgs {
    uint64_t hidden; // T [rows, 2 m]: gate, then up
    uint64_t out;    // T [rows, m]
    uint32_t rows;
    uint32_t m;
    float limit; // INFINITY: none
    uint32_t pad;
};

template <typename T> __device__ void swiglu(const SwigluArgs &args) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)args.rows * args.m) return;
    const T *gates = at<const T>(args.hidden) + i / args.m * 2 * args.m + i % args.m;
    store(at<T>(args.out) + i, gated(load(gates), load(gates + args.m), args.limit));
}
FOR_ACTIVATIONS(swiglu, SwigluArgs, 256)
