"""A case of the fuzz: what is typed behind `python -m trainer.main_ppo --config base.yaml`, and the folder of good
files (model, data, reward) that the base configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.tiny_model import CHAT_TEMPLATE, tiny_qwen2, tiny_reward_model, tiny_tokenizer
from tests.tiny_run import REWARD, good_row, write_rows

TEMPLATES = {
    "strict": "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% endfor %}" + CHAT_TEMPLATE,
    "bare": "{% for message in messages %}{{ message['content'] }}{% endfor %}",  # an empty prompt has no tokens
    "silent": None,
}
OVERLAY = "overlay.yaml"
BASE = """
model: {{path: {root}/model}}
data: {{train_files: [{root}/train.jsonl], val_files: [{root}/val.jsonl], train_batch_size: 4, max_prompt_length: 24,
  max_response_length: 6}}
actor: {{ppo_mini_batch_size: 4}}
rollout: {{name: hf, n: 2}}
reward: {{custom_reward_function: {{path: {root}/reward.py}}, num_workers: 0}}
trainer: {{device: cpu, backend: inline, n_gpus_per_node: 1, total_training_steps: 1, logger: [jsonl],
  val_before_train: false, test_freq: 0, save_freq: 0, default_local_dir: run}}
"""


@dataclass(frozen=True)
class Case:
    """One input. name: with the seed it makes the case again. overlay: lines of a file that is given too. prepare:
    writes files that the case needs into its folder."""

    name: str
    arguments: list[str]
    overlay: list[str] = field(default_factory=list)
    prepare: Callable[[Path], None] = lambda folder: None

    def write(self, folder: Path) -> list[str]:
        """Makes the case's files in its folder; gives the whole command line."""
        folder.mkdir(parents=True, exist_ok=True)
        self.prepare(folder)
        argv = ["--config", str(folder.parents[1] / "base.yaml")]
        if self.overlay:
            (folder / OVERLAY).write_bytes("\n".join(self.overlay).encode("utf-8", "surrogateescape"))
            argv += ["--config", OVERLAY]
        return argv + self.arguments


def make_good_files(root: Path) -> None:
    """A model, tokenizers, data, a reward model, rewards and `base.yaml`, with which a run takes a second."""
    root.mkdir(parents=True, exist_ok=True)
    tiny_qwen2(root / "model")
    tiny_reward_model(root / "reward_model")
    for name, template in TEMPLATES.items():
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(root / f"tokenizer_{name}")
    (root / "reward.py").write_text(REWARD)
    (root / "base.yaml").write_text(BASE.format(root=root))
    for name, count in (("train", 8), ("val", 4)):
        write_rows(root / f"{name}.jsonl", map(good_row, range(count)))
