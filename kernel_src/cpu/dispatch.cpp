#include <cstdlib>
#include <cstring>

#include "level.h"

namespace short_conv::cpu {

namespace baseline {
extern const Level level;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Level level;
}
namespace avx512 {
extern const Level level;
}
#endif

namespace {

const Level& choose() {
#if defined(__x86_64__)
  const char* lowered = std::getenv("SHORT_CONV_CPU_ISA");
  const bool any = !lowered || !std::strcmp(lowered, "avx512");
  if (any && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return avx512::level;
  if ((any || !std::strcmp(lowered, "avx2")) && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    return avx2::level;
#endif
  return baseline::level;
}

const Level& level() {
  static const Level& chosen = choose();
  return chosen;
}

}  // namespace

Work fwd_work(const FwdParams& p) { return level().fwd_work(p); }
void fwd_range(const FwdParams& p, int64_t begin, int64_t end) { level().fwd_range(p, begin, end); }

Work update_work(const UpdateParams& p) { return level().update_work(p); }
void update_range(const UpdateParams& p, int64_t begin, int64_t end) {
  level().update_range(p, begin, end);
}

int64_t bwd_parts(const BwdParams& p) { return level().bwd_parts(p); }
Work bwd_work(const BwdParams& p) { return level().bwd_work(p); }
void bwd_range(const BwdParams& p, int64_t begin, int64_t end) { level().bwd_range(p, begin, end); }

Work bwd_sum_work(const BwdParams& p) { return level().bwd_sum_work(p); }
void bwd_sum_range(const BwdParams& p, int64_t begin, int64_t end) {
  level().bwd_sum_range(p, begin, end);
}

const char* isa() { return level().name; }

}  // namespace short_conv::cpu
