// Attention on tensor cores, for few rows of bf16: the keys of a row are split over blocks, so that one
// row keeps more than a few multiprocessors busy. A second kernel joins what they add up, always in the
// same order.
#include "attention_tensor.cuh"

#define HEADS 16
#define JOINERS (DIM / 4) // threads that join a head, each four channels
#define TOGETHER 8        // splits whose sums are on their way together

static_assert(WARPS * 8 == KEYS, "a warp multiplies eight keys of a tile");

// Products of all heads with a tile's keys, to `scores`. A warp takes eight keys.
__device__ __forceinline__ void multiply_keys(const bf16 *queries, const bf16 *tile, float *scores) {
    const uint32_t lane = threadIdx.x % 32, first_key = threadIdx.x / 32 * 8;
    // Rows and columns of the 8 x 8 matrices whose addresses this lane gives.
    const uint32_t head = lane % 16, head_column = lane / 16 * 8;
    const uint32_t key = first_key + lane % 8, key_column = lane / 8 * 8;
    float sums[2][4] = {};
#pragma unroll 4
    for (uint32_t c = 0; c < DIM; c += 32) {
        uint32_t a[2][4], b[4];
        load_matrices(a[0], queries + swizzled(head, c + head_column));
        load_matrices(a[1], queries + swizzled(head, c + 16 + head_column));
        load_matrices(b, tile + swizzled(key, c + key_column));
        multiply_add(sums[0], a[0], b[0], b[1]);
        multiply_add(sums[1], a[1], b[2], b[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t h = half * 8 + lane / 4, k = first_key + lane % 4 * 2;
        *reinterpret_cast<float2 *>(scores + h * SCORE_STRIDE + k) = make_float2(
            sums[0][2 * half] + sums[1][2 * half], sums[0][2 * half + 1] + sums[1][2 * half + 1]);
    }
}

// Block b takes split b % splits of the keys, and heads HEADS * (b / splits % groups) on of row
// b / splits / groups. Of a split without keys it writes a total below 0, and no sums; of pad rows
// nothing.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_split(const AttentionArgs args) {
    extern __shared__ __align__(128) uint8_t memory[];
    Shared<HEADS> &shared = *reinterpret_cast<Shared<HEADS> *>(memory);
    const uint32_t groups = (args.heads + HEADS - 1) / HEADS;
    const uint32_t split = blockIdx.x % args.splits, group = blockIdx.x / args.splits % groups;
    const size_t row = blockIdx.x / args.splits / groups;
    const uint32_t first_head = group * HEADS, heads = min((uint32_t)HEADS, args.heads - first_head);
    const uint32_t request = at<const uint32_t>(args.requests)[row];
    if (request >= args.n_requests) return;
    const size_t place = (row * args.splits + split) * args.heads + first_head;
    float2 *totals = at<float2>(args.totals) + place;
    const RowKeys keys = keys_of_row(args, row, request);
    const uint32_t n = keys.in_window + keys.chosen, begin = split * args.split_keys;
    if (begin >= n) {
        if (threadIdx.x < heads) totals[threadIdx.x] = make_float2(0.0f, -1.0f);
        return;
    }
    copy_queries<HEADS>(at<const bf16>(args.q) + (row * args.heads + first_head) * DIM, heads, shared.queries);
    Softmax<HEADS> softmax;
    const uint32_t own_head = threadIdx.x / softmax.PARTS;
    softmax.start(own_head < heads ? at<const float>(args.sink)[first_head + own_head] : 0.0f, false);
    Values<HEADS> values = {};
    add_keys(args, keys, begin, min(begin + args.split_keys, n), shared, softmax, values, multiply_keys);
    const float total = softmax.finish();
    if (own_head < heads && threadIdx.x % softmax.PARTS == 0) totals[own_head] = make_float2(softmax.top, total);
    float *sums = at<float>(args.sums) + place * DIM;
    values.for_pairs([&](uint32_t head, uint32_t c, float low, float high) {
        if (head < heads) *reinterpret_cast<float2 *>(sums + (size_t)head * DIM + c) = make_float2(low, high);
    });
}

// Joins the splits of head b % heads of row b / heads, and adds the sink. Pad rows get zeros.
extern "C" __global__ void __launch_bounds__(JOINERS) attention_join(const AttentionArgs args) {
    const size_t row = blockIdx.x / args.heads;
    const uint32_t head = blockIdx.x % args.heads, c = threadIdx.x * 4;
    bf16 *out = at<bf16>(args.out) + (row * args.heads + head) * DIM + c;
    float4 joined = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (at<const uint32_t>(args.requests)[row] < args.n_requests) {
        const size_t first = row * args.splits * args.heads + head; // and every heads-th from there on
        const float2 *totals = at<const float2>(args.totals) + first;
        const float *sums = at<const float>(args.sums) + first * DIM + c;
        const float sink = at<const float>(args.sink)[head] * LOG2_E;
        float top = sink;
        for (uint32_t s = threadIdx.x % 32; s < args.splits; s += 32) {
            const float2 split = totals[(size_t)s * args.heads];
            if (!(split.y < 0.0f)) top = fmaxf(top, split.x);
        }
        top = warp_max(top);
        float total = exp2f(sink - top);
        for (uint32_t start = 0; start < args.splits; start += TOGETHER) {
            float2 split[TOGETHER];
            float4 part[TOGETHER];
#pragma unroll
            for (uint32_t k = 0; k < TOGETHER; k++) {
                const size_t s = (size_t)(start + k) * args.heads;
                split[k] = start + k < args.splits ? totals[s] : make_float2(0.0f, -1.0f);
                // Also where there are none: what is read then is not used.
                if (start + k < args.splits) part[k] = load4(sums + s * DIM);
            }
#pragma unroll
            for (uint32_t k = 0; k < TOGETHER; k++) {
                if (split[k].y < 0.0f) continue; // no keys; a total that is no number goes on
                const float factor = exp2f(split[k].x - top);
                total = fmaf(split[k].y, factor, total);
                joined.x = fmaf(part[k].x, factor, joined.x);
                joined.y = fmaf(part[k].y, factor, joined.y);
                joined.z = fmaf(part[k].z, factor, joined.z);
                joined.w = fmaf(part[k].w, factor, joined.w);
            }
        }
        const float inverse = 1.0f / total;
        joined = make_float4(joined.x * inverse, joined.y * inverse, joined.z * inverse, joined.w * inverse);
    }
    *reinterpret_cast<__nv_bfloat162 *>(out) = __floats2bfloat162_rn(joined.x, joined.y);
    *reinterpret_cast<__nv_bfloat162 *>(out + 2) = __floats2bfloat162_rn(joined.z, joined.w);
}
