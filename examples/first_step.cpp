// SPDX-License-Identifier: Apache-2.0
// The smallest whole program: two sequences in a paged cache, a prompt each, then a few generated
// tokens.
#include <octavo/octavo.h>

#include <cstdio>
#include <vector>

int main() {
  using namespace octavo;

  // One layer, 8 query heads over 2 KV heads, 64 slots in pages of 16.
  CacheConfig cache_config;
  cache_config.num_kv_heads = 2;
  cache_config.head_dim = 64;
  cache_config.max_num_seqs = 2;
  cache_config.max_seq_len = 64;
  cache_config.page_size = 16;
  cache_config.num_pages = 4;
  KvCache cache(cache_config);

  AttentionConfig attention_config;
  attention_config.num_q_heads = 8;
  attention_config.num_kv_heads = 2;
  attention_config.head_dim = 64;
  const Attention attention(attention_config, cache_config);

  for (int step = 0; step < 4; ++step) {
    // Sequences 7 and 3: prompts of 20 and 5 tokens at first, then one new token each.
    const PlanOutcome outcome = cache.plan({{7, step == 0 ? 20 : 1}, {3, step == 0 ? 5 : 1}});
    if (!outcome) {
      std::printf("waiting for pages: %s\n", outcome.shortage().to_string().c_str());
      return 1;
    }
    const StepPlan& plan = outcome.plan();
    cache.begin(plan);

    // A model would compute q, k and v for each layer; here every value is the same.
    const int num_tokens = plan.num_tokens();
    std::vector<float> q(static_cast<std::size_t>(num_tokens) * 8 * 64, 0.5F);
    std::vector<float> k(static_cast<std::size_t>(num_tokens) * 2 * 64, 0.25F);
    std::vector<float> v(static_cast<std::size_t>(num_tokens) * 2 * 64, 1.0F);
    std::vector<float> out(q.size());

    LayerInputs inputs;  // packed tokens: [num_tokens, heads, dim]
    inputs.q = {q.data(), DType::F32, {num_tokens, 8, 64}};
    inputs.k = {k.data(), DType::F32, {num_tokens, 2, 64}};
    inputs.v = {v.data(), DType::F32, {num_tokens, 2, 64}};
    attention.forward(plan, cache, /*layer=*/0, inputs,
                      {out.data(), DType::F32, {num_tokens, 8, 64}});

    std::printf("step %d: %d new tokens, sequence 7 holds %d, out[0] = %g\n", step, num_tokens,
                static_cast<int>(cache.length(7)), static_cast<double>(out[0]));
  }
  const CacheStats stats = cache.stats();
  std::printf("%d of %d pages used, %d slots without a token\n", static_cast<int>(stats.pages_used),
              static_cast<int>(stats.pages_total), static_cast<int>(stats.slots_wasted));
  return 0;
}
