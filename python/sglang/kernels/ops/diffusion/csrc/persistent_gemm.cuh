#pragma once
// A GEMM for sm_90a whose epilogue runs while the next tile is multiplied.
//
// Two blocks make a cluster and two tiles of 128 x TILE_COLUMNS, one below the other. Each loads its
// own rows of x, and half of the weight's rows for both. One warpgroup loads; two multiply, 64 rows
// each. Sums go over K in steps of 16, first to last, in the tensor core's float32, which is the
// order of cuBLAS's kernels that do not cut K. A finished tile is rounded to storage, as eager rounds
// what it writes, and stays in registers; its epilogue is cut into pieces of 16 columns, which run
// while the tensor cores work at the next tile. An epilogue is called with (row, column, values) and
// writes what becomes of the four values in columns column .. column + 3.
#include "hopper.cuh"
#include "rounding.cuh"

constexpr int kRows = 128, kColumns = TILE_COLUMNS, kDepth = 64, kStages = STAGES;
constexpr int kXBytes = kRows * kDepth * 2, kStageBytes = kXBytes + kColumns * kDepth * 2;
constexpr int kThreads = 384, kConsumers = 2, kCluster = 2, kHalf = kColumns / kCluster;
constexpr int kPieces = kColumns / 16;

struct Problem {
  int rows, columns, blocks, group;  // blocks of kDepth along K; pairs of row tiles kept together
};

struct Tile {
  int row, column;  // of its first element
};

// The tiles of this block, in an order that keeps `group` pairs of row tiles in the L2 cache.
struct Tiles {
  int index, step, count, row_pairs, in_group, group, rank;

  __device__ __forceinline__ explicit Tiles(const Problem& p)
      : index(blockIdx.x / kCluster),
        step(gridDim.x / kCluster),
        row_pairs((p.rows + kCluster * kRows - 1) / (kCluster * kRows)),
        group(p.group),
        rank(cluster_rank()) {
    count = row_pairs * (p.columns / kColumns);
    in_group = group * (p.columns / kColumns);
  }
  __device__ __forceinline__ bool any() const { return index < count; }
  __device__ __forceinline__ void next() { index += step; }
  __device__ __forceinline__ Tile at() const {
    const int first = index / in_group * group, height = min(row_pairs - first, group);
    const int within = index % in_group;
    return {((first + within % height) * kCluster + rank) * kRows, within / height * kColumns};
  }
};

// A place in the ring of stages, and the parity of its barriers' phase.
struct Ring {
  int stage = 0;
  unsigned int parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Addresses: the stages, and for each a barrier "loaded" and a barrier "read by both blocks".
struct Shared {
  unsigned int stages, full, empty;

  __device__ __forceinline__ explicit Shared(const char* memory)
      : stages((shared_address(memory) + 1023) & ~1023u),
        full(stages + kStages * kStageBytes),
        empty(full + kStages * 8) {}
  __device__ __forceinline__ unsigned int stage_at(const Ring& ring) const {
    return stages + ring.stage * kStageBytes;
  }
  __device__ __forceinline__ unsigned int full_at(const Ring& ring) const {
    return full + 8 * ring.stage;
  }
  __device__ __forceinline__ unsigned int empty_at(const Ring& ring) const {
    return empty + 8 * ring.stage;
  }
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, kConsumers * kCluster);
    }
    barrier_init_done();
  }
};

// One thread: this block's rows of x, and its half of the weight's rows for both blocks.
__device__ __forceinline__ void load_tiles(const Problem& p, const Shared& shared,
                                           const TensorMap& x, const TensorMap& weight) {
  Ring ring;
  for (Tiles tiles(p); tiles.any(); tiles.next()) {
    const Tile tile = tiles.at();
    const int half = kHalf * tiles.rank, offset = kXBytes + half * kDepth * 2;
    for (int block = 0; block < p.blocks; ++block, ring.next()) {
      const unsigned int full = shared.full_at(ring), stage = shared.stage_at(ring);
      barrier_wait(shared.empty_at(ring), ring.parity ^ 1);
      barrier_expect(full, kStageBytes);
      load_box(stage, x, block * kDepth, tile.row, full);
      load_box_to((1 << kCluster) - 1, stage + offset, weight, block * kDepth,
                  tile.column + half, full);
    }
  }
}

// A warpgroup's 64 rows of a tile as storage values, two a word. Of thread t, word 2 g + h has the
// columns from 8 g + 2 (t % 4) of row 16 (t / 32) + t % 32 / 4 + 8 h.
struct Finished {
  unsigned int words[kColumns / 4];
  Tile tile;
  bool any = false;
};

// Of two groups of 8 columns that a quad of threads holds by pairs, four adjoining columns a thread.
__device__ __forceinline__ uint2 four_columns(unsigned int left, unsigned int right, bool odd) {
  const unsigned int got = __shfl_xor_sync(0xffffffffu, odd ? left : right, 1);
  return odd ? make_uint2(got, right) : make_uint2(left, got);
}

template <typename Epilogue>
__device__ __forceinline__ void finish_piece(const Problem& p, const Epilogue& epilogue,
                                             const Finished& done, int piece, int row) {
  const int quad = threadIdx.x & 3;
  const bool odd = quad & 1;
  const int column = done.tile.column + 16 * piece + 2 * quad + (odd ? 6 : 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int word = 4 * piece + half, at = done.tile.row + row + 8 * half;
    const uint2 values = four_columns(done.words[word], done.words[word + 2], odd);
    if (at < p.rows) epilogue(at, column, values);
  }
}

// Adds the bias, which lies in the even words, and rounds.
template <typename T>
__device__ __forceinline__ void round_tile(const float (&sum)[kColumns / 2], Finished& done) {
#pragma unroll
  for (int group = 0; group < kColumns / 8; ++group) {
    const float* s = sum + 4 * group;
    float low, high;
    T::unpack_pair(done.words[2 * group], low, high);
    done.words[2 * group] = T::pack_pair(__fadd_rn(s[0], low), __fadd_rn(s[1], high));
    done.words[2 * group + 1] = T::pack_pair(__fadd_rn(s[2], low), __fadd_rn(s[3], high));
  }
}

// One warpgroup; `below` is its first row in a tile.
template <typename T, typename Epilogue>
__device__ __forceinline__ void multiply_tiles(const Problem& p, const Shared& shared,
                                               const unsigned int* bias, const Epilogue& epilogue,
                                               int below) {
  const int thread = threadIdx.x % 128, row = below + thread / 32 * 16 + thread % 32 / 4;
  const int piece_blocks = p.blocks / kPieces, last_blocks = p.blocks - (kPieces - 1) * piece_blocks;
  Ring ring;
  Finished done;
  float sum[kColumns / 2];
  unsigned int reading = 0;  // the barrier of the stage that is multiplied now

  auto multiply_block = [&](bool first) {
    barrier_wait(shared.full_at(ring), ring.parity);
    const unsigned int stage = shared.stage_at(ring);
    const unsigned long long a = matrix_at(stage + below * kDepth * 2);
    const unsigned long long b = matrix_at(stage + kXBytes);
    products_begin();
    T::product(sum, a, b, !first);
#pragma unroll
    for (int k = 1; k < kDepth / 16; ++k) T::product(sum, a + 2 * k, b + 2 * k, 1);
    products_end();
    if (!first) {
      products_wait<1>();
      if (thread < kCluster) barrier_arrive(reading, thread);
    }
    reading = shared.empty_at(ring);
    ring.next();
  };

  for (Tiles tiles(p); tiles.any(); tiles.next()) {
    const Tile tile = tiles.at();
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      multiply_block(piece == 0);
      if (done.any) finish_piece(p, epilogue, done, piece, row);
      if (piece == kPieces - 1) {  // the words are free now
#pragma unroll
        for (int group = 0; group < kColumns / 8; ++group)
          done.words[2 * group] = __ldg(bias + tile.column / 2 + 4 * group + thread % 4);
      }
      const int blocks = piece == kPieces - 1 ? last_blocks : piece_blocks;
      for (int block = 1; block < blocks; ++block) multiply_block(false);
    }
    products_wait<0>();
    if (thread < kCluster) barrier_arrive(reading, thread);
    products_done(sum);
    round_tile<T>(sum, done);
    done.tile = tile, done.any = true;
  }
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece)
    if (done.any) finish_piece(p, epilogue, done, piece, row);
}

// The whole kernel: dynamic shared memory of kStages * (kStageBytes + 16) + 1024 bytes, kThreads
// threads, an even number of blocks. `meanwhile(warp, warps)` runs in the three warps of each block
// that have nothing to load.
template <typename T, typename Epilogue, typename Meanwhile>
__device__ __forceinline__ void persistent_gemm(const Problem& p, const TensorMap& x,
                                                const TensorMap& weight, const unsigned int* bias,
                                                const Epilogue& epilogue,
                                                const Meanwhile& meanwhile) {
  extern __shared__ char memory[];
  const Shared shared(memory);
  if (threadIdx.x == 0) {
    prefetch(x), prefetch(weight);
    shared.init();
  }
  __syncwarp();
  cluster_sync();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  if (warp < 4) {
    shrink_registers<40>();
    if (threadIdx.x == 0) load_tiles(p, shared, x, weight);
    if (warp > 0) meanwhile(blockIdx.x * 3 + warp - 1, gridDim.x * 3);
    __syncwarp();
  } else {
    grow_registers<232>();
    multiply_tiles<T>(p, shared, bias, epilogue, (warp / 4 - 1) * 64);
  }
  cluster_sync();  // no block leaves while the other may still write into it
}

struct Bfloat16Matrix : Bfloat16Pair {
  static __device__ __forceinline__ void product(float (&sum)[kColumns / 2], unsigned long long a,
                                                 unsigned long long b, int add) {
    product_bfloat16(sum, a, b, add);
  }
};

struct Float16Matrix : Float16Pair {
  static __device__ __forceinline__ void product(float (&sum)[kColumns / 2], unsigned long long a,
                                                 unsigned long long b, int add) {
    product_float16(sum, a, b, add);
  }
};

#define PERSISTENT_GEMM_KERNEL \
  extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
