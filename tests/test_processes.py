"""One run in many processes, by torchrun: the same run, faults, signals, resuming."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from command import TESTS, await_end, words
from helpers import small_args

BY_THE_CLOCK = ("time/", "charts/SPS")
ROUNDING = "policy/ratio_first_minibatch_error"
TASKS = {
    "discrete": {"env_id": "probes:Staggered-v0", "target_kl": 1e-4, "update_epochs": 4, "learning_rate": 1e-2},
    "continuous": {"env_id": "Pendulum-v1", "num_steps": 75},
}


def flags_of(script, tmp_path, iterations=10, **flags):
    """Flags of a small run with one minibatch an epoch."""
    flags = {"learning_rate": 3e-3, "anneal_lr": False, "num_minibatches": 1} | flags
    flags = {"run_dir": str(tmp_path / "runs")} | flags
    args = small_args(script, "", total_timesteps=10**6, **flags)
    return small_args(script, "", **flags, total_timesteps=iterations * args.batch_size)


def torchrun(script, directory, processes, line, *options):
    """The script in so many processes; output goes to `out` and `err` of the directory."""
    directory.mkdir(exist_ok=True)
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    group = options or ("--standalone",)
    launch = [sys.executable, "-m", "torch.distributed.run", *group]
    with (directory / "out").open("w") as out, (directory / "err").open("w") as err:
        return subprocess.Popen(
            [*launch, f"--nproc-per-node={processes}", script.__file__, *line],
            stdout=out, stderr=err, cwd=directory, start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def checkpoint(top):
    """Weights and last metrics of the only run below a directory."""
    (path,) = top.rglob("checkpoint.pt")
    saved = torch.load(path, weights_only=True)
    return saved["agent"], pickle.loads(saved["run"])


def check_equal(one, two):
    """Metrics within 1e-4, relative; weights and statistics, too."""
    (weights, run), (others, other_run) = one, two
    assert run["step"] == other_run["step"]
    assert run["recent"] == pytest.approx(other_run["recent"], rel=1e-4)
    assert run["logged"].keys() == other_run["logged"].keys()
    for tag, x in run["logged"].items():
        if not tag.startswith(BY_THE_CLOCK) and tag != ROUNDING:
            assert other_run["logged"][tag] == pytest.approx(x, rel=1e-4, abs=1e-5), tag
    for name, x in weights.items():
        assert torch.allclose(others[name], x, rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_give_what_one_gives(script, tmp_path, task, processes):
    """With one minibatch an epoch, ten iterations differ by rounding; time limits, a KL stop."""
    args = flags_of(script, tmp_path / "one", **TASKS[task])
    script.train(args)
    run_of_one = checkpoint(tmp_path / "one")
    if task == "discrete":
        assert run_of_one[1]["logged"]["policy/stopped_early"] == 1
    many = tmp_path / "many"
    process = torchrun(script, many, processes, words(replace(args, run_dir=str(many))))
    assert await_end(process, 120) == 0, (many / "err").read_text()
    check_equal(run_of_one, checkpoint(many))
