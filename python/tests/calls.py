# SPDX-License-Identifier: Apache-2.0
"""The compiled module's call of a known kind, which the fronts repeat, with everything plain."""

from octavo import _native


def plain_call_again(workspace, format):
    return _native._CallAgain(
        workspace,
        format=format,
        softmax_scale=None,
        mask="causal",
        window=(-1, -1),
        softcap=0.0,
        batch_invariant=False,
        backend="auto",
        max_new_tokens=0,
        max_kv_len=0,
    )
