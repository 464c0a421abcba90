"""What this project touches of vLLM, read from its own source.

A value that comes from vLLM is followed through assignments, loops and calls: each attribute, argument and method of it
is a touch. What a syntax tree cannot know stands in two tables: RESULTS, of what class an attribute or a method's
result is, and VARIABLES, of what class a parameter is. A value of no known class may be kept or handed on; to touch it
is a touch of the key UNKNOWN, which no contract has.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("recipes", "trainer", "verl_lite", "workers")

ENGINE, CLIENT = "vllm:LLMEngine", "vllm.v1.engine.core_client:InprocClient"
CORE, SCHEDULER = "vllm.v1.engine.core:EngineCore", "vllm.v1.core.sched.scheduler:Scheduler"
EXECUTOR = "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher"
OUTPUT, COMPLETION = "vllm:RequestOutput", "vllm:CompletionOutput"
PROCESSOR = "vllm.v1.engine.output_processor:OutputProcessor"
STATE = "vllm.v1.engine.output_processor:RequestState"
REGISTRY, MODEL = "vllm:ModelRegistry", "vllm.model_executor.models.registry:_LazyRegisteredModel"
WORKER, RUNNER = "vllm.v1.worker.gpu_worker:Worker", "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
LAYER = "vllm.model_executor.layers.attention:Attention"
HEAD = "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding"
METHOD = "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase"
EXPERTS = "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase"
STATE_OF_GROUPS = "vllm.distributed:parallel_state"

RESULTS: dict[str, str | None] = {
    "vllm:sampling_params.RequestOutputKind": "vllm.sampling_params:RequestOutputKind",
    f"{ENGINE}.from_engine_args": ENGINE,
    f"{ENGINE}.step": OUTPUT,
    f"{ENGINE}.renderer": "vllm.renderers:BaseRenderer",
    f"{ENGINE}.engine_core": CLIENT,
    f"{ENGINE}.output_processor": PROCESSOR,
    f"{PROCESSOR}.request_states": STATE,
    f"{STATE}.make_request_output": OUTPUT,
    f"{OUTPUT}.outputs": COMPLETION,
    f"{COMPLETION}.logprobs": "vllm.logprobs:FlatLogprobs",
    f"{COMPLETION}.routed_experts": None,
    f"{CLIENT}.engine_core": CORE,
    f"{CLIENT}._finalizer": None,
    f"{CORE}.model_executor": EXECUTOR,
    f"{CORE}.scheduler": SCHEDULER,
    f"{SCHEDULER}.aux_output_connector": None,
    f"{REGISTRY}.models": MODEL,
    f"{EXECUTOR}.vllm_config": "vllm.config:VllmConfig",
    "vllm.config:VllmConfig.device_config": "vllm.config:DeviceConfig",
    "vllm.config:DeviceConfig.device": None,
    f"{WORKER}.model_runner": RUNNER,
    f"{WORKER}.vllm_config": "vllm.config:VllmConfig",
    "vllm.config:VllmConfig.cache_config": "vllm.config:CacheConfig",
    "vllm.config:VllmConfig.compilation_config": "vllm.config:CompilationConfig",
    "vllm.config:VllmConfig.model_config": "vllm.config:ModelConfig",
    f"{LAYER}.attn_backend": "vllm.v1.attention.backend:AttentionBackend",
    "vllm.config:CompilationConfig.static_forward_context": None,
    f"{RUNNER}.get_model": None,
    f"{HEAD}.quant_method": METHOD,
    f"{STATE_OF_GROUPS}._WORLD": "vllm.distributed.parallel_state:GroupCoordinator",
}
"""The class of an attribute, of a method's result, or of what either holds. None: not vLLM's."""

VARIABLES = {
    "_store": {"output": OUTPUT},
    "read_candidates": {"result": COMPLETION},
    "read_routes": {"output": OUTPUT},
    "disable_expert_recording": {"core": CLIENT},
    "summarize_engine": {"worker": WORKER, "cache": "vllm.config:CacheConfig", "layer": LAYER},
    "repack_tied_head": {"worker": WORKER, "head": HEAD},
    "unpack_experts": {"worker": WORKER, "method": EXPERTS},
    "has_stale_experts": {"worker": WORKER, "method": EXPERTS},
    "_shut_down_within_process_group": {"core": CLIENT},
}
"""The classes of a function's parameters and variables."""

REMOTE = {"collective_rpc": (WORKER, RUNNER, RUNNER_V2)}
"""Methods that take the name of another method and its `kwargs`, and the classes that have that one."""

CHOICES = {"logprobs_mode": "vllm.config.model:LogprobsMode"}
"""Arguments of which vLLM lists the values."""

ENVIRONMENT, UNKNOWN = "vllm.envs", "?"


class Touch(NamedTuple):
    """A use of `member` of `key` (`module` or `module:name`); of "" the thing itself, of "()" a call of it.

    call: (number of arguments, names of others). is_guarded: the code goes on where there is no such member.
    """

    key: str
    member: str
    place: str
    call: tuple[int, frozenset[str]] | None = None
    is_guarded: bool = False


def touches_of_project() -> list[Touch]:
    """Of all product files."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return [touch for path in paths for touch in touches(path.read_text(), str(path.relative_to(ROOT)))]


def touches(text: str, file: str) -> list[Touch]:
    """Of one file, given as its source; also the environment variables of vLLM that it names."""
    reader = _Reader(file, ast.parse(text)) if re.search("vllm|VLLM_", text) else None
    return reader.found if reader else []


class _Reader:
    """Reads a file in its order. `_known` has the class of each name and of each `self.name`."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.found: list[Touch] = []
        self._file = file
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self._known: dict[str, str | None] = {}
        self._function = ""
        self._read(tree)

    def _read(self, node: ast.AST) -> str | None:
        """Notes what it touches; returns the class of an expression's value, None if it is not vLLM's."""
        match node:
            case ast.Import():
                names = [alias.asname or alias.name for alias in node.names]
                self._known |= {name: "vllm" for name in names if name == "vllm"}
            case ast.ImportFrom() if (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    self._known[alias.asname or alias.name] = self._touched(node, f"{node.module}:{alias.name}", "")
            case ast.Constant(value=str(text)) if re.fullmatch("VLLM_[A-Z0-9_]+", text):
                self._touched(node, ENVIRONMENT, text)
            case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]) if text.startswith("VLLM_"):
                self._touched(node, UNKNOWN, text)
            case ast.ClassDef():
                self._read_class(node)
            case ast.FunctionDef():
                outer, self._function, known = self._function, node.name, self._known
                self._known = known | VARIABLES.get(node.name, {})
                self._read_all(node.body)
                attributes = {name: key for name, key in self._known.items() if name.startswith("self.")}
                self._function, self._known = outer, known | attributes
            case ast.Assign() | ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                key = self._read(node.value)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._bind(target, key)
                return key
            case ast.For() | ast.comprehension():
                self._bind(node.target, self._read(node.iter))
                self._read_all([*getattr(node, "body", []), *getattr(node, "ifs", [])])
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                self._read_all(node.generators)
                return self._read(node.elt)
            case ast.IfExp():
                return [self._read(part) for part in (node.test, node.orelse, node.body)][-1]
            case ast.Subscript():
                self._read(node.slice)
                return self._read(node.value)
            case ast.Name():
                return self._known.get(node.id)
            case ast.Attribute():
                return self._attribute(node, node.value, node.attr)
            case ast.Call():
                return self._called(node)
            case _:
                self._read_all(ast.iter_child_nodes(node))
        return None

    def _read_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self._read(node)

    def _read_class(self, node: ast.ClassDef) -> None:
        """What a class of ours overrides has to be there, with the same arguments."""
        outer = self._known.get("self")
        for base in map(self._read, node.bases):
            self._known["self"] = base
            for method in node.body if base else []:
                count = len(method.args.args) - 1 if isinstance(method, ast.FunctionDef) else 0
                self._touched(method, base, getattr(method, "name", ""), (count, frozenset()))
        self._read_all(node.body)
        self._known["self"] = outer

    def _bind(self, target: ast.expr, key: str | None) -> None:
        name = ast.unparse(target)
        if isinstance(target, ast.Name) or (name.startswith("self.") and self._known.get("self") is None):
            self._known[name] = VARIABLES.get(self._function, {}).get(name, key)
        else:
            self._read(target)

    def _attribute(self, node: ast.AST, owner: ast.expr, name: str, **details: Any) -> str | None:
        path, key = f"{ast.unparse(owner)}.{name}", self._read(owner)
        if key is None or path in self._known:
            return self._known.get(path)
        return self._touched(node, key, name, **details)

    def _called(self, node: ast.Call) -> str | None:
        self._read_all([*node.args, *(keyword.value for keyword in node.keywords)])
        entries = [entry for each in node.keywords for entry in self._entries(each.arg, each.value)]
        for name, value in entries:
            if name in CHOICES and isinstance(value, ast.Constant):
                self._touched(value, CHOICES[name], str(value.value))
        call = len(node.args), frozenset(name for name, _ in entries)
        match node:
            case ast.Call(func=ast.Name("getattr" | "hasattr" as which), args=[owner, ast.Constant(name), *default]):
                return self._attribute(node, owner, name, is_guarded=which == "hasattr" or bool(default))
            case ast.Call(func=ast.Attribute(attr=method)):
                if method in REMOTE and node.args and isinstance(node.args[0], ast.Constant):
                    given = [
                        entry
                        for each in node.keywords
                        if each.arg == "kwargs"
                        for entry in self._entries(None, each.value)
                    ]
                    for key in REMOTE[method]:
                        self._touched(node, key, node.args[0].value, (0, frozenset(name for name, _ in given)))
                if self._read(node.func.value) in ("vllm",):
                    return self._touched(node, f"vllm:{method}", "()", call)
                return self._attribute(node, node.func.value, method, call=call)
            case _:
                key = self._read(node.func)
                return key and self._touched(node, key, "()", call)

    def _touched(
        self,
        node: ast.AST,
        key: str,
        member: str,
        call: tuple[int, frozenset[str]] | None = None,
        is_guarded: bool = False,
    ) -> str | None:
        """Notes it; returns the class of what it gives."""
        if key == "vllm":  # the package's attributes are things of their own
            key, member = f"vllm:{member}", ""
        self.found.append(Touch(key, member, f"{self._file}:{node.lineno}", call, is_guarded))
        return key if member in ("", "()") else RESULTS.get(f"{key}.{member}", UNKNOWN)

    def _entries(self, name: str | None, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        """Of a keyword argument: itself, or of `**value` all that this file says to be in it."""
        match value:
            case _ if name is not None:
                yield name, value
            case ast.Dict():
                for key, each in zip(value.keys, value.values, strict=True):
                    yield from self._entries(key.value if isinstance(key, ast.Constant) else None, each)
            case ast.BinOp():
                yield from (*self._entries(None, value.left), *self._entries(None, value.right))
            case ast.Name():
                for node in ast.walk(self._functions[self._function]):
                    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == value.id:
                            yield ast.literal_eval(target.slice), node.value
                        elif ast.unparse(target) == value.id:
                            yield from self._entries(None, node.value)
            case ast.Call(func=ast.Name(function)) if function in self._functions:
                outer, self._function = self._function, function
                for node in ast.walk(self._functions[function]):
                    if isinstance(node, ast.Return) and node.value is not None:
                        yield from self._entries(None, node.value)
                self._function = outer
