"""A run that was stopped goes on as if nothing had happened; evaluation of a checkpoint."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import os
import pickle
import random
import signal
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from command import (
    await_end,
    await_file,
    fill_the_disk,
    next_second,
    run_main,
    start,
    undisturbed,
    words,
)
from conftest import ONE_SCRIPT, SCRIPTS, each_of, with_both_scripts
from helpers import carried_obs, is_recurrent, small_args
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

script = each_of(ONE_SCRIPT)  # but for what differs between them

TASKS = {
    "CartPole": {"env_id": "CartPole-v1", "num_envs": 3, "num_steps": 14, "num_minibatches": 3},
    "Pendulum": {"env_id": "Pendulum-v1", "num_envs": 2, "num_steps": 50, "anneal_lr": False},
    "HalfCheetah": {"env_id": "HalfCheetah-v5", "num_envs": 2, "eval_episodes": 0},
    "spaces": {"env_id": "probes:NestedBox-v0"},
    "staggered": {"env_id": "probes:Staggered-v0", "num_envs": 2},
    "sequences": {"env_id": "probes:Memory-v0", "seq_len": 4},
    "sr_lambda": {"env_id": "CartPole-v1", "value_target": "sr_lambda", "num_steps": 24},
    "simulator": {"env_id": "probes:Simulated-v0"},
    "handlers": {"env_id": "probes:Handlers-v0"},
    "image": {"env_id": "probes:Flicker-v0"},
    "sampled": {"env_id": "probes:Walk-v0", "eval_sampled": True, "eval_every": 1},
    "weight": {
        "env_id": "probes:Walk-v0",
        "cvar_weight": 0.4,
        "cvar_alpha": 0.3,
        "vf_clip": "mean_only",
    },
    "NumPy's generator": {"env_id": "probes:Filmed-v0"},
}
RECURRENT = ("CartPole", "sequences", "sr_lambda")
AFRESH = "episodes start afresh"


@pytest.fixture(autouse=True)
def _undisturbed(tmp_path, monkeypatch):
    """No handler of signals outlives a test; the simulator's log lands with the run."""
    monkeypatch.chdir(tmp_path)
    with undisturbed():
        yield


def flags_for(script, tmp_path, iterations, **flags):
    """Flags of a tiny run of so many iterations."""
    flags |= {"run_dir": str(tmp_path / "runs"), "total_timesteps": 10**6}
    args = small_args(script, "", **flags)
    return replace(args, total_timesteps=iterations * args.batch_size)


def timeless(metrics):
    """Metrics that depend on neither the clock nor the directory."""
    clocks = ("time/", "charts/SPS", "run_dir")
    return {k: v for k, v in metrics.items() if not k.startswith(clocks)}


def stopped(script, monkeypatch, args, iterations):
    """Train until a signal comes in that iteration; the run directory."""
    update, calls = script.update, []

    def update_and_stop(*facts):
        calls.append(facts)
        if len(calls) == iterations:
            signal.raise_signal(signal.SIGTERM)
        return update(*facts)

    with monkeypatch.context() as patch:
        patch.setattr(script, "update", update_and_stop)
        with pytest.raises(KeyboardInterrupt, match="--resume") as stop:
            script.train(args)
    assert len(calls) == iterations
    return Path(str(stop.value).split("--resume ")[1])


def resumed(script, monkeypatch, directory, *line):
    """Metrics of `main` with --resume."""
    seen, train = [], script.train
    with monkeypatch.context() as patch:
        patch.setattr(script, "train", lambda args: seen.append(train(args)))
        script.main(["--resume", str(directory), *line])
    return seen[0]


def contents(directory):
    """All that a checkpoint holds but for clocks, flags and the environments' bytes."""
    saved = torch.load(Path(directory) / "checkpoint.pt", weights_only=True)
    run = pickle.loads(saved["run"].numpy())
    keys = ["step", "recent_returns", "evaluated_at", "best_return", "best_step", "optimizers"]
    kept = {key: run[key] for key in keys} | {"logged": timeless(run["logged"])}
    (part,) = run["parts"]  # of processes
    kept |= {key: x for key, x in part.items() if key != "envs"}
    kept["iteration"] = run["step"] // (saved["args"]["num_envs"] * saved["args"]["num_steps"])
    return {"agent": saved["agent"], "step": saved["global_step"], "run": kept}


def assert_same(one, two, where=""):
    """Equal to the last bit, in all parts."""
    assert type(one) is type(two), where
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        one, two = [*one.items()], [*two.items()]
    if isinstance(one, list | tuple):
        assert len(one) == len(two), where
        for i, (a, b) in enumerate(zip(one, two)):
            assert_same(a, b, f"{where}/{a[0] if isinstance(a, tuple) and a else i}")
    else:
        array = isinstance(one, torch.Tensor | np.ndarray)
        assert np.array_equal(one, two) if array else one == two, where


def scalars(directory):
    """What TensorBoard shows: (step, value) of every scalar but for timings."""
    accumulator = EventAccumulator(str(directory), {"scalars": 0, "histograms": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    curves = {tag: accumulator.Scalars(tag) for tag in tags["scalars"]}
    curves |= {tag: accumulator.Histograms(tag) for tag in tags["histograms"]}
    return timeless(
        {tag: [(p.step, getattr(p, "value", None)) for p in c] for tag, c in curves.items()}
    )


# The recurrent script carries states besides; the environments are saved alike.
CASES = [*itertools.product(SCRIPTS[1:], TASKS), *itertools.product(SCRIPTS[:1], RECURRENT)]
SLOW = [case for case in itertools.product(SCRIPTS, TASKS) if case not in CASES]


@pytest.mark.parametrize(
    ("script", "task"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    indirect=["script"],
)
def test_stop_and_resume_change_no_bit(script, tmp_path, monkeypatch, task):
    """5 iterations equal 2, stop, resume, 3: metrics, weights, normalisers, optimizers, RNGs."""
    if task == "HalfCheetah":
        pytest.importorskip("mujoco", reason="HalfCheetah needs gymnasium[mujoco]")
    args = flags_for(script, tmp_path, 5, **TASKS[task])
    whole = script.train(args)
    directory = stopped(script, monkeypatch, args, 2)
    assert contents(directory)["run"]["iteration"] == 2
    again = resumed(script, monkeypatch, directory)
    assert again["run_dir"] == str(directory)
    assert_same(timeless(again), timeless(whole))
    assert_same(contents(directory), contents(whole["run_dir"]))
    assert whole["grad/actor"] > 0


@with_both_scripts
def test_an_episode_goes_on_where_it_stopped(script, tmp_path, monkeypatch, capsys):
    """The first observation after a resume is the one that the stopped run would have acted on."""
    args = flags_for(script, tmp_path, 3, env_id="Pendulum-v1", num_envs=2)
    directory = stopped(script, monkeypatch, args, 1)
    expected = contents(directory)["run"]["carried"]
    seen, collect = [], script.collect_rollout
    critic_states, prepare = [], script.prepare_batch

    def look(envs, agent, carry, *rest):
        seen.append((carry, envs.get_attr("state"), envs.get_attr("_elapsed_steps")))
        return collect(envs, agent, carry, *rest)

    def look_at_critics(agent, rollout, *rest):
        critic_states.append(rest[:-1])  # (critics' state,), or ()
        return prepare(agent, rollout, *rest)

    monkeypatch.setattr(script, "collect_rollout", look)
    monkeypatch.setattr(script, "prepare_batch", look_at_critics)
    resumed(script, monkeypatch, directory)
    carry, states, elapsed = seen[0]
    acting = tuple(carry) if is_recurrent(script) else (carry,)
    assert_same((*acting, *critic_states[0]), expected)
    for (angle, speed), obs in zip(states, carried_obs(carry)):
        assert obs.tolist() == pytest.approx([np.cos(angle), np.sin(angle), speed], abs=1e-6)
    assert elapsed == (12, 12)
    assert AFRESH not in capsys.readouterr().out


@with_both_scripts
def test_a_resumed_run_keeps_its_flags_from_python_too(script, tmp_path, monkeypatch):
    """Two sets would mix: the agent has the flags of the run, the loop those that are given."""
    args = flags_for(script, tmp_path, 2, env_id="CartPole-v1")
    directory = stopped(script, monkeypatch, args, 1)
    before = contents(directory)
    for flags, said in (({"gamma": 0.5}, "gamma 0.5 "), ({"total_timesteps": 48}, "below")):
        with pytest.raises(script.UsageError, match=said):
            script.train(replace(args, resume=str(directory), **flags))
    assert_same(contents(directory), before)


def test_a_run_may_be_stopped_after_every_iteration(script, tmp_path, monkeypatch):
    """Four resumes of one iteration each are one run."""
    args = flags_for(script, tmp_path, 4, env_id="CartPole-v1")
    whole = script.train(args)
    directory = stopped(script, monkeypatch, args, 1)
    for _ in range(3):
        assert stopped(script, monkeypatch, replace(args, resume=str(directory)), 1) == directory
    last = resumed(script, monkeypatch, directory)
    assert_same(timeless(last), timeless(whole))
    assert_same(contents(directory)["agent"], contents(whole["run_dir"])["agent"])


@pytest.mark.parametrize("env", ["Locked", "Adapter"])
def test_a_state_that_cannot_be_saved_is_said_to_be_lost(
    script, tmp_path, monkeypatch, capsys, env
):
    """One line; all episodes open at the resumed step, none a second time; the run ends well."""
    args = flags_for(script, tmp_path, 4, env_id=f"probes:{env}-v0")
    directory = stopped(script, monkeypatch, args, 2)
    capsys.readouterr()
    seen, collect = [], script.collect_rollout

    def look(envs, agent, carry, *rest):
        seen.append((carry, envs.get_attr("np_random_seed")))
        return collect(envs, agent, carry, *rest)

    monkeypatch.setattr(script, "collect_rollout", look)
    metrics = resumed(script, monkeypatch, directory)
    lines = [line for line in capsys.readouterr().out.splitlines() if AFRESH in line]
    assert len(lines) == 1
    assert len(seen) == 2
    carry = seen[0][0]
    assert (carried_obs(carry) == 0).all()
    if is_recurrent(script):
        assert carry.episode_start.all()
    place = 2 * args.batch_size
    assert seen[0][-1][0] == script.derived_seed(args.seed, "environments", place, bits=31)
    assert contents(directory)["run"]["iteration"] == 4
    assert np.isfinite(metrics["eval/return_mean"])
    resumed(script, monkeypatch, directory)  # there is nothing left to open
    assert AFRESH not in capsys.readouterr().out


def run_of(path):
    """What an exact resume needs of a checkpoint."""
    return pickle.loads(torch.load(path, weights_only=True)["run"].numpy())


def change_run(path, change):
    """Write the checkpoint again with another `run`, which `change` makes of the old one."""
    content = torch.load(path, weights_only=True)
    changed = pickle.dumps(change(pickle.loads(content["run"].numpy())))
    content["run"] = torch.frombuffer(bytearray(changed), dtype=torch.uint8)
    torch.save(content, path)


def test_a_resume_by_the_copy_of_the_script_keeps_its_commit(script, tmp_path, monkeypatch):
    """The folder of a run may lie in a clone that has moved on since."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    monkeypatch.setattr(script, "commit_of", lambda folder: "then")
    directory = stopped(script, monkeypatch, args, 1).resolve()
    monkeypatch.setattr(script, "commit_of", lambda folder: "now")
    script.rewrite_origin(directory, args, 48)
    assert json.loads((directory / "args.json").read_text())["commit"] == "now"
    monkeypatch.setattr(script, "commit_of", lambda folder: "later")
    monkeypatch.setattr(script, "__file__", str(directory / Path(script.__file__).name))
    script.rewrite_origin(directory, args, 48)
    assert json.loads((directory / "args.json").read_text())["commit"] == "now"
    assert not [*directory.glob("*until-step*")]  # it is the same script
    another = script.make_run_dir(replace(args, run_dir=str(tmp_path / "others")))
    assert json.loads((another / "args.json").read_text())["commit"] == "now"
    (directory / "args.json").write_text("[]")
    script.write_origin(another, args)
    assert json.loads((another / "args.json").read_text())["commit"] == ""


def test_a_resume_by_another_script_keeps_the_old_one(script, tmp_path, monkeypatch):
    """With its flags and its commit: they have made the run so far."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    monkeypatch.setattr(script, "commit_of", lambda folder: "then")
    directory = stopped(script, monkeypatch, args, 1)
    mine = Path(script.__file__)
    (directory / mine.name).write_text("an older script")
    monkeypatch.setattr(script, "commit_of", lambda folder: "now")
    resumed(script, monkeypatch, directory)
    assert (directory / f"{mine.stem}-until-step-48.py").read_text() == "an older script"
    assert (directory / mine.name).read_bytes() == mine.read_bytes()
    commits = [
        json.loads((directory / name).read_text())["commit"]
        for name in ("args-until-step-48.json", "args.json")
    ]
    assert commits == ["then", "now"]


def test_an_old_script_is_kept_through_several_tries(script, tmp_path, monkeypatch):
    """An edit that failed at once has trained nothing. The script may be called by a link."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    mine = Path(script.__file__).resolve()
    link = tmp_path / "link.py"
    link.symlink_to(mine)
    monkeypatch.setattr(script, "__file__", str(link))
    for older in ("what trained", "an edit that failed"):
        (directory / mine.name).write_text(older)
        script.rewrite_origin(directory, args, 48)
    assert (directory / f"{mine.stem}-until-step-48.py").read_text() == "what trained"
    assert (directory / mine.name).read_bytes() == mine.read_bytes()
    assert not (directory / "link.py").exists()
    (directory / "args.json").unlink()
    (directory / mine.name).write_text("older still")
    script.rewrite_origin(directory, args, 96)
    assert (directory / "args.json").exists()


def test_a_better_agent_than_the_checkpoint_knows_is_kept(script, tmp_path, monkeypatch):
    """A crash came between best.pt, of 7 after the second iteration, and the checkpoint, which
    knows of 5 after the first one. Other episodes have 6 then."""
    flags = {"env_id": "probes:Walk-v0", "eval_every": 1, "checkpoint_every": 0}
    args = flags_for(script, tmp_path, 3, **flags)
    means = iter([5, 7, 6, 4])
    monkeypatch.setattr(script, "summarise", lambda *_: {"eval/return_mean": next(means)})
    save = script.Run.save
    known = []

    def crash(run, name="checkpoint"):
        save(run, name)
        known.append(name)
        if known.count("best") == 2:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(script.Run, "save", crash)
        with pytest.raises(OSError, match="Input"):
            script.train(args)
    [directory] = (tmp_path / "runs").iterdir()
    before = torch.load(directory / "best.pt", weights_only=True)
    assert (before["best_return"], before["global_step"]) == (7, 96)
    resumed(script, monkeypatch, directory)
    after = torch.load(directory / "best.pt", weights_only=True)
    assert (after["best_return"], after["global_step"]) == (7, 96)
    kept = contents(directory)["run"]
    assert (kept["best_return"], kept["best_step"]) == (7, 96)


def test_a_broken_best_agent_stops_no_resume(script, tmp_path, monkeypatch, capsys):
    """The next evaluation replaces it, and a line says so."""
    flags = {"env_id": "probes:Walk-v0", "eval_every": 1}
    args = flags_for(script, tmp_path, 3, **flags)
    directory = stopped(script, monkeypatch, args, 2)
    assert (directory / "best.pt").exists()
    (directory / "best.pt").write_bytes(b"half")
    monkeypatch.setattr(script, "summarise", lambda *_: {"eval/return_mean": -1e6})  # a worse one
    resumed(script, monkeypatch, directory)
    found = torch.load(directory / "best.pt", weights_only=True)
    assert (found["best_return"], found["global_step"]) == (-1e6, args.total_timesteps)
    assert "best.pt: damaged, or no run or checkpoint of this script" in capsys.readouterr().out


def test_a_best_agent_that_cannot_be_read_now_is_kept(script, tmp_path, monkeypatch):
    """Its disk is away for a moment: nothing is resumed, since a worse one would replace it."""
    args = flags_for(script, tmp_path, 3, env_id="probes:Walk-v0", eval_every=1)
    directory = stopped(script, monkeypatch, args, 2)
    load = torch.load

    def away(path, **options):
        if getattr(path, "name", "") == "best.pt":
            raise OSError(5, "Input/output error")
        return load(path, **options)

    monkeypatch.setattr(torch, "load", away)
    with pytest.raises(script.UsageError, match=r"best\.pt: Input/output error"):
        script.train(replace(args, resume=str(directory)))


@pytest.mark.parametrize("parts", [[], [{"envs": None}] * 2])
def test_parts_of_other_processes_resume_afresh(script, tmp_path, monkeypatch, capsys, parts):
    """A checkpoint of another number of processes, none among them."""
    args = flags_for(script, tmp_path, 3, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    change_run(directory / "checkpoint.pt", lambda kept: kept | {"parts": parts})

    resumed(script, monkeypatch, directory)
    assert AFRESH in capsys.readouterr().out
    assert contents(directory)["run"]["step"] == 3 * args.batch_size


def test_a_checkpoint_that_holds_bytes_is_resumed(script, tmp_path, monkeypatch):
    """As those of older versions do."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    path = directory / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    torch.save(content | {"run": content["run"].numpy().tobytes()}, path)
    resumed(script, monkeypatch, directory)
    assert contents(directory)["run"]["iteration"] == 2


@pytest.mark.parametrize("name", ["recent_returns", "best_step", "seconds", "optimizers"])
def test_a_run_of_another_version_is_refused(script, tmp_path, monkeypatch, capsys, name):
    """One line where a name is missing; the checkpoint stays, and can still be evaluated."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    path = stopped(script, monkeypatch, args, 1) / "checkpoint.pt"
    change_run(path, lambda kept: {key: x for key, x in kept.items() if key != name})
    before = path.read_bytes()
    code, _, err = run_main(script, capsys, ["--resume", str(path.parent)])
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "--resume" in err
    assert "another version" in err
    assert path.read_bytes() == before
    assert run_main(script, capsys, ["--evaluate", str(path)])[0] == 0


def test_processes_resume_afresh(script, tmp_path, monkeypatch, capsys):
    """With another vector environment in `make_envs`, as the README says."""
    monkeypatch.setattr(script.gym.vector, "SyncVectorEnv", script.gym.vector.AsyncVectorEnv)
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    resumed(script, monkeypatch, directory)
    assert AFRESH in capsys.readouterr().out
    assert contents(directory)["run"]["iteration"] == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_tensorboard_shows_no_gap_and_no_duplicate(script, tmp_path, monkeypatch, lost):
    """Every tag has the points of the uninterrupted run, `lost` iterations after the checkpoint."""
    flags = {"env_id": "CartPole-v1", "eval_every": 1, "checkpoint_every": 1 + lost}
    args = flags_for(script, tmp_path, 4, **flags)
    whole = script.train(args)["run_dir"]

    with monkeypatch.context() as patch:
        if lost:  # what the run has lost is on the disk all the same
            patch.setattr(script, "play", fail_at(script.play, 3))
            with pytest.raises(OSError, match="Input"):
                script.train(args)
            (directory,) = set((tmp_path / "runs").iterdir()) - {Path(whole)}
        else:
            directory = stopped(script, monkeypatch, args, 2)
    assert contents(directory)["run"]["iteration"] == 2
    assert max(step for step, _ in scalars(directory)["losses/value_loss"]) == 48 * (2 + lost)
    next_second()
    resumed(script, monkeypatch, directory)
    assert scalars(directory) == scalars(whole)


def fail_at(function, call):
    """The same function until that call, counted from 1."""
    calls = []

    def count(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise OSError(5, "Input/output error")
        return function(*args, **kwargs)

    return count


def test_a_finished_run_is_not_logged_twice(script, tmp_path, monkeypatch):
    """Resumed with nothing left to do, it is not evaluated again: one point, not two."""
    metrics = script.train(flags_for(script, tmp_path, 2, env_id="CartPole-v1"))
    before = scalars(metrics["run_dir"])
    next_second()
    assert_same(timeless(resumed(script, monkeypatch, metrics["run_dir"])), timeless(metrics))
    assert scalars(metrics["run_dir"]) == before


def test_total_timesteps_may_grow(script, tmp_path, monkeypatch):
    """A finished run of 2 iterations goes on to 4, as one of 4 would: nothing is annealed here."""
    flags = {"env_id": "CartPole-v1", "anneal_lr": False, "ent_coef_final": None}
    args = flags_for(script, tmp_path, 4, **flags)
    whole = script.train(args)
    short = script.train(replace(args, total_timesteps=args.total_timesteps // 2))["run_dir"]
    grown = resumed(script, monkeypatch, short, "--total-timesteps", str(args.total_timesteps))
    assert_same(timeless(grown), timeless(whole))
    assert_same(contents(short)["agent"], contents(whole["run_dir"])["agent"])
    assert script.load_agent(short)[1].total_timesteps == args.total_timesteps


def test_small_runs_may_grow_by_the_command_line(script, tmp_path, monkeypatch):
    """Flags count together with those of the run, not with the defaults: 96 steps are enough."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0", anneal_lr=False)
    directory = script.train(args)["run_dir"]
    resumed(script, monkeypatch, directory, "--total-timesteps", "96")
    assert contents(directory)["step"] == 96


def test_total_timesteps_may_not_shrink(script, tmp_path, capsys):
    """Fewer steps than the run has behind it would end it in the past."""
    directory = script.train(flags_for(script, tmp_path, 3, env_id="probes:Walk-v0"))["run_dir"]
    line = ["--resume", directory, "--total-timesteps", "96"]
    code, _, err = run_main(script, capsys, line)
    assert code == 2
    assert "total-timesteps 96" in err
    assert "num-envs 8" not in err  # the sizes are those of the run


@with_both_scripts
def test_flags_that_change_the_algorithm_are_refused_by_name(script, tmp_path, capsys):
    """Those that differ are named, those that are as stored or harmless are not."""
    flags = {"env_id": "probes:Walk-v0", "gamma": 0.9}
    directory = script.train(flags_for(script, tmp_path, 2, **flags))["run_dir"]
    before = (Path(directory) / "checkpoint.pt").read_bytes()
    changes = "--gamma 0.5 --seed 7 --hidden-size 8 --no-norm-obs --eval-episodes 2 --kappa 1"
    changes = changes.replace("--kappa 1", "") if "categorical" in script.__name__ else changes
    code, out, err = run_main(script, capsys, ["--resume", directory, *changes.split()])
    assert (code, out) == (2, "")
    named, allowed = err.split(": must be as in")
    for told in (
        "--gamma 0.5 (the run has 0.9)",
        "--seed 7",
        "--hidden-size 8",
        "--norm-obs False",
    ):
        assert told in named
    assert "--eval-episodes" not in named
    assert "--total-timesteps" in allowed
    assert (Path(directory) / "checkpoint.pt").read_bytes() == before
    assert run_main(script, capsys, ["--resume", directory, "--gamma", "0.9"])[0] == 0


def test_a_run_that_another_process_writes_is_not_resumed(script, tmp_path, capsys):
    """Two would spoil each other's events and checkpoints. The lock ends with the run, also with
    one that did not start."""
    fcntl = pytest.importorskip("fcntl")
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0")
    directory = script.train(args)["run_dir"]
    before = (Path(directory) / "checkpoint.pt").read_bytes()
    line = ["--resume", directory, "--total-timesteps", str(2 * args.total_timesteps)]
    other = os.open(Path(directory) / ".lock", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_SH)  # any lock of another process is in the way
    try:
        code, _, err = run_main(script, capsys, line)
    finally:
        os.close(other)
    assert code == 2
    told = "this run is being written already; stop that first"
    assert err == f"error: --resume {directory}: {told}\n"
    assert (Path(directory) / "checkpoint.pt").read_bytes() == before
    assert run_main(script, capsys, line)[0] == 0


def test_a_directory_that_cannot_be_locked_is_written_all_the_same(script, tmp_path, monkeypatch):
    """It may be written to and not read, or lie on a disk without locks."""
    pytest.importorskip("fcntl")

    def refuse(*given):
        raise OSError(13, "Permission denied")

    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0")
    for owner, name in ((script.os, "open"), (script.fcntl, "flock")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            run, *_ = script.start(args)
        with run:
            assert run.directory.is_dir()


def test_a_resumed_run_has_the_weights_of_its_checkpoint(script, tmp_path, monkeypatch):
    """Also where the file was replaced after it had been read the first time, without a lock."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0")
    directory = script.train(args)["run_dir"]
    make_agent = script.make_agent

    def make_stale(*given):
        agent = make_agent(*given)
        with torch.no_grad():
            for p in agent.parameters():
                p.zero_()
        return agent

    monkeypatch.setattr(script, "make_agent", make_stale)
    run, agent, *_ = script.start(replace(args, resume=directory))
    with run:
        trained, _ = script.load_agent(directory)
        assert_same(dict(agent.state_dict()), dict(trained.state_dict()))


def test_a_run_keeps_others_out_until_its_end(script, tmp_path, monkeypatch):
    """It has the lock from its first iteration on."""
    fcntl = pytest.importorskip("fcntl")
    collect, tried = script.collect_rollout, []

    def try_to_lock(envs, *rest):
        [directory] = (tmp_path / "runs").iterdir()
        other = os.open(directory / ".lock", os.O_RDWR)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tried.append(directory)
        finally:
            os.close(other)
        return collect(envs, *rest)

    monkeypatch.setattr(script, "collect_rollout", try_to_lock)
    directory = script.train(flags_for(script, tmp_path, 2, env_id="probes:Walk-v0"))["run_dir"]
    assert tried == [Path(directory)] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_of_a_gpu_is_not_resumed_without_one(script, tmp_path, capsys):
    """Its RNG cannot go on: one line, and the checkpoint stays; evaluation does without."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    path = Path(script.train(args)["run_dir"], "checkpoint.pt")
    content = torch.load(path, weights_only=True)
    torch.save(content | {"args": content["args"] | {"cuda": True}}, path)
    before = path.read_bytes()
    code, _, err = run_main(script, capsys, ["--resume", str(path.parent)])
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "--resume" in err
    assert "GPU" in err
    assert path.read_bytes() == before
    assert run_main(script, capsys, ["--evaluate", str(path)])[0] == 0


def test_a_failing_write_leaves_the_previous_checkpoint(script, tmp_path, monkeypatch, capsys):
    """Disk full in the third write: exit code 1, the second checkpoint stays and is named."""
    args = flags_for(script, tmp_path, 5, env_id="probes:Walk-v0", checkpoint_every=1)
    with monkeypatch.context() as patch:
        fill_the_disk(patch, 3, "checkpoint.pt.tmp")
        code, _, err = run_main(script, capsys, words(args))
    assert code == 1, err
    (path,) = (tmp_path / "runs").glob("*/checkpoint.pt")
    step = 2 * args.batch_size
    for part in ("No space left", f"last checkpoint, of {step} steps: {path}"):
        assert part in err
    assert contents(path.parent)["run"]["iteration"] == 2
    assert not [*path.parent.glob("*.tmp")]  # half of a file takes room
    whole = script.train(args)
    assert_same(timeless(resumed(script, monkeypatch, path.parent)), timeless(whole))


def test_what_a_kill_leaves_behind_does_no_harm(script, tmp_path, monkeypatch):
    """A half-written file is not read, and is gone after the next write."""
    args = flags_for(script, tmp_path, 3, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    whole = (directory / "checkpoint.pt").read_bytes()
    (directory / "checkpoint.pt.tmp").write_bytes(whole[: len(whole) // 2])
    assert script.load_agent(directory)[1] == args
    resumed(script, monkeypatch, directory)
    assert not (directory / "checkpoint.pt.tmp").exists()
    assert contents(directory)["run"]["iteration"] == 3


def test_checkpoints_are_synced_before_they_are_renamed(script, tmp_path, monkeypatch):
    """Written whole beside the previous one, synced, then renamed: in this order."""
    done, sync, rename = [], os.fsync, Path.replace

    def note_sync(number):
        done.append(("sync", os.fstat(number).st_size))
        sync(number)

    def note_rename(path, target):
        done.append((path.name, Path(target).name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_rename)
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0")
    path = Path(script.train(args)["run_dir"], "checkpoint.pt")
    written, renamed = done[-2:]
    assert written == ("sync", path.stat().st_size)
    assert renamed == ("checkpoint.pt.tmp", "checkpoint.pt")
    synced, renamed = [name for name, _ in done][::2], [name for name, _ in done][1::2]
    assert set(synced) == {"sync"}
    script_copy = f"{Path(script.__file__).name}.tmp"
    assert {*renamed} == {"args.json.tmp", script_copy, "checkpoint.pt.tmp"}


class Bomb:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("flag", ["--evaluate", "--resume"])
def test_a_foreign_file_runs_no_code(script, tmp_path, monkeypatch, capsys, flag):
    """Loading is limited to plain data: a pickle with code in it is refused, exit code 2."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0")
    directory = Path(script.train(args)["run_dir"])
    content = torch.load(directory / "checkpoint.pt", weights_only=True)
    torch.save(content | {"more": Bomb()}, directory / "checkpoint.pt")
    code, _, err = run_main(script, capsys, [flag, str(directory)])
    assert code == 2
    assert "checkpoint.pt" in err
    assert not (tmp_path / "exploded").exists()


def test_evaluation_unpickles_nothing(script, tmp_path, monkeypatch, capsys):
    """What only --resume needs stays closed: --evaluate and load_agent of a foreign file."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0")
    directory = Path(script.train(args)["run_dir"])
    content = torch.load(directory / "checkpoint.pt", weights_only=True)
    torch.save(content | {"run": pickle.dumps(Bomb())}, directory / "checkpoint.pt")
    assert run_main(script, capsys, ["--evaluate", str(directory)])[0] == 0
    script.load_agent(directory)
    assert not (tmp_path / "exploded").exists()


def test_evaluation_prints_what_training_ended_with(script, tmp_path, capsys):
    """The same for the run directory and for the file, after a line that names file and step;
    nothing is trained, and nothing but the result is written."""
    args = flags_for(script, tmp_path, 2, env_id="CartPoleNoVel-v1", masked_obs=(2,))
    directory = Path(script.train(args)["run_dir"])
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("evaluation"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    first = f"CartPoleNoVel-v1: {directory}/checkpoint.pt after 96 steps\n"
    assert line.rstrip().endswith(", after 96 steps")
    same = line.rstrip().removesuffix(", after 96 steps")
    for path in (directory, directory / "checkpoint.pt"):
        code, out, err = run_main(script, capsys, ["--evaluate", str(path)])
        assert (code, out.rstrip(), err) == (0, f"{first}{same}", "")
    line = ["--evaluate", str(directory), "--eval-episodes", "5"]
    code, out, _ = run_main(script, capsys, line)
    assert code == 0
    assert out.startswith(f"{first}evaluation of 5 episodes: return ")
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    names = ("checkpoint_step-96.json", "checkpoint_step-96_eval_episodes-5.json")
    assert all(after.pop(directory / "evaluations" / name) for name in names)
    assert after == before
    code, _, err = run_main(script, capsys, ["--evaluate", str(directory), "--gamma", "0.5"])
    assert code == 2
    assert "gamma" in err


@pytest.mark.parametrize("name", ONE_SCRIPT)
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path, monkeypatch, name):
    """SIGTERM, and Ctrl-C: exit code 130, one line; resume ends it."""
    script, number = importlib.import_module(name), signal.SIGTERM
    flags = {"env_id": "probes:Walk-v0", "checkpoint_every": 1, "num_envs": 2}
    if name == SCRIPTS[1]:
        number = signal.SIGINT
    args = flags_for(script, tmp_path, 100_000, **flags)
    process = start(script, tmp_path, words(args))
    path = await_file(process, tmp_path, "runs/*/checkpoint.pt")
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    assert await_end(process) == 130
    err = (tmp_path / "err").read_text()
    assert f"--resume {path.parent}" in err
    assert "stopped after" in err
    assert "Traceback" not in err
    iteration = contents(path.parent)["run"]["iteration"]
    assert f"stopped after {iteration * args.batch_size:,} steps" in err
    saved = torch.load(path, weights_only=True)
    saved["args"]["total_timesteps"] = (iteration + 2) * args.batch_size
    torch.save(saved, path)
    resumed(script, monkeypatch, path.parent)
    assert contents(path.parent)["run"]["iteration"] == iteration + 2


def test_a_run_that_is_done_keeps_its_environments(script, tmp_path, monkeypatch):
    """It is resumed to be evaluated, under another version of a library, and then goes on under the
    old one: as if nobody had evaluated it."""
    flags = {"env_id": "probes:Walk-v0", "num_envs": 2, "eval_episodes": 0}
    directory = Path(script.train(flags_for(script, tmp_path, 2, **flags))["run_dir"])
    before = run_of(directory / "checkpoint.pt")
    with monkeypatch.context() as patch:
        patch.setattr(script, "loaded_versions", lambda: {"numpy": "0.0"})
        resumed(script, monkeypatch, directory, "--eval-episodes", "2")
    after = run_of(directory / "checkpoint.pt")
    assert after["evaluated_at"] == after["step"]
    assert after["versions"] == before["versions"]
    assert after["parts"][0]["envs"] == before["parts"][0]["envs"]

    total = 3 * flags_for(script, tmp_path, 1, **flags).batch_size
    line = ["--eval-episodes", "0", "--total-timesteps", str(total)]
    resumed(script, monkeypatch, directory, *line)
    other = Path(script.train(flags_for(script, tmp_path, 2, **flags))["run_dir"])
    resumed(script, monkeypatch, other, *line)
    assert_same(contents(directory)["agent"], contents(other)["agent"])


def descendants(pid):
    """Process ids of its children, and of theirs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may just have ended
            if int(path.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found += [int(path.parent.name), *descendants(int(path.parent.name))]
    return found


def has_ended(pid):
    """Wait for the end of a process for some seconds, whether or not the system has reaped it."""
    for _ in range(100):
        try:
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("name", ONE_SCRIPT)
def test_sigterm_to_all_processes_ends_the_run_with_a_checkpoint(tmp_path, name):
    """Batch systems end a job in this way. The processes of environments answer to the last, and
    end with the run."""
    script = importlib.import_module(name)
    flags = {"env_id": "probes:Walk-v0", "checkpoint_every": 1, "num_envs": 2}
    args = flags_for(script, tmp_path, 100_000, async_envs=True, **flags)
    process = start(script, tmp_path, words(args))
    path = await_file(process, tmp_path, "runs/*/checkpoint.pt")
    others = descendants(process.pid)
    assert len(others) > 2  # the server that forks them, and two at least
    for pid in (*others, process.pid):
        os.kill(pid, signal.SIGTERM)
    assert await_end(process) == 130
    err = (tmp_path / "err").read_text()
    assert f"--resume {path.parent}" in err
    assert "Traceback" not in err
    assert all(map(has_ended, others))


@pytest.mark.slow
def test_twenty_kills_at_random_instants(script, tmp_path, monkeypatch, capsys):
    """Every resume works; metrics and events are those of the run that nobody killed."""
    flags = {"env_id": "CartPole-v1", "checkpoint_every": 3, "num_envs": 2, "num_steps": 24}
    args = flags_for(script, tmp_path, 600, **flags)
    line, instants = words(args), random.Random(0)
    for kill in range(20):
        process = start(script, tmp_path, line)
        if kill == 0:  # there is nothing to resume before the first checkpoint
            path = await_file(process, tmp_path, "runs/*/checkpoint.pt")
        elif instants.random() < 0.7:  # after the start, else at any instant of it
            await_file(process, path.parent, f"events.*.{process.pid}.*")
        time.sleep(instants.uniform(0, 0.4))
        process.kill()
        assert process.wait() == -signal.SIGKILL, (tmp_path / "err").read_text()
        assert "Traceback" not in (tmp_path / "err").read_text()
        script.load_agent(path)
        line = ["--resume", str(path.parent)]
    survived = contents(path.parent)["run"]["iteration"]
    assert 0 < survived < args.num_iterations
    next_second()
    last = resumed(script, monkeypatch, path.parent)
    whole = script.train(args)
    assert_same(timeless(last), timeless(whole))
    assert_same(contents(path.parent), contents(whole["run_dir"]))
    assert scalars(path.parent) == scalars(whole["run_dir"])


def test_flags_are_stored_as_given(script, tmp_path, monkeypatch):
    """The checkpoint of a resumed run holds the run's own flags, not the way it was resumed."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0", masked_obs=(0,))
    directory = stopped(script, monkeypatch, args, 1)
    resumed(script, monkeypatch, directory, "--eval-episodes", "2")
    _, stored = script.load_agent(directory)
    assert asdict(stored) == asdict(args) | {"eval_episodes": 2}


def test_a_run_directory_may_contain_an_equals_sign(script, tmp_path, monkeypatch):
    """--resume DIR, --resume=DIR and --evaluate DIR find it."""
    args = flags_for(script, tmp_path, 3, env_id="probes:Walk-v0")
    args = replace(args, run_dir=str(tmp_path / "lr=1"))
    seen, train = [], script.train
    directory = train(args)["run_dir"]
    monkeypatch.setattr(script, "train", seen.append)
    with undisturbed():
        script.main(["--resume", directory])
        script.main([f"--resume={directory}"])
        script.main(["--evaluate", directory])
    assert [args.resume for args in seen] == [directory, directory]


def test_the_generator_of_python_goes_on(script, tmp_path, monkeypatch):
    """Tasks may draw from it: a resume sets it to what the checkpoint holds."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    random.seed(123)
    state = random.getstate()

    def exchange(kept):
        [part] = kept["parts"]
        return kept | {"parts": [part | {"rngs": (state, part["rngs"][1])}]}

    change_run(directory / "checkpoint.pt", exchange)
    run, *_ = script.start(replace(args, resume=str(directory)))
    with run:
        assert random.getstate() == state


def test_environments_that_others_replace_are_kept_to_be_closed(script, tmp_path, monkeypatch):
    """Those that a resume had opened ahead of reading the stored ones."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    run, *_, envs = script.start(replace(args, resume=str(directory)))
    with undisturbed(), run:
        assert len(run.unused_envs) == args.num_envs
        assert not {*map(id, run.unused_envs)} & {*map(id, envs.envs)}


def test_what_may_change_in_a_resume(script, tmp_path):
    """What moves no number of the training."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0", eval_episodes=1)
    line = ["--resume", script.train(args)["run_dir"]]
    found = script.parse_args([*line, "--checkpoint-every", "3", "--torch-threads", "2"])
    assert (found.checkpoint_every, found.torch_threads) == (3, 2)
    with pytest.raises(script.UsageError, match=r"--seed 7 \(the run has 1\): must be as in"):
        script.parse_args([*line, "--seed", "7"])
    assert script.parse_args([*line, "--eval-episodes", "2"]).eval_episodes == 2
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0", eval_episodes=1, eval_every=1)
    directory = script.train(args)["run_dir"]
    more = {"resume": directory, "total_timesteps": 999, "eval_every": 0}
    with pytest.raises(script.UsageError, match="--eval-episodes 2: must be 1, as in the run"):
        script.train(replace(args, eval_episodes=2, **more))  # a later resume may compare again


def test_flags_that_a_resume_changes_outlive_a_crash(script, tmp_path, monkeypatch, capsys):
    """In its first iteration, so ahead of any other checkpoint. Without more flags the next resume
    goes on to the new end. The first fault names the step of the checkpoint, not its own."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0", checkpoint_every=0)
    directory = script.train(args)["run_dir"]
    line = ["--resume", directory, "--total-timesteps", str(3 * args.batch_size)]

    def crash(*facts):
        raise RuntimeError("crash")

    with monkeypatch.context() as patch:
        patch.setattr(script, "prepare_batch", crash)
        _, _, err = run_main(script, capsys, line)
    assert f"last checkpoint, of {args.batch_size} steps: " in err
    assert script.parse_args(line[:2]).total_timesteps == 3 * args.batch_size
    resumed(script, monkeypatch, directory)
    assert contents(directory)["step"] == 3 * args.batch_size


def test_a_file_of_weights_alone_is_not_resumed(script, tmp_path, capsys):
    """As where best.pt was copied to checkpoint.pt."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0", eval_episodes=1, eval_every=1)
    directory = Path(script.train(args)["run_dir"])
    (directory / "checkpoint.pt").write_bytes((directory / "best.pt").read_bytes())
    line = ["--resume", str(directory), "--total-timesteps", "999"]
    code, _, err = run_main(script, capsys, line)
    assert code == 2
    assert "its checkpoint.pt has no more than weights, as best.pt; start anew with --init" in err


def test_what_another_process_has_lost_is_told(script, tmp_path, monkeypatch, capsys):
    """The first process speaks for all of them."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    gathered = script.gather_objects

    def gather_objects(thing):
        return [thing, "its disk is gone"] if thing == "" else gathered(thing)

    monkeypatch.setattr(script, "gather_objects", gather_objects)
    capsys.readouterr()
    run, *_ = script.start(replace(args, resume=str(directory)))
    with undisturbed(), run:
        told = capsys.readouterr().out
        assert "episodes of some processes start afresh: its disk is gone" in told
        run.args.save_envs = "always"
        run.pickled_envs()
        told = capsys.readouterr().out
        assert "environments of some processes are not saved, since its disk is gone" in told


def test_generators_are_taken_up_after_tasks_were_read(script, tmp_path, monkeypatch):
    """A task that is read back may draw numbers to rebuild itself."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    read = script.Run.read_envs

    def draw(self, *rest):
        random.random()
        np.random.random()
        return read(self, *rest)

    found = []
    for drawing in (False, True):
        if drawing:
            monkeypatch.setattr(script.Run, "read_envs", draw)
        run, *_ = script.start(replace(args, resume=str(directory)))
        with undisturbed(), run:
            found.append((random.random(), np.random.random()))
    assert found[0] == found[1]


def test_bytes_that_are_no_checkpoint_cost_one_line(script, tmp_path, capsys):
    """Whatever `pickle` raises."""
    directory = script.train(flags_for(script, tmp_path, 1, env_id="probes:Walk-v0"))["run_dir"]
    path = Path(directory) / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    torch.save(content | {"run": b"x"}, path)
    code, _, err = run_main(script, capsys, ["--resume", directory, "--total-timesteps", "999"])
    assert code == 2
    assert "is of another version of this script" in err
    assert "Traceback" not in err


def test_each_process_takes_up_its_own_part(script, tmp_path, monkeypatch):
    """The second of two: what it carries on is not the first one's."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)

    def double(kept):
        [part] = kept["parts"]
        return kept | {"parts": [part | {"carried": (name,)} for name in ("first", "second")]}

    change_run(directory / "checkpoint.pt", double)
    run, *_ = script.start(replace(args, resume=str(directory)))
    facts = {"WORLD_SIZE": 2, "RANK": 1, "gather_objects": lambda thing: [thing] * 2}
    with run, monkeypatch.context() as patch:
        for name, value in facts.items():
            patch.setattr(script, name, value)
        run.take_up()
    assert run.carried == ("second",)


@pytest.mark.parametrize("flag", ["resume", "init_from"])
def test_machines_with_different_files_are_refused(script, tmp_path, monkeypatch, flag):
    """Two machines have a run of the same name: its checkpoints must be the same to the last byte.
    Otherwise the processes would train different weights with the mean of their gradients."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    args = replace(args, **{flag: str(stopped(script, monkeypatch, args, 1))})
    run, agent, *_ = script.start(args)
    take = run.take_up if flag == "resume" else partial(script.take_weights, agent, args, Path())
    facts = {"WORLD_SIZE": 2, "gather_objects": lambda thing: [thing] * 2}
    with run, monkeypatch.context() as patch:
        for name, value in facts.items():
            patch.setattr(script, name, value)
        take()  # files that are alike
        patch.setattr(script, "gather_objects", lambda thing: [thing, "other"])
        told = f"--{flag.replace('_', '-')} .*: the processes read different files; give"
        with pytest.raises(script.UsageError, match=told):
            take()


def test_optimizers_that_are_missing_are_told(script, tmp_path, monkeypatch, capsys):
    """As in a checkpoint of a version that had one."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    change_run(
        directory / "checkpoint.pt", lambda kept: kept | {"optimizers": kept["optimizers"][:1]}
    )
    code, _, err = run_main(script, capsys, ["--resume", str(directory)])
    assert code == 2
    assert "is of another version of this script" in err


def test_an_evaluation_keeps_the_parts_of_other_processes(script, tmp_path, monkeypatch):
    """One process evaluates a run of two. What it saves is still of two."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0", eval_episodes=0)
    path = Path(script.train(args)["run_dir"]) / "checkpoint.pt"
    change_run(path, lambda kept: kept | {"parts": kept["parts"] * 2})
    resumed(script, monkeypatch, path.parent, "--eval-episodes", "1")
    assert len(run_of(path)["parts"]) == 2


def test_other_processes_do_not_begin_with_the_first_numbers(script, tmp_path, monkeypatch):
    """A run of two processes goes on in one. Tasks there do not meet the numbers of its start."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    change_run(directory / "checkpoint.pt", lambda kept: kept | {"parts": kept["parts"] * 2})
    found = []
    for flags in ({}, {"resume": str(directory)}, {"resume": str(directory)}):
        run, *_ = script.start(replace(args, **flags))
        with undisturbed(), run:
            found.append((random.random(), np.random.random()))
        if flags:
            monkeypatch.setattr(script, "RANK", 1)
            run.take_up_episodes()
            assert random.random() != found[-1][0]
            monkeypatch.setattr(script, "RANK", 0)
    first, second, third = found
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert second == third


def test_first_states_are_not_drawn_again_where_episodes_are_lost(script, tmp_path, monkeypatch):
    """A task that draws from torch in `reset` has other numbers at another step of the run."""
    drawn = []

    class Draws(gym.Env):
        """An episode of one step."""

        observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            """Draw."""
            drawn.append(float(torch.rand(())))
            return np.zeros(1, np.float32), {}

        def step(self, action):
            """End."""
            return np.zeros(1, np.float32), 0.0, True, False, {}

    gym.register("Draws-v0", Draws)
    try:
        args = flags_for(script, tmp_path, 2, env_id="Draws-v0", save_envs="never")
        directory = stopped(script, monkeypatch, args, 1)
        firsts = []
        for flags in ({}, {}, {"resume": str(directory)}):
            run, agent, _, envs = script.start(replace(args, **flags))
            drawn.clear()
            given = (envs, agent, run) if "lstm" in script.__name__ else (envs, run)
            with undisturbed(), run:
                script.open_episodes(*given)
            firsts.append(tuple(drawn))
    finally:
        gym.registry.pop("Draws-v0")
    assert firsts[0] == firsts[1]
    assert not set(firsts[0]) & set(firsts[2])


def test_processes_of_environments_draw_anew_at_another_step(script, tmp_path):
    """`Group.reset` seeds the generators from the first of its seeds."""
    args = flags_for(script, tmp_path, 1, env_id="probes:Walk-v0")
    before = script.global_generators()
    group = script.Group(args, os.getpid(), 1, 2)
    found = []
    for seeds in ([1, 2], [1, 2], [3, 4]):
        group.reset(seed=seeds)
        found.append((random.random(), np.random.random(), float(torch.rand(()))))
        group.reset()
        assert random.random() != found[-1][0]
    group.close()
    script.set_global_generators(before)
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])


def test_settings_of_torch_that_a_task_found_are_resumed(script, tmp_path, monkeypatch, capsys):
    """It had changed the default dtype in `__init__`, which no copy calls. Its step needs that, in
    the process which tries copies out as well."""
    args = flags_for(script, tmp_path, 3, env_id="rude:Torch-v0", save_envs="proven")
    whole = script.train(args)
    directory = stopped(script, monkeypatch, args, 1)
    again = resumed(script, monkeypatch, directory)
    assert AFRESH not in capsys.readouterr().out
    assert_same(timeless(again), timeless(whole))


@pytest.mark.parametrize("saved", [None, (torch.float64, False)])
def test_a_copy_has_the_settings_that_were_saved(script, monkeypatch, saved):
    """Not those that making a fresh task left behind."""
    monkeypatch.setattr(script.Checked, "tasks_settings", {})
    layer = script.make_env(small_args(script, "Walk")).env
    assert isinstance(layer, script.Checked)
    name = layer.env_id
    if saved is not None:
        layer.tasks_settings[name] = saved
    file = io.BytesIO()
    script.EnvPickler(file).dump(layer)
    layer.tasks_settings[name] = (torch.float32, False)
    copy = pickle.loads(file.getvalue())
    assert layer.tasks_settings == ({} if saved is None else {name: saved})
    assert "settings" not in vars(copy)


def test_generators_go_on_where_environments_are_lost(script, tmp_path, monkeypatch):
    """Both are those of the checkpoint."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0", save_envs="never")
    directory = stopped(script, monkeypatch, args, 1)
    with undisturbed():
        random.seed(123)
        np.random.seed(123)
        drawn = random.getstate(), np.random.get_state()

    def replace_rngs(kept):
        return kept | {"parts": [kept["parts"][0] | {"rngs": drawn}]}

    change_run(Path(directory) / "checkpoint.pt", replace_rngs)
    run, *_ = script.start(replace(args, resume=str(directory)))
    with undisturbed(), run:
        assert run.carried is None
        assert_same((random.getstate(), np.random.get_state()), drawn)
