// kLanes floats in one register of the including level, and the operations on them that the
// compiler's own vector types lack or do badly. Included by kernel_body.h inside its namespace.
//
// Rows of 4 columns a channel, as [D, 4] lies in memory, fill 4 vectors: evens and odds, twice,
// take them to columns; shift_row<k> drops the oldest column of vector k and appends the channel's
// x.

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
template <int k>
VecF shift_row(VecF row, VecF x) {
  return __builtin_shufflevector(row, x, 1, 2, 3, 16 + 4 * k + 0, 5, 6, 7, 16 + 4 * k + 1, 9, 10,
                                 11, 16 + 4 * k + 2, 13, 14, 15, 16 + 4 * k + 3);
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

inline VecF evens(VecF a, VecF b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
}
inline VecF odds(VecF a, VecF b) {
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
template <int k>
VecF shift_row(VecF row, VecF x) {
  return __builtin_shufflevector(row, x, 1, 2, 3, 8 + 2 * k + 0, 5, 6, 7, 8 + 2 * k + 1);
}

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
template <int k>
VecF shift_row(VecF row, VecF x) {
  return __builtin_shufflevector(row, x, 1, 2, 3, 4 + k);
}

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
inline void store_vec(Bf16* p, VecF v) {
  const VecU bits = as_bits(v), rounded = bits + 0x7fff + (bits >> 16 & 1);
  const VecH h = narrow((v == v ? rounded : (VecU{} + 0x7fc00000u)) >> 16);
  std::memcpy(p, &h, sizeof h);
}
inline void store_vec(Fp16* p, VecF v) {
  const VecH h = to_half(v);
  std::memcpy(p, &h, sizeof h);
}
