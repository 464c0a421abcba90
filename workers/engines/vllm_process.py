"""Prepares a process, a model's class, its config and images for vLLM, and reads candidates and experts from outputs.

vLLM has side effects on its process: it modifies classes of transformers, writes logs, and creates files in shared
memory. The functions here choose or undo these effects.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from packaging.version import Version
from transformers import MODEL_MAPPING, AutoModel, PretrainedConfig, PreTrainedModel

from verl_lite.config import RolloutConfig
from verl_lite.errors import UserError
from verl_lite.images import open_image
from workers.engines.base import has_torchvision
from workers.policy.router import Routers
from workers.policy.vision import ImageInputs

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm import CompletionOutput, RequestOutput
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher


def check_replay(config: RolloutConfig, device_type: str) -> None:
    """Raises UserError if vLLM cannot return the experts of each token.

    Versions before 0.32 return them in other ways, and 0.31 then rejects `reset_prefix_cache` of an in-process engine.
    """
    # from the package's metadata, because the import of vLLM takes long
    installed = [distribution.version for distribution in importlib.metadata.distributions(name="vllm")]
    version = installed[0] if installed else "0"
    if device_type == "cpu":
        problem = f"trainer.device={device_type}: vLLM records experts only on a GPU; set rollout.name=hf"
    elif Version(version) < Version("0.32"):
        problem = f"vLLM {version}: 0.32 or later is needed; install it"
    elif not config.enable_prefix_caching:
        problem = "rollout.enable_prefix_caching=false: vLLM stores the experts with the prefixes; set it to true"
    else:
        return
    raise UserError(f"rollout.router_replay=true with rollout.name=vllm: {problem}")


def prepare_process(device: torch.device) -> None:
    """Prepares this process for the import of vllm: in-process engine, no logs, usage reports or CPU compilation."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # for the same reason as disable_custom_all_reduce in `_engine_arguments`
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
    os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
    # vLLM's warnings at its start are about defaults that the engine chose (eager, in process, no tcmalloc)
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.reduce_op` is deprecated")
    if device.type == "cpu":
        import torch._dynamo

        # vLLM's sampler compiles a function with inductor at the first step, which takes seconds and a C++ compiler
        torch._dynamo.config.disable = True
        # a CUDA build with torch's CPU build would break the import of vllm too
        if not has_torchvision():
            sys.modules["torchvision"] = None  # type: ignore[assignment]


@contextlib.contextmanager
def isolated_model_class(config: PretrainedConfig) -> Iterator[None]:
    """Makes vLLM use a subclass of the model's transformers class inside the context.

    vLLM modifies the class of a transformers model for compilation, which breaks other networks of the same class.
    """
    model_class: type[PreTrainedModel] | None = MODEL_MAPPING.get(type(config), None)
    if model_class is None:
        yield
        return
    subclass = type(model_class.__name__, (model_class,), {"__module__": model_class.__module__})
    AutoModel.register(type(config), subclass, exist_ok=True)
    try:
        yield
    finally:
        AutoModel.register(type(config), model_class, exist_ok=True)


@contextlib.contextmanager
def shared_memory_names(tensor_parallel_size: int) -> Iterator[type[ExecutorWithExternalLauncher] | None]:
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

    # all ranks use the name that the first one has drawn
    names = [f"verl-lite-{uuid.uuid4().hex}"]
    torch.distributed.broadcast_object_list(names, src=0)
    name = names[0]

    class TensorParallelExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            method = f"file:///{name}"
            rank = torch.distributed.get_rank()
            device = self.vllm_config.device_config.device
            local_rank = getattr(device, "index", None) or 0
            return method, rank, local_rank

    yield TensorParallelExecutor
    # a rank that has not attached yet would no longer find the memory
    torch.distributed.barrier()
    for path in Path("/dev/shm").glob(f"*{name}*"):
        path.unlink(missing_ok=True)


def collapse_images(prompt_ids: Sequence[int], images: ImageInputs, config: PretrainedConfig) -> list[int]:
    """Returns the tokens of a prompt with one image token per image, which vLLM's processor repeats again."""
    token_ids = list(prompt_ids)
    patches_per_token = config.vision_config.spatial_merge_size**2
    num_patches = images.image_grid_thw.prod(1)
    start = 0
    for patches in num_patches.tolist():
        num_tokens = patches // patches_per_token
        # the first token of the image stays
        start = token_ids.index(config.image_token_id, start) + 1
        end = start + num_tokens - 1
        del token_ids[start:end]
    return token_ids


@functools.lru_cache(maxsize=16)  # the samples of a prompt share its images
def resized_images(images: ImageInputs, patch_size: int) -> list[Image]:
    """Returns the images in the size of their grids, resized as the trainer's processor does. vLLM's processor could
    choose another size, since it does not know data.max_pixels, and other pixels, since it resizes with torchvision."""
    from PIL.Image import Resampling

    resized = []
    grids = images.image_grid_thw.tolist()
    for file, grid in zip(images.files, grids, strict=True):
        # in patches
        _, height, width = grid
        size = (width * patch_size, height * patch_size)
        image = open_image(file)
        resized.append(image.resize(size, Resampling.BICUBIC))
    return resized


def head_dtype(dtype: torch.dtype) -> dict[str, str]:
    """Returns the config entry that makes vLLM compute logits in fp32, as the trainer does."""
    if dtype == torch.float32:
        return {}
    return {"head_dtype": "float32"}


def sliding_window_override(config: PretrainedConfig) -> dict[str, int]:
    """Returns config overrides that make vLLM's sliding window equal to that of transformers.

    Since 0.29, Cohere2 in vLLM attends to one token more than its window, in transformers it does not.
    """
    import vllm

    if config.model_type != "cohere2":
        return {}
    if Version(vllm.__version__) < Version("0.29"):
        return {}
    return {"sliding_window": config.sliding_window - 1}


def read_candidates(result: CompletionOutput, count: int) -> tuple[list[float], torch.Tensor]:
    """Returns the log-probs of new tokens and their candidates.

    Args:
        result: New tokens of a request, n of them.
        count: Number of candidates that the request returns.

    Returns:
        The log-probs of the tokens, and the tokens that could be sampled at each position (n, count): most probable
        first, then -1.
    """
    # flat lists: for each token, itself and then the most probable ones, usually with it
    shape = (len(result.token_ids), count + 1)
    flat_log_probs = torch.tensor(result.logprobs.logprobs)
    log_probs = flat_log_probs.view(shape)
    flat_ids = torch.tensor(result.logprobs.token_ids, dtype=torch.int32)
    ids = flat_ids.view(shape)

    sampled = ids[:, 0]
    sampled_log_probs = log_probs[:, 0]
    # tokens that the truncation removes have -inf (logprobs_mode in `_engine_arguments`)
    is_kept = log_probs[:, 1:].isfinite()
    candidates = ids[:, 1:].where(is_kept, -1)

    # the sampled token can be missing if more than `count` tokens are kept, because the logits of the last are equal
    is_sampled = candidates == sampled[:, None]
    has_sampled = is_sampled.any(dim=1)
    last = candidates[:, -1]
    candidates[:, -1] = last.where(has_sampled, sampled)
    return sampled_log_probs.tolist(), candidates


def read_routes(output: RequestOutput, model: PreTrainedModel, routers: Routers) -> torch.Tensor:
    """Returns the experts of each token but the last, which no forward has read: (n, layers with experts, top_k) int16.

    Raises:
        UserError: vLLM did not record them.
    """
    result = output.outputs[0]
    num_layers = model.config.get_text_config().num_hidden_layers
    num_tokens = len(output.prompt_token_ids) + len(result.token_ids) - 1
    # vLLM returns all layers, zeros for those without experts
    expected = (num_tokens, num_layers, routers.top_k)
    recorded = result.routed_experts
    actual = "none" if recorded is None else str(recorded.shape)
    if recorded is not None and recorded.shape == expected:
        of_routers = recorded[:, routers.layers]
        routes = torch.from_numpy(of_routers.astype("int16"))
        # a layer that vLLM did not record has zeros: the first expert, several times for each token
        if routers.top_k == 1:
            return routes
        differs = routes[..., 0] != routes[..., 1]
        if differs.all():
            return routes
        actual = "an expert twice for one token, so it did not record every layer"
    raise UserError(
        f"rollout.router_replay=true with rollout.name=vllm: expected experts of shape {expected} (tokens except the "
        f"last, layers, chosen experts) of a {type(model).__name__}, but vLLM gave {actual}; set "
        "rollout.name=hf or rollout.router_replay=false"
    )
