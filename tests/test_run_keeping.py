"""What `train` is made of beside the algorithm: schedules, log, progress, checks, the process."""

from __future__ import annotations

import builtins
import io
import json
import math
import os
import pickle
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from command import undisturbed
from conftest import ONE_SCRIPT, each_of, with_both_scripts
from helpers import forget_returns, make_agent, make_run, prepare, roll, small_args
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import distributional_ppo_categorical

script = each_of(ONE_SCRIPT)  # but for what differs between them


class Writer:
    """Keeps what is written, in place of TensorBoard's."""

    def __init__(self):
        self.scalars = []
        self.histograms = []
        self.file_writer = self
        self.default_bins = [-1e9, 0, 1e9]

    def add_summary(self, summary, step):
        for x in summary.value:
            if x.HasField("histo"):
                self.histograms.append((x.tag, x.histo.num, x.histo.sum, step))
            else:
                self.scalars.append((x.tag, x.simple_value, step))


@pytest.fixture
def begin(script, tmp_path):
    """Starts a run on Walk with these flags and, where one is given, with another writer."""
    begun = []

    def start(writer=None, **flags):
        args = small_args(script, "Walk", run_dir=str(tmp_path / "runs"), **flags)
        run, *_ = script.start(args)
        begun.append((run.writer, run.envs))
        run.writer = writer or run.writer
        return run

    yield start
    for closing in begun:
        for one in closing:
            one.close()


def test_letters_that_a_file_lacks_are_escaped(script):
    """Windows' files have encodings with few letters, and a folder may have any."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    script.tell("logging to C:/\u0418\u0432\u0430\u043d/runs", file=file)
    file.seek(0)
    assert file.read() == "logging to C:/\\u0418\\u0432\\u0430\\u043d/runs\n"


def test_a_file_that_is_being_read_is_renamed_over_later(script, monkeypatch, tmp_path):
    """Windows refuses while a program has it open. After two seconds the fault is told."""
    waits = []
    replace_file, faults = Path.replace, [PermissionError(), PermissionError()]

    def refuse_twice(path, target):
        if faults:
            raise faults.pop()
        return replace_file(path, target)

    monkeypatch.setattr(Path, "replace", refuse_twice)
    monkeypatch.setattr(script.time, "sleep", waits.append)
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    script.rename_over(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"
    assert len(waits) == 2
    faults.extend([PermissionError()] * 99)
    (tmp_path / "new").write_text("newer")
    with pytest.raises(PermissionError):
        script.rename_over(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"
    assert sum(waits) == pytest.approx(2.2)


@pytest.mark.parametrize("films", [False, True])
def test_a_checkpoint_ahead_of_an_evaluation_is_renewed_after_it(script, begin, monkeypatch, films):
    """One is written ahead of films. A resume from it would evaluate and log once more."""
    run = begin(eval_every=1)
    run.args = replace(run.args, capture_video=films)
    run.best_return = 1e9  # this evaluation is not the best
    kept = []
    monkeypatch.setattr(script, "play", lambda *inputs: iter([[1.0]] * run.args.eval_episodes))
    monkeypatch.setattr(run, "save", lambda name="checkpoint": kept.append(run.evaluated_at))
    run.step = 48
    run.evaluate()
    assert run.evaluated_at == 48
    assert kept[-1:] == ([48] if films else [])


@pytest.mark.parametrize(("every", "age", "saves"), [(9, 601, 1), (9, 500, 0), (0, 9999, 0)])
def test_a_checkpoint_is_no_older_than_ten_minutes(begin, monkeypatch, every, age, saves):
    """Where rollouts are long a hundred of them may take hours, and a task may fail."""
    run = begin(checkpoint_every=every, total_timesteps=960, eval_episodes=0)
    run.saved_at = time.monotonic() - age
    kept = []
    monkeypatch.setattr(type(run), "save", lambda run, name="checkpoint": kept.append(name))
    run.times = {}
    run.seconds = 1.0
    monkeypatch.setattr(type(run), "log_episodes", lambda *facts: None)
    run.end_iteration(None, {}, None)
    assert len(kept) == saves


def test_a_checkpoint_that_is_due_ahead_of_an_evaluation_is_renewed_after_it(begin, monkeypatch):
    """It is ten minutes old. A resume from what is written ahead would evaluate and log once more.
    Where the step is saved already, nothing is written ahead."""
    run = begin(checkpoint_every=9, total_timesteps=960, eval_episodes=1)
    run.step = 48
    kept = []
    save = type(run).save

    def note(run, name="checkpoint"):
        kept.append(run.evaluated_at)
        save(run, name)

    monkeypatch.setattr(type(run), "save", note)
    run.saved_at = time.monotonic() - 601
    run.evaluate()
    assert kept == [None, 48]
    run.saved_at = time.monotonic() - 601
    run.evaluate()
    assert kept == [None, 48]


def test_a_signal_in_the_last_episode_stops_the_run_then(begin, monkeypatch):
    """With the evaluation logged, and not after one more iteration."""
    run = begin(total_timesteps=960, eval_episodes=2)
    run.step = 48
    asked = []
    monkeypatch.setattr(run, "stops", lambda: asked.append(run.evaluated_at) or len(asked) == 2)
    with pytest.raises(KeyboardInterrupt, match="stopped after 48 steps"):
        run.evaluate()
    assert asked == [None, 48]


def test_a_checkpoint_is_young_when_it_is_written(begin):
    """A run that has just begun has none to renew."""
    run = begin()
    assert time.monotonic() - run.saved_at < 60
    run.saved_at = 0.0
    run.save()
    assert time.monotonic() - run.saved_at < 60


def test_schedules_fall_linearly_where_they_are_asked_to(script):
    """A quarter of the way: 0.004 to 0 is 0.003, 0.08 to 0.04 is 0.07; else constant. The critics
    have the actor's rate unless they have their own."""
    flags = {"learning_rate": 0.004, "ent_coef": 0.08, "ent_coef_final": 0.04}
    args = small_args(script, "Walk", **flags)
    assert script.schedules(args, 0.25) == pytest.approx((0.003, 0.003, 0.07))
    flags |= {"critic_learning_rate": 0.016}
    args = small_args(script, "Walk", **flags)
    assert script.schedules(args, 0.25) == pytest.approx((0.003, 0.012, 0.07))
    flags |= {"ent_coef_final": None, "anneal_lr": False}
    args = small_args(script, "Walk", **flags)
    assert script.schedules(args, 0.25) == (0.004, 0.016, 0.08)


def test_a_bonus_that_falls_to_nothing(script):
    """0 is a coefficient like others, and the bonus falls where the learning rate stays."""
    flags = {"learning_rate": 0.004, "ent_coef": 0.08, "anneal_lr": False}
    for final, found in ((0.0, 0.06), (0.04, 0.07)):
        args = small_args(script, "Walk", ent_coef_final=final, **flags)
        assert script.schedules(args, 0.25) == pytest.approx((0.004, 0.004, found))


def test_no_seed_is_used_twice():
    """All streams of 25 seeds, the steps of 1,000 iterations and 64 of everything else;
    environments, which take 31 bits, among themselves. A key of one number would collide with one
    that ends in 0."""
    seed_of = distributional_ppo_categorical.derived_seed
    streams = distributional_ppo_categorical.STREAMS
    found = [
        seed_of(seed, stream, index)
        for seed in range(25)
        for stream in streams
        for index in (range(0, 512_000, 512) if stream == "iterations" else range(64))
    ]
    assert len(found) == len({*found}) == 25 * (1000 + 5 * 64)
    short = [seed_of(seed, "environments", i, bits=31) for seed in range(25) for i in range(64)]
    assert len(short) == len({*short})
    assert max(short) < 2**31
    assert max(found) < 2**63


def test_a_seed_is_what_numpy_makes_of_its_key(script):
    """Stream 1 is the environments', stream 3 the iterations'. Nothing depends on Python's hash."""
    for stream, number in (("environments", 1), ("iterations", 3)):
        [expected] = np.random.SeedSequence(7, spawn_key=(number, 5)).generate_state(1, np.uint64)
        assert script.derived_seed(7, stream, 5) == int(expected) // 2
        assert script.derived_seed(7, stream, 5, bits=31) == int(expected) // 2**33


@with_both_scripts
def test_evaluations_and_resumed_environments_have_seeds_of_their_own(script, monkeypatch):
    """Each episode of an evaluation its own one, the same each time; environments that open anew
    after a resume others than those of the start; those of another process others again."""
    args = small_args(script, "Walk", seed=3)
    agent, seeds = make_agent(script, args), []
    make_env = script.make_env

    def watch(*inputs, **options):
        env = make_env(*inputs, **options)
        reset = env.reset
        env.reset = lambda seed=None: seeds.append(seed) or reset(seed=seed)
        return env

    monkeypatch.setattr(script, "make_env", watch)
    for _ in range(2):
        script.evaluate(agent, args)
    assert len(seeds) == 6
    assert seeds[:3] == seeds[3:]
    assert len({*seeds}) == 3
    rank_0 = SimpleNamespace(args=args, step=0, envs=SimpleNamespace(num_envs=4))
    found = [script.Run.env_seeds.fget(rank_0)]
    rank_0.step = args.batch_size
    found.append(script.Run.env_seeds.fget(rank_0))
    monkeypatch.setattr(script, "RANK", 1)
    found.append(script.Run.env_seeds.fget(rank_0))
    assert len({x for part in found for x in part} | {*seeds}) == 15


def test_what_is_due_every_third_iteration(script):
    """The third, the sixth; every 0 iterations is never."""
    assert [i for i in range(1, 8) if script.is_due(i, 3)] == [3, 6]
    assert [i for i in range(1, 8) if script.is_due(i, 1)] == [1, 2, 3, 4, 5, 6, 7]
    assert not any(script.is_due(i, 0) for i in range(1, 8))


def test_metrics_of_an_iteration_worked_by_hand(script, begin, monkeypatch):
    """3300 steps in 4 + 7 s; parts of 1, 2 and 4 s; CVaR_0.1 of 1..20 is (1 + 2) / 2."""
    sizes = {"num_steps": 75, "total_timesteps": 6000, "checkpoint_every": 0}
    writer = Writer()
    run = begin(writer, cvar_alpha=0.1, **sizes)
    run.step, run.seconds, run.lap_start = 3000, 4.0, 10.0
    returns = [float(x) for x in range(20, 0, -1)]
    returns[0] += 1e-9  # which float32 cannot tell from 20
    run.recent_returns = returns.copy()
    clock = iter([11.0, 13.0, 17.0])
    with monkeypatch.context() as patch:
        patch.setattr(script, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        for part in ("rollout", "values", "update"):
            run.lap(part)
    rollout = SimpleNamespace(episodes=[])
    run.end_iteration(rollout, {"a": 2.5}, ("carried",))
    assert (run.step, run.seconds, run.carried) == (3300, 11, ("carried",))
    expected = {"charts/SPS": 300, "time/rollout": 1, "time/values": 2, "time/update": 4}
    assert run.logged == pytest.approx(expected | {"cvar/empirical": 1.5, "a": 2.5})
    assert {tag: x for tag, x, _ in writer.scalars} == pytest.approx(run.logged)
    assert {step for *_, step in writer.scalars} == {3300}
    assert writer.histograms == [("charts/recent_returns", 20, sum(returns), 3300)]

    before = len(writer.scalars)
    run.recent_returns.clear()
    run.end_iteration(rollout, {"a": 2.5}, ())
    tags = {tag for tag, *_ in writer.scalars[before:]}
    assert run.logged.keys() - tags == {"cvar/empirical"}


def test_histograms_come_every_tenth_iteration_and_at_the_end(begin):
    """The first, the eleventh and the last of fifteen."""
    writer = Writer()
    run = begin(writer, total_timesteps=15 * 48, checkpoint_every=0)
    run.save = lambda: None
    run.times = {"time/all": 1.0}
    for _ in range(15):
        metrics = {"c": torch.tensor([1.0, 4.0])}
        run.end_iteration(SimpleNamespace(episodes=[]), metrics, ())
    assert [step // 48 for *_, step in writer.histograms] == [1, 11, 15]


def test_histograms_hold_what_lies_beyond_their_bins(begin):
    """TensorBoard's bins end at 1e20 and it raises where all of a tensor lies beyond."""
    run = begin()
    for sign in (-1, 1):
        values = sign * torch.tensor([1e21, 1e30], dtype=torch.float64)
        run.log({"returns": values}, 7)
    run.writer.flush()
    events = EventAccumulator(str(run.directory), {"histograms": 0}).Reload()
    assert [event.histogram_value.num for event in events.Histograms("returns")] == [2, 2]


def test_scalars_are_written_and_remembered_tensors_with_axes_are_histograms(begin):
    """A tensor without axes is a scalar; histograms may be left out."""
    writer = Writer()
    run = begin(writer)
    metrics = {"a": torch.tensor(2.5), "b": 3, "c": torch.tensor([1.0, 4.0])}
    run.log(metrics, 7)
    assert writer.scalars == [("a", 2.5, 7), ("b", 3.0, 7)]
    assert writer.histograms == [("c", 2, 5.0, 7)]
    assert run.logged == {"a": 2.5, "b": 3.0}
    assert all(type(value) is float for value in run.logged.values())
    run.log({"a": 1.0, "c": metrics["c"]}, 8, histograms=False)
    assert (len(writer.histograms), run.logged["a"]) == (1, 1.0)


def test_all_processes_know_the_metrics(begin):
    """Those without a log remember them as well: `train` returns them."""
    run = begin()
    writer, run.writer = run.writer, None
    run.log({"a": torch.tensor(2.0), "b": 3, "many": torch.zeros(4)}, 1)
    run.writer = writer
    assert run.logged == {"a": 2.0, "b": 3.0}


def test_a_lock_ends_with_its_run_whatever_was_forked(begin):
    """A copy of the descriptor, as a fork of the task has it, holds nothing back."""
    fcntl = pytest.importorskip("fcntl")
    run = begin()
    copy = os.dup(run.lock)
    other = os.open(run.directory / ".lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    run.unlock_directory()
    assert run.lock is None
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    os.close(copy)


def test_an_episode_is_written_at_the_step_it_ended(begin):
    """Three environments, 30 steps behind: an end at t = 0 is at 33, one at t = 4 at 45."""
    writer = Writer()
    run = begin(writer, num_envs=3, num_steps=5, num_minibatches=3)
    run.step = 30
    run.recent_returns = [0.0] * 99
    run.log_episodes(SimpleNamespace(episodes=[(0, 1.5, 9), (4, -2.0, 4)]))
    tags = ("charts/episodic_return", "charts/episodic_length")
    assert writer.scalars == [
        (tags[0], 1.5, 33), (tags[1], 9.0, 33), (tags[0], -2.0, 45), (tags[1], 4.0, 45),
    ]  # fmt: skip
    assert run.recent_returns == [0.0] * 98 + [1.5, -2.0]


def test_an_episode_of_one_process_is_written_at_the_step_of_all(begin):
    """Two processes share four environments: at t = 0 all four have taken a step."""
    writer = Writer()
    run = begin(writer, num_envs=4)
    run.envs = SimpleNamespace(num_envs=2)
    run.step = 30
    run.log_episodes(SimpleNamespace(episodes=[(0, 1.5, 9)]))
    assert {step for _, _, step in writer.scalars} == {34}


def test_each_iteration_has_a_seed_of_its_own(begin):
    """That of the run's seed and of the step at which it begins."""
    run = begin(seed=5, num_steps=12, total_timesteps=144)
    found = []
    for _ in run.iterations():
        found.append(torch.initial_seed())
        run.step += run.args.batch_size
    assert found == [run_seed(5, step) for step in (0, 48, 96)]


def begin_quarter(begin, capsys):
    """A run of which 250 of 1,000 steps are done, in half a second."""
    run = begin(num_steps=25, total_timesteps=1000)
    assert run.total_steps == 1000
    run.step, run.seconds = 250, 0.5
    capsys.readouterr()
    return run


def test_progress_in_a_file_comes_every_five_seconds_and_at_the_end(begin, capsys):
    """Nothing after 1 s, a whole line after 6 s, and the last line whenever it comes."""
    run = begin_quarter(begin, capsys)
    run.recent_returns = [1.0, 4.0]
    run.status.shown_at = time.monotonic() - 1
    run.show_progress()
    assert capsys.readouterr().out == ""
    run.status.shown_at = time.monotonic() - 6
    run.show_progress()
    # 500 steps/s, 750 steps to go: 1.5 s, rounded to even
    line = "250 of 1,000 steps (25%)  500 steps/s  2 s left  return 2.5\n"
    assert capsys.readouterr().out == line
    assert time.monotonic() - run.status.shown_at < 3
    run.recent_returns.clear()
    run.total_steps = 250
    run.show_progress()
    assert capsys.readouterr().out == "250 of 250 steps (100%)  500 steps/s  0 s left\n"


def test_progress_on_a_terminal_is_rewritten_in_place(script, begin, capsys, monkeypatch):
    """Five times a second; the last line stays."""
    run = begin_quarter(begin, capsys)
    monkeypatch.setattr(script.sys.stdout, "isatty", lambda: True)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    run.status.shown_at = now - 0.1
    run.show_progress()
    assert capsys.readouterr().out == ""
    run.status.shown_at = now - 0.3
    run.show_progress()
    assert capsys.readouterr().out.endswith("s left   \r")
    run.total_steps = 250
    run.show_progress()
    assert capsys.readouterr().out.endswith("s left\n")


@pytest.mark.parametrize("place", ["current", "next_obs", "rewards"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named_with_environment_and_moment(script, place, bad):
    """One bad number anywhere is enough; the values shown are those of its environment."""
    arrays = {"next_obs": np.full((3, 2), 2.0), "current": np.full((3, 2), 1.0)}
    arrays["rewards"] = np.array([5.0, 6.0, 7.0])
    rewards = arrays["rewards"]
    script.check_finite("step 4", arrays["next_obs"], arrays["current"], rewards=rewards)
    arrays[place][(1, 1) if arrays[place].ndim == 2 else 1] = bad
    with pytest.raises(RuntimeError, match="environment 1, step 4; check the task") as error:
        script.check_finite("step 4", arrays["next_obs"], arrays["current"], rewards=rewards)
    shown = [str(arrays["next_obs"][1]), str(arrays["current"][1]), f"{arrays['rewards'][1]}"]
    assert str(error.value).startswith(
        f"not finite: observation {shown[0]}, then {shown[1]}, reward {shown[2]}"
    )


def test_an_observation_that_opens_an_episode_is_told_once(script):
    """Nothing came after it."""
    obs = np.full((1, 2), np.nan)
    with pytest.raises(RuntimeError, match=r"not finite: observation \[nan nan\], environment 0"):
        script.check_finite("the first reset", obs)


def test_what_is_not_finite_names_its_process(script, monkeypatch):
    """Where there are several, each with an environment 0."""
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    monkeypatch.setattr(script, "RANK", 1)
    with pytest.raises(RuntimeError, match="environment 0 of process 1, the first reset"):
        script.check_finite("the first reset", np.full((1, 2), np.nan))


class Spoilt(gym.Wrapper):
    """Another observation or reward at one step of the environment that was reset with a seed; step
    0 is the first reset."""

    def __init__(self, env, seed, step, obs=None, reward=None):
        super().__init__(env)
        self.expected, self.at, self.obs, self.reward = seed, step, obs, reward

    def reset(self, *, seed=None, options=None):
        """Open an episode; one with a seed starts the count."""
        obs, info = self.env.reset(seed=seed, options=options)
        if seed is None:
            return obs, info
        self.steps, self.mine = 0, seed == self.expected
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


@with_both_scripts
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_first_reset_that_is_not_finite_is_named(script, monkeypatch, tmp_path, bad):
    """Environment 2 of a run with seed 5: no step is taken, no normaliser moves."""
    seed = script.derived_seed(5, "environments", 2, bits=31)
    spoil(script, monkeypatch, seed=seed, step=0, obs=bad)
    steps, step = [], script.gym.vector.SyncVectorEnv.step
    monkeypatch.setattr(
        script.gym.vector.SyncVectorEnv, "step", lambda *x: steps.append(x) or step(*x)
    )
    args = small_args(script, "Walk", seed=5, run_dir=str(tmp_path))
    with pytest.raises(RuntimeError, match="environment 2, the first reset; check the task"):
        script.train(args)
    assert not steps


@with_both_scripts
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


@with_both_scripts
def test_a_last_observation_that_is_not_finite_is_named(script, monkeypatch):
    """An episode of nine steps ends with it, and the next one has opened already."""
    spoil(script, monkeypatch, seed=2, step=9, obs=np.nan)
    run = make_run(script, "Walk")
    with pytest.raises(RuntimeError, match="environment 1, step 8 of the rollout; check the task"):
        roll(run)


@with_both_scripts
@pytest.mark.parametrize("fault", [{"reward": np.inf}, {"reward": np.nan}, {"obs": np.nan}])
def test_an_evaluation_that_is_not_finite_is_named(script, monkeypatch, fault):
    """Episodes of 9 steps. The fourth step of the second one, both counted from 0."""
    seed = script.derived_seed(1, "evaluations", 1, bits=31)
    spoil(script, monkeypatch, seed=seed, step=4, **fault)
    run = make_run(script, "Walk")
    with pytest.raises(RuntimeError, match="step 3 of evaluation episode 1; check the task"):
        script.evaluate(run.agent, run.args)


@with_both_scripts
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
        draws.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert draws[0] == draws[1]
    assert all(one != other for one, other in zip(draws[0], draws[2]))
    try:
        script.set_up_process(small_args(script, "Walk", torch_threads=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@with_both_scripts
def test_weights_do_not_depend_on_what_a_task_draws(script):
    """One draws from torch's generator when it is made, one sets its seed. The weights are those of
    the run's seed all the same, and others with another seed."""
    args = small_args(script, "Walk")
    weights = []
    for seed, disturb in ((1, None), (1, lambda: torch.randn(7)), (1, lambda: torch.manual_seed(5)),
                          (2, None)):  # fmt: skip
        own = replace(args, seed=seed)
        script.set_up_process(own)
        envs, eval_env = script.open_environments(own)
        if disturb:
            disturb()
        agent = script.make_agent(envs, own)
        weights.append(torch.cat([p.flatten() for p in agent.parameters()]))
        for env in (envs, eval_env):
            script.close_quietly(env)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])


@with_both_scripts
@pytest.mark.parametrize("env", ["VectorBox", "ImageMultiDiscrete"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_networks_have_the_activation_of_the_flags(script, env, activation):
    """In all layers."""
    agent = make_agent(script, small_args(script, env, activation=activation))
    kinds = {type(module) for module in agent.modules()} & {torch.nn.Tanh, torch.nn.ReLU}
    assert kinds == {{"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[activation]}


def test_the_first_actions_have_the_spread_of_the_flags(script):
    """For each part of an action."""
    agent = make_agent(script, small_args(script, "VectorBox", log_std_init=-0.7))
    assert torch.all(agent.action_dist.log_std == -0.7)


@with_both_scripts
def test_statistics_of_observations_do_not_forget(script):
    """All that a run has seen counts alike; returns and advantages have a memory."""
    agent = make_agent(script, small_args(script, "VectorBox"))
    assert agent.obs_moments.max_count == math.inf
    assert agent.value_dist.moments.max_count == agent.args.norm_returns_memory
    assert agent.adv_moments.max_count == agent.args.norm_adv_memory


class Case(gym.utils.EzPickle):
    """It is pickled as the arguments it was made with."""

    def __init__(self, content):
        super().__init__(content)
        self.content = content


class OwnCase(Case):
    """It says itself how it is pickled."""

    def __getstate__(self):
        return {"content": "own"}

    def __setstate__(self, held):
        vars(self).update(held)


def test_environments_are_pickled_as_they_stand(script):
    """EzPickle alone would build a new object from the arguments of the old one. What others do
    with EzPickle stays as it is."""
    cases = Case(1), OwnCase(1)
    for case in cases:
        case.content = 2
    pickled, fault = script.pickle_envs(SimpleNamespace(envs=cases))
    assert fault == ""
    assert [case.content for case in pickle.loads(pickled)] == [2, "own"]
    assert pickle.loads(pickle.dumps(cases[0])).content == 1


@pytest.mark.parametrize("fault", [None, RuntimeError, KeyboardInterrupt])
def test_the_first_signal_asks_and_a_second_ctrl_c_kills(script, begin, monkeypatch, fault):
    """The wish is noted. Until the run has ended, Ctrl-C is that of a shell, or in a program that
    imported the script Python's own. Other signals change nothing more, since one request may come
    as several of them. They keep their handler: processes that a task starts would inherit it if
    they were ignored."""

    def earlier(number, frame):
        pass

    numbers = (signal.SIGINT, signal.SIGTERM)
    run = begin()
    with undisturbed():
        for number in numbers:
            signal.signal(number, earlier)
        expected = pytest.raises(fault or KeyboardInterrupt)  # without a fault it is the signal's
        with expected, run:
            assert [signal.getsignal(number) for number in numbers] == [run.request_stop] * 2
            twice = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
            twice.start()  # as `timeout -s INT` sends it to the process and to its group
            signal.raise_signal(signal.SIGTERM)
            twice.join()
            assert run.signals == [signal.SIGTERM]
            again = [signal.default_int_handler, run.request_stop]  # a program's Ctrl-C raises
            assert [signal.getsignal(number) for number in numbers] == again
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.raise_signal(number)
            assert run.signals == [signal.SIGTERM]
            monkeypatch.setattr(script, "__name__", "__main__")
            run.signals.clear()
            signal.raise_signal(signal.SIGTERM)
            again = [signal.SIG_DFL, run.request_stop]
            assert [signal.getsignal(number) for number in numbers] == again
            if fault:
                raise fault
        assert [signal.getsignal(number) for number in numbers] == [earlier] * 2


@pytest.mark.parametrize("flag", ["run_dir", "resume", "init_from"])
def test_links_in_a_circle_are_a_mistake(script, tmp_path, flag):
    """Python 3.11 raises RuntimeError where it follows them."""
    link = tmp_path / "a"
    link.symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(link)
    with pytest.raises(script.UsageError, match=f"{link}|is not a run directory"):
        script.train(small_args(script, "Walk", **{flag: str(link)}))


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
    args.run_dir, args.exp_name = str(tmp_path), "x" * 300
    with pytest.raises(script.UsageError, match=r"^--exp-name x+: the name \S+ is too long for"):
        script.make_run_dir(args)


def test_a_name_is_one_that_every_system_takes(script, tmp_path):
    """Windows forbids more in it than Linux does, and takes a backslash for a folder's end."""
    args = small_args(script, "Walk", run_dir=str(tmp_path), exp_name=r'a\b/c:d*e?f"g<h>i|j')
    assert "__a_b_c_d_e_f_g_h_i_j__s" in script.make_run_dir(args).name


# ------------------------------------------------------------------------------ starts, ends, files
@with_both_scripts
def test_paths_are_relative_to_where_the_run_began(script, tmp_path, monkeypatch):
    """Also where a task moves when it is made."""
    monkeypatch.chdir(tmp_path)
    opened = script.open_environments

    def open_and_move(args):
        found = opened(args)
        os.chdir("/")
        return found

    monkeypatch.setattr(script, "open_environments", open_and_move)
    run, *_ = script.start(small_args(script, "Walk", run_dir="here"))
    with undisturbed(), run:
        assert run.directory.parent == tmp_path / "here"


@with_both_scripts
def test_a_run_closes_all_that_it_opened(script, begin, monkeypatch):
    """At its end, and where it could not start."""
    run, closed = begin(), []
    run.unused_envs = [object()]
    monkeypatch.setattr(script, "close_quietly", closed.append)
    with undisturbed(), run:
        pass
    assert closed == [run.envs, run.eval_env, *run.unused_envs]
    closed.clear()
    with pytest.raises(script.UsageError):
        script.start(small_args(script, "Walk", init_from="nowhere"))
    assert len(closed) == 2


def test_events_are_written_ahead_of_the_checkpoint(begin, monkeypatch):
    """Or a kill in between would leave a gap in TensorBoard behind it."""
    run, done, rename = begin(), [], Path.replace

    def note(path, target):
        done.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(run.writer, "flush", lambda: done.append("events"))
    monkeypatch.setattr(Path, "replace", note)
    run.save()
    assert done == ["events", "checkpoint.pt.tmp"]


def test_a_file_is_replaced_whole_or_not_at_all(script, tmp_path, monkeypatch):
    """A disk that is full leaves the old one. What was written is synced ahead of the renaming."""
    file = tmp_path / "args.json"
    file.write_text("old")
    synced = []

    def note(descriptor):
        synced.append(file.read_text())

    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script.os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        script.replace_file(file, b"new")
    assert file.read_text() == "old"
    monkeypatch.setattr(script.os, "fsync", note)
    script.replace_file(file, b"new")
    assert synced == ["old"]
    assert file.read_text() == "new"


def test_the_evaluation_s_task_draws_no_number_of_the_run(script, monkeypatch):
    """What it draws when it is made changes nothing: with and without it the next numbers agree."""
    make = script.make_eval_env

    def draw_and_make(args):
        random.random(), np.random.rand(), torch.rand(())
        return make(args)

    monkeypatch.setattr(script, "make_eval_env", draw_and_make)
    drawn = []
    for episodes in (0, 3):
        args = small_args(script, "Walk", eval_episodes=episodes)
        script.set_up_process(args)
        opened = script.open_environments(args)
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
        for env in filter(None, opened):
            script.close_quietly(env)
    assert drawn[0] == drawn[1]


def test_what_lies_between_iterations_takes_none_of_their_time(begin):
    """Evaluations and checkpoints, for instance."""
    run = begin(save_envs="never", eval_episodes=0)
    rounds = run.iterations()
    next(rounds)
    run.lap_start, run.step = 0.0, 48
    next(rounds)
    assert time.monotonic() - run.lap_start < 60


@pytest.mark.parametrize("ipython", [False, True])
@pytest.mark.parametrize("name", ["__main__", "imported"])
def test_a_second_ctrl_c_spares_a_notebook(script, begin, monkeypatch, capsys, name, ipython):
    """There a script may be run as `__main__`, by %run or as a cell. A kill would take all that the
    notebook holds. The line tells what will happen."""
    run = begin()
    monkeypatch.setattr(script, "__name__", name)
    if ipython:
        monkeypatch.setattr(builtins, "get_ipython", lambda: None, raising=False)
    before = signal.getsignal(signal.SIGINT)
    try:
        run.handlers = {signal.SIGINT: before}
        run.request_stop(signal.SIGINT, None)
        second = signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    spared = ipython or name == "imported"
    assert second == (signal.default_int_handler if spared else signal.SIG_DFL)
    told = "raises KeyboardInterrupt" if spared else "kills"
    assert capsys.readouterr().err.rstrip().endswith(f"iteration; Ctrl-C now {told}")


def test_a_signal_is_confirmed(script, begin, monkeypatch, capsys):
    """With what it waits for."""
    run = begin()
    monkeypatch.setattr(script, "__name__", "__main__")
    capsys.readouterr()
    for evaluating, part in ((False, "iteration"), (True, "episode")):
        run.evaluating = evaluating
        with undisturbed():
            run.request_stop(signal.SIGTERM, None)
        said = capsys.readouterr().err.strip()
        assert said == f"stopping after this {part}; Ctrl-C now kills"
        run.signals.clear()


def test_a_run_says_what_it_sees_and_which_preset_it_has(script, capsys, tmp_path):
    """In its first line."""
    flags = script.preset_flags(["averse"]) | {"run_dir": str(tmp_path)}
    run, *_ = script.start(small_args(script, "QuadrantUint8First", **flags))
    with undisturbed(), run:
        said = capsys.readouterr().out
    assert "networks see images of 12 x 12 with 2 channels" in said
    assert "; preset averse; " in said


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (-1, 1, ""),
        (0, 1, "; clipped and not rescaled, see Other bounds of actions in README"),
        (-1000, 1000, "; clipped and not rescaled, see Other bounds of actions in README"),
        (-np.inf, 1, "; without bounds on some side, see Other bounds of actions in README"),
    ],
)
def test_bounds_of_actions_are_told_where_a_policy_may_miss_them(script, begin, low, high, told):
    """It begins around 0 with a standard deviation of 1."""
    run = begin()
    space = gym.spaces.Box(low, high, (1,), np.float32)
    run.agent.action_dist = script.GaussianActions(space, 0.0)
    first, actions, *more = run.facts()
    assert "".join(f"; {fact}" for fact in more) == told
    assert first.startswith("probes:Walk-v0: networks see")
    assert actions.startswith("actions Box(")


def test_behind_an_evaluation_a_signal_waits_for_the_iteration(begin, capsys):
    """An evaluation is over once it has been logged."""
    run = begin(eval_episodes=1)
    run.evaluate()
    capsys.readouterr()
    run.request_stop(signal.SIGTERM, None)
    assert "stopping after this iteration" in capsys.readouterr().err


def test_the_versions_of_a_run_are_those_of_what_made_its_numbers(script, begin):
    """torch, gymnasium, NumPy, tyro and Python."""
    told = json.loads((begin().directory / "args.json").read_text())["versions"]
    assert told.keys() == {"torch", "gymnasium", "numpy", "tyro", "python"}
    assert told["gymnasium"] == gym.__version__


def test_the_table_of_runs_tells_where_weights_came_from(script):
    """And weights have a stream of their own, the second one: the key (2, 0)."""
    assert script.describe_run(script.Args(init_from="x"))["init_from"] == "x"
    before = torch.get_rng_state()
    script.seed_torch(script.Args(seed=5))
    key = np.random.SeedSequence(5, spawn_key=(2, 0)).generate_state(1, np.uint64)
    assert torch.initial_seed() == int(key[0]) >> 1
    torch.set_rng_state(before)


def test_a_resumed_run_says_so(script, capsys, tmp_path):
    """Behind the facts of the task, with its steps."""
    args = small_args(script, "VectorDiscrete", log_std_init=-1.0, run_dir=str(tmp_path))
    directory = script.train(args)["run_dir"]
    capsys.readouterr()
    run, *_ = script.start(replace(args, resume=directory))
    with undisturbed(), run:
        said = capsys.readouterr().out
    assert "; --log-std-init has no effect on them; resumed after 96 steps; " in said


def test_a_file_gets_a_line_of_progress_now_and_then(script, monkeypatch):
    """After as many seconds as it was told; a terminal has one five times a second."""
    status = script.StatusLine(seconds=30)
    for terminal, late, due in ((False, 15, False), (False, 31, True), (True, 0.3, True)):
        monkeypatch.setattr(script.StatusLine, "terminal", terminal)
        status.shown_at = time.monotonic() - late
        assert status.due == due


@pytest.mark.parametrize(("task", "told"), [("VectorDiscrete", True), ("VectorBox", False)])
def test_a_run_says_that_discrete_actions_have_no_std(script, capsys, tmp_path, task, told):
    """Of a flag that is not at its default, beside actions of either kind."""
    run, *_ = script.start(small_args(script, task, log_std_init=-1.0, run_dir=str(tmp_path)))
    with undisturbed(), run:
        said = capsys.readouterr().out
    assert ("; --log-std-init has no effect on them; " in said) == told


def test_images_are_divided_by_their_largest_bound(script):
    """Whichever end it is at."""
    box = gym.spaces.Box(-9, 3, (1, 5, 5), np.float32)
    assert script.Convolutions(box, torch.nn.ReLU).scale == pytest.approx(1 / 9)


def test_velocities_of_lunar_lander(script):
    """Entries 2, 3 and 5 of gymnasium's documentation: both speeds and the angular one."""
    for name in ("LunarLanderNoVel-v3", "LunarLanderContinuousNoVel-v3"):
        assert script.velocities(name) == (2, 3, 5)


def test_a_signal_may_come_while_a_line_is_printed(script, begin, monkeypatch):
    """Python refuses to print inside of printing; the run stops all the same."""

    def fail(*given, **options):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    run = begin()
    monkeypatch.setattr(script, "tell_over", fail)
    run.request_stop(signal.SIGTERM, None)
    assert run.signals == [signal.SIGTERM]


def test_a_line_does_not_wait_in_a_buffer(script):
    """A pipe would show nothing for hours."""
    stream, flushed = io.StringIO(), []
    stream.flush = lambda: flushed.append(stream.getvalue())
    script.tell("one", file=stream)
    assert flushed == ["one\n"]


def test_the_commit_is_that_of_the_script(script, tmp_path, monkeypatch):
    """And not that of the folder in which it runs."""
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "commit_of", lambda folder: asked.append(folder) or "")
    args = small_args(script, "Walk", run_dir=str(tmp_path))
    script.make_run_dir(args)
    assert asked == [Path(script.__file__).resolve().parent]
    named = script.make_run_dir(replace(args, env_id="m:A/B-v0")).name
    assert named.startswith("A_B-v0__")


def test_the_first_process_alone_opens_an_environment_to_evaluate(script, monkeypatch):
    """The others wait for its result."""
    monkeypatch.setattr(script, "RANK", 1)
    envs, eval_env = script.open_environments(small_args(script, "Walk"))
    envs.close()
    assert eval_env is None


def test_handlers_that_python_does_not_know_are_put_back(script, begin, monkeypatch):
    """`signal.signal` gives None for one of a library in C, and does not take None."""
    run, restored = begin(), {}
    run.handlers = {signal.SIGTERM: None}
    monkeypatch.setattr(signal, "signal", restored.__setitem__)
    run.__exit__(None, None, None)
    assert restored == {signal.SIGTERM: signal.SIG_DFL}


# ----------------------------------------------------------------------------------- many processes
def test_under_a_launcher_further_signals_are_ignored(script, begin, monkeypatch, capsys):
    """A batch system's SIGTERM comes twice, and the second one may come after the end."""
    numbers, hang_up = (signal.SIGINT, signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    run = begin()
    capsys.readouterr()
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    try:
        with undisturbed():
            ended = pytest.raises(KeyboardInterrupt)
            with ended, run:
                for number in (signal.SIGTERM, *numbers):
                    signal.raise_signal(number)
            assert [signal.getsignal(number) for number in numbers] == [run.request_stop] * 2
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, hang_up)
    assert run.signals == [signal.SIGTERM]
    assert capsys.readouterr().err.strip() == "stopping after this iteration"


def test_a_signal_to_one_process_stops_all(script, begin, monkeypatch):
    """The three others have received none."""
    run = begin()
    monkeypatch.setattr(script, "average", lambda x: x / 4)
    assert run.stops() is False
    run.signals.append(signal.SIGTERM)
    assert run.stops() is True


def test_other_processes_write_and_say_nothing(script, monkeypatch, capsys, tmp_path):
    """They have the directory of the first one, which writes and speaks for all."""

    def gather_objects(thing):
        return [tmp_path if thing is None else thing]

    monkeypatch.setattr(script, "RANK", 1)
    monkeypatch.setattr(script, "gather_objects", gather_objects)
    flags = {"run_dir": str(tmp_path / "runs"), "save_envs": "never"}
    run, *_ = script.start(small_args(script, "Walk", **flags))
    with undisturbed(), run:
        run.step, run.seconds = run.total_steps, 1.0
        run.show_progress()
        run.save()
    assert (run.directory, run.writer) == (tmp_path, None)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_settings_of_a_program_are_not_those_of_a_run(script):
    """Products of low precision, and no gradients."""
    torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    try:
        script.set_up_process(small_args(script, "Walk"))
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.is_grad_enabled()
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_grad_enabled(True)


def run_seed(seed: int, step: int) -> int:
    """The seed of an iteration, as numpy's documentation builds it: streams count from 1."""
    mixed = np.random.SeedSequence(seed, spawn_key=(3, step))
    return int(mixed.generate_state(1, np.uint64)[0]) >> 1


def test_a_run_leaves_the_generators_of_its_program(script, tmp_path):
    """Or a random search would train the same sample again and again. Also where it fails."""
    args = small_args(script, "Walk", run_dir=str(tmp_path), total_timesteps=48, eval_episodes=1)
    bad = replace(args, env_id="Nothing-v0")
    with undisturbed():
        for flags in (args, bad):
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(9)
            expected = random.random(), np.random.random(), float(torch.rand(()))
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(9)
            if flags is bad:
                with pytest.raises(script.UsageError):
                    script.train(flags)
            else:
                script.train(flags)
            assert (random.random(), np.random.random(), float(torch.rand(()))) == expected


@pytest.mark.parametrize(("system", "word"), [("posix", "'a b'"), ("nt", '"a b"')])
def test_paths_are_quoted_as_the_shell_asks(script, monkeypatch, system, word):
    """cmd.exe knows double quotes alone."""
    monkeypatch.setattr(script, "os", SimpleNamespace(name=system))
    assert script.as_word("a b") == word
