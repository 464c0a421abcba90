"""Groups of episodes of programs, with real programs, processes and HTTP, and an engine that answers at once."""

from __future__ import annotations

import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.workers.agents.endpoint import programs
from tests.workers.agents.endpoint.live import END, LIMITS, SAMPLING, TOKENIZER, completion_of, new_trace
from tests.workers.processes import gone
from verl_lite.config import AgenticConfig, EndpointConfig
from verl_lite.rewards import RewardItem, RewardResult
from workers.agents import program_host
from workers.agents.endpoint.callers import Callers
from workers.agents.endpoint.server import Endpoint
from workers.agents.program_host import ProgramError, episodes_per_process, is_command, program_pool
from workers.agents.programs import ProgramRunner
from workers.agents.trajectories import trajectory_rows
from workers.engines.base import Completion, Request
from workers.pool.process_pool import ProcessPool
from workers.rollout.group_run import GroupRun
from workers.rollout.runner import Runner
from workers.rollout.specs import GroupPlan, ProgramSpec

pytestmark = pytest.mark.slow  # each starts processes

HERE = programs.__name__
COMMAND = f"{sys.executable} {Path(str(programs.__file__)).absolute()}"


class TextEngine:
    """Answers every request in one step, except those whose prompt contains "slow", which never end."""

    extra_outputs: dict[str, tuple[int, ...]] = {}

    def __init__(self) -> None:
        self.running: dict[str, Request] = {}
        self.aborted: list[str] = []
        self.error: Exception | None = None

    def submit(self, request: Request) -> None:
        assert request.request_id not in self.running
        self.running[request.request_id] = request

    def step(self) -> list[Completion]:
        time.sleep(0.001)
        if self.error is not None:
            raise self.error
        found = {x: r for x, r in self.running.items() if "slow" not in str(TOKENIZER.decode(list(r.prompt_ids)))}
        self.running = {x: r for x, r in self.running.items() if x not in found}
        return [completion_of(x, f"answer {r.sampling.seed % 10}", r.sampling.max_tokens) for x, r in found.items()]

    @property
    def unfinished(self) -> int:
        return len(self.running)

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for name in request_ids:
            self.running.pop(name, None)


class Rewards:
    """The reward pool: scores 0.25, and fails for the answers of rows with ground_truth "fail"."""

    def __init__(self) -> None:
        self.items: dict[Any, RewardItem] = {}

    def send(self, name: str, items: list[RewardItem]) -> None:
        self.items |= {item.key: item for item in items}

    def call(self, name: str, keys: list[str]) -> Any:
        if name == "ready":
            return set(keys)
        return {key: self._result(self.items[key]) for key in keys}

    def _result(self, item: RewardItem) -> RewardResult:
        assert item.solution_str.startswith("answer") and item.extra_info and item.extra_info["num_turns"] >= 1
        return (
            RewardResult.failure("broken")
            if item.ground_truth == "fail"
            else RewardResult(0.25, {"pred": "x", "f": 2.0})
        )


class World:
    def __init__(self, program: str, workers: int, threads: int, rewards: Any, options: dict[str, Any]) -> None:
        agentic = AgenticConfig(program=program)
        agentic.env_pool.num_workers, agentic.env_pool.threads = workers, threads
        for name, value in options.items():
            setattr(agentic.program_options, name, value)
        self.engine = TextEngine()
        self.pool = ProcessPool(program_pool(agentic, on_repeat=lambda number: self.runner.repeat(number)))
        self.endpoint = Endpoint(EndpointConfig(), 0, "policy", self.pool.wake)
        self.runner = ProgramRunner(
            Runner(self.engine),  # type: ignore[arg-type]
            self.endpoint,
            self.pool,
            new_trace=new_trace,
            stop_token_ids=[END],
            rewards=rewards,
            engine=0,
            seed=3,
            max_live=workers * threads,
            rows=lambda each: trajectory_rows(
                each,
                pad_token_id=0,
                prompt_length=LIMITS.max_prompt_length,
                response_length=LIMITS.max_response_length,
                extra_outputs={},
            ),
        )
        self.groups = GroupRun(self.runner)

    def run(self, *rows: dict[str, Any], seconds: float = 60.0) -> Any:
        """Runs one group with an episode for each row. Returns its columns."""
        specs = tuple(ProgramSpec(f"e{number}", "g", "t", start_step=1, row=row) for number, row in enumerate(rows))
        self.groups.begin([GroupPlan("g", specs)], SAMPLING)
        until, results = time.monotonic() + seconds, self.groups.run(["g"], 0.05)
        while not results.reports:
            assert time.monotonic() < until, "the group hangs"
            results = self.groups.run(["g"], 0.05)
        self.counts = results.reports[0].counts
        return results.rows


@contextmanager
def world(program: str, workers: int = 1, threads: int = 8, rewards: Any = None, **options: Any) -> Iterator[World]:
    made = World(program, workers, threads, rewards, options)
    try:
        yield made
    finally:
        made.groups.close()


def scores(rows: Any) -> list[float]:
    return [round(x, 4) for x in rows.batch["token_level_scores"].sum(1).tolist()]


def of(rows: Any, name: str) -> list[Any]:
    return list(rows.non_tensor_batch[name])


def test_functions_coroutines_and_commands_are_programs() -> None:
    for program in (f"{HERE}:run", f"{HERE}:run_async", COMMAND):
        with world(program) as made:
            rows = made.run({"question": "a"}, {"question": "b"})
            expected = {f"{HERE}:run": [1.0, 1.0], COMMAND: [1.0, 1.0]}.get(program, [0.5] * 4)
            assert scores(rows) == expected and made.counts.failed == 0
            assert made.counts.episodes == 2 and (rows.batch["response_mask"].sum(1) == len("answer 1") + 1).all()
            metrics = made.runner.take_metrics(1.0)
            assert metrics["program/tokens/sampled"].value == rows.batch["response_mask"].sum()
            assert metrics["program/rows_per_episode"].value == len(rows) / 2
    assert is_command("python agent.py") and is_command("./agent") and not is_command("package.module:run")


def test_the_seeds_of_an_episode_do_not_depend_on_other_episodes() -> None:
    with world(f"{HERE}:run") as made:
        alone, both = made.run({"question": "a"}), made.run({"question": "a"}, {"question": "a"})
        assert of(alone, "messages")[0] == of(both, "messages")[0]


@pytest.mark.parametrize(
    ("do", "text"),
    [
        ("raises", "ValueError: the agent is broken"),
        ("exits", "SystemExit"),
        ("never calls", "it has to call base_url"),
        ("text", "expected a finite number"),
        ("nan", "expected a finite number"),
        ("huge", "expected a finite number in the range of float32"),
        ("list", "expected a finite number"),
        ("nothing", "the run has no reward function"),
        ("bytes", "expected a finite number"),
        ("too large", "expected a finite number"),
        ("text as score", "'score' in the result of the program is '1.0', expected a finite number"),
        ("nested", "expected a finite number"),
        ("many names", "the number of metrics in the result of the program is 65, expected at most 64"),
        ("long name", "the name of a metric in the result of the program"),
        ("name with a line end", "the name of a metric in the result of the program"),
    ],
)
def test_a_program_that_fails_masks_its_episode_and_no_other(do: str, text: str) -> None:
    with world(f"{HERE}:run") as made:
        rows = made.run({"do": do}, {"question": "b", "score": 0.5})
        assert of(rows, "reward_failed") == [True, False] and scores(rows) == [0.0, 0.5]
        assert text in of(rows, "env_error")[0] and rows.batch["response_mask"][0].sum() == 0
        assert (made.counts.failed, made.counts.episodes) == (1, 2) and text in made.counts.first_failure
        masked = made.runner.take_metrics(1.0).get("program/tokens/masked")
        assert do == "never calls" or (masked is not None and masked.value == len("answer 1") + 1)


def test_a_coroutine_that_exits_fails_alone() -> None:
    with world(f"{HERE}:run_async", timeout_s=10.0) as made:
        rows = made.run({"do": "exits", "question": "a"}, *[{"question": f"b{number}"} for number in range(9)])
        assert "SystemExit" in of(rows, "env_error")[0] and made.counts.failed == 1
        assert not any(of(made.run({"question": "c"}), "reward_failed"))  # the event loop still runs


def test_a_program_that_hangs_is_ended_at_its_deadline_and_its_group_completes() -> None:
    for program in (f"{HERE}:run_async", COMMAND, f"{HERE}:run"):
        with world(program, timeout_s=2.0) as made:
            rows = made.run({"do": "hangs", "question": "a"}, {"question": "b"})
            assert of(rows, "env_timeout")[0] and "agentic.program_options.timeout_s=2" in of(rows, "env_error")[0]
            assert made.counts.timeouts == 1 and not any(of(rows, "reward_failed")[1:])


def test_a_process_that_dies_fails_its_episode_and_repeats_the_others_from_the_start(tmp_path: Path) -> None:
    with world(f"{HERE}:run") as made:
        rows = made.run(
            {"do": "kills its process"}, {"question": "b"}, {"do": "dies once", "mark": str(tmp_path / "m")}
        )
        assert of(rows, "reward_failed") == [True, False, False] and "SIGKILL" in of(rows, "env_error")[0]
        metrics = made.runner.take_metrics(1.0)
        assert metrics["program/restarts"].value >= 1 and metrics["program/tokens/discarded/restarted"].value >= 9
        # the tokens of the first start are not in the row
        assert rows.batch["response_mask"].sum(1).tolist() == [0, 9, 9] and len(of(rows, "requests")[2]) == 1


def test_late_handlers_and_requests_that_are_running_at_the_end_of_an_episode_commit_no_turn(tmp_path: Path) -> None:
    mark = tmp_path / "late"
    with world(f"{HERE}:run") as made:
        rows = made.run({"do": "outlives", "mark": str(mark)}, {"do": "leaves a request"})
        assert len(rows) == 2 and scores(rows) == [1.0, 1.0] and len(made.engine.aborted) == 1
        assert [each["discarded"] for each in of(rows, "requests")[1]] == [None, "aborted"]
        until = time.monotonic() + 10
        while not mark.exists() and time.monotonic() < until:
            made.runner.advance(0.05)
        assert mark.read_text().startswith("400") and "has ended" in mark.read_text()


def test_the_reward_function_scores_the_last_answer_of_a_program_without_a_score() -> None:
    with world(f"{HERE}:run", rewards=Rewards()) as made:
        failing = {"do": "nothing", "reward_model": {"ground_truth": "fail"}}
        rows = made.run({"do": "nothing"}, failing, {"question": "b"})
        assert scores(rows) == [0.25, 0.0, 1.0] and of(rows, "reward_failed") == [False, True, False]
        assert of(rows, "env_metrics")[0] == {"f": 2.0} and "broken" in of(rows, "env_error")[1]


@pytest.mark.parametrize("returned", ["text", "number as text", "text as score", "empty text", "bytes"])
def test_text_instead_of_a_score_is_a_failure_even_with_a_reward_function(returned: str) -> None:
    with world(f"{HERE}:run", rewards=Rewards()) as made:
        rows = made.run({"do": returned})
        assert of(rows, "reward_failed") == [True] and "expected a finite number" in of(rows, "env_error")[0]


def test_the_entries_of_a_result_without_a_score_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    with world(f"{HERE}:run", rewards=Rewards()) as made:
        assert scores(made.run({"do": "misspelt"}, {"do": "misspelt"}, {"do": "only metrics"})) == [0.25] * 3
    printed = capsys.readouterr().out
    assert printed.count("'scroe'; did you mean score") == 1 and printed.count("'turns'") == 1


def test_a_program_that_leaves_the_score_to_the_reward_function_is_not_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with world(f"{HERE}:run", rewards=Rewards()) as made:
        assert scores(made.run({"do": "nothing"}, {"do": "score is None"})) == [0.25] * 2
    assert "without 'score'" not in capsys.readouterr().out


def test_a_run_logs_a_limited_number_of_names_of_programs() -> None:
    with world(f"{HERE}:run") as made:
        rows = made.run(*[{"do": "own names", "from": 60 * number} for number in range(3)])
        names = set().union(*of(rows, "env_metrics"))
        # 180 different names were returned
        assert len(names) == 64 and made.runner.take_metrics(1.0)["program/metrics_dropped"].value == 180 - 64


def test_the_environment_of_a_program_has_its_key_and_none_of_the_trainers_secrets(monkeypatch: Any) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s")
    monkeypatch.setenv("ALLOWED", "a")
    with world(f"{HERE}:run", threads=1) as made:
        assert scores(made.run({"do": "environment"})) == [1.0]
    with world(COMMAND, environment=["ALLOWED"]) as made:
        rows = made.run({"do": "secret"})
        assert scores(rows) == [0.0] and of(rows, "env_metrics")[0] == {"allowed": 1.0}
    with world(f"{HERE}:without_key") as made:  # with several threads the environment has no key
        assert "401" in of(made.run({}), "env_error")[0]


@pytest.mark.parametrize(
    ("do", "text"),
    [
        ("memory", "exceeds memory_mb=200"),
        ("processes", "exceed processes=4"),
        ("file", "File too large"),
        ("fails", "the command is broken"),
        ("garbage", "is not JSON"),
    ],
)
def test_a_command_that_exceeds_a_limit_or_fails_masks_its_episode(do: str, text: str) -> None:
    with world(COMMAND, memory_mb=200, processes=4, file_mb=1) as made:
        rows = made.run({"do": do})
        assert of(rows, "reward_failed") == [True] and text in of(rows, "env_error")[0]


def test_a_command_leaves_neither_processes_nor_its_folder(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    with world(COMMAND) as made:
        rows = made.run({"do": "orphan", "mark": str(mark)})
        assert scores(rows) == [1.0] and of(rows, "env_metrics")[0] == {"cwd_is_home": 1.0}
    assert not psutil.pid_exists(int(mark.read_text())) or psutil.Process(int(mark.read_text())).status() == "zombie"


@pytest.mark.parametrize(
    ("do", "text"),
    [
        ("fork loop", "exceed processes=4"),
        ("kills its limiter", "ended with status -9"),
        ("stops its limiter", "was stopped; the program was killed"),
    ],
)
def test_a_command_that_escapes_its_limits_fails_and_leaves_no_process(tmp_path: Path, do: str, text: str) -> None:
    with world(COMMAND, processes=4) as made:
        rows = made.run({"do": do, "folder": str(tmp_path)}, {"question": "b"})
        assert of(rows, "reward_failed") == [True, False] and text in of(rows, "env_error")[0]
        pids = [int(path.name) for path in tmp_path.iterdir()]
        # the pool still runs: the end of the episode alone ends its processes
        assert pids and all(gone(pid, 0.0) for pid in pids)


def test_a_key_that_another_episode_uses_is_refused_and_counted(tmp_path: Path) -> None:
    with world(COMMAND) as made:
        made.endpoint.callers = Callers(lambda: made.pool.pids)
        rows = made.run({"do": "steals", "folder": str(tmp_path)}, {"do": "is stolen from", "folder": str(tmp_path)})
        answer = (tmp_path / "done").read_text()
        assert answer.startswith("401") and "was given to another episode" in answer
        metrics = made.runner.take_metrics(1.0)
        assert scores(rows) == [1.0, 1.0] and metrics["program/requests_per_episode"].value == 1.0
        assert metrics["program/connections/foreign_key"].value == 1
        assert metrics["program/connections/unknown_process"].value == 0


def test_a_request_of_a_process_that_is_not_found_is_accepted_and_counted() -> None:
    with world(COMMAND) as made:
        made.endpoint.callers = Callers(lambda: [])  # as if the program ran in a container
        assert scores(made.run({"question": "a"})) == [1.0]
        assert made.runner.take_metrics(1.0)["program/connections/unknown_process"].value == 1


@pytest.mark.parametrize("do", ["nested folders", "many files", "folder without rights", "temporary"])
def test_what_a_command_leaves_in_its_folder_does_not_change_its_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with world(COMMAND) as made:
        rows = made.run({"do": do, "folder": str(tmp_path)})
        assert scores(rows) == [1.0] and of(rows, "env_metrics")[0].get("is_below", 1.0) == 1.0
        assert list(tmp_path.glob("**/verl_lite-program-*")) == []
    assert list(tmp_path.iterdir()) == []


def test_the_folders_of_a_process_that_is_replaced_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with world(COMMAND, timeout_s=20.0) as made:
        specs = (ProgramSpec("e", "g", "t", start_step=1, row={"do": "hangs"}),)
        made.groups.begin([GroupPlan("g", specs)], SAMPLING)
        waited(lambda: made.groups.run(["g"], 0.05) and list(tmp_path.glob("*/verl_lite-program-*")))
        [process] = made.pool._processes
        process._tree.process.kill()
        waited(lambda: made.groups.run(["g"], 0.05) and made.pool.processes_replaced == 1)
        assert len(list(tmp_path.glob("*/verl_lite-program-*"))) <= 1, "only that of the repeated episode"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("do", "text"),
    [
        ("pipe", "is no regular file"),
        ("link", "cannot be read: Too many levels of symbolic links"),
        ("folder", "is no regular file"),
        ("large result", "has more than 1048576 bytes"),
    ],
)
def test_a_result_that_is_no_file_of_json_fails_at_once(tmp_path: Path, do: str, text: str) -> None:
    target = tmp_path / "score.json"
    target.write_text("1.0")
    with world(COMMAND) as made:
        rows = made.run({"do": do, "target": str(target)}, seconds=20.0)
        assert of(rows, "reward_failed") == [True] and text in of(rows, "env_error")[0]


def test_commands_use_as_many_processes_as_the_machine_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_host, "cpu_count", lambda: 6)
    command, function = AgenticConfig(program="python agent.py"), AgenticConfig(program="package.agent:run")
    assert episodes_per_process(command) == 6 and episodes_per_process(function) == 64
    command.env_pool.num_workers = 4
    assert episodes_per_process(command) == 2  # rounded up
    command.env_pool.threads = 64
    assert episodes_per_process(command) == 64


def test_text_that_a_command_prints_is_no_result() -> None:
    with world(COMMAND, rewards=Rewards()) as made:
        assert scores(made.run({"do": "nothing"})) == [0.25]


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("no.such.module:run", "there is no module no;"),
        (f"{HERE}:missing", "has no missing; it defines: "),
        (f"{HERE}:command", "unexpected keyword"),
        ("no-such-command --x", "there is no command"),
    ],
)
def test_a_program_that_does_not_load_ends_the_run_with_its_option(program: str, text: str) -> None:
    with world(program) as made, pytest.raises(ProgramError, match="agentic.program=") as raised:
        made.run({})
    assert text in str(raised.value)


def test_an_engine_that_fails_ends_the_run_and_answers_503() -> None:
    with world(f"{HERE}:run") as made:
        made.engine.error = RuntimeError("no memory")
        with pytest.raises(RuntimeError, match="no memory"):
            made.run({"question": "a"})
        [episode] = made.runner._running.values()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            programs.ask(f"{made.endpoint.url}/v1", str(episode.api_key), "again")


def test_an_aborted_group_leaves_no_request_and_no_reward(tmp_path: Path) -> None:
    with world(f"{HERE}:run") as made:
        specs = (ProgramSpec("e", "g", "t", start_step=1, row={"question": "slow"}),)
        made.groups.begin([GroupPlan("g", specs)], SAMPLING)
        waited(lambda: made.groups.run(["g"], 0.05) and made.engine.running)
        assert made.groups.abort(["g"]) == 0 and not made.engine.running
        assert scores(made.run({"question": "b"})) == [1.0]


def waited(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
