"""Runs through the command line: in this process, or in one that may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

TESTS = Path(__file__).resolve().parent


@contextmanager
def undisturbed() -> Iterator[None]:
    """Handlers of signals end with the block."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)


def words(args: Any) -> list[str]:
    """The command line of these flags: those that are not at their default."""
    line = []
    for field in fields(args):
        value, name = getattr(args, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            line += [f"--{name}", *map(str, values)]
    return line


def run_main(script: ModuleType, capsys: pytest.CaptureFixture, line: list[str]) -> tuple:
    """Exit code, standard output and standard error of `main`, as the interpreter would end it."""
    capsys.readouterr()
    try:
        script.main(line)
        code = 0
    except SystemExit as stop:
        code = stop.code
    except Exception as error:
        traceback.print_exception(error)
        code = 1
    return code, *capsys.readouterr()


def fill_the_disk(patch: pytest.MonkeyPatch, write: int, name: str) -> None:
    """`torch.save` fails in the middle of that write to files of the name."""
    save, names = torch.save, []

    def save_or_fail(content: Any, file: Any, **options: Any) -> None:
        # pickle, which saves tensors by it, too, has no name
        names.append(Path(getattr(file, "name", "")).name)
        if names[-1] == name and names.count(name) == write:
            file.write(b"half of a checkpoint")
            raise OSError(28, "No space left on device")
        save(content, file, **options)

    patch.setattr(torch, "save", save_or_fail)


def start(script: ModuleType, directory: Path, line: list[str]) -> subprocess.Popen:
    """A process of its own, in a group of its own; output goes to `out` and `err` there."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    with (directory / "out").open("w") as out, (directory / "err").open("w") as err:
        return subprocess.Popen(
            [sys.executable, script.__file__, *line], stdout=out, stderr=err, cwd=directory,
            env=os.environ | {"PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip


def await_end(process: subprocess.Popen, seconds: float = 60) -> int:
    """Its exit code; processes that hang are killed, with all of their group."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def await_file(process: subprocess.Popen, directory: Path, pattern: str) -> Path:
    """The first file of that pattern, as soon as it is there."""
    for _ in range(6000):
        if found := sorted(directory.glob(pattern)):
            return found[0]
        assert process.poll() is None, (directory / "err").read_text()
        time.sleep(0.01)
    raise TimeoutError(pattern)


def next_second() -> None:
    """Wait for the clock: names of event files of one second sort by the process alone."""
    time.sleep(1.01 - time.time() % 1)
