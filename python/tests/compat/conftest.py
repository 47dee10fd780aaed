# SPDX-License-Identifier: Apache-2.0
"""The tests of the fronts run once for each framework; one that is not installed is skipped."""

import pytest
from frames import frame_of


@pytest.fixture(params=["numpy", "torch"])
def frame(request):
    return frame_of(request.param)
