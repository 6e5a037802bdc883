// The CPU kernels, once: each isa_*.cpp includes this file under its own target options and
// namespace, and the compiler vectorises the loops over channels for that target. No std templates
// here: their inline copies would be merged across targets, and a baseline processor could be
// handed an AVX one. Every level runs the same fma chain and the same exp, so bits agree.
//
// Rows are taken to fp32 (fp64 for fp64 x) buffers of a block of channels, computed there, and put
// back; only the load and store of a row know dtypes and strides.

#include <cstdint>
#include <cstring>

#include "level.h"

namespace short_conv::cpu::SHORT_CONV_ISA {
namespace {

constexpr int kNarrow = 512;  // channels: ring, taps and output of W = 4 stay within 24 KB of L1
constexpr int kRows = 64;     // of a tile: its W-1 history rows cost 5% more loads

// Channels of the widest block. The forward reads rows as long as it can: rows of 512 channels end
// before the prefetcher has begun, and took 1.6 times as long at [1, 2048, 8192] (Granite Rapids).
template <typename Acc>
constexpr int kWide = 16384 / sizeof(Acc);

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t clamp(int64_t v, int64_t low, int64_t high) {
  return v < low ? low : (v > high ? high : v);
}

inline float as_float(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}
inline uint32_t as_bits(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}

// Storage types: 16-bit floats are bit patterns, converted by integer arithmetic that vectorises
// on any target.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

inline double load(const double* p) { return *p; }
inline float load(const float* p) { return *p; }
inline float load(const Bf16* p) { return as_float(static_cast<uint32_t>(p->bits) << 16); }
inline float load(const Fp16* p) {
  const uint32_t magnitude = static_cast<uint32_t>(p->bits & 0x7fff) << 13;
  const uint32_t scaled = as_bits(as_float(magnitude) * 0x1p112f);
  const uint32_t special = magnitude >= (0x7c00u << 13) ? 0x7f800000u : 0;
  return as_float((scaled | special) | static_cast<uint32_t>(p->bits & 0x8000) << 16);
}

inline void store(double* p, double v) { *p = v; }
inline void store(float* p, double v) { *p = static_cast<float>(v); }
inline void store(float* p, float v) { *p = v; }
inline void store(Bf16* p, float v) {
  const uint32_t bits = as_bits(v);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  p->bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
inline void store(Fp16* p, float v) {
  const uint32_t sign = as_bits(v) >> 16 & 0x8000, bits = as_bits(v) & 0x7fffffff;
  const uint32_t normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
  const uint32_t subnormal = as_bits(as_float(bits) + 0.5f) - as_bits(0.5f);
  const uint32_t special = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
  const uint32_t finite = bits < (113u << 23) ? subnormal : normal;
  p->bits = static_cast<uint16_t>(sign | (bits >= 0x47800000 ? special : finite));
}
inline void store(Bf16* p, double v) { store(p, static_cast<float>(v)); }
inline void store(Fp16* p, double v) { store(p, static_cast<float>(v)); }

template <typename T>
inline T* typed(T*, const void* ptr) {
  return static_cast<T*>(const_cast<void*>(ptr));
}

// Calls f with a null pointer of the storage type.
template <typename F>
inline void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat64: return f(static_cast<double*>(nullptr));
    case DType::kFloat32: return f(static_cast<float*>(nullptr));
    case DType::kFloat16: return f(static_cast<Fp16*>(nullptr));
    case DType::kBFloat16: return f(static_cast<Bf16*>(nullptr));
  }
}

// n elements from stride apart into a buffer. The copy with unit stride is the one to vectorise.
template <typename Acc, typename T>
inline void load_n(Acc* to, const T* from, int64_t stride, int n) {
  if (stride == 1) {
    for (int i = 0; i < n; ++i) to[i] = static_cast<Acc>(load(from + i));
  } else {
    for (int i = 0; i < n; ++i) to[i] = static_cast<Acc>(load(from + i * stride));
  }
}

template <typename T, typename Acc>
inline void store_n(T* to, int64_t stride, const Acc* from, int n) {
  if (stride == 1) {
    for (int i = 0; i < n; ++i) store(to + i, from[i]);
  } else {
    for (int i = 0; i < n; ++i) store(to + i * stride, from[i]);
  }
}

template <typename Acc>
inline void load_any(Acc* to, const void* base, DType dtype, int64_t offset, int64_t stride,
                     int n) {
  with_type(dtype, [&](auto* tag) { load_n(to, typed(tag, base) + offset, stride, n); });
}

template <typename Acc>
inline void store_any(void* base, DType dtype, int64_t offset, int64_t stride, const Acc* from,
                      int n) {
  with_type(dtype, [&](auto* tag) { store_n(typed(tag, base) + offset, stride, from, n); });
}

inline double fma_of(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float min_of(float a, float b) { return a < b ? a : b; }
inline float max_of(float a, float b) { return a > b ? a : b; }

#include "vector.h"

template <typename V>
inline V splat(float v) {
  return V{} + v;
}

// 2^r for |r| <= 1/2: minimax fits, of relative error 2e-9 for fp32 results and 2.8e-6 for 16-bit
// ones. Degree 3 (7.5e-5) rounds too many bf16 results the wrong way.
template <typename x_t, typename V>
inline V exp2_fit(V r) {
  V e;
  if constexpr (sizeof(x_t) == 4) {
    e = fma_of(splat<V>(0.00015353362f), r, splat<V>(0.0013398875f));
    e = fma_of(e, r, splat<V>(0.00961843692f));
    e = fma_of(e, r, splat<V>(0.0555033237f));
    e = fma_of(e, r, splat<V>(0.240226477f));
    e = fma_of(e, r, splat<V>(0.693147182f));
  } else {
    e = fma_of(splat<V>(0.00958285294f), r, splat<V>(0.0559064262f));
    e = fma_of(e, r, splat<V>(0.240240991f));
    e = fma_of(e, r, splat<V>(0.693124175f));
  }
  return fma_of(e, r, splat<V>(1.0f));
}

constexpr float kLog2e = 1.44269502f, kLog2eRest = 1.92596303e-8f;
constexpr float kRound = 12582912.0f + 127.0f;

// 1 + exp(-a) of a float or a vector of them, with exp(-a) = 2^n 2^r. Adding kRound (1.5 *
// 2^23 + 127) rounds to the integer n and leaves n + 127, the exponent of 2^n, in the low bits.
// Past the clamp n = 128 makes an infinity, as it must for a = -inf to end as NaN like torch's.
// Only fp32 results need the rest of log2(e).
template <typename x_t, typename V>
inline V one_plus_exp(V a) {
  const V m = max_of(min_of(a, splat<V>(87.0f)), splat<V>(-88.8f));
  const V shifted = fma_of(m, splat<V>(-kLog2e), splat<V>(kRound)), n = shifted - kRound;
  V r = fma_of(m, splat<V>(-kLog2e), -n);
  if constexpr (sizeof(x_t) == 4) r = fma_of(m, splat<V>(-kLog2eRest), r);
  return fma_of(exp2_fit<x_t>(r), as_float(as_bits(shifted) << 23), splat<V>(1.0f));
}

template <typename x_t>
inline double one_plus_exp(double a) {
  return 1.0 + __builtin_exp(-a);
}

template <typename x_t, typename V>
inline V silu(V a) {
  return a / one_plus_exp<x_t>(a);
}

// One row: y = act(bias + sum_k w[k] x[k]), oldest tap first, for results that become x_t.
template <typename Acc, typename x_t, int kWidth, bool kSilu>
void convolve(const Acc* const* x, const Acc* w, int pitch, const Acc* bias, Acc* y, int n) {
  const Acc* rows[kWidth];
  for (int k = 0; k < kWidth; ++k) rows[k] = x[k];
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    Acc acc = bias[i];
    for (int k = 0; k < kWidth; ++k) acc = fma_of(w[k * pitch + i], rows[k][i], acc);
    y[i] = kSilu ? silu<x_t>(acc) : acc;
  }
}

// kGroup rows at once, straight from x to y: taps are read once for all of them, each x row is
// converted once, and the rows' chains overlap. x[0] is the oldest row of the first output.
constexpr int kGroup = 4, kGroupWidth = 4;

template <typename x_t, int kWidth, bool kSilu>
void convolve_group(const x_t* const* x, const float* w, int pitch, const float* bias, x_t* y,
                    int64_t stride, int n) {
  const x_t* rows[kWidth - 1 + kGroup];
  for (int r = 0; r < kWidth - 1 + kGroup; ++r) rows[r] = x[r];
  typedef Unit<x_t> U;
  for (int i = 0; i < n; i += U::kSize) {
    VecF in[kWidth - 1 + kGroup][U::kVecs], out[kGroup][U::kVecs];
#pragma GCC unroll 16
    for (int r = 0; r < kWidth - 1 + kGroup; ++r) U::load(rows[r] + i, in[r]);
#pragma GCC unroll 2
    for (int u = 0; u < U::kVecs; ++u) {
      const int at = i + u * kLanes;
      VecF acc[kGroup];
#pragma GCC unroll 16
      for (int j = 0; j < kGroup; ++j) acc[j] = load_vec(bias + at);
#pragma GCC unroll 16
      for (int k = 0; k < kWidth; ++k) {
        const VecF tap = load_vec(w + k * pitch + at);
#pragma GCC unroll 16
        for (int j = 0; j < kGroup; ++j) acc[j] = fma_of(tap, in[j + k][u], acc[j]);
      }
#pragma GCC unroll 16
      for (int j = 0; j < kGroup; ++j) out[j][u] = kSilu ? silu<x_t>(acc[j]) : acc[j];
    }
#pragma GCC unroll 16
    for (int j = 0; j < kGroup; ++j) U::store(y + j * stride + i, out[j]);
  }
}

template <typename Acc>
using Convolve = void (*)(const Acc* const*, const Acc*, int, const Acc*, Acc*, int);

template <typename x_t>
using ConvolveGroup = void (*)(const x_t* const*, const float*, int, const float*, x_t*, int64_t,
                               int);

template <typename Acc, typename x_t, bool kSilu>
Convolve<Acc> convolve_of(int32_t W) {
  static constexpr Convolve<Acc> table[kMaxWidth] = {
      convolve<Acc, x_t, 1, kSilu>, convolve<Acc, x_t, 2, kSilu>, convolve<Acc, x_t, 3, kSilu>,
      convolve<Acc, x_t, 4, kSilu>, convolve<Acc, x_t, 5, kSilu>, convolve<Acc, x_t, 6, kSilu>,
      convolve<Acc, x_t, 7, kSilu>, convolve<Acc, x_t, 8, kSilu>};
  return table[W - 1];
}

// The common widths, to kGroupWidth; null for the others, whose rows go one at a time.
template <typename x_t>
ConvolveGroup<x_t> convolve_group_of(int32_t W, bool silu) {
  switch (W) {
    case 2: return silu ? convolve_group<x_t, 2, true> : convolve_group<x_t, 2, false>;
    case 3: return silu ? convolve_group<x_t, 3, true> : convolve_group<x_t, 3, false>;
    case 4: return silu ? convolve_group<x_t, 4, true> : convolve_group<x_t, 4, false>;
    default: return nullptr;
  }
}

// Taps, bias and the last W inputs of a block of channels.
template <typename Acc, typename x_t, int kChannels>
struct Block {
  // Between rows: not a multiple of a page, or all of them share the sets of L1.
  static constexpr int pitch = kChannels + 64 / sizeof(Acc);
  alignas(64) Acc w[kMaxWidth][pitch];
  alignas(64) Acc bias[pitch];
  alignas(64) Acc ring[kMaxWidth][pitch];
  alignas(64) Acc y[pitch];
  Convolve<Acc> row;
  int32_t W;
  int n;       // channels
  int newest;  // ring row of the newest input

  Block(const Weight& weight, const Bias& b, int32_t W, bool silu, int64_t c, int n)
      : row(silu ? convolve_of<Acc, x_t, true>(W) : convolve_of<Acc, x_t, false>(W)),
        W(W),
        n(n),
        newest(0) {
    with_type(weight.dtype, [&](auto* tag) {
      const auto* from = typed(tag, weight.ptr) + c * weight.stride_d;
      if (W == 4 && weight.stride_w == 1 && weight.stride_d == 4) {
        for (int i = 0; i < n; ++i)
          for (int k = 0; k < 4; ++k) w[k][i] = static_cast<Acc>(load(from + 4 * i + k));
      } else {
        for (int k = 0; k < W; ++k) load_n(w[k], from + k * weight.stride_w, weight.stride_d, n);
      }
    });
    if (b.ptr) {
      load_any(bias, b.ptr, b.dtype, c * b.stride_d, b.stride_d, n);
    } else {
      std::memset(bias, 0, n * sizeof(Acc));
    }
    clear();
  }

  void clear() {
    for (int k = 0; k < W; ++k) std::memset(ring[k], 0, n * sizeof(Acc));
  }

  // The ring row that the next input goes to.
  Acc* next() {
    newest = newest + 1 == W ? 0 : newest + 1;
    return ring[newest];
  }

  void oldest_first(const Acc** x) const {
    for (int k = 0; k < W; ++k) {
      const int from = newest + 1 + k;
      x[k] = ring[from >= W ? from - W : from];
    }
  }

  void convolve_newest() {
    const Acc* x[kMaxWidth];
    oldest_first(x);
    row(x, w[0], pitch, bias, y, n);
  }
};

inline int64_t element(const Index& index, int64_t offset) {
  return index.wide ? static_cast<const int64_t*>(index.ptr)[offset]
                    : static_cast<const int32_t*>(index.ptr)[offset];
}

inline int64_t at(const Index& index, int64_t i) { return element(index, i * index.stride); }

struct Span {
  int64_t start, end;
};

inline Span sequence_span(const Index& cu, int64_t n, int64_t T) {
  const int64_t start = clamp(at(cu, n), 0, T);
  return {start, clamp(at(cu, n + 1), start, T)};
}

// The last sequence that starts at or before row t; -1 before the first one.
inline int64_t sequence_of(const Index& cu, int64_t N, int64_t t) {
  int64_t low = 0, high = N;
  while (low < high) {
    const int64_t mid = (low + high) / 2;
    if (at(cu, mid) <= t) {
      low = mid + 1;
    } else {
      high = mid;
    }
  }
  return low - 1;
}

inline int64_t slot_of(const Index& slots, int64_t count, int64_t n) {
  if (!slots.ptr) return n;
  const int64_t slot = at(slots, n);
  return slot >= 0 && slot < count ? slot : -1;
}

inline bool is_padding(const FwdParams& p, int64_t n) {
  return slot_of(p.slots, p.initial.ptr ? p.initial.count : p.final.count, n) < 0;
}

template <typename Params>
inline int64_t seq_id(const Params& p, int64_t b, int64_t t) {
  return element(p.seq_idx, b * p.seq_idx_stride_b + t * p.seq_idx.stride);
}

// Rows from the first to the last that is not padding; empty when all are.
template <typename Params>
inline Span live_rows(const Params& p, int64_t b) {
  int64_t start = 0, end = p.T;
  while (start < end && seq_id(p, b, start) < 0) ++start;
  while (end > start && seq_id(p, b, end - 1) < 0) --end;
  return {start, end};
}

// What row t is: whether it starts a sequence, is padding, or belongs to a head item.
struct RowKind {
  bool starts, zero, head;
};

struct RowCursor {  // of one batch row, asked for in ascending t
  const FwdParams& p;
  int64_t b, n;
  Span s;
  bool padding;
  Span live;

  RowCursor(const FwdParams& p, int64_t b, int64_t t) : p(p), b(b), n(b), s{0, p.T}, live{0, p.T} {
    if (p.cu_seqlens.ptr) {
      seek(t);
    } else {
      padding = is_padding(p, b);
      if (p.seq_idx.ptr && p.initial.ptr) live = live_rows(p, b);
    }
  }

  void seek(int64_t t) {
    n = sequence_of(p.cu_seqlens, p.N, t);
    s = n < 0 ? Span{0, 0} : sequence_span(p.cu_seqlens, n, p.T);
    padding = n >= 0 && is_padding(p, n);
  }

  void advance(int64_t t) {
    if (p.cu_seqlens.ptr && t >= s.end && n + 1 < p.N) seek(t);
  }

  // Rows just before t of t's own sequence, at most W-1.
  int64_t history(int64_t t) {
    const int64_t most = smaller(p.W - 1, t);
    if (p.seq_idx.ptr) {
      int64_t k = 0;
      while (k < most && seq_id(p, b, t - k - 1) == seq_id(p, b, t)) ++k;
      return k;
    }
    advance(t);
    return t < s.end ? clamp(t - s.start, 0, most) : 0;
  }

  // Whether rows [from, to) lie in one sequence, as tile rows of it from row from + W-1 on.
  bool plain(int64_t from, int64_t to) {
    if (from < 0 || padding) return false;
    if (p.seq_idx.ptr) {
      const int64_t id = seq_id(p, b, from);
      if (id < 0 || (p.initial.ptr && from < live.start)) return false;
      for (int64_t t = from + 1; t < to; ++t)
        if (seq_id(p, b, t) != id) return false;
      return true;
    }
    advance(from);
    return !padding && from >= s.start && to <= s.end;
  }

  RowKind at_row(int64_t t) {
    if (p.seq_idx.ptr) {
      const int64_t id = seq_id(p, b, t);
      const bool head = p.initial.ptr && t >= live.start && t - live.start < p.W - 1 &&
                        live.start < live.end && id == seq_id(p, b, live.start);
      return {t == 0 || seq_id(p, b, t - 1) != id, id < 0 || padding, head};
    }
    advance(t);
    return {t == s.start, padding || t >= s.end, p.initial.ptr && t - s.start < p.W - 1};
  }
};

template <typename Acc, typename x_t>
void fwd_tile(const FwdParams& p, int64_t b, int64_t t0, int64_t c, int n) {
  const x_t* x = static_cast<const x_t*>(p.x.ptr) + b * p.x.stride_b + c * p.x.stride_d;
  x_t* y = static_cast<x_t*>(p.y.ptr) + b * p.y.stride_b + c * p.y.stride_d;
  const int64_t t1 = smaller(t0 + kRows, p.T);
  Block<Acc, x_t, kWide<Acc>> block(p.weight, p.bias, p.W, p.silu, c, n);
  RowCursor rows(p, b, t0);
  ConvolveGroup<x_t> group = nullptr;
  const Acc *w = block.w[0], *bias = block.bias;
  alignas(64) Acc ordered[Unit<x_t>::kVecs > 1 ? kGroupWidth + 1 : 1][block.pitch];
  if constexpr (sizeof(x_t) <= 4) {
    if (p.x.stride_d == 1 && p.y.stride_d == 1 && n % Unit<x_t>::kSize == 0)
      group = convolve_group_of<x_t>(p.W, p.silu);
    if constexpr (Unit<x_t>::kVecs > 1)
      if (group) {
        for (int k = 0; k < p.W; ++k) Unit<x_t>::in_order(ordered[k], block.w[k], n);
        Unit<x_t>::in_order(ordered[kGroupWidth], block.bias, n);
        w = ordered[0], bias = ordered[kGroupWidth];
      }
  }

  bool ring_current = false;  // whether the ring holds the rows just before t
  for (int64_t t = t0; t < t1;) {
    if constexpr (sizeof(x_t) <= 4) {
      if (group && t + kGroup <= t1 && rows.plain(t - (p.W - 1), t + kGroup)) {
        const x_t* in[kMaxWidth - 1 + kGroup];
        for (int r = 0; r < p.W - 1 + kGroup; ++r) in[r] = x + (t - (p.W - 1) + r) * p.x.stride_t;
        group(in, w, block.pitch, bias, y + t * p.y.stride_t, p.y.stride_t, n);
        t += kGroup;
        ring_current = false;
        continue;
      }
    }
    if (!ring_current) {
      block.clear();
      for (int64_t from = t - rows.history(t); from < t; ++from)
        load_n(block.next(), x + from * p.x.stride_t, p.x.stride_d, n);
      ring_current = true;
    }
    const RowKind kind = rows.at_row(t);
    if (kind.starts) block.clear();
    load_n(block.next(), x + t * p.x.stride_t, p.x.stride_d, n);
    if (kind.zero) {
      std::memset(block.y, 0, n * sizeof(Acc));
    } else if (!kind.head) {
      block.convolve_newest();
    }
    if (!kind.head || kind.zero) store_n(y + t * p.y.stride_t, p.y.stride_d, block.y, n);
    ++t;
  }
}

// A sequence's first W-1 outputs and its final state: the only code that touches states.
template <typename Acc, typename x_t>
void fwd_head(const FwdParams& p, int64_t n, int64_t c, int channels) {
  const State& any = p.initial.ptr ? p.initial : p.final;
  const int64_t slot = slot_of(p.slots, any.count, n);
  if (slot < 0) return;
  const int64_t b = p.cu_seqlens.ptr ? 0 : n;
  Span first{0, p.T};
  if (p.cu_seqlens.ptr) first = sequence_span(p.cu_seqlens, n, p.T);
  if (p.seq_idx.ptr) first = live_rows(p, b);
  Span last = first;
  if (p.seq_idx.ptr && first.start < first.end) {
    last.start = last.end - 1;
    while (last.start > first.start && last.end - last.start < p.final.len &&
           seq_id(p, b, last.start - 1) == seq_id(p, b, last.end - 1))
      --last.start;
  }
  const bool has_initial =
      p.initial.ptr && (!p.has_initial || p.has_initial[n * p.has_initial_stride]);
  const bool carries = has_initial && last.start == first.start;
  const x_t* x = static_cast<const x_t*>(p.x.ptr) + b * p.x.stride_b + c * p.x.stride_d;
  const int64_t initial = slot * p.initial.stride_n + c * p.initial.stride_d;
  const int64_t final = slot * p.final.stride_n + c * p.final.stride_d;

  if (p.initial.ptr && p.y.ptr && p.W > 1) {
    x_t* y = static_cast<x_t*>(p.y.ptr) + b * p.y.stride_b + c * p.y.stride_d;
    Block<Acc, x_t, kWide<Acc>> block(p.weight, p.bias, p.W, p.silu, c, channels);
    for (int k = p.W - 1; k > 0 && has_initial; --k)
      load_any(block.next(), p.initial.ptr, p.initial.dtype,
               initial + (p.initial.len - k) * p.initial.stride_l, p.initial.stride_d, channels);
    for (int64_t t = first.start; t < smaller(first.end, first.start + p.W - 1); ++t) {
      if (p.seq_idx.ptr && seq_id(p, b, t) != seq_id(p, b, first.start)) continue;
      load_n(block.next(), x + t * p.x.stride_t, p.x.stride_d, channels);
      block.convolve_newest();
      store_n(y + t * p.y.stride_t, p.y.stride_d, block.y, channels);
    }
  }

  if (!p.final.ptr) return;
  // Ascending columns: in place, column j takes column j + length, not yet overwritten.
  alignas(64) Acc column[kWide<Acc>];
  for (int64_t j = 0; j < p.final.len; ++j) {
    const int64_t t = last.end - p.final.len + j;
    const int64_t from = p.initial.len + t - last.start;
    if (t >= last.start) {
      load_n(column, x + t * p.x.stride_t, p.x.stride_d, channels);
    } else if (carries && from >= 0) {
      load_any(column, p.initial.ptr, p.initial.dtype, initial + from * p.initial.stride_l,
               p.initial.stride_d, channels);
    } else {
      std::memset(column, 0, channels * sizeof(Acc));
    }
    store_any(p.final.ptr, p.final.dtype, final + j * p.final.stride_l, p.final.stride_d, column,
              channels);
  }
}

inline int64_t blocks_of(int64_t D, int64_t channels) { return (D + channels - 1) / channels; }
inline int64_t tiles_per_row(const FwdParams& p) { return p.y.ptr ? (p.T + kRows - 1) / kRows : 0; }

// Rows and heads, each once for every block of channels.
inline int64_t fwd_rows(const FwdParams& p) {
  return p.B * tiles_per_row(p) + (p.initial.ptr || p.final.ptr ? p.N : 0);
}

// As wide as leaves an item for every core of a socket.
template <typename Acc>
int64_t fwd_channels(const FwdParams& p) {
  int64_t channels = kWide<Acc>;
  while (channels > kNarrow && fwd_rows(p) * blocks_of(p.D, channels) < 64) channels /= 2;
  return channels;
}

template <typename Acc, typename x_t>
void fwd_items(const FwdParams& p, int64_t begin, int64_t end) {
  const int64_t channels = fwd_channels<Acc>(p), blocks = blocks_of(p.D, channels);
  const int64_t per_row = tiles_per_row(p), tiles = p.B * per_row;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t c = item % blocks * channels, which = item / blocks;
    const int n = static_cast<int>(smaller(channels, p.D - c));
    if (which < tiles) {
      fwd_tile<Acc, x_t>(p, which / per_row, which % per_row * kRows, c, n);
    } else {
      fwd_head<Acc, x_t>(p, which - tiles, c, n);
    }
  }
}

inline int64_t wrap(int64_t v, int64_t L) {
  const int64_t r = v % L;
  return r < 0 ? r + L : r;
}

// A row of four 16-bit columns is one 64-bit integer, and advances by a shift; done for a whole
// block at the end, as one loop over integers.
template <typename s_t>
inline void append_block(s_t* rows, const s_t* newest, int n) {
  static_assert(sizeof(s_t) == 2, "four columns of 16 bits");
  for (int i = 0; i < n; ++i) {
    uint64_t row;
    std::memcpy(&row, rows + 4 * i, 8);
    row = row >> 16 | static_cast<uint64_t>(newest[i].bits) << 48;
    std::memcpy(rows + 4 * i, &row, 8);
  }
}

// One token, W = 4, contiguous [D, 4] weight and state rows, contiguous x and y: the decode step of
// the common models. The activation has a loop of its own, short enough for its iterations' long
// chains to overlap: in one loop with the shuffles fp32 took 1.45 times as long (Zen 3).
template <typename x_t, typename w_t, typename s_t>
void update_rows(const UpdateParams& p, const x_t* x, x_t* y, s_t* state, const w_t* weight,
                 int64_t c, int n) {
  alignas(64) float bias[kNarrow] = {}, sums[kNarrow];
  alignas(64) s_t newest[kNarrow];
  if (p.bias.ptr) load_any(bias, p.bias.ptr, p.bias.dtype, c * p.bias.stride_d, p.bias.stride_d, n);
  for (int i = 0; i < n; i += kLanes) {
    VecF w[4], s[4];
    load_columns(weight + 4 * i, w);
    load_columns(state + 4 * i, s);
    const VecF in = load_vec(x + i);
    VecF acc = load_vec(bias + i);
    acc = fma_of(w[0], s[1], acc);
    acc = fma_of(w[1], s[2], acc);
    acc = fma_of(w[2], s[3], acc);
    acc = fma_of(w[3], in, acc);
    store_vec(sums + i, acc);
    if constexpr (sizeof(s_t) == 4) {
      store_columns(state + 4 * i, s[1], s[2], s[3], in);
    } else {
      store_vec(newest + i, in);
    }
  }
  if (p.silu) {
    for (int i = 0; i < n; i += kLanes) store_vec(y + i, silu<x_t>(load_vec(sums + i)));
  } else {
    for (int i = 0; i < n; i += kLanes) store_vec(y + i, load_vec(sums + i));
  }
  if constexpr (sizeof(s_t) == 2) append_block(state, newest, n);
}

// Whether update_rows serves this call, of n channels at a time.
template <typename x_t>
bool by_rows(const UpdateParams& p, int n) {
  return sizeof(x_t) <= 4 && p.W == 4 && p.T == 1 && n % kLanes == 0 && !p.cu_seqlens.ptr &&
         !p.circular.ptr && !p.accepted.ptr && p.x.stride_d == 1 && p.y.stride_d == 1 &&
         p.state.len == 4 && p.state.stride_l == 1 && p.state.stride_d == 4 &&
         p.weight.stride_w == 1 && p.weight.stride_d == 4;
}

template <typename Acc, typename x_t>
void update_item(const UpdateParams& p, int64_t n, int64_t c, int channels) {
  const int64_t b = p.cu_seqlens.ptr ? 0 : n, L = p.state.len;
  const Span span = p.cu_seqlens.ptr ? sequence_span(p.cu_seqlens, n, p.T) : Span{0, p.T};
  const int64_t T = span.end - span.start;
  const x_t* x = static_cast<const x_t*>(p.x.ptr) + b * p.x.stride_b + c * p.x.stride_d +
                 span.start * p.x.stride_t;
  x_t* y =
      static_cast<x_t*>(p.y.ptr) + b * p.y.stride_b + c * p.y.stride_d + span.start * p.y.stride_t;
  const int64_t slot = slot_of(p.slots, p.state.count, n);
  if (slot < 0) {
    alignas(64) Acc zeros[kNarrow] = {};
    for (int64_t t = 0; t < T; ++t) store_n(y + t * p.y.stride_t, p.y.stride_d, zeros, channels);
    return;
  }
  const int64_t base = slot * p.state.stride_n + c * p.state.stride_d;

  // Columns [0, known) are inputs that count; the history is the last W-1 of them.
  const int64_t known = p.accepted.ptr ? p.W - 1 + clamp(at(p.accepted, n), 0, L - (p.W - 1)) : L;
  const int64_t position = p.circular.ptr ? wrap(at(p.circular, n), L) : 0;
  if constexpr (sizeof(x_t) <= 4)
    if (by_rows<x_t>(p, channels)) {
      with_type(p.weight.dtype, [&](auto* w) {
        with_type(p.state.dtype, [&](auto* s) {
          if constexpr (sizeof(*w) <= 4 && sizeof(*s) <= 4)
            update_rows(p, x, y, typed(s, p.state.ptr) + base, typed(w, p.weight.ptr) + 4 * c, c,
                        channels);
        });
      });
      return;
    }

  Block<Acc, x_t, kNarrow> block(p.weight, p.bias, p.W, p.silu, c, channels);
  for (int k = p.W - 1; k > 0; --k) {
    const int64_t column = p.circular.ptr ? wrap(position - k, L) : known - k;
    load_any(block.next(), p.state.ptr, p.state.dtype, base + column * p.state.stride_l,
             p.state.stride_d, channels);
  }
  for (int64_t t = 0; t < T; ++t) {
    Acc* in = block.next();
    load_n(in, x + t * p.x.stride_t, p.x.stride_d, channels);
    block.convolve_newest();
    store_n(y + t * p.y.stride_t, p.y.stride_d, block.y, channels);
    if (p.circular.ptr)
      store_any(p.state.ptr, p.state.dtype, base + wrap(position + t, L) * p.state.stride_l,
                p.state.stride_d, in, channels);
  }
  if (p.circular.ptr || T == 0) return;

  alignas(64) Acc column[kNarrow];
  // Column j takes input j + shift of (known columns, then x). In place this ascends when columns
  // move left and descends when rejected tokens make them move right.
  const int64_t shift = known + T - L;
  for (int64_t i = 0; i < L; ++i) {
    const int64_t j = shift >= 0 ? i : L - 1 - i, from = j + shift;
    if (from >= known) {
      load_n(column, x + (from - known) * p.x.stride_t, p.x.stride_d, channels);
    } else if (from >= 0) {
      load_any(column, p.state.ptr, p.state.dtype, base + from * p.state.stride_l, p.state.stride_d,
               channels);
    } else {
      std::memset(column, 0, channels * sizeof(Acc));
    }
    store_any(p.state.ptr, p.state.dtype, base + j * p.state.stride_l, p.state.stride_d, column,
              channels);
  }
}

template <typename Acc, typename x_t>
void update_items(const UpdateParams& p, int64_t begin, int64_t end) {
  const int64_t blocks = blocks_of(p.D, kNarrow);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t c = item % blocks * kNarrow;
    update_item<Acc, x_t>(p, item / blocks, c, static_cast<int>(smaller(kNarrow, p.D - c)));
  }
}

Work fwd_work(const FwdParams& p) {
  const int64_t channels =
      p.dtype == DType::kFloat64 ? fwd_channels<double>(p) : fwd_channels<float>(p);
  const int64_t tile = smaller(p.T, kRows) * smaller(p.D, channels);
  return {fwd_rows(p) * blocks_of(p.D, channels), 1 + 32768 / larger(tile, 1)};
}

Work update_work(const UpdateParams& p) {
  const int64_t elements = smaller(p.D, kNarrow) * (p.cu_seqlens.ptr ? 1 : larger(p.T, 1));
  return {p.N * blocks_of(p.D, kNarrow), 1 + 16384 / larger(elements, 1)};
}

void fwd_range(const FwdParams& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case DType::kFloat64: return fwd_items<double, double>(p, begin, end);
    case DType::kFloat32: return fwd_items<float, float>(p, begin, end);
    case DType::kFloat16: return fwd_items<float, Fp16>(p, begin, end);
    case DType::kBFloat16: return fwd_items<float, Bf16>(p, begin, end);
  }
}

void update_range(const UpdateParams& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case DType::kFloat64: return update_items<double, double>(p, begin, end);
    case DType::kFloat32: return update_items<float, float>(p, begin, end);
    case DType::kFloat16: return update_items<float, Fp16>(p, begin, end);
    case DType::kBFloat16: return update_items<float, Bf16>(p, begin, end);
  }
}

#include "bwd_body.h"

}  // namespace

extern const Level level = {SHORT_CONV_ISA_NAME, fwd_work, fwd_range, update_work,  update_range,
                            bwd_parts,           bwd_work, bwd_range, bwd_sum_work, bwd_sum_range};

}  // namespace short_conv::cpu::SHORT_CONV_ISA
