"""Rows of scripted episodes, every number written by hand: tokens, masks, rewards.

One character is one token ("0" is 3, "a" is 28); a message stands between two 1 (<|im_start|>), an answer ends in 2.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.workers.rollout.scripted import LIMITS, ids_of, log_prob, play, rows, spec
from verl_lite.protocol import DataProto
from verl_lite.schema import check, column
from workers.agents.episodes import TokenLimits, Trajectory, count_episodes
from workers.engines.base import Request

A, B, C, D, E = 28, 29, 30, 31, 32


def worded(*answers: str) -> Any:
    """Turn k answers answers[k]; those that do not end in "!" have no end of turn."""

    def answer(traj_id: str, turn: int, request: Request) -> list[int]:
        text = answers[turn]
        return [*ids_of(text.removesuffix("!")), 2] if text.endswith("!") else ids_of(text)

    return answer


def world(*steps: tuple[str, float], **info: Any) -> Any:
    """Begins with "a"; action k (from 0) gives steps[k], the last of which ends the episode."""

    def script(seed: int, actions: list[str]) -> dict[str, Any]:
        if not actions:
            return {"observation": "a"}
        observation, reward = steps[len(actions) - 1]
        return {
            "observation": observation,
            "reward": reward,
            "terminated": len(actions) == len(steps),
            "info": dict(info),
        }

    return script


def expect(data: DataProto, row: int, prompt: list[int], response: list[int], mask: list[int]) -> None:
    """The token columns of a row."""
    width, response_width = LIMITS.max_prompt_length, LIMITS.max_response_length
    left, right = width - len(prompt), response_width - len(response)
    tensors = data.batch
    assert tensors["prompts"][row].tolist() == [0] * left + prompt
    assert tensors["prompt_mask"][row].tolist() == [0] * left + [1] * len(prompt)
    assert tensors["responses"][row].tolist() == response + [0] * right
    assert tensors["response_mask"][row].tolist() == mask + [0] * right
    assert tensors["input_ids"][row].tolist() == [0] * left + prompt + response + [0] * right
    length = len(prompt) + len(response)
    assert tensors["attention_mask"][row].tolist() == [0] * left + [1] * length + [0] * right
    positions = [0] * left + list(range(length)) + [length - 1] * right
    assert tensors["position_ids"][row].tolist() == positions
    expected = [log_prob(token) if sampled else 0.0 for token, sampled in zip(response, mask, strict=True)]
    torch.testing.assert_close(tensors["rollout_log_probs"][row], torch.tensor(expected + [0.0] * right))


def rewards(data: DataProto, row: int) -> dict[int, float]:
    """Where they stand."""
    scores = data.batch["token_level_scores"][row]
    return {place: scores[place].item() for place in scores.nonzero()[:, 0].tolist()}


def test_several_turns() -> None:
    episodes, _, _ = play(world(("d", 0.5), ("e", -1.0), ("x", 2.0)), worded("b!", "cc!", "b!"))
    data = rows(episodes)
    response = [B, 2, 1, D, 1, C, C, 2, 1, E, 1, B, 2]
    expect(data, 0, [1, A, 1], response, [1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1])
    assert rewards(data, 0) == {1: 0.5, 7: -1.0, 12: 2.0}
    assert data.batch["episode_scores"].tolist() == [1.5]
    assert data.batch["num_turns"].tolist() == [3]
    assert list(data.non_tensor_batch["step_scores"]) == [[0.5, -1.0, 2.0]]


def test_only_sampled_tokens_have_a_version_and_the_row_has_the_oldest() -> None:
    """The weights change within the first turn, and between the turns."""
    episodes, _, _ = play(world(("d", 0.5), ("x", 2.0)), worded("b!", "cc!"))
    first, second = episodes[0].turns
    first.versions, second.versions = [4, 5], [6, 6, 7]
    data = rows(episodes)
    # b and the end of the turn, <|im_start|>d<|im_start|> of the environment, cc and the end, padding
    expected = [4, 5, -1, -1, -1, 6, 6, 7] + [-1] * (LIMITS.max_response_length - 8)
    assert data.batch["rollout_versions"].tolist() == [expected]
    assert data.batch["policy_version"].tolist() == [4]


def test_tokens_that_move_from_the_prompt_to_the_response_have_no_version() -> None:
    """The first prompt of a row may be longer than data.max_prompt_length, here by 2 tokens."""
    episodes, _, _ = play(world(("x", 2.0)), worded("b!"))
    [turn] = episodes[0].turns
    turn.prompt_ids, turn.versions = [1, A, 1, 1, B, C, D, 1], [4, 5]
    data = rows(episodes)
    expect(data, 0, [1, A, 1, 1, B, C], [D, 1, B, 2], [0, 0, 1, 1])
    assert data.batch["rollout_versions"][0].tolist() == [-1, -1, 4, 5] + [-1] * (LIMITS.max_response_length - 4)


def test_rows_of_single_turns_do_not_build_the_whole_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the square of the number of turns: half a second for a program with 1000 requests."""
    script = world(("d", 0.5), ("e", -1.0))
    episodes, _, _ = play(script, worded("b!", "b!"), env_manager_cls="step", agent_template="{current_observation}")

    def whole(trajectory: Trajectory) -> None:
        raise AssertionError("the whole conversation was built")

    monkeypatch.setattr(Trajectory, "messages", property(whole))
    assert len(rows(episodes)) == 2


def test_tool_messages() -> None:
    episodes, _, _ = play(world(("d", 1.0), ("x", 2.0), use_tool=True), worded("b!", "c!"))
    sharp = ids_of("#")
    expect(rows(episodes), 0, [1, A, 1], [B, 2, 1, *sharp, D, 1, C, 2], [1, 1, 0, 0, 0, 0, 1, 1])
    assert [message["role"] for message in episodes[0].messages] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("most", "said", "room", "response", "where"),
    [
        # two turns of 4 and the join between them fill 11 of 14, the next join the rest
        (14, "ccc!", [14, 7], [B, B, B, 2, 1, D, 1, C, C, C, 2, 0, 0, 0], {3: 1.0, 10: 5.0}),
        # a turn is cut to what is left, and still acts
        (9, "cccccc", [9, 2], [B, B, B, 2, 1, D, 1, C, C], {3: 1.0, 8: 5.0}),
    ],
)
def test_the_limit_of_all_tokens_ends_the_trajectory(
    most: int, said: str, room: list[int], response: list[int], where: dict[int, float]
) -> None:
    limits = TokenLimits(max_prompt_length=6, max_response_length=most, max_model_len=20)
    steps = [("d", 1.0), ("d", 5.0), ("d", 4.0), ("x", 8.0)]
    episodes, _, engine = play(world(*steps), worded("bbb!", said, "bbb!", "b!"), limits=limits)
    assert [request.sampling.max_tokens for request in engine.requests] == room
    assert episodes[0].stop == "max_length" and len(episodes[0].turns) == 2
    data = rows(episodes, limits)
    assert data.batch["responses"][0].tolist() == response and rewards(data, 0) == where
    assert data.non_tensor_batch["finish_reason"][0] == "length"


@pytest.mark.parametrize(
    ("observation", "reward", "prompt", "error"),
    [
        ("edcbaedcba", 1.0, [E, D, C, B, A, 1], "at least 12 tokens, and data.max_prompt_length=6"),
        ("a", 1e308, [1, A, 1], "sum to 1e\\+308; expected .* float32"),
        ("a", 3e38, [1, A, 1], "sum to 6e\\+38; expected .* float32"),  # each of the two rewards is in the range
    ],
)
def test_an_overlong_prompt_or_a_score_beyond_float32_fails_the_episode_not_the_run(
    observation: str, reward: float, prompt: list[int], error: str
) -> None:
    def script(seed: int, actions: list[str]) -> dict[str, Any]:
        bad = {"observation": observation, "reward": reward}
        return (bad if seed == 7 else {"observation": "a", "reward": 1.0}) | {"terminated": len(actions) == 2}

    episodes, _, _ = play(script, worded("b!", "b!"), [spec("g_0"), spec("h_0", seed=8)])
    assert [one.stop for one in episodes] == ["failed", "terminated"]
    counts = count_episodes(episodes)
    assert (counts.episodes, counts.failed) == (2, 1)
    assert re.search(f"(?s)episode g_0 of the environment 't'.*{error}", str(counts.first_failure))
    data = rows(episodes)
    expect(data, 0, prompt, [], [])
    assert list(data.non_tensor_batch["reward_failed"]) == [True, False]
    assert data.batch["episode_scores"].tolist() == [0.0, 2.0] and not data.batch["token_level_scores"][0].any()


def test_each_step_a_row() -> None:
    episodes, _, engine = play(
        world(("d", 0.5), ("e", -1.0), ("x", 2.0)),
        worded("b!", "cc!", "c"),
        env_manager_cls="step",
        agent_template="{observation}{step_count}",
        max_tokens_per_step=3,
    )
    assert [list(request.prompt_ids) for request in engine.requests] == [[1, A, 3, 1], [1, D, 4, 1], [1, E, 5, 1]]
    data = rows(episodes)
    expect(data, 0, [1, A, 3, 1], [B, 2], [1, 1])
    expect(data, 1, [1, D, 4, 1], [C, C, 2], [1, 1, 1])
    expect(data, 2, [1, E, 5, 1], [C], [1])
    assert [rewards(data, row) for row in range(3)] == [{1: 0.5}, {2: -1.0}, {0: 2.0}]
    columns = data.non_tensor_batch
    assert data.batch["step"].tolist() == [0, 1, 2]
    assert list(columns["step_scores"]) == [0.5, -1.0, 2.0]
    assert list(columns["sample_id"]) == ["g_0/0", "g_0/1", "g_0/2"]
    assert list(columns["finish_reason"]) == ["stop", "stop", "length"]
    assert len(set(columns["state_hash"])) == 3


@pytest.mark.parametrize("by_step", ["trajectory", "step"])
def test_an_environment_that_fails_leaves_a_row_without_an_action(by_step: str) -> None:
    def script(seed: int, actions: list[str]) -> dict[str, Any]:
        if len(actions) == seed:
            return {"observation": None, "error": "Traceback: boom", "is_timeout": seed == 1}
        return {"observation": "d", "reward": 1.0}

    specs = [spec("g_0", seed=0), spec("h_0", seed=1), spec("i_0", seed=2)]
    episodes, _, _ = play(script, worded("b!", "c!", "c!"), specs, env_manager_cls=by_step)
    data = rows(episodes)
    expect(data, 0, [0], [], [])
    expect(data, 1, [1, D, 1], [], [])
    expect(data, 2, [1, D, 1], [], [])
    columns = data.non_tensor_batch
    assert list(columns["reward_failed"]) == [True] * 3 and list(columns["stop"]) == ["failed"] * 3
    assert list(columns["env_error"]) == ["Traceback: boom"] * 3
    assert list(columns["env_timeout"]) == [False, True, False]
    assert data.batch["episode_scores"].tolist() == [0, 0, 0] and not data.batch["token_level_scores"].any()
    assert data.batch["num_turns"].tolist() == [0, 1, 2]


def test_every_column_is_in_the_schema_and_only_kept_episodes_have_rows() -> None:
    specs = [spec(f"g_{member}", group_size=2) for member in range(4)]
    episodes, _, _ = play(world(("x", 1.0)), worded("b!"), specs)
    data = rows(episodes)
    assert list(data.non_tensor_batch["traj_id"]) == ["g_0", "g_1"]
    assert list(data.non_tensor_batch["uid"]) == ["g", "g"] and data.non_tensor_batch["env_ids"].tolist() == [0, 1]
    names = [*data.batch.keys(), *data.non_tensor_batch]
    check(data, names, stage="rollout")
    for name in names:
        if name in data.batch.keys():
            assert str(data.batch[name].dtype) == f"torch.{column(name).dtype}", name
