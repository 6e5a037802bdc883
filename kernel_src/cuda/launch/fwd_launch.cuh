// Run-time problem -> fwd_kernel instantiation and grid, for one x dtype.
#pragma once

#include "../device/channel_first_kernel.cuh"
#include "../device/fwd_kernel.cuh"
#include "config.h"
#include "grid.h"

namespace short_conv::cuda {

template <typename Io, int kWidth, bool kExact, int kTokens, Packing kPacking>
cudaError_t launch_fwd_tiles(const FwdParams& p, cudaStream_t stream, bool tiles = true) {
  const int64_t tiles_per_row = p.y.ptr && tiles ? ceil_div(p.T, kTokens) : 0;
  const int64_t rows = tiles_per_row ? p.B : 0;
  const int64_t heads = p.initial.ptr || p.final.ptr ? ceil_div(p.N, kHeadSequences) : 0;
  if (rows * tiles_per_row + heads > std::numeric_limits<uint32_t>::max())
    return cudaErrorInvalidConfiguration;
  const int64_t z = rows ? rows : 1, heads_per_row = ceil_div(heads, z);
  const int64_t y = heads_per_row + tiles_per_row;
  const bool flat = y > kMaxGridY || z > kMaxGridY;
  const FwdGrid grid{static_cast<uint32_t>(tiles_per_row), static_cast<uint32_t>(heads),
                     static_cast<uint32_t>(heads_per_row), flat,
                     !p.initial.ptr && !p.slots.ptr,       fwd_state_rows(p)};
  const auto kernel = fwd_kernel<Io, kWidth, kExact, kFwdThreads, kTokens, kPacking>;
  const int64_t channel_blocks = ceil_div(p.D, kFwdThreads * Io::kLanes);
  return flat ? launch(kernel, channel_blocks, rows * tiles_per_row + heads, kFwdThreads, stream,
                       grid, p)
              : launch(kernel, dim3(channel_blocks, y, z), kFwdThreads, stream, grid, p);
}

template <typename Io, int kWidth, bool kExact>
cudaError_t launch_fwd_kernel(const FwdParams& p, cudaStream_t stream) {
  if (p.cu_seqlens.ptr || p.seq_idx.ptr)
    return launch_fwd_tiles<Io, kWidth, kExact, kFwdTokens, Packing::kPacked>(p, stream);
  if constexpr (kWidth == kFwdShortWidth && kExact)
    if (fwd_short(p))
      return launch_fwd_tiles<Io, kWidth, kExact, kFwdTokensShort, Packing::kDense>(p, stream);
  return launch_fwd_tiles<Io, kWidth, kExact, kFwdTokens, Packing::kDense>(p, stream);
}

template <typename x_t, int kWidth, bool kExact>
cudaError_t launch_channel_first(const FwdParams& p, cudaStream_t stream) {
  constexpr int kTokens = kChannelFirstSpans * kChannelFirstThreads * 16 / sizeof(x_t);
  const cudaError_t error =
      launch(channel_first_kernel<x_t, kWidth, kExact, kChannelFirstThreads, kChannelFirstSpans>,
             ceil_div(p.T, kTokens), p.B * p.D, kChannelFirstThreads, stream, p);
  if (error != cudaSuccess || (!p.initial.ptr && !p.final.ptr)) return error;
  // The tiles above left out what depends on states, and the head items read none of their writes.
  return launch_fwd_tiles<StridedIo<x_t>, kMaxWidth, false, kFwdTokens, Packing::kPacked>(p, stream,
                                                                                          false);
}

template <typename x_t>
cudaError_t launch_fwd_typed(const FwdParams& p, cudaStream_t stream) {
  using Io = VecIo<x_t, kFwdLanes * sizeof(x_t)>;
  if (!fwd_vectorized(p) && fwd_channel_first(p))
    return p.W == 4 ? launch_channel_first<x_t, 4, true>(p, stream)
                    : launch_channel_first<x_t, kMaxWidth, false>(p, stream);
  if (!fwd_vectorized(p)) return launch_fwd_kernel<StridedIo<x_t>, kMaxWidth, false>(p, stream);
  switch (p.W) {
    case 2: return launch_fwd_kernel<Io, 2, true>(p, stream);
    case 3: return launch_fwd_kernel<Io, 3, true>(p, stream);
    case 4: return launch_fwd_kernel<Io, 4, true>(p, stream);
    case 7: return launch_fwd_kernel<Io, 7, true>(p, stream);
    default: return launch_fwd_kernel<Io, kMaxWidth, false>(p, stream);
  }
}

}  // namespace short_conv::cuda
