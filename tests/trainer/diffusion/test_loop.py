"""`RewardFlowTrainer.fit` with fake workers: the order of calls, what is due, checkpoints, resume, stop, validation;
and the trial of a reward on the clips before anything starts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.set_keys import set_keys
from tests.trainer.made_clips import options, write_folder, write_table
from trainer.checkpoint.resume import refuse_other_data
from trainer.diffusion.clips.dataset import VideoDataset
from trainer.diffusion.reward_flow import FlowActorRole, RewardFlowTrainer, try_reward
from trainer.loop.saving import Saver
from trainer.loop.steps import EpochSteps
from verl_lite.config.diffusion import FlowRewardConfig, FlowTrainerConfig, RewardFlowConfig
from verl_lite.errors import UserError
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.visual_rewards.base import VisualScore

CLIPS, FRAMES, SIDE = 3, 2, 4


def clips(step: int, rows: list[int]) -> DataProto:
    prompts = np.empty(len(rows), dtype=object)
    prompts[:] = [f"clip {row}" for row in rows]
    columns = {
        "video": torch.zeros(len(rows), FRAMES, 3, SIDE, SIDE),
        "noise_seed": torch.tensor([100 * step + row for row in rows]),
        "row": torch.tensor(rows),
    }
    batch = DataProto.from_dict(columns, non_tensors={"prompt": prompts})
    batch.meta_info["global_step"] = step
    return batch


class FakeGroup:
    """Workers that note their calls. The weight is how many steps were trained; a sample's score is 0.1 times it."""

    world_size, usage = 2, np.zeros(2)

    def __init__(self, without_face: tuple[int, ...] = ()) -> None:
        self.calls: list[str] = []
        self.weight, self.without_face = 0, without_face
        self.trained: list[tuple[list[int], list[bool], int]] = []
        self.kept: DataProto | None = None

    def train_step(self, data: DataProto) -> DataProto:
        self.calls.append(f"train {data.meta_info['global_step']}")
        [[mini_batch]] = data.meta_info["schedule"]
        rows, padding = data.batch["row"].tolist(), data.batch["is_padding"].tolist()
        self.trained.append((rows, padding, mini_batch.num_tokens))
        real = data.batch["row"][~data.batch["is_padding"]]
        self.kept = DataProto.from_dict(
            {"row": real, "frames": real.float().view(-1, 1, 1, 1, 1).expand(-1, 2, 3, 4, 4)}
        )
        self.weight += 1
        parts = [Metric.mean(1.0, 4), Metric.mean(3.0, 4)]  # two ranks
        return DataProto(meta_info={"metrics": {"actor/face_score": parts}})

    def sample(self, data: DataProto) -> DataProto:
        self.calls.append("sample")
        rows = data.batch["row"]
        return DataProto.from_dict(
            {
                "frames": rows.float().view(-1, 1, 1, 1, 1).expand(-1, FRAMES, 3, SIDE, SIDE) + self.weight,
                "face_score": torch.full((len(rows),), 0.1 * self.weight),
                "counted": torch.tensor([float(row not in self.without_face) for row in rows.tolist()]),
            }
        )

    def last_frames(self) -> list[DataProto]:
        self.calls.append("last_frames")
        assert self.kept is not None
        return [self.kept[:2], self.kept[2:], DataProto()]  # a rank whose rows are all padding has none

    def save_checkpoint(self, folder: str, background: bool) -> None:
        self.calls.append("save")
        Path(folder).mkdir()
        (Path(folder) / "weight").write_text(str(self.weight))

    def finish_save(self) -> None:
        self.calls.append("finish_save")

    def load_checkpoint(self, folder: str) -> None:
        self.calls.append("load")
        self.weight = int((Path(folder) / "weight").read_text())

    def export_lora(self, folder: str) -> None:
        self.calls.append("export")
        Path(folder).mkdir()
        (Path(folder) / "pytorch_lora_weights.safetensors").touch()


class Run:
    """A trainer of fake parts, and what they noted: metrics by step, and means of videos by step and row."""

    def __init__(self, run_dir: Path, group: FakeGroup | None = None, total: int = 3, **settings: Any) -> None:
        config = RewardFlowConfig()
        usual = {"save_freq": 0, "video_freq": 0, "test_freq": 0, "total_training_steps": total, "seed": 1}
        set_keys(config.trainer, **usual | settings)
        self.group, self.logged = group or FakeGroup(), list[tuple[int, dict[str, float]]]()
        self.videos, self.told = dict[int, dict[int, float]](), list[str]()
        fake: Any = self.group
        tracking: Any = SimpleNamespace(log=lambda metrics, step: self.logged.append((step, dict(metrics))))
        actor = FlowActorRole(fake, 1)
        self.trainer = RewardFlowTrainer(
            config,
            actor=actor,
            steps=EpochSteps(2 * CLIPS, CLIPS, config.trainer, shuffle=True, dataset="same"),
            read_batch=lambda step: clips(step, list(range(CLIPS))),
            validation=clips(0, [0, 1]),
            save_clips=self.write,
            tracking=tracking,
            saver=Saver(run_dir, config, {"actor": actor}, 0, self.told.append),
        )

    def write(self, step: int, rows: list[int], videos: torch.Tensor) -> None:
        assert videos.shape == (len(rows), FRAMES, 3, SIDE, SIDE)
        self.videos[step] = dict(zip(rows, videos.mean((1, 2, 3, 4)).tolist(), strict=True))


def test_a_step_is_one_call_of_the_workers(tmp_path: Path) -> None:
    run = Run(tmp_path)
    result = run.trainer.fit()
    assert run.group.calls == ["train 1", "train 2", "train 3"]
    assert (result.before, result.after, result.checkpoint, result.stopped) == ({}, {}, None, False)
    steps = [step for step, _ in run.logged]
    first = run.logged[0][1]
    assert steps == [1, 2, 3] and first["actor/face_score"] == 0.5  # (1 + 3) / (4 + 4)
    assert {"timing_s/step", "timing_s/data", "timing_s/train", "perf/samples_per_second"} <= set(first)
    assert [metrics["training/epoch"] for _, metrics in run.logged] == [0, 0, 1]
    rows, padding, samples = run.group.trained[0]  # three rows on two ranks; padding does not count
    assert samples == CLIPS and len(rows) == 4 and sum(padding) == 1
    assert sorted(row for row, is_padding in zip(rows, padding, strict=True) if not is_padding) == [0, 1, 2]


def test_videos_are_the_steps_own_samples(tmp_path: Path) -> None:
    run = Run(tmp_path, video_freq=2)
    run.trainer.fit()
    assert run.group.calls == ["train 1", "train 2", "last_frames", "train 3", "last_frames"]  # the last step counts
    assert run.videos == {step: {row: float(row) for row in range(CLIPS)} for step in (2, 3)}


def test_the_same_clips_are_sampled_before_and_after(tmp_path: Path) -> None:
    run = Run(tmp_path, test_freq=-1)
    result = run.trainer.fit()
    assert run.group.calls == ["sample", "train 1", "train 2", "train 3", "sample"]
    name = "val-core/cosine_identity/reward/mean@1"
    assert result.before[name] == 0 and result.after[name] == pytest.approx(0.3)
    assert result.first is not None and result.last is not None
    assert result.first.batch["frames"].mean((1, 2, 3, 4)).tolist() == [0, 1]  # in the order of the rows
    assert result.last.batch["frames"].mean((1, 2, 3, 4)).tolist() == [3, 4]
    assert run.logged[0] == (0, result.before) and name in run.logged[-1][1]


def test_samples_without_a_face_are_counted_and_not_averaged(tmp_path: Path) -> None:
    result = Run(tmp_path / "a", FakeGroup(without_face=(1,)), test_freq=-1).trainer.fit()
    assert result.after["val-core/cosine_identity/reward/mean@1"] == pytest.approx(0.3)
    assert result.after["val-aux/cosine_identity/no_face_frac"] == 0.5
    result = Run(tmp_path / "b", FakeGroup(without_face=(0, 1)), test_freq=-1).trainer.fit()
    assert result.after == {"val-aux/cosine_identity/no_face_frac": 1.0}


def test_a_resumed_run_goes_on_and_has_its_before_from_the_untrained_model(tmp_path: Path) -> None:
    Run(tmp_path, total=2, save_freq=-1).trainer.fit()
    again = Run(tmp_path, total=4, save_freq=-1, test_freq=-1, resume_mode="auto")
    result = again.trainer.fit()
    calls = ["sample", "load", "train 3", "train 4", "sample", "save", "export", "finish_save"]
    assert again.group.calls == calls and again.group.weight == 4
    assert again.told == [f"The run continues after step 2 of 4, from {tmp_path}/global_step_2"]
    name = "val-core/cosine_identity/reward/mean@1"
    assert result.before[name] == 0 and result.after[name] == pytest.approx(0.4)
    assert [step for step, _ in again.logged] == [3, 4, 4]  # the untrained model's was logged at step 0 before
    assert result.checkpoint == tmp_path / "global_step_4"
    assert (tmp_path / "global_step_4" / "lora" / "pytorch_lora_weights.safetensors").is_file()


@pytest.mark.parametrize(("rows", "size", "repeat"), [(7, 3, 1), (6, 3, 1), (2, 8, 1), (3, 4, 5)])
def test_an_epoch_has_every_row_as_often_as_asked(rows: int, size: int, repeat: int) -> None:
    def steps_of(**more: Any) -> EpochSteps:
        shuffle = more.pop("shuffle", True)
        options = FlowTrainerConfig(**{"total_epochs": 2, "seed": 1} | more)
        return EpochSteps(rows, size, options, shuffle=shuffle, repeat=repeat)

    steps = steps_of()
    drawn = [steps.rows_of(step) for step in steps]
    assert len(drawn) == steps.total == 2 * -(-rows * repeat // size) and steps_of(total_training_steps=5).total == 5
    epochs = drawn[: steps.per_epoch], drawn[steps.per_epoch :]
    for epoch in epochs:
        assert Counter(row for batch in epoch for row in batch) == {row: repeat for row in range(rows)}
        assert all(len(batch) == size for batch in epoch[:-1]) and 0 < len(epoch[-1]) <= size
    if rows > 3:
        assert epochs[0] != epochs[1] and epochs[0] != [steps_of(seed=2).rows_of(n + 1) for n in range(steps.per_epoch)]
    in_order = steps_of(shuffle=False)
    assert [row for step in in_order for row in in_order.rows_of(step)] == list(range(rows)) * repeat * 2
    resumed = steps_of()
    resumed.global_step = 1
    assert [resumed.rows_of(step) for step in resumed] == drawn[1:]


def test_other_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    Run(tmp_path, total=1, save_freq=-1).trainer.fit()
    options = RewardFlowConfig().trainer
    refuse_other_data(options, tmp_path, "other")  # not asked to resume
    options.resume_mode = "auto"
    refuse_other_data(options, tmp_path, "same")
    with pytest.raises(UserError, match=r"not that of .*global_step_1: its fingerprint is other.*checkpoint same"):
        refuse_other_data(options, tmp_path, "other")
    options.resume_allow = ["data.train_files"]
    refuse_other_data(options, tmp_path, "other")


class Brightness:
    """Rises with brightness; finds nothing in what is brighter than `limit`."""

    limit, value_of, counted = 1.0, staticmethod(torch.mean), True

    def prepare(self, reference_frames: torch.Tensor) -> float:
        if float(reference_frames.mean()) > self.limit:
            raise ValueError("no face in any of the 4 reference frames after the first")
        return float(reference_frames.mean())

    def score(self, frames: torch.Tensor, reference: float) -> VisualScore:
        return VisualScore(self.value_of(frames), self.counted)

    def to(self, device: Any) -> Brightness:
        return self


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        ({}, ""),
        ({"counted": False, "value_of": staticmethod(lambda frames: torch.zeros(()))}, ""),  # says nothing of gradients
        ({"limit": 0.01}, r"data.train_files: .*, row 0, .*clip0: no face in any .* Take this clip out"),
        ({"value_of": staticmethod(lambda frames: frames.detach().mean())}, "is not differentiable"),
        ({"value_of": staticmethod(lambda frames: (frames * 4).round().mean())}, "cannot be trained with"),
        ({"value_of": staticmethod(lambda frames: torch.zeros(3, requires_grad=True).sum())}, "cannot be trained with"),
    ],
)
def test_a_reward_is_tried_on_the_first_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attributes: dict[str, Any], told: str
) -> None:
    write_folder(tmp_path / "clip0", np.full((5, 16, 16, 3), 20, dtype=np.uint8))
    data = VideoDataset(options(write_table(tmp_path, [["clip0", "a clip"]])))
    for name, value in attributes.items():
        monkeypatch.setattr(Brightness, name, value)
    chosen = FlowRewardConfig(name=f"{__name__}:Brightness")
    if told:
        with pytest.raises(UserError, match=told):
            try_reward(chosen, data)
        return
    try_reward(chosen, data)
