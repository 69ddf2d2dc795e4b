"""The factorial design of benchmarks/screen.py, and what its report says of made rows."""

import importlib
import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))


@pytest.fixture
def screen():
    """The program as a module."""
    return importlib.import_module("screen")


def levels_of(screen):
    """(16, 8): +1 where a setting makes a change, -1 where it does not."""
    return np.array(
        [
            [1 if letter in setting else -1 for letter in screen.CHANGES]
            for setting in screen.design()
        ]
    )


def test_no_effect_is_mixed_with_another_or_with_a_pair(screen):
    """Resolution IV: each column is orthogonal to every other and to each product of two others,
    and each change is made in half of the settings."""
    levels = levels_of(screen)
    assert levels.shape == (16, 8)
    assert len(set(screen.design())) == 16
    assert (levels.sum(axis=0) == 0).all()
    assert (levels.T @ levels == 16 * np.eye(8)).all()
    for one, other in itertools.combinations(range(8), 2):
        pair = levels[:, one] * levels[:, other]
        assert not (levels.T @ pair).any()


def test_the_first_setting_is_the_line_and_the_last_makes_every_change(screen):
    settings = screen.design()
    assert settings[0] == ""
    assert settings[-1] == "ABCDEFGH"
    assert screen.flags_of("") == screen.LINE


def test_effects_are_differences_of_means(screen):
    """With orthogonal columns, least squares gives the mean of the runs with a change minus the
    mean of those without. What is left over has 16 - 9 = 7 degrees of freedom, and an effect is a
    difference of two means of eight runs, so its variance is s^2 (1/8 + 1/8)."""
    settings = screen.design()
    scores = np.random.default_rng(1).normal(0.8, 0.2, 16)
    effects = screen.effects_of(settings, scores)
    levels = levels_of(screen)
    expected = [scores[column > 0].mean() - scores[column < 0].mean() for column in levels.T]
    assert effects.changes == pytest.approx(expected)
    assert effects.mean == pytest.approx(scores.mean())
    left = scores - scores.mean() - levels @ np.array(expected) / 2
    assert effects.error == pytest.approx(np.sqrt(left @ left / 7 * (1 / 8 + 1 / 8)))


def test_too_few_runs_tell_no_effect(screen):
    settings = screen.design()
    with pytest.raises(ValueError, match="9 runs do not tell"):
        screen.effects_of(settings[:9], np.ones(9))
    assert screen.report([]) == ["screening: too few rows."]


def test_the_report_averages_over_robots(screen):
    """Change A is worth 0.2 of the best on Ant and 0.1 on Hopper; others are worth nothing, and
    there is no noise: +0.15 over both, without an error."""
    worth = {"Ant-v5": 0.2, "Hopper-v5": 0.1}
    rows = [
        {"task": task, "setting": setting, "return_mean": screen.BEST[task] * (0.7 + gain * made)}
        for task, gain in worth.items()
        for setting in screen.design()
        for made in ["A" in setting]
    ]
    told = screen.report(rows)
    assert told[0] == "| change | Hopper | Ant | score |"
    first = f"| `{screen.CHANGES['A']}` | +0.10 ± 0.00 | +0.20 ± 0.00 | +0.150 ± 0.000 |"
    assert told[2] == first
    assert all(re.search(r"\| [+-]0.000 ± 0.000 \|$", line) for line in told[3:])


def test_every_setting_is_a_line_of_flags_that_the_script_takes(screen):
    """Each robot has sixteen runs, a seed for each setting, and none is told twice."""
    script = screen.common.load_script(screen.CATEGORICAL)
    runs = screen.all_runs()
    assert len(runs) == 16 * len(screen.BEST)
    assert {run.seed for run in runs} == set(range(2000, 2016))
    for setting in screen.design():
        args = script.parse_args(screen.flags_of(setting).split())
        assert args.num_envs * args.num_steps == 2048
        assert args.twin_reduce == ("mean" if "H" in setting else "min")


def test_runs_with_a_row_are_not_missing(screen, monkeypatch):
    row = {"task": "Ant-v5", "setting": "", "seed": "2000"}
    monkeypatch.setattr(screen.Table, "rows", lambda self: [row])
    left = screen.missing(["Ant-v5"])
    assert len(left) == 15
    assert all(run.cell.variant for run in left)
