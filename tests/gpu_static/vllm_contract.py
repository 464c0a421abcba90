"""What vLLM's GPU wheels have of what this project touches, kept as `vllm_contract.json`; to test it needs no wheel.

    python -m tests.gpu_static.vllm_contract [--wheels FOLDER]

reads the wheels of FOLDER, or else downloads each version (0.3 GB at a time) into a temporary folder, and writes the
file anew. Only Python source is read, by its syntax tree; nothing of a wheel is run. For each thing that
`vllm_touches` finds in our source it says what each version has of it: the parameters of a function or method, or how
else a name is there.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tests.gpu_static.vllm_touches import ENVIRONMENT, Touch, touches_of_project

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_suffix(".json")
VERSIONS = ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
Members = dict[str, str]
"""Parameters of a method such as `prompt, *, limit=...`, "field" for an argument of a class without an own __init__,
else "name"."""


class Found(NamedTuple):
    """A definition, and the module it stands in."""

    module: str
    node: ast.AST


class Source:
    """The Python files of an installed package or a wheel.

    root: the folder that holds `vllm/`, or such a path within a zip file.
    """

    def __init__(self, root: Path | zipfile.Path) -> None:
        self._root = root
        self._trees: dict[str, ast.Module | None] = {}

    @cached_property
    def torch(self) -> str:
        """The version of torch that the wheel pins."""
        [metadata] = [entry for entry in self._root.iterdir() if re.fullmatch(r"vllm-.*\.dist-info", entry.name)]
        text = (metadata / "METADATA").read_text(encoding="utf-8")
        return re.search(r"^Requires-Dist: torch==([\w.]+)", text, re.MULTILINE)[1]

    def members(self, key: str) -> Members:
        """Of `module:name` or `module`; of a function {"()": its parameters}; empty if there is no such thing."""
        module, _, name = key.partition(":")
        found = self._find(module, name) if name else self._whole(module)
        if found is None:
            return {}
        match found.node:
            case ast.Module():
                names = dict(self._names(found.module)).items()
                of = {name: parameters(node, False) for name, node in names if isinstance(node, ast.FunctionDef)}
                return {name: "name" for name, node in names if not isinstance(node, ast.Import | ast.ImportFrom)} | of
            case ast.FunctionDef():
                return {"()": parameters(found.node, False)}
            case ast.Constant():
                return {"": "name"}
            case ast.Subscript():  # Literal[...]
                return {each.value: "name" for each in ast.walk(found.node.slice) if isinstance(each, ast.Constant)}
        return self._of_class(found)

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            base, tree = self._root.joinpath(*module.split(".")), None
            for path in (base / "__init__.py", base.parent / f"{base.name}.py"):
                tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else tree
            self._trees[module] = tree
        return self._trees[module]

    def _whole(self, module: str) -> Found | None:
        tree = self._tree(module)
        return None if tree is None else Found(module, tree)

    def _names(self, module: str) -> Iterator[tuple[str, ast.AST]]:
        """What a module's own statements define, also under an `if` or `try`, and keys of its tables of names."""
        pending = list((self._tree(module) or ast.Module([], [])).body)
        for statement in pending:
            match statement:
                case ast.If() | ast.Try():
                    pending += [each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)]
                case ast.FunctionDef() | ast.ClassDef():
                    yield statement.name, statement
                case ast.Import() | ast.ImportFrom():
                    yield from ((alias.asname or alias.name, statement) for alias in statement.names)
                case ast.Assign() | ast.AnnAssign():
                    for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                        yield ast.unparse(target), statement.value or statement
                    if isinstance(statement.value, ast.Dict):
                        yield from (
                            (key.value, value)
                            for key, value in zip(statement.value.keys, statement.value.values, strict=True)
                            if isinstance(key, ast.Constant) and isinstance(key.value, str)
                        )

    def _find(self, module: str, name: str) -> Found | None:
        """Follows imports, other names of the same, tables of lazy imports, and instances to their class."""
        for each, node in self._names(module):
            if each != name:
                continue
            match node:
                case ast.ImportFrom():
                    parts = module.split(".") if self._is_package(module) else module.split(".")[:-1]
                    base = parts[: len(parts) + 1 - node.level] if node.level else []
                    origin = ".".join([*base, *([node.module] if node.module else [])])
                    [original] = [alias.name for alias in node.names if (alias.asname or alias.name) == name]
                    return self._find(origin, original) or self._whole(f"{origin}.{original}")
                case ast.Name():
                    return self._find(module, node.id)
                case ast.Call(func=ast.Name()):
                    return self._find(module, node.func.id)
                case ast.Constant() if ":" in str(node.value):  # ".outputs:RequestOutput"
                    origin, _, original = node.value.partition(":")
                    return self._find(module + origin, original)
                case ast.FunctionDef() | ast.ClassDef() | ast.Subscript() | ast.Constant():
                    return Found(module, node)
        return self._whole(f"{module}.{name}")

    def _is_package(self, module: str) -> bool:
        return self._root.joinpath(*module.split("."), "__init__.py").is_file()

    def _of_class(self, found: Found) -> Members:
        """Also inherited ones, and what any of its methods sets on itself."""
        members: Members = {}
        for base in reversed(getattr(found.node, "bases", [])):
            base = base.value if isinstance(base, ast.Subscript) else base
            inherited = self._find(found.module, base.id) if isinstance(base, ast.Name) else None
            if inherited is not None and isinstance(inherited.node, ast.ClassDef):
                members |= self._of_class(inherited)
        for statement in getattr(found.node, "body", []):
            match statement:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    decorators = {ast.unparse(each) for each in statement.decorator_list}
                    is_value = decorators & {"property", "cached_property", "functools.cached_property"}
                    members[statement.name] = "name" if is_value else parameters(statement, True)
                case ast.AnnAssign(target=ast.Name()):
                    members[statement.target.id] = "field"
                case ast.Assign():
                    members |= {ast.unparse(target): "name" for target in statement.targets}
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    if ast.unparse(node.value) == "self":
                        members.setdefault(node.attr, "name")
        return members


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, of_class: bool) -> str:
    """As its definition says them, without annotations, without self or cls, each default as `...`."""
    given = copy.deepcopy(function.args)
    is_static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if argument is not None:
            argument.annotation = None
    if of_class and not is_static:
        (given.posonlyargs or given.args).pop(0)
    given.defaults = [ast.Constant(...) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(...) for default in given.kw_defaults]
    return ast.unparse(given)


def broken(touches: Iterable[Touch], members: Callable[[str], Members]) -> list[str]:
    """What a version lacks of what is touched, a sentence each."""
    problems = []
    for touch in touches:
        found = members(touch.key)
        if touch.is_guarded or touch.key == ENVIRONMENT:  # a variable that a version does not read does no harm
            continue
        what = f"{touch.place}: {touch.key} has no {touch.member or 'place'}"
        if touch.member == "()" and "()" not in found:  # a class
            found = found | ({"()": found["__init__"]} if "__init__" in found else {})
        if touch.member == "()" and "()" not in found:
            unknown = sorted(name for name in (touch.call or (0, frozenset()))[1] if found.get(name) != "field")
            problems += [f"{what} with {', '.join(unknown)}"] if unknown or not found else []
        elif not (found if touch.member == "" else touch.member in found):
            problems.append(what)
        elif touch.call is not None and (told := refused(found[touch.member], touch.call)):
            problems.append(f"{what} that is called so: {told}")
    return problems


def refused(given: str, call: tuple[int, frozenset[str]]) -> str:
    """Why a function of such parameters cannot be called with so many arguments and these names; empty if it can."""
    if given in ("name", "field"):
        return ""  # a value that is called
    function = eval(f"lambda {given}: None")
    try:
        inspect.signature(function).bind(*range(call[0]), **dict.fromkeys(call[1]))
    except TypeError as error:
        return f"{error}; it takes ({given})"
    return ""


def contract_of(source: Source, touches: Iterable[Touch]) -> dict[str, Members]:
    """What is touched of each key, as far as the source has it; a key that it lacks is left out."""
    wanted: dict[str, set[str]] = {}
    for touch in touches:
        names = wanted.setdefault(touch.key, {"()"})
        names |= {touch.member, "__init__"} if touch.member == "()" else {touch.member}
        names |= touch.call[1] if touch.call and touch.member == "()" else set()
    members = {key: source.members(key) for key in wanted}
    kept = {key: {name: has[name] for name in sorted(wanted[key] & has.keys())} for key, has in members.items() if has}
    return {key: has or {"": "name"} for key, has in sorted(kept.items())}


def wheels(folder: Path | None) -> Iterator[tuple[str, Source]]:
    """(version, its files) of each version, from a folder of wheels or of unpacked ones, or downloaded."""
    for version in VERSIONS:
        if folder is not None and (folder / version).is_dir():
            yield version, Source(folder / version)
            continue
        with tempfile.TemporaryDirectory() as place:
            at = folder or Path(place)
            if folder is None:
                command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, f"vllm=={version}"]
                command += [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (31, 28)]
                subprocess.run([*command, "--python-version=3.12"], check=True)
            [wheel] = at.glob(f"vllm-{version}-*.whl")
            yield version, Source(zipfile.Path(wheel))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, or of a folder for each version; else PyPI's")
    touches, data = touches_of_project(), {}
    for version, source in wheels(parser.parse_args().wheels):
        data[version] = {"torch": source.torch, "has": contract_of(source, touches)}
        problems = broken(touches, lambda key, has=data[version]["has"]: has.get(key, {}))  # type: ignore[misc]
        print(f"vLLM {version}, torch {source.torch}: {len(touches) - len(problems)} of {len(touches)} touches hold")
        print("".join(f"  {problem}\n" for problem in problems), end="")
    DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
