# SPDX-License-Identifier: Apache-2.0
"""Names that a library has and its front has not: programs that ask find them missing."""

import importlib

import pytest

ABSENT = [
    ("flashinfer", "BlockSparseAttentionWrapper"),
    ("flashinfer", "xqa"),
    ("flashinfer.decode", "trtllm_batch_decode_with_kv_cache"),
    ("flashinfer.prefill", "trtllm_batch_context_with_kv_cache"),
    ("flashinfer.page", "append_paged_mla_kv_cache"),
    ("flashinfer.cascade", "BatchAttention"),
    ("transformer_engine", "TransformerLayer"),
    ("transformer_engine.pytorch", "fp8_autocast"),
    ("transformer_engine.pytorch.attention", "MultiheadAttention"),
]
everywhere = pytest.mark.parametrize(("module", "name"), ABSENT)


def front(module):
    return importlib.import_module(f"octavo.compat.{module}")


@everywhere
def test_who_asks_for_it_is_told_no(module, name):
    assert not hasattr(front(module), name)
    assert getattr(front(module), name, None) is None


@everywhere
def test_an_import_of_it_fails_as_of_an_older_version(module, name):
    with pytest.raises(ImportError, match=f"cannot import name '{name}'"):
        exec(f"from octavo.compat.{module} import {name}")


@everywhere
def test_its_use_names_it_as_not_covered(module, name):
    with pytest.raises(NotImplementedError, match=f"^{name}: not covered by octavo.compat"):
        getattr(front(module), name)
    with pytest.raises(AttributeError) as raised:
        getattr(front(module), name)
    assert raised.value.name == name


@pytest.mark.parametrize("module", sorted({module for module, _ in ABSENT}))
def test_a_name_that_nobody_has_is_an_ordinary_missing_one(module):
    with pytest.raises(AttributeError, match="has no attribute") as raised:
        front(module).BatchDecodeWithPagedKvCacheWrapper  # noqa: B018
    assert not isinstance(raised.value, NotImplementedError)
