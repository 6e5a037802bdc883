// CPU kernels, torch-free. A call is a number of independent items; the host layer hands ranges
// of them to torch's thread pool, and every range may run on its own thread in any order.
#pragma once

#include <cstdint>

#include "../params.h"

namespace short_conv::cpu {

struct Work {
  int64_t items;
  int64_t grain;  // fewest items worth a thread of their own
};

Work fwd_work(const FwdParams& p);
void fwd_range(const FwdParams& p, int64_t begin, int64_t end);

Work update_work(const UpdateParams& p);
void update_range(const UpdateParams& p, int64_t begin, int64_t end);

// In this order: bwd_parts sizes the workspace, bwd_range fills it and everything else, and when
// all items are done bwd_sum_range adds the parts up.
int64_t bwd_parts(const BwdParams& p);
Work bwd_work(const BwdParams& p);
void bwd_range(const BwdParams& p, int64_t begin, int64_t end);
Work bwd_sum_work(const BwdParams& p);
void bwd_sum_range(const BwdParams& p, int64_t begin, int64_t end);

// "baseline", "avx2" or "avx512": what this process runs, chosen once from the processor's
// features; SHORT_CONV_CPU_ISA may lower it (tests compare the levels).
const char* isa();

}  // namespace short_conv::cpu
