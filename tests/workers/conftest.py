"""Tiny models that the tests of workers share: they take seconds to make."""

from __future__ import annotations

import pytest

from tests.tiny_model import tiny_qwen2


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model"), hidden=32, heads=4, kv_heads=2)


@pytest.fixture(scope="session")
def tied_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("tied"), hidden=32, heads=4, tie_word_embeddings=True)
