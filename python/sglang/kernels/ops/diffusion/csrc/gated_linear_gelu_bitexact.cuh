// out = round(round(x up^T) * round(gelu(round(x gate^T)))): both products of a tile in one block.
//
// Half of a tile's columns are the gate's, half the projection's. Rows of out have columns / 2 values
// and adjoin.
#include "gelu.cuh"
#include "persistent_gemm.cuh"

template <typename T>
struct GatedGelu {
  static constexpr int kOperands = 2;
  char* out;
  long long stride;  // bytes from row to row

  __device__ __forceinline__ void apply(int row, int column, const uint2 (&values)[2]) const {
    const uint2 gate = values[0], up = values[1];
    const uint2 result = {gated(gate.x, up.x), gated(gate.y, up.y)};
    *reinterpret_cast<uint2*>(out + row * stride + column * 2) = result;
  }
  static __device__ __forceinline__ unsigned int gated(unsigned int gate, unsigned int up) {
    float a, b, low, high;
    T::unpack_pair(gate, a, b);
    T::unpack_pair(T::pack_pair(gelu_erf(a), gelu_erf(b)), a, b);
    T::unpack_pair(up, low, high);
    return T::pack_pair(__fmul_rn(low, a), __fmul_rn(high, b));
  }
};

#define GATED_LINEAR_GELU_KERNEL(name, T)                                                         \
  PERSISTENT_GEMM_KERNEL name(const __grid_constant__ TensorMap x,                                \
                              const __grid_constant__ TensorMap gate,                             \
                              const __grid_constant__ TensorMap up, char* out, int rows,          \
                              int columns, int blocks, int group) {                               \
    const GatedGelu<T> epilogue{out, columns};                                                    \
    persistent_gemm<T>({rows, columns, blocks, group}, x, cluster_rank() ? up : gate, nullptr,    \
                       epilogue);                                                                 \
  }

#ifdef FLOAT16
GATED_LINEAR_GELU_KERNEL(gated_linear_gelu_float16, Float16Matrix)
#else
GATED_LINEAR_GELU_KERNEL(gated_linear_gelu_bfloat16, Bfloat16Matrix)
#endif
