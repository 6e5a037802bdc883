// The backward on the CPU, plainly: channel after channel, row after row, in double precision. An
// item is a channel, whose sums over rows one thread takes in order, so one part is enough.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace short_conv::cpu {
namespace {

template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &value, sizeof to);
  return to;
}

// fp16 as an fp32 of the same digits whose exponent is 112 too small.
float from_f16(uint16_t bits) {
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;
  const float scaled = bits_as<float>(magnitude) * 0x1p112f;
  const uint32_t special = magnitude >= (0x7c00u << 13) ? 0x7f800000u : 0;
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  return bits_as<float>(bits_as<uint32_t>(scaled) | special | sign);
}

uint16_t to_f16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value), magnitude = bits & 0x7fffffff;
  const uint32_t sign = bits >> 16 & 0x8000;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 113u << 23) {  // adding 0.5 rounds to a multiple of 2^-24, fp16's smallest
    const float rounded = bits_as<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_as<uint32_t>(rounded) - bits_as<uint32_t>(0.5f)));
  }
  return static_cast<uint16_t>(sign |
                               (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

uint16_t to_bf16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

double read(const void* ptr, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat64: return static_cast<const double*>(ptr)[i];
    case DType::kFloat32: return static_cast<const float*>(ptr)[i];
    case DType::kFloat16: return from_f16(static_cast<const uint16_t*>(ptr)[i]);
    case DType::kBFloat16: break;
  }
  return bits_as<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(ptr)[i]) << 16);
}

void write(void* ptr, DType dtype, int64_t i, double value) {
  const float rounded = static_cast<float>(value);
  switch (dtype) {
    case DType::kFloat64: static_cast<double*>(ptr)[i] = value; return;
    case DType::kFloat32: static_cast<float*>(ptr)[i] = rounded; return;
    case DType::kFloat16: static_cast<uint16_t*>(ptr)[i] = to_f16(rounded); return;
    case DType::kBFloat16: static_cast<uint16_t*>(ptr)[i] = to_bf16(rounded); return;
  }
}

int64_t at(const Index& index, int64_t i) {
  return index.wide ? static_cast<const int64_t*>(index.ptr)[i]
                    : static_cast<const int32_t*>(index.ptr)[i];
}

// Rows [begin, end) of batch row b. The first sequence of state row n continues its initial state,
// the last one leaves its final state.
struct Sequence {
  int64_t b, begin, end, n;
  bool first, last;
};

void add_runs(const BwdParams& p, int64_t b, std::vector<Sequence>& found) {
  auto id = [&](int64_t t) { return at(p.seq_idx, b * p.seq_idx_stride_b + t * p.seq_idx.stride); };
  const size_t before = found.size();
  for (int64_t t = 0, end; t < p.T; t = end) {
    for (end = t + 1; end < p.T && id(end) == id(t);) ++end;
    if (id(t) >= 0) found.push_back({b, t, end, b, false, false});
  }
  if (found.size() == before) found.push_back({b, 0, 0, b, false, false});
  found[before].first = found.back().last = true;
}

std::vector<Sequence> sequences(const BwdParams& p) {
  std::vector<Sequence> found;
  if (p.cu_seqlens.ptr) {
    auto bound = [&](int64_t n, int64_t least) {
      return std::clamp(at(p.cu_seqlens, n * p.cu_seqlens.stride), least, p.T);
    };
    int64_t begin = bound(0, 0);
    for (int64_t n = 0; n < p.N; ++n) {
      const int64_t end = bound(n + 1, begin);
      found.push_back({0, begin, end, n, true, true});
      begin = end;
    }
    return found;
  }
  for (int64_t b = 0; b < p.B; ++b) {
    if (p.seq_idx.ptr) {
      add_runs(p, b, found);
    } else {
      found.push_back({b, 0, p.T, b, true, true});
    }
  }
  return found;
}

// One channel: its taps and the sums of their gradients, the bias's last.
struct Channel {
  const BwdParams& p;
  int64_t d;
  double taps[kMaxWidth], bias, sums[kMaxWidth + 1] = {};
  // What a sequence's windows reach, oldest first, and its gradient. Columns of an initial state in
  // front of the history are never read.
  std::vector<double> x, dx;

  Channel(const BwdParams& p, int64_t d) : p(p), d(d) {
    for (int k = 0; k < p.W; ++k)
      taps[k] = read(p.weight.ptr, p.weight.dtype, d * p.weight.stride_d + k * p.weight.stride_w);
    bias = p.bias.ptr ? read(p.bias.ptr, p.bias.dtype, d * p.bias.stride_d) : 0.0;
  }

  int64_t in_rows(const Rows& rows, int64_t b, int64_t t) const {
    return b * rows.stride_b + t * rows.stride_t + d * rows.stride_d;
  }
  int64_t in_state(const State& state, int64_t n, int64_t column) const {
    return n * state.stride_n + d * state.stride_d + column * state.stride_l;
  }

  void differentiate(const Sequence& s) {
    const int64_t history = p.W - 1, rows = s.end - s.begin;
    const int64_t L = s.first && p.initial.ptr ? p.initial.len : 0;
    const int64_t front = std::max(L, history);
    x.assign(front + rows, 0.0), dx.assign(front + rows, 0.0);
    for (int64_t j = std::max<int64_t>(L - history, 0); j < L; ++j)
      x[front - L + j] = read(p.initial.ptr, p.initial.dtype, in_state(p.initial, s.n, j));
    for (int64_t t = 0; t < rows; ++t)
      x[front + t] = read(p.x.ptr, p.dtype, in_rows(p.x, s.b, s.begin + t));

    for (int64_t t = 0; t < rows; ++t) {
      const double* window = x.data() + front + t - history;
      double* dwindow = dx.data() + front + t - history;
      double g = read(p.dy.ptr, p.dtype, in_rows(p.dy, s.b, s.begin + t));
      if (p.silu) {
        double z = bias;
        for (int k = 0; k < p.W; ++k) z += taps[k] * window[k];
        const double sigmoid = 1.0 / (1.0 + std::exp(-z));
        g *= sigmoid * (1.0 + z * (1.0 - sigmoid));
      }
      for (int k = 0; k < p.W; ++k) {
        dwindow[k] += taps[k] * g;
        sums[k] += window[k] * g;
      }
      sums[p.W] += g;
    }

    if (s.last && p.dfinal.ptr) {
      const int64_t known = std::min(p.dfinal.len, L + rows);
      for (int64_t j = 1; j <= known; ++j)
        dx[front + rows - j] +=
            read(p.dfinal.ptr, p.dfinal.dtype, in_state(p.dfinal, s.n, p.dfinal.len - j));
    }
    if (p.dx.ptr)
      for (int64_t t = 0; t < rows; ++t)
        write(p.dx.ptr, p.dtype, in_rows(p.dx, s.b, s.begin + t), dx[front + t]);
    if (s.first && p.dinitial.ptr)
      for (int64_t j = 0; j < L; ++j)
        write(p.dinitial.ptr, p.dinitial.dtype, in_state(p.dinitial, s.n, j), dx[front - L + j]);
  }
};

DType sums_dtype(const BwdParams& p) {
  return p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

}  // namespace

int64_t bwd_parts(const BwdParams&) { return 1; }

Work bwd_work(const BwdParams& p) { return {p.D, 1}; }

void bwd_range(const BwdParams& p, int64_t begin, int64_t end) {
  const std::vector<Sequence> all = sequences(p);
  for (int64_t d = begin; d < end; ++d) {
    Channel channel(p, d);
    if (p.dx.ptr)  // padding rows keep these zeros
      for (int64_t b = 0; b < p.B; ++b)
        for (int64_t t = 0; t < p.T; ++t)
          write(p.dx.ptr, p.dtype, channel.in_rows(p.dx, b, t), 0.0);
    for (const Sequence& s : all) channel.differentiate(s);
    for (int k = 0; p.parts > 0 && k <= p.W; ++k)
      write(p.workspace, sums_dtype(p), k * p.D + d, channel.sums[k]);
  }
}

Work bwd_sum_work(const BwdParams& p) { return {p.parts > 0 ? p.D : 0, 256}; }

void bwd_sum_range(const BwdParams& p, int64_t begin, int64_t end) {
  const WeightGrad &dw = p.dweight, &db = p.dbias;
  for (int64_t d = begin; d < end; ++d) {
    auto sum = [&](int k) { return read(p.workspace, sums_dtype(p), k * p.D + d); };
    for (int k = 0; dw.ptr && k < p.W; ++k)
      write(dw.ptr, dw.dtype, d * dw.stride_d + k * dw.stride_w, sum(k));
    if (db.ptr) write(db.ptr, db.dtype, d * db.stride_d, sum(p.W));
  }
}

}  // namespace short_conv::cpu
