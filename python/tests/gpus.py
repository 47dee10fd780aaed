# SPDX-License-Identifier: Apache-2.0
"""What tests on a GPU need. Where it is missing they are skipped; with OCTAVO_REQUIRE=cuda (for
CuPy's tests: cupy) in the environment they fail instead.
"""

import os

import pytest

import octavo


def missing(reason, needs="cuda"):
    if os.environ.get("OCTAVO_REQUIRE") == needs:
        pytest.fail(f"OCTAVO_REQUIRE={needs}: {reason}")
    pytest.skip(reason)


def torch_on_a_gpu():
    """PyTorch, which sees a GPU that this build of Octavo can use."""
    try:
        import torch
    except ImportError:
        missing("PyTorch is not installed")
    if not torch.cuda.is_available():
        missing("PyTorch sees no GPU")
    try:
        octavo.Workspace()
    except (octavo.NotCompiled, octavo.DeviceFailure) as error:
        missing(str(error))
    return torch
