// Values that move 16 bytes at a time.
#pragma once

#include "common.cuh"

// Neighbouring values of 16 bytes, as they lie in memory: COUNT of them. Indices are constants of
// unrolled loops, so that the values stay in registers.
template <typename T> struct Wide {
    static constexpr uint32_t COUNT = 16 / sizeof(T);
    uint32_t words[4];

    __device__ __forceinline__ static Wide zeros() { return {{0, 0, 0, 0}}; }

    // All of them, from an address that is a multiple of 16.
    __device__ __forceinline__ static Wide load(const T *p) {
        const uint4 raw = *reinterpret_cast<const uint4 *>(p);
        return {{raw.x, raw.y, raw.z, raw.w}};
    }

    // The first `n` of them, at any address; zeros behind them.
    __device__ __forceinline__ static Wide load_some(const T *p, uint32_t n) {
        Wide wide = zeros();
#pragma unroll
        for (uint32_t i = 0; i < COUNT; i++)
            if (i < n) wide.set(i, ::load(p + i));
        return wide;
    }

    __device__ __forceinline__ void store(T *p) const {
        *reinterpret_cast<uint4 *>(p) = make_uint4(words[0], words[1], words[2], words[3]);
    }

    __device__ __forceinline__ void store_some(T *p, uint32_t n) const {
#pragma unroll
        for (uint32_t i = 0; i < COUNT; i++)
            if (i < n) ::store(p + i, get(i));
    }

    __device__ __forceinline__ float get(uint32_t i) const;
    __device__ __forceinline__ void set(uint32_t i, float x);
};

template <> __device__ __forceinline__ float Wide<float>::get(uint32_t i) const {
    return __uint_as_float(words[i]);
}
template <> __device__ __forceinline__ float Wide<bf16>::get(uint32_t i) const {
    return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
}

template <> __device__ __forceinline__ void Wide<float>::set(uint32_t i, float x) {
    words[i] = __float_as_uint(x);
}
template <> __device__ __forceinline__ void Wide<bf16>::set(uint32_t i, float x) {
    const uint32_t bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
    words[i / 2] = i % 2 == 0 ? (words[i / 2] & 0xffff0000u) | bits
                              : (words[i / 2] & 0x0000ffffu) | bits << 16;
}

// Values c on of a row of `width`, as far as there are any. ALIGNED: `row` is at a multiple of 16
// bytes, and `width` a whole number of wides.
template <typename T, bool ALIGNED>
__device__ __forceinline__ Wide<T> load_within(const T *row, uint32_t c, uint32_t width) {
    if (c >= width) return Wide<T>::zeros();
    if (ALIGNED) return Wide<T>::load(row + c);
    return Wide<T>::load_some(row + c, width - c);
}

template <typename T, bool ALIGNED>
__device__ __forceinline__ void store_within(T *row, uint32_t c, uint32_t width, const Wide<T> &wide) {
    if (c >= width) return;
    if (ALIGNED)
        wide.store(row + c);
    else
        wide.store_some(row + c, width - c);
}

// Values c on of f32 `values` [width], as many as a wide of T has; ALIGNED as in load_within.
template <typename T, bool ALIGNED>
__device__ __forceinline__ void load_beside(float (&to)[Wide<T>::COUNT], const float *values,
                                            uint32_t c, uint32_t width) {
#pragma unroll
    for (uint32_t v = 0; v < Wide<T>::COUNT; v += Wide<float>::COUNT) {
        const Wide<float> four = load_within<float, ALIGNED>(values, c + v, width);
#pragma unroll
        for (uint32_t i = 0; i < Wide<float>::COUNT; i++) to[v + i] = four.get(i);
    }
}

// Whether rows of `width` values at these addresses, which were or-ed, are ALIGNED.
template <typename T> __device__ __forceinline__ bool rows_aligned(uint64_t addresses, uint32_t width) {
    return addresses % 16 == 0 && width % Wide<T>::COUNT == 0;
}
