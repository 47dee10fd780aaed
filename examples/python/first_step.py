# SPDX-License-Identifier: Apache-2.0
# The smallest program: two sequences, a prompt each, then one new token a step.
import numpy as np

import octavo

# One layer, 8 query heads over 2 KV heads, 64 slots in pages of 16.
cache = octavo.KvCache(
    num_kv_heads=2, head_dim=64, max_num_seqs=2, max_seq_len=64, page_size=16, num_pages=4
)
attention = octavo.Attention(cache, num_q_heads=8)

for step in range(4):
    # Sequences 7 and 3: prompts of 20 and 5 tokens at first, then one new token each.
    plan = cache.plan({7: 20, 3: 5} if step == 0 else {7: 1, 3: 1})
    cache.begin(plan)

    # A model would compute q, k and v for each layer; here every value is the same.
    q = np.full((plan.num_tokens, 8, 64), 0.5, np.float32)
    k = np.full((plan.num_tokens, 2, 64), 0.25, np.float32)
    v = np.full((plan.num_tokens, 2, 64), 1.0, np.float32)
    out = attention.forward(plan, cache, 0, q, k, v)  # layer 0

    print(
        f"step {step}: {plan.num_tokens} new tokens, sequence 7 holds {cache.length(7)}, "
        f"out[0] = {out[0, 0, 0]:g}"
    )

stats = cache.stats()
print(
    f"{stats.pages_used} of {stats.pages_total} pages used, "
    f"{stats.slots_wasted} slots without a token"
)
