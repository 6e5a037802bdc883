// kLanes floats in one register of the including level, and the operations on them that the
// compiler's own vector types lack or do badly. Included by kernel_body.h inside its namespace.
//
// Rows of 4 columns a channel, as [D, 4] lies in memory, fill 4 vectors: evens and odds, twice,
// take them to columns; zips, twice, take columns back.

constexpr int kLanes = SHORT_CONV_VECTOR_BYTES / 4;
typedef float VecF __attribute__((vector_size(SHORT_CONV_VECTOR_BYTES)));
typedef uint32_t VecU __attribute__((vector_size(SHORT_CONV_VECTOR_BYTES)));
typedef uint16_t VecH __attribute__((vector_size(SHORT_CONV_VECTOR_BYTES / 2)));

inline VecU as_bits(VecF v) { return (VecU)v; }
inline VecF as_float(VecU v) { return (VecF)v; }

#if SHORT_CONV_VECTOR_BYTES == 64

inline VecF fma_of(VecF a, VecF b, VecF c) {
  return (VecF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
inline VecF min_of(VecF a, VecF b) { return (VecF)_mm512_min_ps((__m512)a, (__m512)b); }
inline VecF max_of(VecF a, VecF b) { return (VecF)_mm512_max_ps((__m512)a, (__m512)b); }
inline VecU widen(VecH h) { return (VecU)_mm512_cvtepu16_epi32((__m256i)h); }
inline VecH narrow(VecU v) { return (VecH)_mm512_cvtepi32_epi16((__m512i)v); }
inline VecF from_half(VecH h) { return (VecF)_mm512_cvtph_ps((__m256i)h); }
inline VecH to_half(VecF v) { return (VecH)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }

inline VecF evens(VecF a, VecF b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
inline VecF odds(VecF a, VecF b) {
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
inline VecF zip_low(VecF a, VecF b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline VecF zip_high(VecF a, VecF b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}

#elif SHORT_CONV_VECTOR_BYTES == 32

inline VecF fma_of(VecF a, VecF b, VecF c) {
  return (VecF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
inline VecF min_of(VecF a, VecF b) { return (VecF)_mm256_min_ps((__m256)a, (__m256)b); }
inline VecF max_of(VecF a, VecF b) { return (VecF)_mm256_max_ps((__m256)a, (__m256)b); }
inline VecU widen(VecH h) { return (VecU)_mm256_cvtepu16_epi32((__m128i)h); }
inline VecH narrow(VecU v) {
  const __m256i pairs = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  return (VecH)_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08));
}
inline VecF from_half(VecH h) { return (VecF)_mm256_cvtph_ps((__m128i)h); }
inline VecH to_half(VecF v) { return (VecH)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }

// As intrinsics, because GCC makes evens of all 8 from two vpermd and a blend: shuffles within
// lanes of 128 bits take one cycle on Zen 3, a vpermd two slots and eight cycles.
inline VecF evens(VecF a, VecF b) {
  const __m256 lanes = _mm256_shuffle_ps((__m256)a, (__m256)b, 0x88);
  return (VecF)_mm256_permute4x64_epi64((__m256i)lanes, 0xd8);
}
inline VecF odds(VecF a, VecF b) {
  const __m256 lanes = _mm256_shuffle_ps((__m256)a, (__m256)b, 0xdd);
  return (VecF)_mm256_permute4x64_epi64((__m256i)lanes, 0xd8);
}
inline VecF zip_low(VecF a, VecF b) { return (VecF)_mm256_unpacklo_ps((__m256)a, (__m256)b); }
inline VecF zip_high(VecF a, VecF b) { return (VecF)_mm256_unpackhi_ps((__m256)a, (__m256)b); }

#else

inline VecF fma_of(VecF a, VecF b, VecF c) {
  for (int i = 0; i < kLanes; ++i) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return a;
}
inline VecF min_of(VecF a, VecF b) { return a < b ? a : b; }
inline VecF max_of(VecF a, VecF b) { return a > b ? a : b; }
inline VecU widen(VecH h) { return __builtin_convertvector(h, VecU); }
inline VecH narrow(VecU v) { return __builtin_convertvector(v, VecH); }
inline VecF from_half(VecH h) {
  VecF v;
  for (int i = 0; i < kLanes; ++i) {
    const Fp16 one{h[i]};
    v[i] = load(&one);
  }
  return v;
}
inline VecH to_half(VecF v) {
  VecH h;
  for (int i = 0; i < kLanes; ++i) {
    Fp16 one;
    store(&one, v[i]);
    h[i] = one.bits;
  }
  return h;
}

inline VecF evens(VecF a, VecF b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6); }
inline VecF odds(VecF a, VecF b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7); }
inline VecF zip_low(VecF a, VecF b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline VecF zip_high(VecF a, VecF b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }

#endif

inline VecF load_vec(const float* p) {
  VecF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline VecH load_bits(const void* p) {
  VecH h;
  std::memcpy(&h, p, sizeof h);
  return h;
}
inline VecF load_vec(const Bf16* p) { return as_float(widen(load_bits(p)) << 16); }
inline VecF load_vec(const Fp16* p) { return from_half(load_bits(p)); }

inline void store_vec(float* p, VecF v) { std::memcpy(p, &v, sizeof v); }
// In the upper 16 bits of each float.
inline VecU rounded_to_bf16(VecF v) {
  const VecU bits = as_bits(v), rounded = bits + 0x7fff + (bits >> 16 & 1);
  return v == v ? rounded : (VecU{} + 0x7fc00000u);
}
inline void store_vec(Bf16* p, VecF v) {
  const VecH h = narrow(rounded_to_bf16(v) >> 16);
  std::memcpy(p, &h, sizeof h);
}
inline void store_vec(Fp16* p, VecF v) {
  const VecH h = to_half(v);
  std::memcpy(p, &h, sizeof h);
}

// What a row is read and written by: one vector, of bf16 two, from the low and high halves of each
// 32 bits, which takes a shift and a mask where neighbours in order take a widening and a shuffle.
// in_order takes a row of floats to that order.
template <typename x_t>
struct Unit {
  static constexpr int kVecs = 1, kSize = kLanes;
  static void load(const x_t* p, VecF (&v)[1]) { v[0] = load_vec(p); }
  static void store(x_t* p, const VecF (&v)[1]) { store_vec(p, v[0]); }
};

template <>
struct Unit<Bf16> {
  static constexpr int kVecs = 2, kSize = 2 * kLanes;
  static void load(const Bf16* p, VecF (&v)[2]) {
    VecU pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    v[0] = as_float(pairs << 16), v[1] = as_float(pairs & 0xffff0000u);
  }
  static void store(Bf16* p, const VecF (&v)[2]) {
    const VecU pairs = rounded_to_bf16(v[0]) >> 16 | (rounded_to_bf16(v[1]) & 0xffff0000u);
    std::memcpy(p, &pairs, sizeof pairs);
  }
  static void in_order(float* to, const float* from, int n) {
    for (int i = 0; i < n; i += kSize) {
      const VecF a = load_vec(from + i), b = load_vec(from + i + kLanes);
      store_vec(to + i, evens(a, b));
      store_vec(to + i + kLanes, odds(a, b));
    }
  }
};

// The 4 columns of kLanes channels from [D, 4] rows, and back. The AVX2 zips work within lanes of
// 128 bits, so there lane 1 takes the rows of channels 4 to 7.
template <typename T>
inline void load_columns(const T* rows, VecF (&column)[4]) {
  VecF r[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) r[k] = load_vec(rows + k * kLanes);
  const VecF e0 = evens(r[0], r[1]), e1 = evens(r[2], r[3]);
  const VecF o0 = odds(r[0], r[1]), o1 = odds(r[2], r[3]);
  column[0] = evens(e0, e1), column[2] = odds(e0, e1);
  column[1] = evens(o0, o1), column[3] = odds(o0, o1);
}

inline void store_columns(float* rows, VecF c0, VecF c1, VecF c2, VecF c3) {
  const VecF low02 = zip_low(c0, c2), high02 = zip_high(c0, c2);
  const VecF low13 = zip_low(c1, c3), high13 = zip_high(c1, c3);
  const VecF r[4] = {zip_low(low02, low13), zip_high(low02, low13), zip_low(high02, high13),
                     zip_high(high02, high13)};
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
#if SHORT_CONV_VECTOR_BYTES == 32
    _mm256_storeu2_m128(rows + 16 + 4 * k, rows + 4 * k, (__m256)r[k]);
#else
    store_vec(rows + k * kLanes, r[k]);
#endif
  }
}

#if SHORT_CONV_VECTOR_BYTES == 32
inline void load_columns(const float* rows, VecF (&column)[4]) {
  VecF r[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) r[k] = (VecF)_mm256_loadu2_m128(rows + 16 + 4 * k, rows + 4 * k);
  const VecF low0 = zip_low(r[0], r[2]), high0 = zip_high(r[0], r[2]);
  const VecF low1 = zip_low(r[1], r[3]), high1 = zip_high(r[1], r[3]);
  column[0] = zip_low(low0, low1), column[1] = zip_high(low0, low1);
  column[2] = zip_low(high0, high1), column[3] = zip_high(high0, high1);
}
#endif
