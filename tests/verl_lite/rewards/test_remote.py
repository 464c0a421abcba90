"""The reward over HTTP against a server on this machine that fails, lies, limits, and dies."""

from __future__ import annotations

import asyncio
from typing import Any

import openai._base_client
import pytest

from tests.reward_server import Answer, RewardServer, reward_server
from verl_lite.config.reward import RemoteRewardConfig, RewardConfig
from verl_lite.errors import UserError
from verl_lite.rewards import RewardItem, RewardResult, load_scorer
from verl_lite.rewards.judge import Endpoint

ITEM = RewardItem("k", "src", "the answer", "truth", {"index": 3}, [{"role": "user", "content": "why?"}])


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)


def ask(url: str, items: int = 1, reward_kwargs: dict[str, Any] | None = None, **options: Any) -> list[RewardResult]:
    """The results of so many samples, asked for at once over one client."""
    scorer = load_scorer(RewardConfig(remote=RemoteRewardConfig(url=url, **options), reward_kwargs=reward_kwargs or {}))
    assert scorer.style == "async"
    return scorer.score_all([ITEM] * items)


def scripted(*answers: Answer) -> Any:
    """A server that gives these answers one after the other, the last one from then on."""
    return reward_server(lambda number, sample: answers[min(number, len(answers) - 1)])


def test_the_sample_is_posted_and_score_and_extras_come_back() -> None:
    with scripted(Answer({"score": 0.5, "acc": 1, "why": "good"}), Answer(0.25)) as server:
        [result] = ask(server.url, reward_kwargs={"judge": "strict"})
        assert ask(server.url)[0].score == 0.25
    assert (result.score, result.extra, result.failed) == (0.5, {"acc": 1.0, "why": "good"}, False)
    assert server.asked[0] == {
        "data_source": "src",
        "solution_str": "the answer",
        "ground_truth": "truth",
        "extra_info": {"index": 3},
        "prompt": [{"role": "user", "content": "why?"}],
        "judge": "strict",
    }


@pytest.mark.parametrize("status", [503, -1])
def test_what_may_pass_is_tried_again_so_many_times(status: int) -> None:
    with scripted(Answer("busy", status), Answer("busy", status), Answer(1.0)) as server:
        assert ask(server.url, max_retries=2)[0].score == 1.0 and len(server.asked) == 3
    with scripted(Answer("out of cards", status)) as server:
        [result] = ask(server.url, max_retries=2)
        assert len(server.asked) == 3 and result.failed and server.url in (result.error or "")
    assert status == -1 or (f"status {status}" in (result.error or "") and "out of cards" in (result.error or ""))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer("no such model", 404), "status 404: no such model"),
        (Answer("<html>hello</html>"), "without JSON: <html>hello"),
        (Answer({"reward": 1}), "without 'score'"),
        (Answer("NaN"), "expected a finite number"),
        (Answer('"1.0"'), "expected a finite number"),
    ],
)
def test_a_bad_answer_is_a_failure_and_never_asked_for_again(answer: Answer, reason: str) -> None:
    with scripted(answer) as server:
        [result] = ask(server.url, max_retries=5)
        assert len(server.asked) == 1
    assert result.failed and reason in (result.error or "") and not result.timed_out


def test_the_key_is_sent_and_a_missing_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with scripted(Answer(1.0)) as server:
        ask(server.url, api_key_env="JUDGE_KEY")
        assert server.headers[0]["authorization"] == "Bearer secret"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match="reward.remote.api_key_env=JUDGE_KEY: the environment variable"):
        load_scorer(RewardConfig(remote=RemoteRewardConfig(url=server.url, api_key_env="JUDGE_KEY")))


def test_connections_are_kept_and_end_with_their_event_loop() -> None:
    clients: list[Any] = []

    async def ask_twice(server: RewardServer) -> None:
        await endpoint.post({"a": 1})
        await endpoint.post({"a": object()})  # what JSON has not goes as text
        [(client, _)] = endpoint._clients.values()
        clients.append(client)

    with scripted(Answer(1.0)) as server:
        endpoint = Endpoint(server.url, max_retries=0, api_key_env=None, option="")
        for _ in range(2):
            asyncio.run(ask_twice(server))
    assert clients[0] is not clients[1] and all(client.is_closed() for client in clients) and not endpoint._clients
