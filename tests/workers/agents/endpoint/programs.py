"""Programs of the tests: good ones, and ones that fail in every way. `row["do"]` chooses what a program does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any


def ask(base_url: str, api_key: str, text: str, *, path: str = "/chat/completions", timeout_s: float = 30.0) -> str:
    """Asks one question with the standard library, which needs no import time."""
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 24}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base_url + path, body, headers), timeout=timeout_s) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def run(base_url: str, api_key: str, row: dict[str, Any]) -> Any:
    """A function that runs in a thread."""
    do = row.get("do", "answer")
    if do == "never calls":
        return 1.0
    answer = ask(base_url, api_key, row.get("question", "q"))
    if do == "raises":
        raise ValueError("the agent is broken")
    if do == "exits":
        sys.exit(3)
    if do == "hangs":
        time.sleep(60)
    if do == "kills its process":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "dies once" and not (mark := Path(row["mark"])).exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "outlives":  # a thread that calls the endpoint after the program has returned
        threading.Thread(target=_late, args=(base_url, api_key, row["mark"])).start()
    if do == "leaves a request":
        threading.Thread(target=ask, args=(base_url, api_key, "slow"), daemon=True).start()
        time.sleep(0.3)
    if do == "environment":
        return {"score": float(os.environ["OPENAI_API_KEY"] == api_key and "SECRET_TOKEN" not in os.environ)}
    given: dict[str, Any] = {
        "nothing": None,
        "text": "five",
        "number as text": "1.0",
        "empty text": "",
        "bytes": b"1.0",
        "nan": float("nan"),
        "huge": 1e300,
        "too large": 10**400,
        "list": [1.0],
        "truth": True,
        "text as score": {"score": "1.0"},
        "nested": {"score": {"score": 1.0}},
        "score is None": {"score": None, "turns": 3},
        "misspelt": {"scroe": 1.0},
        "only metrics": {"turns": 3},
        "many names": {"score": 1.0, **{f"name {number}": 1 for number in range(65)}},
        "long name": {"score": 1.0, "x" * 101: 1},
        "name with a line end": {"score": 1.0, "a\nb": 1},
    }
    if do == "own names":
        return {"score": 1.0, **{f"name {row['from'] + number}": 1 for number in range(60)}}
    if do in given:
        return given[do]
    return {"score": float(row.get("score", 1.0)), "turns": 1, "answer": answer}


def _late(base_url: str, api_key: str, mark: str) -> None:
    time.sleep(0.5)
    try:
        ask(base_url, api_key, "late")
    except urllib.error.HTTPError as error:
        Path(mark).write_text(f"{error.code} {error.read().decode()}")


async def run_async(base_url: str, api_key: str, row: dict[str, Any]) -> Any:
    """A coroutine, many of which share a process."""
    answers = await asyncio.gather(
        *(asyncio.to_thread(ask, base_url, api_key, f"{row['question']}{part}") for part in range(2))
    )
    if row.get("do") == "hangs":
        await asyncio.sleep(60)
    if row.get("do") == "exits":
        sys.exit(3)
    return {"score": 0.5, "turns": len(answers)}


def without_key(row: dict[str, Any], **_: Any) -> None:
    """Uses the key in the environment, which belongs to no episode if several episodes share a process."""
    ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], "q")


def command() -> None:
    """A program that is started as a command."""
    task = json.load(sys.stdin)["row"]
    do = task.get("do", "answer")
    print("printed text is no result", 1.0)
    ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], "q")
    if do == "steals":
        _steal(Path(task["folder"]))
    if do == "is stolen from":
        Path(task["folder"], "key").write_text(os.environ["OPENAI_API_KEY"])
        _wait_for(Path(task["folder"], "done"))
    result: Any = {"score": 1.0, "cwd_is_home": float(os.getcwd() == os.environ["HOME"])}
    if do == "secret":
        result = {"score": float("SECRET_TOKEN" in os.environ), "allowed": float("ALLOWED" in os.environ)}
    if do == "memory":
        kept = bytearray(300 << 20)
        time.sleep(10 + len(kept) * 0)
    if do == "processes":
        for _ in range(8):
            if os.fork() == 0:
                os.setsid()
                time.sleep(30)
        time.sleep(10)
    if do == "orphan":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path(task["mark"]).write_text(str(os.getpid()))
                time.sleep(30)
            os._exit(0)
        time.sleep(0.5)
    if do == "file":
        Path("large").write_bytes(b"x" * (2 << 20))
    if do == "hangs":
        time.sleep(60)
    if do == "fails":
        sys.exit("the command is broken")
    if do in ("fork loop", "kills its limiter", "stops its limiter"):
        _escape(do, Path(task["folder"]))
    result_file = Path(os.environ["VERL_LITE_RESULT"])
    if do == "nested folders":
        for _ in range(3000):
            os.mkdir("d" * 100)
            os.chdir("d" * 100)
    if do == "many files":
        for number in range(20_000):
            os.close(os.open(f"file {number}", os.O_CREAT))
    if do == "folder without rights":
        os.makedirs("a/b/c")
        os.chmod("a/b", 0)
        os.chmod("a", 0)
    if do == "temporary":
        result = {"score": 1.0, "is_below": float(os.environ["TMPDIR"].startswith(task["folder"]))}
    if do == "pipe":
        os.mkfifo(result_file)
        return
    if do == "link":
        result_file.symlink_to(task["target"])
        return
    if do == "folder":
        result_file.mkdir()
        return
    if do == "large result":
        result_file.write_text(" " * (1 << 20) + "1.0")
        return
    if do == "garbage":
        Path(os.environ["VERL_LITE_RESULT"]).write_bytes(b"\xff{")
    elif do != "nothing":
        Path(os.environ["VERL_LITE_RESULT"]).write_text(json.dumps(result))


def _steal(folder: Path) -> None:
    """Uses the key of another episode from a daemon, and writes the status of the reply."""
    _wait_for(folder / "key")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            try:
                ask(os.environ["OPENAI_BASE_URL"], (folder / "key").read_text(), "stolen")
                status = "200"
            except urllib.error.HTTPError as error:
                status = f"{error.code} {error.read().decode()}"
            (folder / "new").write_text(status)
            (folder / "new").rename(folder / "done")
        os._exit(0)
    _wait_for(folder / "done")


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until, path
        time.sleep(0.02)


def _escape(do: str, folder: Path) -> None:
    """Forks in new sessions, at most 300 times, or ends the process with the limits after its child has done so."""
    if do != "fork loop":
        if os.fork() == 0:
            os.setsid()
            _stay(folder)
        time.sleep(0.3)
        limiter = os.getppid()
        # on a slow machine the limiter may have ended, and another process, such as pytest, be the parent
        assert b"limited" in Path(f"/proc/{limiter}/cmdline").read_bytes()
        os.kill(limiter, signal.SIGKILL if do == "kills its limiter" else signal.SIGSTOP)
        _stay(folder)
    for _ in range(300):
        if os.fork() == 0:
            os.setsid()
            _stay(folder)
    _stay(folder)


def _stay(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(30)
    os._exit(0)


if __name__ == "__main__":
    command()
