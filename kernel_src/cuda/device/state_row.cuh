// State rows that lie contiguous in memory, moved by vector accesses.
#pragma once

#include "tile_io.cuh"

namespace short_conv::cuda {

// Neighbouring state elements of a thread: kLanes channels of kLen columns, in memory order.
template <typename s_t, int kLanes, int kLen>
struct StateRow {
  static constexpr int kBytes = kLanes * kLen * sizeof(s_t);
  static_assert(kBytes % 4 == 0, "a thread's state row must fill whole accesses");
  using Access = VecAccess<kBytes>;
  static constexpr int kAccesses = kBytes / sizeof(Access);
  static constexpr int kWords = kBytes / 4;
  // Lanes that take several small accesses each, or wide ones far apart, leave sectors half used.
  static constexpr bool kStaged = kBytes & (kBytes - 1);

  Access raw[kAccesses];

  __device__ void load(const s_t* ptr) {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) raw[i] = reinterpret_cast<const Access*>(ptr)[i];
  }
  __device__ void store(s_t* ptr) const {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) reinterpret_cast<Access*>(ptr)[i] = raw[i];
  }

  // The same by a whole warp through shared memory, `words` from the warp's first row on: every
  // access of the warp is contiguous. `stage` has kWords words a thread of the block.
  __device__ void load(const s_t* warp_rows, int words, uint32_t* stage) {
#ifdef SHORT_CONV_WARPS
    const int lane = threadIdx.x % 32;
    uint32_t *warp = stage + (threadIdx.x - lane) * kWords, *own = warp + lane * kWords;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (const int w = i * 32 + lane; w < words)
        warp[w] = reinterpret_cast<const uint32_t*>(warp_rows)[w];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(raw)[i] = own[i];
#else
    const int first = threadIdx.x % 32 * kWords;
    if (first < words) load(warp_rows + threadIdx.x % 32 * kLanes * kLen);
#endif
  }
  __device__ void store(s_t* warp_rows, int words, uint32_t* stage) const {
#ifdef SHORT_CONV_WARPS
    const int lane = threadIdx.x % 32;
    uint32_t *warp = stage + (threadIdx.x - lane) * kWords, *own = warp + lane * kWords;
#pragma unroll
    for (int i = 0; i < kWords; ++i) own[i] = reinterpret_cast<const uint32_t*>(raw)[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (const int w = i * 32 + lane; w < words)
        reinterpret_cast<uint32_t*>(warp_rows)[w] = warp[w];
#else
    const int first = threadIdx.x % 32 * kWords;
    if (first < words) store(warp_rows + threadIdx.x % 32 * kLanes * kLen);
#endif
  }

  __device__ s_t& operator()(int channel, int column) {
    return reinterpret_cast<s_t*>(raw)[channel * kLen + column];
  }
};

}  // namespace short_conv::cuda
