"""Whole runs: spaces, files, events, checkpoints, repetition."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import re
import signal
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from command import run_main
from conftest import with_both_scripts, with_one_script
from helpers import act, carried_obs, is_recurrent, make_agent, make_run, prepare, small_args
from probes import ACTIONS, OBSERVATIONS, Walk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto import event_pb2
from torch.testing import assert_close

SCALARS = """
charts/episodic_return charts/episodic_length charts/SPS
charts/learning_rate charts/critic_learning_rate
losses/policy_loss losses/value_loss losses/entropy losses/approx_kl losses/clipfrac
losses/explained_variance
value/bias value/std_predicted value/std_target value/distribution_gap value/clip_fraction
value/p10 value/p50 value/p90
twin/loss_1 twin/loss_2 twin/abs_difference twin/critic1_is_min
cvar/predicted cvar/empirical cvar/coverage cvar/weight
norm/return_mean norm/return_std norm/value_shift
adv/mean_raw adv/std_raw adv/std adv/abs_max
policy/kl_exact policy/kl_max policy/ratio_mean policy/ratio_std
policy/ratio_first_minibatch_error policy/entropy_coef policy/epochs_done policy/stopped_early
grad/actor grad/critic
data/truncated_fraction
time/rollout time/values time/update
eval/return_mean eval/return_std eval/return_cvar eval/length_mean
""".split()
OF_ITS_OWN = {
    "distributional_ppo_lstm": ["value/crossing_fraction"],
    "distributional_ppo_categorical": ["value/outside_support"],
}
HISTOGRAMS = ["charts/recent_returns", "value/predicted_returns", "value/realised_returns"]
TIMED = {"charts/SPS", "time/rollout", "time/values", "time/update", "run_dir"}


def run(script, tmp_path, env, **flags):
    """Train; metrics without those that depend on the clock or the directory."""
    metrics = script.train(small_args(script, env, run_dir=str(tmp_path), **flags))
    return {k: v for k, v in metrics.items() if k not in TIMED}, Path(metrics["run_dir"])


def events(directory):
    """What TensorBoard reads from a run directory."""
    accumulator = EventAccumulator(str(directory), {"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


@pytest.mark.parametrize("seq_len", [0, 6])
@pytest.mark.parametrize(("obs", "action"), list(zip(OBSERVATIONS, ACTIONS)))
def test_every_space_trains(script, tmp_path, obs, action, seq_len):
    """Each kind of observation and of action end to end, in whole and in short sequences."""
    flags = {"seq_len": seq_len} if "seq_len" in script.Args.__dataclass_fields__ else {}
    if seq_len and not flags:
        pytest.skip("it has no sequences")
    metrics, _ = run(script, tmp_path, obs + action, **flags)
    assert metrics["eval/return_mean"] == metrics["eval/length_mean"] == 7
    assert all(np.isfinite(v) for v in metrics.values())


def test_events_hold_every_documented_tag(script, tmp_path):
    """Scalars, histograms and hparams; the README explains each of them."""
    metrics, directory = run(script, tmp_path, "VectorDiscrete", vf_clip="mean_only")
    found = events(directory)
    tags = [*SCALARS, *OF_ITS_OWN[script.__name__]]
    assert set(found.Tags()["scalars"]) >= set(tags)
    assert set(found.Tags()["histograms"]) >= set(HISTOGRAMS)
    described = {tag: script.DESCRIPTIONS[tag] for tag in [*tags, *HISTOGRAMS]}
    shown = {tag: found.summary_metadata[tag].summary_description for tag in described}
    assert shown == described
    plugins = {tag: found.summary_metadata[tag].plugin_data.plugin_name for tag in described}
    assert plugins == dict.fromkeys(tags, "scalars") | dict.fromkeys(HISTOGRAMS, "histograms")
    kinds = {tag: found.summary_metadata[tag].data_class for tag in described}
    assert kinds == dict.fromkeys(tags, 1) | dict.fromkeys(HISTOGRAMS, 2)  # scalars, tensors
    assert metrics.keys() == set(tags) - TIMED
    for tag in metrics:
        assert found.Scalars(tag)[-1].value == pytest.approx(metrics[tag], rel=1e-5, abs=1e-6)
    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    assert [tag for tag in [*tags, *HISTOGRAMS] if f"`{tag}`" not in readme] == []


def table_of_runs(directory):
    """What TensorBoard's HParams tab makes of a directory of runs: columns, and values by run."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    columns, values = [], {}
    for path in sorted(directory.iterdir()):
        found = events(path).summary_metadata
        content = found["_hparams_/experiment"].plugin_data.content
        experiment = HParamsPluginData.FromString(content).experiment
        columns = columns or [x.name for x in experiment.hparam_infos if x.differs]
        metrics = [x.name.tag for x in experiment.metric_infos]
        content = found["_hparams_/session_start_info"].plugin_data.content
        started = HParamsPluginData.FromString(content).session_start_info.hparams
        assert {"eval_episodes", "eval_sampled"} <= {*started}  # its columns are evaluations
        values[path.name] = {k: x.string_value or x.number_value for k, x in started.items()}
    return columns, metrics, values


@with_one_script
def test_the_table_of_runs_tells_them_apart(script, tmp_path):
    """What comes first, and what is not at its default; None and booleans are words; where and how
    often a run is saved makes no difference and has no column."""
    run(script, tmp_path, "VectorDiscrete", seed=7, gamma=0.5, anneal_lr=False)
    columns, metrics, values = table_of_runs(tmp_path)
    assert {*columns} == {"env_id", "exp_name", "flags", "preset", "seed"}
    assert metrics == ["eval/return_mean", "eval/return_cvar", "charts/SPS"]
    [found] = values.values()
    assert (found["env_id"], found["seed"], found["gamma"]) == ("probes:VectorDiscrete-v0", 7, 0.5)
    assert "gamma=0.5" in found["flags"]
    assert "anneal_lr=False" in found["flags"]
    assert "clip_coef" not in found["flags"]
    assert found["anneal_lr"] == "false"
    assert found["target_kl"] == "none"
    assert {"run_dir", "resume", "checkpoint_every", "torch_threads"} & found.keys() == set()


@with_one_script
def test_runs_of_one_second_have_names_of_their_own(script, tmp_path, monkeypatch):
    """A name that is taken gets a number."""
    monkeypatch.setattr(script.time, "strftime", lambda _: "0102-030405")
    args = small_args(script, "Walk", run_dir=str(tmp_path))
    made = [script.make_run_dir(args) for _ in range(3)]
    names = [path.name for path in made]
    name = f"Walk-v0__{script.Args.exp_name}__s1__0102-030405"
    assert names == [name, f"{name}-2", f"{name}-3"]
    nested = script.make_run_dir(replace(args, exp_name="a/b"))  # a slash opens no directory
    assert nested == tmp_path / "Walk-v0__a_b__s1__0102-030405"


@with_one_script
def test_an_evaluation_is_kept_beside_its_checkpoint(script, tmp_path, capsys):
    """One file for each checkpoint and way: step, how it was evaluated, and the result."""
    metrics, directory = run(script, tmp_path, "Walk", eval_every=1)
    capsys.readouterr()
    for name in ("checkpoint.pt", "best.pt"):
        script.main(["--evaluate", str(directory / name)])
    out = capsys.readouterr().out
    assert f"probes:Walk-v0: {directory}/checkpoint.pt after 96 steps" in out
    assert kept_in(directory).keys() == {"checkpoint_step-96", "best_step-96"}
    one = kept_in(directory)["checkpoint_step-96"]
    assert (one["step"], one["episodes"], one["sampled"]) == (96, 3, False)
    assert one["eval/return_mean"] == metrics["eval/return_mean"]
    before = kept_in(directory)
    script.main(["--evaluate", str(directory / "best.pt"), "--seed", "7", "--eval-sampled"])
    more = kept_in(directory)
    assert more.keys() - before.keys() == {"best_step-96_eval_sampled-True_seed-7"}
    assert before.items() <= more.items()
    script.main(["--evaluate", str(directory), "--eval-sampled", "--eval-episodes", "2"])
    other = kept_in(directory)["checkpoint_step-96_eval_episodes-2_eval_sampled-True"]
    assert (other["episodes"], other["sampled"]) == (2, True)


def kept_in(directory):
    """The results of evaluations that a run's directory holds, by name."""
    files = (directory / "evaluations").glob("*.json")
    return {path.stem: json.loads(path.read_text()) for path in files}


@with_one_script
def test_evaluations_of_a_run_that_goes_on_are_kept_apart(script, tmp_path):
    """By the step of their checkpoint."""
    _, directory = run(script, tmp_path, "Walk")
    script.main(["--evaluate", str(directory)])
    script.main(["--resume", str(directory), "--total-timesteps", "144"])
    script.main(["--evaluate", str(directory)])
    assert kept_in(directory).keys() == {"checkpoint_step-96", "checkpoint_step-144"}


@with_one_script
def test_an_evaluation_that_cannot_be_kept_is_told(script, tmp_path, capsys, monkeypatch):
    """A full disk costs a warning, and what was kept before stays."""
    _, directory = run(script, tmp_path, "Walk")
    script.main(["--evaluate", str(directory)])
    before = kept_in(directory)
    capsys.readouterr()

    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script.os, "fsync", refuse)
    script.main(["--evaluate", str(directory)])
    out, err = capsys.readouterr()
    assert "evaluation of 3 episodes" in out
    assert "warning: the result is not kept: [Errno 28] No space left" in err
    assert kept_in(directory) == before


@with_one_script
def test_commands_that_are_printed_can_be_pasted(script, tmp_path, capsys):
    """A folder with a space is quoted."""
    _, directory = run(script, tmp_path / "my runs", "Walk")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == f"to watch: tensorboard --logdir '{tmp_path}/my runs'"
    assert f"resume='{directory}', total_timesteps=192))" in lines[-1]


@with_both_scripts
@pytest.mark.parametrize(
    ("task", "masked", "idle"),
    [("CartPoleNoVel-v1", (1, 3), True), ("CartPoleNoVel-v1", (0, 1), False),
     ("CartPole-v1", (1, 3), False)],
)  # fmt: skip
def test_entries_that_the_task_hides_need_no_mask(script, tmp_path, capsys, task, masked, idle):
    """The run says that such a flag has no effect."""
    few = {"total_timesteps": 64, "num_steps": 16, "num_envs": 4, "eval_episodes": 0}
    flags = {"run_dir": str(tmp_path), "save_envs": "never", "masked_obs": masked}
    script.train(script.Args(env_id=task, **few, **flags))
    told = "--masked-obs has no effect: this task hides these entries" in capsys.readouterr().out
    assert told == idle


@with_one_script
@pytest.mark.parametrize("env", ["ImageDiscrete", "VectorDiscrete"])
def test_images_are_not_normalised_and_the_run_says_so(script, tmp_path, capsys, env):
    """Of a vector the flag has an effect."""
    run(script, tmp_path, env, norm_obs=False)
    told = "--no-norm-obs has no effect on images" in capsys.readouterr().out.splitlines()[0]
    assert told == (env == "ImageDiscrete")


@with_one_script
def test_a_run_says_where_it_stands(script, tmp_path, capsys):
    """Ahead: task, what is seen, actions, directory. At the end: how to watch, how to go on."""
    _, directory = run(script, tmp_path, "VectorDiscrete")
    lines = capsys.readouterr().out.splitlines()
    first = "probes:VectorDiscrete-v0: networks see vectors of 4; actions Discrete(4, start=3)"
    assert lines[0] == f"{first}; logging to {directory}"
    assert lines[-2] == f"to watch: tensorboard --logdir {tmp_path}"
    changes = f"resume={str(directory)!r}, total_timesteps=192"
    assert lines[-1] == f"to continue: train(dataclasses.replace(args, {changes}))"


@with_one_script
def test_many_processes_continue_as_many(script, monkeypatch, capsys):
    """Six of them, two on each of three machines."""
    monkeypatch.setattr(script, "WORLD_SIZE", 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run = SimpleNamespace(best_step=0, directory=Path("runs/it"), step=96, quoted="it", say=print)
    script.Run.say_what_next(run)
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command[2:7] == ["torchrun", "--nnodes", "3", "--nproc-per-node", "2"]
    assert command[8:] == ["--resume", "it", "--total-timesteps", "192"]


@with_one_script
def test_episodes_are_logged_at_the_step_they_ended(script, tmp_path):
    """7-step episodes in 4 environments: at steps 28, 56 and 84, each once per environment."""
    _, directory = run(script, tmp_path, "VectorDiscrete")
    points = events(directory).Scalars("charts/episodic_return")
    assert [(p.step, p.value) for p in points] == [(28 * (1 + i // 4), 7) for i in range(12)]


@with_one_script
def test_speed_counts_rollout_values_and_update_of_all_iterations(script, tmp_path):
    """Steps so far by seconds so far, at each of four iterations of 48 steps."""
    _, directory = run(script, tmp_path, "VectorDiscrete", total_timesteps=192)
    found = events(directory)
    parts = [found.Scalars(f"time/{part}") for part in ("rollout", "values", "update")]
    seconds = np.cumsum([sum(p.value for p in points) for points in zip(*parts)])
    speed = {p.step: p.value for p in found.Scalars("charts/SPS")}
    steps = [48, 96, 144, 192]
    assert speed == pytest.approx(dict(zip(steps, steps / seconds)), rel=1e-3)


@with_one_script
def test_a_tag_is_described_once(script, tmp_path):
    """It is several times as long as its value. TensorBoard reads that of the first event alone."""
    _, directory = run(script, tmp_path, "RandomReward", num_steps=12, total_timesteps=96)
    [path] = Path(directory).glob("events.*")
    events = map(event_pb2.Event.FromString, RawEventFileLoader(str(path)).Load())
    values = [value for event in events for value in event.summary.value]
    described = [value.tag for value in values if value.HasField("metadata")]
    assert len(described) == len({*described})
    assert {*described} >= {value.tag for value in values}
    assert len(values) > 2 * len(described)


@with_one_script
def test_returns_of_late_are_those_of_the_last_hundred_episodes(script, tmp_path):
    """384 episodes of ten steps: what is kept, and its CVaR, the mean of the five lowest."""
    metrics, directory = run(script, tmp_path, "RandomReward", num_steps=480, total_timesteps=3840)
    returns = [p.value for p in events(directory).Scalars("charts/episodic_return")]
    kept = torch.load(directory / "checkpoint.pt", weights_only=True)["run"]
    assert pickle.loads(kept.numpy())["recent_returns"] == pytest.approx(returns[-100:], rel=1e-6)
    assert len(returns) == 384
    assert metrics["cvar/empirical"] == pytest.approx(np.mean(sorted(returns[-100:])[:5]))


GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("env", ["VectorBox", "ImageMultiDiscrete"])
def test_the_same_seed_repeats_exactly(script, tmp_path, env, device):
    """Bit-identical metrics; another seed differs."""
    flags = {"cuda": device == "cuda"}
    one, _ = run(script, tmp_path, env, seed=4, **flags)
    two, _ = run(script, tmp_path, env, seed=4, **flags)
    other, _ = run(script, tmp_path, env, seed=5, **flags)
    assert one == two
    assert one != other


def test_evaluation_in_between_does_not_touch_the_run(script, tmp_path):
    """Evaluating every iteration logs evaluations and changes nothing else."""
    without, _ = run(script, tmp_path, "VectorBox")
    with_them, directory = run(script, tmp_path, "VectorBox", eval_every=1)
    assert without == with_them
    assert [p.step for p in events(directory).Scalars("eval/return_mean")] == [48, 96]


@with_one_script
def test_processes_give_what_one_process_gives(script, tmp_path, monkeypatch):
    """Another vector environment in `make_envs`, as the README says: the same numbers."""
    one, _ = run(script, tmp_path, "VectorDiscrete")
    monkeypatch.setattr(gym.vector, "SyncVectorEnv", gym.vector.AsyncVectorEnv)
    many, _ = run(script, tmp_path, "VectorDiscrete")
    assert one == many


def test_environments_in_processes_of_their_own_change_no_number(tmp_path, capsys):
    """`--async-envs`. Checkpoints cannot hold them, and a line says so; a resume opens episodes."""
    import distributional_ppo_categorical as script

    flags = {"num_envs": 2, "save_envs": "always"}
    one, _ = run(script, tmp_path, "VectorDiscrete", **flags)
    many, directory = run(script, tmp_path, "VectorDiscrete", async_envs=True, **flags)
    assert one == many
    assert "not saved, since they are in processes of their own" in capsys.readouterr().out
    script.main(["--resume", str(directory), "--total-timesteps", "144"])
    assert "episodes start afresh: the checkpoint has no env" in capsys.readouterr().out


@with_one_script
@pytest.mark.parametrize(
    "env",
    ["VectorMultiDiscrete", "VectorBox", "ImageMultiDiscrete", "Staggered"],
)
def test_groups_of_environments_change_no_number(script, tmp_path, monkeypatch, capsys, env):
    """Four environments in two processes, as on two cores; three cores make no more. Time limits
    cut the episodes of `Staggered`: their final observations have values, which must arrive."""
    flags = {"num_envs": 4, "save_envs": "never"}
    one, _ = run(script, tmp_path, env, **flags)
    monkeypatch.setattr(script, "usable_cores", lambda: 3)
    capsys.readouterr()
    many, _ = run(script, tmp_path, env, async_envs=True, **flags)
    assert one == many
    assert "; environments in each process: 2; " in capsys.readouterr().out


def instead_of_processes(monkeypatch, note):
    """AsyncVectorEnv starts nothing and tells `note` what it is given. Returns what it makes."""
    groups = SimpleNamespace(call=lambda name: None, processes=[], close=lambda **how: None)

    def make(makers, **options):
        note(makers, **options)
        return groups

    monkeypatch.setattr(gym.vector, "AsyncVectorEnv", make)
    return groups


@with_one_script
@pytest.mark.parametrize(("cores", "sizes"), [(1, 6), (2, 3), (4, 2), (5, 2), (6, 1), (64, 1)])
def test_there_are_no_more_processes_than_cores(script, monkeypatch, cores, sizes):
    """Six environments in groups of equal size, as many as the cores allow."""
    made = []
    instead_of_processes(monkeypatch, lambda makers, **_: made.extend(one.args for one in makers))
    monkeypatch.setattr(script, "usable_cores", lambda: cores)
    args = small_args(script, "Counter", async_envs=True, num_envs=6, num_minibatches=1)
    envs = script.make_envs(args)
    assert envs.num_envs == 6
    assert [index for _, _, index, _ in made] == [*range(1, 7, sizes)]
    assert {size for *_, size in made} == {sizes}


@with_one_script
@pytest.mark.parametrize(("cores", "groups"), [(4, 2), (1, 1)])
def test_processes_of_other_machines_take_no_cores(script, monkeypatch, cores, groups):
    """Four processes on two machines of four cores: two of them share these, so each has two. Where
    they share one core, each has one group all the same."""
    made = []
    instead_of_processes(monkeypatch, lambda makers, **options: made.extend(makers))
    monkeypatch.setattr(script, "usable_cores", lambda: cores)
    args = small_args(script, "Counter", async_envs=True, num_envs=8, num_minibatches=1)
    monkeypatch.setattr(script, "WORLD_SIZE", 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert script.make_envs(args).num_envs == 2
    assert len(made) == groups


@with_one_script
def test_groups_draw_numbers_of_their_own(script, monkeypatch):
    """For tasks that draw from the generators of Python, NumPy and torch, in other processes."""
    monkeypatch.setattr(signal, "signal", lambda *inputs: None)
    monkeypatch.setattr(os, "setpgrp", lambda: None)
    args = small_args(script, "Walk", num_envs=2)
    drawn = []
    with torch.random.fork_rng():
        for index in (1, 2):
            script.Group(args, -1, index, 1).close()
            drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert all(one != two for one, two in zip(*drawn))


@with_one_script
def test_groups_of_environments_are_reset_like_others(script):
    """With a seed for each, and without any, as gymnasium allows."""
    args = small_args(script, "Walk", async_envs=True, num_envs=2)
    envs, alone = script.make_envs(args), script.make_envs(replace(args, async_envs=False))
    for seeds in ([3, 5], None):
        found, _ = envs.reset(seed=seeds)
        expected, _ = alone.reset(seed=seeds)
        assert found.shape == expected.shape
        assert seeds is None or np.array_equal(found, expected)
    envs.close()
    alone.close()


def test_a_mistake_in_a_process_of_its_own_costs_one_line(tmp_path, capsys):
    """The error of the script cannot travel; what arrives is made into one again."""
    import distributional_ppo_categorical as script

    line = ["--env-id", "rude:LaterShort-v0", "--async-envs", "--num-envs", "2"]
    line += ["--num-steps", "24", "--eval-episodes", "0", "--run-dir", str(tmp_path)]
    code, _, err = run_main(script, capsys, line)
    assert code == 2
    assert err.splitlines()[-1].startswith("error: --env-id rude:LaterShort-v0: observation has")
    assert "Traceback" not in err.splitlines()[-1]


def test_a_loaded_agent_scores_like_the_saved_one(script, tmp_path):
    """Weights and normalisers come back; evaluation moves neither; the file holds plain data."""
    flags = {"env_id": "CartPoleNoVel-v1", "total_timesteps": 192, "eval_episodes": 6}
    metrics, directory = run(script, tmp_path, "", **flags)
    torch.load(directory / "checkpoint.pt", weights_only=True)
    agent, args = script.load_agent(directory)
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    assert float(agent.obs_moments.count) == 192
    result = script.evaluate(agent, args)
    assert result == {k: metrics[k] for k in result}
    assert all(torch.equal(v, before[k]) for k, v in agent.state_dict().items())
    again, _ = script.load_agent(directory / "checkpoint.pt")
    assert torch.equal(again.obs_moments.mean, agent.obs_moments.mean)


@with_one_script
def test_evaluation_counts_every_episode_once(script, tmp_path):
    """Episodes one after the other; their lengths are 3, 5, 2, 3, 5."""
    args = small_args(script, "Counter", eval_episodes=5)
    result = script.evaluate(make_agent(script, args), args)
    assert result["eval/length_mean"] == pytest.approx((3 + 5 + 2 + 3 + 5) / 5)


def test_evaluation_cuts_a_task_without_end(script, monkeypatch):
    """An episode that never ends is cut, at 10,000 steps; a longer one fails here, not hangs."""
    assert script.LONGEST_EPISODE == 10_000
    monkeypatch.setattr(script, "LONGEST_EPISODE", 200)
    args = small_args(script, "Endless", num_envs=1, num_minibatches=1, eval_episodes=1)
    agent = make_agent(script, args)
    decide, patience = agent.act, iter(range(300))
    agent.act = lambda *seen, **how: (decide(*seen, **how), next(patience))[0]
    result = script.evaluate(agent, args)
    assert result["eval/length_mean"] == 200


def test_evaluation_statistics(script):
    """Mean, population std and CVaR of returns 3 + ... of the counting environment."""
    args = small_args(script, "Counter", eval_episodes=4, cvar_alpha=0.5, num_minibatches=1)
    agent = make_agent(script, args)
    result = script.evaluate(agent, args)
    env, totals = script.make_env(args), []
    for i in range(4):
        obs, _ = env.reset(seed=None if i else args.seed + 1_000_000)
        state, total, over = None, 0.0, False
        while not over:
            action, state = act(agent, obs, state)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, over = total + reward, terminated or truncated
        totals.append(total)
    assert result["eval/return_mean"] == pytest.approx(np.mean(totals))
    assert result["eval/return_std"] == pytest.approx(np.std(totals))
    assert result["eval/return_cvar"] == pytest.approx(np.mean(sorted(totals)[:2]))


@with_one_script
def test_the_run_directory_tells_what_was_run(script, tmp_path):
    """Flags, versions, commit and source; names that would break a path are made safe."""
    _, directory = run(script, tmp_path, "VectorDiscrete", seed=7)
    name = rf"VectorDiscrete-v0__{script.Args.exp_name}__s7__\d{{4}}-\d{{6}}(-\d+)?"
    assert re.fullmatch(name, directory.name)
    told = json.loads((directory / "args.json").read_text())
    assert told["args"]["seed"] == 7
    assert "batch_size" not in told["args"]
    assert told["versions"]["torch"] == torch.__version__
    assert "commit" in told
    source = Path(script.__file__)
    assert (directory / source.name).read_bytes() == source.read_bytes()
    args = small_args(script, "VectorDiscrete", run_dir=str(tmp_path))
    assert script.make_run_dir(args) != script.make_run_dir(args)


def watched_run(script, tmp_path, monkeypatch, **flags):
    """Three iterations of `train`: of each what its three parts got and gave, and what stood."""
    parts, seen = ("collect_rollout", "prepare_batch", "update"), []

    def watch(name):
        function = getattr(script, name)

        def look(*inputs):
            agent = next(x for x in inputs if isinstance(x, script.Agent))
            stood = {key: x.clone() for key, x in agent.state_dict().items() if "moments" in key}
            given = function(*inputs)
            lr = [x.param_groups[0]["lr"] for x in inputs[1]] if name == "update" else None
            if name == "collect_rollout":
                seen.append({})
            seen[-1][name] = SimpleNamespace(inputs=inputs, given=given, stood=stood, lr=lr)
            return given

        return look

    with monkeypatch.context() as patch:
        for name in parts:
            patch.setattr(script, name, watch(name))
        run(script, tmp_path, "Staggered", total_timesteps=144, **flags)
    assert len(seen) == 3
    return [[iteration[name] for name in parts] for iteration in seen]


def test_train_hands_on_what_each_part_gives(script, tmp_path, monkeypatch):
    """Rollout to batch, batch to update, and to the next rollout all that has to go on."""
    iterations = watched_run(script, tmp_path, monkeypatch)
    for collect, batching, update in iterations:
        rollout, _ = collect.given
        assert batching.inputs[1] is rollout
        assert update.inputs[2] is batching.given[0]
    for (collect, batching, _), (next_collect, next_batching, _) in pairwise(iterations):
        assert next_collect.inputs[2] is collect.given[1]
        if is_recurrent(script):
            assert next_batching.inputs[2] is batching.given[1]
    carry = iterations[0][0].inputs[2]
    seeds = carried_obs(carry)[:, 0].astype(int)  # the task shows what it was reset with
    expected = [script.derived_seed(1, "environments", i, bits=31) for i in range(4)]
    assert seeds.tolist() == np.float32(expected).astype(int).tolist()
    if is_recurrent(script):
        assert carry.episode_start.all()
        assert (carry.actor_state == 0).all()
        assert (iterations[0][1].inputs[2] == 0).all()  # the critics' state


def test_statistics_of_observations_move_after_the_update(script, tmp_path, monkeypatch):
    """Acting, values and training of an iteration see one normaliser; then it takes its rollout."""
    past = []
    for collect, batching, update in watched_run(script, tmp_path, monkeypatch):
        for key in ("obs_moments.mean", "obs_moments.var", "obs_moments.count"):
            assert torch.equal(collect.stood[key], batching.stood[key])
            assert torch.equal(collect.stood[key], update.stood[key])
        assert collect.stood["obs_moments.count"] == 48 * len(past)
        if past:
            everything = torch.cat(past).double().flatten(0, 1)
            assert_close(collect.stood["obs_moments.mean"], everything.mean(0))
            assert_close(collect.stood["obs_moments.var"], everything.var(0, correction=0))
        past.append(collect.given[0].obs)


def test_statistics_of_returns_move_ahead_of_the_update(script, tmp_path, monkeypatch):
    """Critics train on the units in which the next rollout is decoded, not on those of this one."""
    iterations = watched_run(script, tmp_path, monkeypatch)
    key = "value_dist.moments.mean"
    for (collect, batching, update), (then, *_) in pairwise(iterations):
        assert torch.equal(collect.stood[key], batching.stood[key])
        assert not torch.equal(batching.stood[key], update.stood[key])
        assert torch.equal(update.stood[key], then.stood[key])


def test_every_update_has_the_coefficients_of_its_time(script, tmp_path, monkeypatch):
    """Of three iterations the learning rates have 1, 2/3 and 1/3; the bonus falls to its end."""
    flags = {"learning_rate": 3e-3, "critic_learning_rate": 6e-3, "norm_adv_memory": 0}
    flags |= {"ent_coef": 0.04, "ent_coef_final": 0.01}
    policy_loss, coefficients = script.policy_loss, []

    def note(agent, mb, args, ent_coef):
        coefficients.append(ent_coef)
        return policy_loss(agent, mb, args, ent_coef)

    monkeypatch.setattr(script, "policy_loss", note)
    updates = [x[-1] for x in watched_run(script, tmp_path, monkeypatch, **flags)]
    assert [update.inputs[-1] for update in updates] == pytest.approx([0, 1 / 3, 2 / 3])
    assert [update.lr[0] for update in updates] == pytest.approx([3e-3, 2e-3, 1e-3])
    assert [update.lr[1] for update in updates] == pytest.approx([6e-3, 4e-3, 2e-3])
    assert sorted({*coefficients}) == pytest.approx([0.02, 0.03, 0.04])
    assert coefficients == sorted(coefficients, reverse=True)
    for tag, values in (("charts/learning_rate", [3e-3, 2e-3, 1e-3]),
                        ("policy/entropy_coef", [0.04, 0.03, 0.02])):  # fmt: skip
        assert [update.given[tag] for update in updates] == pytest.approx(values)


@with_one_script
@pytest.mark.parametrize(
    ("env_id", "hidden", "size"),
    [
        ("CartPoleNoVel-v1", [1, 3], 4),
        ("PendulumNoVel-v1", [2], 3),
        ("MountainCarNoVel-v0", [1], 2),
        ("MountainCarContinuousNoVel-v0", [1], 2),
    ],
)
def test_velocity_free_tasks_are_the_base_tasks_masked(script, env_id, hidden, size):
    """Same task, velocities zero; --masked-obs does the same to any task."""
    base_id = env_id.replace("NoVel", "")
    rows = []
    for flags in ({"env_id": env_id}, {"env_id": base_id, "masked_obs": (*hidden,)},
                  {"env_id": base_id}):  # fmt: skip
        env = script.make_env(script.Args(**flags))
        obs, _ = env.reset(seed=1)
        env.action_space.seed(1)
        steps = [env.step(env.action_space.sample())[0] for _ in range(3)]
        rows.append(np.stack([obs, *steps]))
    named, masked, full = rows
    assert named.shape == (4, size)
    assert named.dtype == np.float32
    assert (named[:, hidden] == 0).all()
    assert (full[1:, hidden] != 0).all()
    others = [i for i in range(size) if i not in hidden]
    np.testing.assert_array_equal(named[:, others], full[:, others])
    np.testing.assert_array_equal(named, masked)


@with_one_script
def test_observations_become_flat_vectors(script):
    """Dict(Discrete 3, Tuple(Box 2, MultiBinary 3)) is 8 numbers; Discrete is one-hot."""
    env = script.make_env(small_args(script, "NestedBox"))
    obs, _ = env.reset(seed=0)
    assert obs.shape == (8,)
    assert obs[:3].sum() == 1
    env = script.make_env(small_args(script, "DiscreteBox"))  # values -2 to 2
    draw = OBSERVATIONS["Discrete"]
    draw.seed(0)
    expected = [np.eye(5)[draw.sample() + 2].tolist() for _ in range(6)]
    assert [env.reset(seed=s)[0].tolist() for s in [0] + [None] * 5] == expected


def test_the_loop_stops_early_and_says_so(script, tmp_path):
    """A limit far below the KL of a large step, far above rounding, ends updates after one step."""
    flags = {"target_kl": 1e-5, "learning_rate": 0.1, "anneal_lr": False}
    metrics, _ = run(script, tmp_path, "VectorDiscrete", **flags)
    assert metrics["policy/kl_max"] > 1e-4
    assert metrics["policy/stopped_early"] == 1
    assert metrics["policy/epochs_done"] == 0.5


@with_one_script
def test_progress_and_result_are_printed(script, tmp_path, capsys):
    """Steps, percent, speed, return; then the evaluation and where the checkpoint is."""
    run(script, tmp_path, "VectorDiscrete")
    text = capsys.readouterr().out
    for words in ("96 of 96 steps (100%)", "steps/s", "return 7.0", "CVaR_0.05"):
        assert words in text


@pytest.mark.parametrize(("half_width", "lines"), [(0.5, 1), (100.0, 0)])
def test_atoms_too_narrow_for_the_task_are_said_once(tmp_path, capsys, half_width, lines):
    """Half a standard deviation does not hold N(0, 1) rewards; each of 4 rollouts is beyond it."""
    import distributional_ppo_categorical as script

    flags = {"total_timesteps": 192, "v_min": -half_width, "v_max": half_width}
    _, directory = run(script, tmp_path, "RandomReward", **flags)
    share = [p.value for p in events(directory).Scalars("value/outside_support")]
    assert len(share) == 4
    assert all((x > 0.01) == bool(lines) for x in share)
    text = capsys.readouterr().out
    assert text.count("value/outside_support") == text.count("widen --v-min, --v-max") == lines


@pytest.mark.parametrize("device", ["cpu", GPU])  # the CPU too, so that the test cannot rot
def test_one_update_on_another_device_is_that_of_the_cpu(script, device):
    """The same weights and the same rollout: parameters agree to 1e-4, and they have moved."""
    run = make_run(script, "Staggered", num_envs=4, num_steps=12, learning_rate=1e-3)
    batch, updated = prepare(run), []
    assert not is_recurrent(script) or batch.episode_start[1:].any()
    for place in ("cpu", device):
        torch.manual_seed(3)
        agent = copy.deepcopy(run.agent).to(place)
        moved = script.Batch(*(x.to(place) for x in batch))
        optimizers = script.make_optimizers(agent, run.args)
        script.update(agent, optimizers, moved, run.args, 0.0)
        assert agent.device.type == place
        updated.append([parameter.detach().cpu() for parameter in agent.parameters()])
    for one, two in zip(*updated):
        assert_close(two, one, rtol=0, atol=1e-4)
    before = [parameter.detach() for parameter in run.agent.parameters()]
    assert all(not torch.equal(old, new) for old, new in zip(before, updated[1]))


DEPENDS_ON_ALPHA = ("cvar/", "eval/return_cvar")  # by definition


def neutral_metrics(script, tmp_path, **flags):
    """All metrics of a short run that repeat and do not depend on alpha by definition."""
    facts = {"value_target": "sr_lambda", "total_timesteps": 144}
    metrics, _ = run(script, tmp_path, "RandomReward", **(facts | flags))
    return {k: v for k, v in metrics.items() if not k.startswith(DEPENDS_ON_ALPHA)}


@with_one_script
def test_weight_0_and_alpha_1_are_the_neutral_run_bit_for_bit(script, tmp_path):
    """And any other weight is not."""
    neutral = neutral_metrics(script, tmp_path)
    assert neutral_metrics(script, tmp_path, cvar_alpha=0.3) == neutral
    assert neutral_metrics(script, tmp_path, cvar_alpha=1.0, cvar_weight=0.7) == neutral
    assert neutral_metrics(script, tmp_path, cvar_alpha=0.3, cvar_weight=0.7) != neutral


@with_one_script
def test_signals_to_the_run_are_not_for_its_groups(script, monkeypatch):
    """In processes of their own they ignore Ctrl-C and leave the group. AsyncVectorEnv makes one in
    the run's process too, which stays as it is."""
    asked = []
    monkeypatch.setattr(signal, "signal", lambda *given: asked.append(given))
    monkeypatch.setattr(os, "setpgrp", lambda: asked.append("apart"))
    args = small_args(script, "Walk")
    with torch.random.fork_rng():
        script.Group(args, os.getpid(), 1, 1).close()
        assert not asked
        script.Group(args, -1, 1, 1).close()
    assert asked == [(signal.SIGINT, signal.SIG_IGN), "apart"]


@with_one_script
def test_closing_waits_for_no_process_for_ever(script, monkeypatch):
    """After a fault one of them may never answer."""
    closed = []
    groups = instead_of_processes(monkeypatch, lambda makers, **options: None)
    groups.close = lambda **options: closed.append(options)
    script.make_envs(small_args(script, "Counter", async_envs=True, num_envs=2)).close()
    assert closed == [{"timeout": 10}]


@with_one_script
def test_closing_ends_all_processes_where_one_has_died(script, monkeypatch):
    """AsyncVectorEnv then tells none of the others to close. Those that outlive SIGTERM are killed
    wherever multiprocessing would terminate them."""

    def end_of_file(**options):
        raise EOFError

    killed = []
    groups = instead_of_processes(monkeypatch, lambda makers, **options: None)
    for i in range(2):
        handle = SimpleNamespace(kill=partial(killed.append, f"handle {i}"))
        groups.processes.append(SimpleNamespace(kill=partial(killed.append, i), _popen=handle))
    groups.close = end_of_file
    script.make_envs(small_args(script, "Counter", async_envs=True, num_envs=2)).close()
    assert killed == [0, 1]
    groups.processes[1]._popen.terminate()
    assert killed[-1] == "handle 1"


def test_processes_seed_their_tasks_apart_and_their_weights_alike(script, monkeypatch):
    """Generators of Python and NumPy differ by process, torch's does not. Groups of environments
    are numbered through all processes."""
    drawn, made = [], []
    for rank in (0, 1):
        monkeypatch.setattr(script, "RANK", rank)
        script.set_up_process(small_args(script, "Walk"))
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
    one, two = drawn
    assert one[0] != two[0]
    assert one[1] != two[1]
    assert one[2] == two[2]
    instead_of_processes(monkeypatch, lambda makers, **options: made.extend(makers))
    monkeypatch.setattr(script, "usable_cores", lambda: 64)
    args = small_args(script, "Counter", async_envs=True, num_envs=6, num_minibatches=1)
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    script.make_envs(args)
    assert [maker.args[2] for maker in made] == [4, 5, 6]


def test_evaluation_keeps_to_the_time_limit_of_a_task(script, monkeypatch):
    """Of 5 steps, which is more than the cut of tasks without one."""
    monkeypatch.setattr(script, "LONGEST_EPISODE", 3)
    args = small_args(script, "TimeLimit", eval_episodes=1)
    assert script.evaluate(make_agent(script, args), args)["eval/length_mean"] == 5


@with_one_script
def test_groups_are_no_forks_of_the_run(script, monkeypatch):
    """A fork would copy the locks of torch's threads."""
    asked = []
    instead_of_processes(monkeypatch, lambda makers, **given: asked.append(given))
    script.make_envs(small_args(script, "Walk", async_envs=True, num_envs=2))
    assert asked[0]["context"] == "forkserver"


@with_one_script
def test_a_group_closes_its_environments(script, monkeypatch):
    """All three."""
    closed = []
    monkeypatch.setattr(Walk, "close", lambda env: closed.append(env))
    script.Group(small_args(script, "Walk"), os.getpid(), 1, 3).close()
    assert len(closed) == 3


@with_one_script
def test_the_environment_that_is_tried_out_is_closed(script, monkeypatch):
    """It shows a mistake ahead of many processes."""
    closed = []
    monkeypatch.setattr(script, "close_quietly", closed.append)
    instead_of_processes(monkeypatch, lambda makers, **options: None)
    script.make_envs(small_args(script, "Walk", async_envs=True, num_envs=2))
    assert len(closed) == 1


@with_one_script
@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000", 64),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("6600000 100000", 64),
        ("-1 100000", 64),
        (None, 64),
    ],
)
@pytest.mark.parametrize("version", [2, 1])
def test_a_container_may_use_fewer_cores(script, monkeypatch, tmp_path, limit, cores, version):
    """Time of cores in a period: two and a half of them are two, a half is one. Version 2 of
    cgroups has both numbers in a file, version 1 has a file for each."""
    one, two, three = (tmp_path / name for name in ("max", "quota", "period"))
    if limit and version == 2:
        one.write_text(f"{limit}\n")
    elif limit:
        for file, number in zip((two, three), limit.split(), strict=True):
            file.write_text(f"{number}\n")
    monkeypatch.setattr(script, "CPU_LIMITS", ([one], [two, three]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert script.usable_cores() == cores


@with_one_script
def test_a_group_has_one_thread_and_no_numbers_of_a_run_process(script, monkeypatch):
    """There are as many groups as cores. The run has two processes, 0 and 1; this is group 1."""
    args, asked = small_args(script, "Walk"), []
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    monkeypatch.setattr(os, "setpgrp", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    with torch.random.fork_rng():
        script.Group(args, os.getpid(), 1, 1).close()
        assert asked == []
        script.Group(args, -1, 1, 1).close()
        assert asked == [1]
        drawn = [random.random()]
        for rank in (0, 1):
            script.seed_generators(args, rank)
            drawn.append(random.random())
    assert len({*drawn}) == 3
