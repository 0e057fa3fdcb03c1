#pragma once
// Hopper's asynchronous machinery, one PTX instruction a function: barriers in shared memory, TMA
// loads into every block of a cluster, and warpgroup matrix products. Shared-memory addresses are the
// 32-bit ones of the shared window.

struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

__device__ __forceinline__ unsigned int shared_address(const void* pointer) {
  return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

// --- clusters ---

__device__ __forceinline__ unsigned int cluster_rank() {
  unsigned int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// --- barriers ---

__device__ __forceinline__ void barrier_init(unsigned int barrier, unsigned int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the other blocks of the cluster and to TMA.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(unsigned int barrier, unsigned int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at the barrier of the same address in block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive(unsigned int barrier, unsigned int rank) {
  asm volatile("{ .reg .b32 remote;\n\t"
               "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
               "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
               "r"(rank)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(unsigned int barrier, unsigned int parity) {
  unsigned int done;
  do {
    asm volatile("{ .reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

// --- TMA ---

__device__ __forceinline__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box of `map` at (column, row) into this block's shared memory.
__device__ __forceinline__ void load_box(unsigned int target, const TensorMap& map, int column,
                                         int row, unsigned int barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
               "l"(&map), "r"(column), "r"(row), "r"(barrier)
               : "memory");
}

// The same into the same place of every block that `blocks` has a bit for, each at its own barrier.
__device__ __forceinline__ void load_box_to(unsigned short blocks, unsigned int target,
                                            const TensorMap& map, int column, int row,
                                            unsigned int barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
               "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
               : "memory");
}

// --- warpgroups ---

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A tile of rows of 64 half-precision values, swizzled by 128 bytes: 8 rows are 1024 bytes.
__device__ __forceinline__ unsigned long long matrix_at(unsigned int address) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62, kEightRows = 1024ull >> 4 << 32;
  return kSwizzle128 | kEightRows | 1ull << 16 | (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_end() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` groups of products are under way.
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// After a wait for all products: the compiler may read the sum from here on, and not before.
template <int kRegisters>
__device__ __forceinline__ void products_done(float (&sum)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

// The sum's registers as the instruction lists them.
#define OPERANDS_96 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
  "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, " \
  "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define OPERANDS_128 \
  OPERANDS_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"

#define FLOATS_8(d, i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),     \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLOATS_32(d, i) FLOATS_8(d, i), FLOATS_8(d, i + 8), FLOATS_8(d, i + 16), FLOATS_8(d, i + 24)
#define FLOATS_96(d) FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_32(d, 64)
#define FLOATS_128(d) FLOATS_96(d), FLOATS_32(d, 96)

// sum (64 x columns, float32) += a (64 x 16) b (columns x 16)^T; where `add` is 0, sum is not read.
#define DEFINE_PRODUCT(name, type, columns, registers, a_at, b_at, add_at)                        \
  __device__ __forceinline__ void name(float(&sum)[registers], unsigned long long a,              \
                                       unsigned long long b, int add) {                           \
    asm volatile("{ .reg .pred p;\n\t"                                                            \
                 "setp.ne.b32 p, " add_at ", 0;\n\t"                                              \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type             \
                 " {" OPERANDS_##registers "}, " a_at ", " b_at ", p, 1, 1, 0, 0; }"              \
                 : FLOATS_##registers(sum)                                                        \
                 : "l"(a), "l"(b), "r"(add));                                                     \
  }

DEFINE_PRODUCT(product_bfloat16, "bf16", "256", 128, "%128", "%129", "%130")
DEFINE_PRODUCT(product_float16, "f16", "256", 128, "%128", "%129", "%130")
DEFINE_PRODUCT(product_bfloat16, "bf16", "192", 96, "%96", "%97", "%98")
DEFINE_PRODUCT(product_float16, "f16", "192", 96, "%96", "%97", "%98")
