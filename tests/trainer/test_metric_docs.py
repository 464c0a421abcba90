"""The table of metrics: its page is fresh, and what it names is computed. That runs log nothing else is seen after
every test: tests/conftest.py."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import logged_names, run_files
from tests.trainer.tracking.scripted import SAMPLE
from tests.unlogged_metrics import unlogged
from trainer.evaluate.metrics import validation_metrics
from trainer.metric_docs import Metric, find, metrics, render, undocumented
from verl_lite.config.rollout_correction import REJECTION_OPTIONS, RolloutCorrectionConfig
from verl_lite.rollout_correction import correct_rollout

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_fresh_and_short() -> None:
    page = (ROOT / "trainer" / "METRICS.md").read_text(encoding="utf-8")
    assert page == render(), "METRICS.md is stale: python -m trainer.metric_docs"
    assert len(page.splitlines()) <= 200


def test_no_two_lines_say_the_same_name() -> None:
    names = [name for metric in metrics() for name in metric.names]
    assert not {name for name in names if names.count(name) > 1}


def test_what_is_named_is_computed() -> None:
    """Each part of a name can be put together from the strings, arguments and variables of the product's code."""
    words = {"mean", "max", "min"} | {
        word
        for top in ("trainer", "workers", "verl_lite", "recipes")
        for file in (ROOT / top).rglob("*.py")
        if file.name != "metric_docs.py"
        for word in words_of(file)
    }
    missing = [
        name
        for metric in metrics()
        for name in metric.names
        for part in re.split(r"[/@]|\{\w+\}", name)
        if not can_be_put_together(part, words)
    ]
    assert not missing, f"documented and computed nowhere: {missing}"
    assert not can_be_put_together("hemidemisemiquaver_frac", words), "this test would not notice anything"


def words_of(file: Path) -> set[str]:
    """Strings without spaces and names in the code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found |= {word.strip("_") for word in re.split(r"[/@]", node.value)}
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def can_be_put_together(part: str, words: set[str]) -> bool:
    """Whether `part` is a row of words, joined by `_` or not."""
    if not part or part in words:
        return True
    ends = [end for end in range(1, len(part)) if part[:end].strip("_") in words and part[end - 1 : end + 1].count("_")]
    return any(can_be_put_together(part[end:].strip("_"), words) for end in ends)


def test_a_run_that_logs_something_else_fails_its_test(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    rows = [{"step": 1, "data": {"actor/lr": 1.0, "actor/no_such_thing": 2.0}}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 2, "da')
    assert not list(run_files([tmp_path])), "no config.yaml: no run"
    (run / "config.yaml").touch()
    assert list(run_files([3, tmp_path])) == list(run_files([SimpleNamespace(run_dir=run)])) == [run / "metrics.jsonl"]
    assert undocumented(logged_names(run_files([tmp_path]))) == ["actor/no_such_thing"]
    (run / "config.yaml").unlink()


@pytest.mark.parametrize(
    ("logged", "name"),
    [
        ("critic/score/mean", "critic/score/{mean,max,min}"),
        ("val-core/openai/gsm8k/acc/mean@8", "val-core/{data_source}/{variable}/mean@{N}"),
        ("val-core/gsm8k/acc/mean@x", None),
        ("reward/error_rate", "reward/error_rate"),
        ("reward/overlong/mean", "reward/overlong/mean"),
        ("reward/accuracy_of_mine/mean", "reward/{entry}/mean"),
        ("env/FrozenLake/success", "env/{tag}/{metric}"),
        ("train/grad_norm", "{actor,critic,train}/grad_norm"),
        ("actor/unheard_of", None),
    ],
)
def test_names_are_found(logged: str, name: str | None) -> None:
    found = find(logged)
    assert (found and found.name) == name


def test_patterns() -> None:
    metric = Metric("a/{x,y,}/{entry}@{N}", "", "", "", "formula", "section")
    assert metric.names == ["a/x/{entry}@{N}", "a/y/{entry}@{N}", "a//{entry}@{N}"]
    assert metric.matches("a/x/b.c@12")
    assert not any(metric.matches(name) for name in ("a/x/b/c@12", "a/z/b@12", "a/x/b@N"))
    assert unlogged([replace(metric, name="a/{x,y}/{N}")], {"a/x/3", "b"}) == ["a/y/{N}"]


@pytest.mark.parametrize("prefix", ["", "greedy/"])
def test_every_number_of_a_validation_is_documented(prefix: str) -> None:
    rows = [
        replace(
            SAMPLE, uid=f"p{row // 4}", data_source=source, extra={"acc": row % 2, "pred": f"{row % 3}", "steps": row}
        )
        for source in ("openai/gsm8k", "sort")
        for row in range(8)
    ]
    names = set(validation_metrics(rows, prefix))
    assert len(names) > 80 and any("/maj@4/" in name for name in names)
    assert not undocumented(names)


@pytest.mark.parametrize("options", REJECTION_OPTIONS)
def test_every_number_of_the_rollout_correction_is_documented(options: str) -> None:
    config = RolloutCorrectionConfig("token", "0.5_2.0", rollout_is_batch_normalize=True, rollout_rs=options)
    config = replace(config, rollout_rs_threshold="0.5" if options.endswith(("k2", "k3", "diff")) else "0.5_2.0")
    log_probs = -torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    _, _, logged = correct_rollout(log_probs, log_probs * 1.1, torch.ones(4, 5), config)
    assert any(name.startswith(f"rollout_corr/rollout_rs_{options}") for name in logged)
    assert not undocumented(logged)
