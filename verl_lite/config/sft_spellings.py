"""Translates the keys of verl's SFT trainers, as `spellings` does for its PPO trainer.

verl has two SFT trainers: `fsdp_sft_trainer` (sections data, model, optim, trainer) and `sft_trainer`, which adds
engine, checkpoint and profiler. Keys with the same meaning in the PPO trainer are translated by `spellings`.
"""

from dataclasses import replace
from typing import Any

from verl_lite.config import spellings
from verl_lite.config.option_table import schema_of
from verl_lite.config.spellings import Verdict
from verl_lite.config.supervised import SFTConfig

RENAMED = {
    "model.partial_pretrain": "model.path",
    "model.fsdp_config": "fsdp_config",
    "model.strategy": "fsdp_config.strategy",
    "engine": "fsdp_config",
    "data.multiturn.messages_key": "data.messages_key",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "use_remove_padding": "model.use_remove_padding",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.resume_path": "trainer.resume_from_path",
}
_BY_TOKENS = "a micro-batch holds data.max_token_len_per_gpu tokens, and results do not depend on its size"
_OFFLOAD = "it saves memory alone: set fsdp_config.param_offload=true for that"
NO_EFFECT = {
    **dict.fromkeys(("data.micro_batch_size", "data.micro_batch_size_per_gpu", "data.use_dynamic_bsz"), _BY_TOKENS),
    **dict.fromkeys(("data.balance_dp_token", "data.pad_mode"), _BY_TOKENS),
    "data.multiturn": "a row that has the column data.messages_key is a chat of any number of turns",
    "data.ignore_input_ids_mismatch": "each message is tokenized on its own, as when the model is asked",
    "data.processor": "only text models are trained here",
    **dict.fromkeys(("fsdp_config.cpu_offload", "fsdp_config.offload_params"), _OFFLOAD),
    **dict.fromkeys(("data.num_workers", "trainer.profile_interval"), "it is a matter of speed or logging alone"),
    "trainer.checkpoint": "a checkpoint has the whole state, and RUN/hf has the trained model",
}
_TEMPLATE = "the chat template reads the messages alone; write other arguments into data.chat_template"
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{f"data.{part}_dict_keys": (f"set data.{part}_key=COLUMN.ENTRY for an entry of a column", ([],))
       for part in ("prompt", "response")},
    "data.tools_key": (_TEMPLATE, ("tools",)),
    "data.enable_thinking_key": (_TEMPLATE, ("enable_thinking",)),
    "data.enable_thinking_default": (_TEMPLATE, ()),
    "data.apply_chat_template_kwargs": (_TEMPLATE, ({},)),
    "data.custom_cls": ("write the rows to a file with a column of chat messages", ()),
    "data.val_max_samples": ("give a file with fewer rows in data.val_files", (-1,)),
    **dict.fromkeys(("model.speculator", "model.speculator_adapter", "model.freeze_base_model"),
                    ("speculators are not trained here", (False,))),
}  # fmt: skip
_OF_A_ROLE = ("optim.", "fsdp_config.", "checkpoint.", "profiler.", "strategy", "ulysses_sequence_parallel_size")
"""Prefixes of keys that the PPO trainer has in the section of each role."""


def translate(name: str, value: Any) -> Verdict | None:
    """Returns the verdict on a key of verl's SFT trainers that is no key here; None if they do not have the key."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        known, below = ".".join(parts[:depth]), "".join(f".{part}" for part in parts[depth:])
        if known in REFUSED:
            return spellings.refused(name, value, *REFUSED[known])
        if known in NO_EFFECT:
            return Verdict(note=f"{name}={value} has no effect here: {NO_EFFECT[known]}")
        if known in RENAMED:
            return _renamed(name, value, RENAMED[known] + below)
    if name.startswith(_OF_A_ROLE):
        return _of_actor(name, value)
    return spellings.translate(name, value) if parts[0] in ("data", "model", "trainer", "defaults", "hydra") else None


def _renamed(name: str, value: Any, target: str) -> Verdict:
    if value is None or name.endswith("._target_"):
        return Verdict()
    if target in schema_of(SFTConfig).keys:
        mode = {"trainer.resume_mode": "resume_path"} if name == "trainer.resume_path" else {}
        return spellings.called(name, {target: value} | mode)
    if (further := translate(target, value)) is not None:
        return replace(further, note=further.note and further.note.replace(target, name, 1))
    return spellings.refused(name, value, "the training engine here is FSDP2 (fsdp_config.*)", (1, False))


def _of_actor(name: str, value: Any) -> Verdict | None:
    """Returns the verdict of `spellings` on `actor.NAME`, with the prefix `actor.` removed."""
    verdict = spellings.translate(f"actor.{name}", value)
    if verdict is None:
        return None
    settings = {to.removeprefix("actor."): spellings.same_meaning(to, new)[0] for to, new in verdict.settings.items()}
    return replace(verdict, settings=settings, note=verdict.note and verdict.note.replace("actor.", ""))
