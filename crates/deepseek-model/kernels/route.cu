// The router. One block of one warp per row.
#include "common.cuh"

#define SQRT_SOFTPLUS 0
#define SIGMOID 1
#define SOFTMAX 2

struct RouteArgs {
    uint64_t logits;  // f32 [rows, experts]
    uint64_t bias;    // f32 [experts], takes part in the choice only
    uint64_t ids;     // u32 [rows, k], written: best first
    uint64_t weights; // f32 [rows, k], written
    uint64_t faults;  // u32 [1], lowered to `code` where a row has fewer than k candidates
    uint32_t experts;
    uint32_t k; // at most experts
    uint32_t scoring;
    uint32_t normalise; // divide by the sum of the chosen scores
    float factor;
    uint32_t code;
};

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Scores of a row. A lane has experts lane, lane + 32, ... here and in the choice.
__device__ void score(float *scores, const float *logits, uint32_t experts, uint32_t scoring) {
    const uint32_t lane = threadIdx.x;
    if (scoring != SOFTMAX) {
        for (uint32_t e = lane; e < experts; e += 32)
            scores[e] = scoring == SIGMOID ? sigmoid(logits[e]) : sqrtf(softplus(logits[e]));
        return;
    }
    float top = -INFINITY;
    for (uint32_t e = lane; e < experts; e += 32) top = fmaxf(top, logits[e]);
    top = warp_max(top);
    float sum = 0.0f;
    for (uint32_t e = lane; e < experts; e += 32) {
        scores[e] = expf(logits[e] - top);
        sum += scores[e];
    }
    const float inv = 1.0f / warp_sum(sum);
    for (uint32_t e = lane; e < experts; e += 32) scores[e] = __fmul_rn(scores[e], inv);
}

// The expert of the largest value, the lower one among equals, in every lane; NONE if no value is
// above -INFINITY. A NaN is not.
__device__ uint32_t best(const float *values, uint32_t experts) {
    float value = -INFINITY;
    uint32_t expert = NONE;
    for (uint32_t e = threadIdx.x; e < experts; e += 32) {
        if (values[e] > value) {
            value = values[e];
            expert = e;
        }
    }
    // A number that orders as the value does, above 0 where there is one. Adding 0 makes zeros equal.
    const uint32_t bits = __float_as_uint(value + 0.0f);
    const uint32_t number = expert == NONE ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    const uint32_t top = __reduce_max_sync(0xffffffffu, number);
    return __reduce_min_sync(0xffffffffu, number == top ? expert : NONE);
}

extern "C" __global__ void __launch_bounds__(32) route(const RouteArgs args) {
    extern __shared__ float scores[]; // [experts]
    float *values = scores + args.experts; // [experts], -INFINITY once chosen; each lane its own
    uint32_t *chosen = (uint32_t *)(values + args.experts); // [k]
    const uint32_t lane = threadIdx.x, k = args.k;
    const float *bias = at<const float>(args.bias);
    score(scores, at<const float>(args.logits) + (size_t)blockIdx.x * args.experts, args.experts,
          args.scoring);
    for (uint32_t e = lane; e < args.experts; e += 32) values[e] = scores[e] + bias[e];
    __syncwarp();
    float sum = 0.0f;
    for (uint32_t j = 0; j < k; j++) {
        const uint32_t expert = best(values, args.experts);
        if (expert != NONE) {
            sum += scores[expert];
            if (lane == expert % 32) values[expert] = -INFINITY;
        }
        if (lane == 0) chosen[j] = expert;
    }
    __syncwarp();
    if (lane == 0 && chosen[k - 1] == NONE) atomicMin(at<uint32_t>(args.faults), args.code);
    const float divisor = args.normalise ? sum + 1e-20f : 1.0f;
    for (uint32_t j = lane; j < k; j += 32) {
        const uint32_t expert = chosen[j];
        const size_t out = (size_t)blockIdx.x * k + j;
        // What follows runs all the same until someone reads the fault: an expert there is, and a
        // weight that adds nothing.
        at<uint32_t>(args.ids)[out] = expert == NONE ? j : expert;
        at<float>(args.weights)[out] =
            expert == NONE ? 0.0f : __fmul_rn(__fdiv_rn(scores[expert], divisor), args.factor);
    }
}
