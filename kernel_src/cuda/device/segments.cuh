// Which rows belong together: sequence bounds read on the device, values clamped so that bad
// metadata can neither read nor write out of bounds.
#pragma once

#include "types.cuh"

namespace short_conv::cuda {

struct Span {
  int64_t start, end;  // rows of one batch row
};

__device__ inline int64_t clamp(int64_t v, int64_t low, int64_t high) {
  return v < low ? low : (v > high ? high : v);
}

__device__ inline Span sequence_span(const Index& cu, int64_t n, int64_t T) {
  const int64_t start = clamp(at(cu, n), 0, T);
  return {start, clamp(at(cu, n + 1), start, T)};
}

// The last of N ascending starts at or before t; -1 before the first one.
template <typename int_t, typename Start>
__device__ int64_t last_start(int_t N, Start at_or_before) {
  int_t low = 0, high = N;  // starts [0, low) are at or before t
  while (low < high) {
    const int_t mid = (low + high) / 2;
    const bool past = at_or_before(mid);
    low = past ? mid + 1 : low;
    high = past ? high : mid;
  }
  return static_cast<int64_t>(low) - 1;
}

// The last sequence that starts at or before row t. Every thread of a packed tile asks, so the
// common int32 vector gets a search in 32 bits, a fifth of the instructions.
__device__ inline int64_t sequence_of(const Index& cu, int64_t N, int64_t t) {
  if (!cu.wide && cu.stride == 1 && N < 1 << 30) {
    const int32_t* starts = static_cast<const int32_t*>(cu.ptr);
    return last_start(static_cast<int32_t>(N), [&](int32_t n) { return starts[n] <= t; });
  }
  return last_start(N, [&](int64_t n) { return at(cu, n) <= t; });
}

// Bit l: f(l) of lane l, for questions that a whole warp asks about the same rows. All 32 lanes
// must be there. On the host every thread asks for all of them.
template <typename F>
__device__ uint32_t over_lanes(F f) {
#ifdef SHORT_CONV_WARPS
  return __ballot_sync(~0u, f(static_cast<int>(threadIdx.x % 32)));
#else
  uint32_t bits = 0;
  for (int l = 0; l < 32; ++l) bits |= static_cast<uint32_t>(f(l)) << l;
  return bits;
#endif
}

// sequence_of by a warp: each step reads 32 starts at once, so 68 sequences take two memory
// latencies instead of seven.
__device__ inline int64_t warp_sequence_of(const Index& cu, int64_t N, int64_t t) {
  int64_t low = 0, count = N;  // starts [0, low) are at or before t, those from low + count on not
  while (count > 0) {
    const int64_t step = (count + 31) / 32;
    const uint32_t past = over_lanes([&](int l) {
      const int64_t last = (l + 1) * step;  // of lane l's share
      return last <= count && at(cu, low + last - 1) <= t;
    });
    const int64_t shares = __popc(past);
    low += shares * step, count -= shares * step;
    if (count >= step) count = step - 1;
  }
  return low - 1;
}

// State row of sequence n; -1 = padding sequence.
__device__ inline int64_t slot_of(const Index& slots, int64_t count, int64_t n) {
  if (!slots.ptr) return n;
  const int64_t slot = at(slots, n);
  return slot >= 0 && slot < count ? slot : -1;
}

__device__ inline bool is_padding(const FwdParams& p, int64_t n) {
  return slot_of(p.slots, p.initial.ptr ? p.initial.count : p.final.count, n) < 0;
}

// Rows of a batch row packed by seq_idx. Padding (negative) may stand in front and at the end.
struct SeqIdx {
  Index ids;
  int64_t base, T;

  template <typename Params>
  __device__ SeqIdx(const Params& p, int64_t b)
      : ids(p.seq_idx), base(b * p.seq_idx_stride_b), T(p.T) {}

  __device__ int64_t id(int64_t t) const { return element(ids, base + t * ids.stride); }

  // Rows from the first to the last that is not padding; empty when all are.
  __device__ Span live() const {
    if (T == 0) return {0, 0};
    const bool front = id(0) < 0, back = id(T - 1) < 0;
    int64_t start = 0, end = T;
    if (front && back) {
      while (start < T && id(start) < 0) ++start;
      if (start == T) return {T, T};
    } else if (front) {
      start = partition(0, T, [&](int64_t t) { return id(t) < 0; });
    }
    if (back) end = partition(start, T, [&](int64_t t) { return id(t) >= 0; });
    return {start, end};
  }

  // Rows of the sequence that ends at end, as far back as `most` rows.
  __device__ int64_t run_start(int64_t low, int64_t end, int64_t most) const {
    int64_t start = end - 1;
    while (start > low && end - start < most && id(start - 1) == id(end - 1)) --start;
    return start;
  }

 private:
  // First row of [low, high) where `before` fails, given that it holds up to there.
  template <typename Before>
  __device__ static int64_t partition(int64_t low, int64_t high, Before before) {
    while (low < high) {
      const int64_t mid = (low + high) / 2;
      if (before(mid)) {
        low = mid + 1;
      } else {
        high = mid;
      }
    }
    return low;
  }
};

// What a tile of at most 32 rows from t0 on may use and must write; bit j stands for row t0 + j.
struct TileMask {
  int rows;         // rows inside T
  int history;      // rows just before t0 of t0's own sequence, at most W-1
  uint32_t starts;  // rows that begin a sequence
  uint32_t zeros;   // padding rows: y = 0
  uint32_t heads;   // rows that a head item writes, since they may need the initial state
};

__device__ inline TileMask dense_mask(const FwdParams& p, bool plain, int64_t b, int64_t t0,
                                      int rows, int behind) {
  TileMask m{rows, behind, 0, 0, 0};
  if (plain) return m;  // spares the first wave the parameters' far cache lines
  if (is_padding(p, b)) {
    m.zeros = ~0u;  // its head item returns at once: the tile writes every row
  } else if (p.initial.ptr && t0 < p.W - 1) {
    m.heads = (1u << (p.W - 1 - t0)) - 1;
  }
  return m;
}

// Bits [low, high) of a tile.
__device__ inline uint32_t tile_bits(int low, int high) {
  return low < high ? ((1u << high) - 1) & ~((1u << low) - 1) : 0;
}

// kWarp: all lanes of a warp ask for the same tile.
template <bool kWarp>
__device__ TileMask cu_seqlens_mask(const FwdParams& p, int64_t t0, int rows) {
  TileMask m{rows, 0, 0, 0, 0};
  // Rows from here on are counted from t0, as far away as they matter: registers are what a packed
  // tile is short of.
  auto from_t0 = [&](int64_t t) { return static_cast<int>(clamp(t - t0, -kMaxWidth, rows)); };
  int64_t n = kWarp ? warp_sequence_of(p.cu_seqlens, p.N, t0) : sequence_of(p.cu_seqlens, p.N, t0);
  int start = 0, end = 0;
  auto enter = [&] {
    const Span s = sequence_span(p.cu_seqlens, n, p.T);
    start = from_t0(s.start), end = from_t0(s.end);
  };
  if (n >= 0) enter();
  if (end > 0) m.history = start > 0 ? 0 : -start < p.W - 1 ? -start : p.W - 1;
  // One step a sequence: its rows are [from, to) of the tile.
  for (int from = 0; from < rows;) {
    if (from >= end && n + 1 < p.N && from_t0(at(p.cu_seqlens, n + 1)) <= from) {
      // The next sequence, unless empty ones lie between.
      ++n;
      enter();
      if (from >= end) {
        n = sequence_of(p.cu_seqlens, p.N, t0 + from);
        enter();
      }
    }
    if (from >= end) {
      // No sequence has this row: padding up to the first sequence, or to the end.
      const int next = n < 0 && p.N > 0 ? from_t0(at(p.cu_seqlens, 0)) : rows;
      const int to = next > from ? next : from + 1;
      m.zeros |= tile_bits(from, to);
      from = to;
      continue;
    }
    const int to = end;
    if (is_padding(p, n)) {
      m.zeros |= tile_bits(from, to);
    } else {
      if (start >= 0) m.starts |= 1u << from;
      if (p.initial.ptr) m.heads |= tile_bits(from, start + p.W - 1 < to ? start + p.W - 1 : to);
    }
    from = to;
  }
  return m;
}

__device__ inline TileMask seq_idx_mask(const FwdParams& p, int64_t b, int64_t t0, int rows) {
  TileMask m{rows, 0, 0, 0, 0};
  const SeqIdx row(p, b);
  const bool padding = is_padding(p, b);
  const Span live = p.initial.ptr ? row.live() : Span{};
  int64_t previous = row.id(t0);
  while (m.history < p.W - 1 && m.history < t0 && row.id(t0 - m.history - 1) == previous)
    ++m.history;
  for (int j = 0; j < m.rows; ++j) {
    const int64_t t = t0 + j, id = row.id(t);
    const uint32_t bit = 1u << j;
    if (id < 0 || padding) {
      m.zeros |= bit;
    } else if (t >= live.start && t - live.start < p.W - 1 && live.start < live.end &&
               id == row.id(live.start)) {
      m.heads |= bit;
    }
    if (id != previous) m.starts |= bit;
    previous = id;
  }
  return m;
}

// seq_idx_mask by a warp, lane l looking at row t0 - kMaxWidth + l. rows is at most 16.
__device__ inline TileMask warp_seq_idx_mask(const FwdParams& p, int64_t b, int64_t t0, int rows) {
  const SeqIdx row(p, b);
  const bool padding = is_padding(p, b);
  const Span live = p.initial.ptr ? row.live() : Span{};
  auto over_rows = [&](auto f) {
    return over_lanes([&](int l) {
      const int64_t t = t0 - kMaxWidth + l;
      return t >= 0 && t < p.T && f(t);
    });
  };
  const uint32_t other = ~over_rows([&](int64_t t) { return t > 0 && row.id(t) == row.id(t - 1); });
  const uint32_t inside = (1u << rows) - 1;
  TileMask m{rows, 0, 0, 0, 0};
  while (m.history < p.W - 1 && !(other >> (kMaxWidth - m.history) & 1)) ++m.history;
  m.starts = other >> kMaxWidth & inside & ~1u;
  m.zeros = over_rows([&](int64_t t) { return padding || row.id(t) < 0; }) >> kMaxWidth & inside;
  if (p.initial.ptr && live.start < live.end)
    m.heads =
        over_rows([&](int64_t t) {
          return t >= live.start && t - live.start < p.W - 1 && row.id(t) == row.id(live.start);
        }) >>
            kMaxWidth &
        inside & ~m.zeros;
  return m;
}

}  // namespace short_conv::cuda
