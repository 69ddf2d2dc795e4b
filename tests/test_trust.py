"""The program that asks whether the critics know when not to be trusted."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))


@pytest.fixture
def trust():
    """The program."""
    pytest.importorskip("mujoco")
    return importlib.import_module("trust")


def test_changes_are_those_of_the_simulator(trust):
    """Gravity is 9.81 downwards, in twice as much a robot weighs double; half of the friction."""
    script = trust.common.load_script(trust.CATEGORICAL)
    args = script.Args(env_id="Hopper-v5")
    usual, heavy, slippery = (script.make_env(args) for _ in range(3))
    trust.change_robot(heavy, "gravity", 2.0)
    trust.change_robot(slippery, "friction", 0.5)
    assert heavy.unwrapped.model.opt.gravity[2] == pytest.approx(-19.62)
    assert usual.unwrapped.model.opt.gravity[2] == pytest.approx(-9.81)
    before = usual.unwrapped.model.geom_friction
    np.testing.assert_allclose(slippery.unwrapped.model.geom_friction[:, 0], before[:, 0] / 2)
    np.testing.assert_allclose(slippery.unwrapped.model.geom_friction[:, 1:], before[:, 1:])


def test_the_area_worked_by_hand(trust):
    """Of 2, 4 against 1, 2, 3: larger in 1 + 3 of 6 pairs, equal in one: 4.5 / 6."""
    assert trust.area(np.array([2, 4]), np.array([1, 2, 3])) == pytest.approx(0.75)


def test_a_signal_is_compared_with_what_is_usual_at_the_same_step(trust):
    """Usual episodes have 1, 2, 3 and 3, 4, 5: by step 2, 3, 4, so their distances are -1 and 1.
    A changed one that ends after one step, at 2.5, is 0.5 above the first: more than one of two.
    Without regard to the step its mean would be 2.5, beside 2 and 4."""
    usual = np.ma.array([[1.0, 2, 3], [3, 4, 5]])
    short = np.ma.masked_all((1, 3))
    short[0, 0] = 2.5
    assert trust.tells(short, usual) == 0.5
    short[0, 0] = 3.5
    assert trust.tells(short, usual) == 1.0
    assert trust.tells(usual, usual) == 0.5


def test_onsets_worked_by_hand(trust):
    """The return falls below 90 of 100 at the third level, the decile warns ahead, twins never."""
    rows = [
        {"return_mean": returns, "return_std": 0, "low_warns": low, "twins_warns": 0.6}
        for returns, low in ((100, 0.5), (95, 0.92), (89, 0.95), (20, 1.0))
    ]
    assert trust.onset(rows) == (2, 1, None)
    other = {"return_std": 0, "low_warns": 0, "twins_warns": 1}
    negative = [other | {"return_mean": x} for x in (-100, -109, -111)]
    assert trust.onset(negative) == (2, None, 0)


def test_a_fall_is_more_than_chance(trust):
    """Deviations of 100 over 30 episodes give the difference an error of 100 sqrt(2 / 30) = 25.8.
    Beside 500, 449 is less than two of them below, though it is below 450; 448 is more."""
    rows = [
        {"return_mean": returns, "return_std": 100, "low_warns": 0, "twins_warns": 0}
        for returns in (500, 449, 448)
    ]
    assert trust.onset(rows).returns == 2


def test_verdicts_worked_by_hand(trust):
    """Of five falls it warns of two in time, two levels and no level ahead; once it is four levels
    late, so that the mean is (-2 + 0 + 4) / 3; once it never warns, and once it had warned of the
    robot as it was. Without a fall it warns once of three times. Of four robots it warns of two."""
    warnings = [1, 2, 7, None, 0, 3, None, 0]
    falls = [3, 2, 3, 1, 5, None, None, None]
    robots = [("Hopper-v5", seed) for seed in "11223334"]
    assert trust.verdict("signal", warnings, falls, robots) == (
        "The signal warns at that level or earlier in 2 of 5 cases of a fall, +0.7 levels after "
        "the fall in the mean of 3; in 1 of 3 cases without a fall; of 2 of 4 unchanged robots."
    )
    assert trust.verdict("signal", [None], [None], robots[:1]) == (
        "The signal warns at that level or earlier in 0 of 0 cases of a fall; "
        "in 0 of 1 cases without a fall; of 0 of 1 unchanged robots."
    )


def test_the_last_steps_of_an_episode_do_not_count(trust, monkeypatch):
    """An untrained Hopper falls soon. Where all steps lie ahead of its end the first one counts."""
    script = trust.common.load_script(trust.CATEGORICAL)
    args = script.preset_args("mujoco", env_id="Hopper-v5", hidden_size=8)
    env = script.make_env(args)
    agent = script.Agent(env.observation_space, env.action_space, args)
    monkeypatch.setattr(trust, "EPISODES", 2)
    monkeypatch.setattr(trust, "STEPS", 1000)
    counts = []
    for ahead in (0, 5, 1000):
        monkeypatch.setattr(trust, "AHEAD", ahead)
        seen = trust.play(script, agent, args, 0)
        counts.append(seen.low.count(axis=1))
        np.testing.assert_array_equal(seen.twins.mask, seen.low.mask)
    lengths, shorter, first = counts
    assert lengths.min() > 5
    np.testing.assert_array_equal(shorter, lengths - 5)
    np.testing.assert_array_equal(first, [1, 1])


def test_a_run_at_tiny_size(trust, monkeypatch, tmp_path, capsys):
    """Every level has a row. The unchanged robot is played once for all changes, and compared with
    itself in other episodes. Noise reaches the critics."""
    pytest.importorskip("matplotlib")
    play = trust.play
    played = []
    monkeypatch.setattr(trust, "play", lambda *given: [play(*given), played.append(given[3:])][0])
    monkeypatch.setattr(trust, "EPISODES", 2)
    monkeypatch.setattr(trust, "RESULTS", tmp_path)
    changes = {"gravity": (1.0, 2.0), "noise": (0.0, 0.4)}
    monkeypatch.setattr(trust, "CHANGES", changes)
    table = trust.Table(tmp_path / "trust.csv", trust.COLUMNS, end="\n")
    monkeypatch.setattr(trust, "TABLE", table)
    flags = f"{trust.FLAGS} --no-compile --total-timesteps 64 --num-steps 8 --num-minibatches 2"
    cell = trust.Cell("Hopper-v5", trust.CATEGORICAL, "calibrated", flags, [1])
    rows = trust.run_one(trust.Run(cell, 1))
    assert [(row["change"], row["level"]) for row in rows] == [
        ("gravity", 1.0), ("gravity", 2.0), ("noise", 0.0), ("noise", 0.4)
    ]  # fmt: skip
    assert played == [(20_000,), (10_000,), (10_000, "gravity", 2.0), (10_000, "noise", 0.4)]
    told = [{name: x for name, x in row.items() if name not in ("change", "level")} for row in rows]
    assert told[0] == told[2]
    assert rows[3]["low_mean"] != rows[2]["low_mean"]
    assert rows[1]["return_mean"] != rows[0]["return_mean"]
    table.append(*rows)
    assert [float(row["level"]) for row in table.rows()] == [1, 2, 0, 0.4]
    trust.report()
    assert "| Hopper-v5 | gravity | 1 |" in (tmp_path / "trust.md").read_text()
    assert (tmp_path / "trust.png").stat().st_size > 10_000


def test_a_low_decile_warns_and_a_high_one_does_not(trust, monkeypatch):
    """3 in usual episodes and 2 in changed ones, where the twins lie further apart as well."""
    masked = np.ma.masked_array
    usual = trust.Seen(np.ones(2), masked(np.full((2, 5), 3.0)), masked(np.full((2, 5), 0.1)))
    changed = trust.Seen(np.ones(2), masked(np.full((2, 5), 2.0)), masked(np.full((2, 5), 0.4)))
    monkeypatch.setattr(trust, "CHANGES", {"gravity": (1.0, 2.0)})
    monkeypatch.setattr(trust, "play", lambda *given: changed if len(given) > 4 else usual)
    monkeypatch.setattr(trust.common, "trained", lambda *given: contextlib.nullcontext(Done()))
    script = SimpleNamespace(load_agent=lambda directory: (None, None), PRESETS={})
    monkeypatch.setattr(trust.common, "load_script", lambda name: script)
    cell = trust.Cell("Hopper-v5", trust.CATEGORICAL, "calibrated", "--gamma 0.9", [1])
    rows = trust.run_one(trust.Run(cell, 1))
    assert [(row["low_warns"], row["twins_warns"]) for row in rows] == [(0.5, 0.5), (1, 1)]


def test_the_signals_are_the_lowest_decile_and_the_distance_of_twins(trust, monkeypatch):
    """A critic says the level that it is asked for, and its twins 5 and 7."""
    script = trust.common.load_script(trust.CATEGORICAL)
    args = script.preset_args("mujoco", env_id="Hopper-v5", hidden_size=8)
    env = script.make_env(args)
    agent = script.Agent(env.observation_space, env.action_space, args)
    monkeypatch.setattr(trust, "EPISODES", 1)

    def quantile(outputs, level):
        return torch.full(outputs.shape[:1], level)

    monkeypatch.setattr(agent.value_dist, "quantile", quantile)
    twins = torch.tensor([[5.0], [7.0]])
    monkeypatch.setattr(agent.value_dist, "value", lambda outputs: twins.expand(outputs.shape[:2]))
    seen = trust.play(script, agent, args, 0)
    assert seen.low.compressed() == pytest.approx(0.1)
    assert seen.twins.compressed() == pytest.approx(2)


class Done:
    """A run that has a folder."""

    directory = "nowhere"
