"""The model of the agentic recipes, a random Qwen2 of 230,000 parameters, and its warm start on demonstrations.

The demonstrations are conversations of a player who knows a shortest path and always answers in the right format, but
makes random moves at a configured rate. They teach the format and a little of the game. The same seed gives the same
bytes.
"""

import random
from collections import deque
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl_lite.envs.base import EnvTemplate
from verl_lite.envs.grid import GridEnv

# the numbers of the actions are gymnasium's
_STEPS = {
    0: (0, -1),
    1: (1, 0),
    2: (0, 1),
    3: (-1, 0),
}
"""Rows down and columns to the right of each action."""

Cell = tuple[int, int]

Chat = list[dict[str, str]]
Player = Callable[[], int]
"""Returns the next move in the current state of its environment."""

PlayerOf = Callable[[GridEnv], Player]
"""Returns the player of an environment."""

WORDS = ("<answer>", "</answer>", "Left", "Down", "Right", "Up", "√")
"""Words with one token each: a turn of the agent, <answer>Right</answer>, has three tokens and the end token."""

SEED = 1
LAYERS = 4
HIDDEN = 64
RANDOM_SHARE = 0.3
"""Share of random moves; some of them are right by chance."""
ROWS = 192


def make_player(
    folder: Path,
    name: str,
    templates: dict[str, EnvTemplate],
    player: Callable[[random.Random], PlayerOf],
    *,
    number: int,
    steps: int,
    length: int,
) -> None:
    """Writes demonstrations.parquet, and the model after its warm start as model/, into `folder`.

    Args:
        folder: Folder of the files.
        name: Name of the recipe.
        templates: Environments in which the demonstrations are played.
        player: Returns, for random numbers, a function from an environment to its player.
        number: Number of conversations.
        steps: Optimizer steps of the warm start.
        length: Maximum number of tokens of a conversation.
    """
    from recipes.embedded import warm_start

    write_model(folder / "random", SEED)
    rng = random.Random(SEED)
    file = folder / "demonstrations.parquet"
    write_demonstrations(file, templates, player(rng), rng, number=number, random_share=RANDOM_SHARE)
    warm_start(folder, name, steps=steps, rows=ROWS, max_length=length, lr=3e-3)


def write_model(folder: Path, seed: int, *, layers: int = LAYERS, hidden: int = HIDDEN) -> None:
    """Writes the model before its warm start, and its tokenizer, into `folder`. The same seed gives the same bytes."""
    from recipes.embedded import byte_tokenizer, write_qwen2

    tokenizer = byte_tokenizer(WORDS)
    write_qwen2(folder, tokenizer, seed, layers=layers, hidden=hidden, widening=3)


def write_demonstrations(
    file: Path,
    templates: dict[str, EnvTemplate],
    player: PlayerOf,
    rng: random.Random,
    *,
    number: int,
    random_share: float,
) -> None:
    """Plays conversations, alternating between the templates, and writes their `pieces` as parquet.

    Args:
        file: The parquet file.
        templates: Environments by name.
        player: Returns the player of an environment.
        rng: Random numbers of the seeds, the random moves and the pieces.
        number: Number of conversations.
        random_share: Share of random moves.
    """
    worlds = []
    for template in templates.values():
        env = template.make()
        assert isinstance(env, GridEnv)
        clumsy_player = clumsy(env, player(env), rng, random_share)
        worlds.append((template, env, clumsy_player))

    rows = []
    for template, env, clumsy_player in islice(cycle(worlds), number):
        seed = rng.randrange(2**31)
        chat = play(template, env, clumsy_player, seed)
        rows += [{"messages": piece} for piece in pieces(chat, rng)]
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def pieces(chat: Chat, rng: random.Random) -> list[Chat]:
    """Splits a conversation into its single turns, and adds a piece with two or more of its last turns.

    The model learns to read the grid much faster from single turns than from conversations. The longer pieces teach it
    to use the last grid.
    """
    # a turn has two messages, one of the environment and one of the player
    turns = []
    for start in range(0, len(chat), 2):
        turns.append(chat[start : start + 2])

    last_turns = rng.randint(2, 10)
    end_of_chat = chat[-2 * last_turns :]
    return [*turns, end_of_chat]


def clumsy(env: GridEnv, player: Player, rng: random.Random, random_share: float) -> Player:
    """Wraps a player so that a share `random_share` of its moves is random."""
    # sorted, so that the draws do not depend on the order of the names
    moves = sorted(env.names)

    def choose() -> int:
        if rng.random() < random_share:
            return rng.choice(moves)
        return player()

    return choose


def play(template: EnvTemplate, env: GridEnv, player: Player, seed: int) -> Chat:
    """Plays an episode and returns it as the chat that the model would see, up to the final move."""
    observation, info = env.reset(seed)
    chat: Chat = []
    # only the first message of an episode has the instruction
    instruction = str(info.get("env_instruction", ""))
    for _ in range(template.max_steps):
        state = template.agent_template.format(observation=observation, suffix="")
        chat.append({"role": "user", "content": instruction + state})
        instruction = ""

        move = env.names[player()]
        answer = f"<answer>{move}</answer>"
        chat.append({"role": "assistant", "content": answer})
        observation, _, terminated, truncated, _ = env.step(answer)
        if terminated or truncated:
            break
    return chat


def lake_player(rng: random.Random) -> PlayerOf:
    """Returns a player who follows a random shortest path."""

    def player(env: GridEnv) -> Player:
        def choose() -> int:
            moves = best_moves(env.rows())
            return rng.choice(moves)

        return choose

    return player


def best_moves(rows: list[str]) -> list[int]:
    """Returns the first moves of all shortest paths from P to G, or every move if there is no path."""
    cells: dict[Cell, str] = {}
    for row, line in enumerate(rows):
        for column, letter in enumerate(line):
            cells[row, column] = letter
    [(start_row, start_column)] = [cell for cell, letter in cells.items() if letter == "P"]
    distances = _distances_to_goal(cells)

    # a neighbour without a distance is a hole, outside the lake, or cut off from the goal
    lengths = {}
    for action, (down, right) in _STEPS.items():
        neighbor = (start_row + down, start_column + right)
        if neighbor in distances:
            lengths[action] = distances[neighbor]
    if not lengths:
        return list(_STEPS)
    shortest = min(lengths.values())
    return [action for action, length in lengths.items() if length == shortest]


def _distances_to_goal(cells: dict[Cell, str]) -> dict[Cell, int]:
    """Returns the number of moves to G from each cell that can reach it, by a breadth-first search from G."""
    distances = {cell: 0 for cell, letter in cells.items() if letter == "G"}
    waiting = deque(distances)
    while waiting:
        cell = waiting.popleft()
        row, column = cell
        for down, right in _STEPS.values():
            previous = (row - down, column - right)
            is_passable = cells.get(previous) in ("_", "P")
            if is_passable and previous not in distances:
                distances[previous] = distances[cell] + 1
                waiting.append(previous)
    return distances
