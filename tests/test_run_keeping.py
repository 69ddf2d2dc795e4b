"""What `train` is made of beside the algorithm: schedules, log, progress, checks, the process."""

from __future__ import annotations

import random
import signal
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from command import undisturbed
from helpers import forget_returns, make_run, prepare, roll, small_args


class Writer:
    """Keeps what is written."""

    def __init__(self):
        self.scalars = []
        self.histograms = []
        self.file_writer = self

    def add_summary(self, summary, step):
        self.scalars += [(x.tag, x.simple_value, step) for x in summary.value]

    def add_histogram(self, tag, value, step):
        self.histograms.append((tag, value.tolist(), step))


def test_schedules_fall_linearly_where_they_are_asked_to(script):
    """A quarter of the way: 0.004 to 0 is 0.003, 0.08 to 0.04 is 0.07; else constant."""
    flags = {"learning_rate": 0.004, "ent_coef": 0.08, "ent_coef_final": 0.04}
    args = small_args(script, "Walk", **flags)
    assert script.schedules(args, 0.25) == pytest.approx((0.003, 0.07))
    flags |= {"ent_coef_final": None, "anneal_lr": False}
    args = small_args(script, "Walk", **flags)
    assert script.schedules(args, 0.25) == (0.004, 0.08)


def test_what_is_due_every_third_iteration(script):
    """The third, the sixth; every 0 iterations is never."""
    assert [i for i in range(1, 8) if script.is_due(i, 3)] == [3, 6]
    assert [i for i in range(1, 8) if script.is_due(i, 1)] == [1, 2, 3, 4, 5, 6, 7]
    assert not any(script.is_due(i, 0) for i in range(1, 8))


def test_metrics_of_an_iteration_worked_by_hand(script):
    """300 steps in 2 s; parts of 1, 2 and 4 s; CVaR_0.1 of 1..20 is (1 + 2) / 2."""
    args = small_args(script, "Walk", cvar_alpha=0.1)
    run = script.Run(step=300, seconds=2.0, recent=[float(x) for x in range(20, 0, -1)])
    metrics = script.iteration_metrics(run, [10.0, 11.0, 13.0, 17.0], args)
    assert metrics.pop("charts/recent_returns").tolist() == run.recent
    expected = {"charts/SPS": 150, "time/rollout": 1, "time/values": 2, "time/update": 4}
    assert metrics == pytest.approx(expected | {"cvar/empirical": 1.5})
    run.recent.clear()
    assert metrics.keys() - script.iteration_metrics(run, [0, 1, 2, 3], args) == {"cvar/empirical"}


def test_histograms_hold_what_lies_beyond_their_bins(script, tmp_path):
    """TensorBoard's bins end at 1e20 and it raises where all of a tensor lies beyond."""
    with script.SummaryWriter(str(tmp_path)) as writer:
        for sign in (-1, 1):
            values = sign * torch.tensor([1e21, 1e30], dtype=torch.float64)
            script.log(writer, script.Run(), {"returns": values}, 7)


def test_scalars_are_written_and_remembered_tensors_with_axes_are_histograms(script):
    """A tensor without axes is a scalar; histograms may be left out."""
    writer, run = Writer(), script.Run()
    metrics = {"a": torch.tensor(2.5), "b": 3, "c": torch.tensor([1.0, 4.0])}
    script.log(writer, run, metrics, 7)
    assert writer.scalars == [("a", 2.5, 7), ("b", 3.0, 7)]
    assert writer.histograms == [("c", [1.0, 4.0], 7)]
    assert run.logged == {"a": 2.5, "b": 3.0}
    assert all(type(value) is float for value in run.logged.values())
    script.log(writer, run, {"a": 1.0, "c": metrics["c"]}, 8, False)
    assert (len(writer.histograms), run.logged["a"]) == (1, 1.0)


def test_an_episode_is_written_at_the_step_it_ended(script):
    """Three environments, 30 steps behind: an end at t = 0 is at 33, one at t = 4 at 45."""
    writer, run = Writer(), script.Run(step=30, recent=[0.0] * 99)
    rollout = SimpleNamespace(rewards=torch.zeros(5, 3), episodes=[(0, 1.5, 9), (4, -2.0, 4)])
    script.log_episodes(writer, run, rollout)
    tags = ("charts/episodic_return", "charts/episodic_length")
    assert writer.scalars == [
        (tags[0], 1.5, 33), (tags[1], 9.0, 33), (tags[0], -2.0, 45), (tags[1], 4.0, 45),
    ]  # fmt: skip
    assert run.recent == [0.0] * 98 + [1.5, -2.0]


def test_progress_in_a_file_comes_every_five_seconds_and_at_the_end(script, capsys):
    """Nothing after 4 s, a whole line after 6 s, and the last line whenever it comes."""
    run = script.Run(step=250, seconds=0.5, recent=[1.0, 4.0])
    run.shown = time.time() - 4
    script.show_progress(run, 1000)
    assert capsys.readouterr().out == ""
    run.shown = time.time() - 6
    script.show_progress(run, 1000)
    # 500 steps/s, 750 steps to go: 1.5 s, rounded to even
    line = "250 of 1,000 steps (25%)  500 steps/s  2 s left  return 2.5\n"
    assert capsys.readouterr().out == line
    assert time.time() - run.shown < 3
    run.recent.clear()
    script.show_progress(run, 250)
    assert capsys.readouterr().out == "250 of 250 steps (100%)  500 steps/s  0 s left\n"


def test_progress_on_a_terminal_is_rewritten_in_place(script, capsys, monkeypatch):
    """Five times a second; the last line stays."""
    monkeypatch.setattr(script.sys.stdout, "isatty", lambda: True)
    run = script.Run(step=250, seconds=0.5)
    run.shown = time.time() - 0.1
    script.show_progress(run, 1000)
    assert capsys.readouterr().out == ""
    run.shown = time.time() - 0.3
    script.show_progress(run, 1000)
    assert capsys.readouterr().out.endswith("s left   \r")
    script.show_progress(run, 250)
    assert capsys.readouterr().out.endswith("s left\n")


@pytest.mark.parametrize("place", ["current", "next_obs", "rewards"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named_with_environment_and_moment(script, place, bad):
    """One bad number anywhere is enough; the values shown are those of its environment."""
    arrays = {"next_obs": np.full((3, 2), 2.0), "current": np.full((3, 2), 1.0)}
    arrays["rewards"] = np.array([5.0, 6.0, 7.0])
    assert script.check_finite(*arrays.values(), "step 4") is None
    arrays[place][(1, 1) if arrays[place].ndim == 2 else 1] = bad
    with pytest.raises(RuntimeError, match="environment 1, step 4; check the task") as error:
        script.check_finite(*arrays.values(), "step 4")
    shown = [str(arrays["next_obs"][1]), str(arrays["current"][1]), f"{arrays['rewards'][1]}"]
    assert str(error.value).startswith(
        f"not finite: observation {shown[0]}, then {shown[1]}, reward {shown[2]}"
    )


class Spoilt(gym.Wrapper):
    """Another observation or reward at one step of the environment that was reset with a seed; step
    0 is the first reset."""

    def __init__(self, env, seed, step, obs=None, reward=None):
        super().__init__(env)
        self.expected, self.at, self.obs, self.reward = seed, step, obs, reward

    def reset(self, *, seed=None, options=None):
        """Open an episode; one with a seed starts the count."""
        if seed is not None:
            self.steps, self.mine = 0, seed == self.expected
        obs, info = self.env.reset(seed=seed, options=options)
        return self.look(obs), info

    def step(self, action):
        """Advance by one."""
        self.steps += 1
        obs, reward, *rest = self.env.step(action)
        due = self.reward is not None and self.mine and self.steps == self.at
        return self.look(obs), self.reward if due else reward, *rest

    def look(self, obs):
        """What is seen."""
        due = self.obs is not None and self.mine and self.steps == self.at
        return np.full_like(obs, self.obs) if due else obs


def spoil(script, monkeypatch, **facts):
    """Every environment of the script is such a one."""
    make_env = script.make_env
    monkeypatch.setattr(script, "make_env", lambda args: Spoilt(make_env(args), **facts))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_first_reset_that_is_not_finite_is_named(script, monkeypatch, tmp_path, bad):
    """Environment 2 of a run with seed 5 is reset with 7: no step is taken, no normaliser moves."""
    spoil(script, monkeypatch, seed=7, step=0, obs=bad)
    steps, step = [], script.gym.vector.SyncVectorEnv.step
    monkeypatch.setattr(
        script.gym.vector.SyncVectorEnv, "step", lambda *x: steps.append(x) or step(*x)
    )
    args = small_args(script, "Walk", seed=5, run_dir=str(tmp_path))
    with pytest.raises(RuntimeError, match="environment 2, the first reset; check the task"):
        script.train(args)
    assert not steps


def test_a_reward_beyond_float32_is_kept(script, monkeypatch):
    """1e39 is finite; the batch, which is float32, has it in units of the spread of returns."""
    spoil(script, monkeypatch, seed=2, step=6, reward=1e39)
    run = make_run(script, "Walk")
    forget_returns(run)
    batch = prepare(run)
    assert run.rollout.rewards[5, 1] == 1e39
    assert (run.rollout.rewards.abs() > 1e3).sum() == 1
    assert all(x.isfinite().all() for x in batch)
    assert 1 < batch.returns.max() < 10


@pytest.mark.parametrize("fault", [{"reward": np.inf}, {"reward": np.nan}, {"obs": np.nan}])
def test_a_step_that_is_not_finite_is_named(script, monkeypatch, fault):
    """Environment 1, step 5, counted from 0."""
    spoil(script, monkeypatch, seed=2, step=6, **fault)
    run = make_run(script, "Walk")
    with pytest.raises(RuntimeError, match="environment 1, step 5 of the rollout; check the task"):
        roll(run)


@pytest.mark.parametrize("fault", [{"reward": np.inf}, {"reward": np.nan}, {"obs": np.nan}])
def test_an_evaluation_that_is_not_finite_is_named(script, monkeypatch, fault):
    """Episodes of 9 steps: step 13 of the task is the fourth of the second episode, both from 0."""
    spoil(script, monkeypatch, seed=1_000_001, step=13, **fault)
    run = make_run(script, "Walk")
    with pytest.raises(RuntimeError, match="step 3 of evaluation episode 1; check the task"):
        script.evaluate(run.agent, run.args)


def test_a_reset_of_an_evaluation_that_is_not_finite_is_named(script, monkeypatch):
    """Ahead of any action on it: the second episode, number 1."""
    original, resets = script.make_env, []

    class Spoilt(gym.Wrapper):
        def reset(self, **options):
            obs, info = super().reset(**options)
            resets.append(obs)
            return obs + (np.nan if len(resets) == 2 else 0), info

    run = make_run(script, "Walk")
    monkeypatch.setattr(script, "make_env", lambda args: Spoilt(original(args)))
    with pytest.raises(RuntimeError, match="reset of evaluation episode 1; check the task"):
        script.evaluate(run.agent, run.args)


def test_a_process_is_set_up_by_its_flags(script):
    """Threads, cuDNN and all three generators."""
    draws = []
    for seed in (5, 5, 6):
        args = small_args(script, "Walk", seed=seed, torch_deterministic=seed == 5)
        script.set_up_process(args)
        assert torch.backends.cudnn.deterministic == (seed == 5)
        assert torch.backends.cudnn.allow_tf32 is False
        assert torch.get_num_threads() == 1
        draws.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert draws[0] == draws[1]
    assert all(one != other for one, other in zip(draws[0], draws[2]))


def test_environments_are_pickled_as_they_stand(script):
    """EzPickle alone would build a new object from the arguments of the old one."""

    class Box(gym.utils.EzPickle):
        def __init__(self, content):
            super().__init__(content)
            self.content = content

    script.set_up_process(small_args(script, "Walk"))
    box, copy = Box(1), Box(3)
    box.content = 2
    copy.__setstate__(box.__getstate__())
    assert copy.content == 2


def test_the_first_signal_asks_and_the_second_one_kills(script):
    """The wish is noted, and the handler is the default one again."""
    with undisturbed():
        signal.signal(signal.SIGTERM, script.request_stop)
        script.request_stop(signal.SIGTERM, None)
        assert script.STOP == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_run_directory_is_made_with_its_parents_or_refused_in_one_line(script, tmp_path):
    """A file in the way is a mistake of the user: flag, value and remedy."""
    args = small_args(script, "Walk", run_dir=str(tmp_path / "a" / "b"))
    path = script.make_run_dir(args)
    assert path.parent == tmp_path / "a" / "b"
    assert {file.name for file in path.iterdir()} == {"args.json", f"{script.__name__}.py"}
    (tmp_path / "file").write_text("")
    args.run_dir = str(tmp_path / "file")
    with pytest.raises(script.UsageError, match=r"--run-dir .*file.*choose another directory"):
        script.make_run_dir(args)
