"""FrozenLake: walk over the ice from the start to the goal and avoid holes. Rules and maps of gymnasium (toy_text).

P_O_      P you, _ ice, O hole, G goal; X: fell in, √: arrived
___O      reward 1 at the goal, else 0; both the goal and a hole end the episode
O___
_O_G
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from verl_lite.envs.base import register_env
from verl_lite.envs.grid import GridEnv
from verl_lite.errors import UserError

if TYPE_CHECKING:
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymnasiumLake

TASK = "You are walking on a frozen lake. Reach the goal and step into no hole. P is you, _ ice, O a hole, G the goal."
SLIPPERY = " The ice is slippery: you may move to one side of where you wanted to go."
_MAPS_TRIED = 1_000
# so large that neighbouring seeds do not try the same maps
_NEXT_SEED = 1_000_003


@register_env("frozen_lake")
@dataclass(eq=False, kw_only=True)
class FrozenLake(GridEnv):
    """The lake. `GridEnv` describes the other options.

    Without `desc` and `map_name`, each seed has a solvable map, and `split` selects among these maps.

    Args:
        size: number of rows and of columns of a random map.
        p: probability of ice for a tile of a random map.
        is_slippery: True to move sideways with probability 1 - success_rate (the default of gymnasium, but not here).
        success_rate: probability of the wanted direction on slippery ice.
        map_name: gymnasium's map "4x4" or "8x8".
        desc: map as rows of S, F, H, G.
    """

    moves: ClassVar = {0: "Left", 1: "Down", 2: "Right", 3: "Up"}
    example: ClassVar = 2

    size: int = 4
    p: float = 0.8
    is_slippery: bool = False
    success_rate: float = 1 / 3
    map_name: str | None = None
    desc: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 2:
            raise UserError(f"size={self.size!r}: expected at least 2")
        if not 0 < self.p <= 1:
            raise UserError(f"p={self.p!r}: expected the share of ice, above 0 and at most 1")
        self.fixed = _fixed_map(self.map_name, self.desc)
        self.lake: GymnasiumLake

    def _task(self) -> str:
        if self.is_slippery:
            return TASK + SLIPPERY
        return TASK

    def map_of(self, seed: int) -> list[str]:
        """Returns the map of this seed as rows of S, F, H, G."""
        if self.fixed is not None:
            return self.fixed
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        # the map of the seed, or the next map in this split
        for attempt in range(_MAPS_TRIED):
            random_map = generate_random_map(self.size, self.p, seed=seed + attempt * _NEXT_SEED)
            rows = [str(row) for row in random_map]
            if self._is_in_split(rows):
                return rows
        raise UserError(
            f"size={self.size}, p={self.p}, split={self.split!r}: none of {_MAPS_TRIED} maps is in this split, because "
            "there are too few different maps; use a larger size, a lower p, or split=all"
        )

    def rows(self) -> list[str]:
        """Returns the map with the player, as the agent sees it."""
        letter_of_tile = {b"S": "_", b"F": "_", b"H": "O", b"G": "G"}
        grid = []
        for tiles in self.lake.desc:
            letters = [letter_of_tile[bytes(tile)] for tile in tiles]
            grid.append(letters)

        letter_with_player = {"_": "P", "O": "X", "G": "√"}
        row, column = self._player()
        letter = grid[row][column]
        grid[row][column] = letter_with_player[letter]
        return ["".join(letters) for letters in grid]

    def _player(self) -> tuple[int, int]:
        """Returns the row and the column of the player."""
        return divmod(int(self.lake.s), self.lake.ncol)

    def _begin(self, seed: int) -> None:
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymnasiumLake

        rows = self.map_of(seed)
        self.lake = GymnasiumLake(desc=rows, is_slippery=self.is_slippery, success_rate=self.success_rate)
        # the seed also determines in which direction the player slips
        self.lake.reset(seed=seed)

    def _move(self, action: int) -> tuple[float, bool, bool]:
        before = self.lake.s
        # this class never truncates; only gymnasium.make adds a limit of steps
        _, reward, terminated, _, _ = self.lake.step(action)
        is_effective = bool(self.lake.s != before)
        return float(reward), bool(terminated), is_effective

    def _succeeded(self) -> bool:
        tile = self.lake.desc[self._player()]
        return bytes(tile) == b"G"


def _fixed_map(map_name: str | None, desc: Sequence[str] | None) -> list[str] | None:
    """Returns the map that the options set, or None for random maps."""
    from gymnasium.envs.toy_text.frozen_lake import MAPS

    if desc is not None:
        if map_name is not None:
            raise UserError(f"map_name={map_name!r} and desc are both set; remove one of them")
        rows = [str(row) for row in desc]
        tiles = "".join(rows)
        widths = {len(row) for row in rows}
        has_unknown_tile = bool(set(tiles) - set("SFHG"))
        if len(widths) != 1 or has_unknown_tile or tiles.count("S") != 1:
            raise UserError(f"desc={rows!r}: expected rows of equal length of S (once), F, H and G")
        return rows
    if map_name is None:
        return None
    if map_name not in MAPS:
        raise UserError(f"map_name={map_name!r}: expected one of {', '.join(MAPS)}, or null for random maps")
    return list(MAPS[map_name])
