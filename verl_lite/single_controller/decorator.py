"""`@register`: how a call on a worker group is split into one call per rank, and how the results are combined.

Dispatch modes split batches (`DataProto`) into parts; a batch that does not divide evenly is padded with rows of weight
zero. All other arguments, lists included, are passed unchanged to all ranks unless they are a `PerRank`. The length of
an argument never decides how it is passed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Protocol, TypedDict, TypeVar

from verl_lite.batch import wire
from verl_lite.protocol import DataProto, chunk_bounds

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., object])

REGISTRATION = "__verl_lite_registration__"


class PerRank(list[T]):
    """A list of one entry per rank: rank i receives entry i."""


@dataclass(frozen=True)
class WorkerArguments:
    """The arguments of a method: those of the call on the group, or those that one rank receives."""

    positional: tuple[object, ...]
    keywords: dict[str, object]

    @property
    def values(self) -> list[object]:
        """All arguments, positional ones first."""
        return [*self.positional, *self.keywords.values()]

    def map(self, convert: Callable[[object], object]) -> "WorkerArguments":
        """Returns the arguments with `convert` applied to each value."""
        positional = tuple(map(convert, self.positional))
        keywords = {name: convert(value) for name, value in self.keywords.items()}
        return WorkerArguments(positional, keywords)


@dataclass(frozen=True)
class Mesh:
    """The data-parallel layout of the ranks.

    Attributes:
        dp_size: number of parts into which a batch is split.
        dp_rank: by rank, the index of the part that the rank gets.
        is_collect: by rank, True if the rank's result is used.
    """

    dp_size: int
    dp_rank: tuple[int, ...]
    is_collect: tuple[bool, ...]

    @property
    def collecting(self) -> list[int]:
        """Ranks whose results are used, in the order of their parts."""
        ranks = [rank for rank, collects in enumerate(self.is_collect) if collects]
        return sorted(ranks, key=lambda rank: self.dp_rank[rank])


class RankGroup(Protocol):
    """The properties of a worker group that dispatch functions use."""

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str) -> Mesh: ...


@dataclass
class Dispatched:
    """The calls of all ranks, and how their results are combined.

    Attributes:
        calls: arguments of each rank.
        collect: ranks whose results are used, in order.
        rows: number of rows of the caller's batch.
        padding: number of rows that were added at its end.
        has_new_column: True if the dispatch added the column is_padding to the batch.
    """

    calls: list[WorkerArguments]
    collect: list[int]
    rows: int = 0
    padding: int = 0
    has_new_column: bool = False


@dataclass(frozen=True)
class DispatchMode:
    """A pair of functions that split a call and combine the results.

    Attributes:
        name: name of the mode in error messages.
        dispatch: returns the calls of the ranks for the arguments of a call on the group.
        combine: returns the result of the call for the results of the collecting ranks.
        splits: True if batches are split.
        rank_zero: True if only rank 0 is called.
    """

    name: str
    dispatch: Callable[[RankGroup, WorkerArguments], Dispatched]
    combine: Callable[[RankGroup, list[object], Dispatched], object]
    splits: bool = False
    rank_zero: bool = False


UserDispatch = Callable[..., Sequence[tuple[tuple[object, ...], Mapping[str, object]]]]
"""A user's function that splits a call: (group, *args, **kwargs) -> [(args, kwargs) for each rank]."""

UserCollect = Callable[..., object]
"""A user's function that combines results: (group, results in rank order) -> result of the call."""


class UserDispatchMode(TypedDict):
    """A dispatch mode written as a dict, as in verl. `register_dispatch_mode` describes the functions."""

    dispatch_fn: UserDispatch
    collect_fn: UserCollect


class Execute(Enum):
    """The ranks that run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


def unpacked(value: object) -> object:
    """Unpacks a packed batch; returns any other value unchanged."""
    if isinstance(value, wire.Packed):
        return DataProto.from_packed(value)
    return value


def _calls_of_ranks(
    world_size: int, arguments: WorkerArguments, value_for: Callable[[int, object], object]
) -> list[WorkerArguments]:
    """Returns the arguments of each rank.

    Args:
        world_size: number of ranks.
        arguments: arguments of the call on the group.
        value_for: (rank, value of an argument) -> value that the rank receives.

    Raises:
        ValueError: if a PerRank does not have one entry per rank.
    """
    for value in arguments.values:
        if isinstance(value, PerRank) and len(value) != world_size:
            raise ValueError(
                f"PerRank has {len(value)} entries, the group has {world_size} ranks: give one entry per rank"
            )
    return [arguments.map(partial(value_for, rank)) for rank in range(world_size)]


def _entry(rank: int, value: object) -> object:
    """Returns the rank's entry of a PerRank, and any other value, lists included, unchanged."""
    if isinstance(value, PerRank):
        return value[rank]
    return value


def _one_to_all(group: RankGroup, arguments: WorkerArguments) -> Dispatched:
    """Calls all ranks with the same arguments, or with their entries of a PerRank."""
    size = group.world_size
    calls = _calls_of_ranks(size, arguments, _entry)
    return Dispatched(calls, collect=list(range(size)))


def _lists(group: RankGroup, arguments: WorkerArguments) -> Dispatched:
    """Calls each rank with its entry of each argument."""
    return _one_to_all(group, arguments.map(_as_per_rank))


def _as_per_rank(value: object) -> PerRank[object]:
    if not isinstance(value, Iterable):
        raise TypeError(f"DP_COMPUTE takes a list of one entry per rank for each argument, found {value!r}")
    return PerRank(value)


def _split(mesh: Mesh, arguments: WorkerArguments) -> Dispatched:
    """Splits every batch among the arguments over the mesh. Ranks with the same dp_rank receive the same object."""
    # by identity, so that a batch that is passed as two arguments is packed and sent once
    batches: dict[int, DataProto] = {}
    for value in arguments.values:
        if isinstance(value, DataProto):
            batches[id(value)] = value
    sizes = {len(batch) for batch in batches.values()}
    if len(sizes) != 1:
        raise ValueError(
            f"a dispatch mode that splits needs at least one DataProto among the arguments, and all of them with the "
            f"same number of rows; found rows {sorted(sizes)}"
        )
    [rows] = sizes
    padding = -rows % mesh.dp_size
    # `pad` adds the column only together with rows; a column of the caller stays in the result
    has_column_of_caller = any("is_padding" in batch for batch in batches.values())
    has_new_column = padding > 0 and not has_column_of_caller

    # Each part is cut once. Tensor or sequence parallel ranks get the same object, which the transport sends once.
    parts: dict[int, list[wire.Packed]] = {}
    for key, batch in batches.items():
        packed = batch.pad(mesh.dp_size).pack()
        bounds = chunk_bounds(packed.rows, mesh.dp_size)
        parts[key] = [packed.slice(start, stop) for start, stop in bounds]

    def value_for(rank: int, value: object) -> object:
        if id(value) not in parts:
            return _entry(rank, value)
        part = mesh.dp_rank[rank]
        return parts[id(value)][part]

    calls = _calls_of_ranks(len(mesh.dp_rank), arguments, value_for)
    return Dispatched(calls, mesh.collecting, rows, padding, has_new_column)


def _split_flat(group: RankGroup, arguments: WorkerArguments) -> Dispatched:
    """Splits every batch into one part per rank."""
    size = group.world_size
    flat = Mesh(dp_size=size, dp_rank=tuple(range(size)), is_collect=(True,) * size)
    return _split(flat, arguments)


def _as_list(group: RankGroup, results: list[object], dispatched: Dispatched) -> list[object]:
    return [unpacked(result) for result in results]


def _single(group: RankGroup, results: list[object], dispatched: Dispatched) -> object:
    return unpacked(results[0])


def _concat(group: RankGroup, results: list[object], dispatched: Dispatched) -> DataProto:
    """Concatenates the parts and removes the padding rows of the dispatch."""
    parts = []
    wrong = set()
    for result in results:
        if isinstance(result, wire.Packed):
            parts.append(result)
        else:
            wrong.add(type(result).__name__)
    if wrong:
        raise TypeError(
            f"answers that are concatenated must be a DataProto on each collecting rank, found {sorted(wrong)}"
        )
    batch = DataProto.from_parts(parts)
    if dispatched.padding == 0 or len(batch) == 0:
        return batch

    # A method may return several rows for each row, for example the samples of a prompt. If their number is the same
    # for all rows, those of the padding are the last ones.
    rows_per_row, rest = divmod(len(batch), dispatched.rows + dispatched.padding)
    if rest:
        raise ValueError(
            f"the ranks returned {len(batch)} rows for {dispatched.rows} and {dispatched.padding} of padding: "
            "they cannot be told apart, return a fixed number of rows for each row"
        )
    batch = batch.slice(0, dispatched.rows * rows_per_row)
    if dispatched.has_new_column and "is_padding" in batch:
        batch.pop(["is_padding"])
    return batch


class Dispatch:
    """The dispatch modes. `register_dispatch_mode` adds more.

    ONE_TO_ALL: passes the same arguments to all ranks and returns a list of results.
    ALL_TO_ALL: the same, for PerRank arguments.
    RANK_ZERO: calls only rank 0 and returns its result.
    DP_COMPUTE: takes lists with one entry per rank and returns a list of results.
    DP_COMPUTE_PROTO: splits batches over all ranks and returns one batch.
    DP_COMPUTE_METRIC: splits batches over all ranks and returns a list of results.
    DP_MP_DISPATCH_FIRST: ROLL's name of DP_COMPUTE_PROTO if each rank is the first rank of its model, as here.
    """

    ONE_TO_ALL = DispatchMode("ONE_TO_ALL", _one_to_all, _as_list)
    ALL_TO_ALL = DispatchMode("ALL_TO_ALL", _one_to_all, _as_list)
    RANK_ZERO = DispatchMode("RANK_ZERO", _one_to_all, _single, rank_zero=True)
    DP_COMPUTE = DispatchMode("DP_COMPUTE", _lists, _as_list)
    DP_COMPUTE_PROTO = DispatchMode("DP_COMPUTE_PROTO", _split_flat, _concat, splits=True)
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC", _split_flat, _as_list, splits=True)
    DP_MP_DISPATCH_FIRST = DispatchMode("DP_MP_DISPATCH_FIRST", _split_flat, _concat, splits=True)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str, concat: bool = True) -> DispatchMode:
    """Returns a mode that splits batches over a mesh registered with `Worker.register_mesh` and returns one batch.

    Ranks with the same dp_rank (tensor or sequence parallel ranks) receive the same part, which is stored once. The
    results of the collecting ranks are concatenated in the order of their parts; concat=False returns them as a list.
    """

    def dispatch(group: RankGroup, arguments: WorkerArguments) -> Dispatched:
        # looked up at each call, because the workers register the mesh after this decorator has run
        mesh = group.mesh(mesh_name)
        return _split(mesh, arguments)

    combine = _concat if concat else _as_list
    return DispatchMode(f"nd_compute({mesh_name})", dispatch, combine, splits=True)


def register_dispatch_mode(name: str, dispatch_fn: UserDispatch, collect_fn: UserCollect) -> DispatchMode:
    """Registers a user's dispatch mode as `Dispatch.<name>`.

    Args:
        name: name of the mode.
        dispatch_fn: (group, *args, **kwargs) -> [(args, kwargs) for each rank].
        collect_fn: (group, results in rank order) -> result.

    Raises:
        ValueError: if the name is already used.
    """
    if hasattr(Dispatch, name):
        raise ValueError(f"dispatch mode {name!r} exists already")
    mode = _user_mode(name, dispatch_fn, collect_fn)
    setattr(Dispatch, name, mode)
    return mode


def _user_mode(name: str, dispatch_fn: UserDispatch, collect_fn: UserCollect) -> DispatchMode:
    """Adapts the two functions of a user, which know neither `WorkerArguments` nor packed batches."""

    def dispatch(group: RankGroup, arguments: WorkerArguments) -> Dispatched:
        size = group.world_size
        calls = dispatch_fn(group, *arguments.positional, **arguments.keywords)
        if len(calls) != size:
            raise ValueError(f"dispatch mode {name!r} gave {len(calls)} calls for {size} ranks")
        calls_of_ranks = []
        for args, kwargs in calls:
            calls_of_ranks.append(WorkerArguments(tuple(args), dict(kwargs)))
        # the user's collect_fn gets the results of all ranks and chooses itself, as in verl
        return Dispatched(calls_of_ranks, collect=list(range(size)))

    def combine(group: RankGroup, results: list[object], dispatched: Dispatched) -> object:
        return collect_fn(group, list(map(unpacked, results)))

    return DispatchMode(name, dispatch, combine)


@dataclass(frozen=True)
class Registration:
    """The arguments of `@register`, stored on the method."""

    dispatch_mode: DispatchMode
    blocking: bool
    clear_cache: bool


def register(
    dispatch_mode: DispatchMode | UserDispatchMode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    clear_cache: bool = False,
) -> Callable[[Method], Method]:
    """Makes a worker's method callable on its worker group, as a decorator. The method itself is unchanged.

    Args:
        dispatch_mode: a `Dispatch.X`, or {"dispatch_fn": ..., "collect_fn": ...} as for `register_dispatch_mode`.
        execute_mode: RANK_ZERO runs the method on rank 0 only and returns its result instead of a list.
        blocking: False = calls return a future. Can be overridden per call: `group.method(..., blocking=False)`.
        clear_cache: True = release the device's cached memory after the method.

    Raises:
        TypeError: if `dispatch_mode` is neither a mode nor a dict of two functions.
        ValueError: if a mode that splits batches is combined with RANK_ZERO.
    """
    if isinstance(dispatch_mode, Mapping):
        dispatch_mode = _user_mode("custom", dispatch_mode["dispatch_fn"], dispatch_mode["collect_fn"])
    if not isinstance(dispatch_mode, DispatchMode):
        raise TypeError(f"dispatch_mode must be a Dispatch.X or a dict of two functions, found {dispatch_mode!r}")
    if execute_mode is Execute.RANK_ZERO:
        if dispatch_mode.splits:
            raise ValueError(f"Execute.RANK_ZERO with {dispatch_mode.name} would lose all parts but the first")
        dispatch_mode = replace(dispatch_mode, combine=_single, rank_zero=True)

    def mark(method: Method) -> Method:
        setattr(method, REGISTRATION, Registration(dispatch_mode, blocking, clear_cache))
        return method

    return mark
