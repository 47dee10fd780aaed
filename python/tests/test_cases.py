# SPDX-License-Identifier: Apache-2.0
"""Every case file through the Python API: Octavo's own cache, and the caller's."""

import numpy as np
import pytest

import octavo
from case_files import case_paths, check_step, read_case

# Cases whose point is that a step can't be had.
UNMET = {
    "fork_full": octavo.CacheFull,
    "small_out_of_pages": octavo.CacheFull,
    "too_long": octavo.CacheFull,
    "too_long_at_once": octavo.InvalidArgument,
    "too_many": octavo.CacheFull,
}
PATHS = case_paths()


def prepare(cache, step):
    """Release, fork, truncate, plan and begin."""
    for seq_id in step.get("release", []):
        cache.release(seq_id)
    for source, to in step.get("fork", []):
        cache.fork(source, to)
    for seq_id, length in step.get("truncate", []):
        cache.truncate(seq_id, length)
    plan = cache.plan(step["sequences"])
    cache.begin(plan)
    return plan


def replay(case):
    cache = case.make_cache()
    attention = octavo.Attention(cache, num_q_heads=case.num_q_heads, **case.attention_words)
    for i, step in enumerate(case.steps):
        plan = prepare(cache, step)
        out, lse = attention.forward(
            plan,
            cache,
            0,
            *(case.tensors[f"step{i}.{x}"] for x in "qkv"),
            format=case.format,
            out=case.new_out(i),
            lse=True,
            sinks=case.tensors.get("sinks"),
            alibi_slopes=case.tensors.get("alibi_slopes"),
        )
        check_step(case, i, out, lse)
    cache.audit()


def table_of(cache, plan):
    pages = [cache.page_ids(int(seq_id)) for seq_id in plan.ids]
    table = np.full((len(pages), max(map(len, pages), default=0) + 1), 2**31 - 1, np.int32)
    for row, ids in zip(table, pages, strict=True):
        row[: len(ids)] = ids
    return table


def replay_as_callers(case):
    """The cache only keeps the books; append_tokens and attend do the work on its arrays."""
    cache = case.make_cache()
    for i, step in enumerate(case.steps):
        plan = prepare(cache, step)
        q, k, v = (case.tensors[f"step{i}.{x}"] for x in "qkv")
        k_cache, v_cache = cache.key_storage(0), cache.value_storage(0)
        where = {
            "kv_lens": plan.kv_lens,
            "token_offsets": plan.token_offsets,
            "format": case.format,
        }
        if cache.kind == "paged":
            where["page_table"] = table_of(cache, plan)
        else:
            where["row_indices"] = plan.rows
        octavo.append_tokens(k, v, k_cache, v_cache, **where)
        out, lse = octavo.attend(
            q,
            k_cache,
            v_cache,
            **where,
            out=case.new_out(i),
            lse=True,
            sinks=case.tensors.get("sinks"),
            alibi_slopes=case.tensors.get("alibi_slopes"),
            **case.attention_words,
        )
        check_step(case, i, out, lse)


@pytest.mark.parametrize("how", [replay, replay_as_callers])
@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_case_gives_its_answers(path, how):
    case = read_case(path)
    wanted_error = UNMET.get(case.name)
    if case.about["compute"] == "fp8":
        wanted_error = octavo.Error  # no backend of the CPU computes in FP8
    if wanted_error is None:
        how(case)
        return
    with pytest.raises(wanted_error):
        how(case)
