"""A seccomp filter of the system calls of untrusted code, built without libseccomp, which is not a dependency.

Calls on the list below are allowed, and threads are. All other calls fail with EPERM: sockets, new processes, other
programs, signals to other processes, ptrace, io_uring, mounts, namespaces, modules, keys, changes of owner or mode.
Supports Linux on x86-64 and 64-bit ARM. Imports only the standard library.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

ARCHITECTURES = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}
"""By machine: column of the table below, and the kernel's constant AUDIT_ARCH_*."""

NONE = -1
# one call per line, as in the tables of the kernel: arch/x86/entry/syscalls/syscall_64.tbl, and for ARM
# include/uapi/asm-generic/unistd.h
ALLOWED: dict[str, tuple[int, int]] = {
    # reading, writing and waiting on open files
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "poll": (7, NONE),
    "lseek": (8, 62),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "pipe": (22, NONE),
    "pipe2": (293, 59),
    "select": (23, NONE),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "dup": (32, 23),
    "dup2": (33, NONE),
    "dup3": (292, 24),
    "sendfile": (40, 71),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "ftruncate": (77, 46),
    "fadvise64": (221, 223),
    "fallocate": (285, 47),
    "copy_file_range": (326, 285),
    "close_range": (436, 436),
    "eventfd2": (290, 19),
    "epoll_create": (213, NONE),
    "epoll_create1": (291, 20),
    "epoll_wait": (232, NONE),
    "epoll_pwait": (281, 22),
    "epoll_ctl": (233, 21),
    # file metadata
    "stat": (4, NONE),
    "lstat": (6, NONE),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, NONE),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, NONE),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "umask": (95, 166),
    # memory
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "msync": (26, 227),
    "mincore": (27, 232),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    # the process itself: threads, its own signals, exit, lower limits
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "pause": (34, NONE),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "sched_yield": (24, 124),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "restart_syscall": (219, 128),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    # queries
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getpgrp": (111, NONE),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrusage": (98, 165),
    "times": (100, 153),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "getcpu": (309, 168),
    "getrandom": (318, 278),
    # time
    "time": (201, NONE),
    "gettimeofday": (96, 169),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "alarm": (37, NONE),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
}
"""Numbers of each system call on x86-64 and ARM; NONE if the machine does not have the call."""

CHANGING: dict[str, tuple[int, int]] = {
    "creat": (85, NONE),
    "rename": (82, NONE),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "unlink": (87, NONE),
    "unlinkat": (263, 35),
}
"""Calls that change files, allowed only if Landlock restricts them to the program's folder."""

OPEN = {
    "open": (2, NONE),
    "openat": (257, 56),
}
ABSENT = {
    "clone3": (435, 435),
    "openat2": (437, 437),
}
"""Calls with arguments in memory, which a filter cannot read. They fail with ENOSYS, so the C library uses others."""

# calls that are allowed for some values of an argument
CLONE = (56, 220)
KILL = (62, 129)
TGKILL = (234, 131)
PRLIMIT = (302, 261)
IOCTL = (16, 29)
FCNTL = (72, 25)

# terminal queries, bytes to read, flags of descriptors
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# duplicates, flags, pipe sizes, but no F_SETOWN and F_SETSIG: signals
_FCNTLS = (0, 1, 2, 3, 4, 1030, 1032)
_CLONE_THREAD = 0x10000
# set in the numbers of a third ABI of x86-64, whose calls the table does not contain
_X32_BIT = 0x40000000
# O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND
_WRITING = 0x1 | 0x2 | 0x40 | 0x200 | 0x400

# instructions of the kernel's classic BPF: BPF_LD (a word), BPF_JMP with BPF_JEQ, BPF_JGE and BPF_JSET, and BPF_RET
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_AT_LEAST = 0x35
_JUMP_BITS = 0x45
_RETURN = 0x06
# verdicts of seccomp; the lower 16 bits of _ERRNO are the error number
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
# offsets in seccomp_data
_NUMBER = 0
_ARCHITECTURE = 4
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2

_Instruction = tuple[int, int, int, int]
"""The fields of the kernel's struct sock_filter: code, jump if the test holds, jump if it does not, operand."""

_REFUSE: _Instruction = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_REPORT_ABSENT: _Instruction = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)


def is_known_machine() -> bool:
    """Returns True if the table contains this machine's call numbers."""
    return sys.platform == "linux" and platform.machine() in ARCHITECTURES


def filter_calls(libc: ctypes.CDLL, *, may_write: bool) -> None:
    """Restricts this process and its threads to the allowed system calls, irrevocably.

    Args:
        libc: the C library.
        may_write: True to allow opening files for writing, creating and removing files.

    Raises:
        OSError: if the kernel has no seccomp filters.
    """
    instructions = _program(os.getpid(), may_write)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    # the kernel's struct sock_fprog: number of instructions, and a pointer to them
    program = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    result = libc.prctl(_PR_SET_SECCOMP, mode, program, 0, 0)
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp filter refused: {os.strerror(number)}")


def _program(pid: int, may_write: bool) -> list[_Instruction]:
    """Returns the instructions of the filter, which the kernel runs at each system call of the process.

    Args:
        pid: id of the process, to which it may send signals.
        may_write: see `filter_calls`.
    """
    column, architecture = ARCHITECTURES[platform.machine()]
    allowed = dict(ALLOWED)
    if may_write:
        allowed |= CHANGING | OPEN
    # a jump skips as many instructions as its second number if the test holds, else as its third
    lines: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        # 32-bit calls have different numbers
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32_BIT),
        _REPORT_ABSENT,
    ]
    for numbers in allowed.values():
        number = numbers[column]
        if number != NONE:
            lines += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for numbers in ABSENT.values():
        lines += [(_JUMP_EQUAL, 0, 1, numbers[column]), _REPORT_ABSENT]

    # a clone without this flag is a new process
    lines += _if_called(CLONE[column], 0, [(_JUMP_BITS, 0, 1, _CLONE_THREAD)])
    # the call, the number of one of its arguments, and the values of it that are allowed
    for call, argument, values in (
        (KILL, 0, (pid,)),
        (TGKILL, 0, (pid,)),
        # 0 is the process itself
        (PRLIMIT, 0, (0, pid)),
        (IOCTL, 1, _IOCTLS),
        (FCNTL, 1, _FCNTLS),
    ):
        tests: list[_Instruction] = [(_JUMP_EQUAL, 0, 1, value) for value in values]
        lines += _if_called(call[column], argument, tests)
    if not may_write:
        # the call, and the number of its argument with the flags
        for name, argument in (("open", 1), ("openat", 2)):
            number = OPEN[name][column]
            if number != NONE:
                # passes if no flag of writing is set
                lines += _if_called(number, argument, [(_JUMP_BITS, 1, 0, _WRITING)])
    return [*lines, _REFUSE]


def _if_called(number: int, argument: int, tests: list[_Instruction]) -> list[_Instruction]:
    """Returns instructions that allow a system call if one of the tests of its argument passes, and else refuse it.

    A passing test jumps to the instruction behind it, which allows the call. The tests read the lower 32 bits of the
    argument, as the kernel does for these calls. Both machines are little-endian.
    """
    # the arguments follow after 16 bytes of seccomp_data, with 8 bytes each
    offset = 16 + 8 * argument
    lines: list[_Instruction] = [(_LOAD, 0, 0, offset)]
    for test in tests:
        lines.append(test)
        lines.append((_RETURN, 0, 0, _ALLOW))
    lines.append(_REFUSE)

    # another call skips all of them, so that its number stays loaded
    is_call: _Instruction = (_JUMP_EQUAL, 0, len(lines), number)
    return [is_call, *lines]
