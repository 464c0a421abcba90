"""Names of the metrics of episodes."""

from __future__ import annotations

import numpy as np

from trainer.agentic.episode_metrics import EpisodeTable, environment_metrics


def table(prefix: str) -> EpisodeTable:
    metrics = [{"error_rate": 8.0, "tags/score": 1.0}, {"error_rate": 4.0}]
    rows = [np.array([0]), np.array([1])]
    return EpisodeTable(["maths", "maths"], ["g", "g"], np.array([1.0, 0.0]), metrics, rows, prefix)


def test_a_programs_names_have_their_own_prefix_and_overwrite_no_metric_of_the_trainer() -> None:
    assert environment_metrics(table("own/")) == {
        "env/own/error_rate": 6.0,
        "env/maths/own/error_rate": 6.0,
        "env/own/tags/score": 1.0,
        "env/maths/own/tags/score": 1.0,
    }
    assert set(environment_metrics(table("own/"), "val/")) == {
        "val/env/own/error_rate",
        "val/env/maths/own/error_rate",
        "val/env/own/tags/score",
        "val/env/maths/own/tags/score",
    }
