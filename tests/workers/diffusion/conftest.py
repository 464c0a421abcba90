"""The tiny pipeline that most tests of this folder read."""

from __future__ import annotations

import pytest

from tests.workers.diffusion.tiny_wan import tiny_pipeline


@pytest.fixture(scope="package")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_pipeline(tmp_path_factory.mktemp("pipeline"))
