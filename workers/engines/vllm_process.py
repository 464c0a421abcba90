"""Prepares a process, a model's class, its config and images for vLLM, and reads candidates from its outputs.

vLLM has side effects on its process: it modifies classes of transformers, writes logs, and creates files in shared
memory. The functions here choose or undo these effects.
"""

from __future__ import annotations

import contextlib
import functools
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

from verl_lite.images import open_image
from workers.engines.base import has_torchvision
from workers.policy.vision import ImageInputs

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm import CompletionOutput
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher


def prepare_process(device: torch.device) -> None:
    """Prepares this process for the import of vllm: in-process engine, no logs, usage reports or CPU compilation."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    for name in ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"):
        os.environ[name] = "0"  # for the same reason as disable_custom_all_reduce in `_engine_arguments`
    # vLLM's warnings at its start are about defaults that the engine chose (eager, in process, no tcmalloc)
    logging.getLogger("vllm").setLevel(os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR"))
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.reduce_op` is deprecated")
    if device.type == "cpu":
        import torch._dynamo

        # vLLM's sampler compiles a function with inductor at the first step, which takes seconds and a C++ compiler
        torch._dynamo.config.disable = True
        if not has_torchvision():  # a CUDA build with torch's CPU build would break the import of vllm too
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

    shared = [f"verl-lite-{uuid.uuid4().hex}"]
    torch.distributed.broadcast_object_list(shared, src=0)
    name = shared[0]

    class TensorParallelExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            device = self.vllm_config.device_config.device
            local_rank = getattr(device, "index", None) or 0
            return f"file:///{name}", torch.distributed.get_rank(), local_rank

    yield TensorParallelExecutor
    torch.distributed.barrier()
    for path in Path("/dev/shm").glob(f"*{name}*"):
        path.unlink(missing_ok=True)


def collapse_images(prompt_ids: Sequence[int], images: ImageInputs, config: PretrainedConfig) -> list[int]:
    """Returns the tokens of a prompt with one image token per image, which vLLM's processor repeats again."""
    token_ids = list(prompt_ids)
    patches_per_token = config.vision_config.spatial_merge_size**2
    start = 0
    for patches in images.image_grid_thw.prod(1).tolist():
        num_tokens = patches // patches_per_token
        start = token_ids.index(config.image_token_id, start) + 1
        del token_ids[start : start + num_tokens - 1]
    return token_ids


@functools.lru_cache(maxsize=16)  # the samples of a prompt share its images
def resized_images(images: ImageInputs, patch_size: int) -> list[Image]:
    """Returns the images in the size of their grids, resized as the trainer's processor does. vLLM's processor could
    choose another size, since it does not know data.max_pixels, and other pixels, since it resizes with torchvision."""
    from PIL.Image import Resampling

    resized = []
    for file, grid in zip(images.files, images.image_grid_thw.tolist(), strict=True):
        _, height, width = grid  # in patches
        size = (width * patch_size, height * patch_size)
        resized.append(open_image(file).resize(size, Resampling.BICUBIC))
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

    if config.model_type != "cohere2" or Version(vllm.__version__) < Version("0.29"):
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
    log_probs = torch.tensor(result.logprobs.logprobs).view(shape)
    ids = torch.tensor(result.logprobs.token_ids, dtype=torch.int32).view(shape)
    sampled = ids[:, 0]
    is_kept = log_probs[:, 1:].isfinite()
    candidates = ids[:, 1:].where(is_kept, -1)
    # the sampled token can be missing if more than `count` tokens are kept, because the logits of the last are equal
    has_sampled = (candidates == sampled[:, None]).any(dim=1)
    candidates[:, -1] = candidates[:, -1].where(has_sampled, sampled)
    return log_probs[:, 0].tolist(), candidates
