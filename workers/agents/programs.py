"""Runs groups of episodes whose requests come from programs, over the endpoint of `workers.agents.endpoint.server`.

A program runs in a supervised process (`workers.agents.program_host`). Its requests arrive at any time, are sampled
together with all others, and are matched to training rows by the trace of the episode. The episode ends when its
program returns. If the program returns no score, the reward function scores the last answer of the episode. An episode
whose program or reward fails is masked; it never counts as a score of 0.

Every token that the engine samples for an episode is trained on, masked or discarded, with a reason; `take` checks this
equation.
"""

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from verl_lite.errors import printable
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.registry import did_you_mean
from verl_lite.rewards import RewardItem, RewardResult
from verl_lite.rewards.results import SCORE, is_score
from verl_lite.single_controller.resource_pool import ServiceHandle
from workers.agents.endpoint.callers import Verdict
from workers.agents.endpoint.server import Call, Endpoint
from workers.agents.endpoint.trace import Node, Trace
from workers.agents.episodes import Trajectory, count_episodes
from workers.agents.program_host import ProgramCall, ProgramResult
from workers.engines.base import Request, SamplingParams, derive_seed
from workers.pool.channel import Reply
from workers.rollout.group_run import CompleteGroup
from workers.rollout.runner import Runner
from workers.rollout.specs import GroupPlan, ProgramSpec

REWARD_CHECK_S = 0.05
"""Seconds between two checks for results of the reward function."""
METRIC_NAMES_MAX = 64
"""Number of different names of programs' own metrics in a run. Further names are counted and not logged."""


class Programs(Protocol):
    """Runs programs: a `workers.pool.process_pool.ProcessPool`."""

    processes_replaced: int

    def submit(self, number: int, payload: ProgramCall) -> None: ...

    def poll(self, timeout_s: float) -> list[Reply[ProgramResult]]: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class _Episode:
    """A queued or running episode.

    Attributes:
        number: its session in the pool.
        api_key: None unless its program is running.
        score_key: key of its reward item, if the reward function is scoring it.
        starts: number of starts after the first.
        counts: tokens of earlier starts.
    """

    number: int
    name: str
    spec: ProgramSpec
    trajectory: Trajectory
    sampling: SamplingParams
    trace: Trace
    api_key: str | None = None
    score_key: str | None = None
    is_ended: bool = False
    starts: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class ProgramRunner:
    """Runs groups of episodes of programs; see `group_run.SampleRunner`.

    Args:
        runner: the engine; the owner of a request is its call at the endpoint.
        endpoint: receives the requests of the programs.
        programs: pool of the programs, which calls `repeat`.
        new_trace: returns the trace of a new episode.
        stop_token_ids: tokens that end an answer.
        rewards: handle of the reward pool; None if the program has to return the scores.
        engine: number of the engine, which distinguishes its reward items from those of others.
        seed: seed of the run.
        max_live: maximum number of programs that run at the same time.
        rows: function that turns the episodes of a group into rows.
    """

    def __init__(
        self,
        runner: Runner[Call],
        endpoint: Endpoint,
        programs: Programs,
        *,
        new_trace: Callable[[], Trace],
        stop_token_ids: Sequence[int],
        rewards: ServiceHandle | None,
        engine: int,
        seed: int,
        max_live: int,
        rows: Callable[[Sequence[Trajectory]], DataProto],
    ) -> None:
        self._runner = runner
        self._endpoint = endpoint
        self._programs = programs
        self._new_trace = new_trace
        self._stop_token_ids = tuple(stop_token_ids)
        self._rewards = rewards
        self._engine = engine
        self._seed = seed
        self._max_live = max_live
        self._to_rows = rows
        self._numbers = itertools.count()
        self._queue: deque[_Episode] = deque()
        self._running: dict[int, _Episode] = {}
        self._scoring: dict[str, _Episode] = {}
        self._groups: dict[str, list[_Episode]] = {}
        self._calls: set[Call] = set()  # requests in the engine
        self._checked_at = 0.0
        self._counts: Counter[str] = Counter()
        self._metric_names: set[str] = set()
        self._named_entries: set[str] = set()  # entries of results without a score

    def begin(self, plan: GroupPlan, sampling: SamplingParams) -> None:
        """Queues the episodes of a group."""
        sampling = replace(sampling, stop_token_ids=self._stop_token_ids)
        episodes = []
        for spec in plan.samples_of(ProgramSpec):
            number = next(self._numbers)
            name = f"{self._engine}.{number}/{spec.traj_id}"
            trajectory = Trajectory(spec, by_step=False)
            episodes.append(_Episode(number, name, spec, trajectory, sampling, self._new_trace()))
        self._groups[plan.key] = episodes
        self._queue.extend(episodes)

    def is_finished(self, key: str) -> bool:
        return all(episode.is_ended for episode in self._groups[key])

    def take(self, key: str) -> CompleteGroup:
        episodes = self._groups.pop(key)
        for episode in episodes:
            # every sampled token has been trained on, masked or discarded with a reason
            counts = episode.counts + episode.trace.counts
            explained = sum(number for name, number in counts.items() if name != "sampled")
            if counts["sampled"] != explained:
                raise RuntimeError(f"episode {episode.name}: {counts['sampled']} tokens were sampled: {dict(counts)}")
            self._counts += counts
            self._counts["rows"] += len(episode.trajectory.rows or ())
            self._counts["requests"] += len(episode.trace.nodes)
        self._counts["episodes"] += len(episodes)
        trajectories = [episode.trajectory for episode in episodes]
        return CompleteGroup(self._to_rows(trajectories), count_episodes(trajectories))

    def snapshot(self, key: str) -> None:
        """Returns None, because a running program cannot be copied."""

    def abort(self, key: str) -> int:
        """Ends a group. Programs that are running receive errors from the endpoint until they return."""
        tokens = 0
        episodes = self._groups.pop(key)
        for episode in episodes:
            self._close(episode)
            self._running.pop(episode.number, None)
            if episode.score_key is not None and self._scoring.pop(episode.score_key, None) is not None:
                assert self._rewards is not None
                self._rewards.call("cancel", [episode.score_key])
            episode.is_ended = True
            tokens += episode.trace.counts["sampled"]
        return tokens

    def repeat(self, number: int) -> None:
        """Empties the trace of an episode whose program is started again, because its process has died."""
        episode = self._running.get(number)
        if episode is None:  # it was aborted
            return
        key = episode.api_key
        self._close(episode)
        sampled = episode.counts["sampled"] + episode.trace.counts["sampled"]
        episode.counts = Counter({"sampled": sampled, "discarded/restarted": sampled})
        self._counts["restarts"] += 1
        episode.trace = self._new_trace()
        episode.starts += 1
        self._open(episode, key)  # the pool calls the program with the same key

    def advance(self, wait_s: float = 0.0, until_completion: bool = False) -> None:
        """Takes the results of programs and their requests, and makes at most one engine step.

        wait_s: seconds to wait for either if there is nothing to decode. until_completion is ignored, because requests
        may arrive after every step.
        """
        self._admit()
        if self._scoring:
            self._take_scores()
            wait_s = min(wait_s, REWARD_CHECK_S)
        for reply in self._programs.poll(0.0 if self.is_decoding else wait_s):
            episode = self._running.pop(reply.session, None)
            if episode is not None:  # otherwise it was aborted
                self._on_program_end(episode, reply)
        self._admit()
        self._take_requests()
        if self.is_decoding:
            try:
                completions = self._runner.step()
            except Exception as error:
                # programs that wait for an answer end at once, and not at their time limits
                self._endpoint.fail(f"the rollout engine failed: {error}")
                raise
            for call, completion in completions:
                self._calls.remove(call)
                self._endpoint.deliver(call, completion)

    @property
    def is_decoding(self) -> bool:
        """True if the engine has answers to sample."""
        return self._runner.is_decoding

    def take_metrics(self, seconds: float) -> dict[str, Metric]:
        """Returns rollout metrics since the last call; env/processes_replaced counts from the start of the run."""
        counts = self._counts
        self._counts = Counter()
        callers: Counter[Verdict] = Counter()
        if self._endpoint.callers is not None:
            callers = self._endpoint.callers.counts
            self._endpoint.callers.counts = Counter()

        metrics = self._runner.take_metrics(seconds) | {
            "program/connections/foreign_key": Metric.sum(callers["foreign"]),
            "program/connections/unknown_process": Metric.sum(callers["unknown"]),
            "env/processes_replaced": Metric.sum(self._programs.processes_replaced),
            "program/restarts": Metric.sum(counts["restarts"]),
            "program/metrics_dropped": Metric.sum(counts["metrics_dropped"]),
            "program/requests_per_episode": Metric.mean(counts["requests"], counts["episodes"]),
            "program/rows_per_episode": Metric.mean(counts["rows"], counts["episodes"]),
        }
        for name, number in counts.items():
            if name.startswith(("sampled", "trained", "masked", "discarded")):
                metrics[f"program/tokens/{name}"] = Metric.sum(number)
        for kind, number in self._endpoint.take_refused().items():
            metrics[f"program/refused/{kind}"] = Metric.sum(number)
        return metrics

    def close(self) -> None:
        """Ends the endpoint and the processes of the programs."""
        self._endpoint.close()
        self._programs.close()

    def _admit(self) -> None:
        while self._queue and len(self._running) < self._max_live:
            episode = self._queue.popleft()
            if not episode.is_ended:
                self._running[episode.number] = episode
                self._open(episode)
                run = ProgramCall(self._endpoint.url, str(episode.api_key), episode.spec.row)
                self._programs.submit(episode.number, run)

    def _open(self, episode: _Episode, key: str | None = None) -> None:
        """Opens the episode at the endpoint. key: its key if it was open before."""
        spec = episode.spec
        name = f"{episode.name}+{episode.starts}"
        seed = derive_seed(self._seed, spec.start_step - 1, spec.traj_id, 0)
        episode.api_key = self._endpoint.open(name, episode.trace, episode.sampling, seed, key)

    def _close(self, episode: _Episode) -> None:
        """Closes the episode at the endpoint, and aborts its running requests."""
        if episode.api_key is not None:
            self._abort_calls(self._endpoint.close_episode(episode.api_key))
            episode.api_key = None

    def _take_requests(self) -> None:
        new, aborted = self._endpoint.take()
        for call in new:
            try:
                self._runner.submit(Request(call.request_id, call.prompt_ids, call.sampling), call)
            except ValueError as error:  # the engine has no room for it
                self._endpoint.refuse(call, str(error))
            else:
                self._calls.add(call)
        self._abort_calls(aborted)

    def _abort_calls(self, calls: Sequence[Call]) -> None:
        known = [call for call in calls if call in self._calls]
        self._calls.difference_update(known)
        self._runner.abort([call.request_id for call in known])

    # ------------------------------------------------------------------------------------------- the end of an episode

    def _on_program_end(self, episode: _Episode, reply: Reply[ProgramResult]) -> None:
        """Ends the episode, or sends its last answer to the reward function."""
        self._close(episode)
        trajectory = episode.trajectory
        trace = episode.trace
        trajectory.first_prompts = list(trace.first_prompts)
        trajectory.is_timeout = reply.is_timeout
        answered = [node for node in trace.nodes if node.answer is not None and node.is_delivered]
        if reply.error is not None:
            return self._fail(episode, reply.error)
        if not answered:
            return self._fail(
                episode,
                "the program returned without an answer of the endpoint: it has to call base_url with its api_key",
            )
        result = reply.result
        trajectory.metrics = self._known_metrics(result.metrics)
        if result.score is not None:
            return self._finish(episode, result.score)
        if self._rewards is None:
            return self._fail(episode, "the program returned no score, and the run has no reward function")
        new_names = [name for name in result.names if name not in self._named_entries]
        if new_names and len(self._named_entries) < METRIC_NAMES_MAX:
            self._named_entries.update(new_names)
            print(_without_score(new_names), flush=True)
        self._score_answer(episode, answered[-1], len(answered))

    def _score_answer(self, episode: _Episode, node: Node, num_turns: int) -> None:
        """Sends the last answer of an episode to the reward function. num_turns: number of its answers."""
        assert self._rewards is not None and node.answer is not None
        row = episode.spec.row
        episode.score_key = episode.name
        self._scoring[episode.name] = episode
        messages = [*node.conversation.messages, node.answer.message]
        extra_info = {**(row.get("extra_info") or {}), "messages": messages, "num_turns": num_turns}
        scored_row = {**row, "data_source": episode.spec.tag, "extra_info": extra_info}
        self._rewards.send("submit", [RewardItem.of_row(episode.name, scored_row, node.answer.text)])

    def _take_scores(self) -> None:
        """Ends the episodes whose rewards are available."""
        if time.monotonic() < self._checked_at + REWARD_CHECK_S:
            return
        self._checked_at = time.monotonic()
        assert self._rewards is not None
        ready = self._rewards.call("ready", list(self._scoring))
        if not ready:
            return
        results: dict[str, RewardResult] = self._rewards.call("collect", list(ready))
        for key, result in results.items():
            episode = self._scoring.pop(key)
            if result.failed:
                episode.trajectory.is_timeout = result.timed_out
                self._fail(episode, f"the reward function failed: {result.error}")
            else:
                own = episode.trajectory.metrics
                numbers: dict[str, float] = {}
                for name, value in result.extra.items():
                    if not isinstance(value, str):
                        # neither the program nor the reward function replaces a number of the other
                        numbers[f"reward.{name}" if name in own else name] = value
                episode.trajectory.metrics = own | self._known_metrics(numbers)
                self._finish(episode, result.score)

    def _known_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics whose names the run already has, and others while METRIC_NAMES_MAX is not reached."""
        known = {}
        for name, value in metrics.items():
            if name in self._metric_names or len(self._metric_names) < METRIC_NAMES_MAX:
                self._metric_names.add(name)
                known[name] = value
            else:
                self._counts["metrics_dropped"] += 1
        return known

    def _finish(self, episode: _Episode, score: float) -> None:
        if not is_score(score):
            return self._fail(episode, f"the program returned the score {score:g}; expected {SCORE}")
        trajectory = episode.trajectory
        trajectory.outcome = score
        trajectory.rows = episode.trace.rows(score)
        trajectory.turns = list(itertools.chain.from_iterable(trajectory.rows))
        trajectory.requests = episode.trace.described()
        trajectory.stop = "terminated"
        trajectory.is_kept = True
        episode.is_ended = True
        return None

    def _fail(self, episode: _Episode, error: str) -> None:
        """Masks the episode: its tokens are not trained on."""
        trajectory = episode.trajectory
        trace = episode.trace
        # the rows that training would have had, for the counts of tokens
        trace.rows(0.0)
        trace.counts["masked"] += trace.counts.pop("trained", 0)
        trajectory.requests = trace.described()
        for request in trajectory.requests:
            request["row"] = None
            request["discarded"] = "masked"
        trajectory.error = error
        trajectory.stop = "failed"
        trajectory.is_kept = True
        episode.is_ended = True
        if trace.nodes:
            trajectory.prompt_messages = trace.nodes[0].added
            trajectory.prompt_ids = trace.nodes[0].prompt_ids


def _without_score(names: Sequence[str]) -> str:
    """Returns the note on a program's dict without an entry `score`. names: its entries."""
    shown = ", ".join(printable(repr(name)) for name in names)
    hints = [did_you_mean(name, ["score"]) for name in names]
    hint = next(filter(None, hints), "")
    return (
        f"agentic.program returned a dict without 'score', with the entries {shown}{hint}: reward.* scores such "
        "episodes. Return {'score': None, ...} to say that this is intended."
    )
