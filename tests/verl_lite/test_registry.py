"""Registry: names, paths, collisions, and errors that say what would have been right."""

import os.path
from enum import Enum

import pytest

from verl_lite.registry import Registry, accepts, takes


def first() -> str:
    return "first"


def second() -> str:
    return "second"


class Name(Enum):
    ONE = "one"


@pytest.fixture
def registry() -> Registry:
    made: Registry = Registry("thing")
    assert made.register("vanilla", needs="x")(first) is first and made.register(Name.ONE)(second) is second
    return made


def test_names_enums_and_paths_are_found(registry: Registry) -> None:
    assert registry.get_fn("vanilla") is first and registry.get_fn("one") is registry.get_fn(Name.ONE) is second
    assert registry.facts == {"vanilla": {"needs": "x"}}
    assert registry.get_fn("os.path:join") is os.path.join
    assert registry.get_fn("collections:OrderedDict.fromkeys")("ab") == {"a": None, "b": None}


def test_the_same_object_again_is_fine_another_is_refused(registry: Registry) -> None:
    registry.register("vanilla")(first)
    with pytest.raises(ValueError, match=r"thing 'vanilla' is already registered as .*first.*second.* another name"):
        registry.register("vanilla")(second)
    assert registry["vanilla"] is first


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vanila", "Unknown thing: vanila; did you mean vanilla. Known: one, vanilla"),
        ("VANILLA", "Unknown thing: VANILLA"),  # case matters
        ("no_such_package.mod:f", "cannot be imported.*Expected pkg.module:object"),
        ("os.path:no_such_function", "cannot be imported"),
        (":f", "cannot be imported"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(registry: Registry, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        registry.get_fn(name)


def test_what_a_function_takes_is_what_it_names() -> None:
    def plain(a, *, b=None): ...

    def anything(a, **others): ...

    assert takes(plain, "b") and takes(anything, "a") and not takes(plain, "c") and not takes(anything, "b")
    assert accepts(plain, "b") and accepts(anything, "b") and not accepts(plain, "c")
