"""The reference of metrics: complete, fresh, and of numbers that the code computes. That runs log nothing else is seen
after every test: tests/conftest.py."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import logged_names, reference, run_files
from tests.trainer.trackers.scripted import SAMPLE
from tests.unlogged_metrics import unlogged
from trainer import metrics_reference
from trainer.metrics_reference import DECLARATION, PAGE, ROOT, Reference, declared_in, main, render, sections
from trainer.validation.answering import share_scored
from trainer.validation.metrics import validation_metrics
from verl_lite.config import PPOConfig, RolloutCorrectionConfig, schema_of
from verl_lite.config.rollout_correction import REJECTION_OPTIONS
from verl_lite.metric_docs import Health, MetricDoc
from verl_lite.rollout_correction import correct_rollout

PARTS_OF_COMMANDS = {"actor", "critic", "train", "val", "greedy", "val-core", "val-aux", "perf"}
"""Segments that stand for a role or a command: the module that computes the number need not name them."""


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(Reference.read()), (
        "METRICS.md is stale: python -m trainer.metrics_reference --write"
    )


def test_no_two_declarations_say_the_same_name() -> None:
    names = [name for entry in reference().entries for name in entry.doc.names]
    assert not {name for name in names if names.count(name) > 1}


def test_advice_names_options_that_there_are() -> None:
    assert reference().keys() <= set(schema_of(PPOConfig).keys)


@pytest.mark.parametrize("file", sorted({entry.file for entry in reference().entries}))
def test_what_is_declared_is_computed_there(file: str) -> None:
    """Each part of a declared name can be put together from the words in the module's code: strings, arguments and
    variables."""
    words = words_of(ROOT / file)
    words |= {"mean", "max", "min"} if "summary" in words else set()  # which `trainer.step_metrics.summary` adds
    missing = [
        name
        for doc in declared_in(ROOT / file)
        for name in doc.names
        for part in re.split(r"[/@]|\{\w+\}", name)
        if part not in PARTS_OF_COMMANDS and not can_be_put_together(part, words)
    ]
    assert not missing, f"{file} declares {missing} and does not compute them"


def words_of(file: Path) -> set[str]:
    """Strings and names in the code, the declarations and docstrings left out."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.Assign) and DECLARATION in ast.unparse(node))]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node):
            del node.body[0]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found


def can_be_put_together(part: str, words: set[str]) -> bool:
    """Whether `part` is a row of pieces that stand in words, each of three letters at least or a whole word."""
    if not part or part in words:
        return True
    return any(
        any(part[:end] in word for word in words) and can_be_put_together(part[end:], words)
        for end in range(len(part), 2, -1)
    )


def test_a_metric_that_is_no_longer_computed_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('METRIC_DOCS = (MetricDoc("a/gone_with_it", "f"),)\n\ndef f():\n    return {"a/rest": 1.0}\n')
    words = words_of(file)
    assert not can_be_put_together("gone_with_it", words) and can_be_put_together("rest", words)


def test_a_run_that_logs_something_else_fails_its_test(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    rows = [{"step": 1, "data": {"actor/lr": 1.0, "actor/no_such_thing": 2.0}}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 2, "da')
    assert not list(run_files([tmp_path])), "no config.yaml: no run"
    (run / "config.yaml").touch()
    assert list(run_files([3, tmp_path])) == list(run_files([SimpleNamespace(run_dir=run)])) == [run / "metrics.jsonl"]
    names = logged_names(run_files([tmp_path]))
    assert reference().undocumented(names) == ["actor/no_such_thing"]
    (run / "config.yaml").unlink()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("critic/score/mean", "trainer/step_metrics.py"),
        ("val-core/openai/gsm8k/acc/mean@8", "trainer/validation/metrics.py"),
        ("val-aux/openai/gsm8k/greedy/reward/error_rate", "trainer/validation/metrics.py"),
        ("val-aux/mean_of_sources/acc/mean@8/ci95", "trainer/validation/metrics.py"),
        ("reward/error_rate", "trainer/rewards/scores.py"),
        ("reward/overlong/mean", "trainer/rewards/overlong.py"),
        ("reward/accuracy_of_mine/mean", "trainer/rewards/scores.py"),
        ("env/error_rate", "trainer/agentic/agentic_pipeline.py"),
        ("env/FrozenLake/success", "trainer/agentic/metrics.py"),
        ("rollout_corr/rollout_rs_token_k1_seq_max_deviation", "verl_lite/rollout_correction.py"),
        ("train/grad_norm", "workers/engine/optimizer.py"),
        ("actor/unheard_of", None),
        ("val-core/gsm8k/acc/mean@x", None),
    ],
)
def test_names_are_found(name: str, file: str | None) -> None:
    found = reference().find(name)
    assert (found and found.file) == file


def test_patterns() -> None:
    doc = MetricDoc("a/{x,y,}/{entry}@{N}", "formula")
    assert doc.names == ["a/x/{entry}@{N}", "a/y/{entry}@{N}", "a//{entry}@{N}"]
    assert doc.matches("a/x/b.c@12") and not doc.matches("a/x/b/c@12") and not doc.matches("a/z/b@12")
    assert not doc.matches("a/x/b@N")
    assert MetricDoc("v/{data_source}/n", "").matches("v/a/b/n") and not MetricDoc("v/n", "").is_pattern


def test_a_range_is_judged() -> None:
    one = Health("c", "d", low=0.0, high=0.5, alarm_high=0.9)
    verdicts = [one.judge(value) for value in (-0.1, 0.0, 0.5, 0.6, 0.91, float("nan"))]
    assert verdicts == ["warning", "ok", "ok", "warning", "alarm", "ok"]
    assert one.shown == "0 to 0.5 (alarm above 0.9)"
    relative = Health("c", "d", low=0.1, alarm_low=0.02, of_start=True)
    assert [relative.judge(value, start=2.0) for value in (0.3, 0.1, 0.03)] == ["ok", "warning", "alarm"]
    assert relative.judge(0.0) == relative.judge(0.0, start=0.0) == "ok"
    with pytest.raises(ValueError, match="give low, high"):
        Health("c", "d")
    with pytest.raises(ValueError, match="alarm_low <= low"):
        Health("c", "d", high=0.5, alarm_high=0.4)


def test_a_declaration_that_needs_an_import_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("METRIC_DOCS = (MetricDoc(NAME, 'formula'),)\n")
    with pytest.raises(ValueError, match=r"m\.py: METRIC_DOCS is read without importing.*'NAME'"):
        declared_in(tmp_path / "m.py")


def test_every_entry_has_a_place_on_the_page() -> None:
    placed = [entry for entries in sections(reference()).values() for entry in entries]
    assert len(placed) == len(reference().entries) and "Other" in set(sections(reference())) | {"Other"}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(metrics_reference, "PAGE", tmp_path / "METRICS.md")
    assert main(["--check"]) == 1 and "stale" in capsys.readouterr().err
    assert main(["--write"]) == 0 and main(["--check"]) == 0
    assert main([]) == 0 and capsys.readouterr().out == (tmp_path / "METRICS.md").read_text()
    assert main(["--what"]) == 2


def test_unlogged_ones_are_listed() -> None:
    entries = [metrics_reference.Entry(MetricDoc("a/{x,y}/{N}", "f"), "m.py")]
    assert unlogged(Reference(entries), {"a/x/3", "b"}) == ["a/y/{N} (m.py)"]


@pytest.mark.parametrize("prefix", ["", "greedy/"])
def test_every_number_of_a_validation_is_documented(prefix: str) -> None:
    rows = [
        replace(
            SAMPLE, uid=f"p{row // 4}", data_source=source, extra={"acc": row % 2, "pred": f"{row % 3}", "steps": row}
        )
        for source in ("openai/gsm8k", "sort")
        for row in range(8)
    ]
    names = set(validation_metrics(rows, prefix)) | set(share_scored(rows, 9, prefix))
    assert len(names) > 80 and any("/maj@4/" in name for name in names)
    assert not reference().undocumented(names)


@pytest.mark.parametrize("options", REJECTION_OPTIONS)
def test_every_number_of_the_rollout_correction_is_documented(options: str) -> None:
    config = RolloutCorrectionConfig("token", "0.5_2.0", rollout_is_batch_normalize=True, rollout_rs=options)
    config = replace(config, rollout_rs_threshold="0.5" if options.endswith(("k2", "k3", "diff")) else "0.5_2.0")
    log_probs = -torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    _, _, metrics = correct_rollout(log_probs, log_probs * 1.1, torch.ones(4, 5), config)
    assert any(name.startswith(f"rollout_corr/rollout_rs_{options}") for name in metrics)
    assert not reference().undocumented(metrics)
