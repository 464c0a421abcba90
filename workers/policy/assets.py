"""The files of an exported model besides its weights: config, generation config, tokenizer, processor and code.

They are made once, when a run starts, and kept in memory: what cannot be written then ends the run before it trains,
and no later checkpoint depends on the initial model's folder. The generation config is copied as it is, apart from
further tokens that end a response, because transformers reads files that it refuses to write, such as a temperature
without do_sample (Llama 2, Vicuna).
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from transformers import AutoTokenizer, PretrainedConfig

from verl_lite.config import ModelConfig, NetworkConfig
from verl_lite.errors import UserError
from workers.policy.generation_config import GENERATION_CONFIG, eos_token_ids, generation_config, model_file
from workers.policy.model_errors import user_error_on_failure
from workers.policy.tokenizer import set_chat_template
from workers.policy.vision import has_vision

ASSETS = "huggingface"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def model_assets(
    model: NetworkConfig,
    config: PretrainedConfig,
    chat_template: str | None = None,
    answer_ends: Collection[int] = (),
) -> dict[str, bytes]:
    """Returns the files of a model besides its weights, by their path in its folder.

    Args:
        model: the initial model, whose tokenizer, generation config, processor and code are taken.
        config: the config of the trained network.
        chat_template: value of data.chat_template. The tokenizer is written with the template that the run uses, so
            that later commands on the exported folder have the same prompts.
        answer_ends: tokens with which the trained network ends its answers. The generation config gets those that it
            lacks; otherwise it is copied as it is.

    Raises:
        UserError: one of the files cannot be read or written, with the key, the file and the remedy.
    """
    # transformers can write these files only to a folder
    with tempfile.TemporaryDirectory(prefix="verl_lite-assets-") as name:
        folder = Path(name)
        _write_config(config, model, folder)
        _write_tokenizer(model, chat_template, folder)
        _copy_files(model, config, folder)
        _add_answer_ends(model, config, answer_ends, folder)
        assets = {}
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                name_in_folder = str(file.relative_to(folder))
                assets[name_in_folder] = file.read_bytes()
    return assets


def write_assets(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes the files of `model_assets` to a folder, which need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _write_config(config: PretrainedConfig, model: NetworkConfig, folder: Path) -> None:
    """Writes config.json. Unlike `save_pretrained`, accepts what the initial config.json contains: older models have
    sampling options there."""
    own = copy.deepcopy(config)
    # the name of a file of the initial model
    if "transformers_weights" in vars(own):
        del own.transformers_weights
    file = folder / "config.json"
    remedy = "the trained model could not be saved; correct this config.json or the entries of model.override_config"
    with user_error_on_failure(f"model.path={model.path!r}: its config cannot be written", remedy):
        own.to_json_file(file, use_diff=True)
        # read back: what is no JSON would be found when the export is loaded
        json.loads(file.read_text(encoding="utf-8"))


def _write_tokenizer(model: NetworkConfig, chat_template: str | None, folder: Path) -> None:
    """Writes the tokenizer with the chat template of the run. A critic or reward model may have none."""
    source = model.path
    if isinstance(model, ModelConfig) and model.tokenizer_path:
        source = model.tokenizer_path
    key = "model.tokenizer_path" if source != model.path else "model.path"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    except OSError:
        # the folder has no tokenizer
        return
    except Exception as error:  # what its files or its code raise
        raise UserError(f"{key}={source!r}: its tokenizer cannot be read ({type(error).__name__}: {error})") from error
    set_chat_template(tokenizer, chat_template)
    remedy = "the trained model could not be saved; give a tokenizer that can be, in model.tokenizer_path"
    with user_error_on_failure(f"{key}={source!r}: its tokenizer cannot be saved", remedy):
        tokenizer.save_pretrained(folder)


def _copy_files(model: NetworkConfig, config: PretrainedConfig, folder: Path) -> None:
    """Copies the generation config, the files of an image processor, and code that belongs to the model."""
    names = [GENERATION_CONFIG]
    if has_vision(config):
        names += PROCESSOR_FILES
    model_folder = Path(str(model.path))
    if model.trust_remote_code and model_folder.is_dir():
        names += sorted(file.name for file in model_folder.glob("*.py"))
    for name in names:
        file = model_file(str(model.path), name)
        if file is not None:
            shutil.copyfile(file, folder / name)
    # raises UserError for a file that the export's readers would refuse
    generation_config(str(model.path))


def _add_answer_ends(
    model: NetworkConfig, config: PretrainedConfig, answer_ends: Collection[int], folder: Path
) -> None:
    """Adds the tokens to those that end a generation, which a base model ends with another token than a chat.

    Without them, every program that generates with the exported model would run on after the end of an answer.
    """
    entries = generation_config(str(model.path))
    # transformers reads those of config.json if the generation config has none
    ends = eos_token_ids(entries)
    if not ends:
        problem = f"model.path={model.path!r}: its config.json is invalid"
        with user_error_on_failure(problem, "correct its eos_token_id"):
            ends = eos_token_ids({"eos_token_id": getattr(config, "eos_token_id", None)})
    missing = [token for token in answer_ends if token not in ends]
    if missing:
        entries["eos_token_id"] = [*ends, *missing]
        text = json.dumps(entries, indent=2)
        (folder / GENERATION_CONFIG).write_text(text + "\n", encoding="utf-8")
