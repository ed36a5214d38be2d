// What only Hopper has: products of a warpgroup, which read both factors from shared memory and do not
// wait (wgmma, sm_90a), and barriers in shared memory between threads that copy and threads that
// multiply.
#pragma once

#include "tensor_core.cuh"

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// A barrier's phase ends with its `count`th arrival, and the next begins. Phases are numbered from 0.
__device__ __forceinline__ void init_barrier(uint64_t *barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
                 : "memory");
}

__device__ __forceinline__ void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

// This thread arrives once all copies are there that it has started so far.
__device__ __forceinline__ void arrive_with_copies(uint64_t *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                     shared_address(barrier))
                 : "memory");
}

// Waits for the end of a phase, of which the barrier must be in that one or the next.
__device__ __forceinline__ void wait_phase(uint64_t *barrier, uint32_t phase) {
    uint32_t over;
    do {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(over)
                     : "r"(shared_address(barrier)), "r"(phase & 1)
                     : "memory");
    } while (!over);
}

// What this thread has seen in shared memory is there for the products that it starts, too: they read
// it by another way than its own loads.
__device__ __forceinline__ void show_to_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Before products use registers that this thread has written.
__device__ __forceinline__ void open_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the group of the products that were started since the last one.
__device__ __forceinline__ void close_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the last `PENDING` groups are under way.
template <int PENDING> __device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Describes a factor to wgmma: rows of 64 bf16, one after the other from an address that is a multiple
// of 1024, with chunk c of 16 bytes of row r at place c ^ r % 8 of the row. 8 rows are 1024 bytes. The
// address counts in units of 16 bytes, so 16 values further is 2 more.
__device__ __forceinline__ uint64_t swizzled_factor(const bf16 *p) {
    return (uint64_t)1 << 62 | (uint64_t)(1024 / 16) << 32 | (uint64_t)1 << 16 |
           (shared_address(p) & 0x3ffff) >> 4;
}

// Operands of an assembly: sums from number i on.
#define SUMS(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_16(i) SUMS(i), SUMS(i + 4), SUMS(i + 8), SUMS(i + 12)

// sums += a b of a warpgroup: 64 rows of a, 256 rows of b, 16 values of each. With g = lane / 4 and
// t = lane % 4, a lane of warp w holds, for each 8 columns of the result: row 16 w + g, columns 2 t and
// 2 t + 1, then row 16 w + g + 8.
__device__ __forceinline__ void multiply_add_64(float (&sums)[128], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.eq.u32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, add, 1, 1, 0, 0;\n"
        "}"
        : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48), SUMS_16(64), SUMS_16(80), SUMS_16(96),
          SUMS_16(112)
        : "l"(a), "l"(b));
}

// The same of 96 rows of b.
__device__ __forceinline__ void multiply_add_64(float (&sums)[48], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.eq.u32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "%48, %49, add, 1, 1, 0, 0;\n"
        "}"
        : SUMS_16(0), SUMS_16(16), SUMS_16(32)
        : "l"(a), "l"(b));
}

// The same of 32 rows of b.
__device__ __forceinline__ void multiply_add_64(float (&sums)[16], uint64_t a, uint64_t b) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.eq.u32 add, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "%16, %17, add, 1, 1, 0, 0;\n"
                 "}"
                 : SUMS_16(0)
                 : "l"(a), "l"(b));
}
#undef SUMS_16
#undef SUMS

// Turns an 8 x 8 matrix of 16-bit values, of which a lane holds values lane % 4 * 2 and the next of row
// lane / 4: rows become columns.
__device__ __forceinline__ uint32_t turned(uint32_t pair) {
    uint32_t to;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(pair));
    return to;
}
