// gather_job.h: what one gather works on.
//
// Owns: all that it reads, since what reads for it may go on when nobody waits any more.
#pragma once

#include <vector>

#include "prefixcache/gather.h"
#include "store/gather_plan.h"

namespace prefixcache::store {

struct GatherJob {
  GatherRequest request;
  std::vector<Source> sources;
  std::vector<Status> found;
  std::vector<Status> copied;
  GatherPlan plan;
};

}  // namespace prefixcache::store
