"""Whether the options of an adapter fit each other: a part of `checks.config`, and of supervised fine-tuning.

Takes the `ModelConfig`; yields problems, each naming key, value, what was expected and what to change. Whether the
network has the layers that are named is seen where it is built.
"""

from __future__ import annotations

from verl_lite.config.checks.values import Problems
from verl_lite.config.ppo import ModelConfig


def adapter(model: ModelConfig) -> Problems:
    """LoRA's options: those without effect, and those that leave nothing to train."""
    plain = ModelConfig()
    if model.lora_rank < 0:
        yield f"model.lora_rank={model.lora_rank}: 0 (all parameters learn) or the rank of an adapter is expected"
    if model.lora_rank == 0:
        names = ("lora_alpha", "target_modules", "exclude_modules")
        given = [name for name in names if getattr(model, name) != getattr(plain, name)]
        if given:
            yield (
                f"{', '.join(f'model.{name}={getattr(model, name)}' for name in given)}: without effect, because "
                "model.lora_rank=0 trains all parameters: give a rank, or leave these out"
            )
        return
    if model.lora_alpha < 1:
        yield f"model.lora_alpha={model.lora_alpha}: at least 1 is expected; the adapter counts lora_alpha / lora_rank"
    if not model.target_modules:
        yield "model.target_modules is empty, so that nothing would learn: give all-linear, or names of linear layers"
    if "all-linear" in model.target_modules and len(model.target_modules) > 1:
        yield f"model.target_modules={model.target_modules}: all-linear alone, or names of layers, are expected"
