"""Run folders as they are found: finished, alive, killed in the middle of a line, resumed, of other commands."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from tests.trainer.run_folder import SAMPLE, make_run
from trainer.reports.run_data import read_config, read_run, run_titles
from trainer.reports.run_samples import groups
from trainer.reports.sample_choice import Choice, changed, chosen
from verl_lite.config import load_config, save_config
from verl_lite.errors import UserError


def test_a_finished_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    assert (run.name, run.state, run.last_step, run.total_steps) == ("a", "finished", 4, 4)
    assert run.series("critic/score/mean") == [(1, 0.1), (2, 0.2), (3, pytest.approx(0.3)), (4, 0.4)]
    assert run.seconds() == 6.0 and run.notes == ("a note",)
    assert "reward/acc/mean" not in run.names  # never a number
    assert run.config["actor.optim.lr"].value == "0.001" and not run.config["actor.optim.lr"].is_default
    assert run.config["trainer.experiment_name"].value == '"a # b"' and run.config["recipe"].is_default


def test_a_line_that_was_cut_off_and_a_run_that_went_back(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", total=9)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "data": {"critic/score/mean": 7.0}}) + '\n{"step": 3, "data": {"cri')
    run = read_run(folder)
    assert run.state == "stopped" and run.series("critic/score/mean") == [(1, 0.1), (2, 7.0)]


def test_a_run_is_alive_while_the_process_that_holds_its_folder_is(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", total=9)
    (folder / "in_use").write_text(f"pid {os.getpid()} of user x, since now")
    assert read_run(folder).state == "running"
    process = psutil.Process().create_time()
    os.utime(folder / "in_use", (process - 60, process - 60))  # a killed run's, whose number this process got later
    assert read_run(folder).state == "stopped"
    (folder / "in_use").write_text("{")
    assert read_run(folder).state == "stopped"


def test_numbers_alone_are_enough(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"train/loss": 2.0}}\n')
    run = read_run(tmp_path)
    assert run.state == "not running" and not run.config and not list(groups(tmp_path))


@pytest.mark.parametrize(("make", "word"), [(False, "no such folder"), (True, "no metrics.jsonl in it")])
def test_what_is_no_run_is_an_error(tmp_path: Path, make: bool, word: str) -> None:
    folder = tmp_path / "x"
    if make:
        folder.mkdir()
    with pytest.raises(UserError, match=word):
        read_run(folder)


def test_the_runs_below_a_folder_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "project" / "a")
    with pytest.raises(UserError, match="project/a"):
        read_run(tmp_path)


def test_a_saved_configuration_is_read_with_its_sources(tmp_path: Path) -> None:
    loaded = load_config(["model.path=a b # c", "data.train_files=[x.parquet]", "actor.optim.lr=3e-5"])
    config, _ = read_config(save_config(loaded, tmp_path / "config.yaml"))
    assert config["actor.optim.lr"].value == "3.0e-05" and config["actor.optim.lr"].source == "command line"
    assert "a b # c" in config["model.path"].value and config["model.path"].source == "command line"
    assert config["rollout.val_kwargs.n"].value == "1" and config["rollout.val_kwargs.n"].is_default


def test_titles_tell_runs_apart(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / top / "run")) for top in ("a", "b")]
    assert run_titles(runs) == ["a/run", "b/run"] and run_titles(runs[:1]) == ["run"]


# -------------------------------------------------------------------------------------------------------- samples


def test_samples_of_all_steps_and_the_choices_among_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    assert [(group.kind, group.step, len(group.uids)) for group in groups(folder, 4)] == [
        ("train", 4, 2),
        ("val", 4, 1),
    ]
    best, total = chosen(folder, Choice(order="best"), 1)
    assert total == 13 and (best[0].score, best[0].step, best[0].kind) == (1.0, 4, "train")
    assert best[0].parts == {"acc": 1.0, "pred": "72"} and best[0].prompt[0] == ("system", "Be brief.")
    worst, _ = chosen(folder, Choice(order="worst"), 5)
    assert [answer.score for answer in worst] == [None] * 4 + [0.0] and worst[0].step == 4 and worst[0].timed_out
    assert [answer.step for answer in chosen(folder, Choice(uid="p0"), 9)[0]] == [4, 3, 2, 1]
    mixed, total = chosen(folder, Choice(order="best", is_mixed=True), 9)
    uids = [answer.uid for answer in mixed]
    assert total == 13 and uids[0] == "p0" and len(uids) == len(set(uids)) > 1
    found, count = chosen(folder, Choice(text="ONERROR"), 9)
    assert count == 1 and found[0].step == 1
    assert chosen(folder, Choice(step=3, text="answer"), 9)[1] == 1


def test_the_changed_prompt_is_found_and_the_unchanged_is_not(tmp_path: Path) -> None:
    (pair,) = changed(make_run(tmp_path / "a"), Choice(), 9)
    assert (pair.first.uid, pair.first.step, pair.last.step, pair.change) == ("p0", 1, 4, 1.0)
    assert not changed(tmp_path / "a", Choice(text="nowhere"), 9)


def test_an_older_run_shows_what_its_validations_showed(tmp_path: Path) -> None:
    row = {"uid": "u", "data_source": "s", "input": "q", "output": "a", "gts": "", "score": 0.5, "response_length": 1}
    row |= {"finish_reason": "stop", "policy_version": 0, "extra": {"acc": 1.0}}
    lines = [json.dumps(row | {"step": step}) for step in (0, 5, 10, 5)]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + '\n{"st')
    found = list(groups(tmp_path))
    assert [(group.step, len(group.uids)) for group in found] == [(0, 1), (5, 1)]
    assert found[0].read()[0].prompt == (("user", "q"),) and found[0].read()[0].parts == {"acc": 1.0}
    assert SAMPLE.score == 1.0
