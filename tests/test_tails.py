"""Risky robots and the program that asks what aversion to risk buys on them."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))


@pytest.fixture
def risky_tasks():
    """The module that registers them."""
    pytest.importorskip("mujoco")
    return importlib.import_module("envs")


def paid(env, seed, risky, steps=4000):
    """What is taken from the reward of each step, and the forward reward, where all are risky."""
    taken = []
    env.reset(seed=seed)
    wrapper = next(one for one in iter_wrappers(env) if hasattr(one, "risky_steps"))
    wrapper.is_risky = lambda info: risky
    wrapper.risky_steps = 0
    for _ in range(steps):
        _, reward, terminated, truncated, info = env.step(env.action_space.sample())
        own = sum(info[name] for name in ("reward_forward", "reward_ctrl", "reward_survive")
                  if name in info)  # fmt: skip
        taken.append((own - reward, info.get("reward_forward", 0.0)))
        if terminated or truncated:
            env.reset()
    assert wrapper.risky_steps == steps * risky
    return np.array(taken)


def iter_wrappers(env):
    """The environment and all that it wraps."""
    while True:
        yield env
        if not hasattr(env, "env"):
            return
        env = env.env


@pytest.mark.parametrize(
    ("name", "probability", "cost", "forfeits"),
    [  # Urpi, Curi & Krause 2021, section 5 and appendix: B(p), the cost, and the forward reward
        ("RiskyHalfCheetah", 0.05, 70, True),
        ("RiskyHopper", 0.1, 50, False),
        ("RiskyWalker2d", 0.1, 30, False),
    ],
)
def test_risky_robots_pay_as_in_the_paper(risky_tasks, name, probability, cost, forfeits):
    """With the probability of the paper, its cost and, for the cheetah, the forward reward; nothing
    in states that are not risky; a penalty at every risky step where there is one."""
    env = gym.make(f"{name}-v0")
    taken, forward = paid(env, 1, risky=True).T
    hit = np.abs(taken) > 1e-3
    share = hit.mean()
    assert abs(share - probability) < 4 * (probability / 4000) ** 0.5
    expected = cost + forfeits * forward[hit]
    np.testing.assert_allclose(taken[hit], expected, atol=1e-4)
    assert np.abs(paid(env, 2, risky=False, steps=200)).max(0)[0] < 1e-4
    env = gym.make(f"{name}Penalty3-v0")
    taken, forward = paid(env, 1, risky=True, steps=300).T
    low = taken < 10
    np.testing.assert_allclose(taken[low], 3, atol=1e-4)
    np.testing.assert_allclose(taken[~low], (3 + cost + forfeits * forward)[~low], atol=1e-4)


def test_when_a_robot_is_at_risk(risky_tasks):
    """Faster than 4; leaning beyond 0.1 (0.5) and up to 0.2 (1), where it falls. Episodes have 200
    and 500 steps."""
    fast = risky_tasks.risky_cheetah()
    assert [fast.is_risky({"x_velocity": v}) for v in (-5, 3.9, 4.1)] == [False, False, True]
    for make, lean in ((risky_tasks.risky_hopper, 0.1), (risky_tasks.risky_walker, 0.5)):
        env = make()
        env.reset(seed=0)
        found = []
        for angle in (0.9, -1.1, 1.9, 2.1):
            env.unwrapped.data.qpos[2] = angle * lean
            found.append(bool(env.is_risky({})))
        assert found == [False, True, True, False]
    limits = {name: gym.spec(f"{name}-v0").max_episode_steps for name in risky_tasks.RISKY}
    assert limits == {"RiskyHalfCheetah": 200, "RiskyHopper": 500, "RiskyWalker2d": 500}


def test_tails_are_measured_and_reported(risky_tasks, monkeypatch, tmp_path, capsys):
    """A run of each variant at tiny size, in this process; every column has its number."""
    pytest.importorskip("matplotlib")
    tails = importlib.import_module("tails")
    monkeypatch.setattr(tails, "EPISODES", 2)
    monkeypatch.setattr(tails, "RESULTS", tmp_path)
    table = tails.Table(tmp_path / "tails.csv", tails.COLUMNS, end="\n")
    monkeypatch.setattr(tails, "TABLE", table)
    small = " --total-timesteps 64 --num-steps 8 --num-minibatches 2 --no-compile"
    for cell in tails.cells(tune=False):
        if cell.task == "RiskyHopper":
            row = tails.run_one(tails.Run(replace(cell, flags=cell.flags + small), 8001))
            assert row.keys() == {*tails.COLUMNS}
            assert row["cvar_5"] <= row["cvar_10"] <= row["mean"]
            assert 0 <= row["risky_share"] <= 1 <= row["length"]
            table.append(row)
    assert len(table.rows()) == len(tails.CHOSEN)
    tails.report()
    text = (tmp_path / "tails.md").read_text()
    assert text.count("| RiskyHopper |") == 3
    assert (tmp_path / "tails.png").stat().st_size > 10_000


def test_the_tails_table_worked_by_hand():
    """Two seeds of 90 and 110, then 100 and 140: means 100 and 120, +20 %. CVaRs 0 and 20, then 60
    and 80: a difference of 60, with a standard error of sqrt(100 + 100), and t(2) = 4.303."""
    tails = importlib.import_module("tails")
    numbers = {"std": 1, "cvar_5": 0, "risky_share": 0.25, "length": 10}
    rows = [
        {"task": "RiskyHopper", "variant": variant, "mean": mean, "cvar_10": tail, **numbers}
        for variant, mean, tail in (
            ("neutral", 90, 0),
            ("neutral", 110, 20),
            ("averse 1.0", 100, 60),
            ("averse 1.0", 140, 80),
        )
    ]
    line = tails.lines_of(rows)[-1]
    assert line == (
        "| RiskyHopper | averse 1.0 | 2 | 120 +- 254 | 70 +- 127 | 0 +- 0 | 25.0% | +20% "
        "| +60 (-1 to +121) |"
    )
