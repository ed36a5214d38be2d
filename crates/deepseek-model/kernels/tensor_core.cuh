// Copies to shared memory that do not wait, and products of bf16 tiles on tensor cores (sm_80).
#pragma once

#include "common.cuh"

// 16 bytes from global to shared memory, both aligned to 16.
__device__ __forceinline__ void copy_async(bf16 *to, const bf16 *from) {
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

// Closes the group of the copies that this thread has started since the last group.
__device__ __forceinline__ void close_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the last `PENDING` groups of this thread are under way.
template <int PENDING> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices. Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i, aligned to
// 16; every lane gets two neighbouring values of each, of row lane / 4 from column lane % 4 * 2.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const bf16 *row) {
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared)
                 : "memory");
}

// The same of the transposed matrices: a lane gets values of column lane / 4 at rows lane % 4 * 2 on.
__device__ __forceinline__ void load_turned(uint32_t (&to)[4], const bf16 *row) {
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared)
                 : "memory");
}

// sums += a b, of 16 x 16 and 16 x 8. With g = lane / 4 and t = lane % 4, a lane holds
// a: rows g, g + 8, g, g + 8 at columns 2 t, 2 t, 2 t + 8, 2 t + 8, and the next columns;
// b: columns g at rows 2 t and 2 t + 8, and the next rows;
// sums: row g, columns 2 t and 2 t + 1, then row g + 8.
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
