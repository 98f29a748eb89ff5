from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in these tests may need a network
torch.set_num_threads(1)  # the shapes are tiny: threads would only wait for each other

# A run of CI repeats the same examples, so that it judges the change; everywhere else the search goes on.
settings.register_profile(
    "default",
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
)
settings.load_profile("default")


@pytest.fixture(params=["torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
