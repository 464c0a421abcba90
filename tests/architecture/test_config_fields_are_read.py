"""Every option is read by some code: an option that nothing reads would be a lie to whoever sets it.

A walk over the source, not a run: attribute accesses in `verl_lite/`, `workers/` and `trainer/`, outside the files that
load, check and print the configuration. Names that several sections share (`n`, `seed`, `path`) count only where the
object is known to be that section: by annotation, by assignment from a known one, or by the section's name before it.
"""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections import Counter
from pathlib import Path

import pytest

from verl_lite import config as config_module
from verl_lite.config import PPOConfig, RunOptions, ScoreConfig, schema_of
from verl_lite.config import diffusion as diffusion_config
from verl_lite.config import flow_grpo as flow_grpo_config

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("verl_lite", "workers", "trainer", "recipes")
ONLY_SHOWN = (
    "verl_lite/config/",
    "trainer/planner/",
    "trainer/diffusion_plan.py",
)
"""How paths begin of modules that load, check, plan with or show options; a value that only they read has no effect."""

READS = ("verl_lite/config/rollout_correction.py",)
"""What of these makes numbers of options for the code that computes with them."""

READ_BY_THE_LOADER = {"recipe": "the loader overlays the recipe that it names"}

Reads = set[tuple[str, str]]
"""(class of options, field) pairs that some code reads."""

CLASSES: dict[str, type] = {
    name: value
    for module in (config_module, diffusion_config, flow_grpo_config)
    for name, value in vars(module).items()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
    if all("doc" in field.metadata for field in dataclasses.fields(value))
}
FIELDS: dict[str, dict[str, str | None]] = {
    name: {field: hint.__name__ if dataclasses.is_dataclass(hint) else None for field, hint in hints.items()}
    for name, hints in ((name, typing.get_type_hints(cls)) for name, cls in CLASSES.items())
}
"""For each class its fields, with the class of those that are sections."""

SEEN_AS = {
    RunOptions.__name__: {
        name: typing.get_type_hints(part.fget)["return"].__name__
        for name, part in vars(RunOptions).items()
        if isinstance(part, property) and part.fget is not None and name != "recipe"
    }
}
"""The same for what code takes that serves several commands."""

_PARTS = {part for fields in FIELDS.values() for part in fields.values()}
_BASES = {base for cls in CLASSES.values() for base in cls.__mro__[1:]}
ROOTS = [cls for name, cls in CLASSES.items() if name not in _PARTS and cls not in (*_BASES, ScoreConfig)]
"""Classes that are part of no other, and that none builds on: the options of whole
commands that train."""

OWN = {name: {f for f in FIELDS[name] if f in vars(cls)["__annotations__"]} for name, cls in CLASSES.items()}
"""The fields that each class itself declares; the others it has from a class that it builds on."""

_OWNERS = Counter(field for fields in OWN.values() for field in fields)
SECTION_OF = {field: cls for fields in reversed(FIELDS.values()) for field, cls in fields.items() if cls is not None}
"""What a section's name alone stands for: where several commands have one of that name, that of the first."""

UNMISTAKABLE = {field: name for name, fields in OWN.items() for field in fields if _OWNERS[field] == 1 and "_" in field}
"""Field names that no other class of options has and that are long enough to be no one else's."""


class _Reader(ast.NodeVisitor):
    """Collects the options that one module reads, following annotations and assignments."""

    def __init__(self) -> None:
        self.reads: Reads = set()
        self.scopes: list[dict[str, str]] = [{}]
        self.attributes: list[dict[str, str]] = [{}]

    def type_of(self, node: ast.AST) -> str | None:
        """The class of options that an expression is known to have; of a union, all with ` | ` between."""
        if isinstance(node, ast.Name):
            known = next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), None)
            # `kl_ctrl` can be nothing else than that section; `data` or `model` can.
            return known or (SECTION_OF.get(node.id) if "_" in node.id else None)
        if isinstance(node, ast.Attribute):
            owner = self.type_of(node.value)
            if owner is not None:
                sections = ((FIELDS | SEEN_AS)[one].get(node.attr) for one in owner.split(" | "))
                return next(filter(None, sections), None)
            if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in self.attributes[-1]:
                return self.attributes[-1][node.attr]
            return SECTION_OF.get(node.attr)
        if isinstance(node, ast.IfExp):
            return self.type_of(node.body) or self.type_of(node.orelse)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
            return node.func.id
        return None

    def annotated(self, annotation: ast.expr | None) -> str | None:
        if annotation is None:
            return None
        words = {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)}
        words |= {n.value for n in ast.walk(annotation) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        return " | ".join(sorted(words & {*CLASSES, *SEEN_AS})) or None

    def bind(self, target: ast.expr, value: str | None) -> None:
        if value is None:
            return
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = value
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            self.attributes[-1][target.attr] = value

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.attributes.append({})
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                known = self.annotated(statement.annotation)
                if known is not None:
                    self.attributes[-1][statement.target.id] = known
        # What __init__ assigns is known in every method, wherever it stands.
        constructor = [s for s in node.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"]
        for statement in constructor:
            self.visit(statement)
        self.generic_visit(node)
        self.attributes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        types = {argument.arg: self.annotated(argument.annotation) for argument in arguments}
        self.scopes.append({name: known for name, known in types.items() if known is not None})
        self.generic_visit(node)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for part, value in zip(target.elts, node.value.elts, strict=False):
                    self.bind(part, self.type_of(value))
            else:
                self.bind(target, self.type_of(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self.bind(node.target, self.annotated(node.annotation))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.note(self.type_of(node.value), node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        literal = node.args[1] if len(node.args) > 1 else None
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and isinstance(literal, ast.Constant):
            self.note(self.type_of(node.args[0]), str(literal.value))
        self.generic_visit(node)

    def note(self, owner: str | None, field: str) -> None:
        if owner in SEEN_AS:  # read for every command that has these sections
            self.reads |= {(name, field) for name, fields in FIELDS.items() if fields.keys() >= SEEN_AS[owner].keys()}
            return
        if owner is not None and any(field in FIELDS.get(one, {}) for one in owner.split(" | ")):
            self.reads |= {(one, field) for one in owner.split(" | ") if field in FIELDS.get(one, {})}
        elif field in UNMISTAKABLE:
            self.reads.add((UNMISTAKABLE[field], field))


def reads_of(source: str) -> Reads:
    """The (class, field) pairs that a piece of source reads."""
    reader = _Reader()
    reader.visit(ast.parse(source))
    return reader.reads


def steps(root: type, path: tuple[str, ...]) -> list[tuple[str, str]]:
    """The (class, field) pairs on the way from the root to a leaf."""
    owner, found = root.__name__, []
    for part in path:
        found.append((owner, part))
        owner = FIELDS[owner][part] or ""
    return found


def lineage(owner: str, field: str) -> set[str]:
    """The classes that have the field, of a class and those it builds on: code that takes the one that declares it
    reads it for all that build on that one."""
    return {cls.__name__ for cls in CLASSES[owner].__mro__ if field in FIELDS.get(cls.__name__, {})}


def unread(root: type, reads: Reads) -> list[str]:
    """Keys of which some step is read by nobody."""
    # A section may be handed over whole, under a name of its own; a read of its fields is then proof enough for those
    # classes that stand in one place, while one that stands in several (fsdp_config) has to be taken from each.
    places = Counter(cls for fields in FIELDS.values() for cls in fields.values() if cls is not None)
    missing = []
    for name, key in schema_of(root).keys.items():
        *sections, leaf = steps(root, key.path)
        taken = all(
            places[FIELDS[owner][field] or ""] == 1 or any((cls, field) in reads for cls in lineage(owner, field))
            for owner, field in sections
        )
        is_read = any((cls, leaf[1]) in reads for cls in lineage(*leaf))
        if not (is_read and taken) and name not in READ_BY_THE_LOADER:
            missing.append(name)
    return missing


@pytest.fixture(scope="module")
def reads() -> Reads:
    found: Reads = set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name in READS or not name.startswith(ONLY_SHOWN):
                found |= reads_of(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.__name__)
def test_every_option_is_read_by_some_code(root: type, reads: Reads) -> None:
    missing = unread(root, reads)
    assert not missing, (
        f"{len(missing)} options have no effect: no code outside the configuration reads\n  "
        + "\n  ".join(missing)
        + "\nRead them, or delete them from verl_lite/config/."
    )


# --- the walk itself ---------------------------------------------------------------------------------------------


def test_the_walk_follows_annotations_assignments_and_names() -> None:
    source = """
from verl_lite.config import PPOConfig, RolloutConfig, FSDPConfig

class Worker:
    optim: "OptimConfig | None"

    def later(self):
        return self.rollout.top_p, self.optim.eps

    def __init__(self, config: RolloutConfig, whole: PPOConfig):
        self.rollout = config
        data, trainer = whole.data, whole.trainer
        print(data.seed, trainer.backend, getattr(config, "top_k"))

def other(cfg, settings: FSDPConfig | None = None):
    cfg.rollout.val_kwargs.n
    cfg.clip_ratio_low
    kl_ctrl.horizon
    data.shuffle
    device.type
    x.n
    settings.param_offload
    cfg.trainer.nnodes = 3
"""
    assert reads_of(source) >= {
        ("RolloutConfig", "top_p"),
        ("RolloutConfig", "top_k"),
        ("OptimConfig", "eps"),
        ("DataConfig", "seed"),
        ("TrainerConfig", "backend"),
        ("RolloutConfig", "val_kwargs"),
        ("ValKwargs", "n"),
        ("ActorConfig", "clip_ratio_low"),
        ("FSDPConfig", "param_offload"),
        ("KLControlConfig", "horizon"),
    }
    assert not reads_of(source) & {
        ("KLControlConfig", "type"),
        ("RolloutConfig", "n"),
        ("DataConfig", "shuffle"),
        ("TrainerConfig", "seed"),
        ("TrainerConfig", "nnodes"),
    }


def test_an_option_that_nobody_reads_is_listed() -> None:
    everything = {step for key in schema_of(PPOConfig).keys.values() for step in steps(PPOConfig, key.path)}
    assert unread(PPOConfig, everything) == []
    assert unread(PPOConfig, everything - {("TrainerConfig", "seed")}) == ["trainer.seed"]
    without_ref = unread(PPOConfig, everything - {("RefConfig", "fsdp_config")})
    assert "ref.fsdp_config.param_offload" in without_ref and "actor.fsdp_config.param_offload" not in without_ref
