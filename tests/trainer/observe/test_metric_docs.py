"""The table of metrics, METRICS.md: every line is read, and what it names is computed. That runs log nothing else is
seen after every test: tests/conftest.py."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer.observe.scripted import SAMPLE
from tests.unlogged_metrics import unlogged
from trainer.observe.metric_docs import PAGE, DocumentedMetric, find, metrics
from trainer.validation.metrics import validation_metrics
from verl_lite.config.rollout_correction import REJECTION_OPTIONS, RolloutCorrectionConfig
from verl_lite.rollout_correction import correct_rollout

ROOT = Path(__file__).resolve().parents[3]


def test_every_line_is_read_and_no_two_say_the_same_name() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    names = [name for metric in metrics() for name in metric.names]
    assert len(metrics()) == len(lines) and all(metric.formula for metric in metrics())
    assert len(lines) <= 200 and len(names) == len(set(names))


def test_what_is_named_is_computed() -> None:
    """Each word of a name stands in the product's code, by itself or in a longer word."""
    files = (file for top in ("trainer", "workers", "verl_lite", "recipes") for file in (ROOT / top).rglob("*.py"))
    code = "".join(file.read_text(encoding="utf-8") for file in files)
    words = set(re.findall("[A-Za-z0-9]+", code))
    names = (name for metric in metrics() for name in metric.names)
    parts = {part for name in names for part in re.split(r"[/@_-]|\{\w+\}", name) if part}
    assert not parts - words and "hemidemisemiquaver" not in words


def test_names_are_found() -> None:
    known = {
        "critic/score/mean": "critic/score/{mean,max,min}",
        "val-core/openai/gsm8k/acc/mean@8": "val-core/{data_source}/{variable}/mean@{N}",
        "reward/error_rate": "reward/error_rate",
        "reward/accuracy_of_mine/mean": "reward/{entry}/mean",
        "env/FrozenLake/success": "env/{tag}/{metric}",
    }
    assert {name: metric.name for name in known if (metric := find(name))} == known
    assert find("val-core/gsm8k/acc/mean@x") is find("actor/unheard_of") is None
    metric = DocumentedMetric("a/{x,y,}/{entry}@{N}", "formula", "", "")
    assert metric.names == ["a/x/{entry}@{N}", "a/y/{entry}@{N}", "a//{entry}@{N}"]
    assert metric.matches("a/x/b.c@12") and not any(map(metric.matches, ("a/x/b/c@12", "a/z/b@12", "a/x/b@N")))
    assert unlogged([replace(metric, name="a/{x,y}/{N}")], {"a/x/3", "b"}) == ["a/y/{N}"]


@pytest.mark.parametrize("prefix", ["", "greedy/"])
def test_every_number_of_a_validation_is_documented(prefix: str) -> None:
    row = replace(SAMPLE, data_source="openai/gsm8k")
    extras = [{"acc": x % 2, "pred": f"{x % 3}", "steps": x} for x in range(8)]
    rows = [replace(row, uid=f"p{x // 4}", extra=extra) for x, extra in enumerate(extras)]
    names = set(validation_metrics([*rows, *(replace(row, data_source="sort") for row in rows)], prefix))
    assert len(names) > 80 and any("/maj@4/" in name for name in names) and all(map(find, names))


@pytest.mark.parametrize("options", REJECTION_OPTIONS)
def test_every_number_of_the_rollout_correction_is_documented(options: str) -> None:
    config = RolloutCorrectionConfig("token", "0.5_2.0", rollout_is_batch_normalize=True, rollout_rs=options)
    config = replace(config, rollout_rs_threshold="0.5" if options.endswith(("k2", "k3", "diff")) else "0.5_2.0")
    log_probs = -torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    _, _, logged = correct_rollout(log_probs, log_probs * 1.1, torch.ones(4, 5), config)
    assert any(name.startswith(f"rollout_corr/rollout_rs_{options}") for name in logged) and all(map(find, logged))
