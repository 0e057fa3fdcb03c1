// out = round(up * round(gelu(gate))), 16 bytes a thread and step.
//
// Rows of out have `columns` vectors and adjoin; up and gate have `up_stride` and `gate_stride` vectors
// from row to row. All of out has `vectors` vectors, fewer than 2^32. `row_step` and `column_step` are
// blockDim.x divided by columns.
#include "gelu.cuh"
#include "rounding.cuh"
#include "row_walk.cuh"

template <typename T>
__device__ __forceinline__ void gelu_mul(const Vector* up, const Vector* gate, Vector* out,
                                         long long up_stride, long long gate_stride,
                                         unsigned int vectors, unsigned int columns,
                                         unsigned int row_step, unsigned int column_step) {
  const unsigned int first = blockIdx.x * (blockDim.x * VECTORS_PER_THREAD) + threadIdx.x;
  RowWalk at(first, columns);
  Vector u[VECTORS_PER_THREAD], g[VECTORS_PER_THREAD];
#pragma unroll
  for (int step = 0; step < VECTORS_PER_THREAD; ++step) {
    if (first + step * blockDim.x < vectors) {
      g[step] = load_streaming(gate + at.row * gate_stride + at.column);
      u[step] = load_streaming(up + at.row * up_stride + at.column);
    }
    at.next(columns, row_step, column_step);
  }
#pragma unroll
  for (int step = 0; step < VECTORS_PER_THREAD; ++step) {
    const unsigned int i = first + step * blockDim.x;
    if (i >= vectors) return;
    float values[T::kValues], factors[T::kValues];
    T::unpack(g[step], values);
#pragma unroll
    for (int k = 0; k < T::kValues; ++k) values[k] = gelu_erf(values[k]);
    round_to_storage<T>(values);
    T::unpack(u[step], factors);
#pragma unroll
    for (int k = 0; k < T::kValues; ++k) values[k] = __fmul_rn(factors[k], values[k]);
    store(out + i, T::pack(values));
  }
}

#define GELU_MUL_KERNEL(name, T)                                                                  \
  extern "C" __global__ void __launch_bounds__(BLOCK)                                             \
      name(const Vector* up, const Vector* gate, Vector* out, long long up_stride,                \
           long long gate_stride, unsigned int vectors, unsigned int columns,                     \
           unsigned int row_step, unsigned int column_step) {                                     \
    gelu_mul<T>(up, gate, out, up_stride, gate_stride, vectors, columns, row_step, column_step);  \
  }

GELU_MUL_KERNEL(gelu_mul_bfloat16, Bfloat16)
GELU_MUL_KERNEL(gelu_mul_float16, Float16)
