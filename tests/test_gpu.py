"""The program that measures speeds on a GPU. Its loop runs on the CPU here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))


@pytest.fixture
def gpu():
    """The module."""
    pytest.importorskip("matplotlib")
    return importlib.import_module("gpu")


@pytest.mark.parametrize("name", ["CartPole-v1", "recurrent, LSTM 128"])
def test_speed_is_steps_over_the_time_of_the_parts(gpu, name):
    """1,024 steps an iteration over the sum of its parts; two iterations at least have run."""
    told = gpu.measure(gpu.WORK[name], "one thread", 0.01)
    milliseconds = sum(told[part] for part in gpu.PARTS)
    assert told["value"] == pytest.approx(1e3 * 1024 / milliseconds, rel=1e-3)


def test_the_first_iteration_does_not_count(gpu, monkeypatch):
    """Updates take 9 s, then 1 s twice: 2 iterations of 1,024 steps in 2 s, and then it ends."""
    script = gpu.common.load_script(gpu.common.CATEGORICAL)
    seconds = iter([9.0, 1.0, 1.0])

    class Run:
        times = None

        def iterations(self):
            for spent in seconds:
                self.times = {"time/rollout": 0.0, "time/values": 0.0, "time/update": spent}
                yield 0.0

    monkeypatch.setattr(script, "Run", Run)
    monkeypatch.setattr(script, "train", lambda args: [*script.Run().iterations()])
    told = gpu.measure(gpu.WORK["CartPole-v1"], "one thread", 2.0)
    assert told == {"value": 1024.0, "rollout": 0.0, "values": 0.0, "update": 1000.0}
    assert next(seconds, None) is None


def test_the_gain_is_over_the_faster_cpu(gpu):
    """Four threads are faster: medians 20 and 50, repeats 40 / 20, 50 / 10, 60 / 30. A fourth
    repeat that the GPU lacks does not count, and neither do rows of an older version."""
    same = {"work": "CartPole-v1", "gpu": "H200", "commit": "newer"}
    speeds = {"one thread": (5, 6, 7), "four threads": (20, 10, 30), "GPU": (40, 50, 60)}
    rows = [
        same | {"program": program, "repeat": str(repeat), "value": str(value)}
        for program, own in speeds.items()
        for repeat, value in enumerate(own)
    ]
    for program in ("one thread", "four threads"):
        rows.append(same | {"program": program, "repeat": "3", "value": "900"})
    rows = [row | {"commit": "older", "value": "1"} for row in rows] + rows
    assert gpu.gain_of(rows, "CartPole-v1") == (2.5, 2.0, 5.0)


def test_rows_of_changed_scripts_do_not_count(gpu, monkeypatch):
    """Neither as measured nor in the table."""
    rows = [{"commit": "abc+"}, {"commit": "abc"}]
    monkeypatch.setattr(gpu, "TABLE", SimpleNamespace(rows=lambda: rows))
    assert gpu.committed() == rows[1:]


def test_one_repeat_of_a_newer_version_displaces_no_two(gpu):
    """It has gains of 2 and 3, and one of 9 since: a median of 2.5. Two newer repeats displace
    it."""
    same = {"work": "CartPole-v1", "gpu": "H200"}

    def made(commit, *gains):
        return [
            same | {"commit": commit, "program": program, "repeat": str(repeat), "value": value}
            for repeat, gain in enumerate(gains)
            for program, value in (("one thread", "1"), ("four threads", "1"), ("GPU", gain))
        ]

    assert gpu.gain_of(made("older", 2, 3) + made("newer", 9), "CartPole-v1").middle == 2.5
    assert gpu.gain_of(made("older", 2, 3) + made("newer", 9, 9), "CartPole-v1").middle == 9
