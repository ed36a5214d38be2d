// What a thread does with its channels of all streams of a row.
#pragma once

#include "wide.cuh"

// Channels c on of the N streams of a row: out[j] = post[j] * y + sum_i comb[i][j] * streams[i], written
// and left in `wides`. `post_comb` is f32 [N + N N]; it is the same for all threads of a block.
template <typename T, bool ALIGNED, uint32_t N>
__device__ __forceinline__ void write_back(Wide<T> (&wides)[N], const T *y, const T *streams,
                                           const float *post_comb, T *out, uint32_t c, uint32_t h) {
    const Wide<T> sublayer = load_within<T, ALIGNED>(y, c, h);
    Wide<T> stream[N];
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        stream[i] = load_within<T, ALIGNED>(streams + (size_t)i * h, c, h);
    const float *post = post_comb, *comb = post_comb + N;
#pragma unroll
    for (uint32_t j = 0; j < N; j++) {
        float weights[N];
#pragma unroll
        for (uint32_t i = 0; i < N; i++) weights[i] = __ldg(comb + i * N + j);
        const float weight = __ldg(post + j);
        wides[j] = Wide<T>::zeros();
#pragma unroll
        for (uint32_t v = 0; v < Wide<T>::COUNT; v++) {
            float sum = weight * sublayer.get(v);
#pragma unroll
            for (uint32_t i = 0; i < N; i++) sum += weights[i] * stream[i].get(v);
            wides[j].set(v, sum);
        }
        store_within<T, ALIGNED>(out + (size_t)j * h, c, h, wides[j]);
    }
}
