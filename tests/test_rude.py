"""Tasks that are not polite: they use their buffers again, learn by themselves, move about."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from command import run_main, words
from helpers import make_run, roll, small_args


@pytest.fixture(autouse=True)
def somewhere(monkeypatch, tmp_path):
    """A working directory that the task leaves, and that the test comes back to."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rude(script, **flags):
    """Flags of a small run."""
    flags = {"checkpoint_every": 1, "eval_every": 1, "eval_episodes": 2, "run_dir": "here"} | flags
    return small_args(script, "Rude", **flags)


def test_a_rude_task_is_trained_resumed_and_evaluated(script, somewhere, capsys):
    """All of it lies in the directory that was named, as it was when the run began."""
    code, _, err = run_main(script, capsys, words(rude(script)))
    assert code == 0, err
    [directory] = (somewhere / "here").iterdir()
    assert (directory / "best.pt").exists()
    assert "close() failed" in err
    assert "the simulator hung up" in err
    os.chdir(somewhere)
    line = ["--resume", f"here/{directory.name}", "--total-timesteps", "192"]
    code, _, err = run_main(script, capsys, line)
    assert code == 0, err
    os.chdir(somewhere)
    code, out, err = run_main(script, capsys, ["--evaluate", f"here/{directory.name}"])
    assert code == 0, err
    assert "evaluation of 2 episodes" in out
    assert [path.name for path in (somewhere / "here").iterdir()] == [directory.name]


def test_a_final_image_is_not_the_next_episode_s_first(script):
    """The buffer is overwritten by the reset within the same step. The successor at the limit shows
    5; what is acted on next shows 50."""
    run = make_run(script, "Rude")
    rollout = roll(run)
    assert rollout.truncated[4].all()
    assert (rollout.next_obs[4] == 5).all()
    assert (rollout.obs[5] == 50).all()
    assert (rollout.next_obs[3] == 4).all()


def test_a_task_may_learn_by_itself(script):
    """`step` runs with gradients: what the task learns from is no inference tensor."""
    run = make_run(script, "Rude")
    roll(run)
    weight = run.envs.envs[0].unwrapped.weight
    assert not weight.is_inference()
    assert float(weight.grad) == pytest.approx(12 * 2 * (1 - 3))  # of 12 steps
    assert torch.is_grad_enabled()


def test_a_home_directory_is_found(script, monkeypatch, tmp_path):
    """`--run-dir=~/runs`, which no shell expands."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    args = small_args(script, "Walk", run_dir="~/runs", total_timesteps=48)
    directory = Path(script.train(args)["run_dir"])
    assert directory.parent == tmp_path / "home" / "runs"
    assert not Path("~").exists()


def test_a_folder_with_quotes_runs_no_command(script, tmp_path):
    """The commit is asked for without a shell; where there is no repository it is empty."""
    folder = tmp_path / "it's $(touch crafted)"
    folder.mkdir()
    assert script.commit_of(folder) == ""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    assert len(script.commit_of(folder)) == 40
    assert not Path("crafted").exists()


def test_a_source_in_another_encoding_is_copied(script, monkeypatch, tmp_path):
    """Byte by byte: a comment in Latin-1 must not end a run before it starts."""
    source = tmp_path / "mine.py"
    source.write_bytes(Path(script.__file__).read_bytes() + b"# caf\xe9\n")
    monkeypatch.setattr(script, "__file__", str(source))
    args = small_args(script, "Walk", run_dir=str(tmp_path / "runs"), total_timesteps=48)
    copy = Path(script.train(args)["run_dir"]) / "mine.py"
    assert copy.read_bytes() == source.read_bytes()
