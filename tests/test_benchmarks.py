"""Arithmetic of the benchmarks, and that the READMEs tell what the committed files say."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import small_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def inspect_run():
    """The program."""
    return importlib.import_module("inspect_run")


def seen(returns, deciles):
    """One episode of as many steps as there are returns, nine deciles each."""
    deciles = np.array(deciles, float).T[:, :, None]  # (9, T, 1)
    returns = np.array(returns, float)[:, None]
    return SimpleNamespace(alive=np.ones_like(returns, bool), returns=returns, deciles=deciles)


def test_returns_are_counted_between_deciles(inspect_run):
    """Deciles 1 to 9; returns 0.5, 1.5, 8.5, 9.5 are below the first, in the second bin, ahead of
    the ninth decile and above it."""
    shares = inspect_run.shares(seen([0.5, 1.5, 8.5, 9.5], [range(1, 10)] * 4))
    assert shares.tolist() == [0.25, 0.25, 0, 0, 0, 0, 0, 0, 0.25, 0.25]


def test_a_return_that_ties_with_deciles_is_shared_out(inspect_run):
    """All nine deciles are 5 and so is the return: the truth is that point, and every bin gets a
    tenth. Of three equal deciles, 4 to 6, the bins 4 to 7 get a quarter each."""
    assert inspect_run.shares(seen([5], [[5] * 9])) == pytest.approx([0.1] * 10)
    some = inspect_run.shares(seen([5], [[1, 2, 3, 5, 5, 5, 7, 8, 9]]))
    assert some == pytest.approx([0, 0, 0, 0.25, 0.25, 0.25, 0.25, 0, 0, 0])


def test_states_after_the_end_do_not_count(inspect_run):
    """The second step is another episode's."""
    two = seen([0.5, 9.5], [range(1, 10)] * 2)
    two.alive[1] = False
    assert inspect_run.shares(two).tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("env", ["Walk", "Flicker"])
def test_a_run_is_drawn(inspect_run, script, tmp_path, monkeypatch, capsys, env):
    """A picture in the run directory, its path and the numbers on the terminal; the returns of the
    picture are discounted sums of what the policy was paid."""
    pytest.importorskip("matplotlib")
    args = small_args(script, env, run_dir=str(tmp_path))
    run_dir = script.train(args)["run_dir"]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", run_dir, "--episodes", "3"])
    inspect_run.main()
    told = capsys.readouterr().out
    assert "states of 3 episodes, discounted returns: mean" in told
    assert Path(run_dir, "critics.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("line", [["nowhere"], ["RUN", "--states", "0", "1", "2", "99999"]])
def test_what_cannot_be_drawn_costs_one_line(inspect_run, script, tmp_path, monkeypatch, line):
    """A directory without a run; a step beyond the episode."""
    args = small_args(script, "Walk", run_dir=str(tmp_path))
    run_dir = script.train(args)["run_dir"]
    words = [run_dir if word == "RUN" else word for word in line]
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", *words])
    with pytest.raises(SystemExit, match=r"^error: .*(no run directory|has 1?[0-9]* steps)"):
        inspect_run.main()
