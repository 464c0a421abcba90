"""Small real runs record which product file puts each column into a batch; `verl_lite.schema` declares these files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from traceback import walk_stack
from typing import Any

import pytest
from tensordict import TensorDict

from recipes.flow_grpo.__main__ import main as flow_grpo
from tests.guess_number import GUESS_NUMBER
from tests.recipes.test_flow_grpo import arguments
from tests.tiny_experts import tiny_experts
from tests.trainer import tiny_run
from trainer.main_reward_flow import main as reward_flow
from verl_lite.protocol import DataProto
from verl_lite.schema import COLUMNS, column

ROOT = Path(__file__).parents[2]
PRODUCT = tuple(f"{ROOT / folder}/" for folder in ("verl_lite", "workers", "trainer", "recipes"))
# these move the columns of others
CONTAINERS = (str(ROOT / "verl_lite" / "protocol.py"), str(ROOT / "verl_lite" / "batch" / "meta.py"))


class Recorder:
    """found: pairs of a column and a file that put the column into a batch without the column."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: set[tuple[str, str]] = set()
        recorder, create, initialise = self, DataProto.from_dict.__func__, DataProto.__post_init__

        class Arrays(dict):  # a `non_tensor_batch`
            def __setitem__(self, name: str, value: Any) -> None:
                recorder.record({name} - self.keys())
                super().__setitem__(name, value)

            def __ior__(self, other: Any) -> Any:
                recorder.record(other.keys() - self.keys())
                return super().__ior__(other)

        def from_dict(cls: type, tensors: Any = None, non_tensors: Any = None, *rest: Any, **named: Any) -> DataProto:
            self.record({*(tensors or ()), *(non_tensors or ())})
            return create(cls, tensors, non_tensors, *rest, **named)

        def post_init(data: DataProto) -> None:
            initialise(data)
            data.non_tensor_batch = Arrays(data.non_tensor_batch)

        def before(method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(batch: TensorDict, given: Any, *rest: Any, **named: Any) -> Any:
                names = {given} if isinstance(given, str) else set(getattr(given, "keys", tuple)())
                self.record(names - set(batch.keys()))
                return method(batch, given, *rest, **named)

            return wrapped

        monkeypatch.setattr(DataProto, "from_dict", classmethod(from_dict))
        monkeypatch.setattr(DataProto, "__post_init__", post_init)
        for name in ("__setitem__", "update"):
            monkeypatch.setattr(TensorDict, name, before(getattr(TensorDict, name)))

    def record(self, names: Iterable[str]) -> None:
        """The writer is the nearest caller in a product file; none, if that only moves columns."""
        files = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe(2)))
        file = next(filter(lambda file: file.startswith(PRODUCT), files), CONTAINERS[0])
        if not file.startswith(CONTAINERS):
            self.found |= {(name, str(Path(file).relative_to(ROOT))) for name in names}


AGENTIC = [
    "data.max_prompt_length=200", "agentic.train_env_manager.tags=[guess]", "agentic.rollout_batch_size=4",
    "agentic.train_env_manager.num_env_groups=2", "agentic.train_env_manager.group_size=2",
    "agentic.env_pool.num_workers=0", "rollout.n=1",
]  # fmt: skip
LOSS = "distillation.distillation_loss"
RUNS = {
    "critic": ["algorithm.adv_estimator=gae", "actor.use_kl_loss=true", "reward.overlong_buffer.enable=true",
               "reward.overlong_buffer.len=2", "data.sources={talk: {n: 3}}"],
    "experts": ["model.path=FOLDER/experts", "rollout.router_replay=true",
                "distillation.teachers.t.prompt_template='{prompt} {ground_truth}'"],
    "bypass": ["algorithm.adv_estimator=remax", "algorithm.rollout_correction.bypass_mode=true"],
    "correction": ["algorithm.rollout_correction.rollout_is=token", "actor.policy_loss.loss_mode=clip_cov",
                   "actor.ppo_epochs=2", "algorithm.adv_estimator=optimal_token_baseline", "rollout.top_k=9"],
    "program": ["agentic.program=tests.workers.agents.endpoint.programs:run", "data.max_response_length=96",
                "distillation.teachers.t.path=FOLDER/policy"],
    "teacher": ["distillation.teachers.t.path=FOLDER/policy"],
    "teacher's top k": ["distillation.teachers.t.path=FOLDER/policy", f"{LOSS}.loss_mode=jsd_topk"],
    "student's top k": ["distillation.teachers.t.prompt_template='{prompt} {ground_truth}'",
                        f"{LOSS}.loss_mode=jsd_topk", f"{LOSS}.topk_source=student"],
    "agentic": ["--config", "FOLDER/envs.yaml", *AGENTIC, "model.path=FOLDER/experts", "rollout.router_replay=true",
                "distillation.teachers.t.path=FOLDER/policy", f"{LOSS}.loss_mode=jsd_topk"],
}  # fmt: skip
NOT_RUN = {"rm_scores", "scores", "noise_seed", "multi_modal_inputs", "staleness"}
"""Need a reward model, a user's loss, a direct call of `train_step`, a vision-language model, and a3po."""


@pytest.mark.slow
def test_each_column_has_the_writers_that_the_schema_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    tiny_run.write_files(tmp_path, [f"{number}+{number}" for number in range(8)])
    tiny_experts(tmp_path / "experts")
    guess = {"env_type": GUESS_NUMBER, "max_tokens_per_step": 4, "max_steps": 2}
    (tmp_path / "envs.yaml").write_text(json.dumps({"agentic": {"custom_envs": {"guess": guess}}}))
    recorder = Recorder(monkeypatch)
    for name, options in RUNS.items():
        given = [option.replace("FOLDER", str(tmp_path)) for option in options]
        tiny_run.run(tmp_path, name, "trainer.total_training_steps=1", "trainer.val_before_train=false", *given)
    assert flow_grpo(arguments(tmp_path, "flow", trainer__total_training_steps=1)) == 0
    tiny = ["trainer.backend=inline", "trainer.device=cpu", "trainer.total_training_steps=1", "trainer.video_freq=0"]
    assert reward_flow([*tiny, f"trainer.default_local_dir={tmp_path / 'clips'}"]) == 0

    declared = {(entry.name, file) for entry in COLUMNS for file in (entry.writer, *entry.others)}
    assert {name for name, _ in declared - recorder.found} == NOT_RUN
    declared |= {(name, column(name).writer) for name, _ in recorder.found}  # also reward/<name>; others raise
    assert not {(name, file) for name, file in recorder.found - declared if not file.startswith("recipes/")}
