"""Registry: names, paths, collisions, and errors that say what would have been right."""

from enum import Enum

import pytest

from verl_lite.registry import Registry, accepts, takes


def first() -> str:
    return "first"


def second() -> str:
    return "second"


class Name(Enum):
    ONE = "one"


def test_register_returns_the_object_and_get_fn_finds_it():
    registry: Registry = Registry("thing")
    assert registry.register("a")(first) is first and registry.register(Name.ONE)(second) is second
    assert registry.get_fn("a") is first and registry.get_fn("one") is registry.get_fn(Name.ONE) is second


def test_same_object_again_is_fine_another_raises_with_both_named():
    registry: Registry = Registry("thing")
    registry.register("a")(first)
    registry.register("a")(first)
    with pytest.raises(ValueError, match=r"thing 'a' is already registered as .*first.*second.* needs another name"):
        registry.register("a")(second)
    assert registry["a"] is first


def test_unknown_name_lists_known_and_nearest_and_case_matters():
    registry: Registry = Registry("policy loss")
    registry.register("vanilla")(first)
    registry.register("gspo")(second)
    with pytest.raises(ValueError, match=r"Unknown policy loss: vanila; did you mean vanilla. Known: gspo, vanilla"):
        registry.get_fn("vanila")
    with pytest.raises(ValueError, match="Unknown policy loss: GSPO"):
        registry.get_fn("GSPO")
    with pytest.raises(ValueError, match="Known: none"):
        Registry("empty").get_fn("x")


def test_path_is_imported_and_a_wrong_one_names_the_cause():
    registry: Registry = Registry("thing")
    assert registry.get_fn("os.path:join") is __import__("os").path.join
    assert registry.get_fn("collections:OrderedDict.fromkeys")("ab") == {"a": None, "b": None}
    for path in ("no_such_package.mod:f", "os.path:no_such_function", ":f"):
        with pytest.raises(ValueError, match=r"cannot be imported.*Expected pkg.module:object"):
            registry.get_fn(path)


def test_what_a_function_takes_is_what_it_names():
    def plain(a, *, b=None): ...

    def anything(a, **others): ...

    assert takes(plain, "b") and takes(anything, "a") and not takes(plain, "c") and not takes(anything, "b")
    assert accepts(plain, "b") and accepts(anything, "b") and not accepts(plain, "c")
