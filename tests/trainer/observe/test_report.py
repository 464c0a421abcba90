"""The page of trainer.report (safe with what models write, bounded in size, for any kind of run), trainer.inspect, and
how run folders are read: finished, alive, killed in the middle of a line, resumed, of other commands."""

from __future__ import annotations

import base64
import errno
import gzip
import hashlib
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from plotly import graph_objects

from tests.tiny_vision import image_file
from tests.trainer.run_folder import HOSTILE, SAMPLE, make_run, make_study, request
from trainer import inspect, report
from trainer.observe import page_data as page_data_module
from trainer.observe import recorded_answers, run_data
from trainer.observe.page_data import MAX_POINTS, page_data
from trainer.observe.recorded_answers import RecordedRequest, chosen, groups, request_tree
from trainer.observe.run_data import read_config, read_run, run_titles
from trainer.validation.sample_files import SampleFiles
from verl_lite.config import load_config, save_config
from verl_lite.errors import UserError


def document_of(*folders: Path) -> str:
    return report.write_report(folders, folders[0] / "out.html").read_text(encoding="utf-8")


def scripts_of(document: str) -> list[str]:
    return re.findall(r"<script[^>]*>(.*?)</script>", document, re.DOTALL)


def data_of(*folders: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(scripts_of(document_of(*folders))[0])
    return found


def logged(folder: Path, *rows: dict[str, float]) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "data": row}) + "\n" for step, row in enumerate(rows, start=1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/data/me/runs/a", "…/a"),
        ("see '/data/me/reward.py', line 3", "see '…/reward.py', line 3"),
        ("now data.train_files=[/data/x.parquet,~/y/z.parquet]", "now data.train_files=[…/x.parquet,…/z.parquet]"),
        ("/data/me/", "…/"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("recipes/length.py, 3/4 and a // b", "recipes/length.py, 3/4 and a // b"),
    ],
)
def test_a_text_of_a_public_page_has_no_folders(text: str, public: str) -> None:
    assert page_data_module.without_folders({"key": [text, 1.5]}) == {"key": [public, 1.5]}


def test_a_public_page_does_not_name_the_folders_of_the_machine(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "my secret project" / "run")
    assert str(tmp_path) in document_of(folder), "the other page has the paths, to open them"
    page = report.write_report([folder], tmp_path / "public.html", is_public=True).read_text(encoding="utf-8")
    assert str(tmp_path) not in page and "secret project" not in page
    data = json.loads(scripts_of(page)[0])
    assert data["runs"][0]["folder"] == "…/run"
    assert HOSTILE in [row[data["fields"].index("output")] for row in data["samples"]]


def test_what_a_model_wrote_stays_text_and_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    document = document_of(make_run(tmp_path / "<b>a</b>"))
    packed, script = scripts_of(document)[1:]  # three elements, whatever a model wrote
    rest = document.replace(packed, "").replace(script, "")
    assert not re.search(r"<(img|b|iframe|link)\b| (src|href|on\w+)=", rest.split('id="data">')[0])
    assert len(re.findall("</?script", rest)) == 6
    data = data_of(tmp_path / "<b>a</b>")
    assert HOSTILE in [row[data["fields"].index("output")] for row in data["samples"]]
    assert "innerHTML" not in script and "insertAdjacentHTML" not in script and "fetch" not in script
    library = gzip.decompress(base64.b64decode(packed)).decode()
    digests = [base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in (script, library)]
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)">', document, re.DOTALL)
    allowed = f"script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}'"
    assert " ".join(policy.split()) == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; {allowed}"
    assert json.loads(scripts_of(report.document("\ud800", {"a": "\ud800 \u2028"}))[0]) == {"a": "? \u2028"}


def test_curves_configuration_findings_and_docs_are_on_the_page(tmp_path: Path) -> None:
    data = data_of(make_run(tmp_path / "a"))
    (run,) = data["runs"]
    assert run["steps"] == [0, 1, 2, 3, 4] and run["series"]["critic/score/mean"] == [[None, 0.1, 0.2, 0.3, 0.4]]
    assert run["config"]["actor.optim.lr"] == ["0.001", "command line"] and run["facts"]["State"] == "finished"
    assert {finding["grade"] for finding in run["findings"]} <= {"ok", "look", "bad"}
    assert "sum of token_level_scores" in data["docs"]["critic/score/mean"]["formula"]
    reward, validation, _, time = data["charts"]
    assert reward["traces"][0]["metric"] == "critic/score/mean" and validation["title"] == "Validation, acc mean@1"
    assert validation["traces"][0]["y"] == [0, 0.25, 0.5, 0.75, 1]
    assert [(bar["name"], bar["y"]) for bar in time["traces"]] == [("gen", [1.0] * 4), ("other", [0.5] * 4)]
    assert len(data["samples"]) == 13 and len(data["prompts"]) == 1 and run["notes"] == ["a note"]


def test_numbers_alone_are_enough(tmp_path: Path) -> None:
    data = data_of(logged(tmp_path, {"train/loss": 2.0}))
    assert data["samples"] == [] and data["runs"][0]["config"] == {}
    assert data["runs"][0]["facts"]["State"] == "not running"


def test_runs_are_compared_by_a_measure_that_they_share(tmp_path: Path) -> None:
    one = {"val-core/s/acc/mean@4": 0.5, "val-aux/s/reward/mean@4": 0.4, "val-core/t/acc/mean@4": 0.5}
    other = {"val-core/s/reward/mean@2": 0.6, "val-core/t/reward/mean@2": 0.6}
    data = data_of(logged(tmp_path / "a", one), logged(tmp_path / "b", other))
    assert [run["title"] for run in data["runs"]] == ["a", "b"]
    names = {chart["title"]: [trace["name"] for trace in chart["traces"]] for chart in data["charts"]}
    assert names["Validation, s"] == ["a reward mean@4", "b reward mean@2"]
    assert names["Validation, t"] == ["a acc mean@4", "b reward mean@2"], "side by side in one chart"


def test_intervals_of_shares_end_at_0_and_1(tmp_path: Path) -> None:
    name, width = "val-core/s/reward/mean@2", "val-aux/s/reward/mean@2/ci95"
    for low, bars in ((0.0, [0.1, 0.2]), (-1.0, [0.3, 0.3])):  # rewards of which some are negative end nowhere
        rows = [{name: x, width: 0.3, "critic/score/min": low, "critic/score/max": 1.0} for x in (0.9, 0.2)]
        data = data_of(logged(tmp_path / f"run{low}", *rows))
        [trace] = next(chart for chart in data["charts"] if chart["title"].startswith("Validation"))["traces"]
        assert [trace["error_y"]["array"][0], trace["error_y"]["arrayminus"][1]] == pytest.approx(bars)


def test_the_page_of_a_sweep_has_its_trials_and_its_best_runs(tmp_path: Path) -> None:
    data = data_of(make_study(tmp_path / "sweep"))
    study = data["study"]
    assert [run["title"] for run in data["runs"]] == ["0001/seed-1", "0000/seed-1"]
    rows = [dict(zip(study["columns"], row, strict=True)) for row in study["trials"]]
    assert [row["state"] for row in rows] == ["complete", "complete", "pruned", "failed"]
    assert (rows[1]["lr"], rows[1]["kind"], rows[3]["value"], rows[3]["error"]) == (0.002, "a", None, "out of memory")
    assert study["charts"][0]["traces"][0]["y"] == [step / 4 for step in range(5)]
    assert [chart["title"] for chart in study["charts"][1:]] == ["lr", "kind"]
    assert study["best"][0][0] == "trial 1 (complete): 0.9 ±0.127, lr=0.002, kind=a"
    rate, kind = study["charts"][1:]
    axis = rate["layout"]["xaxis"]
    assert axis["type"] == "log" and axis["ticktext"] == ["0.001", "0.002", "0.005"]
    assert len({trace["x"][0] for trace in kind["traces"]}) == 3, "trials of one kind hide each other"
    bars = next(trace["error_y"] for trace in kind["traces"] if trace["y"] == [0.9])
    assert [*bars["array"], *bars["arrayminus"]] == pytest.approx([0.1, 0.127], abs=1e-3)
    [alone] = data_of(tmp_path / "sweep" / "trials" / "0002" / "seed-1")["runs"]
    assert alone["title"] == "0002/seed-1"
    for chart in [*data["charts"], *study["charts"]]:  # raises for what plotly does not know
        traces = [{**trace, "type": trace.get("type", "scatter")} for trace in chart["traces"]]
        plain = [{name: x for name, x in trace.items() if name not in ("run", "metric")} for trace in traces]
        graph_objects.Figure(data=plain, layout=chart["layout"])


def test_a_run_that_ended_with_an_error_shows_it_and_how_to_run_the_step_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crash = make_run(tmp_path / "my run", total=9) / "crash" / "step_5"
    crash.mkdir(parents=True)
    (crash / "error.txt").write_text("Traceback ...\n  File x\nValueError: my loss is a list\n  To run it again\n")
    first = data_of(tmp_path / "my run")["runs"][0]["findings"][0]
    assert first["grade"] == "bad" and first["text"].endswith("error in step 5: ValueError: my loss is a list")
    assert "Traceback" in first["log"] and f"python -m trainer.replay '{crash}'" in first["advice"]
    assert inspect.main([str(tmp_path / "my run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ValueError: my loss is a list" in shown and "trainer.replay" in shown
    os.utime(crash / "error.txt", (1.0, 1.0))  # it was resumed, and has gone on since
    assert "ValueError" not in str(data_of(tmp_path / "my run")["runs"][0]["findings"])


def test_samples_are_capped_evenly_with_best_and_worst_of_each_step_and_it_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=2)
    files = SampleFiles(folder, 1 << 30, print)
    for step in range(1, 21):
        rows = [replace(SAMPLE, uid=f"u{i}", score=i / 50, output="x" * 9000, step=step) for i in range(50)]
        files.write_training(rows, step)
    data = page_data([read_run(folder)], sample_bytes=23 * 20_000)
    train = [dict(zip(data["fields"], row, strict=True)) for row in data["samples"] if row[1] == "train"]
    assert len(json.dumps(data["samples"])) < 23 * 30_000
    for step in range(1, 21):
        of_step = [row for row in train if row["step"] == step]
        assert {0.0, 0.98} <= {row["score"] for row in of_step} and 2 <= len(of_step) <= 4
        assert {row["uid"] for row in of_step} == {row["uid"] for row in train}  # the same prompts at each step
    assert "(cut here; 9,000 characters)" in train[0]["output"]
    assert "of 1,003 samples are on this page" in data["runs"][0]["notes"][-1]


def test_long_curves_are_thinned_and_the_last_step_stays(tmp_path: Path) -> None:
    rows = [{"critic/score/mean": float(step)} for step in range(1, 4001)]
    (run,) = page_data([read_run(logged(tmp_path, *rows, {"val-core/sums/acc/mean@1": 0.5}))])["runs"]
    assert len(run["steps"]) <= MAX_POINTS and run["steps"][-1] == 4001 and run["steps"][:2] == [1, 4]
    assert run["series"]["critic/score/mean"][0][1] == 4.0
    assert run["series"]["val-core/sums/acc/mean@1"] == [[4001], [0.5]]
    assert run["notes"] == ["the curves show one in 3 steps, and the last step"]


# ----------------------------------------------------------------------------------------------- images of prompts


def test_images_of_prompts_are_shown_unless_their_names_leave_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, names = make_run(tmp_path / "a", steps=1), [f"{number:016x}-0.jpg" for number in range(4)]
    images = folder / "samples" / "images"
    images.mkdir()
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (images / names[0]).write_bytes(image_file(0, kind="JPEG"))
    (images / names[1]).symlink_to(tmp_path / "secret.jpg")
    (images / names[2]).write_bytes(image_file(2, kind="JPEG"))
    hostile = ["../../etc/passwd", "/etc/passwd", "../../../secret.jpg", *names[1:2], *names[3:]]
    rows = [replace(SAMPLE, uid="two", images=[*hostile, names[0], names[2]]), replace(SAMPLE, images=names[2:3])]
    SampleFiles(folder, 1 << 30, print).write_training(rows, 2)
    paths = [f"samples/images/{names[number]}" for number in (0, 2)]
    data = data_of(folder)
    shown = [row[data["fields"].index("images")] for row in data["samples"]]
    assert sorted(map(tuple, filter(None, shown))) == [tuple(paths), (paths[1],)]
    assert len(shown) > 2, "files of earlier versions have no such column"
    encoded = [base64.b64encode((folder / path).read_bytes()).decode() for path in paths]
    uris = [f"data:image/jpeg;base64,{text}" for text in encoded]
    assert data["runs"][0]["images"] == dict(zip(paths, uris, strict=True)) and data["runs"][0]["notes"] == ["a note"]
    monkeypatch.setattr(page_data_module, "IMAGE_BYTES", len(uris[1]) + 9)  # room for the image that both prompts have
    (run,) = data_of(folder)["runs"]
    assert [*run["images"]] == paths[1:] and run["notes"][-1] == "1 of 2 images of these samples are on this page"
    assert inspect.main([str(folder), "--grep", "two"]) == 0
    assert f"images: {', '.join(paths)}" in " ".join(capsys.readouterr().out.replace("│", "").split())


# ------------------------------------------------------------------------------------------- requests of an episode


def tree_of(requests: Any) -> tuple[RecordedRequest, ...]:
    return request_tree(json.dumps(requests))[0]


def places(requests: tuple[RecordedRequest, ...]) -> list[tuple[int, int, str]]:
    return [(request.number, request.depth, request.start) for request in requests]


def test_requests_are_a_tree_in_which_only_branches_are_deeper(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (alone,), (episode,) = chosen(folder, "", "p0", 1)[0], chosen(folder, "", "q4", 1)[0]
    assert (alone.requests, alone.total_requests, episode.total_requests) == ((), 0, 6)
    new, below_1 = "new conversation", "continues #1"
    rows = [(0, 0, new), (1, 0, ""), (2, 1, below_1), (5, 1, ""), (3, 1, below_1), (4, 0, new)]
    assert places(episode.requests) == rows
    first, second, *_, retry, helper = episode.requests
    tokens = "1,200 prompt + 34 sampled tokens"
    assert first.facts == f"{tokens}, weights 3 to 4, row 0, tool_calls, calls search, read"
    assert first.messages == (("user", "Plan the trip."), ("answer", "I will search.")) and not first.discarded
    assert second.messages[0] == ("tool", f"sunny {HOSTILE}") and helper.facts == f"{tokens}, weights 4, row 1, stop"
    assert retry.discarded == f"retry {HOSTILE}" and retry.facts == f"{tokens}, weights 3 to 4, stop"


@pytest.mark.parametrize(
    "text", [None, "", "[", "{}", "null", "7", '"x"', "[" * 99_999, "[1e999, NaN, null]", "\ud800"]
)
def test_requests_that_are_not_json_are_passed_over(text: str | None) -> None:
    requests, total = request_tree(text)
    assert len(requests) == total == (3 if text and "NaN" in text else 0)


def test_wrong_parents_make_no_cycle_and_wrong_values_count_as_missing() -> None:
    wrong: list[Any] = [0, 2, 1, 99, -1, "0", 1.0, True, [0], None, 10**400]
    cyclic = tree_of([{"parent": parent} for parent in wrong])
    assert sorted(request.number for request in cyclic) == list(range(11))
    new = "new conversation"
    assert places(cyclic)[:4] == [(0, 0, new), (1, 0, new), (2, 0, ""), (3, 0, new)]
    kinds: list[Any] = [None, 3, 1.5, "x", True, [], {}, [1, None, {}], [{"role": 7, "content": [{"type": "text"}]}]]
    names = [*request(None, 0, ""), "another"]
    for kind in kinds:
        (only,) = tree_of([dict.fromkeys(names, kind)])
        assert "sampled tokens" in only.facts and only.messages[-1][0] == "answer"
    assert "weights" not in tree_of([request(None, None, "", versions=[-1, -1])])[0].facts
    parts = tree_of([{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}])[0].messages
    assert parts[0] == ("user", '[{"type": "text", "text": "hi"}]')


def test_a_tree_is_bounded_in_requests_messages_texts_and_depth(tmp_path: Path) -> None:
    def noisy(long: str) -> dict[str, Any]:
        more: dict[str, Any] = {"finish_reason": long, "tool_calls": [long], "versions": [long], "discarded": long}
        return request(None, 0, long, long, **more)

    many = {"messages": [{"role": "r" * 99, "content": "y" * 99}] * 300}
    long, dense = noisy("x" * 1_000_000), [noisy("x" * 1000) | many for _ in range(300)]
    for requests in ([long], dense, [many | {"parent": number - 1} for number in range(300)]):
        kept, total = request_tree(json.dumps(requests))
        assert total == len(requests) and len(kept) == min(recorded_answers.MAX_REQUESTS, total)
        overhead = len(kept) * (2 * recorded_answers.MAX_FACTS + 200) + sum(90 * len(one.messages) for one in kept)
        assert len(str(kept)) <= recorded_answers.MAX_TREE + overhead
    assert "(1000000 characters)" in tree_of([long])[0].messages[0][1]
    assert "the first 50 of 300 messages" in kept[0].facts and {one.depth for one in kept} == {0}
    comb = tree_of([{"parent": (number - 1) // 2 * 2 if number else None} for number in range(300)])
    assert (
        max(request.depth for request in comb) == recorded_answers.MAX_DEPTH
        and len(comb) == recorded_answers.MAX_REQUESTS
    )


def test_trees_that_do_not_fit_the_page_are_left_out_evenly_over_the_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=2)
    files, requests = SampleFiles(folder, 1 << 30, print), [request(None, 0, "y" * 2000)] * 30
    for step in range(1, 41):
        files.write_training([replace(SAMPLE, uid=f"u{i}", requests=requests, step=step) for i in range(3)], step)
    data = page_data([read_run(folder)], sample_bytes=500_000)
    rows = [dict(zip(data["fields"], row, strict=True)) for row in data["samples"] if row[1] == "train"]
    assert {row["total_requests"] for row in rows} == {30} and len(rows) == 3 * 40
    shown = [row["step"] for row in rows if row["requests"]]
    assert 5 <= len(shown) <= 8 and max(b - a for a, b in zip(shown, shown[1:], strict=False)) <= 8
    assert len(json.dumps([row["requests"] for row in rows])) < 600_000


def test_the_terminal_shows_the_tree_of_an_episode_and_its_beginning_if_it_is_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "a")
    assert inspect.main([str(folder), "--grep", "q4"]) == 0
    shown = capsys.readouterr().out
    marks = ["6 requests, reward timed out", "├── #0 new conversation", "├── #1 1,200", "│   ├── #2 continues #1"]
    marks += ["│   ├── #5 1,200", "│   └── #3 continues #1", "└── #4 new conversation", "discarded: retry"]
    assert [mark for mark in marks if mark not in shown] == [] and "\x1b" not in shown and "\\x1b[2J" in shown
    lines = shown.splitlines()[:-1]
    assert {len(line) for line in lines} == {len(lines[0])}, "the frame is broken"
    many = [request(None, 0, "z" * (1_000_000 if x == 0 else 900), "\x1b[2J" * 900) for x in range(300)]
    SampleFiles(folder, 1 << 30, print).write_training([replace(SAMPLE, uid="long", requests=many)], 9)
    assert inspect.main([str(folder), "--grep", "long"]) == 0
    shown = capsys.readouterr().out
    assert "300 requests, reward 1" in shown and "260 more requests" in shown and "\x1b" not in shown
    assert len(shown) < 100_000


# -------------------------------------------------------------------------------------------------------- folders


def test_a_finished_run_and_one_that_was_cut_off_and_went_back(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    assert (run.state, run.last_step, run.total_steps, run.seconds(), run.notes) == ("finished", 4, 4, 6.0, ("a note",))
    assert run.config["trainer.experiment_name"].value == '"a # b"' and run.config["recipe"].source == "default"
    folder = make_run(tmp_path / "b", total=9)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "data": {"critic/score/mean": 7.0}}) + '\n{"step": 3, "data": {"cri')
    run = read_run(folder)
    assert run.state == "stopped" and run.series()["critic/score/mean"] == [(1, 0.1), (2, 7.0)]


def test_damaged_lines_and_files_of_a_run_are_passed_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    bad = [
        "[1]",
        '{"step":9,"data":[1]}',
        '{"step":"x","data":{}}',
        '{"data":{}}',
        '{"step":9,"data":{"a":"b"}}',
        "[" * 9999,
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in bad)
    with (folder / "config.yaml").open("ab") as config:
        config.write(b"\xff")
    (folder / "samples" / "train" / "000002.parquet").write_bytes(b"")
    run = read_run(folder)
    assert run.last_step == 4 and run.total_steps == 4
    assert [answer.step for answer in chosen(folder, "", "answer", 9)[0]] == [4, 3]
    (folder / "metrics.jsonl").unlink()  # the suite reads what tests have logged


def test_a_run_is_alive_while_the_process_that_holds_its_folder_is(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", total=9)
    (folder / "in_use").write_text(f"pid {os.getpid()} of user x, since now")
    assert read_run(folder).state == "running"
    process = psutil.Process().create_time()
    os.utime(folder / "in_use", (process - 60, process - 60))  # a killed run's, whose number this process got later
    assert read_run(folder).state == "stopped"


def test_a_run_of_another_user_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "a run")

    def forbidden(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    said = r"you may not read this run .*trainer\.umask=027.* chmod -R g\+rX '.*/a run'"
    with monkeypatch.context() as patched, pytest.raises(UserError, match=said):
        patched.setattr(Path, "is_file", forbidden)
        read_run(folder)


def test_what_is_no_run_is_an_error_that_names_the_runs_below(tmp_path: Path) -> None:
    make_run(tmp_path / "project" / "a")
    for folder, word in ((tmp_path / "x", "no metrics.jsonl in it"), (tmp_path, "project/a")):
        with pytest.raises(UserError, match=word):
            read_run(folder)


def test_a_saved_configuration_is_read_with_its_sources(tmp_path: Path) -> None:
    loaded = load_config(["model.path=a b # c", "data.train_files=[x.parquet]", "actor.optim.lr=3e-5"])
    config, _ = read_config(save_config(loaded, tmp_path / "config.yaml"))
    assert (config["actor.optim.lr"].value, config["actor.optim.lr"].source) == ("3.0e-05", "command line")
    assert "a b # c" in config["model.path"].value and config["model.path"].source == "command line"
    runs = [read_run(make_run(tmp_path / top / "run")) for top in ("a", "b")]
    assert run_titles(runs) == ["a/run", "b/run"] and run_titles(runs[:1]) == ["run"]


def test_a_score_that_is_no_number_is_the_lowest() -> None:
    scores = [0.5, math.nan, None, 1.0]
    best = sorted(scores, key=lambda score: recorded_answers._rank(score, "best"))
    worst = sorted(scores, key=lambda score: recorded_answers._rank(score, "worst"))
    assert best[:2] == [1.0, 0.5]
    assert worst[2:] == [0.5, 1.0]


def test_samples_of_all_steps_and_the_choices_among_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    assert [(x.kind, x.step, len(x.uids)) for x in list(groups(folder))[-2:]] == [("train", 4, 2), ("val", 4, 1)]
    best, total = chosen(folder, "best", "", 1)
    assert total == 13 and (best[0].score, best[0].step, best[0].kind) == (1.0, 4, "train")
    assert best[0].parts == {"acc": 1.0, "pred": "72"} and best[0].prompt[0] == ("system", "Be brief.")
    worst, _ = chosen(folder, "worst", "", 5)
    assert [answer.score for answer in worst] == [None] * 4 + [0.0] and worst[0].step == 4 and worst[0].timed_out
    found, count = chosen(folder, "", "ONERROR", 9)
    assert count == 1 and found[0].step == 1


# ------------------------------------------------------------------------------------------------------- commands


def test_the_command_writes_into_the_run_folder_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = make_run(tmp_path / "a"), tmp_path / "new" / "x.html"
    assert report.main([str(folder / "metrics.jsonl")]) == 0 and (folder / "report.html").is_file()
    assert report.main([str(folder), "--out", str(other)]) == 0 and other.is_file()
    assert report.main([str(tmp_path / "nothing")]) == 2 and "no metrics.jsonl" in capsys.readouterr().err
    # a wrong order of arguments, a folder that cannot be made, and an empty shell variable
    metrics = (folder / "metrics.jsonl").read_text()
    for out in (folder / "metrics.jsonl", Path("/proc/self/fdinfo/page.html"), ""):
        assert report.main([str(folder), "--out", str(out)]) == 2
        assert f"UserError: --out {out or '.'}" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_text() == metrics


def test_a_run_that_cannot_be_read_is_no_problem_of_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder / "metrics.jsonl"))

    monkeypatch.setattr(run_data, "read_run", refuse)
    # not a UserError about the option
    with pytest.raises(PermissionError, match="metrics.jsonl"):
        report.main([str(tmp_path)])


def test_runs_below_a_folder_are_named_without_a_search_of_the_whole_disk(tmp_path: Path) -> None:
    for levels in ("a", "b/c", "d/e/f", "1/2/3/4"):
        (tmp_path / levels).mkdir(parents=True)
        logged(tmp_path / levels, {"x": 1.0})
    with pytest.raises(UserError) as caught:
        read_run(tmp_path)
    named = [Path(line).name for line in str(caught.value).splitlines()[1:]]
    assert named == ["a", "c", "f"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["finished", "step 4 of 4", "sums", "critic/score/mean", "▁", "gen", "checks are fine"]),
        (["--best", "--count", "1"], ["train, p0", "step 4, score 1", "1 of 13 matching samples"]),
        (["--worst"], ["score timed out"]),
        (["--grep", "ONERROR"], ["1 of 1 matching samples", "onerror=alert"]),
        (["--grep", "V0", "--best"], ["val, v0", "step 4"]),
        (["--grep", "nowhere"], ["0 of 0 matching samples"]),
    ],
)
def test_inspect_shows_the_run_or_the_samples_that_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]
) -> None:
    assert inspect.main([str(make_run(tmp_path / "a")), *options]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in words) and "\x1b[2J" not in shown


def test_whoever_has_seen_enough_of_a_run_ends_the_looking_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(_: float) -> None:
        raise KeyboardInterrupt

    assert inspect.main([str(make_run(tmp_path / "a")), "--follow"]) == 0  # it has ended: drawn once
    monkeypatch.setattr(inspect.time, "sleep", ctrl_c)
    monkeypatch.setattr(run_data, "_is_held", lambda path: True)
    assert inspect.main([str(tmp_path / "a"), "--follow"]) == 0
    assert "critic/score/mean" in capsys.readouterr().out
