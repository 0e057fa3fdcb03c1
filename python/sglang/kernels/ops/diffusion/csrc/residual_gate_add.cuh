// out = round(residual + round(gate * update)), 16 bytes a thread and step.
//
// The tensors are one run of `vectors` 16-byte vectors (fewer than 2^32: 32-bit indices, 64-bit
// addresses). The gate is one row of `vectors_per_row` vectors, or as large as the tensors.
// A block owns VECTORS_PER_THREAD * blockDim.x neighbouring vectors; all its loads are issued before
// the first use. `column_step` is blockDim.x % vectors_per_row.
#include "rounding.cuh"

template <typename T, bool kGateIsRow>
__device__ __forceinline__ void residual_gate_add(const Vector* residual, const Vector* update,
                                                  const Vector* gate, Vector* out,
                                                  unsigned int vectors,
                                                  unsigned int vectors_per_row,
                                                  unsigned int column_step) {
  const unsigned int first = blockIdx.x * (blockDim.x * VECTORS_PER_THREAD) + threadIdx.x;
  unsigned int column = kGateIsRow ? first % vectors_per_row : 0;
  Vector r[VECTORS_PER_THREAD], u[VECTORS_PER_THREAD], g[VECTORS_PER_THREAD];
#pragma unroll
  for (int step = 0; step < VECTORS_PER_THREAD; ++step) {
    const unsigned int i = first + step * blockDim.x;
    if (i < vectors) {
      r[step] = load_streaming(residual + i);
      u[step] = load_streaming(update + i);
      g[step] = kGateIsRow ? load_reused(gate + column) : load_streaming(gate + i);
    }
    column += column_step;
    if (column >= vectors_per_row) column -= vectors_per_row;
  }
#pragma unroll
  for (int step = 0; step < VECTORS_PER_THREAD; ++step) {
    const unsigned int i = first + step * blockDim.x;
    if (i >= vectors) return;
    float values[T::kValues], scaled[T::kValues], gates[T::kValues];
    T::unpack(u[step], scaled);
    T::unpack(g[step], gates);
#pragma unroll
    for (int k = 0; k < T::kValues; ++k) scaled[k] = __fmul_rn(gates[k], scaled[k]);
    round_to_storage<T>(scaled);
    T::unpack(r[step], values);
#pragma unroll
    for (int k = 0; k < T::kValues; ++k) values[k] = __fadd_rn(values[k], scaled[k]);
    store(out + i, T::pack(values));
  }
}

#define RESIDUAL_GATE_ADD_KERNEL(name, T, gate_is_row)                                            \
  extern "C" __global__ void __launch_bounds__(BLOCK)                                             \
      name(const Vector* residual, const Vector* update, const Vector* gate, Vector* out,         \
           unsigned int vectors, unsigned int vectors_per_row, unsigned int column_step) {        \
    residual_gate_add<T, gate_is_row>(residual, update, gate, out, vectors, vectors_per_row,      \
                                      column_step);                                               \
  }

RESIDUAL_GATE_ADD_KERNEL(residual_gate_add_row_bfloat16, Bfloat16, true)
RESIDUAL_GATE_ADD_KERNEL(residual_gate_add_row_float16, Float16, true)
RESIDUAL_GATE_ADD_KERNEL(residual_gate_add_row_float32, Float32, true)
RESIDUAL_GATE_ADD_KERNEL(residual_gate_add_full_bfloat16, Bfloat16, false)
RESIDUAL_GATE_ADD_KERNEL(residual_gate_add_full_float16, Float16, false)
RESIDUAL_GATE_ADD_KERNEL(residual_gate_add_full_float32, Float32, false)
