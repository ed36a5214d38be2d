// Which rows of a step run in a replay layer, worked out on the device from the lengths of its
// requests, so that nothing waits for the host. The rule is that of the crate replay-core, which the
// tests hold these kernels to.
//
// Whatever the inputs hold, no address outside the stated extents is touched: lengths are taken with
// saturating arithmetic, and every index that comes from an input is checked before it is used.

typedef unsigned int u32;
typedef unsigned long long u64;

#define NONE 0xffffffffu
#define MAX_LISTS 16
#define BLOCK 256

enum Policy { OFF, STEP_TAIL, PROMPT_TAIL, EXACT };

// What one layer does. A length of NONE means all rows. The layout is `raw::Rule`.
struct Rule {
    u32 policy;
    u32 trims;     // 0: the step keeps the whole batch
    u32 is_cut;    // the first replay layer
    u32 running;   // rows at the end of a prompt (or chunk) that run in the layer
    u32 entering;  // and in the layer before; NONE in the cut
    u32 relative;  // rows are counted among the entering rows and not among the batch's
    u32 sampled;   // rows at the end of a prompt that are read, which a step past it keeps too
    u32 pad;
};

// The layout is `raw::ReplayArgs`.
struct ReplayArgs {
    const u32 *query_start_loc;       // device, [n_requests + 1]
    const u32 *seq_lens;              // device, [n_requests]
    const u32 *prompt_lens;           // device, [n_requests]
    const u32 *replay_starts;         // device, [n_requests]
    const unsigned char *keeps_rows;  // device, [n_requests]
    const void *batch_slots;          // device, [n_batch_rows] of 1 << slot_log2 bytes
    u32 *rows;                        // device, [max_rows]
    void *positions;                  // device, [max_rows] of 1 << position_log2 bytes
    void *slots;                      // device, [max_rows] of 1 << slot_log2 bytes
    u32 *out_start_loc;               // device, [out_requests + 1]
    u32 *kv_start;                    // device, [out_requests]
    u32 *last_rows;                   // device, [out_requests]
    u32 n_requests;                   // at most out_requests
    u32 out_requests;
    u32 n_batch_rows;
    u32 max_rows;
    u32 position_log2;                // 2 or 3
    u32 slot_log2;                    // 2 or 3
    Rule rule;
};

static_assert(sizeof(ReplayArgs) == 152, "the layout of raw::ReplayArgs");

static __device__ __forceinline__ u32 minus(u32 a, u32 b) {
    return a > b ? a - b : 0;
}

struct Request {
    u32 query_len;
    u32 seq_len;
    u32 prompt_len;
    u32 start;
    bool may_drop;
};

static __device__ __forceinline__ Request load(const ReplayArgs &args, u32 r) {
    Request request;
    request.query_len = minus(args.query_start_loc[r + 1], args.query_start_loc[r]);
    request.seq_len = args.seq_lens[r];
    request.prompt_len = args.prompt_lens[r];
    request.start = minus(request.seq_len, request.query_len);
    request.may_drop = request.start < request.prompt_len && args.keeps_rows[r] == 0;
    return request;
}

// Position of the first row that runs when `tail` rows at the end do.
static __device__ __forceinline__ u32 first_running(const Rule &rule, const Request &request, u32 tail) {
    if (tail == NONE || !request.may_drop) {
        return request.start;
    }
    const u32 from = rule.policy == STEP_TAIL
                         ? min(minus(request.seq_len, tail), minus(request.prompt_len, rule.sampled))
                         : minus(request.prompt_len, tail);
    return min(max(from, request.start), request.seq_len);
}

static __device__ __forceinline__ u32 n_running(const Rule &rule, const Request &request, u32 tail) {
    if (!rule.trims) {
        return request.query_len;
    }
    return min(request.seq_len - first_running(rule, request, tail), request.query_len);
}

// The first position whose window KV the layer may read.
static __device__ __forceinline__ u32 kv_bound(const Rule &rule, const Request &request, u32 replay_start) {
    if (rule.is_cut || !request.may_drop || rule.policy == OFF) {
        return replay_start;
    }
    if (rule.policy == STEP_TAIL) {
        const u32 from = first_running(rule, request, rule.running);
        return from > request.start ? from : replay_start;
    }
    const u32 written = rule.entering == NONE ? 0 : minus(request.prompt_len, rule.entering);
    return min(max(written, replay_start), request.seq_len);
}

static __device__ __forceinline__ void store(void *list, u32 index, u32 log2_bytes, u64 value) {
    if (log2_bytes == 3) {
        static_cast<u64 *>(list)[index] = value;
    } else {
        static_cast<u32 *>(list)[index] = static_cast<u32>(value);
    }
}

static __device__ __forceinline__ u64 slot_of(const ReplayArgs &args, u32 row) {
    if (row >= args.n_batch_rows) {
        return ~0ull;
    }
    return args.slot_log2 == 3 ? static_cast<const u64 *>(args.batch_slots)[row]
                               : static_cast<const u32 *>(args.batch_slots)[row];
}

// Grid: enough blocks of BLOCK threads that each of the `max_rows` rows and each of the
// `out_requests + 1` offsets has a thread. Shared: 2 * (n_requests + 1) u32. Every block adds up the
// requests for itself, so that no block waits for another.
extern "C" __global__ void replay_rows(const __grid_constant__ ReplayArgs args) {
    extern __shared__ u32 shared[];
    __shared__ u32 sums[2][BLOCK];
    const u32 n = args.n_requests;
    u32 *running = shared;              // [n + 1], first counts, then offsets
    u32 *entering = shared + (n + 1);   // [n + 1]
    const Rule &rule = args.rule;
    const u32 outer_tail = rule.is_cut ? NONE : rule.entering;

    // Each thread counts the rows of consecutive requests.
    const u32 t = threadIdx.x;
    const u32 each = (n + BLOCK - 1) / BLOCK;
    const u32 begin = min(t * each, n), end = min(begin + each, n);
    u32 sum[2] = {0, 0};
    for (u32 r = begin; r < end; ++r) {
        const Request request = load(args, r);
        running[r] = n_running(rule, request, rule.running);
        entering[r] = n_running(rule, request, outer_tail);
        sum[0] += running[r];
        sum[1] += entering[r];
    }
    // Sums over all threads up to each.
    sums[0][t] = sum[0];
    sums[1][t] = sum[1];
    __syncthreads();
    for (u32 distance = 1; distance < BLOCK; distance *= 2) {
        const u32 before[2] = {t >= distance ? sums[0][t - distance] : 0,
                               t >= distance ? sums[1][t - distance] : 0};
        __syncthreads();
        sums[0][t] += before[0];
        sums[1][t] += before[1];
        __syncthreads();
    }
    u32 offset[2] = {sums[0][t] - sum[0], sums[1][t] - sum[1]};
    for (u32 r = begin; r < end; ++r) {
        const u32 count[2] = {running[r], entering[r]};
        running[r] = offset[0];
        entering[r] = offset[1];
        offset[0] += count[0];
        offset[1] += count[1];
    }
    if (t == BLOCK - 1) {
        running[n] = sums[0][t];
        entering[n] = sums[1][t];
    }
    __syncthreads();

    const u32 i = blockIdx.x * BLOCK + t;
    const u32 total = running[n];
    if (i < args.max_rows) {
        u32 row = NONE, position = 0;
        u64 slot = ~0ull;
        if (i < total) {
            // The first request whose rows end past this one.
            u32 low = 0, high = n - 1;
            while (low < high) {
                const u32 middle = low + (high - low) / 2;
                if (running[middle + 1] <= i) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            const u32 to_end = running[low + 1] - i;
            const u32 batch_row = args.query_start_loc[low + 1] - to_end;
            row = rule.relative ? entering[low + 1] - to_end : batch_row;
            position = args.seq_lens[low] - to_end;
            slot = slot_of(args, batch_row);
        }
        args.rows[i] = row;
        store(args.positions, i, args.position_log2, position);
        store(args.slots, i, args.slot_log2, slot);
    }
    if (i <= args.out_requests) {
        args.out_start_loc[i] = min(i < n ? running[i] : total, args.max_rows);
    }
    if (i < args.out_requests) {
        u32 bound = 0, last = NONE;
        if (i < n) {
            bound = kv_bound(rule, load(args, i), args.replay_starts[i]);
            if (running[i + 1] > running[i] && running[i + 1] <= args.max_rows) {
                last = running[i + 1] - 1;
            }
        }
        args.kv_start[i] = bound;
        args.last_rows[i] = last;
    }
}

// The layout is `raw::PadArgs`.
struct PadArgs {
    void *lists[MAX_LISTS];        // device, each [n_rows] of 1 << log2_bytes[k] bytes
    u32 log2_bytes[MAX_LISTS];     // 2 or 3
    const u32 *query_start_loc;    // device, [n_requests + 1]
    const u32 *seq_lens;           // device, [n_requests]
    const u32 *replay_starts;      // device, [n_requests]
    u32 n_lists;                   // 1 to MAX_LISTS
    u32 n_requests;                // at least 1
    u32 n_rows;
    u32 window;
};

static_assert(sizeof(PadArgs) == 232, "the layout of raw::PadArgs");

// Gives the rows that only rebuild window KV after a prefix hit the slot that writes nothing; the
// slots of other rows are left alone. Grid: a thread for each of the `n_rows` rows.
extern "C" __global__ void pad_rebuilt_slots(const __grid_constant__ PadArgs args) {
    const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= args.n_rows) {
        return;
    }
    // The first request whose rows end past this one.
    u32 low = 0, high = args.n_requests - 1;
    while (low < high) {
        const u32 middle = low + (high - low) / 2;
        if (args.query_start_loc[middle + 1] <= row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const u32 first = args.query_start_loc[low], end = args.query_start_loc[low + 1];
    const u32 replay_start = args.replay_starts[low];
    if (row < first || row >= end || replay_start == 0) {
        return;
    }
    const u32 start = minus(args.seq_lens[low], end - first);
    const u32 hit_end = replay_start > NONE - args.window ? NONE : replay_start + args.window;
    if (row - first < minus(hit_end, start)) {
        for (u32 k = 0; k < args.n_lists; ++k) {
            store(args.lists[k], row, args.log2_bytes[k], ~0ull);
        }
    }
}
