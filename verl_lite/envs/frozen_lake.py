"""FrozenLake: from the start to the goal over the ice, not into a hole. Rules and maps are gymnasium's (toy_text).

P_O_      P you, _ ice, O hole, G goal; X: fell in, √: arrived
___O      reward 1 at the goal, else 0; both the goal and a hole end the episode
O___
_O_G
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl_lite.envs.actions import ANSWER_PATTERN, SPECIAL_TOKENS, Lookup
from verl_lite.envs.base import register_env
from verl_lite.envs.grid import GridEnv, check_split, in_split
from verl_lite.errors import UserError

if TYPE_CHECKING:
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymnasiumLake

ACTIONS = {0: "Left", 1: "Down", 2: "Right", 3: "Up"}
INSTRUCTION = (
    "You are walking on a frozen lake. Reach the goal and step into no hole. "
    "P is you, _ ice, O a hole, G the goal.{slippery} "
    "Answer with one move a turn: {actions}, for example <answer>{example}</answer>.\n"
)
SLIPPERY = " The ice is slippery: you may move to one side of where you wanted to go."
_MAPS_TRIED = 1_000
_NEXT_SEED = 1_000_003


@register_env("frozen_lake")
class FrozenLake(GridEnv):
    """The lake.

    desc: the map as rows of S, F, H, G; map_name: gymnasium's "4x4" or "8x8"; neither: a solvable map of size x size
    for each seed, in which a tile is ice with probability p. split: "train" or "test" use disjoint maps, where maps are
    random (one in five belongs to "test"). is_slippery: moves go astray with probability 1 - success_rate (gymnasium's
    default; here off). Other options: `GridEnv`.
    """

    def __init__(
        self,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = False,
        success_rate: float = 1 / 3,
        map_name: str | None = None,
        desc: Sequence[str] | None = None,
        split: str = "all",
        env_instruction: str | None = None,
        action_lookup: Lookup = ACTIONS,
        action_pattern: str = ANSWER_PATTERN,
        special_token_list: Sequence[str] = SPECIAL_TOKENS,
        feedback: bool = True,
        max_steps: int | None = None,
    ) -> None:
        self.size, self.p, self.split = size, p, check_split(split)
        if size < 2:
            raise UserError(f"size={size!r}: expected at least 2")
        if not 0 < p <= 1:
            raise UserError(f"p={p!r}: expected the share of ice, above 0 and at most 1")
        self.is_slippery, self.success_rate = is_slippery, success_rate
        self.fixed = _fixed_map(map_name, desc)
        self.lake: GymnasiumLake | None = None
        super().__init__(
            moves=ACTIONS,
            instruction=INSTRUCTION.replace("{slippery}", SLIPPERY if is_slippery else ""),
            example=2,
            env_instruction=env_instruction,
            action_lookup=action_lookup,
            action_pattern=action_pattern,
            special_token_list=special_token_list,
            feedback=feedback,
            max_steps=max_steps,
        )

    def map_of(self, seed: int) -> list[str]:
        """The map of this seed, rows of S, F, H, G."""
        if self.fixed is not None:
            return self.fixed
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        for attempt in range(_MAPS_TRIED):  # the seed's own map; of the other part: another one
            rows = [str(row) for row in generate_random_map(self.size, self.p, seed=seed + attempt * _NEXT_SEED)]
            if in_split(rows, self.split):
                return rows
        raise UserError(
            f"size={self.size}, p={self.p}, split={self.split!r}: none of {_MAPS_TRIED} maps belongs to this part; "
            "there are too few different maps: use a larger size, a lower p, or split=all"
        )

    def rows(self) -> list[str]:
        """What the agent sees."""
        lake = self._lake()
        letters = {b"S": "_", b"F": "_", b"H": "O", b"G": "G"}
        rows = [[letters[bytes(tile)] for tile in row] for row in lake.desc]
        row, column = divmod(int(lake.s), lake.ncol)
        rows[row][column] = {"_": "P", "O": "X", "G": "√"}[rows[row][column]]
        return ["".join(row) for row in rows]

    def _begin(self, seed: int) -> None:
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymnasiumLake

        rows = self.map_of(seed)
        self.lake = GymnasiumLake(desc=rows, is_slippery=self.is_slippery, success_rate=self.success_rate)
        self.lake.reset(seed=seed)

    def _move(self, action: Any) -> tuple[float, bool, bool]:
        lake = self._lake()
        before = lake.s
        _, reward, terminated, _, _ = lake.step(int(action))
        return float(reward), bool(terminated), bool(lake.s != before)

    def _succeeded(self) -> bool:
        lake = self._lake()
        row, column = divmod(int(lake.s), lake.ncol)
        return bytes(lake.desc[row, column]) == b"G"

    def _lake(self) -> GymnasiumLake:
        if self.lake is None:
            raise RuntimeError("step or render before reset")
        return self.lake


def _fixed_map(map_name: str | None, desc: Sequence[str] | None) -> list[str] | None:
    from gymnasium.envs.toy_text.frozen_lake import MAPS

    if desc is not None and map_name is not None:
        raise UserError(f"map_name={map_name!r} and desc are both given: choose one")
    if desc is not None:
        rows = [str(row) for row in desc]
        tiles = "".join(rows)
        if not rows or len({len(row) for row in rows}) > 1 or set(tiles) - set("SFHG") or tiles.count("S") != 1:
            raise UserError(f"desc={rows!r}: expected rows of equal length of S (once), F, H and G")
        return rows
    if map_name is None:
        return None
    if map_name not in MAPS:
        raise UserError(f"map_name={map_name!r}: expected one of {', '.join(MAPS)}, or null for random maps")
    return list(MAPS[map_name])
