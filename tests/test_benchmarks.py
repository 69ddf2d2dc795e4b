"""Arithmetic of the benchmarks, and that the READMEs tell what the committed files say."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ONE_SCRIPT, SCRIPTS
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import TimeLimit
from helpers import make_agent, make_run, prepare_rollout, roll, small_args

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
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


@pytest.mark.parametrize(
    ("script", "env"),
    [
        (SCRIPTS[0], "Flicker"),
        pytest.param(SCRIPTS[0], "Walk", marks=pytest.mark.slow),
        pytest.param(SCRIPTS[1], "Flicker", marks=pytest.mark.slow),
        pytest.param(SCRIPTS[1], "Walk", marks=pytest.mark.slow),
    ],
    indirect=["script"],
)
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


def test_critics_of_v_alone_are_not_drawn(inspect_run, tmp_path, monkeypatch):
    """One line and no picture."""
    pytest.importorskip("matplotlib")
    script = importlib.import_module(NAMES[0])
    args = small_args(script, "Walk", run_dir=str(tmp_path), dist_coef=0)
    run_dir = script.train(args)["run_dir"]
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", run_dir, "--episodes", "3"])
    with pytest.raises(SystemExit, match="with --dist-coef 0 its critics have learnt V alone"):
        inspect_run.main()


def test_a_picture_tells_the_flags_of_its_run(inspect_run, script):
    """Presets, and what differs from them; not the machine, nor what a run is called, how it
    is saved and evaluated. A flag of 0 counts, and weights that the run started from."""
    args = script.preset_args("calibrated", gamma=0.9, norm_obs=False, seed=3, eval_episodes=1)
    told = inspect_run.flags_of(script, args)
    assert told.startswith("--preset calibrated ")
    assert sorted(told.split(" --")[1:]) == ["gamma 0.9", "no-norm-obs"]
    assert inspect_run.flags_of(script, script.Args(masked_obs=(1, 3))) == "--masked-obs 1 3"
    args = script.Args(ent_coef=0.1, ent_coef_final=0.0, init_from="runs/before")
    flags = "--ent-coef 0.1 --ent-coef-final 0.0 --init-from runs/before"
    assert inspect_run.flags_of(script, args) == flags
    assert inspect_run.flags_of(script, script.Args(torch_threads=2)) == "default flags"


def test_the_newest_copy_of_the_script_is_inspected(inspect_run, tmp_path):
    """A run that was resumed by a script of another name has two. A folder without one is none."""
    with pytest.raises(ValueError, match="no run directory"):
        inspect_run.script_of(tmp_path)
    for age, name in ((9, "before"), (1, "after")):
        copy = tmp_path / f"{name}.py"
        copy.write_text(f"class ValueDistribution:\n    name = {name!r}\n")
        os.utime(copy, (1e9 - age, 1e9 - age))
    (tmp_path / "notes.py").write_text("raise SystemExit\n")
    assert inspect_run.script_of(tmp_path).ValueDistribution.name == "after"


class CutAfter3(gym.Wrapper):
    """A task that cuts its episodes by itself."""

    def reset(self, **options):
        self.steps = 0
        return self.env.reset(**options)

    def step(self, action):
        obs, reward, terminated, _, info = self.env.step(action)
        self.steps += 1
        return obs, reward, terminated, self.steps == 3, info


@pytest.mark.parametrize("cuts", [True, False])
def test_episodes_that_the_task_cuts_are_told(inspect_run, monkeypatch, cuts):
    """gymnasium's time limit is lifted. A cut of the task's own is not, and a remark says so."""
    calibration = importlib.import_module("calibration")
    script = importlib.import_module(NAMES[1])
    wrap = CutAfter3 if cuts else gym.Wrapper
    make = lambda: wrap(gym.make("Pendulum-v1"))  # noqa: E731
    monkeypatch.delitem(gym.registry, "MayCut-v0", raising=False)
    gym.register("MayCut-v0", make, max_episode_steps=2)
    args = script.Args(env_id="MayCut-v0", gamma=0.5)
    env = script.make_env(args)
    agent = script.Agent(env.observation_space, env.action_space, args)
    played = calibration.play_on(script, agent, args, 4, 10)
    assert played.cut == 4 * cuts
    seen = inspect_run.Seen(played.alive, played.returns, played.returns, None, played.cut)
    told = " ".join(inspect_run.remarks(seen, args))
    assert ("4 of 4 episodes were cut by the task itself" in told) == cuts
    del gym.registry["MayCut-v0"]


@pytest.mark.slow
def test_a_task_of_a_drawn_run_may_lie_in_the_working_directory(inspect_run, tmp_path, monkeypatch):
    """As it does where README's own task is trained."""
    name = "a_task_to_inspect"
    (tmp_path / f"{name}.py").write_text(
        "import gymnasium as gym\ngym.register('Mine-v0', lambda: gym.make('CartPole-v1'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    module = importlib.import_module(NAMES[1])
    args = small_args(module, "", env_id=f"{name}:Mine-v0", run_dir=str(tmp_path / "runs"))
    directory = Path(module.train(args)["run_dir"])
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    monkeypatch.delitem(sys.modules, name)
    assert inspect_run.inspect(directory, 2, [0, 1, 2, 3]).exists()


@pytest.mark.parametrize("line", [["nowhere"], ["RUN", "--states", "0", "1", "2", "99999"]])
def test_what_cannot_be_drawn_costs_one_line(inspect_run, script, tmp_path, monkeypatch, line):
    """A directory without a run; a step beyond the episode."""
    args = small_args(script, "Walk", run_dir=str(tmp_path))
    run_dir = script.train(args)["run_dir"]
    words = [run_dir if word == "RUN" else word for word in line]
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", *words])
    monkeypatch.setattr(inspect_run.common, "require", lambda *_: None)  # nothing is drawn
    with pytest.raises(SystemExit, match=r"^error: .*(no run directory|1?[0-9]* steps are kept)"):
        inspect_run.main()


def test_a_run_without_a_discount_costs_one_line(inspect_run, script, tmp_path, monkeypatch):
    """Where a time limit cuts an episode, its return is that of a policy that plays on."""
    run_dir = script.train(small_args(script, "Walk", run_dir=str(tmp_path), gamma=1.0))["run_dir"]
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", run_dir])
    monkeypatch.setattr(inspect_run.common, "require", lambda *_: None)  # nothing is drawn
    with pytest.raises(SystemExit, match=r"^error: --gamma 1: .* for ever"):
        inspect_run.main()


def test_a_missing_package_is_named_ahead_of_all_work(inspect_run, monkeypatch):
    """With the requirements that have it; the run directory is not even looked for."""
    find = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == "matplotlib" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", "nowhere"])
    said = "^error: matplotlib not installed; pip install matplotlib, or pip install -r benchmarks/"
    with pytest.raises(SystemExit, match=said):
        inspect_run.main()


# -------------------------------------------------------------------------------- comparing critics
@pytest.fixture(scope="module")
def critics():
    """The program."""
    return importlib.import_module("critics")


def test_interquartile_mean_of_all_runs_of_all_tasks(critics):
    """Eight scores 1 to 8, two tasks of four seeds: without 1, 2 and 7, 8 the mean is 4.5."""
    scores = np.array([[8, 3], [1, 6], [5, 2], [4, 7]], float)
    assert critics.iqm(scores) == 4.5
    scores[scores == 8] = 1000  # an outlier
    assert critics.iqm(scores) == 4.5


def test_probability_of_improvement_counts_pairs_of_a_task(critics):
    """Task 1: of the pairs (1, 2) x (0, 2), 1 > 0, 1 < 2, 2 > 0, 2 = 2: 2.5 of 4. Task 2: all four
    smaller. Mean 0.3125. Scores of different tasks are never compared."""
    mine, theirs = np.array([[1, 10], [2, 20]]), np.array([[0, 100], [2, 200]])
    assert critics.improvement(mine, theirs) == 0.3125
    assert critics.improvement(theirs, mine) == 0.6875


def test_fewer_low_runs_than_the_rival(critics):
    """One of four ends below 0.9, of the rival's three: 0.75 - 0.25."""
    mine, theirs = np.array([[0.9, 1], [0.5, 2]]), np.array([[0.8, 0], [0.89, 1]])
    assert critics.fewer_low(mine, theirs).value == 0.5
    assert critics.fewer_low(theirs, mine).value == -0.5


def test_the_interval_of_a_difference_of_shares(critics):
    """Newcombe 1998, table II, method 10: 56 of 70 minus 48 of 80 is 0.2 (0.0524 to 0.3339), and
    10 of 10 minus 0 of 20 is 1 (0.6791 to 1). None of 50 against six: 0.12, and its lower end is
    0.12 - hypot(0.12 - 0.0562, 0.0713) by Wilson's ends of 6 of 50 and of 0 of 50."""
    assert critics.common.difference_of_shares((48, 80), (56, 70)) == pytest.approx(
        (0.2, 0.0524, 0.3339), abs=1e-4
    )
    assert critics.common.difference_of_shares((0, 20), (10, 10)) == pytest.approx(
        (1, 0.6791, 1), abs=1e-4
    )
    assert critics.common.difference_of_shares((0, 50), (6, 50))[1] == pytest.approx(
        0.0243, abs=5e-4
    )


def test_bootstrap_draws_seeds_in_each_task_by_itself(critics):
    """Entries stay in their column, rows do not stay together, and some are drawn twice."""
    scores = np.arange(40.0).reshape(20, 2)
    every = critics.resampled(scores, np.random.default_rng(0))
    assert every.shape == (critics.REPEATS, *scores.shape)
    drawn = every[0]
    for column in (0, 1):
        assert set(drawn[:, column]) < set(scores[:, column])
    assert (drawn[:, 1] - drawn[:, 0] != 1).any()
    assert (every[0] != every[1]).any()


def test_figures_of_many_samples_are_those_of_each(critics):
    """Scores with a leading axis, as the bootstrap has them."""
    rng = np.random.default_rng(2)
    mine, theirs = rng.random((3, 4, 2)).round(1), rng.random((3, 5, 2)).round(1)
    assert critics.iqm(mine).tolist() == [critics.iqm(one) for one in mine]
    each = [critics.improvement(one, two) for one, two in zip(mine, theirs, strict=True)]
    assert critics.improvement(mine, theirs).tolist() == each


def test_an_interval_holds_what_is_known(critics):
    """100 seeds of a uniform law on two tasks: the IQM's standard error is about 0.02; of equal
    scores the interval is a point."""
    rng = np.random.default_rng(1)
    point, low, high = critics.estimate(critics.iqm, rng.random((100, 2)))
    assert low < 0.5 < high
    assert low < point < high
    assert 0.04 < high - low < 0.16
    assert str(critics.estimate(critics.iqm, np.ones((5, 3)))) == "1.00 (1.00 to 1.00)"


def test_the_forest_has_a_head_and_a_line_for_every_critic_that_has_run(critics, monkeypatch):
    """Beside the scalar critic stands whoever has a rival; what has not run has no line."""
    family = critics.FAMILIES["recurrent"]
    ones = np.ones((2, 5))
    raw = {"32 quantiles": 2 * ones, "scalar": ones}
    monkeypatch.setattr(critics, "raw_scores", lambda family: raw)
    monkeypatch.setattr(critics, "REPEATS", 3)
    head, quantiles, scalar = critics.forest_lines("name", family._replace(low={}))
    assert head == critics.Line("name: 5 tasks, 2 seeds", head=True)
    assert (quantiles.text, quantiles.default, quantiles.end) == ("32 quantiles", True, (2, 2, 2))
    assert quantiles.better == (1, 1, 1)
    assert (scalar.default, scalar.end, scalar.better) == (False, (1, 1, 1), None)


def test_scores_are_one_for_the_mean_of_the_reference(critics):
    """Reference 100 and 300 on a task whose zero is -100: mean 200 is 1, 500 is 2."""
    family = critics.Family({"a": "", "b": ""}, {"a": -100}, {}, "ours", range(2))
    raw = {"ours": np.array([[100.0, 4], [300, 6]]), "other": np.array([[500.0, 10], [-100, 0]])}
    scores = critics.normalised(family, raw)
    assert scores["ours"].mean(0).tolist() == [1, 1]
    assert scores["other"].tolist() == [[2, 2], [0, 0]]


def test_runs_below_the_reference_are_told(critics, monkeypatch):
    """Below 0.9 of the reference's mean of 2 and 20: what has less than 1.8 and 18."""
    raw = {"ours": np.array([[2.0, 20], [2, 20]]), "theirs": np.array([[1.7, 18], [1.9, 5]])}
    monkeypatch.setattr(critics, "raw_scores", lambda family: raw)
    family = critics.Family({"x:a-v0": "", "b": ""}, {}, {}, "ours", range(2))
    told = critics.lost("Some", family)
    assert told[0] == "Some, below 0.9 at the end:"
    assert told[2:] == ["* ours: none", "* theirs: a-v0 1.70; b 5.00"]


def test_mean_of_a_run_counts_steps_not_episodes():
    """Return 0 at every step until 1,000, then 100 every 100 steps until 2,000: half of the steps
    each. A mean of 20 episodes rises by 5 every 100 steps of the second half, 0 to 45: 22.5, and
    11.25 over all. A mean of episodes would be 1."""
    points = [(step, 0) for step in range(1, 1001)] + [(1000 + 100 * i, 100) for i in range(1, 11)]
    learning = importlib.import_module("learning")
    assert learning.mean_over_run(np.array(points, float)) == pytest.approx(11.25, abs=0.3)


def test_a_family_has_rows_of_its_own_seeds(critics, tmp_path, monkeypatch):
    """The grid of `learning` may have run more of them."""
    archive = keep_scores(tmp_path, monkeypatch, {1: 5.0, 2: 6.0, 3: 7.0})
    assert critics.at_the_end(made_up_cell([2, 3, 4])) == [6, 7]
    assert critics.over_the_run(made_up_cell([3])) == [0.5]
    assert len(archive.rows_of(made_up_cell([]))) == 3


def test_the_scalar_critic_is_the_usual_one(critics):
    """kappa times the loss of its one output is a quarter of (V - R)^2, its V is that output."""
    quantile = importlib.import_module("distributional_ppo_lstm")
    args = quantile.parse_args(critics.SCALAR.split())
    dist = quantile.ValueDistribution(args)
    values = quantile.torch.tensor([[-3.0], [0.0], [2.5]])
    returns = quantile.torch.tensor([1.0, 0.5, 2.0])
    loss, _ = dist.loss(values[None], returns[:, None], returns, values[None])
    expected = 0.25 * (values[:, 0] - returns).square()
    assert (args.kappa * loss[0]).tolist() == pytest.approx(expected.tolist())
    dist.moments.mean.fill_(7)
    assert dist.value(values).tolist() == pytest.approx([4, 7, 9.5])


# ------------------------------------------------------------------------------------------- tuning
def test_share_of_later_steps_in_episodes_below_the_threshold():
    """After step 100 two episodes: 300 steps above, 100 below: a quarter. What came before, and
    the episode that ended at step 100 itself, do not count."""
    tune = importlib.import_module("tune")
    episodes = np.array([[50, 1.0], [100, 9], [400, 10], [500, 2]])
    lengths = np.array([50, 50, 300, 100])
    assert tune.share_lost(episodes, lengths, 100, 5) == 0.25
    assert tune.share_lost(episodes, lengths, np.inf, 5) == 1


def test_flags_in_another_order_are_one_setting():
    """Also where one is given twice: its last value holds, as for the scripts."""
    common = importlib.import_module("common")
    assert common.flag_parts("--kappa 1 --gamma 0.9") == {"--gamma 0.9", "--kappa 1"}
    assert common.flag_parts("--kappa 0 --norm-obs --kappa 1") == {"--kappa 1", "--norm-obs"}
    assert common.flag_parts("") == set()
    assert common.flag_values("--a 1e-3 --b x 2") == {"--a": (0.001,), "--b": ("x", 2)}
    assert common.flag_values("--a 1e-3") != common.flag_values("--a 1e-4")


def test_settings_are_told_by_what_differs(monkeypatch):
    """Two settings, one of them in two orders; the discount is that of both."""
    tune = importlib.import_module("tune")
    rows = [
        {"flags": flags, "task": "a", "script": "s", "seed": seed, "return_mean": seed}
        for flags, seed in (("--g 1 --k 2", 1), ("--k 2 --g 1", 3), ("--g 1", 8))
    ]
    empty = dict.fromkeys(("steps_to_threshold", "share_lost", "commit"), "")
    monkeypatch.setattr(tune.Table, "rows", lambda self: [row | empty for row in rows])
    told = tune.report("a")
    assert told[0] == "a, all with --g 1:"
    assert told[4].startswith("| s | --k 2 | 2 | 2.0 | 1.0 |")
    assert told[5].startswith("| s | none | 1 | 8.0 | 8.0 |")
    assert len(tune.report("a", [3])) == 5


def test_steps_to_the_threshold_are_those_of_most_runs():
    """Two of three reach it: the median of 10, 30 and never is 30."""
    tune = importlib.import_module("tune")
    assert tune.steps_needed(np.array([10, np.inf, 30])) == "30 (2 of 3)"
    assert tune.steps_needed(np.array([10, np.inf])) == "never (1 of 2)"
    assert tune.steps_needed(np.array([])) == "-"


def test_what_minigrid_shows_is_one_hot():
    """Each of 49 cells has one of 11 things, of 6 colours and of 3 states. A key and a ball are
    codes 5 and 6 of the things, and both are seen in one of thirty episodes that open anywhere."""
    pytest.importorskip("minigrid")
    importlib.import_module("envs")
    env = gym.make("MiniGrid-MemoryS7-OneHot-v0")
    things = set()
    for seed in range(30):
        obs, _ = env.reset(seed=seed)
        codes = env.unwrapped.gen_obs()["image"]
        cells = obs.reshape(7, 7, 20)
        for first, last, channel in ((0, 11, 0), (11, 17, 1), (17, 20, 2)):
            part = cells[..., first:last]
            assert (part.sum(-1) == 1).all()
            np.testing.assert_array_equal(part.argmax(-1), codes[..., channel])
        things |= set(codes[..., 0].flat)
    assert {5, 6} <= things


def test_last_returns_are_of_the_last_twentieth_of_the_steps():
    """Of 100 steps those after the 95th."""
    learning = importlib.import_module("learning")
    points = np.array([[50, 1.0], [95, 2], [96, 5], [100, 7]])
    assert learning.last_returns(points) == 6


def test_tasks_on_which_the_peer_is_ahead_are_named(monkeypatch):
    """Means 2, 1 and 0.5 beside 1, 1 and 0.6: a tie counts as at least the peer's. A task that
    only one of the two has run does not count."""
    learning = importlib.import_module("learning")
    scores = {
        "a": [1, 3],
        "b": [1],
        "c": [0.5],
        "A": [1],
        "B": [0, 2],
        "C": [0.6],
        "d": [5],
        "D": [],
    }
    monkeypatch.setattr(learning, "scores_of", lambda cell: scores[cell.script])
    monkeypatch.setattr(learning, "rows_of", lambda cell: scores[cell.script])
    cells = {name: learning.Cell(f"task-{name.lower()}", name, "", "", ()) for name in scores}
    pairs = [(cells[name], cells[name.upper()]) for name in "abcd"]
    told = learning.beside("Title", pairs)
    assert told == "Title: at least the peer's mean on 2 of 3 tasks; behind on task-c."


def test_scores_beside_published_ones():
    """Over CleanRL's 1443, 2383 and 2288: 1 and 2, 3 and 3, 4 and 10; without the lowest and the
    highest 2, 3, 3, 4: 3.00. A third seed of one task is not pooled. Means over the zoo's 5819,
    2410 and 3479: 2164.5, 7149 and 16016 give 0.372, 2.966 and 4.604, on average 2.65."""
    learning = importlib.import_module("learning")
    scores = {
        "HalfCheetah-v5": [1443, 2886, 2164.5],
        "Hopper-v5": [7149, 7149],
        "Walker2d-v5": [9152, 22880],
    }
    told = learning.over_published(scores)
    assert "that it reports 3.00; mean of score over the zoo's 2.65" in told
    assert told.endswith("(HalfCheetah-v5 0.37, Hopper-v5 2.97, Walker2d-v5 4.60)")


# ---------------------------------------------------------------------------- what is kept of a run
def made_up_cell(seeds):
    """A task without a threshold."""
    return importlib.import_module("common").Cell("pkg:Walk-v0", "script", "default", "", seeds)


def keep_scores(folder, monkeypatch, scores):
    """An archive for `learning`, with a run of two episodes for each seed's final evaluation."""
    common = importlib.import_module("common")
    learning = importlib.import_module("learning")
    archive = common.Archive(folder)
    monkeypatch.setattr(learning, "ARCHIVE", archive)
    for seed, score in scores.items():
        same = {**made_up_cell([]).setting._asdict(), "seed": seed, "steps": 1000}
        row = {"return_mean": score, "mean_over_run": 0.5, "last_returns": seed, "seconds": 9}
        bins = common.thinned(np.array([[10, 1.0], [1000, 2]]), 1000)
        archive.keep(same | row | {"commit": "abcdef0"}, bins)
    return archive


def test_thinning_keeps_the_mean_and_the_returns_at_the_ends_of_bins():
    """Episodes of 7 steps until step 500, then of 100: 71 of return 1 and 5 of return 3. Bins of 10
    steps in which none ends are left out, the others have one or two. The mean of the last 20 does
    not stop at the border of a bin."""
    common = importlib.import_module("common")
    steps = [*range(7, 500, 7), *range(600, 1001, 100)]
    points = np.array([(step, 1.0 if step < 500 else 3.0) for step in steps])
    bins = common.thinned(points, 1000)
    assert [one.step for one in bins] == [*range(10, 501, 10), *range(600, 1001, 100)]
    assert {one.episodes for one in bins} == {1, 2}
    assert sum(one.episodes for one in bins) == len(points)
    mean = sum(one.mean * one.episodes for one in bins) / len(points)
    assert mean == pytest.approx(points[:, 1].mean(), rel=1e-12)
    assert [one.last_20 for one in bins[-5:]] == pytest.approx([1.1, 1.2, 1.3, 1.4, 1.5])


def test_a_hundred_bins_whose_ends_are_of_the_runs_steps():
    """One episode a step, 1,000 of them; and a peer's, which ends beyond its steps."""
    common = importlib.import_module("common")
    points = np.stack([np.arange(1, 1001), np.arange(1000)], 1).astype(float)
    bins = common.thinned(points, 1000)
    assert bins[0] == (10, 4.5, 10, 4.5)
    assert bins[-1] == (1000, 994.5, 10, 989.5)
    assert len(bins) == 100
    assert len(common.thinned(points, 2000)) == 50
    assert common.thinned(points, 500) == bins


def test_what_a_row_says_is_computed_before_thinning():
    """The return is 500 in episodes of one step from step 101 to 120, else 0 in episodes of 100
    steps. The threshold is reached at step 119 (19 of 20 are 475), the bins of 1,000 steps have
    nothing above 360, and the last twentieth is 0."""
    learning = importlib.import_module("learning")
    common = importlib.import_module("common")
    good = [learning.Point(step, 500.0) for step in range(101, 121)]
    later = [learning.Point(step, 0.0) for step in range(200, 100_001, 100)]
    cell = common.Cell("CartPole-v1", NAMES[1], "default", "", [1])
    points = [learning.Point(100, 0.0), *good, *later]
    row = learning.learnt(cell, points)
    assert row["steps_to_threshold"] == 119
    assert row["last_returns"] == 0
    assert row["mean_over_run"] > 0
    assert max(one.mean for one in common.thinned(np.array(points), 100_000)) < 360
    assert learning.learnt(cell, later)["steps_to_threshold"] == np.inf
    assert "steps_to_threshold" not in learning.learnt(made_up_cell([1]), points)
    assert learning.learnt(cell, []) == {}
    assert common.thinned(np.array([]), 1000) == []


def test_rows_of_runs_come_in_the_order_of_their_seeds(tmp_path, monkeypatch):
    """Seed 10 behind seed 2; so do curves, and a run that is kept later is seen."""
    archive = keep_scores(tmp_path, monkeypatch, {10: 1.0, 2: 2.0})
    cell = made_up_cell([])
    assert [row["seed"] for row in archive.rows_of(cell)] == ["2", "10"]
    keep_scores(tmp_path, monkeypatch, {1: 3.0})
    assert [row["return_mean"] for row in archive.rows_of(cell)] == ["3.0", "2.0", "1.0"]
    assert [[one.step for one in bins] for bins in archive.curves_of(cell)] == [[10, 1000]] * 3


def test_runs_made_anew_replace_older_ones_when_all_or_five_have_ended(tmp_path, monkeypatch):
    """They have seeds from 8001 up. Until then all older ones count. A cell of older seeds has the
    rows of its own seeds alone. Seeds from 8101 up replace those from 8001 up."""
    archive = keep_scores(tmp_path, monkeypatch, {1: 1.0, 2: 2.0, 8001: 3.0})
    new, old = made_up_cell([8001, 8002]), made_up_cell([1])

    def known(cell):
        seeds = [row["seed"] for row in archive.rows_of(cell)]
        assert len(archive.curves_of(cell)) == len(seeds)
        return seeds

    assert known(new) == ["1", "2"]
    assert known(old) == ["1"]
    keep_scores(tmp_path, monkeypatch, {8002: 4.0})
    assert known(new) == ["8001", "8002"]
    assert known(old) == ["1"]
    assert known(made_up_cell([8002])) == ["8002"]  # 8001 had other flags, say

    again = made_up_cell([8101, 8102])  # of the preset for robots
    keep_scores(tmp_path, monkeypatch, {8101: 5.0})
    assert known(again) == ["8001", "8002"]
    assert known(made_up_cell([8102, 8103])) == ["1", "2"]  # 8003 has no run
    keep_scores(tmp_path, monkeypatch, {8102: 6.0})
    assert known(again) == ["8101", "8102"]
    assert known(new) == ["8001", "8002"]

    ten = made_up_cell(range(8101, 8111))  # of which five are enough, and more are welcome
    keep_scores(tmp_path, monkeypatch, {8103: 5.0, 8104: 5.0})
    assert known(ten) == ["1", "2"]
    for last in (8105, 8106):
        keep_scores(tmp_path, monkeypatch, {last: 5.0})
        assert known(ten) == [*map(str, range(8101, last + 1))]


def test_a_run_replaces_the_same_run_and_archives_are_merged(tmp_path, monkeypatch):
    """Seed 2 stays in its place. Of another archive, by the command line, 2 is taken, 3 added."""
    learning = importlib.import_module("learning")
    (tmp_path / "other").mkdir()
    keep_scores(tmp_path / "other", monkeypatch, {2: 7.0, 3: 8.0})
    archive = keep_scores(tmp_path, monkeypatch, {1: 1.0, 2: 2.0, 4: 4.0})
    keep_scores(tmp_path, monkeypatch, {2: 5.0})

    def kept():
        return [(row["seed"], row["return_mean"]) for row in archive.table.rows()]

    assert kept() == [("1", "1.0"), ("2", "5.0"), ("4", "4.0")]
    monkeypatch.setattr(sys, "argv", ["learning.py", "--merge", str(tmp_path / "other")])
    learning.main()
    assert kept() == [("1", "1.0"), ("2", "7.0"), ("4", "4.0"), ("3", "8.0")]
    assert [row["seed"] for row in archive.curve_rows()] == list("11224433")


def test_an_archive_that_is_not_there_is_not_merged(tmp_path, monkeypatch, capsys):
    """A mistyped folder would end without a word."""
    learning = importlib.import_module("learning")
    archive = keep_scores(tmp_path, monkeypatch, {1: 1.0})
    before = archive.table.path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["learning.py", "--merge", str(tmp_path / "othr")])
    with pytest.raises(SystemExit):
        learning.main()
    assert f"--merge {tmp_path / 'othr'}: has no runs.csv" in capsys.readouterr().err
    assert archive.table.path.read_bytes() == before


def test_a_run_is_repeated_without_a_trace(tmp_path, monkeypatch, capsys):
    """Seed 8001 has a row and is trained again; 8002 has none, and 1 is of an older version. Both
    scores are printed, and the files stay as they are."""
    learning = importlib.import_module("learning")
    common = importlib.import_module("common")
    archive = keep_scores(tmp_path, monkeypatch, {1: 1.0, 8001: 2.0})
    cell = made_up_cell([1, 8001, 8002])
    monkeypatch.setattr(learning, "GRID", [cell])
    monkeypatch.setattr(learning, "refuse_other_flags", lambda cells: None)
    monkeypatch.setattr(common, "require", lambda *_: None)
    monkeypatch.setattr(common, "OWN_SCRIPTS", (cell.script,))
    trained = []

    def run_all(work, runs, processes):
        assert work is learning.run_one
        trained.extend(runs)
        return [(run, learning.Result([], {"return_mean": 2.5})) for run in runs]

    monkeypatch.setattr(common, "run_all", run_all)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    line = ["learning.py", "--again", "--only", cell.task]
    monkeypatch.setattr(sys, "argv", line)
    learning.main()
    assert trained == [common.Run(cell, 8001)]
    assert f"{cell.task}, {cell.script}, {cell.variant}, seed 8001: 2.5 now, 2 in the row" in (
        capsys.readouterr().out
    )
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert archive.rows_of(cell)

    for words, error in (
        ([*line, "--seeds", "8002"], "no row of today's scripts matches"),
        (["learning.py", "--again"], "--again needs --only"),
        ([*line, "--report"], "--again needs --only, and does not report"),
    ):
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit):
            learning.main()
        assert error in capsys.readouterr().err
    assert len(trained) == 1


def test_rows_of_an_older_preset_are_told_in_one_line(tmp_path, monkeypatch, capsys):
    """And not by a traceback."""
    learning = importlib.import_module("learning")
    monkeypatch.setattr(learning.common, "require", lambda *_: None)
    monkeypatch.setattr(learning, "missing", lambda *_: raise_value_error("of other flags"))
    monkeypatch.setattr(sys, "argv", ["learning.py"])
    with pytest.raises(SystemExit):
        learning.main()
    assert capsys.readouterr().err.endswith("error: of other flags\n")


def raise_value_error(text):
    """Raise it."""
    raise ValueError(text)


@pytest.mark.parametrize("flags", ["--gamma 0.9 --seed 5", "--env_id=Pendulum-v1", "--resume x"])
def test_flags_that_programs_set_are_refused(flags):
    """`--seed`, a typo of `--seeds`, would train eight equal runs under eight seeds."""
    common, script = map(importlib.import_module, ("common", NAMES[1]))
    said = f"{re.search('--(seed|env.id|resume)', flags)[0].replace('_', '-')}: the program sets"
    with pytest.raises(common.Refused, match=said):
        common.trained(script, "CartPole-v1", 1000, flags).__enter__()


def test_half_a_row_spoils_no_other(tmp_path):
    """A kill in the middle of a write leaves it behind."""
    common = importlib.import_module("common")
    table = common.Table(tmp_path / "table.csv", ("task", "seed", "value"), "\n", ("task", "seed"))
    table.append({"task": "a", "seed": 1, "value": 2})
    with table.path.open("a") as file:
        file.write("a,2")
    table.append({"task": "a", "seed": 3, "value": 4}, {"task": "a", "seed": 1, "value": 9})
    table.path.write_text(table.path.read_text() + "b,1,5")  # an editor's last line, which is whole
    table.append({"task": "b", "seed": 2, "value": 6})
    assert table.path.read_text().splitlines() == [
        "task,seed,value", "a,1,2", "a,3,4", "b,1,5", "b,2,6",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "line", "said"),
    [
        ("versions", ["nosuch", "HEAD"], "nosuch: no commit of this repository"),
        ("unchanged", ["nosuch"], "nosuch: no folder, and no commit that has distributional"),
        ("tune", ["ppo", "CartPole-v1"], "name one of distributional_ppo_lstm, "),
    ],
)
def test_names_that_do_not_exist_cost_one_line(monkeypatch, capsys, program, line, said):
    """Of a commit, a folder, a script."""
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *line])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(program).main()
    assert said in f"{ended.value} {capsys.readouterr().err}"


START = """
import sys, pathlib, common
folder, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
print(flush=True)
sys.stdin.readline()
"""
APPENDING = """
for i in range(300):
    table = common.Table(folder / f"table{i}.csv", ("number", "text"))
    table.append({"number": number, "text": "x" * 20_000})
"""
KEEPING = """
for seed in range(40 * number, 40 * number + 40):
    row = {"script": "s", "task": "t", "variant": "v", "seed": seed}
    common.Archive(folder).keep(row, [common.Bin(step, seed, 1, seed) for step in (5, 10)])
"""


def start_together(text, folder):
    """Three programs, numbers 0 to 2, which begin with this text when all of them have started."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", START + text, str(folder), str(number)],
            cwd=ROOT / "benchmarks",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for program in programs:
        program.stdout.readline()
    for program in programs:
        program.stdin.write("\n")
        program.stdin.flush()
    return programs


def test_programs_that_append_at_once_lose_nothing(tmp_path):
    """Each of 300 new tables has one header and three whole lines."""
    for program in start_together(APPENDING, tmp_path):
        program.communicate()
        assert program.returncode == 0
    lines = [f"{number},{'x' * 20_000}" for number in range(3)]
    for i in range(300):
        header, *rows = (tmp_path / f"table{i}.csv").read_text().split()
        assert (header, sorted(rows)) == ("number,text", lines)


def test_programs_that_keep_runs_at_once_lose_none(tmp_path):
    """Each of 120 runs has its row and its bins. What is read meanwhile is whole, and each run that
    has a row has a curve."""
    archive = importlib.import_module("common").Archive(tmp_path)
    programs = start_together(KEEPING, tmp_path)
    while any(program.poll() is None for program in programs):
        rows = {row["seed"] for row in archive.table.rows()}
        assert rows <= {row["seed"] for row in archive.curve_rows()}
    for program in programs:
        program.communicate()
        assert program.returncode == 0
    assert sorted(int(row["seed"]) for row in archive.table.rows()) == [*range(120)]
    bins = sorted((int(row["seed"]), int(row["step"])) for row in archive.curve_rows())
    assert bins == [(seed, step) for seed in range(120) for step in (5, 10)]


RUNS = """\
script,task,variant,seed,steps,return_mean,steps_to_threshold,last_returns,seconds,commit
script,pkg:Walk-v0,default,2,200000,2.25,,1.5,30,abcdef0
script,pkg:Walk-v0,default,1,200000,-1.75,,0.5,10,abcdef0
script,CartPole-v1,default,1,50000,500.0,20000.0,480.25,8,
script,CartPole-v1,default,2,50000,499.0,inf,420.25,9,
"""
TABLE = """\
| script | Walk-v0 | default | - | 200,000 | 2 | 0.25 | - | -1.75, 2.25 | - | 20 |
| script | CartPole-v1 | default | - | 50,000 | 2 | 499.5 | - | 499.0, 500.0 | not by most (1 of 2) | 8 |
"""  # noqa: E501
EVERY_RUN = """\
| script | Walk-v0 | default | - | 200,000 | -1.750 2.250 | 1.000 | abcdef0 |
| script | CartPole-v1 | default | - | 50,000 | 499.0 500.0 | 450.2 | - |
"""


def test_tables_are_made_from_the_two_files(tmp_path, monkeypatch):
    """Two tasks of two runs each, one of them with a threshold that one run does not reach. A curve
    is the mean of the last 20 episodes at the end of the bin before, not a number before them."""
    common = importlib.import_module("common")
    learning = importlib.import_module("learning")
    archive = common.Archive(tmp_path)
    archive.table.path.write_text(RUNS)
    head = "script,task,variant,seed,step,return,episodes,last_20\n"
    archive.curves.write_bytes(
        gzip.compress(f"{head}script,pkg:Walk-v0,default,1,4000,7,3,5.5\n".encode())
    )
    monkeypatch.setattr(learning, "ARCHIVE", archive)
    walk = made_up_cell([1, 2])
    cells = [walk, replace(walk, task="CartPole-v1"), replace(walk, variant="not run")]
    assert learning.table(cells)[2:] == TABLE.splitlines()
    assert learning.every_run(cells)[2:] == EVERY_RUN.splitlines()
    [first, second] = archive.curves_of(walk)
    assert second == []
    curve = learning.latest(first, np.array([2000, 4000, 6000]))
    np.testing.assert_array_equal(curve, [np.nan, 5.5, 5.5])


def test_the_band_of_curves_worked_by_hand():
    """Two seeds of 0 and 1 at the second step: both draws are one seed a quarter of the time each,
    so that the interval is all there is. Of four seeds the lowest and the highest do not count."""
    learning = importlib.import_module("learning")
    band = learning.iqm_band(np.array([[5.0, 0.0], [5.0, 1.0]]))
    np.testing.assert_array_equal(band, [[5, 0.5], [5, 0], [5, 1]])
    four = learning.iqm_band(np.array([[0.0, 7], [1, 7], [2, 7], [90, 7]]))
    np.testing.assert_array_equal(four.middle, [1.5, 7])
    assert 0 <= four.low[0] < 1.5 < four.high[0] <= 90
    assert four.low[1] == four.high[1] == 7


def test_tasks_and_steps_are_told_in_short():
    """Names without the module that registers them, steps with their unit."""
    common = importlib.import_module("common")
    tasks = {
        "MountainCarContinuousNoVel-v0": "MountainCar, no velocities",
        "popgym:popgym-RepeatFirstEasy-v0": "RepeatFirst",
        "envs:MinAtar/Asterix-v1": "Asterix",
        "HalfCheetah-v5": "HalfCheetah-v5",
    }
    assert {task: common.title_of(task) for task in tasks} == tasks
    counts = {0: "0", -0.5: "-0.5", 2500: "2.5k", -1000: "-1k", 1_500_000: "1.5M"}
    assert {count: common.brief_count(count) for count in counts} == counts


def test_a_figure_is_written_small_and_opaque(tmp_path):
    """White stays white, at 200 dots an inch; no figure stays open."""
    pytest.importorskip("matplotlib")
    from PIL import Image

    common = importlib.import_module("common")
    plt = common.pyplot()
    figure, panel = plt.subplots(figsize=(2, 1))
    panel.plot([0, 1], [0, 1], color=common.OURS)
    common.letter(panel, 1, "a title")
    assert panel.get_title(loc="left") == r"$\bf{(b)}$ a title"
    common.save(figure, tmp_path / "figure.png")
    assert not plt.get_fignums()
    picture = Image.open(tmp_path / "figure.png")
    assert (picture.mode, picture.size) == ("P", (400, 200))
    assert "transparency" not in picture.info
    assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


# ------------------------------------------------------------------------------ programs that train
NAMES = ["distributional_ppo_lstm", "distributional_ppo_categorical"]
COMPOSED = ["ppo_lstm_categorical", "ppo_quantile"]
SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in (NAMES[0], *COMPOSED)]
TINY = (
    "--num-envs 4 --num-steps 16 --total-timesteps 128 --num-minibatches 2 --update-epochs 1 "
    "--hidden-size 8 --eval-episodes 2 --checkpoint-every 0 --save-envs never"
)


def tiny_run(program, task, script, variant="tiny", flags=""):
    """One seed of two iterations, as the program's functions take it."""
    common = importlib.import_module("common")
    seed = common.first_seed(script, task)
    cell = common.Cell(task, script, variant, f"{TINY} {flags}".strip(), [seed])
    return importlib.import_module(program), common.Run(cell, seed)


def keep_as_it_is(monkeypatch, owner, *names):
    """What a program replaces for its process is put back after the test."""
    for name in names:
        monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.mark.parametrize("script", [NAMES[1], *SLOWLY])
def test_calibration_of_a_process_is_measured(script):
    """Every figure is a finite number, for a process whose distribution is known."""
    calibration, run = tiny_run("calibration", "skewed", script, flags="--gamma 0.95")
    row = calibration.run_one(run)
    figures = [row[name] for name in (*calibration.FIGURES, *calibration.FLOORS)]
    assert np.isfinite(figures).all()
    assert len(row["curve"].split()) == 40
    assert row.keys() <= set(calibration.COLUMNS)


@pytest.mark.parametrize("script", ONE_SCRIPT)
def test_calibration_of_a_task_is_measured(script, monkeypatch):
    """Four episodes, more than the environments that the run had; also as a row of tuning."""
    calibration, run = tiny_run("calibration", "CartPoleNoVel-v1", script, flags="--num-envs 2")
    monkeypatch.setattr(calibration, "EPISODES", 4)
    row = calibration.tune_one(run)
    assert np.isfinite([row[name] for name in calibration.REAL_FIGURES]).all()
    assert row["predicted"] > 0
    assert row["flags"] == run.cell.flags


def test_critics_are_measured_before_and_after_they_train_alone(monkeypatch, tmp_path):
    """Two rows of a run. The policy is the same in both, so the second run starts from the weights
    of the first one, and the same episodes serve both."""
    flags = "--preset calibrated --num-envs 2 --seq-len 16"
    calibration, run = tiny_run("calibration", "CartPoleNoVel-v1", NAMES[0], "critics", flags)
    table = replace(calibration.TABLE, path=tmp_path / "calibration.csv")
    monkeypatch.setattr(calibration, "TABLE", table)
    monkeypatch.setattr(calibration, "EPISODES", 4)
    policies = []
    measure = calibration.measure_real

    def note(script, agent, played):
        weights = agent.actor_head.weight.detach().clone()
        policies.append((weights, agent.args.learning_rate, played))
        return measure(script, agent, played)

    monkeypatch.setattr(calibration, "measure_real", note)
    table.append(*calibration.run_one(run))
    assert [row["variant"] for row in table.rows()] == ["presets", "critics"]
    (first, rate, episodes), (second, still, same) = policies
    assert same is episodes
    assert rate > 0
    assert still == 0
    assert first.equal(second)


def test_ways_to_train_the_critics_are_tried_behind_one_run(monkeypatch, tmp_path):
    """A row of the run and a row of every line, which tells its flags. A run that has its rows is
    not missing."""
    flags = "--preset calibrated --num-envs 2 --seq-len 16"
    calibration, run = tiny_run("calibration", "CartPoleNoVel-v1", NAMES[0], "critics", flags)
    tuning = replace(calibration.TUNING, path=tmp_path / "tuning.csv")
    monkeypatch.setattr(calibration, "TUNING", tuning)
    monkeypatch.setattr(calibration, "EPISODES_TRIED", 4)
    monkeypatch.setattr(calibration, "preset_cells", lambda: [run.cell])
    monkeypatch.setattr(calibration, "TRIED", [1000])
    monkeypatch.setattr(calibration, "CRITICS", {NAMES[0]: ("", "--gae-lambda 1")})
    [tried] = calibration.tried_runs([])
    tuning.append(*calibration.try_presets(tried))
    alone = tried.cell.flags.replace("calibrated", "calibrated critics")
    told = [(row["seed"], row["flags"]) for row in tuning.rows()]
    assert told == [
        ("1000", tried.cell.flags),
        ("1000", alone),
        ("1000", f"{alone} --gae-lambda 1"),
    ]
    errors = [float(row["coverage"]) for row in tuning.rows()]
    assert np.isfinite(errors).all()
    assert {row["episodes"] for row in tuning.rows()} == {"4"}
    assert calibration.tried_runs([]) == []


@pytest.mark.parametrize("script", NAMES)
def test_predicted_spread_is_that_of_the_predicted_distribution(script):
    """Beside the mean of what a run logs as value/std_predicted."""
    calibration = importlib.import_module("calibration")
    module = importlib.import_module(script)
    dist = module.ValueDistribution(small_args(module, "Walk"))
    dist.moments.merge(module.torch.tensor(30.0), module.torch.tensor(400.0), 2)
    outputs = module.torch.randn(5, 4, dist.num_outputs)
    nothing = module.torch.zeros(5, 4)
    ends = nothing.bool()
    rollout = SimpleNamespace(rewards=nothing.double(), terminated=ends, truncated=ends)
    logged = dist.describe(outputs, dist.sample_targets(rollout, outputs, 1.0))
    spread = calibration.predicted_std(module, dist, outputs)
    assert spread.shape == (5, 4)
    assert spread.mean() == pytest.approx(float(logged["value/std_predicted"]), rel=1e-5)


class Paying(gym.Env):
    """Pays 10 a step, shows the step, and never ends by itself."""

    observation_space = Box(0, 1e9, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 10.0, False, False, {}


def limited(*limits):
    """A task that pays, in time limits from the inside out."""
    env = Paying()
    for limit in limits:
        env = TimeLimit(env, limit)
    return env


@pytest.mark.parametrize(("limits", "smallest"), [((3, 5), 3), ((5, 3), 3), ((), 10_000)])
def test_all_time_limits_are_lifted(limits, smallest):
    """Of two limits, too, the inner one ends nothing any more."""
    env = limited(*limits)
    script = importlib.import_module("distributional_ppo_lstm")
    assert importlib.import_module("calibration").lift_limit(env, script) == smallest
    env.reset(seed=0)
    assert not any(env.step(0)[3] for _ in range(8))


def test_limits_inside_a_wrapper_of_the_task_stay():
    """It may make one episode of several. The limit outside of it is lifted."""
    env = TimeLimit(type("Trial", (gym.Wrapper,), {})(limited(3)), 5)
    script = importlib.import_module("distributional_ppo_lstm")
    assert importlib.import_module("calibration").lift_limit(env, script) == 5
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(("is_atari", "paid"), [(False, 10), (True, 1)])
def test_what_is_played_on_counts_beyond_the_limit_and_is_clipped_as_critics_learn(is_atari, paid):
    """Half of a reward counts a step later, so returns are twice the reward at each of the three
    steps that the inner limit leaves, and at the first two if no more are asked for."""
    calibration = importlib.import_module("calibration")
    script = SimpleNamespace(__name__="script", make_env=lambda args: limited(3, 5))
    agent = SimpleNamespace(act=lambda obs, deterministic: np.zeros(len(obs), int))
    args = SimpleNamespace(gamma=0.5, seed=1, is_atari=is_atari)
    for most in (2, 10):
        steps = min(most, 3)
        played = calibration.play_on(script, agent, args, 2, most)
        assert played.obs[..., 0].tolist() == [[t, t] for t in range(steps)]
        assert played.alive.shape == (steps, 2)
        assert played.alive.all()
        assert played.returns == pytest.approx(np.full((steps, 2), 2 * paid), rel=1e-4)


class EndsAfterItsNumber(gym.Wrapper):
    """Pays 1 a step. The n-th of them ends after n steps, and must not be stepped again."""

    made = 0

    def __init__(self, env):
        super().__init__(env)
        EndsAfterItsNumber.made += 1
        self.left = EndsAfterItsNumber.made

    def step(self, action):
        assert self.left > 0
        self.left -= 1
        return np.full(1, self.left, np.float32), 1.0, self.left == 0, False, {}


def test_environments_rest_once_their_episode_has_ended(monkeypatch):
    """Of three that end after 1, 2 and 3 steps. Half of a reward counts a step later, so returns at
    the first step are 1, 1 + 1/2 and 1 + 1/2 + 1/4."""
    monkeypatch.setattr(EndsAfterItsNumber, "made", 0)
    calibration = importlib.import_module("calibration")
    script = SimpleNamespace(
        __name__="script", make_env=lambda args: EndsAfterItsNumber(limited(100))
    )
    agent = SimpleNamespace(act=lambda obs, deterministic: np.zeros(len(obs), int))
    args = SimpleNamespace(gamma=0.5, seed=1, is_atari=False)
    played = calibration.play_on(script, agent, args, 3, 10)
    assert played.alive.tolist() == [[True] * 3, [False, True, True], [False, False, True]]
    assert played.returns.tolist() == [[1, 1.5, 1.75], [0, 1, 1.5], [0, 0, 1]]


@pytest.mark.parametrize("script", ONE_SCRIPT)
@pytest.mark.parametrize("task", ["lottery", "road", "cliff"])
def test_risk_of_a_policy_is_measured(script, task):
    """Returns of the mode and of samples; the probability of the lottery's risky arm."""
    flags = "--cvar-alpha 0.2 --cvar-weight 1 --value-target sr_lambda"
    risk, run = tiny_run("risk", task, script, flags=flags)
    row = risk.run_one(run)
    assert np.isfinite([row[name] for name in (*risk.MEASURED, *risk.SAMPLED)]).all()
    assert ("risky" in row) == (task == "lottery")
    assert 0 < row.get("risky", 0.5) < 1


def test_older_rows_of_risk_stand_until_all_variants_have_run(monkeypatch):
    """Five older ones of each variant beside all but one of today's, then beside all. Settings
    without rows are left out."""
    risk = importlib.import_module("risk")
    older = []
    newer = []
    for variant in risk.VARIANTS:
        setting = {"task": "road", "script": risk.LSTM, "variant": variant}
        older.append([setting | {"seed": str(seed)} for seed in range(1, 6)])
        newer.append([setting | {"seed": str(seed)} for seed in risk.SEEDS])
    rows = [row for found in (*older, *newer) for row in found]
    for known, standing in ((rows[:-1], older), (rows, newer)):
        monkeypatch.setattr(risk.Table, "rows", lambda table, known=known: known)
        assert list(risk.groups().values()) == standing


def test_risk_is_that_of_the_preset():
    """A weight of 0.5 is `averse` itself: the task's flags aside, nothing is changed in it."""
    risk = importlib.import_module("risk")
    for cell in risk.cells():
        script = importlib.import_module(cell.script)
        preset = script.PRESETS["averse"].flags
        args = script.parse_args([*cell.flags.split(), "--env-id", f"risk:{cell.task}-v0"])
        changed = {name for name, value in preset.items() if getattr(args, name) != value}
        other = {"cvar_alpha"} if cell.task == "lottery" else set()
        assert changed == other | (set() if cell.variant == "weight 0.5" else {"cvar_weight"})


def test_processes_have_fresh_seeds_once_all_have_run(monkeypatch):
    """Until then the older ones stand; rows of other settings are left as they are."""
    calibration = importlib.import_module("calibration")
    setting = {"task": "skewed", "script": calibration.LSTM, "variant": "recommended"}
    older = [setting | {"seed": seed} for seed in "123"]
    newer = [setting | {"seed": seed} for seed in ("8001", "8002", "8003")]
    other = [{"task": "Hopper-v5", "script": "any", "variant": "mean", "seed": "1"}]
    for fresh, standing in ((newer[:-1], older), (newer, newer)):
        rows = [*older, *fresh, *other]
        monkeypatch.setattr(calibration.Table, "rows", lambda table, rows=rows: rows)
        assert calibration.counted() == [*standing, *other]


@pytest.mark.parametrize("script", ONE_SCRIPT)
@pytest.mark.parametrize("task", ["rare-10", "bad-arm", "rewards-1e8"])
def test_truth_is_measured(script, task, monkeypatch):
    """Value and mean reward; value, arm and evaluation; the evaluation in the task's own unit."""
    truth, run = tiny_run("truth", task, script)
    module = importlib.import_module("common").load_script(script)
    keep_as_it_is(monkeypatch, module, "collect_rollout")
    keep_as_it_is(monkeypatch, module.Run, "log_episodes")
    row = truth.run_one(run)
    told = {"rare-10": {"value", "drawn"}, "bad-arm": {"value", "bad", "mean"}}
    figures = told.get(task, {"mean"})
    assert figures <= row.keys() <= set(truth.COLUMNS)
    assert np.isfinite([row[name] for name in figures]).all()
    if task == "rewards-1e8":
        assert 8 <= row["mean"] <= 500


@pytest.mark.parametrize("script", NAMES)
def test_scaling_knows_what_processes_exchange(script, monkeypatch):
    """Numbers in the all-reduces of a minibatch are those that an update averages, and all
    parameters are in one of them; an iteration has so many minibatches."""
    scaling = importlib.import_module("scaling")
    module = importlib.import_module(script)
    run = make_run(module, "Walk")
    roll(run)
    batch, *_ = prepare_rollout(run)
    sent = []

    run_both = module.run_both

    def one_after_the_other(*given, **between):
        with monkeypatch.context() as patch:
            patch.setattr(module, "average", lambda x: sent.append(x.numel()) or x)
            patch.setattr(module, "WORLD_SIZE", 2)  # one after the other
            return run_both(*given, **between)

    monkeypatch.setattr(module, "run_both", one_after_the_other)
    module.update(run.agent, run.optimizers, batch, run.args, 0.0)
    sizes = scaling.exchanged(run.agent)
    assert sent == 4 * sizes[:2] + 4 * sizes[2:]  # two epochs of two minibatches
    assert sum(sizes) == 3 + sum(p.numel() for p in run.agent.parameters())

    count, sizes = scaling.demand(scaling.Cell(script, "CartPole-v1", 16, 12))
    args = module.Args(env_id="CartPole-v1", num_envs=16, num_steps=128)
    assert count == args.update_epochs * args.num_minibatches
    assert sizes == scaling.exchanged(make_agent(module, args))


def test_scaling_pairs_rows_by_repeat_and_leaves_out_what_was_cut_short(
    monkeypatch, tmp_path, capsys
):
    """Repeat 0 of the first cell came last, repeat 2 has no runs apart, the other cell none."""
    scaling = importlib.import_module("scaling")
    monkeypatch.setattr(scaling, "TABLE", scaling.Table(tmp_path / "rows.csv", scaling.COLUMNS))
    monkeypatch.setattr(scaling, "efficiency_line", lambda *_: [])
    whole, other = scaling.CELLS[:2]
    same = {"kind": "speed", "commit": "a", "cores": 2, "machine": "m"}
    for cell, processes, repeat, value in (
        (whole, 1, 1, 100),
        (whole, 2, 0, 30),
        (whole, 2, 1, 200),
        (whole, "apart", 0, 20),
        (whole, "apart", 1, 200),
        (whole, 1, 0, 10),
        (whole, 1, 2, 1),
        (whole, 2, 2, 9),
        (other, 1, 0, 1),
    ):
        told = {"cell": cell.name, "processes": processes, "repeat": repeat, "value": value}
        scaling.TABLE.append(same | told)
    scaling.report()
    told = capsys.readouterr().out
    assert f"| {whole.name} | 55 | 115 | 2.50 (2.00, 3.00) | 2.00 (2.00, 2.00) |" in told
    assert other.name not in told
    assert "a network of" in told
    assert "this machine" not in told  # no all-reduce was measured
    assert len(scaling.of_commit("a")) == 9


@pytest.mark.slow
def test_scaling_is_measured():
    """One iteration beside the one that warms up, in one process and in two."""
    scaling = importlib.import_module("scaling")
    cell = scaling.Cell(NAMES[0], "CartPole-v1", 4, 2)
    assert scaling.speed(cell, 1) > 0
    assert scaling.speed(cell, 2) > 0


@pytest.mark.parametrize("cell", ["recurrent", "recurrent-seq32", "cartpole"])
def test_speed_runs_and_times_the_parts_of_the_floor(cell, monkeypatch):
    """Both scripts, without the evaluation at the end; every part of the floor once."""
    speed = importlib.import_module("speed")
    work = speed.CELLS[cell]
    work = work._replace(flags=work.flags | {"num_steps": 32, "update_epochs": 2})
    module = importlib.import_module(work.script)
    keep_as_it_is(monkeypatch, module.Run, "evaluate")
    monkeypatch.setattr(module, "play", None)  # no episode is played
    with contextlib.redirect_stdout(io.StringIO()) as told:
        speed.ours(work, work.samples, compiled=False)
    assert "256 of 256 steps" in told.getvalue()
    monkeypatch.setattr(speed, "milliseconds", lambda call: [call(), 1.0][1])
    parts = speed.floor(work)
    assert list(parts) == list(speed.PARTS)
    # a millisecond each: 32 steps that are acted in, one pass of values, 2 epochs of 4 minibatches
    assert [*parts.values()] == [32, 32, 1, 8]


def test_speed_compiles_what_can_be_compiled(monkeypatch):
    """The feed-forward script alone has --compile; other runs never name it."""
    speed = importlib.import_module("speed")
    assert {speed.CELLS[cell].script for cell in speed.COMPILED} == {NAMES[1]}
    asked = []
    for name in NAMES:
        module = importlib.import_module(name)
        keep_as_it_is(monkeypatch, module.Run, "evaluate")
        monkeypatch.setattr(module, "train", asked.append)
    speed.ours(speed.CELLS["cartpole"], 1024, compiled=True)
    speed.ours(speed.CELLS["cartpole"], 1024, compiled=False)
    speed.ours(speed.CELLS["recurrent"], 1024, compiled=False)
    assert [getattr(args, "compile", None) for args in asked] == [True, False, None]
    assert {args.save_envs for args in asked} == {"never"}  # no process reads environments back


def test_speed_times_passes_of_the_lstm(monkeypatch):
    """With resets and without, ours and step by step."""
    speed = importlib.import_module("speed")
    monkeypatch.setattr(speed, "milliseconds", lambda call: [call(), 1.0][1])
    assert len(speed.lstm_pass(speed.CELLS["pass-2"])) == 4


@pytest.mark.parametrize(
    ("program", "threads", "cores"),
    [("ours", "1", 0), ("sb3-2threads", "2", 0), ("ours-1core", "1", 1), ("sb3-1core", "1", 1)],
)
def test_programs_of_the_speed_grid_get_their_threads_and_cores(
    monkeypatch, program, threads, cores
):
    """Two torch threads by the environment and the job; one core by taskset."""
    speed = importlib.import_module("speed")
    called = {}

    def run(command, env, **options):
        called.update(command=command, env=env)
        return subprocess.CompletedProcess(command, 0, stdout='{"inside": 1.0}')

    monkeypatch.setattr(speed.subprocess, "run", run)
    speed.start(speed.Job(program, "cartpole", 1, 1024))
    assert called["env"]["OMP_NUM_THREADS"] == threads
    assert json.loads(called["command"][-1])[2] == int(threads)
    core = min(os.sched_getaffinity(0))  # one that this process may use
    assert (called["command"][:3] == ["taskset", "--cpu-list", str(core)]) == bool(cores)


def test_the_faster_peer_counts():
    """Medians 10 and 12; one that was not measured is none."""
    speed = importlib.import_module("speed")
    one = [{"value": "10", "repeat": "0"}]
    two = [{"value": "12", "repeat": "0"}]
    assert speed.peer({"sb3": one, "sb3-2threads": two}) == "sb3-2threads"
    assert speed.peer({"sb3": two, "sb3-2threads": one}) == "sb3"
    assert speed.peer({"sb3": one, "sb3-2threads": []}) == "sb3"


def test_ratios_are_of_repeats_that_took_turns():
    """Ours 10, 30, 20 in three repeats, the peer 5 and 20 in the first two: medians 20 and 12.5;
    ratios of a repeat 2 and 1.5. Without rows of the peer nothing is known, and nothing drawn."""
    speed = importlib.import_module("speed")
    rows = defaultdict(list)
    for program, values in (("ours", (10, 30, 20)), ("sb3", (5, 20))):
        for repeat, value in enumerate(values):
            rows[program].append({"repeat": str(repeat), "value": str(value)})
    assert speed.ratio(rows, "sb3") == (1.6, 1.5, 2)
    assert speed.compare(rows, "sb3") == "1.6 (1.5, 2.0)"
    assert speed.speeds(rows["ours"]) == (20, 10, 30)
    assert np.isnan(speed.ratio(rows, "sb3-1core", "ours-1core")).all()
    assert np.isnan(speed.speeds([])).all()


def test_a_share_of_the_floor_is_that_of_one_thread():
    """The floor has 40 steps a second. Old rows train in one thread: 30 of them. New ones of LSTMs
    and images train in two: the 20 of one core count, or nothing does. Others go on in one."""
    speed = importlib.import_module("speed")
    old, new = min(speed.ONE_THREAD), "abcdef0"
    for cell, commit, one_core, share in (
        ("recurrent", old, True, "75%"),
        ("recurrent", new, True, "50% on one core"),
        ("recurrent", new, False, "-"),
        ("pong", old, False, "75%"),
        ("pong", new, False, "-"),
        ("minatar", new, False, "-"),
        ("cartpole", new, True, "75%"),
    ):
        rows = defaultdict(list)
        for program, value in (("ours", 30), ("floor", 40), ("ours-1core", 20)):
            if one_core or program != "ours-1core":
                row = {"value": str(value), "commit": commit, "threads": "1"}
                rows[program].append(row)
        assert speed.share_of_floor(cell, rows) == share


def test_a_measurement_that_has_begun_replaces_none():
    """Three repeats of ours and of the peer do. Where there is nothing else, one counts."""
    speed = importlib.import_module("speed")
    same = {"threads": "1", "cell": "cartpole"}
    old, new = ([same | {"commit": commit}] for commit in ("old", "new"))
    both = ("ours", "sb3")
    rows = [one | {"program": program} for program in both for one in 5 * old]
    rows += [one | {"program": "ours"} for one in 3 * new]

    def commit_of(rows):
        return {row["commit"] for row in speed.pick(rows, "1")["cartpole"]["ours"]}

    assert commit_of(rows) == {"old"}
    rows += [one | {"program": "sb3"} for one in 3 * new]
    assert commit_of(rows) == {"new"}
    assert commit_of(rows[-6:-5]) == {"new"}


@pytest.mark.slow
def test_cells_that_lack_rows_are_drawn(tmp_path):
    """Ours alone of one cell; and nothing at all."""
    pytest.importorskip("matplotlib")
    speed = importlib.import_module("speed")
    for rows in ([], [{"threads": "1", "cell": "cartpole", "program": "ours", "value": "10"}]):
        told = [row | {"repeat": "0", "commit": "abc"} for row in rows]
        speed.draw(tmp_path / "speed.png", speed.pick(told, "1"))
        assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_what_a_user_waits_for_worked_by_hand(monkeypatch, tmp_path):
    """Runs of 100 steps in 10 s and 30 s that get there after 40 and 60: 4 s and 18 s, a median of
    11 s after 50 steps. The peer never does. A run that was made anew does not count."""
    speed = importlib.import_module("speed")
    told = ("script", "task", "variant", "steps", "steps_to_threshold", "seconds", "commit")
    columns = (*told, "seed")
    table = speed.Table(tmp_path / "runs.csv", columns)
    for script, variant, steps, seconds, seed in (
        (NAMES[0], "default", 40, 10, 1),
        (NAMES[0], "default", 60, 30, 2),
        (NAMES[0], "default", 10, 90, 8001),
        ("sb3_contrib_recurrent_ppo", "zoo", "inf", 30, 1),
    ):
        row = (script, "CartPoleNoVel-v1", variant, 100, steps, seconds, "abc", seed)
        table.append(dict(zip(columns, row, strict=True)))
    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    assert speed.waiting_lines() == [
        ["CartPoleNoVel-v1", f"{NAMES[0]}, default", "50", "11", "2 of 2", "abc"],
        ["CartPoleNoVel-v1", "sb3_contrib_recurrent_ppo, zoo", "never", "never", "0 of 1", "abc"],
    ]


@pytest.mark.slow
def test_speed_beside_the_peer_is_measured(monkeypatch, tmp_path):
    """A row each of ours, the peer and the floor, each in a process of its own; the report."""
    pytest.importorskip("sb3_contrib")
    speed = importlib.import_module("speed")
    monkeypatch.setattr(speed, "SECONDS", 1)
    line = ["speed.py", "--only", "recurrent", "--repeats", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", line)
    speed.main()
    rows = speed.load(speed.Table(tmp_path / "speed.csv", speed.COLUMNS))
    programs = ["ours", "sb3", "sb3-2threads", "floor", "ours-1core", "sb3-1core"]
    assert [row["program"] for row in rows] == programs
    assert "| recurrent: CartPoleNoVel-v1, 8 x 128 |" in (tmp_path / "speed.md").read_text()


# names that variants of `learning` replace
REPLACED = {
    "no_memory": ["unroll_lstm", "lstm_in_numpy"],
    "value_twins": [],
    "default": [],
}


@pytest.mark.parametrize(
    ("script", "variant"),
    [(NAMES[0], variant) for variant in REPLACED]
    + [(NAMES[1], "default")]
    + [pytest.param(name, "exchanged", marks=pytest.mark.slow) for name in COMPOSED],
)
def test_learning_keeps_a_run(script, variant, monkeypatch, tmp_path):
    """Curve and row of each variant that changes the script's functions."""
    learning, run = tiny_run("learning", "CartPoleNoVel-v1", script, variant)
    module = importlib.import_module("common").load_script(script)
    keep_as_it_is(monkeypatch, module, *REPLACED.get(variant, []))
    keep_as_it_is(monkeypatch, module.ValueDistribution, "move_statistics", "loss")
    if hasattr(module, "Body"):
        keep_as_it_is(monkeypatch, module.Body, "step")
    common = importlib.import_module("common")
    monkeypatch.setattr(learning, "ARCHIVE", common.Archive(tmp_path))
    assert learning.missing([run.cell], [], []) == [run]
    result = learning.run_one(run)
    learning.keep(result)
    assert learning.missing([run.cell], [], []) == []
    [row] = learning.rows_of(run.cell)
    assert [float(row["return_mean"])] == learning.scores_of(run.cell)
    assert row["flags"] == TINY
    assert row["steps"] == "128"
    unknown = {name for name, value in row.items() if not value}
    kind = {"value_outside_support_mean", "value_outside_support_max"}
    assert unknown - {"commit"} == (kind if script in (NAMES[0], COMPOSED[1]) else set())
    assert row["versions"].startswith("torch ")
    [bins] = learning.ARCHIVE.curves_of(run.cell)
    assert sum(one.episodes for one in bins) == len(result.points) > 0


def test_seeds_that_a_cell_has_not_are_none_of_its_runs():
    """Of seeds 1 to 3, those that are named among 2 and 9 leave 2; without names all are left."""
    common = importlib.import_module("common")
    cell = common.Cell("CartPole-v1", common.LSTM, "default", "", range(1, 4))
    assert [run.seed for run in common.runs_of([cell], ["CartPole"], [2, 9])] == [2]
    assert common.runs_of([cell], ["Pendulum"], [2]) == []
    assert [run.seed for run in common.runs_of([cell])] == [1, 2, 3]


def test_rows_of_other_columns_are_refused(tmp_path):
    """They would stand below a header that means something else."""
    common = importlib.import_module("common")
    common.Table(tmp_path / "a.csv", ("x", "y")).append({"x": 1, "y": 2}, {"x": 3, "y": 4})
    other = common.Table(tmp_path / "a.csv", ("y", "x"))
    with pytest.raises(ValueError, match="has the columns x,y"):
        other.append({"x": 1, "y": 2})
    assert [row["x"] for row in other.rows()] == ["1", "3"]


def test_a_run_that_another_program_has_made_is_not_written_again(tmp_path):
    """Both asked for runs without a row at once. Another seed and another step are other rows."""
    common = importlib.import_module("common")
    table = common.Table(tmp_path / "a.csv", ("seed", "step", "x"), once=("seed", "step"))
    table.append({"seed": 1, "step": 1, "x": 5}, {"seed": 1, "step": 2, "x": 6})
    table.append({"seed": 1, "step": 2, "x": 7}, {"seed": 2, "step": 2, "x": 8})
    assert [row["x"] for row in table.rows()] == ["5", "6", "8"]


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        *((name, "task script variant seed") for name in ("risk", "truth", "calibration", "tails")),
        ("trust", "task script variant seed change level"),
        ("reward_terms", "task script variant seed steps"),
        ("tune", "script task flags seed commit"),
        ("screen", "study task setting flags seed"),
        ("versions", "version task script seed"),
    ],
)
def test_no_run_has_two_rows(name, columns):
    """Each program knows what tells its rows apart, and the committed rows agree."""
    if name == "reward_terms":
        pytest.importorskip("mujoco")
    table = importlib.import_module(name).TABLE
    assert {*table.once} == {*columns.split()}
    keys = [tuple(row[column] for column in table.once) for row in table.rows()]
    assert len(keys) == len({*keys})


class UsageError(Exception):
    """What a script raises if it refuses its flags or a task."""


def refuse(run):
    """Work whose script refuses the run, or fails if its seed is 2."""
    raise (RuntimeError if run.seed == 2 else UsageError)("--env-id X: pip install x")


def test_what_a_script_refuses_is_told_in_a_line(capsys, monkeypatch):
    """A missing package, for instance. A fault of a program has its traceback."""
    common = importlib.import_module("common")
    monkeypatch.setattr(common, "run_alone", common.with_words)
    runs = common.runs_of([common.Cell("X", "s", "v", "", [1, 2])])
    assert [*common.run_all(refuse, runs[:1], 1)] == []
    told = capsys.readouterr().err
    assert told.startswith("error: --env-id X: pip install x\n")
    assert "Traceback" not in told
    assert [*common.run_all(refuse, runs[1:], 1)] == []
    assert "Traceback" in capsys.readouterr().err


def test_rows_of_an_older_preset_do_not_pass_as_calibration(monkeypatch):
    """The rows that are kept have today's flags. One flag of any of four kinds of row is changed:
    the preset alone, with `calibrated`, with the critics trained behind it, a task's own flags."""
    calibration = importlib.import_module("calibration")
    cells = calibration.cells()
    calibration.refuse_other_flags(cells)
    seeds = {"default": 8004, "presets": 8004, "critics": 8004, "mean": 1}
    for variant, seed in seeds.items():
        row = {"task": "CartPoleNoVel-v1", "script": calibration.LSTM, "variant": variant}
        row |= {"seed": str(seed), "flags": "--gamma 0.5"}
        with monkeypatch.context() as patch:
            patch.setattr(calibration.Table, "rows", lambda self, row=row: [row])
            with pytest.raises(ValueError, match=r"--gamma 0\.5, not"):
                calibration.refuse_other_flags(cells)


def test_critics_alone_leave_out_the_bonus_of_the_actor():
    """It would have no effect there, and is refused."""
    calibration = importlib.import_module("calibration")
    [cell] = [x for x in calibration.preset_cells() if x.task == "CartPoleNoVel-v1"]
    assert calibration.critics_flags(cell) == "--preset calibrated critics"


def test_packages_that_are_not_installed_have_no_version():
    """Not every cell needs all of them."""
    speed = importlib.import_module("speed")
    assert speed.version_of("no-such-package") == "none"
    assert speed.version_of("torch").startswith("2.")


def test_tuning_runs_of_the_joint_update_are_not_pooled(monkeypatch):
    """They do not pass as done, and have a line of their own."""
    tune, common = map(importlib.import_module, ("tune", "common"))
    same = {"script": "s", "task": "a", "flags": "--k 2", "steps_to_threshold": ""}
    same |= {"share_lost": "", "return_mean": 5}
    rows = [
        same | {"seed": "1", "commit": min(common.OLDER)},
        same | {"seed": "2", "commit": common.JOINT},
        same | {"seed": "3", "commit": "fffffff"},
    ]
    made = []
    monkeypatch.setattr(tune.Table, "rows", lambda self: rows)
    monkeypatch.setattr(tune.Table, "record", lambda self, work, runs, processes: made.extend(runs))
    tune.run_missing(common.Cell("a", "s", "tuning", "--k 2", [1, 2, 3]), 1)
    assert [run.seed for run in made] == [1, 2]
    assert [line.split("|")[3] for line in tune.report("a")[4:]] == [" 1 ", " 2 "]


def test_no_run_is_added_to_rows_of_earlier_versions(monkeypatch, tmp_path):
    """Of four cells without a row, those of our scripts with seeds of earlier versions are not
    trained: today's update would be mixed in. Peers have such seeds."""
    learning, common = map(importlib.import_module, ("learning", "common"))
    monkeypatch.setattr(learning, "ARCHIVE", common.Archive(tmp_path))
    cells = [
        common.Cell("CartPole-v1", script, "default", "", [seed])
        for script, seed in (
            (common.LSTM, 5), (common.QUANTILE, 5), (common.LSTM, 8001), (learning.SB3, 5),
        )
    ]  # fmt: skip
    found = [(run.cell.script, run.seed) for run in learning.missing(cells, [], [])]
    assert found == [(learning.SB3, 5), (common.LSTM, 8001)]
    assert learning.version_of(cells[3]) == "-"


@pytest.mark.parametrize("program", ["learning", "tune"])
def test_the_commit_of_a_row_is_that_ahead_of_the_run(program, monkeypatch):
    """What is committed while a run lasts has not trained it."""
    module, run = tiny_run(program, "CartPole-v1", NAMES[1])
    common = module.common
    train = common.trained

    def commit_and_train(*given):
        monkeypatch.setattr(common, "origin", lambda: {"commit": "later"})
        return train(*given)

    monkeypatch.setattr(common, "origin", lambda: {"commit": "ahead"})
    monkeypatch.setattr(common, "trained", commit_and_train)
    result = module.run_one(run)
    row = result if program == "tune" else result.row
    assert row["commit"] == "ahead"


def test_without_memory_what_acts_is_what_is_trained(monkeypatch):
    """The first minibatch of an update finds the probabilities with which the rollout acted, also
    when the policy has learnt something."""
    flags = "--update-epochs 8 --learning-rate 0.01"
    learning, run = tiny_run("learning", "CartPoleNoVel-v1", NAMES[0], "no_memory", flags)
    script = importlib.import_module(NAMES[0])
    keep_as_it_is(monkeypatch, script, *REPLACED["no_memory"])
    keep_as_it_is(monkeypatch, script.Body, "step")
    learning.forget(script)
    with learning.common.trained(script, run.cell.task, 1, run.cell.flags) as done:
        assert done.metrics["policy/ratio_first_minibatch_error"] < 1e-4
        assert done.metrics["policy/ratio_std"] > 1e-3


def test_a_variant_without_memory_forgets(monkeypatch):
    """What changes the script is called ahead of the training."""
    learning, run = tiny_run("learning", "CartPole-v1", NAMES[0], "no_memory")
    called = []
    monkeypatch.setattr(learning, "forget", called.append)

    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(learning.common, "trained", stop)
    with pytest.raises(KeyboardInterrupt):
        learning.run_ours(run)
    assert [module.__name__ for module in called] == [NAMES[0]]


def test_a_family_of_critics_is_told_once_it_is_complete(critics, monkeypatch):
    """The older ones are told as they are; today's with the last of its runs."""
    family = critics.FAMILIES[critics.TODAY]
    cells = critics.cells_of(family)
    assert sorted(len(cell.seeds) for cell in cells) == 8 * [5] + 8 * [10]  # single ones; twins
    assert len(cells) == 16
    assert min(seed for cell in cells for seed in cell.seeds) == critics.common.RENEWED
    runs = [(cell, seed) for cell in cells for seed in cell.seeds]
    rows = [{**cell.setting._asdict(), "seed": str(seed)} for cell, seed in runs]

    def rows_of(cell):
        return [row for row in done if critics.common.setting_of(row) == cell.setting]

    monkeypatch.setattr(critics.learning, "rows_of", rows_of)
    done = rows[:-1]
    assert critics.TODAY not in critics.told()
    assert "MinAtar" in critics.told()
    done = rows
    assert critics.TODAY in critics.told()


def test_the_second_five_seeds_are_told_alone_as_well(critics):
    """Scalar rivals of another script have 8006 to 8010, and those of this one 8106 to 8110, since
    its preset for robots has changed. Nothing else differs from all ten seeds."""
    for title, rivals in ((critics.TODAY, 8006), (critics.ONE_FLAG, 8106)):
        every, second = critics.FAMILIES[title], critics.FAMILIES[title + critics.SECOND]
        for name, start in zip(second.critics, (8106, rivals), strict=True):
            assert second.critics[name] == every.critics[name]
            cell = critics.cell_of(second, second.critics[name], "Ant-v5")
            assert list(cell.seeds) == list(range(start, start + 5))
            both = critics.cell_of(every, every.critics[name], "Ant-v5")
            assert cell == replace(both, seeds=cell.seeds)
            assert list(both.seeds) == list(range(start - 5, start + 5))


def test_rows_of_other_flags_do_not_pass_as_done(monkeypatch, tmp_path):
    """Where a preset has changed since, the rows that it left are named. Of the committed ones none
    is such a row."""
    learning, common = map(importlib.import_module, ("learning", "common"))
    learning.refuse_other_flags(learning.GRID)
    archive = common.Archive(tmp_path)
    monkeypatch.setattr(learning, "ARCHIVE", archive)
    cell = common.Cell("Pendulum-v1", common.CATEGORICAL, "default", "--preset pendulum", [8001])
    row = {**cell.setting._asdict(), "seed": 8001, "flags": learning.flags_text(cell)}
    assert "--gamma 0.9 " in row["flags"]
    archive.table.append(row)
    assert learning.missing([cell], [], []) == []
    archive.table.append(row | {"flags": row["flags"].replace("--gamma 0.9 ", "")})
    with pytest.raises(ValueError, match=r"seed 8001.*take such rows out"):
        learning.missing([cell], [], [])
    silent = [row | {"seed": seed, "flags": ""} for seed in (7, 8001)]
    common.refuse_other_flags(silent, [replace(cell, seeds=[7])])  # older rows may tell no flags
    with pytest.raises(ValueError, match=r"seed 8001: , not .*--gamma 0\.9"):
        common.refuse_other_flags(silent, [cell])


def test_peers_have_our_flags():
    """The peer's limit of the KL divergence is 1.5 times smaller, since it multiplies it by 1.5.
    16 environments of 25 steps in 8 minibatches: 50 samples each. The rate falls to 0."""
    learning, common = map(importlib.import_module, ("learning", "common"))
    ours = importlib.import_module(NAMES[0])
    words = (
        "--num-envs 16 --num-steps 25 --num-minibatches 8 --update-epochs 3 --learning-rate 4e-3 "
        "--gamma 0.9 --gae-lambda 0.8 --clip-coef 0.3 --ent-coef 0.02 --max-grad-norm 0.7"
    )
    same = learning.same_options(ours.parse_args(words.split()))
    assert same.pop("learning_rate")(0.5) == pytest.approx(2e-3)
    assert same == {
        "n_steps": 25,
        "batch_size": 50,
        "n_epochs": 3,
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "clip_range": 0.3,
        "ent_coef": 0.02,
        "vf_coef": 0.5,
        "max_grad_norm": 0.7,
        "target_kl": None,
    }
    args = ours.parse_args(["--preset", "mujoco_novel", "--activation", "tanh"])
    assert learning.same_options(args)["target_kl"] * 1.5 == pytest.approx(args.target_kl)
    args.target_kl = None
    assert learning.same_options(args)["target_kl"] is None
    pytest.importorskip("stable_baselines3")
    network = common.peer_network(ours, args)
    assert network["activation_fn"].__name__ == "Tanh"
    assert network["log_std_init"] == -0.5


@pytest.mark.parametrize("variant", ["default", "zoo", "same_flags"])
def test_runs_of_a_peer_share_no_environment(variant, monkeypatch):
    """SB3 gives environment i the seed plus i."""
    pytest.importorskip("sb3_contrib")
    learning, run = tiny_run("learning", "CartPoleNoVel-v1", "sb3_contrib_recurrent_ppo", variant)
    ours = learning.common.load_script(NAMES[0])
    args = ours.parse_args(run.cell.flags.split())
    used = []

    class Enough(Exception):
        """The environments would be made."""

    def make_vec_env(make, number, seed):
        used.append(set(range(seed, seed + number)))
        raise Enough

    monkeypatch.setattr("stable_baselines3.common.env_util.make_vec_env", make_vec_env)
    for seed in (1, 2, 8001, 8002):
        with pytest.raises(Enough):
            learning.make_peer(run._replace(seed=seed), ours, args, None)
    assert sum(map(len, used)) == len(set.union(*used))


def test_letters_of_panels():
    """Neighbours are joined."""
    learning = importlib.import_module("learning")
    assert learning.panels_told([0, 2, 3, 4, 6, 7]) == "(a), (c) to (e), (g) to (h)"


@pytest.mark.parametrize("variant", ["zoo", "equal_time", "same_flags"])
@pytest.mark.slow
def test_learning_trains_the_recurrent_peer(variant, monkeypatch):
    """Its networks from our flags or from the zoo's."""
    pytest.importorskip("sb3_contrib")
    learning, run = tiny_run("learning", "CartPoleNoVel-v1", "sb3_contrib_recurrent_ppo", variant)
    monkeypatch.setattr(learning, "training_seconds", lambda cell: 5)
    points, row = learning.run_one(run)
    assert np.isfinite(row["return_mean"])
    assert row.keys() <= set(importlib.import_module("common").RUN_COLUMNS)
    assert points


@pytest.mark.slow
def test_learning_and_truth_train_the_feed_forward_peer():
    """With our flags, and on the arms."""
    pytest.importorskip("stable_baselines3")
    peer = "stable_baselines3_ppo"
    learning, run = tiny_run("learning", "CartPole-v1", peer, "same_flags")
    assert np.isfinite(learning.run_one(run).row["return_mean"])
    truth, run = tiny_run("truth", "bad-arm", peer)
    assert 0 < truth.run_one(run)["bad"] < 1


@pytest.mark.parametrize("script", ONE_SCRIPT)
def test_tuning_tries_flags(script, monkeypatch, tmp_path):
    """A row, whose evaluation is that of the run, is appended once."""
    tune, run = tiny_run("tune", "CartPole-v1", script, "tuning")
    monkeypatch.setattr(tune, "TABLE", tune.Table(tmp_path / "tuning.csv", tune.COLUMNS))
    row = tune.run_one(run)
    tune.TABLE.append(row)
    assert row["flags"] == run.cell.flags
    assert row["share_lost"] == 1
    tune.run_missing(run.cell, 1)
    turned = "--num-steps 16 " + run.cell.flags.replace("--num-steps 16 ", "")
    tune.run_missing(replace(run.cell, flags=turned), 1)  # the same setting
    assert len(tune.TABLE.rows()) == 1
    assert tune.report("CartPole-v1")[4].startswith(f"| {script} | none | 1 |")


@pytest.mark.slow
def test_every_cell_has_flags_that_its_script_takes():
    """Of all grids; of those that name the flags of ours for a peer, too."""
    common = importlib.import_module("common")
    programs = {
        name: importlib.import_module(name)
        for name in ("calibration", "critics", "learning", "risk", "truth")
    }
    cells = [*programs["learning"].GRID, *programs["learning"].ABLATIONS]
    for name in ("calibration", "critics", "risk", "truth"):
        cells += programs[name].cells()
    gone = ("twin_min_quantile",)  # reported, and cannot be run again
    peers = ("sb3_contrib_recurrent_ppo", "stable_baselines3_ppo")
    ours = dict(zip(reversed(peers), reversed(NAMES)))
    lines = {(cell.script, cell.flags) for cell in cells if cell.variant not in gone}
    for script, flags in sorted(lines):
        module = common.load_script(ours.get(script, script))
        assert module.parse_args(flags.split()).num_iterations > 0
    speed = importlib.import_module("speed")
    for work in (speed.GRID | speed.GROWTH).values():
        assert common.load_script(work.script).Args(**work.flags).num_iterations > 0


def test_presets_are_spelt_out_as_the_script_takes_them():
    """Of two presets the later one has its way, typed flags have it over both, also from ahead."""
    common = importlib.import_module("common")
    script = importlib.import_module(NAMES[1])
    typed = "--twin-reduce min --preset pendulum averse --compile --cvar-weight 0"
    told = common.spelt_out(NAMES[1], typed)
    assert told.endswith(" --twin-reduce min --compile --cvar-weight 0")
    assert "preset" not in told
    assert "env-id" not in told
    mine, theirs = script.parse_args(told.split()), script.parse_args(typed.split())
    assert replace(theirs, env_id=mine.env_id, preset=()) == mine
    assert mine.min_entropy == 1.4
    assert mine.cvar_alpha == 0.1
    same = common.spelt_out(NAMES[1], "--preset pendulum averse --twin-reduce min")
    assert common.flag_parts(told) == common.flag_parts(f"{same} --compile --cvar-weight 0")
    frozen = common.spelt_out(NAMES[1], "--preset mujoco critics --init-from elsewhere")
    assert "--learning-rate 0.0" in frozen  # so flags of the actor's training are idle as well
    assert not {"--log-std-init", "--target-kl"} & {*frozen.split()}
    assert common.spelt_out(NAMES[1], "--gamma 0.9") == "--gamma 0.9"
    alone = common.spelt_out(NAMES[1], "--preset pendulum --num-critics 1")
    assert "twin-reduce" not in alone  # which one critic leaves without effect
    assert script.parse_args(alone.split()).num_critics == 1


def test_a_flag_is_left_out():
    """With its values, wherever it stands; others whose names go on stay."""
    common = importlib.import_module("common")
    flags = " --twin-reduce mean --gamma 0.9 --masked-obs 1 3 --min-entropy 1.4"
    told = "--twin-reduce mean --gamma 0.9 --min-entropy 1.4"
    assert common.without(flags, "--masked-obs") == told
    assert common.without("--min-entropy-penalty 1 --min-entropy 2", "--min-entropy") == (
        "--min-entropy-penalty 1"
    )
    assert common.without("", "--gamma") == ""


@pytest.mark.slow
def test_the_report_of_learning_is_made_from_the_committed_files(monkeypatch, tmp_path, capsys):
    """The same three tables again, and two figures; nothing committed is written."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("sb3_contrib")
    learning = importlib.import_module("learning")
    monkeypatch.setattr(learning, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["learning.py", "--report"])
    learning.main()
    for name in ("learning.md", "every_run.md", "ablations.md"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text()
    for name in ("learning.png", "ablations.png"):
        assert (tmp_path / name).stat().st_size > 50_000


def test_results_are_few_and_light():
    """At most 60 files and 6 MB; no file of a single run."""
    files = [path for path in RESULTS.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert len(files) <= 60
    assert sum(path.stat().st_size for path in files) <= 6_000_000
    assert not [path for path in files if path.stem.startswith("seed")]


@pytest.mark.parametrize(
    "program",
    ["calibration", "critics", pytest.param("risk", marks=pytest.mark.slow), "truth"],
)
def test_reports_are_made_from_the_committed_files(program, monkeypatch, tmp_path, capsys):
    """The same text again, and the figures; nothing committed is written."""
    pytest.importorskip("matplotlib")
    module = importlib.import_module(program)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{program}.py", "--report"])
    if program == "critics":
        monkeypatch.setattr(module, "REPEATS", 3)
    module.main()
    text = (tmp_path / f"{program}.md").read_text()
    if program != "critics":  # its intervals need all repeats
        assert text == (RESULTS / f"{program}.md").read_text()
    assert text in capsys.readouterr().out
    assert (tmp_path / f"{program}.png").exists() == (program != "truth")
    if program == "calibration":
        tuning = (tmp_path / "tuning_calibration.md").read_text()
        assert tuning == (RESULTS / "tuning_calibration.md").read_text()


@pytest.mark.slow
def test_speed_and_scaling_report_on_the_committed_rows(monkeypatch, tmp_path, capsys):
    """The same text again, beside a copy of the rows; tables of all-reduces and efficiency."""
    pytest.importorskip("matplotlib")
    speed = importlib.import_module("speed")
    shutil.copy(RESULTS / "speed.csv", tmp_path)
    monkeypatch.setattr(sys, "argv", ["speed.py", "--report", "--out", str(tmp_path)])
    speed.main()
    assert (tmp_path / "speed.md").read_text() == (RESULTS / "speed.md").read_text()
    scaling = importlib.import_module("scaling")
    cells = [cell for cell in scaling.CELLS if cell.env_id == "CartPole-v1"]
    monkeypatch.setattr(scaling, "CELLS", cells)
    capsys.readouterr()
    scaling.report()
    assert capsys.readouterr().out.count("| recurrent CartPole-v1 16 |") == 3


@pytest.mark.slow
def test_unchanged_tells_versions_apart(monkeypatch, tmp_path, capsys):
    """The present recurrent script beside an identical copy, then beside one with another default:
    many numbers are compared, and all are equal to the last bit only if nothing was changed."""
    unchanged = importlib.import_module("unchanged")
    outcome = unchanged.outcome
    present = []  # what the present script leaves, which is run once

    def outcome_once(script, line):
        if script.parent.name == "old":
            return outcome(script, line)
        present[:] = present or [outcome(script, line)]
        return present[0]

    monkeypatch.setattr(unchanged, "outcome", outcome_once)
    for name in NAMES:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    copy = tmp_path / f"{NAMES[0]}.py"
    text = copy.read_text()
    other, places = re.subn(r"(\n    clip_coef: .* = )0\.2\n", r"\g<1>0.1\n", text)
    assert places == 1
    words = [str(tmp_path), "--only", NAMES[0], "CartPole-v1", "defaults"]
    monkeypatch.setattr(sys, "argv", ["unchanged.py", *words])
    for code, version in ((0, text), (1, other)):
        copy.write_text(version)
        assert unchanged.main() == code
        [row] = capsys.readouterr().out.splitlines()[2:]
        equal, numbers = map(int, cells_of(row)[3].split(" of "))
        assert numbers > 500
        assert (equal == numbers) == (code == 0)
    [found] = present
    assert found["scalar losses/policy_loss"][::2].tolist() == [256, 512, 768]
    assert found["scalar charts/learning_rate"][1::2] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])
    assert found["histogram value/predicted_returns"].size > 20
    assert sum(x.size for name, x in found.items() if name.startswith("scalar")) > 250
    assert found["optimizer exp_avg_sq"].size == found["optimizer exp_avg"].size > 1000
    assert found["optimizer step"].tolist() == [18]  # 3 iterations, 3 epochs, 2 minibatches
    assert not [name for name in found if "SPS" in name or "time/" in name or "hparams" in name]


@pytest.fixture
def unchanged():
    """The program."""
    return importlib.import_module("unchanged")


def test_what_one_version_alone_has_is_a_difference(unchanged):
    """A tag, further points, and a kind of number that both lack are named. The rest is counted."""
    old = {"scalar a": np.ones(2), "scalar b": np.ones(4), "agent w": np.ones(3)}
    new = {"scalar b": np.ones(6), "scalar c": np.ones(2), "agent w": np.ones(3)}
    both = {"histogram h": np.ones(5)}
    found = unchanged.compare(old | both, new | both)
    assert found.largest == np.inf
    assert (found.equal, found.numbers) == (8, 8)
    assert found.where.split("; ") == [
        "there is no optimizer to compare",
        "scalar a in the old version alone",
        "scalar c in the new version alone",
        "scalar b is of 4 numbers, in the new version of 6",
    ]


@pytest.mark.parametrize(
    ("name", "before", "after", "largest"),
    [
        ("scalar grad/norm", [2.0, 4.0], [2.0, 4.5], 0.125),
        ("scalar losses/policy_loss", [0.001, 4.0], [0.002, 4.0], 0.001),
        ("agent w", [0.001, 4.0], [0.002, 4.0], 0.00025),
        ("optimizer exp_avg", [0.0, 0.0], [0.0, 1e-13], 0.1),
        ("scalar a", [np.nan, np.inf], [np.nan, np.inf], 0),
        ("scalar a", [1.0, 1.0], [1.0, np.nan], np.inf),
        ("scalar a", [np.inf, 1.0], [1.0, 1.0], np.inf),
        ("scalar a", [0.0], [-0.0], 0),
    ],
)
def test_what_a_difference_is_relative_to(unchanged, name, before, after, largest):
    """The number, 1 near zero, the largest entry of a state. NaN is equal to NaN alone."""
    result = unchanged.Difference()
    before, after = np.array(before), np.array(after)
    unchanged.add(result, name, before, after)
    assert result.largest == pytest.approx(largest)
    assert result.equal == sum(repr(x) == repr(y) for x, y in zip(before, after))


@pytest.mark.parametrize("newer", [False, True])
def test_optimizers_are_found_in_older_and_newer_checkpoints(unchanged, tmp_path, newer):
    """What a run resumes from is pickled: bytes in older versions, a tensor of bytes in newer."""
    state = {"state": {0: {"exp_avg": torch.tensor([1.0, 2.0])}}, "param_groups": []}
    run = pickle.dumps({"optimizers": [state]})
    if newer:
        run = torch.frombuffer(bytearray(run), dtype=torch.uint8)
    weights = {"w": torch.tensor([3.0])}
    torch.save({"agent": weights, "run": run, "global_step": 5}, tmp_path / "checkpoint.pt")
    found = {name: x.tolist() for name, x in unchanged.kept(tmp_path / "checkpoint.pt").items()}
    assert found == {"agent w": [3.0], "optimizer exp_avg": [1.0, 2.0]}


def test_layouts_of_optimizers_do_not_matter(unchanged):
    """One parameter of five entries is like two optimizers with two parameters and one, which a
    newer version may keep elsewhere. Another entry, or another count of steps, is not."""

    def state(*parts, step=7.0):
        held = {i: {"step": step, "exp_avg": np.array(x)} for i, x in enumerate(parts)}
        return {"state": held, "param_groups": []}

    def told(content):
        return {name: x.tolist() for name, x in unchanged.optimizer_state(content).items()}

    one = told({"optimizer": state([1.0, 2, 3, 4, 5])})
    assert one == {"optimizer step": [7], "optimizer exp_avg": [1, 2, 3, 4, 5]}
    many = [state([1.0], [[2.0, 3]]), state([4.0, 5])]
    assert told({"run": {"optimizers": many}, "step": 3}) == one
    later = told([many[0], state([4.0, 6], step=8.0)])
    assert later == {"optimizer step": [7, 8], "optimizer exp_avg": [1, 2, 3, 4, 6]}


@pytest.fixture
def versions(monkeypatch, tmp_path):
    """The program, with a table of its own."""
    if not (ROOT / ".git").exists():
        pytest.skip("there are no versions without git")
    program = importlib.import_module("versions")
    monkeypatch.setattr(program, "TABLE", replace(program.TABLE, path=tmp_path / "versions.csv"))
    return program


@pytest.mark.slow
def test_a_version_is_trained_and_told(versions):
    """One small run of the last commit: its row; then it is not missing any more. A run that has a
    variant is another version."""
    commit = versions.short("HEAD")
    cell = versions.Cell(
        "CartPole-v1",
        versions.CATEGORICAL,
        commit,
        "--total-timesteps 2048 --eval-episodes 2 --save-envs never",
        (1000,),
    )
    row = versions.run_one(versions.Run(cell, 1000))
    assert row.keys() == set(versions.COLUMNS)
    assert (row["version"], row["seed"]) == (commit, 1000)
    assert 5 < row["return_mean"] < 500
    versions.TABLE.append(row)
    names = [commit, f"{commit} critics_run_on"]
    left = versions.missing(names, ["CartPole-v1"], [1000, 1001])
    found = [(run.seed, run.cell.variant) for run in left]
    assert found == [(1000, names[1]), (1001, names[0]), (1001, names[1])]


def test_texts_of_variants_are_in_the_scripts(versions):
    """Once; otherwise a variant would be nothing. Some are variants of earlier versions."""
    todays = versions.VARIANTS.keys() - versions.OF_EARLIER
    assert len(todays) == len(versions.VARIANTS) - len(versions.OF_EARLIER) > 0
    for variant in todays:
        for name in NAMES:
            text = (ROOT / f"{name}.py").read_text()
            for before, after in versions.VARIANTS[variant]:
                assert text.count(before) == 1
                assert before != after


def test_the_difference_of_two_versions_worked_by_hand(versions):
    """Means 400 and 480 of two seeds each, spread 2 * 20: the standard error is sqrt(2 * 20^2 / 1)
    = 28.3, and Welch's t with 2 degrees of freedom is 4.303: 80 +- 121.7. Below 475 are 2 and 1. A
    seed that one version lacks does not count."""
    row = dict.fromkeys(versions.COLUMNS, 0) | {"task": "CartPole-v1"}
    for version, seed, score in (
        ("a", 1, 380), ("a", 2, 420), ("a", 3, 0), ("b", 1, 460), ("b", 2, 500),
    ):  # fmt: skip
        versions.TABLE.append(row | {"version": version, "seed": seed, "return_mean": score})
    [line] = versions.report("a", "b", [])[2:]
    assert cells_of(line) == [
        "CartPole-v1", "2", "400.0", "480.0", "+80.0", "-41.7 to +201.7", "2, 1",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------ READMEs
def cells_of(line):
    """Return what stands between the bars of a table's line."""
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def test_the_table_of_learning_is_that_of_the_committed_runs():
    """All of its lines are in the file, and no others are there."""
    learning = importlib.import_module("learning")
    rows = learning.table(learning.GRID)
    published = (RESULTS / "learning.md").read_text().split("\n\n")[1].splitlines()
    assert published == rows


def section(title: str) -> str:
    """A section of tuning.md."""
    [found] = (
        part
        for part in (ROOT / "benchmarks" / "tuning.md").read_text().split("\n## ")
        if part.startswith(title)
    )
    return found


def told(text: str, name: str) -> str:
    """The second cell of the line of a table that starts with a name."""
    [line] = [line for line in text.splitlines() if line.startswith(f"| {name}")]
    return cells_of(line)[1]


def test_hopper_is_told_as_its_rows_say():
    """Seeds, mean and low runs for each variant."""
    versions = importlib.import_module("versions")
    text = section("MuJoCo: no memory")
    counts = ["none", "one", "two", "three", "four"]
    for name, names in (
        ("joint update", ["4359cde"]),
        ("apart, the rate is scaled", ["bcab7a2", "7cffc2f"]),
        ("never", ["7cffc2f --norm-adv-memory 0"]),
        ("only below a third", ["7cffc2f soft_rate"]),
    ):
        seeds = [versions.seeds_of(one, "Hopper-v5") for one in names]
        found = [versions.evaluations(one, "Hopper-v5", own) for one, own in zip(names, seeds)]
        scores = np.concatenate(found)
        low = counts[sum(scores < 2000)]
        assert told(text, name) == f"{len(scores)}: {scores.mean():.0f}, {low}"


def test_pendulum_is_told_as_its_rows_say():
    """Seeds, mean and worst run for each variant, of seeds 1000 to 1015."""
    versions = importlib.import_module("versions")
    text = section("How advantages")
    seeds = {str(seed) for seed in range(1000, 1016)}
    for name, version in (
        ("joint update", "4359cde"),
        ("apart, the rate", "6fae19e"),
        ("only below a third", "21ffcba"),
        ("never", "233762b --norm-adv-memory 0"),
        ("`--max-grad-norm 0.1`", "7cffc2f --max-grad-norm 0.1"),
        ("`--learning-rate 1e-3", "7cffc2f --learning-rate 1e-3 --critic-learning-rate 2e-3"),
        ("`--min-entropy-penalty 0.3`", "7cffc2f --min-entropy-penalty 0.3"),
        ("the same with", "7cffc2f --norm-adv-memory 0 --min-entropy-penalty 0.3"),
        ("apart, the gradient", "0da0e65"),
        ("the same in a later", "7cffc2f gradient_scaled"),
    ):
        scores = versions.evaluations(version, "PendulumNoVel-v1", seeds)
        assert told(text, name) == f"{len(scores)}: {scores.mean():.1f}, {scores.min():.1f}"


def test_the_decision_is_told_as_its_rows_say():
    """Mean, lost seeds and share of later steps of both ways, and the interval."""
    versions = importlib.import_module("versions")
    lines = section("How advantages").splitlines()
    both = ("4359cde", "7cffc2f gradient_scaled")
    for start, task, count in (
        ("| CartPole-v1 |", "CartPole-v1", 32),
        ("| CartPoleNoVel-v1 |", "CartPoleNoVel-v1", 32),
        ("| the same, more seeds |", "CartPoleNoVel-v1", 64),
        ("| PendulumNoVel-v1 |", "PendulumNoVel-v1", 32),
        ("| MinAtar Breakout |", "envs:MinAtar/Breakout-v1", 2),
    ):
        [line] = [line for line in lines if line.startswith(start)]
        _, seeds, *ways, difference = cells_of(line)
        known = {str(seed) for seed in range(1000, 1000 + count)}
        scores = [versions.evaluations(one, task, known) for one in both]
        assert int(seeds) == count == len(scores[0]) == len(scores[1])
        for version, found, way in zip(both, scores, ways):
            expected = f"{found.mean():.1f}"
            if task.startswith("CartPole"):  # others have no threshold
                rows = [row for row in versions.TABLE.rows() if row["seed"] in known]
                shares = [
                    float(row["share_lost"])
                    for row in rows
                    if (row["version"], row["task"]) == (version, task)
                ]
                expected += f", {sum(found < 475)}, {100 * np.mean(shares):.1f} %"
            assert way == expected
        if task != "CartPole-v1":  # a ceiling
            assert difference == versions.common.welch(scores[1], scores[0]).told(1)


def test_tuned_settings_are_told_as_their_rows_say():
    """Lines of settings in tuning.md are those of the program."""
    tune = importlib.import_module("tune")
    told = (ROOT / "benchmarks" / "tuning.md").read_text().splitlines()
    told = {line for line in told if line.startswith("| distributional")}
    tasks = {row["task"] for row in tune.TABLE.rows()}
    assert len(told) > 20
    assert not told - {line for task in tasks for line in tune.report(task)}


@pytest.mark.parametrize("title", ["MuJoCo", "MuJoCo, fresh seeds", "MinAtar", "recurrent"])
def test_the_comparison_of_critics_is_that_of_the_committed_runs(critics, title):
    """Lines of a family, intervals and all."""
    family = critics.FAMILIES[title]
    if family.reference not in critics.raw_scores(family):
        pytest.skip("the reference has not run on all tasks yet")
    rows = critics.table(title, family)
    assert "\n".join(["", *rows, ""]) in f"\n{(RESULTS / 'critics.md').read_text()}"


def test_the_tables_of_scaling_are_those_of_the_committed_rows(monkeypatch, capsys):
    """Two processes, and an all-reduce; what is reckoned from them is on the terminal alone."""
    scaling = importlib.import_module("scaling")
    monkeypatch.setattr(scaling, "efficiency_line", lambda *_: [])
    scaling.report()
    speeds, reduces = capsys.readouterr().out.split("\n\n")[1:3]
    page = (ROOT / "benchmarks" / "scaling.md").read_text()
    assert f"\n{speeds}\n" in page
    assert f"\n{reduces}\n" in page


# ------------------------------------------------------------------------- ours and a peer in pairs
def pair_of_popgym(tmp_path, monkeypatch, seeds_of_ours, seeds_of_peer):
    """`learning` with two cells of seeds 8001 and 8002, and an archive with rows of these seeds."""
    common = importlib.import_module("common")
    learning = importlib.import_module("learning")
    task, seeds = "popgym:popgym-Walk-v0", [8001, 8002]
    ours = common.Cell(task, learning.LSTM, "default", "", seeds)
    peer = common.Cell(task, learning.CONTRIB, "equal_time", "", seeds)
    archive = common.Archive(tmp_path)
    monkeypatch.setattr(learning, "ARCHIVE", archive)
    monkeypatch.setattr(learning, "GRID", [peer, ours])
    for cell, made in ((ours, seeds_of_ours), (peer, seeds_of_peer)):
        for seed in made:
            row = {"seed": seed, "steps": 1000, "steps_per_second": seed, "commit": "abcdef0"}
            row |= {"return_mean": 1.0, "seconds": 9, **cell.setting._asdict()}
            archive.keep(row, [])
    return learning, ours, peer


def test_equal_wall_time_is_that_of_the_same_seeds(tmp_path, monkeypatch):
    """Not that of older runs on another machine, nor of a part of the seeds. So peers come last."""
    learning, ours, peer = pair_of_popgym(tmp_path, monkeypatch, [1, 2, 8001], [])
    runs = learning.missing([peer, ours], [], [])
    assert [(run.cell, run.seed) for run in runs] == [(ours, 8002), (peer, 8001), (peer, 8002)]
    with pytest.raises(ValueError, match="run distributional_ppo_lstm first"):
        learning.training_seconds(ours)
    (tmp_path / "all").mkdir()
    learning, ours, _ = pair_of_popgym(tmp_path / "all", monkeypatch, [1, 2, 8001, 8002], [])
    assert learning.training_seconds(ours) == pytest.approx(1000 / 8001.5)


@pytest.mark.parametrize("peers", [[1, 2], [1, 2, 8001], [1, 2, 8001, 8002]])
def test_a_pair_is_renewed_on_both_sides_or_on_none(tmp_path, monkeypatch, peers):
    """Ours has all of its new runs. They count as soon as the peer has its own."""
    learning, *pair = pair_of_popgym(tmp_path, monkeypatch, [1, 2, 8001, 8002], peers)
    expected = ["8001", "8002"] if 8002 in peers else ["1", "2"]
    for cell in pair:
        assert [row["seed"] for row in learning.rows_of(cell)] == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_risky_arm_is_the_second_action(name):
    """Odds of e^(log 3) to 1: 0.75."""
    risk = importlib.import_module("risk")
    script = importlib.import_module(name)
    agent = make_agent(script, small_args(script, "ConstantReward"))
    with torch.no_grad():
        agent.actor_head.weight.zero_()
        agent.actor_head.bias.copy_(torch.tensor([0.0, np.log(3)]))
    first = np.zeros(1, np.float32)
    assert risk.second_action(agent, first) == pytest.approx(0.75)


def test_coverage_worked_by_hand(monkeypatch):
    """Returns 0.05, 0.15 to 0.95, of which each decile of the uniform distribution has its share
    below. A mean of 0.6 is 0.1 too high, and the deviation of the returns is sqrt(0.0825). A step
    behind the end of an episode does not count."""
    calibration = importlib.import_module("calibration")
    returns = np.append(np.arange(10) / 10 + 0.05, 99.0)[:, None]
    played = calibration.Episodes(np.zeros((11, 1, 1)), returns < 9, returns)
    dist = SimpleNamespace(
        quantile=lambda outputs, level: torch.full((11, 1), level),
        mean=lambda outputs: torch.full((11, 1), 0.6),
    )
    monkeypatch.setattr(calibration, "critic_outputs", lambda agent, obs: None)
    monkeypatch.setattr(calibration, "predicted_std", lambda *inputs: np.full((11, 1), 0.5))
    found = calibration.measure_real(None, SimpleNamespace(value_dist=dist), played)
    scale = 0.0825**0.5
    assert found == pytest.approx(
        {"coverage": 0, "bias": 0.1 / scale, "spread": 1, "predicted": 0.5 / scale}, abs=1e-4
    )


def test_errors_of_a_distribution_worked_by_hand():
    """The truth is uniform on [0, 1], so its deviation is 1 / sqrt(12), and the prediction lies 0.1
    above it. The mean of the worst twentieth is 0.025, 0.475 below the mean: 0.095 above it are a
    fifth. A decile has a share of 0.1 too much below, but for ties within 0.001."""
    calibration = importlib.import_module("calibration")
    truth = calibration.LEVELS
    shape = calibration.Shape(truth + 0.1, {"cvar05": 0.12, "cvar25": 0.125 - 0.0375})
    found = calibration.errors(shape, truth)
    expected = {"w1": 0.1 * 12**0.5, "std": 0, "cvar05": 0.2, "cvar25": -0.1, "decile": 0.099}
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ["gaussian", "skewed", "time_limit", "heavy_tail", "disaster"])
def test_processes_have_the_returns_that_are_called_true(name):
    """2,000 episodes; the endless one is followed for 40 steps, whose rest weighs 0.8^40. Mean and
    deviation of a sample, and its Wasserstein distance from the truth, in standard deviations."""
    calibration = importlib.import_module("calibration")
    law = calibration.PROCESSES[name]
    env = calibration.Process(name)
    env.reset(seed=0)
    returns = np.zeros(2000)
    for i in range(len(returns)):
        env.reset()
        for t in range(law.length or 40):
            _, reward, terminated, *_ = env.step(0)
            returns[i] += law.gamma**t * reward
        assert terminated == (law.length > 0)
    levels = (np.arange(2000) + 0.5) / 2000
    truth = np.interp(levels, calibration.LEVELS, law.truth)
    assert np.abs(np.sort(returns) - truth).mean() < 0.06 * law.truth.std()
    assert abs(returns.mean() - law.truth.mean()) < 0.06 * law.truth.std()
    assert returns.std() == pytest.approx(law.truth.std(), rel=0.1)


@pytest.fixture
def evaluated(monkeypatch):
    """Every run has ended with these figures."""
    common = importlib.import_module("common")
    figures = {"return_mean": 1.0, "return_std": 2.0, "return_cvar": 3.0, "length_mean": 4.0}
    metrics = {f"eval/{name}": value for name, value in figures.items()} | {"charts/SPS": 5.0}
    told = {"args": {"total_timesteps": 6}, "versions": {"torch": "2"}}

    @contextlib.contextmanager
    def trained(script, task, seed, flags):
        with tempfile.TemporaryDirectory() as top:
            (Path(top) / "args.json").write_text(json.dumps(told))
            yield SimpleNamespace(metrics=metrics, directory=Path(top), seconds=7)

    point = importlib.import_module("learning").Point
    monkeypatch.setattr(common, "trained", trained)
    monkeypatch.setattr(
        common, "scalars", lambda folder, tags: {tag: [point(1, 1.0)] for tag in tags}
    )
    return figures


def test_figures_of_an_evaluation_stand_in_their_columns(evaluated):
    """In rows of learning and of tuning."""
    for name in ("learning", "tune"):
        program, run = tiny_run(name, "CartPole-v1", NAMES[1], "default")
        made = program.run_one(run)
        row = getattr(made, "row", made)
        assert row["return_mean"] == 1
        assert {key: row[key] for key in evaluated if key in row}.items() <= evaluated.items()


def test_samples_are_evaluated_beside_the_mode(evaluated, monkeypatch):
    """The road's policy, which a run has evaluated by its mode."""
    risk, run = tiny_run("risk", "road", NAMES[1])
    script = risk.common.load_script(NAMES[1])
    asked = []

    def evaluate(agent, args):
        asked.append(args.eval_sampled)
        return {f"eval/return_{name}": 9.0 for name in risk.MEASURED}

    monkeypatch.setattr(script, "load_agent", lambda directory: (None, script.Args()))
    monkeypatch.setattr(script, "evaluate", evaluate)
    row = risk.run_one(run)
    assert asked == [True]
    assert [row[f"sampled_{name}"] for name in risk.MEASURED] == [9] * len(risk.MEASURED)
    assert [row["mean"], row["cvar"]] == [1, 3]
