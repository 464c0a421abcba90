"""The frame of a run: its folder and lock, what it asks of the machine, new tries; what it refuses before it starts."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiny_model import tiny_qwen2, tiny_tokenizer
from tests.tiny_run import good_row, write_rows
from tests.trainer import tiny_run
from trainer import main_sft
from trainer.cli import failure_text, file_mask
from trainer.data.prompts import PromptDataset
from trainer.launch import ppo_job, run
from trainer.launch.build import request_of
from trainer.launch.engine_checks import check_engine
from trainer.launch.ppo_data import check_vocabulary
from trainer.launch.ppo_job import run_ppo
from trainer.launch.run import HeldFolder, locked_folder, make_run_dir
from trainer.loop.steps import StepCounter
from trainer.plan import main as plan
from trainer.planner.batch import check_context
from verl_lite.config import DataConfig, ModelConfig, PPOConfig, load_config
from verl_lite.config.checks import section_problems
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.errors import ClusterLostError, NoRoomError, StalledError, UserError, WorkerDiedError

FROM = ("trainer.resume_mode=resume_path", "trainer.resume_from_path=/other/global_step_2")


def in_folder(folder: Path, resume_mode: str = "disable") -> RewardFlowConfig:
    config = RewardFlowConfig()
    config.trainer.default_local_dir, config.trainer.resume_mode = str(folder), resume_mode
    return config


def test_a_folder_that_holds_a_run_is_refused_unless_it_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="holds a run already, and trainer.resume_mode=disable"), ExitStack() as stack:
        make_run_dir(in_folder(tmp_path), stack)
    with ExitStack() as stack:
        assert make_run_dir(in_folder(tmp_path, "auto"), stack) == tmp_path


def test_a_place_that_cannot_be_written_to_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = Path("/proc/self/fdinfo/run")  # where nobody, root included, makes a folder
    cases = (
        (tmp_path / "file" / "run", "File exists: .*/file"),
        (nowhere, "No such file .*"),
        (tmp_path / ("x" * 300), "File name too long: .*"),
    )
    for folder, why in cases:
        said = rf"trainer\.default_local_dir={folder} cannot be written to \({why}\)"
        with pytest.raises(UserError, match=said), ExitStack() as stack:
            make_run_dir(in_folder(folder), stack)


@pytest.mark.parametrize("name", ["", " ", "a\0b"])
def test_an_empty_folder_is_not_the_current_one(name: str) -> None:
    config = in_folder(Path("x"))
    config.trainer.default_local_dir = name
    with pytest.raises(UserError, match=r"trainer\.default_local_dir='.*': expected a folder"), ExitStack() as stack:
        make_run_dir(config, stack)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that everybody can enter, as folders of tests cannot be; of a user whose files all may read."""
    folder = Path(tempfile.mkdtemp(prefix="vt-", dir="/tmp"))
    folder.chmod(0o755)
    with file_mask("022", folder):
        yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("own", "umask", "mode", "is_read"),
    [
        (0o022, "077", 0o700, False),
        (0o022, "027", 0o750, False),
        (0o022, "022", 0o755, True),
        (0o077, "022", 0o755, True),
    ],
)
def test_what_a_run_writes_is_its_users_alone_unless_it_is_shared(
    own: int, umask: str, mode: int, is_read: bool, open_folder: Path
) -> None:
    """own: umask of the user's shell."""
    config = in_folder(open_folder / "project" / "run")
    config.trainer.umask = umask
    os.umask(own)
    with ExitStack() as stack:
        file = make_run_dir(config, stack) / "metrics.jsonl"
        subprocess.run([sys.executable, "-c", f"open({str(file)!r}, 'w').write('{{}}')"], check=True)
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (mode, mode & 0o666)
    (open_folder / "after").touch()
    for path, expected in ((open_folder / "after", 0o666 & ~own), (file.parent.parent, 0o755)):
        assert path.stat().st_mode & 0o777 == expected, "only the run's files are touched"
    if os.getuid() == 0:
        read = f"import os; os.setgroups([]); os.setgid(65534); os.setuid(65534); open({str(file)!r})"
        done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
        assert (done.returncode == 0) is is_read and (is_read or "Permission denied" in done.stderr)


def test_a_folder_that_the_user_made_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with ExitStack() as stack:
        assert make_run_dir(in_folder(tmp_path), stack).stat().st_mode & 0o777 == 0o770


@pytest.mark.parametrize(
    ("umask", "is_one"),
    [("0", True), ("0022", True), ("27", True), ("700", False), ("18", False), ("63", False), ("private", False)],
)
def test_a_umask_that_is_none_is_refused(umask: str, is_one: bool) -> None:
    config = in_folder(Path("x"))
    config.trainer.umask = umask
    said = [problem for problem in section_problems(config) if "umask" in problem]
    assert (not said) is is_one
    assert is_one or said[0].startswith(f"trainer.umask={umask}: an octal umask is expected: 077 ")


def test_a_folder_in_use_is_refused_with_the_name_of_its_user(tmp_path: Path) -> None:
    with locked_folder(tmp_path, pytest.fail):
        with pytest.raises(UserError, match=f"in use by pid {os.getpid()} of user .* trainer.experiment_name"):
            with locked_folder(tmp_path, pytest.fail):
                pass
    with locked_folder(tmp_path, pytest.fail):
        pass
    assert (tmp_path / "in_use").read_text() == "", "who had it is no longer told"


def test_a_deleted_folder_that_another_run_has_taken_is_left_to_it(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "run").mkdir()
    with ExitStack() as stack:
        folder = HeldFolder(tmp_path / "run", told.append, stack)
        folder.config_text = "trainer: {}"
        folder.restore()
        assert told == []
        for _ in range(2):
            shutil.rmtree(tmp_path / "run")
            folder.restore()
            assert (tmp_path / "run" / "config.yaml").read_text() == "trainer: {}" and "WAS DELETED" in told.pop()
        with pytest.raises(UserError, match="in use by pid"), locked_folder(tmp_path / "run", pytest.fail):
            pass
        (tmp_path / "run").rename(tmp_path / "renamed")
        (tmp_path / "run").mkdir()
        with locked_folder(tmp_path / "run", pytest.fail):
            with pytest.raises(UserError, match="in use by pid"):
                folder.restore()
            stack.close()
            assert (tmp_path / "run" / "in_use").read_text().startswith("pid "), "its own line stays"
        assert not told and not (tmp_path / "run" / "config.yaml").exists()


def test_a_dry_run_leaves_the_folder_of_a_run_alone(model: str, tmp_path: Path) -> None:
    (tmp_path / ".global_step_3.draft").mkdir()
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "1+1=", "response": "2"}])
    given = [f"model.path={model}", f"data.train_files={data}", "trainer.device=cpu", "trainer.dry_run=true"]
    with locked_folder(tmp_path, pytest.fail):
        assert main_sft.main([*given, f"trainer.default_local_dir={tmp_path}", "trainer.resume_mode=auto"]) == 2
    assert (tmp_path / ".global_step_3.draft").is_dir()


def test_where_there_are_no_locks_the_run_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    told: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        with locked_folder(tmp_path, told.append):
            assert "cannot be locked (No locks available)" in told[0]


def test_the_command_that_goes_on_says_nothing_twice_and_is_quoted_for_a_shell() -> None:
    given = ["python", "-m", "trainer.main_ppo", "data.train_files=[a b]", "trainer.default_local_dir=x", *FROM]
    first, *_, last = run.how_to_continue([*given, "~trainer.resume_from_path"], Path("/ray é 数")).splitlines()
    assert first == "Stopped. No step is saved, since no checkpoint was due (trainer.save_freq). To continue:"
    said = shlex.split(last)
    assert said == [*given[:4], "trainer.default_local_dir=/ray é 数", "trainer.resume_mode=auto"]


def test_a_run_that_is_stopped_in_its_last_step_is_done() -> None:
    for step, is_stopped in ((1, True), (2, False)):
        steps = StepCounter()
        steps.total, steps.global_step = 2, step
        steps.stop()
        assert steps.must_stop() is is_stopped


GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


def config_of(model: str, *options: str) -> PPOConfig:
    common = [f"model.path={model}", "data.train_files=x.jsonl", "trainer.device=cpu", "rollout.name=hf"]
    return load_config([*common, *options]).config


def test_a_run_asks_for_its_share_of_one_machine(model: str) -> None:
    request = request_of(config_of(model, "rollout.gpu_memory_utilization=0.4", "rollout.name=vllm"), 2)
    assert (request.count, request.shared, request.memory_share) == (2, False, 0.4)
    request = request_of(config_of(model, "trainer.share_devices=true", "trainer.nnodes=2"), 4)
    assert (request.count, request.shared, request.memory_share) == (2, True, 0.0)


def test_more_tokens_than_positions_are_refused_with_the_sum(tmp_path: Path) -> None:
    model = ModelConfig(path=tiny_qwen2(tmp_path, max_positions=64))
    check_context(PPOConfig(data=DataConfig(max_prompt_length=32, max_response_length=32), model=model))
    with pytest.raises(UserError, match="data.max_prompt_length=33 .*=32 = 65 tokens are more than the 64 positions"):
        check_context(PPOConfig(data=DataConfig(max_prompt_length=33, max_response_length=32), model=model))


def test_heads_that_vllm_does_not_have_on_a_cpu_are_refused_before_it_starts_and_auto_takes_hf(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run.write_files(tmp_path, ["1+1", "2+2", "3+3", "4+4"], hidden=32)
    config = PPOConfig(model=ModelConfig(path=f"{tmp_path}/policy"))
    config.trainer.device = "cpu"
    config.rollout.name = "hf"
    check_engine(config)
    config.rollout.name = "vllm"
    with pytest.raises(UserError, match="rollout.name=vllm: .* has heads of 16, .* 32, 64, .*: set rollout.name=hf"):
        check_engine(config)
    options = [*tiny_run.options_of(tmp_path), "rollout.name=auto", "trainer.total_training_steps=1"]
    run_ppo(options)
    assert capsys.readouterr().out.count("rollout.name=auto chooses hf: model.path=") == 1
    assert "  name: hf" in (tmp_path / "run" / "config.yaml").read_text()
    assert (
        plan(
            [
                f"model.path={tmp_path}/policy",
                "--device",
                "cpu",
                "rollout.n=2",
                "data.max_response_length=64",
                "data.max_prompt_length=64",
            ]
        )
        == 0
    )
    assert re.search("auto chooses hf: .* heads of 16.*rollout engine +2 x hf", capsys.readouterr().out, re.DOTALL)


class OldEngine:
    """A user's engine without the method that partial rollouts need."""


def test_partial_rollouts_with_an_engine_that_cannot_continue_samples_are_refused() -> None:
    config = PPOConfig()
    config.rollout.name, config.async_training.max_off_policy_threshold = f"{__name__}:OldEngine", 2
    with pytest.raises(UserError, match="OldEngine: .*method snapshot.*partial_rollout=false"):
        check_engine(config)


def test_a_temperature_that_vllm_would_replace_is_refused(tmp_path: Path) -> None:
    config = PPOConfig(model=ModelConfig(path=tiny_qwen2(tmp_path / "model", hidden=128, heads=4, kv_heads=2)))
    config.trainer.device = "cpu"
    for name in ("vllm", "hf"):
        config.rollout.name, config.rollout.temperature = name, 0.01
        check_engine(config)
        config.rollout.temperature, config.rollout.val_kwargs.temperature = 0.005, 0.001
        if name == "hf":
            check_engine(config)
            continue
        with pytest.raises(UserError, match="rollout.temperature=0.005 with rollout.name=vllm: .* or rollout.name=hf"):
            check_engine(config)
        # greedy, so that its temperature is not used
        config.rollout.temperature = 1.0
        check_engine(config)
        config.rollout.val_kwargs.do_sample = True
        with pytest.raises(UserError, match="rollout.val_kwargs.temperature=0.001 with rollout.name=vllm: "):
            check_engine(config)


def test_a_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    config = PPOConfig(model=ModelConfig(path=tiny_qwen2(tmp_path / "model", vocab=64)))
    row = good_row(1)
    for text, is_known in (("1+1", True), ("|", False)):  # the bar is the last but two of 97 characters
        row["prompt"] = [{"role": "user", "content": text}]
        (tmp_path / "d.jsonl").write_text(json.dumps(row))
        data = PromptDataset(str(tmp_path / "d.jsonl"), tiny_tokenizer(120), config.data, split="train")
        if is_known:
            check_vocabulary(config, [data])
            continue
        with pytest.raises(UserError, match="data.train_files: .* token .*knows the tokens 0 to 63.*tokenizer_path"):
            check_vocabulary(config, [data])


ARGV = ["trainer.device=cpu", "model.path=m", "data.train_files=d.jsonl", "trainer.default_local_dir=/runs/x"]
Tries = Callable[..., list[str]]


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Tries:
    """Runs the command with tries that end so; gives the resume_mode of each."""

    def run_with(*ends: Exception | None, retries: int, options: Sequence[str] = ()) -> list[str]:
        modes, left = [], list(ends)

        def train(job, loaded, *args) -> int:
            modes.append(loaded.config.trainer.resume_mode)
            error = left.pop(0)
            if error is not None:
                raise error
            return 0

        monkeypatch.setattr(run, "train", train)
        monkeypatch.setattr(run, "guarded", nullcontext)
        assert ppo_job.run_ppo([*ARGV, f"trainer.max_retries={retries}", *options]) == 0
        return modes

    return run_with


def test_a_lost_worker_and_a_stall_start_again_from_the_last_checkpoint(tries: Tries) -> None:
    assert tries(WorkerDiedError("one"), StalledError("two"), None, retries=2) == ["disable", "auto", "auto"]
    began = tries(WorkerDiedError("one"), None, retries=1, options=FROM)
    assert began == ["resume_path"] * 2, "before its first checkpoint where it began"


@pytest.mark.parametrize(
    ("retries", "options", "is_command", "expected"),
    [
        (3, (), True, ["trainer.max_retries=1", "~trainer.resume_from_path", "trainer.resume_mode=auto"]),
        (2, FROM, True, ["trainer.max_retries=0"]),  # nothing of its own was saved
        (1, (), True, None),
        (3, (), False, None),
    ],
)
def test_after_a_lost_worker_and_a_lost_cluster_the_process_starts_again_with_what_is_left(
    retries: int, options: Sequence[str], is_command: bool, expected: list[str] | None, tries: Tries,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A program that is not the command's own is not started again."""
    name = ppo_job.PPOJob.module if is_command else "somebodys_program"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=name))
    with pytest.raises(ClusterLostError) as caught:
        tries(WorkerDiedError("one"), ClusterLostError("two"), retries=retries, options=options)
    assert caught.value.again == (expected and ["trainer.default_local_dir=/runs/x", *expected])


def test_no_room_at_the_start_is_the_users_to_mend(tries: Tries) -> None:
    with pytest.raises(NoRoomError, match="^1 of 2 machines$"):
        tries(NoRoomError("1 of 2 machines"), retries=1)


def test_no_room_after_a_loss_ends_with_the_loss_and_the_command_that_goes_on(tries: Tries) -> None:
    with pytest.raises(WorkerDiedError, match="machine b left") as caught:
        tries(WorkerDiedError("machine b left"), NoRoomError("1 of 2 machines"), retries=2)
    text = failure_text(caught.value)
    assert "Starting again failed: 1 of 2 machines" in text
    assert "trainer.default_local_dir=/runs/x trainer.resume_mode=auto" in text
    assert text.endswith("The run failed: WorkerDiedError: machine b left")


def test_options_without_effect_are_noted_once_before_the_run_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_run.write_files(tmp_path, [f"{number}+1=" for number in range(4)])
    dry_run = [*tiny_run.options_of(folder), "trainer.dry_run=true"]
    assert run_ppo([*dry_run, "actor.freeze_vision_tower=false", "rollout.n_gpus_per_node=2", "actor.tau_pos=2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for key in ("actor.freeze_vision_tower=false", "rollout.n_gpus_per_node=2", "actor.tau_pos=2.0"):
        assert text.count(f"note: {key} has no effect here: ") == 1
    written = (folder / "run" / "dry_run.yaml").read_text()
    assert "# rollout.n_gpus_per_node=2 has no effect here: hybrid_engine=true" in written
    option = "distillation.distillation_loss.loss_mode=forward_kl_topk"
    with pytest.raises(UserError, match=f"{option} has no effect here: .*no teachers"):
        run_ppo([*dry_run, option])
    with pytest.raises(UserError, match=r"model\.gradient_checkpointing_layers=99: .* has 2 layers .* at most that"):
        run_ppo([*dry_run, "model.gradient_checkpointing_layers=99"])


def test_a_batch_larger_than_the_rows_of_supervised_training_is_noted(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": f"{row}+1=", "response": "2"} for row in range(3)])
    words = [f"model.path={model}", f"data.train_files={data}", "trainer.device=cpu", "trainer.dry_run=true"]
    words.append(f"trainer.default_local_dir={tmp_path / 'run'}")
    for size, is_noted in ((["data.train_batch_size=4"], True), (["data.train_batch_size=3"], False), ([], False)):
        assert main_sft.main([*words, *size]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert ("data.train_batch_size=4 has no effect here: the data have fewer training rows" in text) is is_noted


def test_after_each_epoch_becomes_the_steps_of_an_epoch(model: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": f"{row}+1=", "response": "2"} for row in range(10)])
    words = [f"model.path={model}", f"data.train_files={data}", f"data.val_files={data}", "data.train_batch_size=4"]
    words += ["trainer.device=cpu", "trainer.dry_run=true", f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert main_sft.main([*words, "trainer.test_freq=after_each_epoch", "trainer.save_freq=after_each_epoch"]) == 0
    written = (tmp_path / "run" / "dry_run.yaml").read_text()
    for name in ("test_freq", "save_freq"):  # 10 rows in batches of 4 are 3 steps
        assert re.search(rf"^  {name}: 3 +# filled in at launch$", written, re.MULTILINE)
