"""The worlds: their rules by hand, their random maps solvable, the same seed the same world."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from tests.guess_number import GUESS_NUMBER
from verl_lite.envs import make_env
from verl_lite.envs.calculator import Calculator, evaluate
from verl_lite.envs.frozen_lake import FrozenLake
from verl_lite.envs.sokoban import Room, Sokoban, solution
from verl_lite.errors import UserError


def answer(word: str) -> str:
    return f"<answer>{word}</answer>"


# ------------------------------------------------------------------------------------------------------ FrozenLake


def test_the_lake_walked_by_hand() -> None:
    lake = FrozenLake(map_name="4x4")
    observation, info = lake.reset(0)
    assert observation == "P___\n_O_O\n___O\nO__G"
    assert info["env_instruction"].startswith("You are walking on a frozen lake.")
    observation, reward, terminated, truncated, info = lake.step(answer("up"))
    assert observation == "Moving Up changed nothing.\nP___\n_O_O\n___O\nO__G"
    assert info["metrics"] == {"action_is_valid": True, "action_is_effective": False, "success": False}
    observation, reward, terminated, truncated, info = lake.step("Right")
    assert observation.startswith("This is not an action. Actions are Left, Down, Right, Up.\nP___")
    assert not info["metrics"]["action_is_valid"] and not terminated
    for word in ("Down", "Down", "Right", "Right", "Down"):
        observation, reward, terminated, truncated, info = lake.step(answer(word))
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert observation.startswith(f"You moved {word}.\n")
    observation, reward, terminated, _, info = lake.step(answer("Right"))
    assert (reward, terminated, info["metrics"]["success"]) == (1.0, True, True)
    assert observation.splitlines()[1:] == ["____", "_O_O", "___O", "O__√"]


def test_slippery_ice_goes_astray_as_gymnasium_does() -> None:
    lake, theirs = FrozenLake(map_name="8x8", is_slippery=True), gymnasium.make("FrozenLake8x8-v1").unwrapped
    lake.reset(7)
    theirs.reset(seed=7)
    states = []
    for action in [2, 1, 2, 1, 2, 1]:
        lake.step(answer({2: "Right", 1: "Down"}[action]))
        states.append((int(lake.lake.s), int(theirs.step(action)[0])))  # type: ignore[union-attr]
    assert all(own == other for own, other in states)
    assert "slippery" in lake.instruction


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"map_name": "5x5"}, "map_name='5x5': expected one of 4x4, 8x8"),
        ({"desc": ["SF", "G"]}, "expected rows of equal length"),
        ({"desc": ["SG"], "map_name": "4x4"}, "and desc are both set"),
        ({"p": 0}, "p=0"),
        ({"size": 1}, "size=1"),
        ({"split": "val"}, "split='val': expected one of all, train, test"),
        ({"action_lookup": ["Left", "Right"]}, "expected names for the actions 0 to 3"),
        ({"render_mode": "rgb_array"}, "env_config.render_mode: frozen_lake has no such option"),
    ],
)
def test_bad_options_of_the_lake(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        make_env("frozen_lake", options)
    assert said in str(caught.value)


# --------------------------------------------------------------------------------------------------------- Sokoban


def by_hand() -> Sokoban:
    """A room of one line, to be pushed to the right."""
    env = Sokoban(feedback=False)
    env.reset(0)
    floor = {(1, column) for column in range(1, 6)}
    walls = frozenset((row, column) for row in range(3) for column in range(7)) - floor
    env.room = Room(3, 7, walls, frozenset({(1, 4)}), frozenset({(1, 3)}), (1, 1))
    env.boxes, env.player = env.room.boxes, env.room.player
    return env


def test_sokoban_played_by_hand() -> None:
    env = by_hand()
    assert env.rows() == ["#######", "#P_XO_#", "#######"]
    steps = [env.step(answer(word)) for word in ("Up", "Right", "nonsense")]
    assert [step[1] for step in steps] == [-0.1] * 3
    assert [step[4]["metrics"]["action_is_effective"] for step in steps] == [False, True, False]
    assert [step[4]["metrics"]["action_is_valid"] for step in steps] == [True, True, False]
    observation, reward, terminated, _, info = env.step(answer("Right"))
    assert observation.splitlines()[1] == "#__P√_#"
    assert (round(reward, 6), terminated, info["metrics"]["success"]) == (10.9, True, True)


def test_a_box_pushed_off_its_target_costs_and_two_in_a_row_do_not_move() -> None:
    env = by_hand()
    assert env.room is not None
    env.boxes, env.player = frozenset({(1, 4)}), (1, 3)
    assert env.step(answer("Right"))[1] == pytest.approx(-1.1)
    assert env.rows()[1] == "#___SX#"
    assert env.step(answer("Right"))[4]["metrics"]["action_is_effective"] is False  # a wall behind the box
    env.boxes, env.player = frozenset({(1, 3), (1, 4)}), (1, 2)
    assert env.step(answer("Right"))[4]["metrics"]["action_is_effective"] is False


@pytest.mark.parametrize(
    ("options", "rooms"),
    [({}, 60), ({"dim_room": [7, 8], "num_boxes": 2, "min_depth": 5}, 8), ({"min_depth": 3, "search_depth": 6}, 60)],
)
def test_every_room_is_solvable_within_its_depths(options: dict[str, Any], rooms: int) -> None:
    env = Sokoban(**options)
    for seed in range(rooms):
        room = env.room_of(seed)
        actions = solution(room)
        assert actions is not None and env.min_depth <= len(actions) <= env.search_depth
        assert len(room.boxes) == len(room.targets) == env.num_boxes
        env.reset(seed)
        assert env.parser.names is not None
        steps = [env.step(answer(env.parser.names[action])) for action in actions]
        assert [step[2] for step in steps] == [False] * (len(steps) - 1) + [True]
        to_push = env.num_boxes - len(room.boxes & room.targets)
        assert sum(step[1] for step in steps) == pytest.approx(10 + to_push - 0.1 * len(steps))


def test_the_same_seed_gives_the_same_world_and_the_parts_of_a_split_are_disjoint() -> None:
    rooms, other_rooms = ([Sokoban(split=split).room_of(seed) for seed in range(60)] for split in ("train", "test"))
    assert rooms == [Sokoban(split="train").room_of(seed) for seed in range(60)] and len(set(rooms)) > 55
    lakes, other_lakes, own = (
        [tuple(FrozenLake(p=0.7, split=split).map_of(seed)) for seed in range(150)]
        for split in ("train", "test", "all")
    )
    assert not set(rooms) & set(other_rooms) and not set(lakes) & set(other_lakes)
    # maps that are not in the other part are those without a split
    assert 0.68 < np.mean([one == other for one, other in zip(lakes, own, strict=True)]) < 0.92


def test_a_room_that_cannot_be_is_an_error() -> None:
    with pytest.raises(UserError, match="no room found in"):
        Sokoban(dim_room=[4, 4], num_boxes=1, min_depth=50).reset(0)
    for options in ({"dim_room": [3, 6]}, {"num_boxes": 0}, {"dim_room": [4, 4], "num_boxes": 3}, {"wall_share": 1}):
        with pytest.raises(UserError):
            make_env("sokoban", options)


# --------------------------------------------------------------------------------------------- calculator, guessing


def test_a_question_is_answered_with_the_tool() -> None:
    env = make_env("calculator", {"penalty_for_call": -0.1})
    question, _ = env.reset(5)
    assert question == "What is (80 - 33) * 95?"
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "80-33"}}</tool_call>'
    observation, reward, terminated, _, info = env.step(call)
    assert (observation, reward, terminated, info["use_tool"]) == ("47", -0.1, False, True)
    observation, _, _, _, info = env.step(call.replace("80-33", "1/0") + call.replace("calculator", "shell"))
    assert observation.splitlines()[0].startswith("Error: ") and "no tool 'shell'" in observation
    assert (info["metrics"]["tool_calls"], info["metrics"]["tool_errors"]) == (2, 2)
    observation, reward, terminated, _, info = env.step("it is 4465")
    assert (reward, terminated, info["metrics"]["action_is_valid"]) == (0.0, False, False)
    assert "use_tool" not in info
    assert env.step(answer("4,465"))[1:3] == (1.0, True)


def test_questions_have_whole_answers() -> None:
    env = make_env("calculator", {"operators": "+-*/", "terms": 5})
    for seed in range(200):
        env.reset(seed)
        question = env.expression  # type: ignore[attr-defined]
        assert eval(question) == evaluate(question) == int(evaluate(question))  # python's own precedence


def test_a_guess_is_answered_with_higher_or_lower() -> None:
    env = make_env(GUESS_NUMBER, {"low": 1, "high": 8, "penalty_for_guess": -0.125})
    env.reset(3)
    low, high, rewards, guesses = 1, 8, 0.0, 0
    while True:
        guess, guesses = (low + high) // 2, guesses + 1
        observation, reward, terminated, _, info = env.step(answer(str(guess)))
        rewards += reward
        if terminated:
            break
        assert info["metrics"]["action_is_effective"]
        low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
    assert guesses <= 4 and rewards == 1 - 0.125 * (guesses - 1)
    env.reset(3)
    assert not env.step(answer("99"))[4]["metrics"]["action_is_effective"]
    assert not env.step("one")[4]["metrics"]["action_is_valid"]


def test_a_calculator_that_could_not_evaluate_its_own_questions_is_refused() -> None:
    Calculator(terms=66, operators="+*", max_number=99).reset(0)
    with pytest.raises(UserError, match="terms=150, max_number=99: a question can have 897 characters.*takes 400"):
        Calculator(terms=150)
