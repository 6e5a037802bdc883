// What one instruction set level offers; see kernel_body.h.
#pragma once

#include "kernels.h"

namespace short_conv::cpu {

struct Level {
  const char* name;
  Work (*fwd_work)(const FwdParams&);
  void (*fwd_range)(const FwdParams&, int64_t begin, int64_t end);
  Work (*update_work)(const UpdateParams&);
  void (*update_range)(const UpdateParams&, int64_t begin, int64_t end);
  int64_t (*bwd_parts)(const BwdParams&);
  Work (*bwd_work)(const BwdParams&);
  void (*bwd_range)(const BwdParams&, int64_t begin, int64_t end);
  Work (*bwd_sum_work)(const BwdParams&);
  void (*bwd_sum_range)(const BwdParams&, int64_t begin, int64_t end);
};

}  // namespace short_conv::cpu
