"""What changes no number: time, memory, threads, and limits of waiting."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ONE_SCRIPT, each_of, with_both_scripts
from gymnasium.spaces import Box
from helpers import is_recurrent, make_run, prepare, roll, small_args
from torch import nn

import distributional_ppo_categorical
import distributional_ppo_lstm

script = each_of(ONE_SCRIPT)  # but for what differs between them


def counting(monkeypatch, owner, name, note=lambda *given: 1):
    """Replace a function of `owner` by itself; what `note` says of each call goes into a list."""
    call = getattr(owner, name)
    noted = []

    def counted(*given, **options):
        noted.append(note(*given))
        return call(*given, **options)

    monkeypatch.setattr(owner, name, counted)
    return noted


# ------------------------------------------------------------------------------ passes over time
def test_a_termination_cuts_no_pass_over_time(monkeypatch):
    """What follows on it has no effect. A time limit cuts the pass in front of the next step: of
    12 steps in one sequence those at 2 and 6 make three stretches."""
    run = make_run(distributional_ppo_lstm, "Walk", seq_len=0, num_minibatches=1)
    rollout = roll(run)
    none = torch.zeros_like(rollout.terminated)
    cut = none.clone()
    cut[2, 0] = cut[6, 1] = True
    obs, after = (run.agent.normalize_obs(x) for x in (rollout.obs, rollout.next_obs))
    for terminated, truncated, stretches in ((cut, none, 1), (none, cut, 3), (cut, cut, 1)):
        passes = counting(monkeypatch, distributional_ppo_lstm, "unroll_lstm")
        own = rollout._replace(terminated=terminated, truncated=truncated)
        state = run.critic_state
        distributional_ppo_lstm.run_critics(run.agent, own, obs, after, state, run.args)
        assert len(passes) == stretches
        monkeypatch.undo()


def test_critics_look_again_at_final_observations_alone(monkeypatch):
    """Of 12 steps in four environments: all, then those where an episode ended and the last."""
    run = make_run(distributional_ppo_categorical, "Walk")
    rollout = roll(run)
    ends = (rollout.terminated | rollout.truncated)[:-1].sum().item() + len(rollout.obs[0])
    rows = counting(monkeypatch, run.agent, "value_outputs", lambda obs: obs.shape[:-1].numel())
    obs, after = (run.agent.normalize_obs(x) for x in (rollout.obs, rollout.next_obs))
    distributional_ppo_categorical.run_critics(run.agent, rollout, obs, after)
    everything = rollout.terminated.numel()
    assert rows == [everything, ends]
    assert ends < everything


@with_both_scripts
def test_a_rollout_makes_one_policy(script, monkeypatch):
    """Making one copies weights."""
    run = make_run(script, "Walk")
    made = counting(monkeypatch, run.agent, "numpy_policy")
    roll(run)
    assert len(made) == 1


@with_both_scripts
def test_minibatches_are_made_when_they_are_asked_for(script, monkeypatch):
    """All at once they would take the memory of the batch for every epoch."""
    run = make_run(script, "Walk", update_epochs=2)
    batch = prepare(run)
    name = "some_sequences" if is_recurrent(script) else "some_rows"
    made = counting(monkeypatch, script, name)
    parts = script.minibatches(batch, run.args)
    assert len(made) == 0
    next(iter(parts))
    assert len(made) == 1


@with_both_scripts
def test_times_of_an_iteration_are_of_the_parts_that_they_name(script, monkeypatch, tmp_path):
    """Each lap ends behind its part."""
    order = []
    for name in ("collect_rollout", "prepare_batch", "update"):
        call = getattr(script, name)

        def noted(*given, call=call, name=name):
            found = call(*given)
            order.append(name)
            return found

        monkeypatch.setattr(script, name, noted)
    lap = script.Run.lap
    monkeypatch.setattr(script.Run, "lap", lambda run, part: [lap(run, part), order.append(part)])
    args = small_args(script, "Walk", run_dir=str(tmp_path), eval_episodes=0)
    script.train(args)
    parts = ["collect_rollout", "rollout", "prepare_batch", "values", "update", "update"]
    assert order == parts * args.num_iterations


# ---------------------------------------------------------------------------------------- networks
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_small_networks_act_in_numpy(script, activation):
    """torch is not called."""
    network = nn.Sequential(nn.Linear(1, 1), activation(), nn.Linear(1, 1))

    def fail(*_):
        raise AssertionError

    for layer in network.modules():
        layer.register_forward_pre_hook(fail)
    assert script.in_numpy(network)(np.ones((2, 1), np.float32)).shape == (2, 1)


@pytest.mark.parametrize(
    ("side", "kept"), [(84, torch.channels_last), (10, torch.contiguous_format)]
)
def test_pixels_lie_in_memory_as_suits_the_layers(script, side, kept):
    """Channels last for large images, which is the faster one on CPUs."""
    layers = script.Convolutions(Box(0, 255, (4, side, side), np.uint8), nn.ReLU)
    seen = []
    layers.layers[0].register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
    layers(torch.zeros(3, 4, side, side, dtype=torch.uint8))
    assert seen[0].is_contiguous(memory_format=kept)
    assert not seen[0].is_contiguous(
        memory_format=torch.contiguous_format
        if kept == torch.channels_last
        else torch.channels_last
    )


def test_a_step_of_adam_is_one_operation(script, monkeypatch):
    """The fused one."""
    run = make_run(script, "Walk")
    batch = prepare(run)
    steps = []
    adam = script.adam
    monkeypatch.setattr(
        script,
        "adam",
        lambda *given, **options: [steps.append(options["fused"]), adam(*given, **options)],
    )
    script.update(run.agent, run.optimizers, batch, run.args, 0.0)
    assert steps
    assert all(step is True for step in steps)


# ------------------------------------------------------------------------------ threads and limits
def test_blas_has_one_thread_before_numpy_is_imported(script):
    """Unless the caller wants another number: `setdefault` keeps it."""
    told = "import os, sys; sys.path.insert(0, {!r}); import {} as _; print(os.environ[{!r}])"
    name = "OPENBLAS_NUM_THREADS"
    folder = Path(script.__file__).parent
    program = told.format(str(folder), script.__name__, name)
    around = {key: value for key, value in os.environ.items() if key != name}
    found = subprocess.run(
        [sys.executable, "-c", program], env=around, capture_output=True, text=True
    )
    assert found.stdout.strip() == "1"
    lines = {
        node.names[0].name if isinstance(node, ast.Import) else ast.unparse(node): node.lineno
        for node in ast.parse(Path(script.__file__).read_text()).body
        if isinstance(node, ast.Import | ast.Expr)
    }
    [limit] = [at for line, at in lines.items() if name in line and "setdefault" in line]
    assert limit < lines["numpy"]


def test_the_limit_of_a_container_is_read_where_linux_keeps_it(script):
    """By its documentation of cgroups, versions 2 and 1, where each is mounted by default."""
    [both], [quota, period] = script.CPU_LIMITS
    assert both == Path("/sys/fs/cgroup/cpu.max")
    assert quota == Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    assert period == Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def test_processes_of_environments_share_their_imports(script, monkeypatch):
    """They come from a server that has imported what takes longest."""
    preloaded = counting(
        monkeypatch, script.multiprocessing, "set_forkserver_preload", lambda names: names
    )
    args = small_args(script, "Walk", async_envs=True)
    envs = script.make_envs(args)
    envs.close()
    assert preloaded == [["gymnasium", "torch.utils.tensorboard", "tyro"]]


def test_processes_of_environments_outlive_sigterm_for_a_minute(script, monkeypatch):
    """The main process finishes its iteration meanwhile."""
    handlers = {}
    waits = []
    monkeypatch.setattr(
        script.signal, "signal", lambda number, call: handlers.update({number: call})
    )
    monkeypatch.setattr(script.signal, "alarm", waits.append)
    script.Group.outlive_sigterm(None)
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert waits == [60]


def test_a_close_may_take_twenty_seconds(script, monkeypatch):
    """Then the processes are killed."""
    waits = []

    class Timer:
        """It never goes off."""

        def __init__(self, seconds, call):
            waits.append(seconds)

        def start(self):
            """Do nothing."""

        cancel = start

    envs = object.__new__(script.EnvsInProcesses)
    envs.groups = SimpleNamespace(processes=[], close=lambda timeout: None)
    monkeypatch.setattr(script.threading, "Timer", Timer)
    envs.close_extras()
    assert waits == [20]


def test_a_close_after_a_process_has_died_is_the_last_one(script):
    """Gymnasium would try again where its object is thrown away, and print a traceback."""

    def close(timeout):
        raise EOFError

    envs = object.__new__(script.EnvsInProcesses)
    envs.groups = SimpleNamespace(processes=[], close=close, closed=False)
    envs.close_extras()
    assert envs.groups.closed


def test_copies_of_environments_are_tried_out_for_a_minute(script):
    """The process ends itself then, also where the run was killed."""
    assert script.TRIAL_SECONDS == 60
    assert "signal.alarm(60)" in script.TRIAL_PROGRAM
