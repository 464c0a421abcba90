"""Functions that the vLLM engine runs in vLLM's worker (`collective_rpc`), and one for its scheduler.

They reach into objects whose attributes differ between versions of vLLM; tests/gpu_static compares each with the
source of all allowed versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.worker.gpu_worker import Worker


def disable_expert_recording(core: InprocClient) -> None:
    """Stops the scheduler from fetching experts. vLLM records them only on the first rank, so others would fail."""
    connector = getattr(core.engine_core.scheduler, "aux_output_connector", None)  # since vLLM 0.31
    if connector is not None:
        connector.take_output = lambda request, output: None


def summarize_engine(worker: Worker) -> str:
    """Returns one line with vLLM's choices of runner, attention, dtype, cache and CUDA graphs. Runs in its worker."""
    config = worker.vllm_config
    cache = config.cache_config
    runner = type(worker.model_runner).__module__
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
    attention = ", ".join(sorted(backends)) or "of its model"
    capacity = cache.num_gpu_blocks * cache.block_size
    prefixes = "kept" if cache.enable_prefix_caching else "not kept"
    graphs = config.compilation_config.cudagraph_mode
    return (
        f"vLLM: {runner}, attention {attention}, {config.model_config.dtype}, {capacity:,} tokens of keys and values "
        f"({cache.cache_dtype}), prefixes {prefixes}, CUDA graphs {graphs}"
    )


def repack_tied_head(worker: Worker) -> None:
    """Packs the weight of a tied output layer again after a reload on a CPU. Runs in vLLM's worker.

    The reload loads no separate weights for an output layer that is tied to the embedding, so it does not update the
    packed copy that the layer's matrix product uses.
    """
    model = worker.model_runner.get_model()
    # a model with images contains the one with the output layer
    language_model = getattr(model, "language_model", model)
    head = getattr(language_model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def unpack_experts(worker: Worker) -> None:
    """Removes the kernels of the expert layers, so that a reload on a CPU builds them again. Runs in vLLM's worker.

    vLLM packs expert weights when it builds their kernel; with an existing kernel, a reload does not pack them (0.32).
    """
    model = worker.model_runner.get_model()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        # layers without experts have no such attribute
        if method is not None and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def has_stale_experts(worker: Worker) -> bool:
    """Returns True if a reload, because it did not track the weights of an expert layer, built no kernel for it."""
    model = worker.model_runner.get_model()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is None or not hasattr(method, "moe_kernel"):
            continue
        if method.moe_kernel is None:
            return True
    return False
