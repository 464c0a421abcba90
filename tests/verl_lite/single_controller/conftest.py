"""One private Ray cluster for the tests of this folder, whose environment it changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verl_lite.config import RayInitConfig


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    from verl_lite.single_controller.ray_cluster import ray_running

    with ray_running(RayInitConfig(num_cpus=2, object_store_memory_mb=128), "test"):
        yield


@pytest.fixture(scope="module", params=["inline", pytest.param("ray", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param
