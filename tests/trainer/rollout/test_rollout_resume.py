"""Runs that sample answers ahead, save, are killed and resume: no group is lost or repeated, and no answer changes.

The scheduler, the source of prompts, the filter, the rewards and the loop over the engines are those of a run. Only the
engine has no model: an answer is a function of its seed, with a random length, so that the answers of an undisturbed
run are known. The engines have few seats, so that a checkpoint holds groups that wait, groups of which some answers
are complete, and complete groups that no step has used yet.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.set_keys import set_keys
from tests.trainer import tiny_run
from tests.trainer.rollout.test_scheduler import give, train
from tests.trainer.test_fit import FakePrompts
from trainer.rewards.failures import reward_failure_log
from trainer.rewards.scores import RewardManager, mask_failed
from trainer.rollout.dynamic_sampling import DynamicSampling
from trainer.rollout.group_sources import ANSWERS, PromptSource
from trainer.rollout.sample_groups import Group
from trainer.rollout.scheduler import RolloutScheduler
from verl_lite.config import PPOConfig, RewardConfig
from verl_lite.machine.safe_state import read_state, write_state
from verl_lite.protocol import DataProto
from workers.engines.base import Completion, Request, Sampled, SamplingParams
from workers.rollout.answers import AnswerRunner
from workers.rollout.group_run import GroupRun
from workers.rollout.runner import Runner
from workers.rollout.specs import GroupPlan, GroupResults

LONGEST = 12
END = 1
SAMPLING = SamplingParams(max_tokens=LONGEST)


@cache
def answer_of(seed: int) -> list[int]:
    """The tokens of the answer with this seed: many short ones, and a few that take four times as long."""
    random = np.random.default_rng(seed)
    length = min(LONGEST, 1 + int(random.exponential(3)))
    return [*random.integers(2, 60, length - 1).tolist(), END]


def score_of(tokens: Sequence[int]) -> float:
    """About half of all answers are right."""
    return float(sum(tokens) % 2)


class SeatedEngine:
    """Samples one token a step of each of the first requests, at most `seats` of them."""

    def __init__(self, seats: int, version: int) -> None:
        self.seats, self.version = seats, version
        self.extra_outputs: dict[str, tuple[int, ...]] = {}
        self.requests: dict[str, Request] = {}

    def submit(self, request: Request) -> None:
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request

    @property
    def unfinished(self) -> int:
        return len(self.requests)

    def snapshot(self, request_ids: Iterable[str]) -> list[Request]:
        return [self.requests[name] for name in request_ids]

    def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            del self.requests[name]

    def step(self) -> list[Completion]:
        completions = []
        for name, request in list(self.requests.items())[: self.seats]:
            whole_answer = answer_of(request.sampling.seed)
            tokens, log_probs, versions = request.sampled.lists()
            assert tokens == whole_answer[: len(tokens)], "a continued answer begins with what was sampled before"
            tokens.append(whole_answer[len(tokens)])
            log_probs.append(-tokens[-1] / 64)
            versions.append(self.version)
            if tokens[-1] == END:
                completions.append(Completion(name, tokens, log_probs, "stop", versions))
                del self.requests[name]
            else:
                sampled = Sampled(tuple(tokens), tuple(log_probs), tuple(versions))
                self.requests[name] = replace(request, sampled=sampled)
        return completions


class Pool:
    """A reward pool in this process, which scores only what was submitted to it. slow: True if a reward is ready some
    random time after its answer."""

    def __init__(self, random: np.random.Generator, slow: bool) -> None:
        self.random, self.slow = random, slow
        self.scores: dict[str, float] = {}
        self.ready: set[str] = set()

    def call(self, method: str, items: Sequence[Any] = ()) -> Any:
        if method == "submit":
            for item in items:
                tokens = [int(token) for token in item.solution_str.strip("[]").split(",")]
                self.scores[item.key] = score_of(tokens)
        elif method == "ready":
            known = [key for key in items if key in self.scores]
            self.ready |= {key for key in known if not self.slow or self.random.random() < 0.5}
            return self.ready
        elif method == "cancel":
            for key in items:
                self.scores.pop(key, None)
        elif method == "collect":
            facts: dict[str, Any] = {"failed": False, "error": None, "timed_out": False, "extra": {}}
            return {key: SimpleNamespace(score=self.scores.pop(key), **facts) for key in items}
        return 0


class LocalEngines:
    """The engines of a run, in this process. steps: returns the number of engine steps of a call with a time limit."""

    def __init__(self, pool: Pool, count: int, seats: int, steps: Callable[[], int]) -> None:
        self.pool, self.steps = pool, steps
        self.models = [SeatedEngine(seats, version=0) for _ in range(count)]
        self.runs = [GroupRun(self._runner(model)) for model in self.models]
        self.next_engine = 0

    def _runner(self, model: Any) -> AnswerRunner:
        def submit(finished: list[tuple[Any, list[int]]]) -> None:
            self.pool.call("submit", [replace(item, solution_str=str(tokens)) for item, tokens in finished])

        return AnswerRunner(
            Runner(model), response_length=LONGEST, pad_token_id=0, stop_token_ids=(END,), on_finished=submit
        )

    @property
    def num_engines(self) -> int:
        return len(self.runs)

    @property
    def running(self) -> bool:
        return not all(run.is_idle for run in self.runs)

    @property
    def version(self) -> int:
        return self.models[0].version

    @version.setter
    def version(self, version: int) -> None:
        for model in self.models:
            model.version = version

    def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        for plan in plans:
            self.runs[self.next_engine % len(self.runs)].begin([plan], sampling)
            self.next_engine += 1

    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]:
        if seconds is None:
            return [run.run(keys) for run in self.runs]
        for run in self.runs:
            for _ in range(self.steps()):
                run.advance()
        return [run.take(with_metrics=False) for run in self.runs]

    def snapshot_groups(self) -> list[GroupPlan]:
        return [plan for run in self.runs for plan in run.snapshot()]

    def abort_groups(self, keys: Sequence[str]) -> int:
        return sum(run.abort(keys) for run in self.runs)


class Prompts(FakePrompts):
    """Prompts with two or three answers each."""

    def __getitems__(self, places: Sequence[int]) -> DataProto:
        rows = super().__getitems__(places)
        rows.batch[ANSWERS] = torch.tensor([2 + place % 2 for place in places])
        return rows


class RecordedSource(PromptSource):
    """Notes the plan of each group that it draws."""

    def __init__(self, config: PPOConfig, data: Any) -> None:
        super().__init__(config, data)
        self.drawn: dict[str, GroupPlan] = {}

    def _groups(self, prompts: DataProto, step: int) -> list[Group]:
        groups = super()._groups(prompts, step)
        self.drawn |= {group.plan.key: group.plan for group in groups}
        return groups


@dataclass
class Life:
    """One process of a run: from its start or a checkpoint to the next kill."""

    config: PPOConfig
    folder: Path
    random: np.random.Generator
    last_step: int
    steps: Callable[[], int]
    slow_rewards: bool = True
    is_mixed: bool = False  # True if it resumed from a checkpoint with complete and running groups

    def __post_init__(self) -> None:
        self.pool = Pool(self.random, self.slow_rewards)
        pool: Any = self.pool
        config = RewardConfig()
        failures = reward_failure_log(config.max_error_rate, self.folder)
        self.rewards = RewardManager(pool, config, failures)
        engines, seats = int(self.random.integers(1, 3)), int(self.random.integers(1, 4))
        self.engines = LocalEngines(self.pool, engines, seats, self.steps)
        self.source = RecordedSource(self.config, Prompts(10))
        has_filter = self.config.algorithm.filter_groups.enable
        self.scheduler = RolloutScheduler(
            self.config,
            self.source,
            self.engines,
            SAMPLING,
            DynamicSampling(self.config, self.score) if has_filter else None,
            last_step=self.last_step,
            rewards=self.rewards,
        )

    def score(self, rows: DataProto) -> DataProto:
        return mask_failed(rows | self.rewards.score(rows).select(meta_info_keys=[]))

    def train(self, first: int) -> Iterator[tuple[int, DataProto]]:
        """Yields the steps from `first` on with their scored batches."""
        steps = range(first, self.last_step + 1)
        for step, batch in zip(steps, train(self.scheduler, steps), strict=True):
            rows = batch if self.config.algorithm.filter_groups.enable else self.score(batch)
            yield step, rows

    def save(self, step: int) -> Path:
        """Writes a checkpoint after this step, as the trainer does."""
        file = self.folder / f"{step}.pt"
        write_state(file, {"scheduler": self.scheduler.state_dict(), "drawn": list(self.source.drawn.items())})
        if not self.scheduler.spans_updates:
            give(self.scheduler, step)
        return file

    def load(self, file: Path) -> None:
        state = read_state(file)
        self.scheduler.load_state_dict(state["scheduler"])
        self.source.drawn = dict(state["drawn"])
        are_complete = {group.sampled is not None for group in self.scheduler.groups}
        self.is_mixed = len(are_complete) == 2


def check_rows(rows: DataProto, step: int, threshold: int) -> list[str]:
    """Checks each answer of a batch against the plan of an undisturbed run. Returns the names of its samples."""
    columns = rows.non_tensor_batch
    staleness = step - 1 - rows.batch["policy_version"]
    assert 0 <= staleness.min() and staleness.max() <= threshold
    for row, name in enumerate(columns["sample_id"]):
        uid = columns["uid"][row].partition("@")[0]
        assert name.split("/")[2:] == [uid, str(columns["sample"][row])], "columns of another row"
        assert columns["index"][row] == int(uid.removeprefix("p"))
    return list(columns["sample_id"])


def check_answers(rows: DataProto, drawn: dict[str, GroupPlan]) -> None:
    """Checks that the rows have the tokens, log-probs and scores of their seeds."""
    for row, name in enumerate(rows.non_tensor_batch["sample_id"]):
        key, _, number = name.rpartition("/")
        expected = answer_of(drawn[key].samples[int(number)].seed)
        length = int(rows.batch["response_mask"][row].sum())
        assert rows.batch["responses"][row, :length].tolist() == expected
        log_probs = torch.tensor([-token / 64 for token in expected])
        assert rows.batch["rollout_log_probs"][row, :length].equal(log_probs)
        assert float(rows.batch["token_level_scores"][row].sum()) == score_of(expected)
        versions = rows.batch["rollout_versions"][row, :length].tolist()
        assert versions == sorted(versions) and versions[0] >= 0


def is_even(plan: GroupPlan) -> bool:
    """Returns True if all answers of a group have the same score."""
    return len({score_of(answer_of(spec.seed)) for spec in plan.samples}) == 1


OVERSAMPLE = {"rollout__oversample": 1.5}
FILTER = {"algorithm__filter_groups__enable": True, "algorithm__filter_groups__metric": "score",
          "algorithm__filter_groups__max_num_gen_batches": 0}  # fmt: skip


def async_config(threshold: int, ahead: int, partial: bool, **options: Any) -> PPOConfig:
    config = PPOConfig()
    config.data.train_batch_size, config.data.shuffle = 3, True
    config.async_training.max_off_policy_threshold = threshold
    config.async_training.batches_ahead, config.async_training.partial_rollout = ahead, partial
    return set_keys(config, **options)


def check_killed_run(config: PPOConfig, folder: Path, seed: int) -> int:
    """Kills a run after random steps, resumes it from its newest checkpoint or an older one, with other engines each
    time, and checks what it trained on. Returns the number of resumes from a checkpoint with both kinds of groups."""
    random, last_step, threshold = np.random.default_rng(seed), 9, config.async_training.max_off_policy_threshold
    trained: dict[int, list[str]] = {}
    saved: dict[int, Path] = {}
    num_mixed, is_finished = 0, False

    while not is_finished:
        life = Life(config, folder, random, last_step, steps=lambda: int(random.integers(0, 4)))
        first = 1
        if saved:
            newest = max(saved)
            resumed_from = newest if random.random() < 0.8 else min(saved)
            life.load(saved[resumed_from])
            num_mixed += life.is_mixed
            first = resumed_from + 1
            # what an earlier life did after this checkpoint belongs to another course of the run
            saved = {step: file for step, file in saved.items() if step <= resumed_from}
            trained = {step: names for step, names in trained.items() if step <= resumed_from}
        is_finished = first > last_step
        for step, rows in life.train(first):
            trained[step] = check_rows(rows, step, threshold)
            check_answers(rows, life.source.drawn)
            if random.random() < 0.6:
                saved[step] = life.save(step)
            is_finished = step == last_step
            if not is_finished and random.random() < 0.25:
                break

    names = Counter(itertools.chain(*trained.values()))
    assert set(names.values()) == {1}, "no answer is trained on twice"
    left = {group.plan.key for group in life.scheduler.groups}
    filtered = config.algorithm.filter_groups.enable
    wanted = {key for key, plan in life.source.drawn.items() if not (filtered and is_even(plan))}
    expected = {f"{key}/{n}" for key in wanted - left for n in range(len(life.source.drawn[key].samples))}
    assert set(names) == expected, "each answer of each group that was drawn and not dropped"
    return num_mixed


PARTIAL = {
    "prompts, K=1": async_config(1, 1, True),
    "prompts, K=2": async_config(2, 2, True),
    "oversampling, K=1": async_config(1, 0, True, **OVERSAMPLE),
    "oversampling, K=2": async_config(2, 1, True, **OVERSAMPLE),
    "filters, K=1": async_config(1, 1, True, **FILTER),
    "filters, K=2": async_config(2, 2, True, **FILTER),
    "filters and oversampling, K=2": async_config(2, 1, True, **FILTER, **OVERSAMPLE),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_killed_partial_rollouts_train_on_every_group_once_with_the_answers_of_an_undisturbed_run(
    name: str, tmp_path: Path
) -> None:
    num_mixed = sum(check_killed_run(PARTIAL[name], tmp_path, seed) for seed in range(6))
    assert num_mixed >= 2, "checkpoints with complete and running groups were resumed"


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTIAL)
def test_many_killed_partial_rollouts(name: str, tmp_path: Path) -> None:
    num_mixed = sum(check_killed_run(PARTIAL[name], tmp_path, seed) for seed in range(100, 120))
    assert num_mixed >= 8


EXACT = {
    "prompts, K=0": async_config(0, 0, False),
    "filters, K=0": async_config(0, 0, False, **FILTER),
    "oversampling, K=0": async_config(0, 0, False, **OVERSAMPLE),
    "filters and oversampling, K=0": async_config(0, 0, False, **FILTER, **OVERSAMPLE),
    "prompts, K=1": async_config(1, 1, False),
    "filters, K=1": async_config(1, 1, False, **FILTER),
    "prompts, K=2": async_config(2, 2, False),
    "filters, K=2": async_config(2, 2, False, **FILTER),
}
"""Runs whose batches do not depend on time. Of an aborted surplus they depend on the steps of a call only."""


def same_columns(rows: DataProto, others: DataProto) -> bool:
    """Returns True if both batches have the same columns, bit for bit."""
    if set(rows.batch.keys()) != set(others.batch.keys()) or set(rows.non_tensor_batch) != set(others.non_tensor_batch):
        return False
    are_equal = [rows.batch[name].equal(others.batch[name]) for name in rows.batch.keys()]
    are_equal += [list(rows.non_tensor_batch[name]) == list(others.non_tensor_batch[name])
                  for name in rows.non_tensor_batch]  # fmt: skip
    return all(are_equal)


@pytest.mark.parametrize("name", EXACT)
def test_a_killed_run_without_partial_rollouts_equals_the_undisturbed_one(name: str, tmp_path: Path) -> None:
    """The undisturbed run saves after every step; another one is killed after every step and resumes."""
    config, last_step = EXACT[name], 6
    for seed in range(3):
        # the same engines in every life, so that the same answers of a surplus end first
        lives = (
            Life(config, tmp_path, np.random.default_rng(seed), last_step, lambda: 2, slow_rewards=False)
            for _ in itertools.count()
        )
        undisturbed = next(lives)
        expected, saved = dict[int, DataProto](), dict[int, Path]()
        for step, rows in undisturbed.train(1):
            expected[step] = rows
            saved[step] = undisturbed.save(step)
        for resumed_from in range(1, last_step):
            resumed = next(lives)
            resumed.load(saved[resumed_from])
            step, rows = next(resumed.train(resumed_from + 1))
            assert same_columns(rows, expected[step])
            check_answers(rows, resumed.source.drawn)


WHOLE_RUNS = {
    "K=2": ["async_training.max_off_policy_threshold=2"],
    "filters, K=2": ["async_training.max_off_policy_threshold=2", "algorithm.filter_groups.enable=true",
                     "algorithm.filter_groups.metric=score"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE_RUNS)
def test_a_whole_run_resumes_and_has_the_answers_of_the_undisturbed_one(name: str, tmp_path: Path) -> None:
    """The learning rate is too small to change an answer. Of each prompt that both runs trained on, which time decides,
    all answers are equal; with a filter these are fewer."""
    tiny_run.write_files(tmp_path, [f"{row}+{row}" for row in range(8)])
    options = [
        *WHOLE_RUNS[name], "data.max_response_length=40", "rollout.max_num_seqs=3", "actor.optim.lr=1e-12",
        "trainer.save_freq=1",
    ]  # fmt: skip
    tiny_run.run(tmp_path, "whole", *options, "trainer.total_training_steps=4")
    undisturbed = answers_by_prompt(tmp_path, "whole", range(1, 5))

    for resumed_from in (1, 2):
        folder = tmp_path / "whole" / f"global_step_{resumed_from}"
        start = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]
        tiny_run.run(tmp_path, f"from {resumed_from}", *options, *start, "trainer.total_training_steps=4")
        resumed = answers_by_prompt(tmp_path, f"from {resumed_from}", range(resumed_from + 1, 5))
        earlier = answers_by_prompt(tmp_path, "whole", range(1, resumed_from + 1))
        assert not earlier.keys() & resumed.keys(), "a prompt is trained on twice"
        both = undisturbed.keys() & resumed.keys()
        assert len(both) >= 4
        assert {uid: resumed[uid] for uid in both} == {uid: undisturbed[uid] for uid in both}


def answers_by_prompt(folder: Path, name: str, steps: Iterable[int]) -> dict[str, list[str]]:
    """The answers that these steps trained on, by the name of the prompt."""
    answers: dict[str, list[str]] = {}
    for step in steps:
        for row in tiny_run.samples(folder, name, step):
            answers.setdefault(row["uid"], []).append(row["output"])
    return {uid: sorted(several) for uid, several in answers.items()}
