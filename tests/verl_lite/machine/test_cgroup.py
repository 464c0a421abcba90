"""Limits of control groups, from trees of files as the kernel lays them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_lite.machine.host import cores_limit, cpu_count, memory_left

GIB = 1 << 30


def tree(root: Path, own: str, files: dict[str, str]) -> dict[str, Path]:
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (root / "self").write_text(own)
    return {"root": root / "cgroup", "own": root / "self"}


def test_the_smallest_limit_on_the_way_to_the_root_holds(tmp_path: Path) -> None:
    job = "system.slice/slurm/job_7/step_0"
    where = tree(
        tmp_path,
        f"0::/{job}\n",
        {
            f"{job}/cpu.max": "max 100000",
            "system.slice/slurm/job_7/cpu.max": "350000 100000",
            "system.slice/cpu.max": "1600000 100000",
            f"{job}/memory.max": "max",
            f"{job}/memory.current": f"{GIB}",
            "system.slice/slurm/job_7/memory.max": f"{8 * GIB}",
            "system.slice/slurm/job_7/memory.current": f"{5 * GIB}",
            "system.slice/slurm/job_7/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 7",
        },
    )
    assert cores_limit(**where) == 4  # 3.5, rounded up
    assert memory_left(**where) == 5 * GIB  # 8 - 5, and 2 of cache


def test_in_a_container_the_root_is_the_own_group(tmp_path: Path) -> None:
    files = {"cpu.max": "50000 100000", "memory.max": "1000", "memory.current": "400"}
    where = tree(tmp_path, "0::/", files)
    assert cores_limit(**where) == 1 and memory_left(**where) == 600
    where["own"].write_text("0::/docker/of/the/host\n")
    assert cores_limit(**where) == 1 and memory_left(**where) == 600


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    """As Docker and Slurm lay it out on older systems: beside an empty tree of version 2, and without some limits."""
    where = tree(
        tmp_path,
        "5:memory:/slurm/job_7\n4:cpu,cpuacct:/slurm/job_7\n3:cpuset:/slurm\n1:name=systemd:/user:1\n0::/slurm\n",
        {
            "cpu/slurm/job_7/cpu.cfs_quota_us": "-1",
            "cpu/slurm/job_7/cpu.cfs_period_us": "100000",
            "cpu/slurm/cpu.cfs_quota_us": "250000",
            "cpu/slurm/cpu.cfs_period_us": "100000",
            "memory/slurm/job_7/memory.limit_in_bytes": f"{8 * GIB}",
            "memory/slurm/job_7/memory.usage_in_bytes": f"{5 * GIB}",
            "memory/slurm/job_7/memory.stat": f"inactive_file 7\ntotal_inactive_file {2 * GIB}",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": f"{40 * GIB}",
        },
    )
    assert cores_limit(**where) == 3 and memory_left(**where) == 5 * GIB


def test_no_groups_no_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores_limit(tmp_path, tmp_path / "none") is None and memory_left(tmp_path, tmp_path / "none") is None
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1, 4, 5}, raising=False)
    monkeypatch.setattr("verl_lite.machine.host.cores_limit", lambda: None)
    assert cpu_count() == 3
    monkeypatch.setattr("verl_lite.machine.host.cores_limit", lambda: 2)
    assert cpu_count() == 2
