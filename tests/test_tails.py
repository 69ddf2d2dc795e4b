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
        ("RareHalfCheetah", 0.01, 70, True),  # ours: a fifth of the probability
        ("RareHopper", 0.02, 50, False),
        ("RareWalker2d", 0.02, 30, False),
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
    for names in (risky_tasks.RISKY, risky_tasks.RARE):
        limits = [gym.spec(f"{name}-v0").max_episode_steps for name in names]
        assert limits == [200, 500, 500]


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
    assert [row["variant"] for row in table.rows()] == [*tails.SHOWN]
    tails.report()
    text = (tmp_path / "tails.md").read_text()
    assert text.count("| RiskyHopper |") == 3
    assert (tmp_path / "tails.png").stat().st_size > 10_000


@pytest.fixture
def tails(monkeypatch, tmp_path):
    """The program, with a table of its own, and unable to run anything."""
    program = importlib.import_module("tails")
    table = replace(program.TABLE, path=tmp_path / "tails.csv")
    monkeypatch.setattr(program, "TABLE", table)
    monkeypatch.setattr(program, "RESULTS", tmp_path)
    monkeypatch.setattr(program, "run_one", None)
    monkeypatch.setattr(program.common, "require", lambda *_: None)
    return program


def test_neutral_policies_differ_from_averse_ones_in_the_weight_alone(tails):
    """A weight of 0 turns one into the other. Penalties are in the task."""
    script = tails.common.load_script(tails.CATEGORICAL)
    cells = tails.cells(tune=True) + tails.cells(tune=False)
    args = {cell.variant: script.parse_args(cell.flags.split()) for cell in cells}
    assert args.keys() == tails.VARIANTS.keys()
    for variant, weight in (("averse 0.25", 0.25), ("averse 0.5", 0.5), ("averse 1.0", 1.0)):
        assert args[variant].cvar_weight == weight
        assert replace(args[variant], cvar_weight=0.0) == args["neutral"]
    assert all(args[f"penalty {number}"] == args["neutral"] for number in (1, 3, 10))


def test_the_criterion_worked_by_hand(tails):
    """(40 - 10) / 100 and (20 - 10) / |-50|: 0.3 and 0.2, a mean of 0.25. The third task has no
    more than 2 % of risky steps and does not count."""
    rows = [
        {"task": task, "variant": variant, "risky_share": share, "mean": mean, "cvar_10": tail}
        for task, share, mean, neutral, averse in (
            ("RiskyHalfCheetah", 0.5, 100, 10, 40),
            ("RiskyHopper", 0.03, -50, 10, 20),
            ("RiskyWalker2d", 0.02, 1, 0, 99),
        )
        for variant, tail in (("neutral", neutral), ("averse 0.5", averse))
    ]
    assert tails.tasks_with_tail(rows) == ["RiskyHalfCheetah", "RiskyHopper"]
    assert tails.criterion(rows, "averse 0.5") == pytest.approx(0.25)
    assert np.isnan(tails.criterion(rows, "averse 1.0"))  # it has not run
    assert np.isnan(tails.criterion([], "averse 0.5"))
    told = tails.choice_lines(rows)
    assert "risky on: RiskyHalfCheetah, RiskyHopper." in told[0]
    assert told[2] == "* averse 0.25 +nan, averse 0.5 +0.250, averse 1.0 +nan"


def test_reported_seeds_wait_for_a_choice_that_tuning_rows_support(tails, monkeypatch, capsys):
    """First neutral rows are missing; then all are there and another weight is better. A task
    without a tail needs neutral rows alone."""
    monkeypatch.setattr(sys, "argv", ["tails.py"])
    first = r"^error: RiskyHalfCheetah \w+ neutral seed 1000: has no row yet"
    with pytest.raises(SystemExit, match=first):
        tails.main()
    for cell, seed in tails.missing(tune=True, words=[], seeds=[]):
        share = 0.01 if cell.task == "RiskyWalker2d" else 0.1
        tail = 2 if cell.variant in ("averse 0.5", "penalty 3") else 1
        if share > tails.TAIL or cell.variant == "neutral":
            row = dict.fromkeys(tails.COLUMNS, 1) | cell.setting._asdict()
            tails.TABLE.append(row | {"seed": seed, "risky_share": share, "cvar_10": tail})
    with pytest.raises(SystemExit, match=r"^error: the tuning rows prefer averse 0\.5, "):
        tails.main()
    monkeypatch.setattr(tails, "CHOSEN", ("averse 0.5", "penalty 3"))
    assert tails.objection(tails.TABLE.rows()) == ""
    tails.report()
    assert "averse 0.5 +1.000" in (tails.RESULTS / "tails.md").read_text()


def test_tuning_never_sees_a_reported_seed(tails):
    """Seeds that are named are some of the cells' own. Neutral runs come first."""
    assert tails.missing(True, [], [8001]) == tails.missing(False, [], [1000]) == []
    runs = tails.missing(True, [], [1000])
    assert {run.seed for run in runs} == {1000}
    assert [run.cell.variant == "neutral" for run in runs] == [True] * 6 + [False] * 36
    assert tails.missing(True, [], []) == runs
    assert len(tails.missing(False, ["RareHopper", "penalty"], [8001, 1000])) == 1


def test_a_task_without_a_tail_has_no_further_run(tails):
    """Once its neutral run has a row. Five of each of three variants are reported."""
    reported = len(tails.missing(False, [], []))
    row = dict.fromkeys(tails.COLUMNS, 1) | {"script": tails.CATEGORICAL, "variant": "neutral"}
    for task, share in (("RareHopper", 0.1), ("RareWalker2d", 0.01)):
        tails.TABLE.append(row | {"task": task, "seed": 1000, "risky_share": share})
    assert tails.missing(True, ["RareWalker2d"], []) == []
    assert len(tails.missing(True, ["RareHopper"], [])) == 7 - 1
    assert len(tails.missing(False, [], [])) == reported - 3 * 5


def test_the_goal_is_a_better_tail_for_a_small_price():
    """The tail is better by far. A mean of 86 beside 100 is within 15 %, one of 84 is not."""
    tails = importlib.import_module("tails")
    same = {"task": "RiskyHopper", "std": 1, "cvar_5": 0, "risky_share": 0.25, "length": 10}
    rows = [
        same | {"variant": variant, "mean": mean, "cvar_10": tail + noise}
        for variant, mean, tail in (("neutral", 100, 0), ("cheap", 86, 50), ("dear", 84, 50))
        for noise in (0, 1)
    ]
    assert [line.split(" | ")[-1] for line in tails.lines_of(rows)[3:]] == ["met |", "missed |"]


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
        "| RiskyHopper | averse 1.0 | 2 | 120 +- 254 | 70 +- 127 | 0 +- 0 | 25.0% | +20.0% "
        "| +60 (-1 to +121) | missed |"
    )
