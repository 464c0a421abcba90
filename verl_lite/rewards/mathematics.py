"""Compares an answer with a reference by math-verify, in a separate process.

The kernel kills that process when a comparison takes more than `CPU_S` of processor time, even inside C code and
independently of the calling thread. The next comparison starts a new process.
"""

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback

CPU_S = 3.0
MOST_CHARACTERS = 2000
MOST_NESTED = 10
_MEMORY_BYTES = 2 << 30
_LIMITS = f"{MOST_CHARACTERS} characters, {MOST_NESTED} nested brackets, {CPU_S:g} s and {_MEMORY_BYTES >> 30} GiB"
_ONE_AT_A_TIME = threading.Lock()


def compare(ground_truth: str, answer: str, is_boxed: bool, strict: bool) -> tuple[bool, str]:
    r"""Returns True if the answer equals the reference, and the answer as math-verify parsed it.

    An answer that exceeds a limit is wrong.

    Args:
        ground_truth: the reference.
        answer: the answer, or a text that contains it.
        is_boxed: True if `answer` is the content of a \boxed{}; else math-verify searches the text for the answer.
        strict: see `rules.math_verify`.

    Raises:
        ValueError: if the reference is not an expression or exceeds a limit.
        RuntimeError: if the comparison fails.
    """
    reference = f"ground_truth={ground_truth[:MOST_CHARACTERS]!r}"
    wrong = (False, answer[:MOST_CHARACTERS])
    too_large = f"{reference} exceeds a limit of the comparison: {_LIMITS}"
    if _is_too_long(ground_truth):
        raise ValueError(too_large)
    if _is_too_long(answer):
        return wrong

    request = json.dumps([ground_truth, answer, is_boxed, strict])
    # a reply belongs to the request before it
    with _ONE_AT_A_TIME:
        problem, result = _reply(request)
    # the process writes `problem` before it looks at the answer, so a missing line is the fault of the reference
    if not problem:
        raise ValueError(too_large)
    if problem != "null\n":
        raise ValueError(f"{reference} {json.loads(problem)}")
    # the comparison has exceeded a limit of the process
    if not result:
        return wrong
    is_right, pred, fault = json.loads(result)
    if fault:
        raise RuntimeError(f"The comparison of {answer!r} with {reference} failed:\n{fault}")
    return is_right, pred


def _is_too_long(text: str) -> bool:
    """Returns True for more than MOST_CHARACTERS, or more than MOST_NESTED brackets inside each other."""
    if len(text) > MOST_CHARACTERS:
        return True
    depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            if depth > MOST_NESTED:
                return True
        elif character in ")]}":
            # not below 0: brackets that are closed without being opened must not make room for others
            depth = max(0, depth - 1)
    return False


def _reply(request: str) -> tuple[str, str]:
    """Returns the two lines of `serve`'s reply. A line is empty if the process died before it wrote the line."""
    process = _process(os.getpid())
    assert process.stdout is not None
    problem = ""
    result = ""
    try:
        print(request, file=process.stdin, flush=True)
        problem = process.stdout.readline()
        result = process.stdout.readline()
    except BrokenPipeError:
        # the process died between two requests
        pass
    finally:
        # the process died, or this thread was interrupted
        if not result:
            process.kill()
            process.communicate()
            _process.cache_clear()
    return problem, result


# by process id, so that a fork of this process starts its own and does not share the pipes
@functools.cache
def _process(pid: int) -> subprocess.Popen[str]:
    """Starts the comparison process of the process `pid`. It exits when its stdin is closed."""
    # this process may have a path that the environment does not contain
    code = f"import sys; sys.path[:] = {sys.path!r}; from verl_lite.rewards.mathematics import serve; serve()"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )


def serve() -> None:
    """Replies to each request with two lines of JSON.

    The first is the error in the reference, or null; the second is [is right, parsed answer, traceback or ""].
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # keeps prints of libraries out of the replies
    os.dup2(2, 1)
    from verl_lite.rewards import final_form  # sympy is slow to import

    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    for line in sys.stdin:
        ground_truth, answer, is_boxed, strict = json.loads(line)
        problem = None
        result = (False, answer, "")
        # its signal has no handler, so it kills the process
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            final_form.read_reference(ground_truth)
        except ValueError as error:
            problem = str(error)
        # written before the comparison: if that kills the process, the caller knows that the answer was the cause
        print(json.dumps(problem), file=replies, flush=True)

        try:
            if problem is None:
                result = (*final_form.compare(ground_truth, answer, is_boxed, strict), "")
        except (RecursionError, MemoryError):
            pass  # the answer exceeds a limit
        except Exception:
            # the caller raises any exception as an error of the grader
            result = (False, answer, traceback.format_exc())
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(result), file=replies, flush=True)
