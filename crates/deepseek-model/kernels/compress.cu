// The compressor's pooling. One block per group, one thread per channel.
#include "common.cuh"

struct CloseGroupsArgs {
    uint64_t keys;      // f32 [rows, width]
    uint64_t gates;     // f32 [rows, width]
    uint64_t old_keys;  // f32 [ring_rows, width], of earlier steps: row slot * capacity + position % capacity
    uint64_t old_gates; // f32 [ring_rows, width]
    uint64_t spans;     // u32 [requests, 4]: slot, first row, first position, rows
    uint64_t groups;    // u32 [groups, 2]: request and entry
    uint64_t out;       // T [groups, width]
    uint32_t requests;
    uint32_t rows;
    uint32_t ring_rows;
    uint32_t capacity;
    uint32_t ratio;
    uint32_t width;
};

// The key and the gate of one channel at a position, or none if there is no such row.
__device__ __forceinline__ bool read_channel(const CloseGroupsArgs &args, const uint32_t *span, uint32_t pos,
                                             uint32_t c, float &key, float &gate) {
    const uint32_t slot = span[0], first_row = span[1], first_pos = span[2];
    const bool is_new = pos >= first_pos;
    const size_t row = is_new ? (size_t)first_row + (pos - first_pos)
                              : (size_t)slot * args.capacity + pos % args.capacity;
    if (row >= (is_new ? args.rows : args.ring_rows)) return false;
    key = at<const float>(is_new ? args.keys : args.old_keys)[row * args.width + c];
    gate = at<const float>(is_new ? args.gates : args.old_gates)[row * args.width + c];
    return true;
}

// out = sum of softmax(gate) * key over the rows of the group, each channel by itself.
template <typename T> __device__ void close_groups(const CloseGroupsArgs &args) {
    const uint32_t *group = at<const uint32_t>(args.groups) + 2 * (size_t)blockIdx.x;
    T *out = at<T>(args.out) + (size_t)blockIdx.x * args.width;
    const bool known = group[0] < args.requests;
    const uint32_t *span = at<const uint32_t>(args.spans) + 4 * (size_t)(known ? group[0] : 0);
    const uint32_t first = group[1] * args.ratio, n = known ? args.ratio : 0;
    for (uint32_t c = threadIdx.x; c < args.width; c += blockDim.x) {
        float key, gate, top = -INFINITY, total = 0.0f, sum = 0.0f;
        for (uint32_t i = 0; i < n; i++)
            if (read_channel(args, span, first + i, c, key, gate)) top = fmaxf(top, gate);
        for (uint32_t i = 0; i < n; i++) {
            if (!read_channel(args, span, first + i, c, key, gate)) continue;
            const float weight = expf(gate - top);
            total += weight;
            // As the CPU sums: no fused product.
            sum = __fadd_rn(sum, __fmul_rn(weight, key));
        }
        store(out + c, total != 0.0f ? sum / total : 0.0f);
    }
}
FOR_ACTIVATIONS(close_groups, CloseGroupsArgs, 256)
