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
from workers.agents.endpoint.trace import Trace, TraceNode
from workers.agents.episodes import Trajectory, count_episodes
from workers.agents.program_host import ProgramCall, ProgramResult
from workers.engines.base import Request, SamplingParams, derive_seed
from workers.pool.channel import Reply
from workers.rollout.group_run import CompleteGroup
from workers.rollout.runner import Runner
from workers.rollout.specs import GroupPlan, ProgramSpec

REWARD_CHECK_S = 0.05
"""Seconds between two checks for results of the reward function. Each check is a call of another process."""
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
        number: Its session in the pool.
        name: Prefix of its request ids, and key of its reward item.
        spec: The task.
        trajectory: Its result so far.
        sampling: Sampling parameters of its answers.
        trace: The requests of its program and their answers.
        api_key: Its key at the endpoint; None unless its program is running.
        score_key: Key of its reward item; None unless the reward function was asked for its score.
        is_ended: Whether it has a result.
        restarts: How often its program was started again, because its process had died.
        counts: Numbers of tokens of the earlier starts, by what became of them.
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
    restarts: int = 0
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
        # an episode waits in the queue, runs under its number, and is scored under its name
        self._queue: deque[_Episode] = deque()
        self._running: dict[int, _Episode] = {}
        self._scoring: dict[str, _Episode] = {}
        self._groups: dict[str, list[_Episode]] = {}
        # the requests that the engine has
        self._calls: set[Call] = set()
        # time of the last check for rewards
        self._checked_at = 0.0
        self._counts: Counter[str] = Counter()
        self._metric_names: set[str] = set()
        # entries of results without a score that were already printed; see `_note_missing_score`
        self._printed_entries: set[str] = set()

    def begin(self, plan: GroupPlan, sampling: SamplingParams) -> None:
        """Queues the episodes of a group."""
        sampling = replace(sampling, stop_token_ids=self._stop_token_ids)
        episodes = []
        for spec in plan.samples_of(ProgramSpec):
            number = next(self._numbers)
            # the number of the engine, because the engines share one reward pool
            name = f"{self._engine}.{number}/{spec.traj_id}"
            trajectory = Trajectory(spec, by_step=False)
            trace = self._new_trace()
            episodes.append(_Episode(number, name, spec, trajectory, sampling, trace))
        self._groups[plan.key] = episodes
        self._queue.extend(episodes)

    def is_finished(self, key: str) -> bool:
        return all(episode.is_ended for episode in self._groups[key])

    def take(self, key: str) -> CompleteGroup:
        """Removes a group whose episodes have ended, checks their counts of tokens, and returns its rows."""
        episodes = self._groups.pop(key)
        for episode in episodes:
            counts = episode.counts + episode.trace.counts
            _check_counts(episode.name, counts)
            self._counts += counts
            self._counts["requests"] += len(episode.trace.nodes)
            if episode.trajectory.rows is not None:
                self._counts["rows"] += len(episode.trajectory.rows)
        self._counts["episodes"] += len(episodes)
        trajectories = [episode.trajectory for episode in episodes]
        rows = self._to_rows(trajectories)
        return CompleteGroup(rows, count_episodes(trajectories))

    def snapshot(self, key: str) -> None:
        """Returns None, because a running program cannot be copied."""

    def abort(self, key: str) -> int:
        """Ends a group. Programs that are running receive errors from the endpoint until they return."""
        num_tokens = 0
        for episode in self._groups.pop(key):
            self._close(episode)
            # without an entry, the result of its program is ignored
            self._running.pop(episode.number, None)
            if episode.score_key in self._scoring:
                assert self._rewards is not None
                del self._scoring[episode.score_key]
                self._rewards.call("cancel", [episode.score_key])
            # `_admit` leaves it out if its program has not started yet
            episode.is_ended = True
            num_tokens += episode.trace.counts["sampled"]
        return num_tokens

    def repeat(self, number: int) -> None:
        """Empties the trace of an episode whose program is started again, because its process has died."""
        episode = self._running.get(number)
        # it was aborted, and its program runs without an episode
        if episode is None:
            return

        key = episode.api_key
        # closed before the tokens are counted: answers that arrive later are dropped
        self._close(episode)
        num_sampled = episode.counts["sampled"] + episode.trace.counts["sampled"]
        # the program begins again with its task, so that nothing of its earlier starts is trained on
        episode.counts = Counter({"sampled": num_sampled, "discarded/restarted": num_sampled})
        self._counts["restarts"] += 1
        episode.trace = self._new_trace()
        episode.restarts += 1
        # the pool calls the program with the same key
        self._open(episode, key)

    def advance(self, wait_s: float = 0.0, until_completion: bool = False) -> None:
        """Takes the results of programs and their requests, and makes at most one engine step.

        Args:
            wait_s: Seconds to wait for a result or a request if there is nothing to decode.
            until_completion: Ignored, because requests may arrive after every step.
        """
        self._admit()
        if self._scoring:
            self._take_scores()
            # the reward pool does not interrupt the wait below
            wait_s = min(wait_s, REWARD_CHECK_S)

        poll_s = 0.0 if self.is_decoding else wait_s
        for reply in self._programs.poll(poll_s):
            episode = self._running.pop(reply.session, None)
            # None if the episode was aborted
            if episode is not None:
                self._on_program_end(episode, reply)
        # programs that have ended leave room for others
        self._admit()
        self._take_requests()
        if self.is_decoding:
            self._step()

    def _step(self) -> None:
        """Makes one engine step and delivers the answers that are complete."""
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
        metrics = self._runner.take_metrics(seconds) | self._caller_metrics()
        metrics["env/processes_replaced"] = Metric.sum(self._programs.processes_replaced)
        metrics["program/restarts"] = Metric.sum(counts["restarts"])
        metrics["program/metrics_dropped"] = Metric.sum(counts["metrics_dropped"])
        metrics["program/requests_per_episode"] = Metric.mean(counts["requests"], counts["episodes"])
        metrics["program/rows_per_episode"] = Metric.mean(counts["rows"], counts["episodes"])
        for name, number in counts.items():
            if name.startswith(("sampled", "trained", "masked", "discarded")):
                metrics[f"program/tokens/{name}"] = Metric.sum(number)
        for kind, number in self._endpoint.take_refused().items():
            metrics[f"program/refused/{kind}"] = Metric.sum(number)
        return metrics

    def _caller_metrics(self) -> dict[str, Metric]:
        """Returns how many connections came from another episode, or from a process that was not found."""
        verdicts: Counter[Verdict] = Counter()
        # None for functions, which share a process
        if self._endpoint.callers is not None:
            verdicts = self._endpoint.callers.counts
            self._endpoint.callers.counts = Counter()
        return {
            "program/connections/foreign_key": Metric.sum(verdicts["foreign"]),
            "program/connections/unknown_process": Metric.sum(verdicts["unknown"]),
        }

    def close(self) -> None:
        """Ends the endpoint and the processes of the programs."""
        self._endpoint.close()
        self._programs.close()

    def _admit(self) -> None:
        """Starts the programs of queued episodes while fewer than `max_live` are running."""
        while self._queue and len(self._running) < self._max_live:
            episode = self._queue.popleft()
            if episode.is_ended:
                continue
            self._running[episode.number] = episode
            api_key = self._open(episode)
            call = ProgramCall(self._endpoint.url, api_key, episode.spec.row)
            self._programs.submit(episode.number, call)

    def _open(self, episode: _Episode, key: str | None = None) -> str:
        """Opens the episode at the endpoint and returns its API key.

        Args:
            episode: The episode.
            key: Its key if it was open before; None for a new key.
        """
        spec = episode.spec
        # the trace of each start numbers its requests from 0, and their names must differ
        name = f"{episode.name}+{episode.restarts}"
        seed = derive_seed(self._seed, spec.start_step - 1, spec.traj_id, 0)
        episode.api_key = self._endpoint.open(name, episode.trace, episode.sampling, seed, key)
        return episode.api_key

    def _close(self, episode: _Episode) -> None:
        """Closes the episode at the endpoint, and aborts its running requests."""
        if episode.api_key is None:
            return
        running_calls = self._endpoint.close_episode(episode.api_key)
        self._abort_calls(running_calls)
        episode.api_key = None

    def _take_requests(self) -> None:
        """Submits the requests that have arrived, and aborts those whose clients have left."""
        new_calls, aborted_calls = self._endpoint.take()
        for call in new_calls:
            request = Request(call.request_id, call.prompt_ids, call.sampling)
            try:
                self._runner.submit(request, call)
            except ValueError as error:
                # the engine has no room for it; the program receives the reason, and the run continues
                self._endpoint.refuse(call, str(error))
            else:
                self._calls.add(call)
        # after the new requests, because a client may leave before its request was taken
        self._abort_calls(aborted_calls)

    def _abort_calls(self, calls: Sequence[Call]) -> None:
        """Aborts requests that the engine has, and forgets them."""
        # some may have ended since the endpoint asked to abort them
        running_calls = [call for call in calls if call in self._calls]
        self._calls.difference_update(running_calls)
        self._runner.abort([call.request_id for call in running_calls])

    # ------------------------------------------------------------------------------------------- the end of an episode

    def _on_program_end(self, episode: _Episode, reply: Reply[ProgramResult]) -> None:
        """Ends the episode, or sends its last answer to the reward function."""
        # first of all, because the server's thread uses the trace of an open episode
        self._close(episode)
        trajectory = episode.trajectory
        trajectory.first_prompts = list(episode.trace.first_prompts)
        trajectory.is_timeout = reply.is_timeout
        if reply.error is not None:
            return self._fail(episode, reply.error)

        # answers that no client received are not the program's
        answered = [node for node in episode.trace.nodes if node.is_delivered]
        if not answered:
            return self._fail(
                episode,
                "the program returned without an answer of the endpoint: it has to call base_url with its api_key",
            )

        result = reply.result
        trajectory.metrics = self._logged_metrics(result.metrics)
        if result.score is not None:
            return self._finish(episode, result.score)
        if self._rewards is None:
            return self._fail(episode, "the program returned no score, and the run has no reward function")
        self._note_missing_score(result.names)
        return self._score_answer(episode, answered[-1], len(answered))

    def _note_missing_score(self, names: Sequence[str]) -> None:
        """Prints each name of a result's dict without a score once: one of them may be a misspelt `score`."""
        new_names = [name for name in names if name not in self._printed_entries]
        if not new_names or len(self._printed_entries) >= METRIC_NAMES_MAX:
            return
        self._printed_entries.update(new_names)
        print(_missing_score_note(new_names), flush=True)

    def _score_answer(self, episode: _Episode, node: TraceNode, num_turns: int) -> None:
        """Sends the last answer of an episode to the reward function.

        Args:
            episode: The episode.
            node: Its last answer, with the conversation before it.
            num_turns: Number of its answers.
        """
        assert self._rewards is not None and node.answer is not None
        row = episode.spec.row
        episode.score_key = episode.name
        self._scoring[episode.name] = episode

        extra_info = dict(row.get("extra_info") or {})
        extra_info["messages"] = [*node.conversation.messages, node.answer.message]
        extra_info["num_turns"] = num_turns
        scored_row = {**row, "data_source": episode.spec.tag, "extra_info": extra_info}
        item = RewardItem.of_row(episode.name, scored_row, node.answer.text)
        self._rewards.send("submit", [item])

    def _take_scores(self) -> None:
        """Ends the episodes whose rewards are available."""
        if time.monotonic() < self._checked_at + REWARD_CHECK_S:
            return
        self._checked_at = time.monotonic()
        assert self._rewards is not None
        # `collect` waits for all keys, so only those that are ready may be asked for
        ready = self._rewards.call("ready", list(self._scoring))
        if not ready:
            return
        results: dict[str, RewardResult] = self._rewards.call("collect", list(ready))
        for key, result in results.items():
            episode = self._scoring.pop(key)
            self._on_score(episode, result)

    def _on_score(self, episode: _Episode, result: RewardResult) -> None:
        """Ends an episode with the result of the reward function."""
        trajectory = episode.trajectory
        if result.failed:
            trajectory.is_timeout = result.timed_out
            return self._fail(episode, f"the reward function failed: {result.error}")

        reward_metrics: dict[str, float] = {}
        for name, value in result.extra.items():
            if isinstance(value, str):
                continue
            # neither the program nor the reward function replaces a number of the other
            metric_name = f"reward.{name}" if name in trajectory.metrics else name
            reward_metrics[metric_name] = value
        trajectory.metrics = trajectory.metrics | self._logged_metrics(reward_metrics)
        return self._finish(episode, result.score)

    def _logged_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics whose names the run already has, and others while METRIC_NAMES_MAX is not reached."""
        logged = {}
        for name, value in metrics.items():
            if name in self._metric_names or len(self._metric_names) < METRIC_NAMES_MAX:
                self._metric_names.add(name)
                logged[name] = value
            else:
                self._counts["metrics_dropped"] += 1
        return logged

    def _finish(self, episode: _Episode, score: float) -> None:
        """Ends an episode with a score, or fails it if the score does not fit a float32."""
        if not is_score(score):
            self._fail(episode, f"the program returned the score {score:g}; expected {SCORE}")
            return
        trajectory = episode.trajectory
        trajectory.outcome = score
        # `rows` decides which row a request is in, which `described` reports
        trajectory.rows = episode.trace.rows(score)
        trajectory.turns = list(itertools.chain.from_iterable(trajectory.rows))
        trajectory.requests = episode.trace.described()
        trajectory.stop = "terminated"
        trajectory.is_kept = True
        episode.is_ended = True

    def _fail(self, episode: _Episode, error: str) -> None:
        """Ends an episode whose program or reward has failed. Its tokens are masked: they are not trained on."""
        trajectory = episode.trajectory
        trace = episode.trace
        # `rows` counts which tokens would have been trained on, and which are discarded; the rows are not needed
        trace.rows(0.0)
        trace.counts["masked"] += trace.counts.pop("trained", 0)
        trajectory.requests = trace.described()
        for request in trajectory.requests:
            request["row"] = None
            request["discarded"] = "masked"

        trajectory.error = error
        trajectory.stop = "failed"
        # a failed episode becomes a row without sampled tokens, so that its group has all its members
        trajectory.is_kept = True
        episode.is_ended = True
        if trace.nodes:
            trajectory.prompt_messages = trace.nodes[0].added
            trajectory.prompt_ids = trace.nodes[0].prompt_ids


def _check_counts(name: str, counts: Mapping[str, int]) -> None:
    """Raises RuntimeError unless every sampled token was trained on, masked or discarded with a reason.

    Args:
        name: Name of the episode, for the message.
        counts: Numbers of its tokens.
    """
    num_explained = 0
    for reason, number in counts.items():
        if reason != "sampled":
            num_explained += number
    num_sampled = counts.get("sampled", 0)
    if num_sampled != num_explained:
        raise RuntimeError(f"episode {name}: {num_sampled} tokens were sampled: {dict(counts)}")


def _missing_score_note(names: Sequence[str]) -> str:
    """Returns the note on a program's dict that has no entry `score`, but these entries."""
    entries = ", ".join(printable(repr(name)) for name in names)
    # of the first name that looks like a misspelt `score`
    hint = ""
    for name in names:
        hint = hint or did_you_mean(name, ["score"])
    return (
        f"agentic.program returned a dict without 'score', with the entries {entries}{hint}: reward.* scores such "
        "episodes. Return {'score': None, ...} to say that this is intended."
    )
