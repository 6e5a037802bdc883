// Run-time problem -> fwd_kernel instantiation and grid, for one x dtype. Widths that models use
// have kernels of their own in the dtypes that models use; the others share one, for a smaller
// binary.
#pragma once

#include "../device/channel_first_kernel.cuh"
#include "../device/fwd_kernel.cuh"
#include "config.h"
#include "grid.h"

namespace short_conv::cuda {

template <typename Io, int kWidth, bool kExact, int kTokens, Packing kPacking, bool kHeads>
cudaError_t launch_fwd_grid(const FwdParams& p, cudaStream_t stream) {
  const bool heads = kHeads && fwd_has_heads(p);
  const int64_t items_per_row = ceil_div(p.T, kTokens) + heads;
  if (p.B * items_per_row > std::numeric_limits<uint32_t>::max())
    return cudaErrorInvalidConfiguration;
  const bool flat = items_per_row > kMaxGridY || p.B > kMaxGridY;
  const FwdGrid grid{static_cast<uint32_t>(items_per_row), heads, flat,
                     !p.initial.ptr && !p.slots.ptr, fwd_state_rows(p)};
  const auto kernel = fwd_kernel<Io, kWidth, kExact, kFwdThreads, kTokens, kPacking, kHeads>;
  const int64_t blocks = ceil_div(p.D, kFwdThreads * Io::kLanes);
  return flat ? launch(kernel, blocks, p.B * items_per_row, kFwdThreads, stream, grid, p)
              : launch(kernel, dim3(blocks, items_per_row, p.B), kFwdThreads, stream, grid, p);
}

template <typename Io, int kWidth, bool kExact>
cudaError_t launch_fwd_width(const FwdParams& p, cudaStream_t stream) {
  if constexpr (!kExact) {
    return launch_fwd_grid<Io, kWidth, kExact, kFwdTokens, Packing::kAny, false>(p, stream);
  } else {
    constexpr bool kCommon = kWidth == kCommonWidth && sizeof(typename Io::x_t) == 2;
    if constexpr (kWidth > 2)
      if (p.cu_seqlens.ptr || p.seq_idx.ptr)
        return launch_fwd_grid<Io, kWidth, kExact, kFwdTokensPacked, Packing::kPacked, false>(
            p, stream);
    if constexpr (kCommon)
      if (fwd_short(p))
        return launch_fwd_grid<Io, kWidth, kExact, kFwdTokensShort, Packing::kDense, true>(p,
                                                                                           stream);
    return launch_fwd_grid<Io, kWidth, kExact, kFwdTokens, Packing::kDense, kCommon>(p, stream);
  }
}

template <typename x_t, int kWidth, bool kExact, bool kPlain>
cudaError_t launch_channel_first(const FwdParams& p, cudaStream_t stream) {
  constexpr int kAhead = kPlain ? kChannelFirstAhead : 1;
  return launch(channel_first_kernel<x_t, kWidth, kExact, kPlain, kAhead>,
                ceil_div(p.T, channel_first_rows(p.dtype)), p.B * p.D, kChannelFirstThreads, stream,
                p);
}

template <typename x_t>
cudaError_t launch_fwd_tiles(const FwdParams& p, cudaStream_t stream) {
  using Io = VecIo<x_t, kFwdLanes * sizeof(x_t)>;
  if (!fwd_vectorized(p) && fwd_channel_first(p))
    return !fwd_plain(p)         ? launch_channel_first<x_t, kMaxWidth, false, false>(p, stream)
           : p.W == kCommonWidth ? launch_channel_first<x_t, kCommonWidth, true, true>(p, stream)
                                 : launch_channel_first<x_t, kMaxWidth, false, true>(p, stream);
  if (!fwd_vectorized(p)) return launch_fwd_width<StridedIo<x_t>, kMaxWidth, false>(p, stream);
  if (p.W == kCommonWidth) return launch_fwd_width<Io, kCommonWidth, true>(p, stream);
  if constexpr (sizeof(x_t) == 2) switch (p.W) {
      case 2:
        if (p.cu_seqlens.ptr || p.seq_idx.ptr) break;
        return launch_fwd_width<Io, 2, true>(p, stream);
      case 3: return launch_fwd_width<Io, 3, true>(p, stream);
      case 7: return launch_fwd_width<Io, 7, true>(p, stream);
    }
  return launch_fwd_width<Io, kMaxWidth, false>(p, stream);
}

template <typename Io, int kWidth, bool kExact>
cudaError_t launch_head_kernel(const FwdParams& p, cudaStream_t stream) {
  const int64_t blocks = ceil_div(p.D, kFwdThreads * Io::kLanes);
  const int sequences = fwd_head_sequences(p.N * blocks);
  return launch(fwd_head_kernel<Io, kWidth, kExact, kFwdThreads>, blocks, ceil_div(p.N, sequences),
                kFwdThreads, stream, p, fwd_state_rows(p), sequences);
}

template <typename x_t>
cudaError_t launch_fwd_heads(const FwdParams& p, cudaStream_t stream) {
  using Io = VecIo<x_t, kFwdLanes * sizeof(x_t)>;
  return fwd_vectorized(p) && p.W == kCommonWidth
             ? launch_head_kernel<Io, kCommonWidth, true>(p, stream)
             : launch_head_kernel<StridedIo<x_t>, kMaxWidth, false>(p, stream);
}

template <typename x_t>
cudaError_t launch_fwd_typed(const FwdParams& p, cudaStream_t stream) {
  // Heads come second: plain channel-first tiles write their rows too, from zeros.
  if (p.y.ptr)
    if (const cudaError_t error = launch_fwd_tiles<x_t>(p, stream); error != cudaSuccess)
      return error;
  return fwd_has_heads(p) && !fwd_heads_in_tiles(p) ? launch_fwd_heads<x_t>(p, stream)
                                                    : cudaSuccess;
}

}  // namespace short_conv::cuda
