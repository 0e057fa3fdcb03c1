// out[row] = attn[row] followed by gelu_tanh(round(x weight^T + bias))[row]; attn may be absent.
//
// Rows of out have `out_width` values and adjoin; attn has `attn_vectors` vectors of 16 bytes a row and
// `attn_stride` from row to row, and is copied by the warps that have nothing to load.
#include "gelu.cuh"
#include "persistent_gemm.cuh"

template <typename T>
struct GeluTanh {
  char* out;
  long long stride;  // bytes from row to row

  __device__ __forceinline__ void operator()(int row, int column, const uint2& values) const {
    const uint2 result = {gelu(values.x), gelu(values.y)};
    *reinterpret_cast<uint2*>(out + row * stride + column * 2) = result;
  }
  static __device__ __forceinline__ unsigned int gelu(unsigned int pair) {
    float low, high;
    T::unpack_pair(pair, low, high);
    return T::pack_pair(gelu_tanh_stored<T>(low), gelu_tanh_stored<T>(high));
  }
};

struct CopyRows {
  const Vector* from;
  Vector* to;
  long long from_stride, to_stride;  // vectors
  int rows, vectors;

  __device__ __forceinline__ void operator()(int warp, int warps) const {
    const int lane = threadIdx.x % 32;
    for (int row = warp; row < rows; row += warps) {
#pragma unroll 2
      for (int i = lane; i < vectors; i += 32)
        store(to + row * to_stride + i, load_streaming(from + row * from_stride + i));
    }
  }
};

template <typename T>
__device__ __forceinline__ void linear_gelu(const TensorMap& x, const TensorMap& weight,
                                            const unsigned int* bias, char* out, int out_width,
                                            const Vector* attn, long long attn_stride,
                                            int attn_vectors, const Problem& p) {
  const long long stride = 2ll * out_width;
  const GeluTanh<T> epilogue{out + attn_vectors * sizeof(Vector), stride};
  const CopyRows copy{attn,   reinterpret_cast<Vector*>(out), attn_stride, stride / 16, p.rows,
                      attn_vectors};
  persistent_gemm<T>(p, x, weight, bias, epilogue, copy);
}

#define LINEAR_GELU_KERNEL(name, T)                                                               \
  PERSISTENT_GEMM_KERNEL name(const __grid_constant__ TensorMap x,                                \
                              const __grid_constant__ TensorMap weight, const unsigned int* bias, \
                              char* out, int out_width, const Vector* attn, long long attn_stride, \
                              int attn_vectors, int rows, int columns, int blocks, int group) {   \
    linear_gelu<T>(x, weight, bias, out, out_width, attn, attn_stride, attn_vectors,              \
                   {rows, columns, blocks, group});                                               \
  }

#ifdef FLOAT16
LINEAR_GELU_KERNEL(linear_gelu_float16, Float16Matrix)
#else
LINEAR_GELU_KERNEL(linear_gelu_bfloat16, Bfloat16Matrix)
#endif
