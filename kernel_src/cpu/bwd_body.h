// Backward, included by kernel_body.h inside its namespace. An item is one part of the rows for one
// block of channels, or one sequence's dinitial. A part walks its rows in order and its dx leaves
// W-1 rows behind, so that x and dy are read once. A part that begins inside a sequence redoes the
// W-1 rows before it without their sums, and stores what the part before it left open. How rows are
// cut depends on the problem alone, and so do all bits.

template <typename V>
inline V through_silu(V dy, V z) {
  const V one = splat<V>(1.0f), s = one / one_plus_exp<float>(z);
  return dy * (s * fma_of(z, one - s, one));
}

// What a register holds of an Acc buffer. Buffers have whole blocks, so a vector may run past the
// last channel.
template <typename Acc>
struct Lanes {
  typedef VecF V;
};
template <>
struct Lanes<double> {
  typedef double V;
};

template <typename V, typename Acc>
inline V get(const Acc* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <typename V, typename Acc>
inline void put(Acc* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

// The sums and open rows of a block of channels; pending[k] is dx of the row W-1-k before the next
// one, without what later rows add.
template <typename Acc>
struct Gradients {
  alignas(64) Acc dw[kMaxWidth][kNarrow];
  alignas(64) Acc db[kNarrow];
  alignas(64) Acc pending[kMaxWidth][kNarrow];
  alignas(64) Acc dy[kNarrow];
  alignas(64) Acc dx[kNarrow];
};

// One row; x is oldest first. dx gets the whole gradient of the row W-1 before it.
template <typename Acc, int kWidth, bool kSilu>
void differentiate(const Acc* const* x, const Acc* w, int pitch, const Acc* bias, Gradients<Acc>& g,
                   int n) {
  typedef typename Lanes<Acc>::V V;
  for (int i = 0; i < n; i += sizeof(V) / sizeof(Acc)) {
    V row[kWidth], tap[kWidth], z = get<V>(bias + i);
#pragma GCC unroll 8
    for (int k = 0; k < kWidth; ++k) row[k] = get<V>(x[k] + i), tap[k] = get<V>(w + k * pitch + i);
#pragma GCC unroll 8
    for (int k = 0; k < kWidth; ++k) z = fma_of(tap[k], row[k], z);
    const V dy = get<V>(g.dy + i), dz = kSilu ? through_silu(dy, z) : dy;
#pragma GCC unroll 8
    for (int k = 0; k < kWidth; ++k) put(g.dw[k] + i, fma_of(dz, row[k], get<V>(g.dw[k] + i)));
    put(g.db + i, get<V>(g.db + i) + dz);
    put(g.dx + i, kWidth == 1 ? V(tap[0] * dz) : fma_of(tap[0], dz, get<V>(g.pending[0] + i)));
#pragma GCC unroll 8
    for (int k = 1; k < kWidth - 1; ++k)
      put(g.pending[k - 1] + i, fma_of(tap[k], dz, get<V>(g.pending[k] + i)));
    if (kWidth > 1) put(g.pending[kWidth - 2] + i, V(tap[kWidth - 1] * dz));
  }
}

template <typename Acc>
using Differentiate = void (*)(const Acc* const*, const Acc*, int, const Acc*, Gradients<Acc>&,
                               int);

template <typename Acc, bool kSilu>
Differentiate<Acc> differentiate_of(int32_t W) {
  static constexpr Differentiate<Acc> table[kMaxWidth] = {
      differentiate<Acc, 1, kSilu>, differentiate<Acc, 2, kSilu>, differentiate<Acc, 3, kSilu>,
      differentiate<Acc, 4, kSilu>, differentiate<Acc, 5, kSilu>, differentiate<Acc, 6, kSilu>,
      differentiate<Acc, 7, kSilu>, differentiate<Acc, 8, kSilu>};
  return table[W - 1];
}

// The sequence of a row, or the padding that it lies in.
struct Sequence {
  int64_t start, next;     // its rows are [start, next)
  int64_t initial, final;  // its states; -1 = none
  int64_t tail, end;       // rows [tail, end) are columns of the final state
  bool padding;
};

// live: live_rows of this batch row, found once, as every call would scan all of its padding.
inline Sequence sequence_at(const BwdParams& p, int64_t b, int64_t t, const Span& live) {
  Sequence s{0, p.T, b, b, p.T, p.T, false};
  if (p.cu_seqlens.ptr) {
    const int64_t n = sequence_of(p.cu_seqlens, p.N, t);
    const Span span = n < 0 ? Span{0, 0} : sequence_span(p.cu_seqlens, n, p.T);
    s.padding = t >= span.end;
    const int64_t next = n + 1 < p.N ? at(p.cu_seqlens, n + 1) : p.T;
    s.start = s.padding ? span.end : span.start;
    s.next = s.end = s.padding ? clamp(next, t + 1, p.T) : span.end;
    s.initial = s.final = n;
  } else if (p.seq_idx.ptr) {
    const int64_t id = seq_id(p, b, t);
    s.padding = id < 0;
    s.start = t;
    s.next = t + 1;
    while (s.start > 0 && seq_id(p, b, s.start - 1) == id) --s.start;
    while (s.next < p.T && seq_id(p, b, s.next) == id) ++s.next;
    if (s.start != live.start) s.initial = -1;
    if (s.next != live.end) s.final = -1;
    s.end = s.next;
  }
  if (s.padding || !p.initial.ptr) s.initial = -1;
  if (s.padding || !p.dfinal.ptr) s.final = -1;
  s.tail = s.final < 0 ? s.end : clamp(s.end - p.dfinal.len, s.start, s.end);
  return s;
}

// One block of channels on its way through the rows of one batch row.
template <typename Acc, typename x_t>
struct Walk {
  const BwdParams& p;
  int64_t c;
  int n;
  Block<Acc, x_t, kNarrow> block;
  Gradients<Acc> g;
  Differentiate<Acc> row;

  Walk(const BwdParams& p, int64_t c, int n)
      : p(p),
        c(c),
        n(n),
        block(p.weight, p.bias, p.W, p.silu, c, n),
        row(p.silu ? differentiate_of<Acc, true>(p.W) : differentiate_of<Acc, false>(p.W)) {
    clear_sums();
  }

  void clear_sums() {
    for (int k = 0; k < p.W; ++k) std::memset(g.dw[k], 0, n * sizeof(Acc));
    std::memset(g.db, 0, n * sizeof(Acc));
  }

  const x_t* at_row(const Rows& rows, int64_t b, int64_t t) const {
    return static_cast<const x_t*>(rows.ptr) + b * rows.stride_b + t * rows.stride_t +
           c * rows.stride_d;
  }

  void add_column(Acc* to, const State& state, int64_t sequence, int64_t column) {
    alignas(64) Acc values[kNarrow];
    load_any(values, state.ptr, state.dtype,
             sequence * state.stride_n + c * state.stride_d + column * state.stride_l,
             state.stride_d, n);
    for (int i = 0; i < n; ++i) to[i] += values[i];
  }

  // Up to row t: its history, no row open.
  void enter(const Sequence& s, int64_t b, int64_t t) {
    block.clear();
    for (int k = 0; k < p.W - 1; ++k) std::memset(g.pending[k], 0, n * sizeof(Acc));
    if (s.padding) return;
    for (int64_t from = t - (p.W - 1); from < t; ++from) {
      Acc* to = block.next();
      if (from >= s.start) {
        load_n(to, at_row(p.x, b, from), p.x.stride_d, n);
      } else if (s.initial >= 0) {
        load_any(to, p.initial.ptr, p.initial.dtype,
                 s.initial * p.initial.stride_n + c * p.initial.stride_d +
                     (p.initial.len + from - s.start) * p.initial.stride_l,
                 p.initial.stride_d, n);
      }
    }
  }

  void step(int64_t b, int64_t t) {
    load_n(block.next(), at_row(p.x, b, t), p.x.stride_d, n);
    load_n(g.dy, at_row(p.dy, b, t), p.dy.stride_d, n);
    const Acc* x[kMaxWidth];
    block.oldest_first(x);
    row(x, block.w[0], block.pitch, block.bias, g, n);
  }

  void store_dx(const Sequence& s, int64_t b, int64_t t, Acc* dx) {
    if (!p.dx.ptr) return;
    if (t >= s.tail && t < s.end) add_column(dx, p.dfinal, s.final, p.dfinal.len - (s.end - t));
    store_n(const_cast<x_t*>(at_row(p.dx, b, t)), p.dx.stride_d, dx, n);
  }

  // Rows [begin, end) of batch row b.
  void rows(int64_t b, int64_t begin, int64_t end) {
    const int64_t lag = p.W - 1;
    const Span live = p.seq_idx.ptr ? live_rows(p, b) : Span{0, p.T};
    for (int64_t t = begin; t < end;) {
      const Sequence s = sequence_at(p, b, t, live);
      const int64_t first = larger(t - lag, s.start), stop = smaller(s.next, end);
      enter(s, b, first);
      if (s.padding) {
        std::memset(g.dx, 0, n * sizeof(Acc));
        for (; t < stop; ++t) store_dx(s, b, t, g.dx);
        continue;
      }
      if (first < t) {
        alignas(64) Acc sums[kMaxWidth + 1][kNarrow];
        std::memcpy(sums, g.dw, sizeof g.dw);
        std::memcpy(sums[kMaxWidth], g.db, sizeof g.db);
        for (int64_t r = first; r < t; ++r) step(b, r);
        std::memcpy(g.dw, sums, sizeof g.dw);
        std::memcpy(g.db, sums[kMaxWidth], sizeof g.db);
      }
      for (; t < stop; ++t) {
        step(b, t);
        if (t - lag >= first) store_dx(s, b, t - lag, g.dx);
      }
      if (t < s.next) continue;  // the next part goes on
      for (int64_t r = larger(t - lag, first); r < t; ++r)
        store_dx(s, b, r, g.pending[r - (t - lag)]);
    }
  }

  // All columns of sequence `sequence`'s dinitial.
  void state(int64_t sequence) {
    const int64_t b = p.cu_seqlens.ptr ? 0 : sequence, L = p.dinitial.len, lag = p.W - 1;
    Sequence s{0, p.T, sequence, sequence, 0, 0, false};
    bool carries = true;  // to the final state
    if (p.cu_seqlens.ptr) {
      const Span span = sequence_span(p.cu_seqlens, sequence, p.T);
      s.start = span.start, s.next = span.end;
    } else if (p.seq_idx.ptr) {
      const Span live = live_rows(p, b);
      if (live.start < live.end)
        s = sequence_at(p, b, live.start, live);
      else
        s.start = s.next = p.T;
      carries = s.next == larger(live.end, s.start);
    }
    s.initial = sequence;
    const int64_t length = s.next - s.start, rows = smaller(length, lag);
    enter(s, b, s.start);
    auto store = [&](int64_t column, Acc* values) {
      // The input at this column is column `from` of the final state too, if it is still there.
      const int64_t from = column - L - (length - p.dfinal.len);
      if (p.dfinal.ptr && carries && from >= 0 && from < p.dfinal.len)
        add_column(values, p.dfinal, sequence, from);
      store_any(
          p.dinitial.ptr, p.dinitial.dtype,
          sequence * p.dinitial.stride_n + c * p.dinitial.stride_d + column * p.dinitial.stride_l,
          p.dinitial.stride_d, values, n);
    };
    for (int64_t column = 0; column < L - lag; ++column) {
      std::memset(g.dx, 0, n * sizeof(Acc));
      store(column, g.dx);
    }
    for (int64_t t = 0; t < rows; ++t) {
      step(b, s.start + t);
      store(L - lag + t, g.dx);
    }
    for (int64_t k = 0; k < lag - rows; ++k) store(L - lag + rows + k, g.pending[k]);
  }
};

// Enough parts for the cores of a socket when D is one block, few enough for the sums to be small
// beside the rows.
inline int64_t bwd_part_rows(const BwdParams& p) {
  const int64_t parts = clamp(p.B * p.T / 256, 1, 16);
  return (p.B * p.T + parts - 1) / parts;
}

inline int64_t bwd_parts(const BwdParams& p) {
  const int64_t rows = bwd_part_rows(p);
  return rows ? (p.B * p.T + rows - 1) / rows : 0;
}

// With neither dx nor sums wanted only states are.
inline int64_t parts_to_walk(const BwdParams& p) { return p.dx.ptr || p.parts ? bwd_parts(p) : 0; }

template <typename Acc, typename x_t>
void bwd_part(const BwdParams& p, int64_t part, int64_t c, int n) {
  Walk<Acc, x_t> walk(p, c, n);
  const int64_t part_rows = bwd_part_rows(p), total = p.B * p.T;
  int64_t row = part * part_rows;
  const int64_t last = smaller(row + part_rows, total);
  for (int64_t b = row / p.T; row < last; ++b) {
    const int64_t end = smaller(last - b * p.T, p.T);
    walk.rows(b, row - b * p.T, end);
    row = b * p.T + end;
  }
  if (!p.parts) return;
  Acc* sums = static_cast<Acc*>(p.workspace) + part * (p.W + 1) * p.D + c;
  for (int k = 0; k < p.W; ++k) std::memcpy(sums + k * p.D, walk.g.dw[k], n * sizeof(Acc));
  std::memcpy(sums + p.W * p.D, walk.g.db, n * sizeof(Acc));
}

template <typename Acc, typename x_t>
void bwd_items(const BwdParams& p, int64_t begin, int64_t end) {
  const int64_t blocks = blocks_of(p.D, kNarrow), parts = parts_to_walk(p);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t c = item % blocks * kNarrow, i = item / blocks;
    const int n = static_cast<int>(smaller(kNarrow, p.D - c));
    if (i < parts) {
      bwd_part<Acc, x_t>(p, i, c, n);
    } else {
      Walk<Acc, x_t>(p, c, n).state(i - parts);
    }
  }
}

template <typename Acc>
void bwd_sum(const BwdParams& p, int64_t block) {
  alignas(64) Acc sum[kNarrow];
  const int64_t c = block * kNarrow;
  const int n = static_cast<int>(smaller(kNarrow, p.D - c));
  for (int k = 0; k <= p.W; ++k) {
    const WeightGrad& to = k < p.W ? p.dweight : p.dbias;
    if (!to.ptr) continue;
    std::memset(sum, 0, sizeof sum);
    for (int64_t part = 0; part < p.parts; ++part) {
      const Acc* from = static_cast<const Acc*>(p.workspace) + (part * (p.W + 1) + k) * p.D + c;
      for (int i = 0; i < n; ++i) sum[i] += from[i];
    }
    store_any(to.ptr, to.dtype, c * to.stride_d + (k < p.W ? k * to.stride_w : 0), to.stride_d, sum,
              n);
  }
}

Work bwd_work(const BwdParams& p) {
  return {(parts_to_walk(p) + (p.dinitial.ptr ? p.N : 0)) * blocks_of(p.D, kNarrow), 1};
}

void bwd_range(const BwdParams& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case DType::kFloat64: return bwd_items<double, double>(p, begin, end);
    case DType::kFloat32: return bwd_items<float, float>(p, begin, end);
    case DType::kFloat16: return bwd_items<float, Fp16>(p, begin, end);
    case DType::kBFloat16: return bwd_items<float, Bf16>(p, begin, end);
  }
}

Work bwd_sum_work(const BwdParams& p) {
  return {p.dweight.ptr || p.dbias.ptr ? blocks_of(p.D, kNarrow) : 0, 4};
}

void bwd_sum_range(const BwdParams& p, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block)
    p.dtype == DType::kFloat64 ? bwd_sum<double>(p, block) : bwd_sum<float>(p, block);
}
