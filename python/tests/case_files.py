# SPDX-License-Identifier: Apache-2.0
"""Case files: a computation in one safetensors file, with its float64 answers."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

import octavo

REPOSITORY = Path(__file__).resolve().parents[2]
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
NUMPY_DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Case:
    """A case, its words turned into those of the Python API."""

    name: str
    about: dict
    tensors: dict

    @property
    def steps(self):
        return self.about["steps"]

    @property
    def format(self):
        return self.about["format"]

    @property
    def num_q_heads(self):
        return self.about["attention"]["num_heads"]

    @property
    def attention_words(self):
        a = self.about["attention"]
        return {
            "softmax_scale": a["softmax_scale"],
            "mask": {"causal": "causal", "none": "full"}[a["mask"]],
            "window": tuple(a["window"]),
            "softcap": a["softcap"],
            "compute": "fp8" if self.about["compute"] == "fp8" else "same",
        }

    def make_cache(self, device="cpu"):
        a, c = self.about["attention"], self.about["cache"]
        return octavo.KvCache(
            num_kv_heads=a["num_heads_kv"],
            head_dim=a["head_dim_qk"],
            head_dim_v=a["head_dim_v"],
            dtype=self.about["dtype"],
            kind=c["kind"],
            page_size=c["page_size"],
            num_pages=c["num_pages"] if c["kind"] == "paged" else 0,
            max_num_seqs=c["max_batch_size"],
            max_seq_len=c["max_sequence_length"],
            device=device,
        )

    def new_out(self, step_idx):
        """f32 cannot hide the dtype's own rounding, so the out is of the case's dtype."""
        return np.empty(
            self.tensors[f"step{step_idx}.out"].shape, NUMPY_DTYPES[self.about["dtype"]]
        )


def read_safetensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        raw = np.frombuffer(data, np.uint8, end - start, 8 + length + start)
        tensors[name] = raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return metadata, tensors


def read_case(path):
    metadata, tensors = read_safetensors(path)
    return Case(path.stem, json.loads(metadata["octavo_case"]), tensors)


def case_paths():
    """The small cases of the repository, and those of every folder that OCTAVO_CASES names."""
    folders = [REPOSITORY / "tests" / "data" / "cases"]
    folders += [Path(name) for name in os.environ.get("OCTAVO_CASES", "").split(":") if name]
    return [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]


def check_step(case, step_idx, out, lse):
    """Out and LSE within the case's tolerance of its answers; padding exactly 0."""
    tolerance = case.about["tolerance"]
    wanted = case.tensors[f"step{step_idx}.out"].astype(np.float64)
    got = np.asarray(out).astype(np.float64)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(
        got, wanted, rtol=tolerance["rtol"], atol=tolerance["atol"], err_msg=f"step {step_idx}"
    )
    assert not got[padding_rows(case, step_idx, wanted.shape)].any(), "padding of out"
    size = np.sum(wanted**2)
    if size > 0:
        assert np.sqrt(np.sum((got - wanted) ** 2) / size) <= tolerance["rms"]
    wanted_lse = case.tensors.get(f"step{step_idx}.lse")
    if wanted_lse is not None:
        np.testing.assert_allclose(
            lse, wanted_lse, rtol=tolerance["rtol"], atol=tolerance["atol"], err_msg="lse"
        )


def padding_rows(case, step_idx, shape):
    """A mask over the leading axes of a padded tensor."""
    if case.format == "thd":
        return np.zeros(shape[:1], bool)
    counts = np.array([count for _, count in case.steps[step_idx]["sequences"]], np.int64)
    longest = shape[1] if case.format == "bshd" else shape[0]
    mask = np.arange(longest)[None, :] >= counts[:, None]
    return mask if case.format == "bshd" else mask.T
