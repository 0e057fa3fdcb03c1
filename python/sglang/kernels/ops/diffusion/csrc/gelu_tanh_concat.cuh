// out[row] = attn[row] followed by gelu_tanh(mlp[row]), 16 bytes a thread and step.
//
// A row of out has `columns` vectors, the first `attn_columns` of them copied from attn. Rows of out
// adjoin; attn and mlp have `attn_stride` and `mlp_stride` vectors from row to row. All of out has
// `vectors` vectors, fewer than 2^32. `row_step` and `column_step` are blockDim.x divided by columns.
#include "gelu.cuh"
#include "rounding.cuh"
#include "row_walk.cuh"

template <typename T>
__device__ __forceinline__ void gelu_tanh_concat(const Vector* attn, const Vector* mlp, Vector* out,
                                                 long long attn_stride, long long mlp_stride,
                                                 unsigned int vectors, unsigned int attn_columns,
                                                 unsigned int columns, unsigned int row_step,
                                                 unsigned int column_step) {
  const unsigned int first = blockIdx.x * (blockDim.x * VECTORS_PER_THREAD) + threadIdx.x;
  RowWalk at(first, columns);
  Vector loaded[VECTORS_PER_THREAD];
  bool is_mlp[VECTORS_PER_THREAD];
#pragma unroll
  for (int step = 0; step < VECTORS_PER_THREAD; ++step) {
    is_mlp[step] = at.column >= attn_columns;
    if (first + step * blockDim.x < vectors) {
      const Vector* source = is_mlp[step] ? mlp + at.row * mlp_stride + (at.column - attn_columns)
                                          : attn + at.row * attn_stride + at.column;
      loaded[step] = load_streaming(source);
    }
    at.next(columns, row_step, column_step);
  }
#pragma unroll
  for (int step = 0; step < VECTORS_PER_THREAD; ++step) {
    const unsigned int i = first + step * blockDim.x;
    if (i >= vectors) return;
    if (is_mlp[step]) {
      float values[T::kValues];
      T::unpack(loaded[step], values);
#pragma unroll
      for (int k = 0; k < T::kValues; ++k) values[k] = gelu_tanh_stored<T>(values[k]);
      loaded[step] = T::pack(values);
    }
    store(out + i, loaded[step]);
  }
}

#define GELU_TANH_CONCAT_KERNEL(name, T)                                                          \
  extern "C" __global__ void __launch_bounds__(BLOCK)                                             \
      name(const Vector* attn, const Vector* mlp, Vector* out, long long attn_stride,             \
           long long mlp_stride, unsigned int vectors, unsigned int attn_columns,                 \
           unsigned int columns, unsigned int row_step, unsigned int column_step) {               \
    gelu_tanh_concat<T>(attn, mlp, out, attn_stride, mlp_stride, vectors, attn_columns, columns,  \
                        row_step, column_step);                                                   \
  }

GELU_TANH_CONCAT_KERNEL(gelu_tanh_concat_bfloat16, Bfloat16)
GELU_TANH_CONCAT_KERNEL(gelu_tanh_concat_float16, Float16)
