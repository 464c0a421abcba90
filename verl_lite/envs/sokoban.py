"""Sokoban: push the boxes onto the targets. Rooms are generated backward from the solved position, so all are solvable.

######    P you, # wall, _ floor, O target, X box, √ box on a target, S you on a target
#_P_##
#_X__#    rewards of gym-sokoban: -0.1 per step, +1 for a box pushed onto a target, -1 for a box pushed off a target,
#__O_#    +10 when all boxes are on targets, which ends the episode
######
"""

import itertools
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from verl_lite.envs.base import register_env
from verl_lite.envs.grid import GridEnv
from verl_lite.errors import UserError

DIRECTIONS = {1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1)}
TASK = (
    "You are solving a Sokoban puzzle: push every box onto a target. You can push one box, and pull none. "
    "P is you, # a wall, _ floor, O a target, X a box, √ a box on a target, S you on a target."
)
_STATES_MAX = 20_000
_ROOMS_TRIED = 1_000

Cell = tuple[int, int]
"""(row, column)."""
State = tuple[Cell, frozenset[Cell]]
"""(player, boxes)."""


@dataclass(frozen=True)
class Room:
    """A room in its initial state.

    Attributes:
        height, width: size of the room, walls included.
        walls: all wall cells, the border included.
        targets: cells onto which the boxes must be pushed.
        boxes: cells with a box.
        player: cell of the player.
    """

    height: int
    width: int
    walls: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell


@register_env("sokoban")
@dataclass(eq=False, kw_only=True)
class Sokoban(GridEnv):
    """A room with `num_boxes` boxes. `GridEnv` describes the other options, and the module the rewards.

    Args:
        dim_room: height and width, walls included.
        search_depth, min_depth: maximum and minimum number of moves in the shortest solution.
        wall_share: share of wall cells among the inner cells.
    """

    moves: ClassVar = {1: "Up", 2: "Down", 3: "Left", 4: "Right"}
    example: ClassVar = 4

    dim_room: Sequence[int] = (6, 6)
    num_boxes: int = 1
    search_depth: int = 100
    min_depth: int = 1
    wall_share: float = 0.2
    penalty_for_step: float = -0.1
    reward_box_on_target: float = 1.0
    penalty_box_off_target: float = -1.0
    reward_finished: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.dim_room
        num_boxes = self.num_boxes
        if isinstance(size, str) or len(size) != 2 or min(size) < 4:
            raise UserError(f"dim_room={size!r}: expected [height, width] of at least 4, walls included")
        # each box has a cell, one cell is the player's, and one is free
        inner_cells = (size[0] - 2) * (size[1] - 2)
        if num_boxes < 1 or num_boxes + 2 > inner_cells:
            raise UserError(f"num_boxes={num_boxes!r}: expected at least 1, and fewer than fit dim_room={list(size)}")
        if not 1 <= self.min_depth <= self.search_depth:
            depths = f"min_depth={self.min_depth!r}, search_depth={self.search_depth!r}"
            raise UserError(f"{depths}: expected 1 <= min <= search")
        if not 0 <= self.wall_share < 1:
            raise UserError(f"wall_share={self.wall_share!r}: expected a share from 0 to less than 1")
        self.room: Room
        self.boxes: frozenset[Cell]
        self.player: Cell

    def _task(self) -> str:
        return TASK

    def room_of(self, seed: int) -> Room:
        """Returns the room of this seed. Raises UserError if no room fits the options."""
        # from the seed alone, because all episodes of a group must get the same room
        rng = random.Random(seed)
        height, width = self.dim_room
        depths = (self.min_depth, self.search_depth)
        for _ in range(_ROOMS_TRIED):
            room = random_room(rng, height, width, self.num_boxes, self.wall_share, depths)
            if room is None:
                continue
            rows = _draw(room, room.player, room.boxes)
            if self._is_in_split(rows):
                return room
        raise UserError(
            f"sokoban: no room found in {_ROOMS_TRIED} attempts with dim_room={[height, width]}, "
            f"num_boxes={self.num_boxes}, depth {depths[0]} to {depths[1]}, wall_share={self.wall_share}: "
            "use a larger room, fewer boxes or a lower min_depth"
        )

    def rows(self) -> list[str]:
        """Returns the room in its current state, as the agent sees it."""
        return _draw(self.room, self.player, self.boxes)

    def _begin(self, seed: int) -> None:
        self.room = self.room_of(seed)
        self.boxes = self.room.boxes
        self.player = self.room.player

    def _idle(self) -> float:
        return self.penalty_for_step

    def _move(self, action: int) -> tuple[float, bool, bool]:
        after = move(self.room, self.player, self.boxes, DIRECTIONS[action])
        if after is None:
            return self.penalty_for_step, False, False
        on_target_before = len(self.boxes & self.room.targets)
        self.player, self.boxes = after
        on_target = len(self.boxes & self.room.targets)

        reward = self.penalty_for_step
        if on_target > on_target_before:
            reward += self.reward_box_on_target
        elif on_target < on_target_before:
            reward += self.penalty_box_off_target
        is_solved = self._succeeded()
        if is_solved:
            reward += self.reward_finished
        return reward, is_solved, True

    def _succeeded(self) -> bool:
        return self.boxes == self.room.targets


def move(room: Room, player: Cell, boxes: frozenset[Cell], direction: Cell) -> State | None:
    """Returns the player and boxes after a step or a push; None if a wall or a second box blocks the way."""
    ahead = _next_cell(player, direction)
    if ahead in room.walls:
        return None
    if ahead not in boxes:
        return ahead, boxes
    beyond = _next_cell(ahead, direction)
    if beyond in room.walls or beyond in boxes:
        return None
    return ahead, (boxes - {ahead}) | {beyond}


def _next_cell(cell: Cell, direction: Cell) -> Cell:
    return cell[0] + direction[0], cell[1] + direction[1]


def solution(room: Room) -> list[int] | None:
    """Returns the actions of a shortest solution, by breadth-first search; None if the room has no solution."""
    start: State = (room.player, room.boxes)
    # the positions that were seen, with the way back to the start
    predecessors: dict[State, tuple[State, int] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        player, boxes = state
        if boxes == room.targets:
            return _actions_to(state, predecessors)
        for action, direction in DIRECTIONS.items():
            after = move(room, player, boxes, direction)
            if after is not None and after not in predecessors:
                predecessors[after] = (state, action)
                waiting.append(after)
    return None


def _actions_to(state: State, predecessors: Mapping[State, tuple[State, int] | None]) -> list[int]:
    """Returns the actions from the start to a state.

    Args:
        state: the state.
        predecessors: by state, the previous state and the action that leads on from there; None for the start.
    """
    actions = []
    step = predecessors[state]
    while step is not None:
        state, action = step
        actions.append(action)
        step = predecessors[state]
    return actions[::-1]


def random_room(
    rng: random.Random, height: int, width: int, num_boxes: int, wall_share: float, depths: tuple[int, int]
) -> Room | None:
    """Draws a room whose shortest solution takes depths[0] to depths[1] moves; returns None if the draw has none.

    Draws walls and targets, then searches all ways to pull the boxes off the targets, breadth first. The depth at which
    the search finds a position is the length of its shortest solution.
    """
    cells = list(itertools.product(range(height), range(width)))
    inner = list(itertools.product(range(1, height - 1), range(1, width - 1)))
    open_cells = {cell for cell in inner if rng.random() >= wall_share}
    # the player cannot reach the other parts
    floor = _connected(open_cells)
    if len(floor) < num_boxes + 2:
        return None
    walls = frozenset(cells) - floor
    # sorted, because the order of a set is not defined, and a seed must give the same room in every process
    targets = frozenset(rng.sample(sorted(floor), num_boxes))
    # the player can be anywhere: the search reads only the walls and the targets
    solved_room = Room(height, width, walls, targets, boxes=targets, player=min(floor))

    least, most = depths
    # sorted for the same reason as the floor
    free_cells = sorted(floor - targets)
    depth_of = _solvable_positions(solved_room, free_cells)
    states = []
    for state, depth in depth_of.items():
        # depth 0 is solved
        if depth > 0 and least <= depth <= most:
            states.append(state)
    if not states:
        return None
    player, boxes = rng.choice(states)
    return Room(height, width, walls, targets, boxes, player)


def _solvable_positions(room: Room, players: list[Cell]) -> dict[State, int]:
    """Returns positions from which the room can be solved, with the number of moves. Stops at about `_STATES_MAX`.

    Args:
        room: the room, with the boxes on the targets.
        players: cells of the player at the end of a solution.
    """
    depth_of: dict[State, int] = {(player, room.targets): 0 for player in players}
    waiting = deque(depth_of)
    while waiting and len(depth_of) < _STATES_MAX:
        state = waiting.popleft()
        player, boxes = state
        for down, right in DIRECTIONS.values():
            back = (player[0] - down, player[1] - right)
            ahead = (player[0] + down, player[1] + right)
            if back in room.walls or back in boxes:
                continue
            # the previous move was a step, or a push of the box that is now ahead
            previous_states: list[State] = [(back, boxes)]
            if ahead in boxes:
                boxes_before_push = (boxes - {ahead}) | {player}
                previous_states.append((back, boxes_before_push))
            for previous in previous_states:
                # a position that is solved already needs no moves
                is_solved = previous[1] == room.targets
                if previous not in depth_of and not is_solved:
                    depth_of[previous] = depth_of[state] + 1
                    waiting.append(previous)
    return depth_of


def _connected(cells: set[Cell]) -> frozenset[Cell]:
    """Returns the largest connected part of the cells."""
    unvisited = set(cells)
    largest: frozenset[Cell] = frozenset()
    while unvisited:
        part = set()
        # from the first cell, so that the choice between parts of one size is the same in every process
        waiting = [min(unvisited)]
        while waiting:
            cell = waiting.pop()
            if cell not in unvisited:
                continue
            unvisited.remove(cell)
            part.add(cell)
            for direction in DIRECTIONS.values():
                waiting.append(_next_cell(cell, direction))
        largest = max(largest, frozenset(part), key=len)
    return largest


def _draw(room: Room, player: Cell, boxes: frozenset[Cell]) -> list[str]:
    """Returns the rows of a room, with the letters that the module describes."""

    def letter(cell: Cell) -> str:
        if cell in room.walls:
            return "#"
        is_target = cell in room.targets
        if cell == player:
            return "S" if is_target else "P"
        if cell in boxes:
            return "√" if is_target else "X"
        return "O" if is_target else "_"

    rows = []
    for row in range(room.height):
        letters_of_row = [letter((row, column)) for column in range(room.width)]
        rows.append("".join(letters_of_row))
    return rows
