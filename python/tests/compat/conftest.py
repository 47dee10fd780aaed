# SPDX-License-Identifier: Apache-2.0
"""The tests of the fronts run once for each framework; one that is not installed is skipped."""

import gpu_frames
import pytest
from frames import frame_of


@pytest.fixture(params=["numpy", "torch"])
def frame(request, monkeypatch):
    if request.param not in ("stand-in", "cuda"):
        return frame_of(request.param)
    frame = gpu_frames.cuda() if request.param == "cuda" else gpu_frames.stand_in(monkeypatch)
    if not getattr(request.module, "CALLS_ONCE", False):
        gpu_frames.make_calls_twice(monkeypatch)
    return frame


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """What a front says it can't do on a GPU is no failure there."""
    try:
        return (yield)
    except NotImplementedError as error:
        frame = getattr(item, "funcargs", {}).get("frame")
        if isinstance(frame, gpu_frames.Cuda | gpu_frames.StandIn) and "on a GPU" in str(error):
            pytest.skip(str(error))
        raise
