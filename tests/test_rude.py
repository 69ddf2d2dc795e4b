"""Tasks that are not polite: they use their buffers again, learn by themselves, move about."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import rude
import torch
from command import await_end, await_file, run_main, start, undisturbed, words
from conftest import ONE_SCRIPT, each_of, with_both_scripts
from helpers import act, make_agent, make_run, roll, small_args
from probes import Walk
from rude import MISFITS, Display, Rude, Single, Spaceless
from test_resume import (
    AFRESH,
    assert_same,
    change_run,
    contents,
    flags_for,
    has_ended,
    resumed,
    stopped,
    timeless,
)

script = each_of(ONE_SCRIPT)  # but for what differs between them


@pytest.fixture(autouse=True)
def somewhere(monkeypatch, tmp_path):
    """A working directory that the task leaves, and that the test comes back to."""
    monkeypatch.chdir(tmp_path)
    with undisturbed():
        yield tmp_path


def task(script, name, **flags):
    """Flags of a small run on one of these tasks."""
    flags = {"run_dir": "here", "env_id": f"rude:{name}-v0"} | flags
    return small_args(script, "", **flags)


def test_a_rude_task_is_trained_resumed_and_evaluated(script, somewhere, capsys):
    """All of it lies in the directory that was named, as it was when the run began. Its simulator
    is in no other process, so a resume opens new episodes."""
    flags = {"checkpoint_every": 1, "eval_every": 1, "eval_episodes": 2, "save_envs": "proven"}
    code, out, err = run_main(script, capsys, words(task(script, "Rude", **flags)))
    assert code == 0, err
    [directory] = (somewhere / "here").iterdir()
    assert (directory / "best.pt").exists()
    assert "close() failed" in err
    assert "the simulator hung up" in err
    os.chdir(somewhere)
    line = ["--resume", f"here/{directory.name}", "--total-timesteps", "192"]
    code, out, err = run_main(script, capsys, line)
    assert code == 0, err
    assert out.count(f"{AFRESH}: another process could not read them back") == 1
    os.chdir(somewhere)
    code, out, err = run_main(script, capsys, ["--evaluate", f"here/{directory.name}"])
    assert code == 0, err
    assert "evaluation of 2 episodes" in out
    assert [path.name for path in (somewhere / "here").iterdir()] == [directory.name]


# ------------------------------------------------------------------------ what comes out of a task
@with_both_scripts
def test_a_final_image_is_not_the_next_episode_s_first(script):
    """The buffer is overwritten by the reset within the same step. The successor at the limit shows
    5; what is acted on next shows 50."""
    run = make_run(script, "", env_id="rude:Rude-v0")
    rollout = roll(run)
    assert rollout.truncated[4].all()
    assert (rollout.next_obs[4] == 5).all()
    assert (rollout.obs[5] == 50).all()
    assert (rollout.next_obs[3] == 4).all()


def test_a_film_shows_more_than_the_last_frame(script, somewhere):
    """Frames are copies, too: the first one shows 50, the next ones 1 to 5."""
    env = script.make_env(task(script, "Rude"), render_mode="rgb_array")
    env.reset(seed=0)
    frames = [env.render()]
    for _ in range(5):
        env.step(0)
        frames.append(env.render())
    assert [int(frame.mean()) for frame in frames] == [50, 1, 2, 3, 4, 5]
    assert all(frame.flags.c_contiguous for frame in frames)


@with_both_scripts
def test_a_task_may_learn_by_itself(script):
    """`step` runs with gradients: what the task learns from is no inference tensor."""
    run = make_run(script, "", env_id="rude:Rude-v0")
    roll(run)
    weight = run.envs.envs[0].unwrapped.weight
    assert not weight.is_inference()
    assert float(weight.grad) == pytest.approx(12 * 2 * (1 - 3))  # of 12 steps
    assert torch.is_grad_enabled()


def test_a_task_has_torch_as_it_likes_it(script, somewhere):
    """It finds float64 and no gradients in every step; the networks find their own settings."""
    metrics = script.train(task(script, "Torch"))
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert metrics["grad/actor"] > 0
    weight = script.make_env(task(script, "Rude")).unwrapped.weight
    assert weight.requires_grad  # another task has torch as it was
    assert weight.dtype == torch.float32
    agent, _ = script.load_agent(metrics["run_dir"])
    assert {p.dtype for p in agent.parameters()} == {torch.float32}


@with_both_scripts
@pytest.mark.parametrize(("name", "total"), [("Array", 9), ("Large", 9e20), ("Flag", 9)])
def test_a_reward_is_a_number_however_it_is_paid(script, somewhere, name, total):
    """An array of one, an integer beyond 64 bits, a flag: nine steps of each."""
    assert script.train(task(script, f"Pays{name}"))["eval/return_mean"] == pytest.approx(total)


@pytest.mark.parametrize("name", ["Nothing", "Two", "Huge"])
def test_a_reward_that_is_no_number_is_named(script, capsys, name):
    """None, two numbers, one beyond float64: one line."""
    code, _, err = run_main(script, capsys, words(task(script, f"Pays{name}")))
    assert code == 2
    assert err.count("\n") == 1
    assert f"--env-id rude:Pays{name}-v0: its reward must be a number, but it is" in err


NAMED = {
    "Fraction": ["numbers from 0.7 to 0.7 of float64", "Box(0, 255, (6, 5, 3), uint8)"],
    "Negative": ["numbers from -5 to -5 of int64", "uint8"],
    "Large": ["numbers from 300 to 300", "uint8"],
    "Nan": ["numbers from nan to nan", "uint8"],
    "Order": ["has the shape (6, 5, 3)", "Box(0, 255, (3, 6, 5), uint8)"],
    "Short": ["has the shape (1,)", "Box(-1.0, 1.0, (4,), float32)"],
    "Ragged": ["is no array"],
    "Lacking": ["observation lacks 'doors'"],
    "Part": ["observation['place'] has the shape (3,)"],
    "Choice": ["observation is -1; its space is Discrete(4)"],
    "Half": ["observation is 0.5; its space is Discrete(4)"],
    "Count": ["observation['many'] has numbers from 0.7 to 2.0 of float64", "int32"],
    "Gap": ["observation['many'] has numbers from nan to nan of float64", "int32"],
    "Wide": ["observation['many'] has numbers from 1 to 1099511627776 of int64", "int32"],
}


@pytest.mark.parametrize(
    ("when", "kind"), [*(("", kind) for kind in MISFITS), ("Later", "Short"), ("Later", "Part")]
)
def test_what_does_not_belong_to_its_space_is_named(script, capsys, kind, when):
    """In one line, at the first reset and at a later step: nothing is cast, broadcast, reshaped."""
    code, _, err = run_main(script, capsys, words(task(script, when + kind)))
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith(f"error: --env-id rude:{when}{kind}-v0: observation")
    for text in NAMED[kind]:
        assert text in err


@with_both_scripts
def test_an_agent_acts_on_what_belongs_to_its_space(script):
    """Eight numbers are not two rows of four; nobody acts on NaN, nor on bytes that are none."""
    agent = make_agent(script, small_args(script, "VectorBox"))
    with pytest.raises(ValueError, match=r"^observation has the shape \(8,\); its space"):
        act(agent, np.zeros(8, np.float32))
    with pytest.raises(ValueError, match="`see` makes it from the task's own observation"):
        act(agent, {"place": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match="not finite"):
        act(agent, np.full((2, 4), np.nan, np.float32))
    agent = make_agent(script, task(script, "Rude"))
    with pytest.raises(ValueError, match="of float64"):
        act(agent, np.full((2, 3, 6, 5), 0.5))
    if hasattr(agent, "initial_state"):
        with pytest.raises(ValueError, match=r"^state has the shape \(2, 1, 5\); it must have"):
            act(agent, np.full((2, 3, 6, 5), 7.0), agent.initial_state(1).numpy())
        with pytest.raises(ValueError, match=r"^state has the shape \(2, 1, 5\); it must have"):
            agent.value(np.full((2, 3, 6, 5), 7.0), agent.initial_state(1))
        state = agent.initial_state(2)  # the critics' is a tensor, the actor's an array
        with pytest.raises(TypeError, match="act: the state must be the array"):
            act(agent, np.full((2, 3, 6, 5), 7.0), state)
        with pytest.raises(TypeError, match="the array of `act` is another state"):
            agent.value(np.full((2, 3, 6, 5), 7.0), state.numpy())
    assert act(agent, np.full((2, 3, 6, 5), 7.0))[0].shape == (2,)


def test_the_state_of_another_memory(monkeypatch):
    """A GRU in the LSTM's place has one part of state where that has two: `initial_state` tells."""
    import distributional_ppo_lstm as script

    agent = make_agent(script, small_args(script, "Walk"))
    monkeypatch.setattr(agent, "initial_state", lambda num_envs: torch.zeros(1, num_envs, 5))
    agent.check_state(torch.zeros(1, 3, 5), 3)
    with pytest.raises(ValueError, match=r"\(2, 3, 5\); it must have \(1, 3, 5\)"):
        agent.check_state(torch.zeros(2, 3, 5), 3)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("OldStep", "step() must return five values"),
        ("NoStep", "step() must return five values"),
        ("OldReset", "reset() must return a tuple of an observation and info"),
        ("OldSeed", "reset() must take seed and options"),
    ],
)
def test_the_interface_of_old_gym_is_named(script, capsys, name, named):
    """Not what unpacking says of it."""
    code, _, err = run_main(script, capsys, words(task(script, name)))
    assert code == 2
    assert err.count("\n") == 1
    assert f"--env-id rude:{name}-v0: {named}, as gymnasium asks" in err


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("reset", TypeError(".reset() got an unexpected keyword argument 'seed'")),
        ("step", ValueError("not enough values to unpack (expected 5, got 4)")),
    ],
)
def test_a_mistake_inside_a_task_is_not_its_interface(script, monkeypatch, call, fault):
    """It calls a sensor wrongly, by the words that an old interface would lead to. That is a fault,
    raised as it is."""

    class Sensor:
        def reset(self):
            return 0

        def read(self):
            return 1, 2, 3, 4

    def reset(self, *, seed=None, options=None):
        return Sensor().reset(seed=seed)

    def step(self, action):
        a, b, c, d, e = Sensor().read()
        return a, b, c, d, e

    env = script.make_env(task(script, "Walk"))
    env.reset(seed=1)
    monkeypatch.setattr(Walk, call, {"reset": reset, "step": step}[call])
    with pytest.raises(type(fault), match=re.escape(str(fault))):
        env.reset(seed=1) if call == "reset" else env.step(0)


def test_a_fault_in_the_making_names_its_place(script, tmp_path, monkeypatch, capsys):
    """Kind, text, file and line: of a task, and of a module that cannot be imported."""
    (tmp_path / "mine_broken.py").write_text(
        "import gymnasium\n\ndef make():\n    return {}['price']\n\n"
        "gymnasium.register('Mine-v0', make)\n"
    )
    (tmp_path / "mine_lacking.py").write_text("\nimport nowhere_to_be_found\n")
    (tmp_path / "mine_reading.py").write_text(  # the fault is raised in Python's json
        "import gymnasium, json\n\ndef make():\n    return json.loads('')\n\n"
        "gymnasium.register('Mine-v0', make)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("mine_broken", "mine_lacking", "mine_reading"):  # of the other script's test
        monkeypatch.delitem(sys.modules, module, raising=False)
    for module, kind, line in (
        ("mine_broken", "KeyError: 'price'", 4),
        ("mine_lacking", "ModuleNotFoundError: No module named 'nowhere_to_be_found'", 2),
        ("mine_reading", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)", 4),
    ):
        code, _, err = run_main(script, capsys, ["--env-id", f"{module}:Mine-v0"])
        assert code == 2
        told = f"--env-id {module}:Mine-v0: {kind} ({tmp_path}/{module}.py, line {line})"
        assert err == f"error: {told}\n"


def test_a_registration_that_cannot_be_copied_has_no_place_in_the_task(script, capsys):
    """Gymnasium copies the arguments ahead of the task's own code; Python's `copy` is no place."""
    gym.register("LockedArguments-v0", lambda lock: None, kwargs={"lock": threading.Lock()})
    try:
        code, _, err = run_main(script, capsys, ["--env-id", "LockedArguments-v0"])
    finally:
        gym.registry.pop("LockedArguments-v0")
    assert code == 2
    assert "cannot pickle" in err
    assert "line" not in err


@pytest.mark.parametrize(
    ("ended", "truth"),
    [
        (True, True), (np.bool_(False), False), (np.array([True]), True), (torch.tensor(1), True),
        (0, False), (1.0, True), (np.float32(0), False), (None, False), ([False], None),
        (np.array([False, True]), None), (torch.tensor([0, 1]), None), ("no", None),
    ],
)  # fmt: skip
def test_whether_an_episode_ended_is_true_or_false(script, monkeypatch, ended, truth):
    """A list would always be true, and an array of two neither."""
    env = script.make_env(task(script, "Walk"))
    env.reset(seed=1)
    step = Walk.step
    monkeypatch.setattr(Walk, "step", lambda *x: (*step(*x)[:2], ended, ended, {}))
    if truth is None:
        with pytest.raises(ValueError, match="terminated and truncated must be true or false, but"):
            env.step(0)
    else:
        assert env.step(0)[2:4] == (truth, truth)


@pytest.mark.parametrize(
    ("low", "high", "fits"),
    [
        (-1, 1, True), (-2, 2, True), (-0.4, 0.4, True),
        (0, 1, False), (-1000, 1000, False), (-np.inf, np.inf, False), (-1, 0.01, False),
    ],
)  # fmt: skip
def test_bounds_that_exploration_misses_are_told(script, low, high, fits):
    """Actions start around 0 with a std of about 1, and are clipped."""
    assert script.reachable(gym.spaces.Box(low, high, (2,), np.float32)) == fits


@pytest.mark.parametrize(
    ("name", "found"), [("Spaceless", "None of builtins"), ("Foreign", "dtype=<class")]
)
def test_spaces_are_of_gymnasium(script, capsys, name, found):
    """A task without any, or with those of old gym, is told so."""
    code, _, err = run_main(script, capsys, words(task(script, name)))
    assert code == 2
    assert err.count("\n") == 1
    assert f"--env-id rude:{name}-v0: its observation_space is " in err
    assert found in err
    assert err.endswith("it must be of gymnasium.spaces\n")


def test_a_part_that_is_no_array_is_not_lacking(script):
    """A tensor of a GPU in a dictionary cannot be turned into an array."""

    class Far:
        def __array__(self, *inputs, **options):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    space = gym.spaces.Dict({"place": gym.spaces.Box(-1, 1, (2,))})
    found = script.misfit(space, {"place": Far()})
    assert found.startswith("observation['place'] is no array (can't convert cuda:0")


def test_parts_and_types_that_do_not_fit_are_named(script):
    """A part too many, which `flatten` would not expect, and integers of another type."""
    box = gym.spaces.Box(-1, 1, (2,))
    found = script.misfit(gym.spaces.Tuple([box, box]), (np.zeros(2),))
    assert found == "observation lacks 1"
    found = script.misfit(gym.spaces.Dict(place=box), None)
    assert found == "observation lacks 'place'"
    found = script.misfit(gym.spaces.Tuple([box, box]), (np.zeros(2),) * 3)
    assert found == "observation has 3 parts, and its space has 2"
    choices = gym.spaces.MultiDiscrete([3, 3], dtype=np.int32)
    found = script.misfit(choices, np.array([1, 2], np.int64))
    assert found.startswith("observation is array([1, 2]) of int64; its space is MultiDiscrete")
    assert script.misfit(choices, np.array([1, 2], np.int32)) == ""


@pytest.mark.parametrize("bad", [np.nan, np.inf, 300, 0.5, 10**400])
def test_objects_that_no_integer_can_hold_are_named(script, bad):
    """A row of a table with a missing value; NumPy raises errors of several kinds for these."""
    box = gym.spaces.Box(0, 255, (2,), np.uint8)
    assert script.misfit(box, np.array([7, 1.0], object)) == ""
    found = script.misfit(box, np.array([7, bad], object))
    assert "has numbers from" in found
    assert "of object" in found


def test_ragged_lists_and_numbers_of_no_float_are_named(script):
    """NumPy and gymnasium raise where they meet them."""
    choices = gym.spaces.MultiDiscrete([3, 3])
    assert script.misfit(choices, [1, [2, 0]]).startswith("observation is [1, [2, 0]]; its space")
    box = gym.spaces.Box(-1, 1, (2,))
    found = script.misfit(box, np.array([0, 10**400], object))
    assert found.startswith("observation has numbers that are too large")
    assert script.misfit(box, np.array([0, 1.5], object)) == ""


def test_a_tensor_that_numpy_does_not_know_is_named(script):
    """NumPy has no bfloat16."""
    env = script.make_env(small_args(script, "Walk"))
    look = env.get_wrapper_attr("look")
    with pytest.raises(script.UsageError, match="observation is no array"):
        look(torch.zeros(1, dtype=torch.bfloat16))
    assert look(torch.full((1,), 2.0)).tolist() == [2]


@pytest.mark.parametrize(("call", "kind"), [("reset", TypeError), ("step", ValueError)])
def test_a_fault_of_the_task_is_none_of_its_interface(script, monkeypatch, call, kind):
    """Only what unpacking and old signatures raise is told in other words."""
    env = script.make_env(small_args(script, "Walk"))
    env.reset(seed=0)

    def fail(self, *inputs, **options):
        raise kind("the map is lost")

    monkeypatch.setattr(Walk, call, fail)
    again = {"reset": lambda: env.reset(seed=0), "step": lambda: env.step(0)}[call]
    with pytest.raises(kind, match=r"^the map is lost$"):
        again()


def test_a_task_may_give_torch_back(script):
    """It finds float64 while it wants that, and float32 once it has set that again."""
    ask = script.Checked.ask
    ask("it", torch.set_default_dtype, torch.float64)
    assert torch.get_default_dtype() == torch.float32
    assert ask("it", torch.get_default_dtype) == torch.float64
    ask("it", torch.set_default_dtype, torch.float32)
    assert ask("it", torch.get_default_dtype) == torch.float32
    assert "it" not in script.Checked.tasks_settings


def test_tensors_with_a_graph_are_observations(script, monkeypatch):
    """As a task that learns by itself may show them."""
    shown = torch.tensor([3.0], requires_grad=True)
    monkeypatch.setattr(Walk, "observe", lambda env: shown)
    obs, _ = script.make_env(small_args(script, "Walk")).reset(seed=0)
    assert obs.tolist() == [3]


def test_a_task_that_exits_ends_no_run_well(script, capsys):
    """It is a fault like others: exit code 1, not the task's 0."""
    code, _, err = run_main(script, capsys, words(task(script, "Exit")))
    assert code == 1
    assert "RuntimeError: the task called exit(0)\nafter 0 steps" in err


# ----------------------------------------------------------- one environment more than it can bear
def test_a_simulator_that_exists_once(script, capsys, monkeypatch):
    """The evaluation's comes first; the line says how to do without. Then it trains. Of a rollout's
    environments, too, none stays open after a fault, and none whose flags are refused."""
    monkeypatch.setattr(Single, "alive", [])
    flags = {"num_envs": 1, "num_minibatches": 1, "seq_len": 0, "num_steps": 24}
    line = words(task(script, "Single", **flags))
    code, _, err = run_main(script, capsys, line)
    assert code == 2
    assert err.count("\n") == 1
    assert "RuntimeError: the licence is for one simulator (" in err
    assert "rude.py, line " in err
    assert "); if few can be open at once, take --eval-episodes" in err
    assert Single.alive == []  # so that what follows can open one
    code, out, err = run_main(script, capsys, [*line, "--eval-episodes", "0"])  # none is left open
    assert code == 0, err
    assert "evaluation" not in out
    assert "96 of 96 steps" in out
    args = task(script, "Single", num_envs=2, eval_episodes=0)
    with pytest.raises(script.UsageError, match="for one simulator"):
        script.make_envs(args)
    assert Single.alive == []
    with pytest.raises(script.UsageError, match="must be in"):
        script.make_env(replace(args, masked_obs=(99,)))
    assert Single.alive == []


@pytest.mark.parametrize("apart", [False, True])
def test_environments_that_close_some_come_first(script, monkeypatch, apart):
    """Processes of --async-envs begin by closing an environment in this one, which may shut down
    those that are open."""
    made = []
    monkeypatch.setattr(script, "make_envs", lambda args: made.append("to train") or "envs")
    monkeypatch.setattr(script, "make_eval_env", lambda args: made.append("to evaluate") or "env")
    args = task(script, "Display", async_envs=apart)
    assert script.open_environments(args) == ("envs", "env")
    assert made == (["to train", "to evaluate"] if apart else ["to evaluate", "to train"])


def test_a_film_is_refused_for_its_own_reason(script, monkeypatch):
    """Where only one simulator can be open, the one that cannot be filmed is closed first."""
    monkeypatch.setattr(Single, "alive", [])
    monkeypatch.setitem(sys.modules, "moviepy", sys)
    with pytest.raises(script.UsageError, match="--capture-video: no screen"):
        script.make_eval_env(task(script, "Unfilmed", capture_video=True))
    assert Single.alive == []


def test_environments_with_different_spaces_cost_one_line(script, capsys, monkeypatch):
    """As tasks that draw their size when they are made."""
    sizes = iter(range(3, 99))
    monkeypatch.setattr(
        Walk,
        "__init__",
        lambda env: setattr(env, "observation_space", gym.spaces.Box(0, 1, (next(sizes),))),
    )
    for more in ([], ["--async-envs"]):
        line = [*words(small_args(script, "Walk", eval_episodes=1)), *more]
        code, _, err = run_main(script, capsys, line)
        assert code == 2, err
        assert err.startswith("error: --num-envs 4: probes:Walk-v0 is not the same each time: ")
        assert err.count("\n") == 1
        assert "--eval-episodes" not in err  # which has nothing to do with it


def test_a_process_that_cannot_make_the_task_costs_one_line(script, capsys, monkeypatch):
    """As for a task that is registered in a notebook, which other processes do not know. Under
    torchrun it may be one process alone, which says so."""

    def end(*inputs):
        raise EOFError

    monkeypatch.setattr(script, "EnvsInProcesses", end)
    line = [*words(small_args(script, "Walk", eval_episodes=1)), "--async-envs"]
    code, _, err = run_main(script, capsys, line)
    assert code == 2
    begin = "error: --async-envs True: a process that makes the task ended (EOFError()), and may "
    assert err == f"{begin}have said why above; leave it out\n"
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    assert script.of_this_process(script.UsageError("it")).__notes__ == ["in process 0"]


def test_a_path_too_long_for_sockets_costs_one_line(script, monkeypatch, tmp_path):
    """As a batch system may set TMPDIR. What else the system refuses stays as it is."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(script.tempfile, "tempdir", str(long))
    args = small_args(script, "Walk", async_envs=True)

    def bind(*inputs):
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(str(long / "listener"))

    monkeypatch.setattr(script, "EnvsInProcesses", bind)
    with pytest.raises(script.UsageError, match=f"^--async-envs True: .*{long} is too long; set T"):
        script.make_envs(args)
    monkeypatch.setattr(script, "EnvsInProcesses", lambda *_: os.stat("no such file"))
    with pytest.raises(FileNotFoundError):
        script.make_envs(args)


def test_a_space_may_be_empty(script):
    """A list of neighbours whose most is 0, say. It is no image."""
    empty = gym.spaces.Box(0, 1, (0, 4))
    assert script.channel_axis(empty) is None
    both = gym.spaces.Dict({"near": empty, "place": gym.spaces.Box(0, 1, (2,))})
    assert script.unfit_part(both) == ""


@with_both_scripts
def test_a_run_closes_nothing_before_its_end(script, somewhere, monkeypatch):
    """Closing one shuts the display for all. Four environments and one for all evaluations; a
    resume and a start from other weights have no more."""
    args = task(script, "Display", eval_every=1, checkpoint_every=1)

    def train(**flags):
        monkeypatch.setattr(Display, "shut", [])
        monkeypatch.setattr(Display, "opened", [])
        directory = script.train(replace(args, **flags))["run_dir"]
        assert len(Display.opened) == len({*map(id, Display.opened)}) == 5
        return directory

    first = train()
    train(init_from=first)
    train(resume=first, total_timesteps=192)


def test_without_evaluations_their_flags_are_idle(script, capsys):
    """And there is nothing that --evaluate could do."""
    line = words(task(script, "Display", eval_episodes=0))
    code, _, err = run_main(script, capsys, [*line, "--eval-every", "2"])
    assert code == 2
    assert "--eval-every 2: has no effect while --eval-episodes is 0" in err
    directory = script.train(small_args(script, "Walk", eval_episodes=0))["run_dir"]
    code, _, err = run_main(script, capsys, ["--evaluate", directory])
    assert code == 2
    assert "--eval-episodes 0: must be at least 1 with --evaluate" in err


# --------------------------------------------------------------------- environments in checkpoints
def test_environments_that_travel_are_saved(script, tmp_path, monkeypatch, capsys):
    """Another process has read them back and stepped them: the resume changes no bit."""
    args = flags_for(script, tmp_path, 3, env_id="probes:Walk-v0", save_envs="proven")
    whole = script.train(replace(args, save_envs="always"))
    directory = stopped(script, monkeypatch, args, 1)
    tried = []
    find = script.fault_of_copies
    monkeypatch.setattr(script, "fault_of_copies", lambda x: tried.append(find(x)) or tried[-1])
    again = resumed(script, monkeypatch, directory)
    assert tried == [""]
    assert_same(timeless(again), timeless(whole))
    assert_same(contents(directory), contents(whole["run_dir"]))
    assert AFRESH not in capsys.readouterr().out


def test_nothing_is_read_back_in_the_run_itself(script, tmp_path, monkeypatch):
    """A copy that is thrown away would free what it shares with the original."""
    args = flags_for(
        script, tmp_path, 3, env_id="rude:Rude-v0", checkpoint_every=1, save_envs="always"
    )
    monkeypatch.setattr(script.pickle, "loads", None)
    script.train(args)


def test_environments_are_tried_out_by_a_resume_alone(script, tmp_path, monkeypatch):
    """By none that has nothing to step, nor by a run that begins."""
    monkeypatch.setattr(script, "fault_of_copies", None)
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0", save_envs="proven")
    directory = script.train(args)["run_dir"]
    resumed(script, monkeypatch, directory)


def test_environments_are_tried_out_where_the_flag_says_so(script, tmp_path, monkeypatch, capsys):
    """always: they are read back at once. never: they are not read."""
    directory = stopped(
        script, monkeypatch, flags_for(script, tmp_path, 3, env_id="probes:Walk-v0"), 1
    )
    monkeypatch.setattr(script, "fault_of_copies", None)
    capsys.readouterr()
    script.train(
        replace(script.load_agent(directory)[1], resume=str(directory), save_envs="always")
    )
    assert AFRESH not in capsys.readouterr().out
    args = flags_for(script, tmp_path / "other", 3, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    resumed(script, monkeypatch, directory, "--save-envs", "never")
    assert f"{AFRESH}: --save-envs is never" in capsys.readouterr().out


def pickled(script, name, number=1):
    """The bytes of environments, as a checkpoint holds them."""
    flags = {"num_envs": number, "num_minibatches": 1}
    envs = script.make_envs(small_args(script, "", env_id=f"rude:{name}-v0", **flags))
    envs.reset(seed=[*range(number)])
    found, fault = script.pickle_envs(envs)
    assert fault == ""
    return found


def test_copies_that_take_too_long_are_given_up(script, somewhere, monkeypatch):
    """The other process is killed."""
    monkeypatch.setattr(script, "TRIAL_SECONDS", 0.5)
    assert script.fault_of_copies(pickled(script, "Sleeper")) == (
        "another process did not read them back, step and close them within 0.5 seconds"
    )


def test_simulators_that_copies_start_are_ended(script, somewhere):
    """They hold the output of the other process open, so waiting for its end would take as long as
    they do."""
    began = time.time()
    assert script.fault_of_copies(pickled(script, "Starter", 2)) == ""
    assert time.time() - began < script.TRIAL_SECONDS
    simulators = Path("simulators").read_text().split()
    assert len(simulators) == 2
    assert all(map(has_ended, simulators))


def test_an_interrupt_ends_the_other_process(script, somewhere, monkeypatch):
    """Ctrl-C while copies are tried out."""
    begun = []
    popen = script.subprocess.Popen

    def begin(*given, **named):
        begun.append(popen(*given, **named))
        monkeypatch.setattr(begun[0], "wait", interrupt)
        return begun[0]

    def interrupt(*timeout):
        if timeout:
            raise KeyboardInterrupt
        return popen.wait(begun[0])

    monkeypatch.setattr(script.subprocess, "Popen", begin)
    with pytest.raises(KeyboardInterrupt):
        script.fault_of_copies(pickled(script, "Sleeper"))
    assert begun[0].returncode == -9


def test_a_task_whose_spec_cannot_be_copied(script, somewhere):
    """It is trained and evaluated like others. It has no time limit that gymnasium could tell."""
    args = flags_for(script, somewhere, 1, env_id="rude:Locked-v0", eval_episodes=1)
    assert script.train(args)["eval/length_mean"] > 0


@with_both_scripts
def test_a_program_that_prefers_float64(script, somewhere):
    """The networks are float32 in a run and in an agent that is loaded."""
    args = flags_for(script, somewhere, 1, env_id="probes:Walk-v0")
    settings = script.torch_settings()
    try:
        torch.set_default_dtype(torch.float64)
        directory = script.train(args)["run_dir"]
        torch.set_default_dtype(torch.float64)
        agent, _ = script.load_agent(directory)
        assert torch.get_default_dtype() == torch.float64
        assert {parameter.dtype for parameter in agent.parameters()} == {torch.float32}
        obs = np.zeros((3, 1), np.float32)
        for found in (agent.value(obs), agent.predict_returns(obs, (0.1, 0.5))):
            values = found[0] if isinstance(found, tuple) else found
            assert np.isfinite(values).all()
    finally:
        script.set_torch(settings)


@with_both_scripts
@pytest.mark.parametrize("task", ["Walk", "ImageMultiDiscrete"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_agent_acts_in_a_program_that_prefers_another_dtype(script, somewhere, dtype, task):
    """With the same actions, and with float32 where it carries something. Images are bytes."""
    args = flags_for(script, somewhere, 1, env_id=f"probes:{task}-v0")
    agent, _ = script.load_agent(script.train(args)["run_dir"])
    obs = np.ones((3, *agent.obs_shape), agent.observation_space.dtype)

    def act():
        generator = torch.Generator().manual_seed(1)
        found = agent.act(obs, deterministic=False, generator=generator)
        return found if isinstance(found, tuple) else (found,)

    expected = act()
    settings = script.torch_settings()
    try:
        torch.set_default_dtype(dtype)
        for one, other in zip(act(), expected, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    finally:
        script.set_torch(settings)


@with_both_scripts
@pytest.mark.parametrize("env_id", ["probes:Walk-v0", "probes:VectorBox-v0"])
def test_a_program_that_prefers_another_device(script, somewhere, env_id):
    """There tensors would have no numbers. Training goes back to the CPU, and an agent that acts
    stays there."""
    args = flags_for(script, somewhere, 1, env_id=env_id, value_target="sr_lambda")
    try:
        torch.set_default_device("meta")
        directory = script.train(args)["run_dir"]
        agent, _ = script.load_agent(directory)
        torch.set_default_device("meta")
        obs = np.zeros((3, *agent.obs_shape), np.float32)
        found = agent.act(obs, deterministic=False)
        assert len(found[0] if isinstance(found, tuple) else found) == 3
    finally:
        torch.set_default_device(None)


@with_both_scripts
def test_all_environments_are_closed_though_one_cannot(script, capsys):
    """Each that fails costs a warning."""
    closed = []

    class Fails(gym.Wrapper):
        """The second one raises."""

        def close(self):
            """Note it."""
            closed.append(self)
            if len(closed) == 2:
                raise OSError("no")

    makers = [lambda: Fails(gym.make("CartPole-v1"))] * 3
    envs = gym.vector.SyncVectorEnv(makers)
    script.close_quietly(envs)
    assert len(closed) == 3
    assert capsys.readouterr().err == "warning: the task's close() failed: OSError('no')\n"
    envs.close()
    assert len(closed) == 3


def test_copies_that_cannot_be_tried_out(script, monkeypatch):
    """There is no room for their file."""

    def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script.tempfile, "TemporaryFile", full)
    assert script.fault_of_copies(b"").startswith("they cannot be tried out: [Errno 28]")


def test_environments_need_not_be_saved(script, tmp_path, monkeypatch, capsys):
    """--save-envs never: nothing is said, and the resume opens new episodes."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0", save_envs="never")
    monkeypatch.setattr(script, "pickle_envs", None)
    directory = stopped(script, monkeypatch, args, 1)
    assert "environments are" not in capsys.readouterr().out
    resumed(script, monkeypatch, directory)
    assert f"{AFRESH}: the checkpoint has no environments" in capsys.readouterr().out


@pytest.mark.parametrize("library", ["Python", "numpy"])
def test_other_versions_open_new_episodes(script, tmp_path, monkeypatch, capsys, library):
    """One line; what was pickled under another Python might end the process without a message."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)

    def age(kept):
        assert kept["versions"]["Python"] == "{}.{}".format(*sys.version_info)
        assert kept["versions"]["numpy"] == np.__version__
        [part] = kept["parts"]
        older = kept["versions"] | {library: "1.2"}
        return kept | {"versions": older, "parts": [part | {"envs": b"a bomb"}]}

    change_run(directory / "checkpoint.pt", age)
    resumed(script, monkeypatch, directory)
    out = capsys.readouterr().out
    assert f"{AFRESH}: they were saved under {library} 1.2, and this is " in out
    assert contents(directory)["step"] == args.total_timesteps


TASK = """import gymnasium
from probes import Walk

class Mine(Walk):
    pass

gymnasium.register("Mine-v0", entry_point="{module}:Mine", max_episode_steps={limit})
"""


@pytest.mark.parametrize("limit", [5, 9])
def test_a_task_that_was_edited_opens_new_episodes(script, somewhere, monkeypatch, capsys, limit):
    """A resume would otherwise go on with what the environments kept, their time limit here, and
    evaluate on the task that was edited. The same file is no change."""
    module = f"mine_{limit}_{script.SCRIPT}"
    monkeypatch.syspath_prepend(str(somewhere))
    (somewhere / f"{module}.py").write_text(TASK.format(module=module, limit=5))
    args = flags_for(script, somewhere, 2, env_id=f"{module}:Mine-v0")
    directory = stopped(script, monkeypatch, args, 1)
    (somewhere / f"{module}.py").write_text(TASK.format(module=module, limit=limit))
    del sys.modules[module]
    resumed(script, monkeypatch, directory)
    edited = f"{AFRESH}: {module}.py has changed since they were saved" in capsys.readouterr().out
    assert edited == (limit == 9)


@pytest.mark.parametrize(
    ("limit", "slippery", "afresh"), [(20, True, False), (30, True, True), (20, False, True)]
)
def test_a_task_that_is_registered_anew_opens_new_episodes(
    script, somewhere, monkeypatch, capsys, limit, slippery, afresh
):
    """A program of the user's may register it with another limit or other arguments. No class is
    another one then, and evaluations are of the new registration."""

    def register(limit, slippery):
        where = "gymnasium.envs.toy_text:FrozenLakeEnv"
        kwargs = {"is_slippery": slippery, "desc": None, "map_name": "4x4"}
        gym.register("Lake-v0", where, max_episode_steps=limit, kwargs=kwargs)

    monkeypatch.setattr(gym.logger, "min_level", gym.logger.ERROR)  # of the second registration
    register(20, True)
    args = flags_for(script, somewhere, 2, env_id="Lake-v0")
    directory = stopped(script, monkeypatch, args, 1)
    register(limit, slippery)
    resumed(script, monkeypatch, directory)
    told = f"{AFRESH}: the registration of Lake-v0 has changed since they were saved"
    assert (told in capsys.readouterr().out) == afresh


def test_a_folder_whose_name_is_no_text_is_a_mistake(script, somewhere, capsys):
    """Its bytes are no UTF-8, which TensorBoard writes."""
    args = small_args(script, "Walk", run_dir=str(somewhere / "r\udcfcn"))
    with pytest.raises(script.UsageError, match="no log can be written"):
        script.train(args)


def test_a_task_that_its_module_does_not_register(script, capsys):
    """A file of the user's may have the name of one of Python's own."""
    code, _, err = run_main(script, capsys, ["--env-id", "this:Nowhere-v0"])
    assert code == 2
    assert "this was taken from " in err
    assert "this.py, which registers no such id" in err


class Curriculum(gym.Env):
    """Its level, which is its reward, stands in an argument of its own: a dictionary."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config):
        self.config = config

    def reset(self, *, seed=None, options=None):
        """Open an episode of three steps."""
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        """Raise the level at the end."""
        self.t += 1
        self.config["level"] += self.t == 3
        return np.zeros(1, np.float32), float(self.config["level"]), self.t == 3, False, {}


def test_a_task_that_changes_its_arguments_is_resumed(script, somewhere, monkeypatch, capsys):
    """Gymnasium's `spec` then holds what the task has made of them, but the registration is the
    same. Four episodes of an iteration raise the level by four: it is 8 after two."""
    gym.register("Curriculum-v0", entry_point=Curriculum, kwargs={"config": {"level": 0}})
    args = flags_for(script, somewhere, 2, env_id="Curriculum-v0", eval_episodes=0)
    directory = stopped(script, monkeypatch, args, 1)
    results = resumed(script, monkeypatch, directory)
    assert AFRESH not in capsys.readouterr().out
    assert results["charts/episodic_return"] == 7 + 7 + 8


class Trial(gym.Wrapper):
    """Its episode is four of the task, each of which a time limit of its own cuts."""

    def reset(self, **options):
        """Open the first one."""
        self.parts = 0
        return self.env.reset(**options)

    def step(self, action):
        """Open the next one in the same step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            self.parts += 1
            obs, _ = self.env.reset()
        return obs, reward, self.parts == 4, False, info


@with_both_scripts
def test_a_time_limit_inside_a_wrapper_does_not_cut_evaluations(script, somewhere, capsys):
    """The wrapper's episode has 20 steps, and the limit of 5 ends a fourth of it."""
    gym.register("Trial-v0", lambda: Trial(gym.wrappers.TimeLimit(Walk(), 5)))
    args = small_args(script, "", env_id="Trial-v0")
    assert script.train(args)["eval/length_mean"] == 20
    assert "evaluations cut" not in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_processes_that_a_task_forks_can_be_ended(script, somewhere, number):
    """multiprocessing ends them by SIGTERM. Ctrl-C also reaches them, and the iteration, which is
    finished, still needs them."""
    flags = {"num_steps": 4, "num_minibatches": 1, "eval_episodes": 0, "save_envs": "never"}
    args = small_args(script, "Walk", run_dir=str(somewhere), **flags)
    args = replace(args, env_id="rude:Forker-v0", total_timesteps=args.batch_size)
    ends = []
    rude.Forker.ask = lambda process: ends.append(ask_to_end(process, number))
    script.train(args)
    assert {*ends} == {-signal.SIGTERM if number == signal.SIGTERM else None}


def ask_to_end(process, number):
    """Send a signal. Returns how the process has ended, or None where it lives on."""
    os.kill(process.pid, number)
    process.join(10 if number == signal.SIGTERM else 0.1)
    ended = process.exitcode
    process.kill()
    process.join()
    return ended


def test_wrappers_are_a_part_of_how_a_task_was_made(script, somewhere, monkeypatch, capsys):
    """An edited program may add one in the function that makes the task."""
    args = flags_for(script, somewhere, 2, env_id="Wrapped-v0")
    monkeypatch.setattr(gym.logger, "min_level", gym.logger.ERROR)  # of the second registration
    gym.register("Wrapped-v0", lambda: Walk())
    directory = stopped(script, monkeypatch, args, 1)
    closed = []
    monkeypatch.setattr(Walk, "close", lambda env: closed.append(env))
    gym.register("Wrapped-v0", lambda: gym.wrappers.TransformReward(Walk(), abs))
    resumed(script, monkeypatch, directory)
    assert f"{AFRESH}: the registration of Wrapped-v0 has changed since" in capsys.readouterr().out
    assert len(closed) >= args.num_envs  # those of the checkpoint are not read back


def test_functions_and_classes_of_a_notebook_have_sources(script, monkeypatch):
    """Python looks for classes in files, and a notebook is none."""
    source = "class Own(Walk):\n    def pay(self, action):\n        return {}\n"
    found = []
    for reward in (1.0, 1.0, 2.0):
        cell, lines = f"<cell {len(found)}>", source.format(reward)
        linecache.cache[cell] = len(lines), None, lines.splitlines(True), cell
        scope = {"Walk": Walk, "__name__": "__main__"}
        exec(compile(lines, cell, "exec"), scope)
        envs = gym.vector.SyncVectorEnv([scope["Own"]])
        envs.envs[0].spec = SimpleNamespace(entry_point=scope["Own"])
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())
        found.append(script.task_sources(envs, "Own-v0")["the class Own"])
    assert found[0] == found[1] != found[2]


def test_what_networks_see_of_a_task_is_told_where_the_script_is_the_program(script, monkeypatch):
    """Its environments hold the function that turns observations into vectors. A resume by an
    edited script would go on with the old one."""
    envs = script.make_envs(small_args(script, "Walk"))
    for env in envs.envs:
        monkeypatch.setattr(env.get_wrapper_attr("see"), "__module__", "__main__")
    found = script.task_sources(envs, "probes:Walk-v0")
    assert "the function see" in found


def test_a_task_may_be_made_by_a_thing_that_has_no_hash(script):
    """Such as an instance of a dataclass."""

    @dataclass
    class Maker:
        def __call__(self):
            return Walk()

    gym.register("Made-v0", Maker())
    envs = script.make_envs(small_args(script, "", env_id="Made-v0"))
    assert script.task_sources(envs, "Made-v0")


def test_a_registration_tells_no_address(script):
    """It would differ in every process, and no resume would be exact."""
    spec = SimpleNamespace(entry_point=Walk, kwargs={"a": object(), "b": lambda: 1, "c": 0.5})
    told = script.registration(SimpleNamespace(unwrapped=SimpleNamespace(spec=spec)))
    assert " at 0x" not in told
    assert "'c': 0.5" in told


def test_the_time_limit_of_a_task_whose_registration_cannot_be_copied(script):
    """Evaluations keep to it as training does. gymnasium then has no `spec`."""
    where = partial(lambda lock: Walk(), threading.Lock())
    gym.register("LockedLong-v0", where, max_episode_steps=20_000)
    env = script.make_env(small_args(script, "Walk"))
    assert script.time_limit(env) is None
    env = gym.make("LockedLong-v0")
    assert script.time_limit(env) == 20_000
    assert script.time_limit(gym.wrappers.TimeLimit(env, 7)) == 7


@with_both_scripts
def test_a_fault_with_a_percent_sign_is_told(script, monkeypatch, capsys):
    """In a process of --async-envs. gymnasium takes its traceback for a format string."""
    args = task(script, "Battery", async_envs=True, num_envs=2)
    envs = script.make_envs(args)
    try:
        envs.reset(seed=[1, 2])
        with pytest.raises(RuntimeError, match="battery at 3%"):
            envs.step(np.zeros((2, 1), np.int64))
    finally:
        script.close_quietly(envs)
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert 'raise RuntimeError(f"battery at {13 % 5}%")' in told


def test_warnings_of_gymnasium_may_have_percent_signs(script):
    """A film in a folder like clip20% is written over, say. The log is then as it was."""
    before = gym.logger.warn, gym.logger.error
    with script.collecting_warnings() as told:
        gym.logger.warn("videos in clip20% folder")
        gym.logger.error("a % b")
    assert told == ["videos in clip20% folder", "a % b"]
    assert (gym.logger.warn, gym.logger.error) == before


def test_what_defines_a_task_is_told_by_its_module(script, monkeypatch):
    """Two files may have one name, and a class of the program itself counts alone: the program may
    be edited to resume. Bases count as well."""

    class Own(Walk):
        __module__ = "__main__"  # set later, Python 3.13 would forget the line of the class

    monkeypatch.setitem(sys.modules, "__main__", sys.modules[__name__])  # the program is this file
    envs = gym.vector.SyncVectorEnv([lambda: gym.wrappers.RecordEpisodeStatistics(Own())])
    found = script.task_sources(envs, "probes:Walk-v0")
    assert {"gymnasium.wrappers.common.py", "gymnasium.core.py", "probes.py"} <= found.keys()
    assert "the class Own" in found
    assert not any("typing" in name or "__main__" in name for name in found)
    assert all(len(checksum) == 8 for checksum in found.values())
    spaces = script.task_sources(SimpleNamespace(), "probes:Walk-v0")
    assert spaces == {"probes.py": found["probes.py"]}  # of other processes the module alone


def test_a_resumed_run_compares_evaluations_of_one_kind(script, somewhere, monkeypatch, capsys):
    """Samples and the mode do not compare, nor does a mean of three with one of fifty, which luck
    lifts less. So a resume may not change that; an evaluation alone may."""
    flags = {"eval_every": 1, "eval_episodes": 2, "env_id": "probes:Walk-v0"}
    args = flags_for(script, somewhere, 3, **flags)
    directory = stopped(script, monkeypatch, args, 2)
    change_run(directory / "checkpoint.pt", lambda run: run | {"best_return": 1e9})
    before = (directory / "best.pt").read_bytes()
    for more in (["--eval-sampled"], ["--eval-episodes", "3"]):
        code, _, err = run_main(script, capsys, ["--resume", str(directory), *more])
        assert (code, "as in the run, since best.pt compares evaluations" in err) == (2, True)
        assert err.startswith(f"error: {more[0]} ")
    resumed(script, monkeypatch, directory)
    assert (directory / "best.pt").read_bytes() == before
    code, _, err = run_main(script, capsys, ["--evaluate", str(directory), "--eval-sampled"])
    assert code == 0, err


def test_environments_that_cannot_be_read_back_open_new_episodes(
    script, tmp_path, monkeypatch, capsys
):
    """One line in place of a traceback."""
    args = flags_for(script, tmp_path, 2, env_id="probes:Walk-v0")
    directory = stopped(script, monkeypatch, args, 1)
    spoil = lambda kept: kept | {"parts": [kept["parts"][0] | {"envs": b"nothing"}]}  # noqa: E731
    change_run(directory / "checkpoint.pt", spoil)
    resumed(script, monkeypatch, directory)
    assert f"{AFRESH}: reading the environments back failed: " in capsys.readouterr().out


def test_the_best_agent_needs_no_environments(script, somewhere):
    """Nor optimizers: `best.pt` has flags, weights and statistics, and its return."""
    directory = script.train(small_args(script, "Walk", eval_every=1))["run_dir"]
    saved = torch.load(f"{directory}/best.pt", weights_only=True)
    assert saved.keys() == {"script", "args", "agent", "actions", "global_step", "best_return"}


# ------------------------------------------------------------------------- someone else's program
def test_a_run_may_be_in_a_thread(script, somewhere):
    """Where no signal can be handled."""
    found = []
    args = small_args(script, "Walk")
    thread = threading.Thread(target=lambda: found.append(script.train(args)))
    thread.start()
    thread.join()
    assert found[0]["eval/return_mean"] is not None


class Mute:
    """A replacement of stdout that can only write, as some programs have it."""

    def write(self, text):
        """Nothing."""


class Gone(Mute):
    """A terminal that was closed."""

    def write(self, text):
        """Fail as the system does."""
        raise OSError(5, "Input/output error")


class Closed(Mute):
    """A file that was closed."""

    def write(self, text):
        """Fail as Python does."""
        raise ValueError("I/O operation on closed file")


def closed_text():
    """A file that was closed, and cannot even say whether it is a terminal."""
    file = io.StringIO()
    file.close()
    return file


@pytest.mark.parametrize("kind", [Mute, Gone, Closed, closed_text])
def test_stdout_may_be_anything(script, somewhere, monkeypatch, kind):
    """The run ends well, with a checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", kind())
        directory = script.train(small_args(script, "Walk"))["run_dir"]
    assert contents(directory)["step"] == 96


def test_a_notebook_has_no_file(script, somewhere, monkeypatch):
    """The run has flags and versions, and no source."""
    monkeypatch.delattr(script, "__file__")
    directory = Path(script.train(small_args(script, "Walk"))["run_dir"])
    assert (directory / "args.json").exists()
    assert not list(directory.glob("*.py"))


def test_a_task_that_moves_when_it_is_made_moves_nothing_else(script, somewhere, capsys):
    """Paths are relative to where the command was given: of a run, of its resume, of weights."""
    few = "--total-timesteps 96 --num-envs 4 --num-steps 12 --num-minibatches 2 --eval-episodes 1"
    few += " --save-envs never"
    line = f"--env-id rude:Mover-v0 --run-dir here {few}".split()
    code, _, err = run_main(script, capsys, line)
    assert code == 0, err
    os.chdir(somewhere)
    [directory] = (somewhere / "here").iterdir()
    for more in (["--resume", f"here/{directory.name}", "--total-timesteps", "144"],
                 [*line, "--init-from", f"here/{directory.name}"],
                 ["--evaluate", f"here/{directory.name}"]):  # fmt: skip
        code, _, err = run_main(script, capsys, more)
        assert code == 0, err
        os.chdir(somewhere)
    assert contents(directory)["step"] == 144
    assert [*(directory / "evaluations").iterdir()]
    assert len([*(somewhere / "here").iterdir()]) == 2


@pytest.mark.slow
def test_a_process_that_died_does_not_hold_up_the_end(script, somewhere, monkeypatch):
    """The second of two dies in a step, after the first one has answered. Closing waits for ten
    seconds, not for ever. Both are in groups of their own, so that signals to the run's are not for
    them."""
    monkeypatch.setattr(script, "usable_cores", lambda: 2)
    envs = script.make_envs(task(script, "Dier", async_envs=True, num_envs=2))
    assert all(os.getpgid(process.pid) != os.getpgrp() for process in envs.groups.processes)
    envs.reset(seed=[4, 5])
    with pytest.raises(RuntimeError, match="a process of --async-envs ended; was it killed"):
        envs.step(np.zeros((2, 1), np.int64))
    closing = threading.Thread(target=script.close_quietly, args=(envs,), daemon=True)
    closing.start()
    closing.join(40)
    assert not closing.is_alive()


def test_processes_that_do_not_close_are_killed(script, monkeypatch):
    """A simulator may block for ever in its close()."""
    killed = threading.Event()
    processes = [SimpleNamespace(kill=killed.set)]
    envs = object.__new__(script.EnvsInProcesses)
    envs.groups = SimpleNamespace(processes=processes, close=lambda timeout: killed.wait(60))
    soon = partial(threading.Timer, 0.05)
    monkeypatch.setattr(script.threading, "Timer", lambda seconds, call: soon(call))
    began = time.time()
    envs.close_extras()
    assert time.time() - began < 30


def test_a_process_that_ended_is_told_as_what_it_is(script):
    """Also ahead of its first step. A task's own fault of this kind is no such end."""

    def gone(*_, **options):
        raise EOFError

    envs = object.__new__(script.EnvsInProcesses)
    envs.size = 1
    envs.groups = SimpleNamespace(reset=gone, step=gone)
    for call in (partial(envs.reset, seed=[1]), partial(envs.step, np.zeros((1, 1)))):
        with pytest.raises(RuntimeError, match="a process of --async-envs ended; was it killed"):
            call()
    with pytest.raises(RuntimeError, match="ConnectionRefusedError"), script.faults_that_travel():
        raise ConnectionRefusedError("the simulator's server is down")


class Stuck(RuntimeError):
    """A fault that holds what cannot be sent to another process."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class Moody(RuntimeError):
    """A fault that cannot be made anew from its text."""

    def __init__(self, code, where):
        super().__init__(f"code {code} at {where}")


class Sized(RuntimeError):
    """A fault that travels, and cannot be made from another one, as JSONDecodeError."""

    def __init__(self, text, size):
        super().__init__(text, size)
        self.size = size


@pytest.mark.parametrize(
    "fault", [Stuck("no grip"), Moody(7, "the wall"), Sized("short", 3), RuntimeError("plain")]
)
def test_a_fault_in_another_process_is_told(script, fault):
    """The run's process would wait for ever for the first one, and see a TypeError for the second.
    Others stay what they are."""

    class Bad:
        def step(self, actions):
            raise fault

    group = script.Group.__new__(script.Group)
    group.envs = Bad()
    with pytest.raises(RuntimeError, match=re.escape(str(fault))) as found:
        group.step(None)
    assert (found.value is fault) == (type(fault) is RuntimeError)
    assert str(script.pickle.loads(script.pickle.dumps(found.value))) == str(found.value)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="the platform knows no SIGHUP")
def test_a_closed_terminal_ends_the_run_with_a_checkpoint(tmp_path):
    """SIGHUP is like SIGTERM, and it is confirmed. bash sends one, and the system another one."""
    import distributional_ppo_categorical as script

    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        pytest.skip("the suite runs under nohup, which the script respects")
    flags = {"env_id": "probes:Walk-v0", "checkpoint_every": 1, "num_envs": 2}
    process = start(script, tmp_path, words(flags_for(script, tmp_path, 100_000, **flags)))
    path = await_file(process, tmp_path, "runs/*/checkpoint.pt")
    os.kill(process.pid, signal.SIGHUP)
    while "stopping" not in (tmp_path / "err").read_text() and process.poll() is None:
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGHUP)
    assert await_end(process) == 130
    err = (tmp_path / "err").read_text()
    asked, stopped_at = err.splitlines()
    assert asked.rstrip() == "stopping after this iteration; Ctrl-C now kills"
    assert stopped_at.startswith("stopped after ")
    assert f"--resume {path.parent}" in err


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_ends_well(somewhere):
    """As in `| head -1`: the exit code is that of the run, not Python's 120."""
    import distributional_ppo_categorical as script

    flags = "--total-timesteps 512 --eval-episodes 1 --save-envs never"
    program = [sys.executable, script.__file__, *flags.split()]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(program, cwd=somewhere, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_nobody_reads_is_dropped(script, monkeypatch):
    """A stream that cannot be flushed leads to nowhere from then on."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        stream.write("more")
        monkeypatch.setattr(sys, "stdout", stream)
        script.flush_output()
        monkeypatch.undo()  # closing the stream flushes it again


@pytest.mark.parametrize("task", ["Walk", "Filmed"])
def test_a_signal_ends_an_evaluation_on_the_way(script, somewhere, monkeypatch, capsys, task):
    """After its episode, and the iteration is saved. The resume begins with that evaluation, so
    that its result is that of an uninterrupted run. One task draws from NumPy's generator."""
    play, episodes = script.run_episode, []

    def interrupt(*inputs):
        episodes.append(inputs)
        if len(episodes) == 1:
            signal.raise_signal(signal.SIGINT)
        return play(*inputs)

    args = small_args(script, task, run_dir=str(somewhere / "here"), eval_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(script, "run_episode", interrupt)
        code, _, err = run_main(script, capsys, words(args))
    assert (code, len(episodes)) == (130, 1)
    assert "stopping after this episode" in err
    assert "stopped after 48 steps; continue with --resume" in err
    [directory] = (somewhere / "here").iterdir()
    assert contents(directory)["step"] == 48
    assert not (directory / "best.pt").exists()

    evaluate, steps = script.Run.evaluate, []
    monkeypatch.setattr(script.Run, "evaluate", lambda run: (steps.append(run.step), evaluate(run)))
    assert run_main(script, capsys, ["--resume", str(directory)])[0] == 0
    assert steps == [48, 96]
    whole = script.train(args)
    assert_same(contents(directory), contents(whole["run_dir"]))


def test_output_may_be_missing_or_closed(script, monkeypatch, tmp_path):
    """Then there is nothing to flush, and no fault. An open one is flushed."""
    monkeypatch.setattr(sys, "stderr", None)
    with open(tmp_path / "out", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print("it")
        script.flush_output()
        assert (tmp_path / "out").read_text() == "it\n"
    script.flush_output()


def test_nohup_is_respected(script, tmp_path):
    """A signal that is ignored stays ignored."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run, *_ = script.start(small_args(script, "Walk", run_dir=str(tmp_path)))
        with run:
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == run.request_stop
    finally:
        signal.signal(signal.SIGHUP, handler)


def test_an_evaluation_that_is_cut_twice_repeats(script, somewhere, monkeypatch, capsys):
    """Where environments are not saved, each resume resets them, which draws from NumPy's generator
    here. The next resume begins from the same numbers."""
    play = script.run_episode

    def interrupt(*inputs):
        signal.raise_signal(signal.SIGINT)
        return play(*inputs)

    flags = {"save_envs": "never", "eval_every": 1, "run_dir": str(somewhere / "here")}
    args = small_args(script, "Filmed", **flags)
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(script, "run_episode", interrupt)
        assert run_main(script, capsys, words(args))[0] == 130
        [directory] = (somewhere / "here").iterdir()
        for _ in range(2):
            found.append(contents(directory)["run"]["rngs"])
            assert run_main(script, capsys, ["--resume", str(directory)])[0] == 130
    assert_same(*found)


@pytest.mark.parametrize("task", ["Walk", "Filmed"])
def test_a_signal_ends_the_last_evaluation(script, somewhere, monkeypatch, capsys, task):
    """After its episode, with exit code 130. Training is saved; the resume evaluates alone, and
    leaves what an uninterrupted run does. One task draws from NumPy's generator."""
    play = script.run_episode
    episodes = []

    def interrupt(*inputs):
        episodes.append(inputs)
        signal.raise_signal(signal.SIGINT)
        return play(*inputs)

    args = small_args(script, task, run_dir=str(somewhere / "here"))
    with monkeypatch.context() as patch:
        patch.setattr(script, "run_episode", interrupt)
        code, _, err = run_main(script, capsys, words(args))
    assert code == 130
    assert len(episodes) == 1
    assert "stopped after 96 steps; continue with --resume" in err
    [directory] = (somewhere / "here").iterdir()
    before = contents(directory)
    code, out, _ = run_main(script, capsys, ["--resume", str(directory)])
    assert code == 0
    assert "evaluation of 3 episodes" in out
    assert_same(contents(directory)["agent"], before["agent"])
    whole = script.train(args)
    assert_same(contents(directory), contents(whole["run_dir"]))
    before = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    code, out, _ = run_main(script, capsys, ["--resume", str(directory)])
    assert (
        "the run has taken all of its 96 steps; a larger --total-timesteps continues it, and --eval"
        in out
    )
    after = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    assert after == before
    assert "; kept in " in out
    assert "logging to" not in out  # no log was written


def test_a_signal_that_comes_too_late_is_obeyed(script, somewhere, monkeypatch, capsys):
    """While the last checkpoint is written: the run is done, and a loop over seeds ends."""
    save = script.Run.save

    def interrupt(run, *inputs):
        signal.raise_signal(signal.SIGINT)
        save(run, *inputs)

    args = small_args(script, "Walk", run_dir=str(somewhere / "here"), eval_episodes=0)
    monkeypatch.setattr(script.Run, "save", interrupt)
    code, _, err = run_main(script, capsys, words(args))
    assert code == 130
    assert "interrupted after 96 steps; what was done is in" in err
    [directory] = (somewhere / "here").iterdir()
    assert contents(directory)["step"] == 96


@with_both_scripts
def test_a_task_without_end_is_evaluated_with_words(script, monkeypatch, capsys):
    """A line of progress, and one that says that it is cut; the second episode says no more."""
    args = small_args(script, "Endless", eval_episodes=2, num_envs=1, num_minibatches=1)
    agent = make_agent(script, args)
    monkeypatch.setattr(script.StatusLine, "due", True)
    monkeypatch.setattr(script, "LONGEST_EPISODE", 1_001)
    script.evaluate(agent, args)
    out = capsys.readouterr().out
    assert "evaluation: step 17 of episode 1 of 2\n" in out
    assert "evaluation: step 1,001 of episode 2 of 2\n" in out
    cut = "evaluations cut this task, whose episodes did not end, at 1,001 steps"
    assert out.count(cut) == 1


def test_a_run_says_once_that_it_cuts_evaluations(script, monkeypatch, capsys):
    """However many evaluations it has. A short one tells of no progress, however long ago the one
    before was."""
    monkeypatch.setattr(script, "LONGEST_EPISODE", 6)
    args = small_args(script, "Endless", eval_every=1, eval_episodes=1)
    directory = script.train(args)["run_dir"]
    agent, args = script.load_agent(directory)
    status = script.StatusLine(seconds=30)
    status.shown_at = 0
    played = script.play(script.make_env(args), agent, args, None, status)
    assert [len(rewards) for rewards in played] == [6]
    out = capsys.readouterr().out
    assert "evaluation: step" not in out
    assert out.count("evaluation of 1 episodes") > 1
    assert (
        out.count("whose episodes did not end, at 6 steps") == 2
    )  # the run, and then `play` by itself


def test_a_resume_is_written_down(script, somewhere):
    """`args.json` has the flags of the last start."""
    args = small_args(script, "Walk", run_dir="here")
    directory = script.train(args)["run_dir"]
    script.main(["--resume", directory, "--total-timesteps", "192"])
    assert '"total_timesteps": 192' in Path(directory, "args.json").read_text()


# ------------------------------------------------------------------------------------ what is said
def test_a_checkpoint_of_the_sibling_is_named(script, somewhere, capsys):
    """Not only refused."""
    directory = script.train(small_args(script, "Walk"))["run_dir"]
    path = Path(directory, "checkpoint.pt")
    torch.save(torch.load(path, weights_only=True) | {"script": "the_other"}, path)
    for command in ("--resume", "--evaluate", "--init-from"):
        code, _, err = run_main(script, capsys, [command, directory])
        assert code == 2
        assert err.count("\n") == 1
        assert f"{path}: the_other.py wrote it, and it alone can read it" in err


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (0.0, "0.0"),
        (-231.04, "-231.0"),
        (0.1, "0.1"),
        (0.002, "0.002"),
        (-0.0961, "-0.0961"),
        (9999999, "9999999.0"),
        (1e30, "1e+30"),
    ],
)
def test_numbers_of_any_size_are_told(script, number, told):
    """0.0 would say that no reward came."""
    assert script.figure(number) == told


def test_a_task_that_needs_arguments_gets_advice(script):
    """Python's words for what is missing, of either kind."""
    for lacks in ("required positional argument: 'data'", "required keyword-only argument: 'data'"):
        error = TypeError(f"Mine.__init__() missing 1 {lacks}")
        assert "register(..., kwargs={...})" in script.advice(error, small_args(script, "Walk"))


def test_another_script_than_the_one_that_trained_is_told(script, somewhere, capsys):
    """In an evaluation and in a resume. Former sources of a run are no others."""
    directory = Path(script.train(small_args(script, "Walk"))["run_dir"])
    for command in (["--evaluate"], ["--resume", "--total-timesteps", "192"]):
        first, *more = command
        (copy,) = directory.glob("*.py")
        copy.with_stem(f"{copy.stem}-until-step-7").write_text("a former one")
        line = [first, str(directory), *more]
        assert run_main(script, capsys, ["--evaluate", str(directory)])[1].count("note: ") == 0
        copy.write_text("another one")
        _, out, _ = run_main(script, capsys, line)
        assert out.count(f"note: {copy}, which trained the run, differs from this script\n") == 1
        copy.write_bytes(Path(script.__file__).read_bytes())
        copy.with_stem(f"{copy.stem}-until-step-7").unlink()


def test_a_run_whose_task_is_gone_is_a_run_all_the_same(script, somewhere, capsys):
    """The missing package is named, not the checkpoint."""
    directory = script.train(small_args(script, "Walk"))["run_dir"]
    path = Path(directory, "checkpoint.pt")
    saved = torch.load(path, weights_only=True)
    torch.save(saved | {"args": saved["args"] | {"env_id": "nowhere:Walk-v0"}}, path)
    for command in ("--resume", "--evaluate"):
        code, _, err = run_main(script, capsys, [command, directory])
        assert code == 2
        assert "--env-id nowhere:Walk-v0" in err
        assert "no run or checkpoint" not in err


@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        ({"RANK": "1"}, 0, ""),
        ({"RANK": "", "WORLD_SIZE": ""}, 0, ""),
        ({"RANK": "0", "WORLD_SIZE": "2"}, 2, "error: WORLD_SIZE=2: is set without a launcher"),
    ],
)
@pytest.mark.slow
def test_variables_of_a_scheduler(tmp_path, variables, code, said):
    """RANK without a launcher, or empty, is one process; a number of processes needs torchrun."""
    import distributional_ppo_categorical as script

    flags = "--total-timesteps 512 --eval-episodes 0 --save-envs never"
    program = [sys.executable, script.__file__, *flags.split()]
    environment = {name: x for name, x in os.environ.items() if name != "MASTER_ADDR"} | variables
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_several_processes_need_a_launcher(script, monkeypatch, capsys):
    """It sets an address at which they meet, and their numbers."""
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(script.UsageError, match="without a launcher"):
        script.Args()
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    code, out, err = run_main(script, capsys, [])
    assert (code, out) == (2, "")
    assert err.startswith("error: WORLD_SIZE=2: is set without a launcher")


# ------------------------------------------------------------------------------ files and folders
@pytest.mark.parametrize("flag", ["--run-dir", "--resume", "--evaluate", "--init-from"])
def test_the_home_of_nobody_costs_one_line(script, capsys, flag):
    """`~nobody-here/runs`, which the shell leaves as it is."""
    code, _, err = run_main(script, capsys, [flag, "~nobody-here/runs"])
    assert code == 2
    assert err.count("\n") == 1
    assert "~nobody-here/runs" in err


def test_a_home_directory_is_found(script, monkeypatch, tmp_path):
    """`--run-dir=~/runs`, which no shell expands."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    args = small_args(script, "Walk", run_dir="~/runs", total_timesteps=48)
    directory = Path(script.train(args)["run_dir"])
    assert directory.parent == tmp_path / "home" / "runs"
    assert not Path("~").exists()


def test_a_folder_with_quotes_runs_no_command(script, tmp_path):
    """The commit is asked for without a shell; where there is no repository it is empty."""
    folder = tmp_path / "it's $(touch crafted)"
    folder.mkdir()
    assert script.commit_of(folder) == ""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    assert len(script.commit_of(folder)) == 40
    assert not Path("crafted").exists()


def test_git_may_write_what_is_no_text(script, monkeypatch, tmp_path):
    """Its messages have the bytes of names of folders, which need not be those of the locale."""
    git = tmp_path / "git"
    git.write_bytes(b"#!/bin/sh\nprintf 'dubious: r\\351pertoire' >&2\nexit 128\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert script.commit_of(tmp_path) == ""


def test_a_source_in_another_encoding_is_copied(script, monkeypatch, tmp_path):
    """Byte by byte: a comment in Latin-1 must not end a run before it starts."""
    source = tmp_path / "mine.py"
    source.write_bytes(Path(script.__file__).read_bytes() + b"# caf\xe9\n")
    monkeypatch.setattr(script, "__file__", str(source))
    args = small_args(script, "Walk", run_dir=str(tmp_path / "runs"), total_timesteps=48)
    copy = Path(script.train(args)["run_dir"]) / "mine.py"
    assert copy.read_bytes() == source.read_bytes()


def test_a_run_without_a_checkpoint_is_no_missing_file(script, somewhere, capsys):
    """It was killed too early: the line says so."""
    directory = script.make_run_dir(small_args(script, "Walk", run_dir="here"))
    code, _, err = run_main(script, capsys, ["--resume", str(directory)])
    assert code == 2
    assert "no checkpoint was saved yet; start anew" in err


def test_a_file_that_a_run_lacks_is_told_with_those_it_has(script, somewhere, capsys):
    """Without evaluations during the run there is no best.pt."""
    directory = script.train(small_args(script, "Walk", total_timesteps=48))["run_dir"]
    code, _, err = run_main(script, capsys, ["--evaluate", f"{directory}/best.pt"])
    assert code == 2
    assert "best.pt: no run or checkpoint of this script: it does not exist; there is " in err
    assert err.endswith("there is checkpoint.pt\n")


@pytest.mark.slow
def test_a_module_may_lie_in_the_working_directory(tmp_path):
    """And the script elsewhere."""
    import distributional_ppo_categorical as script

    (tmp_path / "mine.py").write_text(
        "import gymnasium as gym\ngym.register('Mine-v0', lambda: gym.make('CartPole-v1'))\n"
    )
    flags = "--env-id mine:Mine-v0 --total-timesteps 512 --eval-episodes 1 --save-envs never"
    program = [sys.executable, script.__file__, *flags.split()]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"to continue: python {script.__file__} --resume ")  # it can be pasted


def test_a_masked_entry_is_zero_whatever_the_task_shows(script):
    """A sensor that is broken may be masked: 0 times infinity would be no number."""
    space = gym.spaces.Box(-np.inf, np.inf, (3,))
    see, _ = script.vector_view(space, script.Args(masked_obs=(2,)), (0,))
    seen = see(np.float32([np.inf, 1.5, np.nan]))
    assert (seen.tolist(), seen.dtype) == ([0, 1.5, 0], np.float32)


def test_older_robots_have_no_velocities_where_newer_ones_do(script, monkeypatch):
    """The user typed no mask, so the line speaks of the task."""
    monkeypatch.setitem(script.VELOCITIES, "CartPoleNoVel", (1, 4))
    with pytest.raises(script.UsageError, match="--env-id CartPoleNoVel-v1: it shows 4 entries"):
        script.make_env(script.Args(env_id="CartPoleNoVel-v1"))


def test_a_fault_of_a_reset_in_another_process_is_told(script):
    """As one of `step` is: an error that can be pickled."""

    class Bad:
        def reset(self, **options):
            raise Stuck("no grip")

    group = script.Group.__new__(script.Group)
    group.envs = Bad()
    with pytest.raises(RuntimeError, match="no grip") as found:
        group.reset(seed=[1])
    assert type(found.value) is RuntimeError


def test_a_process_that_cannot_make_its_task_says_which_it_is(script, monkeypatch):
    """And so does one whose tasks differ. An error about something else stays as it is."""

    def end(error):
        def raise_it(*inputs):
            raise error

        return raise_it

    args = small_args(script, "Walk", async_envs=True)
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    for error in (EOFError(), RuntimeError("Some environments have an action space different")):
        monkeypatch.setattr(script, "EnvsInProcesses", end(error))
        with pytest.raises(script.UsageError) as found:
            script.make_envs(args)
        assert found.value.__notes__ == ["in process 0"]
    early = RuntimeError("An attempt has been made to start a new process before")
    monkeypatch.setattr(script, "EnvsInProcesses", end(early))
    with pytest.raises(RuntimeError, match="An attempt"):
        script.make_envs(args)


def test_loading_and_evaluating_leave_nothing_open(script, somewhere, monkeypatch, capsys):
    """The simulator can be open once."""
    monkeypatch.setattr(Single, "alive", [])
    flags = {"num_envs": 1, "num_minibatches": 1, "num_steps": 24, "eval_episodes": 0}
    directory = script.train(task(script, "Single", **flags))["run_dir"]
    agent, args = script.load_agent(directory)
    assert Single.alive == []
    script.evaluate(agent, replace(args, eval_episodes=1))
    assert Single.alive == []
    line = ["--evaluate", directory, "--eval-episodes", "1"]
    assert run_main(script, capsys, line)[0] == 0
    assert Single.alive == []


def test_a_run_in_the_home_directory_is_found(script, monkeypatch, tmp_path, capsys):
    """`--resume=~/runs/x`: no shell expands it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    args = small_args(script, "Walk", run_dir="~/runs", total_timesteps=48)
    there = f"~/runs/{Path(script.train(args)['run_dir']).name}"
    lines = (["--resume", there, "--total-timesteps", "96"], [*words(args), "--init-from", there])
    for line in lines:
        code, _, err = run_main(script, capsys, line)
        assert code == 0, err


def test_settings_of_a_task_that_fails_are_not_the_programs(script, monkeypatch):
    """It sets another default dtype and raises."""

    def fail():
        torch.set_default_dtype(torch.float64)
        raise ValueError("it")

    monkeypatch.setattr(script.Checked, "tasks_settings", {})
    try:
        with pytest.raises(ValueError, match="it"):
            script.Checked.ask("mine", fail)
        assert torch.get_default_dtype() == torch.float32
        assert script.Checked.tasks_settings["mine"][0] == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_machine_may_have_no_git(script, monkeypatch, tmp_path):
    """Then no commit is told, and the run goes on."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script.commit_of(tmp_path) == ""
    args = small_args(script, "Walk", run_dir=str(tmp_path / "runs"))
    assert '"commit": ""' in (script.make_run_dir(args) / "args.json").read_text()


@pytest.mark.parametrize(
    ("end", "told"), [("os.kill(os.getpid(), 9)", "exit -9"), ("os._exit(3)", "exit 3")]
)
def test_another_process_that_ends_without_a_word(script, monkeypatch, end, told):
    """As where a simulator in C crashes."""
    monkeypatch.setattr(script, "TRIAL_PROGRAM", f"import os; {end}")
    assert script.fault_of_copies(b"") == f"another process could not read them back: {told}"


@pytest.mark.parametrize("kind", [EOFError, BrokenPipeError, ConnectionResetError])
def test_broken_pipes_are_processes_that_ended(script, monkeypatch, kind):
    """In every call. Where a task itself raises one, it is no such end."""

    def gone(*_, **options):
        raise kind("it")

    envs = object.__new__(script.EnvsInProcesses)
    envs.size = 1
    envs.groups = SimpleNamespace(reset=gone, step=gone, close=gone, processes=[])
    for call in (partial(envs.reset, seed=[1]), partial(envs.step, np.zeros((1, 1)))):
        with pytest.raises(RuntimeError, match="a process of --async-envs ended"):
            call()
    envs.close_extras()
    with pytest.raises(RuntimeError, match=kind.__name__), script.faults_that_travel():
        gone()
    monkeypatch.setattr(script, "EnvsInProcesses", gone)
    with pytest.raises(script.UsageError, match="a process that makes the task ended"):
        script.make_envs(small_args(script, "Walk", async_envs=True))


def test_a_refusal_in_another_process_is_one_that_can_travel(script, monkeypatch):
    """A class of the program itself could not."""
    layer = script.make_env(small_args(script, "Walk")).env
    assert type(layer.refusal("it")) is script.UsageError
    monkeypatch.setattr(script.multiprocessing, "parent_process", object)
    assert type(layer.refusal("it")) is script.UsageError  # a sweep's own process
    monkeypatch.setattr(script.Checked, "in_other_process", True)
    assert type(layer.refusal("it")) is ValueError


def test_processes_end_where_nothing_can_be_evaluated(script, monkeypatch):
    """They were started first. Another remedy than that of the fault is not named."""

    def fail(args):
        raise script.UsageError("--capture-video: no screen")

    closed = []
    monkeypatch.setattr(script, "make_envs", lambda args: "processes")
    monkeypatch.setattr(script, "make_eval_env", fail)
    monkeypatch.setattr(script, "close_quietly", closed.append)
    with pytest.raises(script.UsageError, match=r"^--capture-video: no screen$"):
        script.open_environments(task(script, "Display", async_envs=True))
    assert closed == ["processes"]


def test_a_task_without_actions_is_told_so(script, monkeypatch):
    """Its observations are in order."""
    seen = gym.spaces.Box(0, 1, (1,))
    monkeypatch.setattr(Spaceless, "observation_space", seen, raising=False)
    with pytest.raises(script.UsageError, match="its action_space is None of builtins; it must"):
        script.make_env(task(script, "Spaceless"))


@pytest.mark.parametrize("bad", [np.inf, -np.inf])
def test_nobody_acts_on_infinity(script, bad):
    """In one entry of the second row."""
    agent = make_agent(script, small_args(script, "VectorBox"))
    rows = np.zeros((2, 4), np.float32)
    rows[1, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        act(agent, rows)


def test_a_box_of_booleans_holds_whole_numbers(script):
    """They become bytes, so 7 is one and 0.5 is none."""
    box = gym.spaces.Box(0, 1, (2,), bool)
    found = script.misfit(box, np.array([0.5, 1]))
    assert "has numbers from 0.5 to 1.0 of float64" in found
    assert script.misfit(box, np.array([0, 7])) == ""


class Contiguous(Rude):
    """Bytes, channels first, in one buffer that it shows and draws as it is."""

    observation_space = gym.spaces.Box(0, 255, (3, 6, 5), np.uint8)

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.buffer = np.zeros((3, 6, 5), np.uint8)

    def reset(self, *, seed=None, options=None):
        """As it is."""
        super().reset(seed=seed, options=options)
        return self.buffer, {}

    def step(self, action):
        """As it is."""
        _, *facts = super().step(action)
        return self.buffer, *facts

    def render(self):
        """The same buffer."""
        return self.buffer


gym.register("Contiguous-v0", Contiguous)


def test_images_and_frames_are_copies_where_no_axis_moves(script, somewhere):
    """One buffer for all: the successor at the limit shows 5, what comes next 50, and frames 50, 1,
    2, 3."""
    run = make_run(script, "", env_id="Contiguous-v0")
    rollout = roll(run)
    assert (rollout.next_obs[4] == 5).all()
    assert (rollout.obs[5] == 50).all()
    env = script.make_env(run.args, render_mode="rgb_array")
    env.reset(seed=0)
    frames = [env.render()]
    for _ in range(3):
        env.step(0)
        frames.append(env.render())
    assert [int(frame.mean()) for frame in frames] == [50, 1, 2, 3]


def test_a_renderer_that_exits_is_a_fault(script, monkeypatch):
    """Else the run would end with its code, 0 here, as if all were well."""
    env = script.make_env(small_args(script, "Walk"))
    env.reset(seed=0)
    monkeypatch.setattr(Walk, "render", lambda self: sys.exit(0), raising=False)
    with pytest.raises(RuntimeError, match=r"^the task called exit\(0\)$"):
        env.render()


LEVELS = """
import gymnasium as gym

def make(level="soft"):
    try:
        return {}[level]
    except KeyError:
        raise ValueError("level must be easy or hard") %s

gym.register("Levels-v0", make)
"""


@pytest.mark.parametrize("end", ["", "from None"])
def test_a_task_s_own_message_is_told(script, tmp_path, monkeypatch, capsys, end):
    """Not the fault that led to it, which the task has dealt with."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"levels_{len(end)}.py").write_text(LEVELS % end)
    line = ["--env-id", f"levels_{len(end)}:Levels-v0", "--run-dir", str(tmp_path)]
    code, _, err = run_main(script, capsys, line)
    assert code == 2
    assert "ValueError: level must be easy or hard (" in err
    assert "KeyError" not in err


def test_a_stack_of_bytes_is_told_what_to_do(script):
    """The frames stand on an axis of their own."""
    text = script.unfit_part(gym.spaces.Box(0, 255, (4, 84, 84, 3), np.uint8))
    assert text.endswith("a stack of images; move the stack into the channels")
    text = script.unfit_part(gym.spaces.Dict(eye=gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)))
    assert "counts as an image" in text
    assert text.endswith("not joined with other parts; wrap the task to give it alone")
    text = script.unfit_part(gym.spaces.Dict(image_caption=gym.spaces.Text(8)))
    assert text.endswith("no place in a vector; wrap the task in a module of yours, module:id")
    assert script.unfit_part(gym.spaces.Box(0, 255, (64,), np.uint8)) == ""
