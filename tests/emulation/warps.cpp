// What lanes of a warp do together, against kernels whose threads never meet: the same bits.
#define EMULATED_WARPS

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../../kernel_src/cuda/launch/bwd_launch.cuh"
#include "../../kernel_src/cuda/launch/update_launch.cuh"

using namespace short_conv;
using namespace short_conv::cuda;
using bf16 = __nv_bfloat16;

std::mt19937 generator;

template <typename T>
std::vector<T> values(size_t count) {
  std::normal_distribution<float> normal;
  std::vector<T> v(count);
  for (T& e : v) e = from_float<T>(normal(generator));
  return v;
}

void expect(bool same, const char* what, int W, int L, int64_t D) {
  if (same) return;
  std::printf("%s differs: W %d L %d D %ld\n", what, W, L, static_cast<long>(D));
  std::exit(1);
}

template <typename T>
bool equal(const std::vector<T>& a, const std::vector<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <typename s_t>
void update(int W, int L, int64_t D, DType state_dtype) {
  constexpr int64_t B = 3, kSlots = 8;
  auto x = values<bf16>(B * D), weight = values<bf16>(D * W);
  // Rows a multiple of 16 bytes apart, and guarded behind.
  const int64_t pitch = (D * L + 15) / 8 * 8;
  std::vector<s_t> states[2]{values<s_t>(kSlots * pitch), {}};
  states[1] = states[0];
  std::vector<bf16> y[2]{std::vector<bf16>(B * D), std::vector<bf16>(B * D)};
  const int32_t slots[B] = {5, -1, 0};
  for (int i = 0; i < 2; ++i) {
    UpdateParams p{};
    p.x = {x.data(), D, D, 1}, p.y = {y[i].data(), D, D, 1};
    p.state = {states[i].data(), pitch, L, 1, kSlots, L, state_dtype};
    p.weight = {weight.data(), W, 1, DType::kBFloat16};
    p.B = p.N = B, p.T = 1, p.D = D, p.W = W, p.silu = true, p.dtype = DType::kBFloat16;
    p.slots = {slots, 1, false};
    if (i == 0) expect(update_by_rows(p), "the choice of kernel", W, L, D);
    i == 0 ? launch_update_typed<bf16>(p, nullptr) : launch_update_channels<bf16>(p, nullptr);
  }
  expect(equal(y[0], y[1]), "y", W, L, D);
  expect(equal(states[0], states[1]), "state", W, L, D);
}

void backward(int W, int64_t T) {
  constexpr int64_t B = 2, D = 3;
  auto x = values<bf16>(B * T * D), dy = values<bf16>(B * T * D), weight = values<bf16>(D * W);
  std::vector<bf16> dx[2]{std::vector<bf16>(B * T * D), std::vector<bf16>(B * T * D)};
  std::vector<float> sums[2]{std::vector<float>(D * (W + 1)), std::vector<float>(D * (W + 1))};
  for (int i = 0; i < 2; ++i) {
    BwdParams p{};
    p.x = {x.data(), D * T, 1, T}, p.dy = {dy.data(), D * T, 1, T};
    p.dx = {dx[i].data(), D * T, 1, T};
    p.weight = {weight.data(), W, 1, DType::kBFloat16};
    p.dweight = {sums[i].data(), W, 1, DType::kFloat32};
    p.dbias = {sums[i].data() + D * W, 1, 0, DType::kFloat32};
    p.B = p.N = B, p.T = T, p.D = D, p.W = W, p.silu = true, p.dtype = DType::kBFloat16;
    p.parts = i == 0 ? bwd_parts(p, T) : B;
    std::vector<float> workspace(p.parts * (W + 1) * D, NAN);
    p.workspace = workspace.data();
    if (i == 0) {
      expect(bwd_channel_first(p), "the choice of kernel", W, 0, T);
      launch_bwd_typed<bf16>(p, T, nullptr);
    } else {
      launch(bwd_kernel<StridedIo<bf16>, kMaxWidth, false>, dim3(1, B), kBwdThreads, nullptr, p, T);
      launch(bwd_sum_kernel<kBwdSumThreads>, dim3(1, W + 1), kBwdSumThreads, nullptr, p);
    }
  }
  expect(equal(dx[0], dx[1]), "dx", W, 0, T);
  // Another order of the same fp32 terms.
  for (size_t i = 0; i < sums[0].size(); ++i)
    expect(std::fabs(sums[0][i] - sums[1][i]) <= 1e-6f * B * T, "a sum", W, 0, T);
}

constexpr int64_t kRows = 4096;

__global__ void look_up(const Index cu, int64_t N, const int64_t t, int64_t* found) {
  found[threadIdx.x] = warp_sequence_of(cu, N, t);
}

void lookup(int64_t N) {
  std::uniform_int_distribution<int32_t> row(0, kRows);
  std::vector<int32_t> starts(N + 1);
  for (int32_t& s : starts) s = row(generator);
  std::sort(starts.begin(), starts.end());
  const Index cu{starts.data(), 1, false};
  for (int64_t t : {int64_t{0}, int64_t{starts[N / 2]}, kRows / 3, kRows}) {
    int64_t found[32];
    launch(look_up, dim3(1), 32, nullptr, cu, N, t, &found[0]);
    for (int64_t n : found) expect(n == sequence_of(cu, N, t), "a sequence", 0, 0, N);
  }
}

int main() {
  for (int W : {2, 3, 4, 7, 8})
    for (int L : {W - 1, W})
      for (int64_t D : {2, 130, 512}) {
        update<bf16>(W, L, D, DType::kBFloat16);
        update<float>(W, L, D, DType::kFloat32);
      }
  for (int W : {1, 3, 4, 8})
    for (int64_t T : {8, 16, 1048, 8200}) backward(W, T);
  for (int64_t N : {1, 2, 31, 33, 68, 1025, 3000}) lookup(N);
  std::puts("equal");
}
