// A block whose threads are host threads: shared memory is shared and the lanes of a warp meet.
#pragma once

#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#define __shared__ static

struct Warp {
  std::barrier<> meeting{32};
  float values[32];
};
inline thread_local Warp* warp = nullptr;

inline void __syncwarp() { warp->meeting.arrive_and_wait(); }

// What all lanes brought, seen by f.
template <typename F>
auto exchange(float value, F f) {
  warp->values[threadIdx.x % 32] = value;
  __syncwarp();
  const auto result = f(warp->values);
  __syncwarp();
  return result;
}
inline float __shfl_xor_sync(unsigned, float v, int distance) {
  return exchange(v, [&](const float* all) { return all[threadIdx.x % 32 ^ distance]; });
}
inline uint32_t __ballot_sync(unsigned, bool yes) {
  return exchange(yes, [](const float* all) {
    uint32_t bits = 0;
    for (int l = 0; l < 32; ++l) bits |= static_cast<uint32_t>(all[l] != 0) << l;
    return bits;
  });
}

template <typename Kernel>
void run_block(unsigned threads, const Kernel& kernel) {
  const auto warps = std::make_unique<Warp[]>(threads / 32);
  const dim3 grid = gridDim, block = blockIdx;
  std::vector<std::jthread> running;
  for (unsigned t = 0; t < threads; ++t)
    running.emplace_back([&, t] {
      gridDim = grid, blockIdx = block, threadIdx = {t, 0, 0};
      warp = &warps[t / 32];
      kernel();
      warp->meeting.arrive_and_drop();
    });
}
