"""The model of the agentic recipes, a random Qwen2 of 230,000 parameters, and its warm start on demonstrations.

The demonstrations are conversations of a player who knows a shortest path and always answers in the right format, but
makes random moves at a configured rate. They teach the format and a little of the game. The same seed gives the same
bytes.
"""

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl_lite.envs.base import EnvTemplate
from verl_lite.envs.grid import GridEnv

_STEPS = {0: (0, -1), 1: (1, 0), 2: (0, 1), 3: (-1, 0)}

Chat = list[dict[str, str]]
Player = Callable[[], int]
"""Returns the next move in the current state of its environment."""

WORDS = ("<answer>", "</answer>", "Left", "Down", "Right", "Up", "√")
"""Words with one token each: a turn of the agent, <answer>Right</answer>, has three tokens and the end token."""

SEED = 1
LAYERS, HIDDEN = 4, 64
RANDOM_SHARE, ROWS = 0.3, 192


def make_player(
    folder: Path,
    name: str,
    templates: dict[str, EnvTemplate],
    player: Callable[[random.Random], Callable[[GridEnv], Player]],
    *,
    number: int,
    steps: int,
    length: int,
) -> None:
    """Writes demonstrations.parquet, and the model after its warm start as model/, into `folder`.

    name: name of the recipe. number: number of conversations. steps: optimizer steps of the warm start. length: maximum
    number of tokens of a conversation.
    """
    from recipes.embedded import warm_start

    write_model(folder / "random", SEED)
    rng, file = random.Random(SEED), folder / "demonstrations.parquet"
    write_demonstrations(file, templates, player(rng), rng, number=number, random_share=RANDOM_SHARE)
    warm_start(folder, name, steps=steps, rows=ROWS, max_length=length, lr=3e-3)


def write_model(folder: Path, seed: int, *, layers: int = LAYERS, hidden: int = HIDDEN) -> None:
    """Writes the model before its warm start, and its tokenizer, into `folder`. The same seed gives the same bytes."""
    from recipes.embedded import byte_tokenizer, write_qwen2

    write_qwen2(folder, byte_tokenizer(WORDS), seed, layers=layers, hidden=hidden, widening=3)


def write_demonstrations(
    file: Path,
    templates: dict[str, EnvTemplate],
    player: Callable[[GridEnv], Player],
    rng: random.Random,
    *,
    number: int,
    random_share: float,
) -> None:
    """Plays `number` conversations, alternating between the templates, and writes their `pieces` as parquet.

    player: returns the player of an environment. random_share: share of random moves (some are right by chance).
    """
    worlds = []
    for template in templates.values():
        env = template.make()
        assert isinstance(env, GridEnv)
        worlds.append((template, env, clumsy(env, player(env), rng, random_share)))
    chats = (play(*worlds[place % len(worlds)], rng.randrange(2**31)) for place in range(number))
    rows = [{"messages": piece} for chat in chats for piece in pieces(chat, rng)]
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def pieces(chat: Chat, rng: random.Random) -> list[Chat]:
    """Splits a conversation into its single turns, and adds a piece with two or more of its last turns.

    The model learns to read the grid much faster from single turns than from conversations. The longer pieces teach it
    to use the last grid.
    """
    turns = [chat[start : start + 2] for start in range(0, len(chat), 2)]
    return [*turns, chat[-2 * rng.randint(2, 10) :]]


def clumsy(env: GridEnv, player: Player, rng: random.Random, random_share: float) -> Player:
    """Wraps a player so that a share `random_share` of its moves is random."""
    moves = sorted(env.names)

    def choose() -> int:
        return rng.choice(moves) if rng.random() < random_share else player()

    return choose


def play(template: EnvTemplate, env: GridEnv, player: Player, seed: int) -> Chat:
    """Plays an episode and returns it as the chat that the model would see, up to the final move."""
    observation, info = env.reset(seed)
    chat: Chat = []
    for turn in range(template.max_steps):
        instruction = str(info.get("env_instruction", "")) if turn == 0 else ""
        user = instruction + template.agent_template.format(observation=observation, suffix="")
        answer = f"<answer>{env.names[player()]}</answer>"
        chat += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        observation, _, terminated, truncated, info = env.step(answer)
        if terminated or truncated:
            break
    return chat


def lake_player(rng: random.Random) -> Callable[[GridEnv], Player]:
    """Returns a player who follows a random shortest path."""
    return lambda env: lambda: rng.choice(best_moves(env.rows()))


def best_moves(rows: list[str]) -> list[int]:
    """Returns the first moves of all shortest paths from P to G, or every move if there is no path."""
    cells = {(row, column): letter for row, line in enumerate(rows) for column, letter in enumerate(line)}
    start = next(cell for cell, letter in cells.items() if letter == "P")
    distance = {cell: 0 for cell, letter in cells.items() if letter == "G"}
    waiting = deque(distance)
    while waiting:
        row, column = cell = waiting.popleft()
        for down, right in _STEPS.values():
            before = (row - down, column - right)
            if cells.get(before) in ("_", "P") and before not in distance:
                distance[before] = distance[cell] + 1
                waiting.append(before)
    after = {action: distance.get((start[0] + down, start[1] + right)) for action, (down, right) in _STEPS.items()}
    known = [length for length in after.values() if length is not None]
    return [action for action, length in after.items() if length == min(known)] if known else list(_STEPS)
