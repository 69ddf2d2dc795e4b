"""Sweeps over flags on Ray Tune, on this machine; run where `benchmarks/requirements.txt` is."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import await_end

pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "distributional_ppo_categorical"
SMALL = "--env-id CartPole-v1 --total-timesteps 4096 --eval-episodes 2"


def sweep(directory, line):
    """A sweep in a process of its own; output goes to `out` and `err` of the directory."""
    command = [sys.executable, str(ROOT / "benchmarks" / "sweep.py"), *line.split()]
    with (directory / "out").open("a") as out, (directory / "err").open("a") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)


def rows(folder):
    """Of the sweep's CSV."""
    with (folder / "samples.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"{SCRIPT} --vary gamma=choice:0.9:1.5", "--gamma 1.5"),
        (f"{SCRIPT} --vary gamma=uniform:0.9:2", "--gamma 2"),
        (f"{SCRIPT} --vary gama=choice:0.9", "gama is no flag"),
        (f"{SCRIPT} --vary gamma=0.9", "write flag=uniform:LOW:HIGH"),
        (f"{SCRIPT} --vary gamma=uniform:1:0.5", "the lower one first"),
        (f"{SCRIPT} --vary gamma=choice:0.9 --num-envs 0", "--num-envs 0"),
        (f"{SCRIPT} --vary gamma=choice:0.9 --pbt --samples 2", "--pbt takes at least 4"),
        ("--resume nowhere", "nowhere: holds no sweep.json"),
    ],
)
@pytest.mark.slow
def test_wrong_flags_end_in_one_line_before_ray_starts(tmp_path, line, told):
    """And nothing is written."""
    process = sweep(tmp_path, f"{line} --out {tmp_path / 'kept'}")
    assert await_end(process, 60) != 0
    text = (tmp_path / "err").read_text()
    assert told in text
    assert "Traceback" not in text
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
def test_a_failed_sample_is_a_row_and_a_killed_sweep_goes_on(tmp_path):
    """One hidden size is beyond all memory and fails, the other one is the best."""
    folder = tmp_path / "kept"
    vary = "--vary hidden_size=choice:8:99999999 --samples 6 --seeds 2 --reports 2"
    process = sweep(tmp_path, f"{SCRIPT} {SMALL} {vary} --out {folder}")
    while not [*folder.glob("runs/*/seed1/*/checkpoint.pt")]:
        assert process.poll() is None, (tmp_path / "err").read_text()
        time.sleep(0.5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    process = sweep(tmp_path, f"--resume {folder}")
    assert await_end(process, 500) == 0, (tmp_path / "err").read_text()
    found = rows(folder)
    failed = {row["sample"] for row in found if row["error"]}
    trained = {row["sample"] for row in found if row["steps"] == "4096"}
    assert {row["hidden_size"] for row in found if row["error"]} == {"99999999"}
    assert len(failed) + len(trained) == 6
    assert not failed & trained
    assert all(len(row["returns"].split()) == 2 for row in found if not row["error"])
    text = (tmp_path / "out").read_text()
    assert "the best again: python distributional_ppo_categorical.py" in text
    assert "--hidden-size 8" in text
    assert (folder / "sweep.png").stat().st_size > 10_000
