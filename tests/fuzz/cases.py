"""A case of the fuzz: what is typed behind `python -m trainer.main_ppo --config base.yaml`, in parts that can be left
out one by one, and the folder of good files (model, data, reward) that the base configuration names.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.tiny_model import CHAT_TEMPLATE, tiny_qwen2, tiny_reward_model, tiny_tokenizer
from tests.tiny_run import REWARD

STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% endfor %}" + CHAT_TEMPLATE
)
"""As of models that know no system role."""
BARE_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Nothing around the text: an empty prompt has no tokens."""
OVERLAY = "overlay.yaml"

BASE = """
model: {{path: {root}/model}}
data:
  train_files: [{root}/train.jsonl]
  val_files: [{root}/val.jsonl]
  train_batch_size: 4
  max_prompt_length: 24
  max_response_length: 6
actor: {{ppo_mini_batch_size: 4}}
rollout: {{name: hf, n: 2}}
reward: {{custom_reward_function: {{path: {root}/reward.py}}, num_workers: 0}}
trainer:
  device: cpu
  backend: inline
  n_gpus_per_node: 1
  total_training_steps: 1
  logger: [jsonl]
  val_before_train: false
  test_freq: 0
  save_freq: 0
  default_local_dir: run
"""


@dataclass(frozen=True)
class Part:
    """Something typed that can be left out: an argument, or a line (or block) of the overlay file."""

    text: str
    in_file: bool = False


@dataclass(frozen=True)
class Case:
    """One input. kind: config | dataset. index: with the seed it makes the case again. prepare: writes files that the
    case needs into its folder."""

    kind: str
    index: int
    parts: tuple[Part, ...]
    prepare: Callable[[Path], None] = field(default=lambda folder: None, compare=False)

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.index}"

    def only(self, parts: Sequence[Part]) -> Case:
        """The case with these parts alone."""
        return replace(self, parts=tuple(parts))

    def write(self, folder: Path) -> list[str]:
        """Makes the case's files in its folder; gives the arguments."""
        folder.mkdir(parents=True, exist_ok=True)
        self.prepare(folder)
        lines = [part.text for part in self.parts if part.in_file]
        argv = ["--config", str(folder.parents[1] / "base.yaml")]
        if lines:
            (folder / OVERLAY).write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
            argv += ["--config", OVERLAY]
        return argv + [part.text for part in self.parts if not part.in_file]

    def command(self, folder: Path) -> str:
        """What to type to see it again, where `write` has been called for `folder`."""
        return f"cd {folder} && " + shlex.join(["python", "-m", "trainer.main_ppo", *self.write(folder)])


def make_good_files(root: Path) -> None:
    """A model, tokenizers, data, a reward model, rewards and `base.yaml`, with which a run takes a second."""
    root.mkdir(parents=True, exist_ok=True)
    tiny_qwen2(root / "model")
    tiny_reward_model(root / "reward_model")
    for name, template in (("strict", STRICT_TEMPLATE), ("bare", BARE_TEMPLATE), ("silent", None)):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(root / f"tokenizer_{name}")
    (root / "reward.py").write_text(REWARD)
    (root / "base.yaml").write_text(BASE.format(root=root))
    for name, count in (("train", 8), ("val", 4)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(good_row(row)) + "\n" for row in range(count)))


def good_row(number: int) -> dict[str, object]:
    """A row as it should be."""
    return {
        "prompt": [{"role": "user", "content": f"{number}+{number}"}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"index": number},
    }
