// What the kernels of the decoder share.
//
// Activations are f32 or bf16 (T); sums, norms and coefficients are f32. A value is rounded to T
// where it would be stored, as the CPU implementation does it. Every kernel takes one struct by
// value, whose addresses are device addresses of contiguous row-major arrays; the struct says shape
// and dtype of each. Grids have one axis.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;

#define LOG2_E 1.4426950408889634f

// Fills the places of lists that stand for nothing: pad rows, entries that were not chosen.
#define NONE 0xffffffffu

template <typename T> __device__ __forceinline__ float load(const T *p);
template <> __device__ __forceinline__ float load<float>(const float *p) { return *p; }
template <> __device__ __forceinline__ float load<bf16>(const bf16 *p) { return __bfloat162float(*p); }

template <typename T> __device__ __forceinline__ void store(T *p, float x);
template <> __device__ __forceinline__ void store<float>(float *p, float x) { *p = x; }
template <> __device__ __forceinline__ void store<bf16>(bf16 *p, float x) { *p = __float2bfloat16_rn(x); }

// A value as it would read back after being stored.
template <typename T> __device__ __forceinline__ float rounded(float x);
template <> __device__ __forceinline__ float rounded<float>(float x) { return x; }
template <> __device__ __forceinline__ float rounded<bf16>(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}

template <typename T> __device__ __forceinline__ T *at(uint64_t address) {
    return reinterpret_cast<T *>(address);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// silu(gate) up; the gate has an upper clamp only. Not fminf, which would make a number of NaN.
__device__ __forceinline__ float gated(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate * sigmoid(gate) * up;
}

// Sum over a warp, in every lane.
__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// Sum over a block, in every thread. `scratch` has room for 32 values; the block is whole warps.
__device__ __forceinline__ float block_sum(float x, float *scratch) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = lane < warps ? scratch[lane] : 0.0f;
    return warp_sum(x);
}

// 1 / sqrt of a mean of squares; NaN, not 0, where that is infinite: a row that overflows may not
// come out of its norm as zeros.
__device__ __forceinline__ float inverse_root(float mean) {
    return mean < INFINITY ? 1.0f / sqrtf(mean) : nanf("");
}

// Defines `name_f32` and `name_bf16`, which call the template `name`.
#define FOR_ACTIVATIONS(name, Args, threads)                                                       \
    extern "C" __global__ void __launch_bounds__(threads) name##_f32(const Args args) {           \
        name<float>(args);                                                                         \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(threads) name##_bf16(const Args args) {          \
        name<bf16>(args);                                                                          \
    }
