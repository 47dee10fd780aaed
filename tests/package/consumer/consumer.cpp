// SPDX-License-Identifier: Apache-2.0
// Uses the installed headers and links the library: plans one step, and compares the version with
// the one that is wanted.
#include <octavo/octavo.h>

#include <cstdio>
#include <string_view>

int main(int argc, char** argv) {
  octavo::CacheConfig config;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.max_num_seqs = 1;
  config.max_seq_len = 32;
  octavo::KvCache cache(config);
  const octavo::PlanOutcome outcome = cache.plan({{7, 5}});
  if (!outcome.ok() || cache.length(7) != 5) {
    std::puts("consumer: the step was not planned");
    return 1;
  }
  const std::string_view version = octavo::version();
  if (argc > 1 && version != argv[1]) {
    std::printf("consumer: wanted version %s, got %s\n", argv[1], octavo::version());
    return 1;
  }
  std::printf("octavo %s\n", octavo::version());
  return 0;
}
