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

  Access raw[kAccesses];

  __device__ void load(const s_t* ptr) {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) raw[i] = reinterpret_cast<const Access*>(ptr)[i];
  }
  __device__ void store(s_t* ptr) const {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) reinterpret_cast<Access*>(ptr)[i] = raw[i];
  }
  __device__ s_t& operator()(int channel, int column) {
    return reinterpret_cast<s_t*>(raw)[channel * kLen + column];
  }
};

}  // namespace short_conv::cuda
