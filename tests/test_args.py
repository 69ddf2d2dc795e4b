"""Flags: derived sizes, bad input, help."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_type_hints

import numpy as np
import pytest
import torch
from command import run_main, undisturbed, words
from conftest import ONE_SCRIPT, each_of, with_both_scripts
from helpers import small_args

script = each_of(ONE_SCRIPT)  # but for what differs between them

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
BAD = [
    ("--norm-obs False", "--norm-obs False", "--no-norm-obs off"),
    ("--cuda=true", "--cuda true", "takes no value; --cuda turns it on"),
    ("--anneal_lr 0", "--anneal_lr 0", "--no-anneal-lr off"),
    ("--env-id nowhere:Mine-v0", "nowhere:Mine-v0", "nowhere is looked for in "),
    ("--num-envs 0", "num-envs 0", "must be finite and >=1"),
    ("--num-steps -4", "num-steps -4", "must be finite and >=1"),
    ("--torch-threads 0", "torch-threads 0", "must be finite and >=1"),
    ("--checkpoint-every -1", "checkpoint-every -1", "must be finite and >=0"),
    ("--hidden-size 0", "hidden-size 0", "must be finite and >=1"),
    ("--num-minibatches 0", "num-minibatches 0", "must be finite and >=1"),
    ("--update-epochs 0", "update-epochs 0", "must be finite and >=1"),
    ("--seed -1", "seed -1", "must be finite and in [0, 4e+09]"),
    ("--eval-every -1", "eval-every -1", "must be finite and >=0"),
    ("--ent-coef -0.1", "ent-coef -0.1", "must be finite and >=0"),
    ("--ent-coef-final -0.1", "ent-coef-final -0.1", "must be finite and >=0"),
    ("--min-entropy-penalty -1", "min-entropy-penalty", "must be finite and >=0"),
    ("--min-entropy nan", "min-entropy nan", "finite"),
    ("--critic-learning-rate 0", "critic-learning-rate 0.0", "must be finite and >0"),
    ("--norm-adv-memory -1", "norm-adv-memory -1", "must be finite and >=0"),
    ("--norm-returns-memory 0", "norm-returns-memory 0", "must be finite and >=1"),
    ("--value-from mean", "value-from", "mean_head"),
    ("--learning-rate 0", "learning-rate 0.0", "trains nothing without --critic-learning-rate"),
    ("--learning-rate -1", "learning-rate -1.0", "must be finite and >=0"),
    ("--learning-rate nan", "learning-rate nan", "must be finite and >=0"),
    ("--clip-coef 0", "clip-coef 0.0", "must be finite and >0"),
    ("--max-grad-norm inf", "max-grad-norm inf", "finite"),
    ("--target-kl 0", "target-kl 0.0", "must be finite and >0"),
    ("--vf-clip-coef 0", "vf-clip-coef 0.0", "must be finite and >0"),
    ("--checkpoint-every -1", "checkpoint-every -1", "must be finite and >=0"),
    ("--cvar-weight 1.5", "cvar-weight 1.5", "[0, 1]"),
    ("--value-target monte_carlo", "value-target", "sr_lambda"),
    ("--gamma 1.01", "gamma 1.01", "[0, 1]"),
    ("--gae-lambda -0.5", "gae-lambda -0.5", "[0, 1]"),
    ("--cvar-alpha 0", "cvar-alpha 0", "[0.001, 1]"),
    # CartPole has two actions: ln 2 = 0.6931
    ("--env-id CartPole-v1 --min-entropy 0.7 --min-entropy-penalty 1", "min-entropy 0.7", "0.693"),
    # a Gaussian of one float and the std e^2: 0.5 ln(2 pi e) + 2 = 3.4189
    ("--env-id Pendulum-v1 --min-entropy 3.5 --min-entropy-penalty 1", "min-entropy 3.5", "3.419"),
    # nothing is below the entropy of a certain choice, 0, or of the std e^-5: 1.4189 - 5
    (
        "--env-id CartPole-v1 --min-entropy-penalty 1",
        "min-entropy 0.0",
        "above 0.000, so this floor",
    ),
    ("--env-id Pendulum-v1 --min-entropy -3.6 --min-entropy-penalty 1", "has no effect", "-3.581"),
    ("--log-std-init 3", "log-std-init 3", "[-5, 2]"),
    ("--num-envs 1 --num-steps 1", "num-steps 1", "needs 2 steps"),
    ("--total-timesteps 100", "total-timesteps 100", "rollout"),
    ("--num-minibatches 3", "num-minibatches 3", "divide"),
    pytest.param("--cuda", "cuda", "no GPU", marks=NO_GPU),
    ("--num-critics 3", "num-critics", "1"),
    ("--twin-reduce max", "twin-reduce", "'min', 'mean'"),
    ("--env-id CartPol-v1", "CartPol", "CartPole"),
    ("--env-id no_such_module:Task-v0", "no_such_module", "module"),
    ("--masked-obs 4", "masked-obs 4", "0..3"),
    ("--masked-obs -1", "masked-obs -1", "0..3"),
    ("--env-id probes:GraphObservation-v0", "GraphObservation", "observation is Graph"),
    ("--env-id probes:TextObservation-v0", "TextObs", "observation['mission'] is Text"),
    ("--env-id probes:WordsObservation-v0", "WordsObs", "observation['mission'] is"),
    ("--env-id probes:StackObservation-v0", "StackObs", "observation is Box(0, 255, (4, 8, 8, 3)"),
    ("--env-id probes:SequenceObservation-v0", "Sequence", "observation[1] is Sequence"),
    ("--env-id probes:CameraObservation-v0", "wrap the task", "observation[1]['camera'] is Box"),
    ("--env-id probes:ImageBox-v0 --masked-obs 1", "masked-obs", "shows images"),
    ("--env-id ale:ALE/Pong-v5", "ale:ALE/Pong-v5", "No module named 'ale'"),
    ("--env-id HumanoidNoVel-v5", "HumanoidNoVel", "SwimmerNoVel; hide others by --masked-obs"),
    ("--env-id mine.py:Nothing-v0", "mine.py:Nothing-v0", "Name the module alone, mine:Nothing-v0"),
    ("--env-id sub/mine:Nothing-v0", "sub/mine:Nothing-v0", "alone, mine:Nothing-v0, and run in"),
    (r"--env-id C:\sub\mine.py:Nothing-v0", "Nothing-v0", "Name the module alone, mine:Nothing-v0"),
    ("--env-id Nothing-v0", "Nothing-v0", "A task of your own is named module:id"),
    ("--init-from nowhere", "nowhere", "no run or checkpoint"),
    ("--env-id probes:Walk-v0 --capture-video", "capture-video", "renders rgb_array"),
    ("--env-id probes:TextAction-v0", "actions are Text", "must be one or more floats (Box), Disc"),
    ("--gama 0.9", "gama", "gamma"),
]
BAD_LSTM = [
    ("--lstm-hidden-size 0", "lstm-hidden-size 0", "must be finite and >=1"),
    ("--seq-len -1", "seq-len -1", "must be finite and >=0"),
    ("--seq-len 48", "seq-len 48", "divide"),
    ("--num-quantiles 0", "num-quantiles 0", "must be finite and >=1"),
    ("--kappa -0.5", "kappa -0.5", "must be finite and >=0"),
    # 1 / 32 = 0.03125, and 1 / 51 = 0.01961, rounded up
    ("--cvar-weight 0.5 --cvar-alpha 0.03", "cvar-alpha 0.03", "take at least 0.0313"),
    ("--preset averse --cvar-alpha 0.01", "cvar-alpha 0.01", "take at least 0.0197"),
    (
        "--num-quantiles 1 --cvar-weight 0.5",
        "cvar-alpha 0.05",
        "one of 1 quantiles; take more --num",
    ),
    ("--vf-clip hard", "vf-clip", "mean_only"),
]


def check_refused(script, capsys, tmp_path, line, names):
    """Exit code 2, the names on stderr, no traceback, nothing written."""
    with pytest.raises(SystemExit) as stop:
        script.main(["--run-dir", str(tmp_path / "runs"), *line.split()])
    assert stop.value.code == 2
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    for name in names:
        assert name in text, text
    assert "Traceback" not in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("line", "flag", "bound"), BAD)
def test_bad_input_costs_one_line(script, capsys, tmp_path, line, flag, bound):
    """Flag and value, then the bound or the remedy."""
    check_refused(script, capsys, tmp_path, line, (flag, bound))


@pytest.mark.parametrize(("line", "flag", "bound"), BAD_LSTM)
def test_bad_input_of_the_lstm_script(capsys, tmp_path, line, flag, bound):
    """Flags that the recurrent quantile script has alone."""
    import distributional_ppo_lstm as script

    check_refused(script, capsys, tmp_path, line, (flag, bound))


def test_without_a_compiler(monkeypatch, capsys, tmp_path):
    """Torch tells it in its own ways, some pages long, when something is first compiled."""
    import distributional_ppo_categorical as script

    def find_nothing(function):
        def fail(x):
            raise RuntimeError("InvalidCxxCompiler: no working C++ compiler found")

        return fail

    monkeypatch.setattr(torch, "compile", find_nothing)
    check_refused(script, capsys, tmp_path, "--compile", ("--compile", "g++", "leave it out"))


WRONG = [  # from Python, where no parser stands ahead of the flags
    ("twin_reduce", "maen", "must be one of min, mean"),
    ("value_target", "sr-lambda", "must be one of lambda_return, sr_lambda"),
    ("value_from", "mean", "must be one of distribution, mean_head"),
    ("activation", None, "must be one of tanh, relu"),
    ("vf_clip", "mean", "must be one of none,"),
    ("num_critics", 3, "must be one of 1, 2"),
    ("gamma", None, "must be float"),
    ("gamma", "0.9", "must be float"),
    ("learning_rate", True, "must be float"),
    ("learning_rate", torch.tensor(1e-3), "must be float"),
    ("target_kl", "x", "must be float | None"),
    ("ent_coef_final", False, "must be float | None"),
    ("num_envs", 2.5, "must be int"),
    ("num_envs", 8.0, "must be int"),
    ("num_envs", True, "must be int"),
    ("seed", None, "must be int"),
    ("norm_adv_memory", 1.5, "must be int"),
    ("norm_returns_memory", 1.5, "must be int"),
    ("norm_obs", 1, "must be bool"),
    ("cuda", None, "must be bool"),
    ("anneal_lr", "no", "must be bool"),
    ("masked_obs", (0.5,), "must be a tuple of integers"),
    ("masked_obs", (0, True), "must be a tuple of integers"),
    ("masked_obs", 0, "must be a tuple of integers"),
    ("env_id", 3, "must be str"),
    ("run_dir", Path("runs"), "must be str"),
    ("resume", None, "must be str"),
]


@pytest.mark.parametrize(("name", "value", "remedy"), WRONG)
def test_a_wrong_type_or_choice_is_refused_from_python(script, name, value, remedy):
    """Ours: flag, value and what it must be, for every caller, not in the middle of a run."""
    with pytest.raises(script.UsageError) as refusal:
        script.Args(**{name: value})
    flag = name.replace("_", "-")
    assert str(refusal.value).startswith(f"--{flag} {value}: {remedy}")


@pytest.mark.parametrize(("name", "value"), [("num_quantiles", 7.0), ("seq_len", 0.5)])
def test_a_wrong_type_of_a_flag_of_the_lstm_script(name, value):
    """Ours: what one script has alone is looked at like the rest."""
    import distributional_ppo_lstm as script

    with pytest.raises(script.UsageError, match=f"--{name.replace('_', '-')} {value}: must be int"):
        script.Args(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("num_atoms", 51.0), ("target_encoding", "gauss")])
def test_a_wrong_type_of_a_flag_of_the_categorical_script(name, value):
    """Ours: what one script has alone is looked at like the rest."""
    import distributional_ppo_categorical as script

    with pytest.raises(script.UsageError, match=f"--{name.replace('_', '-')} {value}: must be "):
        script.Args(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("ent_coef_final", None, None),
        ("target_kl", None, None),
        ("target_kl", 1, 1.0),
        ("target_kl", np.float64(0.5), 0.5),
        ("ent_coef_final", np.int64(0), 0.0),
        ("learning_rate", 1, 1.0),
        ("learning_rate", np.float32(0.25), 0.25),
        ("gamma", 1, 1.0),
        ("gamma", np.float64(0.9), 0.9),
        ("min_entropy", -2, -2.0),
        ("masked_obs", (), ()),
        ("masked_obs", (0, 2), (0, 2)),
        ("masked_obs", [0, 2], (0, 2)),
        ("masked_obs", [np.int64(3), 1], (3, 1)),
        ("num_critics", 1, 1),
        ("num_critics", np.int32(1), 1),
        ("num_envs", np.int64(6), 6),
        ("seed", np.uint8(7), 7),
        ("norm_obs", False, False),
        ("norm_obs", np.bool_(False), False),
        ("activation", np.str_("tanh"), "tanh"),
        ("norm_adv_memory", 0, 0),
    ],
)
def test_what_is_meant_becomes_plain_python(script, name, value, taken):
    """Ours: an integer for a float, NumPy's numbers, lists; None where the flag may be unset."""
    found = getattr(script.Args(**{name: value}), name)
    assert found == taken
    assert type(found) is type(taken)
    if isinstance(found, tuple):
        assert [type(entry) for entry in found] == [int] * len(taken)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("num_envs", np.float64(8), "int"),
        ("num_envs", np.bool_(True), "int"),
        ("gamma", np.bool_(True), "float"),
        ("norm_obs", np.int64(1), "bool"),
        ("masked_obs", (np.float32(0.5),), "a tuple of integers"),
        ("masked_obs", [True], "a tuple of integers"),
    ],
)
def test_numbers_of_numpy_have_the_types_of_python(script, name, value, kind):
    """Ours: they are held to the same types as Python's."""
    with pytest.raises(script.UsageError, match=f"^--{name.replace('_', '-')} .*: must be {kind}$"):
        script.Args(**{name: value})


def test_a_run_with_numbers_of_numpy(script, tmp_path):
    """Its files hold plain data: the checkpoint is read without pickle, args.json as JSON."""
    numbers = {
        "learning_rate": np.float64(1e-3), "gamma": np.float32(0.5), "num_envs": np.int64(4),
        "norm_adv": np.bool_(True), "target_kl": np.float64(0.5), "masked_obs": [np.int64(0)],
        "seed": np.uint16(3),
    }  # fmt: skip
    plain = {
        "learning_rate": 1e-3, "gamma": 0.5, "num_envs": 4, "norm_adv": True, "target_kl": 0.5,
        "masked_obs": (0,), "seed": 3,
    }  # fmt: skip
    directory = train_tiny(script, tmp_path, **numbers).parent
    told = json.loads((directory / "args.json").read_text())["args"]
    stored = torch.load(directory / "checkpoint.pt", weights_only=True)["args"]
    assert {name: stored[name] for name in plain} == plain
    assert {name: told[name] for name in plain} == plain | {"masked_obs": [0]}
    for name, value in plain.items():
        assert type(stored[name]) is type(value), name
    _, args = script.load_agent(directory)
    assert {name: getattr(args, name) for name in plain} == plain


def test_flags_come_back_from_the_file_of_a_run(script, tmp_path):
    """Args(**json) of what a run tells of itself: the same flags, of the same types."""
    flags = {"masked_obs": (0,), "target_kl": 0.25, "gamma": 1, "ent_coef_final": None}
    directory = train_tiny(script, tmp_path, **flags).parent
    args = script.Args(**json.loads((directory / "args.json").read_text())["args"])
    _, stored = script.load_agent(directory)
    assert args == stored
    for field in dataclasses.fields(args):
        assert type(getattr(args, field.name)) is type(getattr(stored, field.name)), field.name
    assert (args.masked_obs, args.target_kl, args.gamma) == ((0,), 0.25, 1.0)
    assert args.ent_coef_final is None
    assert args.run_dir == str(tmp_path / "made")


@with_both_scripts
def test_the_readme_lists_every_flag(script):
    """In the groups and the order of --help, those of one script alone with its number."""
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    table = text[text.index("| group of `--help` | flags |") :].split("\n\n")[0]
    foreign = "(2)" if "lstm" in script.__name__ else "(1)"
    listed = {}
    for row in table.splitlines()[2:]:
        _, group, cell, _ = row.split("|")
        listed[group.strip().replace(" ", "_")] = names = []
        for text, mark in re.findall(r"`([^`]*)`(\([12]\))?", cell):
            *shared, last = text.split()
            names += shared + [last] * (mark != foreign)
    groups = {
        title: [field.name for field in dataclasses.fields(group)]
        for title, group in script.GROUPS.items()
    }
    assert list(listed.items()) == list(groups.items())
    names = [field.name for field in dataclasses.fields(script.Args)]
    assert sorted(names) == sorted(name for group in groups.values() for name in group)


@with_both_scripts
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gamma", (0.0, 1.0)),
        ("gae_lambda", (0.0, 1.0)),
        ("cvar_alpha", (1e-3, 1.0)),
        ("log_std_init", (-5.0, 2.0)),
        ("ent_coef", (0.0,)),
        ("critic_learning_rate", (None, 1e-5)),
        ("eval_every", (0,)),
        ("checkpoint_every", (0,)),
        ("cvar_weight", (0.0, 1.0)),
        ("dist_coef", (0.0,)),
        ("seed", (0,)),
        ("torch_threads", (1,)),
    ],
)
def test_the_bounds_themselves_are_allowed(script, name, values):
    """Closed ranges are closed."""
    for value in values:
        assert getattr(script.Args(**{name: value}), name) == value


@with_both_scripts
def test_sizes_are_derived(script):
    """batch = envs x steps; rollouts round down."""
    args = small_args(script, "Counter", num_envs=6, num_steps=20, total_timesteps=599)
    assert (args.batch_size, args.num_iterations) == (120, 4)


def test_sizes_follow_a_changed_field(script):
    """Set on the flags themselves, or by `replace`."""
    sizes = {"num_envs": 6, "num_steps": 20, "total_timesteps": 599, "num_minibatches": 1}
    args = small_args(script, "Counter", **sizes)
    args.num_envs = 3
    assert (args.batch_size, args.num_iterations) == (60, 9)
    args.num_steps = 10
    args.total_timesteps = 300
    assert (args.batch_size, args.num_iterations) == (30, 10)
    args = dataclasses.replace(args, num_envs=5)
    assert (args.batch_size, args.num_iterations) == (50, 6)
    assert not args.is_atari
    args.env_id = "ale_py:ALE/Pong-v5"
    assert args.is_atari


@with_both_scripts
def test_a_changed_field_is_looked_at_when_the_run_starts(script, tmp_path):
    """Ours: a value that cannot work is refused then, ahead of anything written."""
    for name, value in (("gamma", 2.0), ("num_minibatches", 5), ("norm_obs", 1)):
        args = small_args(script, "Counter", run_dir=str(tmp_path / "runs"))
        setattr(args, name, value)
        with pytest.raises(script.UsageError, match=f"^--{name.replace('_', '-')} {value}: "):
            script.train(args)
    assert not (tmp_path / "runs").exists()


@with_both_scripts
@pytest.mark.parametrize(
    ("flags", "processes", "said"),
    [
        ({"num_envs": 1, "num_steps": 1, "num_minibatches": 1}, 1, "--num-steps 1: a rollout"),
        ({"total_timesteps": 47}, 1, "--total-timesteps 47: must be at least one rollout"),
        ({"gamma": 10**400}, 1, "--gamma 1000"),
        ({"seed": 10**400}, 1, "--seed 1000"),
        ({}, 3, "--num-envs 4: must be a multiple of the 3 processes"),
        ({"num_minibatches": "all"}, 2, "--num-minibatches"),
    ],
)
def test_sizes_that_do_not_fit(script, monkeypatch, flags, processes, said):
    """Steps of a rollout, rollouts of a run, environments and minibatches of each process."""
    if flags.get("num_minibatches") == "all":  # which would fit one process, but not two
        flags = {"num_minibatches": 4 if "lstm" in script.__name__ else 16}
        small_args(script, "Counter", **flags)
    monkeypatch.setattr(script, "WORLD_SIZE", processes)
    with pytest.raises(script.UsageError) as found:
        small_args(script, "Counter", **flags)
    assert str(found.value).startswith(said)


@with_both_scripts
@pytest.mark.parametrize("line", ["--run-dir=a b", "--exp-name=first try", "--gamma=0.5"])
def test_presets_end_where_another_flag_begins(script, line):
    """Also where its value has a space, which argparse takes for the name of a preset."""
    args = script.parse_args(["--preset", "calibrated", line])
    assert args.preset == ("calibrated",)
    name, value = line.removeprefix("--").replace("-", "_").split("=")
    assert str(getattr(args, name)) == value


def test_the_defaults_are_those_that_were_tuned(script):
    """Those of the algorithm. Rows and tables are of these."""
    recurrent = "lstm" in script.__name__
    expected = {
        "num_envs": 8, "num_steps": 64, "hidden_size": 64, "activation": "relu", "norm_obs": True,
        "log_std_init": 0.0, "learning_rate": 1e-3 if recurrent else 1.5e-3, "anneal_lr": True,
        "gamma": 0.99, "gae_lambda": 0.9 if recurrent else 0.95, "num_minibatches": 2,
        "update_epochs": 8, "norm_adv": True, "norm_adv_memory": 100, "clip_coef": 0.2,
        "ent_coef": 0.0, "ent_coef_final": None, "min_entropy_penalty": 0.0, "max_grad_norm": 0.5,
        "target_kl": None, "critic_learning_rate": None, "num_critics": 2,
        "value_from": "mean_head", "dist_coef": 1.0, "twin_reduce": "min", "norm_returns": True,
        "norm_returns_memory": 10 if recurrent else 100, "vf_clip": "none", "vf_clip_coef": 0.2,
        "min_entropy": 0.0, "value_target": "lambda_return", "cvar_alpha": 0.05, "cvar_weight": 0.0,
        "eval_episodes": 50,
    }  # fmt: skip
    if recurrent:
        expected |= {"lstm_hidden_size": 64, "seq_len": 0, "num_quantiles": 32, "kappa": 0.05}
    else:
        expected |= {"num_atoms": 51, "v_min": -5.0, "v_max": 5.0, "hl_gauss_sigma": 0.75}
        expected |= {"target_encoding": "hl_gauss", "mean_output": "correction"}
    assert {name: getattr(script.Args(), name) for name in expected} == expected


def test_sequence_sizes(monkeypatch):
    """L is seq_len, or the rollout; minibatches divide environments times sequences, those of each
    process."""
    import distributional_ppo_lstm as script

    args = small_args(script, "Counter", num_minibatches=4)  # 4 envs x 1 sequence
    assert args.sequence_length == 12
    args.num_steps = 18
    assert args.sequence_length == 18
    with pytest.raises(script.UsageError, match="num-minibatches 8: must divide the 4 training"):
        small_args(script, "Counter", num_minibatches=8)
    args = small_args(script, "Counter", seq_len=3, num_minibatches=16)  # 4 envs x 4 sequences
    assert args.sequence_length == 3
    with pytest.raises(script.UsageError, match=r"32: must divide the 16 training .* of a rollout"):
        small_args(script, "Counter", seq_len=3, num_minibatches=32)
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    with pytest.raises(script.UsageError, match=r"16: must divide the 8 training .* each process"):
        small_args(script, "Counter", seq_len=3, num_minibatches=16)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(Literal["a", "b"] | None, "a"), (tuple[int, ...] | None, (1, 2)), (list[int], [1])],
)
def test_flags_that_were_added_may_be_of_any_kind(script, kind, value):
    """Python cannot check these. A plain kind is checked beside them."""
    args = SimpleNamespace(mine=value)
    script.check_kind(args, "mine", kind)
    with pytest.raises(script.UsageError, match="must be int"):
        script.check_kind(args, "mine", int)


@pytest.mark.parametrize(
    ("env_id", "missing", "told"),
    [
        ("popgym:popgym-RepeatPreviousEasy-v0", "popgym", " Needed: pip install popgym"),
        (
            "benchmarks.envs:MiniGrid-MemoryS7-OneHot-v0",
            "minigrid",
            " Needed: pip install minigrid",
        ),
        ("benchmarks.envs:MinAtar/Breakout-v1", "minatar", " Needed: pip install MinAtar"),
        (
            "benchmarks.envs:MinAtar/Breakout-v1",
            "benchmarks.envs",
            "benchmarks with our envs.py, be",
        ),
        (
            "benchmarks.envs:MinAtar/Breakout-v1",
            "benchmarks",
            "benchmarks with our envs.py, beside",
        ),
    ],
)
def test_a_package_that_a_preset_needs_is_named(script, monkeypatch, env_id, missing, told):
    """And the file of this repository that two of them need."""
    monkeypatch.setattr(script, "find_spec", lambda name: None if name == missing else name)
    fault = ModuleNotFoundError(f"No module named '{missing}'")
    found = script.advice(fault, script.Args(env_id=env_id))
    assert told in found


# ----------------------------------------------------------------------------- flags without effect
NEEDED = {  # what stands beside a flag: without effect by the first, with one by the second
    "norm_adv_memory": ("--no-norm-adv", "--norm-adv"),
    "min_entropy": ("--min-entropy-penalty 0", "--min-entropy-penalty 0.5"),
    "twin_reduce": ("--num-critics 1", "--num-critics 2"),
    "norm_returns_memory": ("--no-norm-returns", "--norm-returns"),
    "vf_clip_coef": ("--vf-clip none", "--vf-clip mean_only"),
    "cvar_weight": ("--cvar-alpha 1", "--cvar-alpha 0.5"),
    "torch_deterministic": ("--no-cuda", "--cuda"),
    "hl_gauss_sigma": ("--target-encoding two_hot", "--target-encoding hl_gauss"),
    "mean_output": ("--value-from distribution", "--value-from mean_head"),
    "eval_every": ("--eval-episodes 0", "--eval-episodes 5"),
    "eval_sampled": ("--eval-episodes 0", "--eval-episodes 5"),
    "capture_video": ("--eval-episodes 0", "--eval-episodes 5"),
}
OTHERS = {  # a value that is not the default
    "norm_adv_memory": 7,
    "min_entropy": -0.5,
    "twin_reduce": "mean",
    "norm_returns_memory": 7,
    "vf_clip_coef": 0.5,
    "cvar_weight": 0.5,
    "torch_deterministic": False,
    "hl_gauss_sigma": 1.0,
    "mean_output": "value",
    "eval_every": 2,
    "eval_sampled": True,
    "capture_video": True,
}
OF_ACTOR = {  # without effect while the actor does not train, and a value that is not the default
    "clip_coef": 0.01,
    "ent_coef": 0.5,
    "ent_coef_final": 0.1,
    "min_entropy": 0.69,
    "min_entropy_penalty": 0.5,
    "target_kl": 0.5,
    "norm_adv": False,
    "norm_adv_memory": 5,
    "cvar_weight": 0.5,
}


def typed(script, name, form):
    """The flag as it may be typed, and its value: another one than the default, or the default."""
    flag, default = name.replace("_", "-"), script.Args.__dataclass_fields__[name].default
    value = {"other": OTHERS[name], "default": default}[form]
    if isinstance(value, bool):
        return (f"--{name}" if value else f"--no-{flag}"), value
    return (f"--{flag} {value}" if form == "other" else f"--{name}={value}"), value


def extras_of(script, kind):
    """What the annotations of flags hold of a kind, by the flag's name."""
    hints = get_type_hints(script.Args, include_extras=True)
    found = {
        name: [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, kind)]
        for name, hint in hints.items()
    }
    others = (script.ACTOR_ONLY, script.IdleWhile("init_from"))  # they have tests of their own
    found = {name: [x for x in own if x not in others] for name, own in found.items()}
    return {name: extra for name, (extra,) in ((n, x) for n, x in found.items() if x)}


@with_both_scripts
def test_flags_that_need_another_one(script):
    """Each of them is typed in these tests; the flag it needs is one of the script's."""
    needs = extras_of(script, script.IdleWhile)
    of_atoms = {"hl_gauss_sigma", "mean_output"}
    own = of_atoms & script.Args.__dataclass_fields__.keys()
    assert needs.keys() == (NEEDED.keys() - of_atoms) | own
    for name, need in needs.items():
        idle = script.Args(**{need.flag: need.value})
        assert getattr(idle, need.flag) == need.value, name  # a value that the flag can have


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("form", ["other", "default"])
@pytest.mark.parametrize("name", NEEDED)
def test_a_typed_flag_without_effect_is_refused(script, capsys, tmp_path, name, form, order):
    """In any form and order, its default too: one line with both flags and the remedy."""
    if name not in script.Args.__dataclass_fields__:
        pytest.skip("a flag of the other script")
    need = extras_of(script, script.IdleWhile)[name]
    line = [NEEDED[name][0], typed(script, name, form)[0]][::order]
    flag, other = name.replace("_", "-"), need.flag.replace("_", "-")
    parts = [
        f"error: --{flag} ",
        f": has no effect while --{other} is {need.value}; change that, or leave --{flag} out",
    ]
    check_bad(script, capsys, tmp_path, " ".join(line).split(), parts)


@with_both_scripts
def test_flags_of_the_actor_are_idle_while_it_does_not_train(script, capsys, tmp_path, monkeypatch):
    """Each alone is refused by name. All together change no weight, and no statistic but that of
    the advantages, which are the actor's. A KL divergence that rounding makes too large, as in the
    last run, stops nothing."""
    hints = get_type_hints(script.Args, include_extras=True)
    marked = [
        name
        for name, hint in hints.items()
        if script.ACTOR_ONLY in getattr(hint, "__metadata__", ())
    ]
    assert sorted(marked) == sorted(OF_ACTOR)
    frozen = ["--learning-rate", "0", "--critic-learning-rate", "0.01"]
    for name, value in OF_ACTOR.items():
        flag = name.replace("_", "-")
        word = f"--no-{flag}" if value is False else f"--{flag}={value}"
        more = ["--min-entropy-penalty", "0.5"] if name == "min_entropy" else []
        if name == "min_entropy":
            with pytest.raises(
                script.UsageError, match=r"^--min-entropy 0.69: has no effect while"
            ):
                script.parse_args([*frozen, *more, word])
            continue
        parts = [
            f"error: --{flag} {value}: has no effect while --learning-rate is 0.0; change that"
        ]
        check_bad(script, capsys, tmp_path, [*frozen, word], parts)

    weights = []
    for flags in ({}, {**OF_ACTOR}, {"target_kl": 0.5}):
        if flags.get("target_kl") == 0.5:
            for kind in (script.GaussianActions, script.CategoricalActions):
                monkeypatch.setattr(kind, "kl", lambda self, old, new: torch.ones(old.shape[:-2]))
        run_dir = str(tmp_path / "runs")
        flags |= {"learning_rate": 0.0, "critic_learning_rate": 0.01, "run_dir": run_dir}
        args = small_args(script, "Walk", value_target="sr_lambda", num_quantiles=20, **flags)
        agent, _ = script.load_agent(script.train(args)["run_dir"])
        weights.append(agent.state_dict())
    for others in weights[1:]:
        for name, x in weights[0].items():
            assert name.startswith("adv_moments") or torch.equal(x, others[name]), name


@with_both_scripts
@pytest.mark.parametrize("order", [1, -1])
def test_weights_of_a_run_have_a_log_std_of_their_own(script, capsys, tmp_path, order):
    """So the initial one is refused beside --init-from, even if it is the default."""
    line = [["--log-std-init", "0"], ["--init-from", "elsewhere"]][::order]
    parts = ["error: --log-std-init 0.0: has no effect while --init-from is elsewhere; change that"]
    check_bad(script, capsys, tmp_path, [*line[0], *line[1]], parts)


def test_a_system_without_forkserver_steps_in_one_process(script, monkeypatch, capsys, tmp_path):
    """As Windows is."""
    monkeypatch.setattr(script.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    parts = ["error: --async-envs True: this system has no forkserver; leave it out"]
    check_bad(script, capsys, tmp_path, ["--async-envs"], parts)
    args = script.Args(async_envs=True)  # stored runs may be evaluated
    with pytest.raises(script.UsageError, match="start anew with --init-from and --no-async-envs"):
        script.make_envs(replace(args, resume=str(tmp_path)))  # a resume keeps its flags


@pytest.mark.parametrize("flag", ["--resume", "--evaluate", "--init-from"])
def test_a_path_that_no_disk_can_have_costs_one_line(script, capsys, tmp_path, flag):
    """Longer than names may be: the system raises even when it is asked whether it is there."""
    check_bad(script, capsys, tmp_path, [flag, "a" * 300], ["error: ", "aaa"])


def test_processes_of_a_machine_need_a_gpu_each(script, monkeypatch, capsys, tmp_path):
    """Two processes with one GPU are refused, and with two GPUs, or without --cuda, they are not.

    torch would raise "invalid device ordinal" in the second process, and the first would wait.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert script.processes_here() == 1  # left over from a launcher; there is one process
    assert script.parse_args(["--cuda"]).cuda
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    launcher = {"MASTER_ADDR": "here", "MASTER_PORT": "1", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    parts = ["error: --cuda True", "2 processes", "torch sees 1", "fewer processes"]
    check_bad(script, capsys, tmp_path, ["--cuda"], parts)
    script.parse_args([])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert script.parse_args(["--cuda"]).cuda


@pytest.mark.parametrize("form", ["other", "default"])
@pytest.mark.parametrize("name", NEEDED)
def test_a_typed_flag_with_an_effect_is_taken(script, monkeypatch, name, form):
    """With the other flag at another value; and from Python at any."""
    if name not in script.Args.__dataclass_fields__:
        pytest.skip("a flag of the other script")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    need = extras_of(script, script.IdleWhile)[name]
    word, value = typed(script, name, form)
    args = script.parse_args(f"{NEEDED[name][1]} {word}".split())
    assert getattr(args, need.flag) != need.value
    assert getattr(args, name) == value
    idle = script.Args(**{need.flag: need.value, name: value})
    assert (getattr(idle, need.flag), getattr(idle, name)) == (need.value, value)


def test_a_flag_that_is_not_typed_may_be_without_effect(script):
    """Each needed flag alone at its idle value: the other one keeps its default."""
    for name in extras_of(script, script.IdleWhile):
        args = script.parse_args(NEEDED[name][0].split())
        assert getattr(args, name) == script.Args.__dataclass_fields__[name].default


def test_a_stored_flag_is_not_a_typed_one(script, capsys, tmp_path):
    """A run with one that has no effect, made from Python, is evaluated and resumed as it is."""
    flags = {"num_critics": 1, "twin_reduce": "mean", "min_entropy": 0.5, "eval_episodes": 1}
    directory = str(train_tiny(script, tmp_path, **flags).parent)
    for flag in ("--evaluate", "--resume"):
        with undisturbed():
            assert run_main(script, capsys, [flag, directory])[0] == 0


# --------------------------------------------------------------------------------------------- help
def help_text(script, capsys):
    """--help as one line without its boxes, however it is wrapped."""
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    assert stop.value.code == 0
    return " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())


@with_both_scripts
def test_help_explains_every_flag(script, capsys):
    """One line with unit or range for each of the flags."""
    text = help_text(script, capsys)
    assert "--anneal-lr, --no-anneal-lr" in text
    for field in dataclasses.fields(script.Args):
        assert (f"--{field.name.replace('_', '-')}" in text) == field.init, field.name
    for name in script.PRESETS:
        assert f"{name} " in text


def test_an_explanation_is_one_paragraph(script, capsys, monkeypatch):
    """However many lines its docstring has in the source. The screen is as wide as all of it."""
    monkeypatch.setenv("COLUMNS", "600")
    with pytest.raises(SystemExit):
        script.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    ends = (
        "0: always by their own. (default: 100)",
        "whose V is the mean of theirs. (default: min)",
    )
    for begin, end in zip(("Rollouts that the running", "How two critics"), ends):
        assert sum(begin in line and end in line for line in lines) == 1


def test_a_flag_without_an_explanation_does_not_break_the_help(script, monkeypatch, tmp_path):
    """As somebody may add one to a copy of the script."""
    text, left_out = re.subn(r' {4}"""Activation of .+"""\n', "", Path(script.__file__).read_text())
    assert left_out == 1
    copy = tmp_path / "copy.py"
    copy.write_text(text)
    monkeypatch.setattr(script, "__file__", str(copy))
    script.explain_flags()


@pytest.mark.slow
def test_help_that_nobody_reads_to_its_end_is_quiet(script):
    """As in `--help | head`: no traceback, and no complaint of Python's about its last flush."""
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, script.__file__, "--help"]
    done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@with_both_scripts
def test_help_shows_every_range(script, capsys):
    """Right after the flag, in the words in which a value beyond it is refused."""
    text = help_text(script, capsys)
    ranges = extras_of(script, script.Range)
    unbounded = {"min_entropy", "v_min", "v_max"} & script.Args.__dataclass_fields__.keys()
    assert {name for name, allowed in ranges.items() if not str(allowed)} == unbounded
    for name, hint in get_type_hints(script.Args).items():
        flag = f"--{name.replace('_', '-')}"
        numbers = {int, float} & {hint, *get_args(hint)}
        if name not in ranges:  # then it has choices, or `check_sizes` and the task bound it
            assert not numbers or name in ("total_timesteps", "masked_obs"), name
            continue
        (kind,) = numbers
        shown = str(ranges[name])
        if not shown.startswith("["):
            shown = {int: "INT", float: "FLOAT"}[kind] + shown
        if type(None) in get_args(hint):
            shown = f"None|{shown}"
        assert f" {flag} {shown} " in text, name
    assert " --gamma [0, 1] " in text
    assert " --num-envs INT>=1 " in text
    assert str(script.Range(high=5.0)) == "<=5"
    assert script.bounded(int | None, 1).__metadata__[1].metavar == "None|INT>=1"  # an added flag
    assert " --target-kl None|FLOAT>0 " in text


BAD_MORE = [
    ("--num-envs 2.5", "num-envs", "int"),
    ("--num-envs many", "num-envs", "int"),
    ("--num-steps 0", "num-steps 0", ">=1"),
    ("--torch-threads -2", "torch-threads -2", ">=1"),
    ("--eval-episodes -1", "eval-episodes -1", ">=0"),
    ("--checkpoint-every -1", "checkpoint-every -1", ">=0"),
    ("--hidden-size -64", "hidden-size -64", ">=1"),
    ("--seed 1.5", "seed", "int"),
    ("--seed 4294967296", "seed 4294967296", "[0, 4e+09]"),
    ("--total-timesteps 0", "total-timesteps 0", "rollout"),
    ("--total-timesteps -512", "total-timesteps -512", "rollout"),
    ("--learning-rate -1e-3", "learning-rate -0.001", "finite"),
    ("--learning-rate inf", "learning-rate inf", "finite"),
    ("--learning-rate fast", "learning-rate", "float"),
    ("--clip-coef -0.2", "clip-coef -0.2", "finite"),
    ("--clip-coef inf", "clip-coef inf", "finite"),
    ("--max-grad-norm 0", "max-grad-norm 0", "finite"),
    ("--max-grad-norm -1", "max-grad-norm -1", "finite"),
    ("--target-kl -0.01", "target-kl -0.01", "finite"),
    ("--target-kl nan", "target-kl nan", "finite"),
    ("--vf-clip-coef nan", "vf-clip-coef nan", "finite"),  # unused by default: checked all the same
    ("--critic-learning-rate inf", "critic-learning-rate inf", "finite"),
    ("--ent-coef nan", "ent-coef nan", "finite"),
    ("--min-entropy-penalty inf", "min-entropy-penalty inf", "finite"),
    ("--min-entropy -inf", "min-entropy -inf", "finite"),
    ("--gamma nan", "gamma nan", "[0, 1]"),
    ("--gamma -0.1", "gamma -0.1", "[0, 1]"),
    ("--gae-lambda 1.5", "gae-lambda 1.5", "[0, 1]"),
    ("--cvar-alpha 1.5", "cvar-alpha 1.5", "[0.001, 1]"),
    ("--cvar-alpha nan", "cvar-alpha nan", "[0.001, 1]"),
    ("--cvar-alpha 0.0001", "cvar-alpha 0.0001", "[0.001, 1]"),
    ("--cvar-weight -0.1", "cvar-weight -0.1", "[0, 1]"),
    ("--cvar-weight 1.1", "cvar-weight 1.1", "[0, 1]"),
    ("--log-std-init -6", "log-std-init -6", "[-5, 2]"),
    ("--log-std-init nan", "log-std-init nan", "[-5, 2]"),
    ("--num-minibatches -2", "num-minibatches -2", ">=1"),
    ("--num-envs 3 --num-minibatches 5", "num-minibatches 5", "divide"),
    ("--value-target monte_carlo", "value-target", "sr_lambda"),
    ("--activation gelu", "activation", "relu"),
    ("--vf-clip all", "vf-clip", "mean_only"),
    ("--masked-obs 0 9", "masked-obs 9", "0..3"),
    ("--masked-obs first", "masked-obs", "first"),
    ("--env-id CartPole-v99", "CartPole-v99", "CartPole"),
    ("--env-id Pendulun-v1", "Pendulun", "Pendulum"),
    ("--env-id AcrobotNoVel-v1", "AcrobotNoVel", "Acrobot"),
    ("--env-id PendulumNoVelocity-v0", "PendulumNoVelocity", "`PendulumNoVelocity` doesn't"),
    ("--env-id probes:Nothing-v0", "Nothing", "exist"),
    ("--env-id :CartPole-v1", "env-id", ":CartPole-v1"),
    ("--env-id a,b", "env-id", "a,b"),
    ("--env-id probes:FaultyConstruction-v0", "FaultyConstruction", "the simulator broke"),
    ("--env-id probes:Wordless-v0", "Wordless", "NotImplementedError"),
    ("--resume=", "--resume or --evaluate: is empty", "it takes a run directory"),
    ("--evaluate=", "--resume or --evaluate: is empty", "it takes a run directory"),
    ("--resume no/such/run", "no/such/run", "No such file"),
    ("--evaluate no/such/checkpoint.pt", "no/such/checkpoint.pt", "No such file"),
    ("--no-such-flag", "no-such-flag", "help"),
    ("--gamma", "gamma", "Missing value"),
]
BAD_CATEGORICAL = [
    ("--num-atoms 1", "num-atoms 1", ">=2"),
    ("--hl-gauss-sigma 0", "hl-gauss-sigma 0", "[0.1, 100]"),
    ("--hl-gauss-sigma nan", "hl-gauss-sigma nan", "[0.1, 100]"),
    ("--v-min 5", "v-min 5.0", "v_min < v_max"),
    ("--v-min 6 --v-max -6", "v-max -6.0", "v_min < v_max"),
    ("--v-max inf", "v-max inf", "finite"),
    ("--v-min nan", "v-min nan", "finite"),
    ("--target-encoding one_hot", "target-encoding", "two_hot"),
    ("--vf-clip per_quantile", "vf-clip", "mean_only"),
]


def check_bad(script, capsys, tmp_path, line, parts):
    """Exit code 2, a few lines with these parts on stderr, nothing on stdout, nothing written."""
    before = sorted(tmp_path.rglob("*"))
    with undisturbed(), pytest.MonkeyPatch.context() as patch:
        patch.delattr(script, "collect_rollout")  # what is accepted must not train for minutes
        with pytest.raises(SystemExit) as stop:
            script.main(["--run-dir", str(tmp_path / "runs"), *line])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    text = " ".join(err.replace("│", " ").split())
    assert [part for part in parts if part not in text] == [], text
    assert "Traceback" not in text
    assert len(err) < 3000
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("line", "flag", "bound"), BAD_MORE)
def test_more_bad_input_costs_one_line(script, capsys, tmp_path, monkeypatch, line, flag, bound):
    """Flag and value, then the bound or the remedy."""
    monkeypatch.chdir(tmp_path)
    check_bad(script, capsys, tmp_path, line.split(), (flag, bound))


@pytest.mark.parametrize(("line", "flag", "bound"), BAD_CATEGORICAL)
def test_bad_input_of_the_categorical_script(capsys, tmp_path, monkeypatch, line, flag, bound):
    """Flags that the feed-forward script has alone."""
    import distributional_ppo_categorical as script

    monkeypatch.chdir(tmp_path)
    check_bad(script, capsys, tmp_path, line.split(), (flag, bound))


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "LunarLander-v3"])
def test_a_missing_extra_is_named_with_its_install_line(
    script, capsys, tmp_path, monkeypatch, env_id
):
    """pip install of the extra, quoted for any shell."""
    for name in [*sys.modules]:
        if name.startswith(("gymnasium.envs.mujoco", "gymnasium.envs.box2d")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    extra = "mujoco" if "Cheetah" in env_id else "box2d"
    parts = ("--env-id", env_id, "pip install", f"gymnasium[{extra}]")
    check_bad(script, capsys, tmp_path, ["--env-id", env_id], parts)


FOREIGN = {
    "empty": b"",
    "a text": b"import this\n" * 50,
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "a tensor": torch.ones(3),
    "a list": [1, 2],
    "weights": {"model": {"weight": torch.ones(2)}},
    "no flags": {"args": {}, "agent": {}},
    "flags that are none": {"args": None, "agent": {}},
}


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_checkpoints_are_refused(script, capsys, tmp_path, flag, kind):
    """Anything that is not a checkpoint of the script: one line that names the file."""
    path, content = tmp_path / "checkpoint.pt", FOREIGN[kind]
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    check_bad(script, capsys, tmp_path, [flag, str(tmp_path)], (str(path), "script"))


def train_tiny(script, tmp_path, **flags):
    """Path of the checkpoint of a small run."""
    flags = {"total_timesteps": 48, "run_dir": str(tmp_path / "made")} | flags
    args = small_args(script, "Walk", **flags)
    return Path(script.train(args)["run_dir"], "checkpoint.pt")


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_damaged_and_foreign_checkpoints_of_a_run(script, capsys, tmp_path, flag):
    """Cut anywhere, without its weights, with other sizes, with a bad flag, of the sibling."""
    path = train_tiny(script, tmp_path)
    whole, content = path.read_bytes(), torch.load(path, weights_only=True)
    capsys.readouterr()
    for size in (0, 1, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        check_bad(script, capsys, tmp_path, [flag, str(path.parent)], (str(path),))
    weights = dict(content["agent"])
    weights.popitem()
    spoilt = [
        {key: value for key, value in content.items() if key != "agent"},
        content | {"agent": weights},
        content | {"args": content["args"] | {"hidden_size": 7}},
        content | {"args": content["args"] | {"gamma": 2.0}},
        content | {"args": content["args"] | {"num_envs": "four"}},
    ]
    parts = ("no weights", "do not fit", "do not fit", "--gamma 2.0", "--num-envs four")
    for other, part in zip(spoilt, parts, strict=True):
        torch.save(other, path)
        with undisturbed():
            code, _, err = run_main(script, capsys, [flag, str(path.parent)])
        assert (code, err.count("\n")) == (2, 1), err
        assert part in err
    path.write_bytes(whole)
    names = ("distributional_ppo_lstm", "distributional_ppo_categorical")
    (sibling,) = (importlib.import_module(name) for name in names if name != script.__name__)
    check_bad(
        sibling,
        capsys,
        tmp_path,
        [flag, str(path.parent)],
        (f"{script.__name__}.py wrote it", str(path)),
    )


def test_resume_wants_a_run_directory(script, capsys, tmp_path):
    """The checkpoint inside of it names it as well. Another file is not enough to go on."""
    path = train_tiny(script, tmp_path)
    capsys.readouterr()
    args = script.parse_args(["--resume", str(path)])
    script.check_flags(args)
    assert args.resume == str(path.parent)
    args.resume = str(path.with_name("args.json"))
    with pytest.raises(script.UsageError, match="is not a run directory, which has a checkpoint"):
        script.check_flags(args)


def test_counts_of_rollouts_are_no_counts_of_steps(script):
    """As SB3 has them. A run of 960 steps has 20 rollouts of 48, and would never come to 21."""
    small_args(script, "Walk", total_timesteps=960, eval_every=20)
    text = "--eval-every 21: counts rollouts of 48 steps, of which the run has 20; lower it"
    with pytest.raises(script.UsageError, match=text):
        small_args(script, "Walk", total_timesteps=960, eval_every=21)


def test_resume_and_evaluate_exclude_each_other(script, capsys, tmp_path):
    """Either, for a run that both could take."""
    path = str(train_tiny(script, tmp_path).parent)
    capsys.readouterr()
    line = ["--resume", path, "--evaluate", path]
    check_bad(script, capsys, tmp_path, line, ("--evaluate", "excludes --resume"))


# ------------------------------------------------------------------------------------------ presets
def test_presets_apply_from_left_to_right_and_typed_flags_win(script):
    """`averse` over `calibrated`, a typed gamma over both. From Python alike."""
    line = "--preset calibrated averse --gamma 0.5 --cvar-weight 0.3"
    args = script.parse_args(line.split())
    assert args.preset == ("calibrated", "averse")
    assert (args.value_target, args.cvar_alpha) == ("sr_lambda", 0.1)
    assert (args.gamma, args.cvar_weight) == (0.5, 0.3)
    assert args == script.preset_args("calibrated", "averse", gamma=0.5, cvar_weight=0.3)
    assert script.parse_args([]) == script.Args()


def test_presets_may_stand_behind_an_equals_sign(script):
    """tyro takes all values there, so all of them count, and none is taken for its name alone."""
    args = script.parse_args(["--preset=calibrated", "averse", "--gamma", "0.5"])
    assert args == script.preset_args("calibrated", "averse", gamma=0.5)
    assert args.cvar_weight == 0.5
    with pytest.raises(script.UsageError, match="--preset nonsense: is unknown"):
        script.parse_args(["--preset=averse", "nonsense"])


@with_both_scripts
def test_every_preset_makes_a_run(script):
    """Its flags are the script's, differ from the defaults, and are none of the machine's."""
    machine = {*script.MachineArgs.__dataclass_fields__, *script.RunArgs.__dataclass_fields__}
    for name, preset in script.PRESETS.items():
        first = next(iter(script.PRESETS))  # its flags are the defaults
        names = (first, name) if name == "critics" else (name,)
        args = script.preset_args(*names, **{"init_from": "a run"} if name == "critics" else {})
        assert preset.about.endswith(".")
        assert not (machine - {"eval_sampled"}) & preset.flags.keys()
        defaults = script.Args()
        for flag, value in preset.flags.items():
            assert getattr(args, flag) == value
            assert getattr(defaults, flag) != value, (name, flag)


@with_both_scripts
def test_a_preset_is_its_long_line(script):
    """Typed flag by flag it gives the same flags."""
    for name in script.PRESETS.keys() - {"critics"}:  # which needs another run
        typed = replace(script.preset_args(name), preset=())
        args = script.parse_args(["--preset", name, "--seed", "3"])
        assert replace(args, preset=()) == script.parse_args([*words(typed), "--seed", "3"])


@pytest.mark.slow
@with_both_scripts
@pytest.mark.parametrize("name", ["mujoco", "memory", "minigrid", "minatar"])
def test_a_preset_trains_like_its_long_line(script, tmp_path, name):
    """The first iteration is the same bit for bit."""
    if name not in script.PRESETS:
        pytest.skip("a preset of the other script")
    pytest.importorskip({"memory": "popgym"}.get(name, name))
    typed = replace(script.preset_args(name), preset=())
    short = ["--preset", name, "--seed", "3"]
    metrics = []
    for line in (short, [*words(typed), "--seed", "3"]):
        args = script.parse_args(line)
        steps = {"total_timesteps": args.batch_size, "run_dir": str(tmp_path)}
        metrics.append(script.train(replace(args, **steps, save_envs="never", eval_episodes=1)))
    clocks = ("time/", "charts/SPS", "run_dir")
    one, two = ({k: v for k, v in x.items() if not k.startswith(clocks)} for x in metrics)
    assert one == two


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--preset nonsense", "--preset nonsense: is unknown; known are "),
        ("--preset averse averse", "--preset averse: is given twice"),
        (
            "--preset critics atari",
            "--preset atari: is for a task, and stands behind critics; name",
        ),
        (
            "--preset averse --preset calibrated",
            "--preset calibrated: is a second --preset; name all",
        ),
        (
            "--masked-obs 1 --masked_obs=3",
            "--masked-obs 3: is a second --masked-obs; name all entries after one",
        ),
        (
            "--preset critics",
            "error: --preset critics: needs --init-from, the run whose policy acts",
        ),
        ("--preset averse --resume RUN", "--preset averse: a stored run has flags of its own"),
        ("--preset averse --evaluate RUN", "--preset averse: a stored run has flags of its own"),
    ],
)
def test_presets_that_cannot_be(script, capsys, tmp_path, line, named):
    """One line with the name; for an unknown one with those that there are."""
    path = str(train_tiny(script, tmp_path).parent) if "RUN" in line else ""
    capsys.readouterr()
    check_bad(script, capsys, tmp_path, line.replace("RUN", path).split(), (named,))


def test_a_second_task_is_refused(script):
    """It would keep those flags of the first that it has no value for."""
    tasks = [name for name in script.PRESETS if name not in script.PURPOSES]
    for names in (tasks[:2], tasks[1::-1], [tasks[0], "averse", tasks[1]]):
        told = f"--preset {names[-1]}: is for a task, and so is {names[0]}; name one of them"
        with pytest.raises(script.UsageError, match=re.escape(told)):
            script.preset_args(*names)
        with pytest.raises(script.UsageError, match=re.escape(told)):
            script.parse_args(["--preset", *names])


def test_a_run_tells_its_presets(script, tmp_path):
    """`args.json` and the checkpoint name them."""
    steps = {"total_timesteps": 512, "eval_episodes": 1, "save_envs": "never"}
    args = script.preset_args("averse", run_dir=str(tmp_path), **steps)
    directory = Path(script.train(args)["run_dir"])
    assert json.loads((directory / "args.json").read_text())["args"]["preset"] == ["averse"]
    assert script.load_agent(directory)[1] == args


def test_velocities_of_robots_are_hidden(script):
    """The positions of gymnasium's documentation stay, all velocities are zeros, and so are the
    ant's contact forces."""
    pytest.importorskip("mujoco")
    seen = {"Hopper": (5, 11), "HalfCheetah": (8, 17), "Walker2d": (8, 17), "Swimmer": (3, 8)}
    for name, (positions, size) in (seen | {"Ant": (13, 105)}).items():
        env = script.make_env(script.Args(env_id=f"{name}NoVel-v5"))
        obs, _ = env.reset(seed=0)
        env.action_space.seed(0)
        for _ in range(5):
            obs = obs + np.abs(env.step(env.action_space.sample())[0])
        assert obs.shape == (size,)
        assert (obs[positions:] == 0).all()
        inner = env.unwrapped
        skipped = inner.data.qpos.size - positions
        assert len(inner.data.qpos[skipped:]) == positions
        assert (obs[:positions] != 0).all()


def test_velocities_are_hidden_in_the_newest_version(script):
    """Which gymnasium takes for an id without one."""
    env = script.make_env(script.Args(env_id="CartPoleNoVel"))
    obs, _ = env.reset(seed=0)
    assert (obs[[1, 3]] == 0).all()
    assert (obs[[0, 2]] != 0).all()


@with_both_scripts
def test_the_defaults_keep_a_run(script):
    """A run that is killed leaves a checkpoint, and environments that can be read back."""
    expected = {
        "checkpoint_every": 100,
        "save_envs": "proven",
        "eval_every": 0,
        "torch_deterministic": True,
        "torch_threads": 1,
        "seed": 1,
    }
    assert {name: getattr(script.Args(), name) for name in expected} == expected


@with_both_scripts
def test_the_preset_of_atari_is_that_of_cleanrl(script):
    """ppo_atari.py of CleanRL at fe8d8a0, whose network ends in 512 units."""
    expected = {
        "num_envs": 8,
        "num_steps": 128,
        "learning_rate": 2.5e-4,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "num_minibatches": 4,
        "update_epochs": 4,
        "clip_coef": 0.1,
        "ent_coef": 0.01,
        "total_timesteps": 10**7,
        "hidden_size": 512,
    }
    args = script.preset_args("atari")
    assert {name: getattr(args, name) for name in expected} == expected


def test_each_process_takes_the_gpu_of_its_own_number(script, monkeypatch):
    """On the second machine of two: process 3 of 4 is the second one there."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(script, "WORLD_SIZE", 4)
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    flags = {"cuda": True, "num_envs": 8, "num_minibatches": 1}
    with pytest.raises(script.UsageError, match="LOCAL_RANK is not set"):
        script.Args(**flags)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(script, "RANK", 3)
    monkeypatch.setattr(script, "LOCAL_RANK", 1)
    script.set_up_process(script.Args(**flags))
    assert chosen == [1]


def test_names_of_presets_set_no_flags_from_python(script, tmp_path):
    """`train` refuses names that are unknown, and those whose flags nobody has set. A task's own
    id is no flag of a preset. A stored run keeps names that the script knows no more."""
    with pytest.raises(script.UsageError, match="--preset nonsense: is unknown"):
        script.train(script.Args(preset=("nonsense",)))
    task = "acrobot" if "acrobot" in script.PRESETS else "mountaincar_novel"
    env_id = script.PRESETS[task].flags["env_id"]
    for name, flags in (("averse", {}), (task, {"env_id": env_id})):
        text = rf"none of its flags .* preset_args\('{name}'\)"
        with pytest.raises(script.UsageError, match=text):
            script.train(script.Args(preset=(name,), **flags))
    assert script.preset_args("averse", cvar_weight=0.5).cvar_weight == 0.5
    with pytest.raises(script.UsageError, match="--preset critics: needs --init-from"):
        script.train(script.preset_args("critics"))
    names = (next(iter(script.PRESETS)), "critics")
    args = script.preset_args(*names, init_from="a run", learning_rate=0.01)
    with pytest.raises(script.UsageError, match=r"--learning-rate 0\.01: must be 0 with --preset"):
        script.train(args)
    args = small_args(script, "Walk", run_dir=str(tmp_path), total_timesteps=48, eval_episodes=0)
    path = Path(script.train(args)["run_dir"]) / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    content["args"]["preset"] = ("renamed",)
    torch.save(content, path)
    assert script.load_agent(path)[1].preset == ("renamed",)


@with_both_scripts
@pytest.mark.parametrize("by_hand", [False, True])
def test_critics_alone_take_the_flags_of_their_run(script, tmp_path, by_hand):
    """All that learning depends on, then those of the preset, then typed ones. What keeps a run and
    what the machine needs is not taken. Behind another preset nothing is."""
    flags = {"total_timesteps": 48, "gamma": 0.9, "norm_obs": False, "eval_sampled": True}
    flags |= {"eval_episodes": 1, "seed": 7, "log_std_init": -1.0, "twin_reduce": "mean"}
    first = small_args(script, "Walk", run_dir=str(tmp_path), torch_threads=2, **flags)
    found = script.train(first)["run_dir"]
    more = {"update_epochs": 3, "init_from": found}
    if by_hand:
        args = script.preset_args("critics", **more)
    else:
        args = script.parse_args(
            ["--preset", "critics", f"--init_from={found}", "--update-epochs", "3"]
        )
    own = script.PRESETS["critics"].flags | more | {"preset": ("critics",)}
    kept = {*script.MachineArgs.__dataclass_fields__, *script.RunArgs.__dataclass_fields__}
    kept -= {"eval_sampled"}
    before, defaults = vars(first), vars(script.Args())
    for name, value in vars(args).items():
        expected = own.get(name, defaults[name] if name in kept else before[name])
        assert value == expected, name
    assert script.preset_args("calibrated", "critics", init_from=found).gamma == 0.99
    script.train(replace(args, run_dir=str(tmp_path), num_steps=8, num_minibatches=1,
                         total_timesteps=48, eval_episodes=0,
                         **({"seq_len": 8} if "lstm" in script.__name__ else {})))  # fmt: skip


@with_both_scripts
def test_critics_alone_take_the_flags_of_a_run_that_could_not_go_on_here(script, tmp_path):
    """What it had for its own length and machine must fit nothing: it is not taken."""
    args = small_args(script, "Walk", run_dir=str(tmp_path), total_timesteps=48, eval_episodes=0)
    path = Path(script.train(args)["run_dir"]) / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    content["args"] |= {"total_timesteps": 1, "torch_threads": -1, "gamma": 0.8}
    torch.save(content, path)
    with pytest.raises(script.UsageError, match="must be"):
        script.load_agent(path)
    assert script.preset_args("critics", init_from=str(path)).gamma == 0.8


@with_both_scripts
def test_critics_alone_need_a_run_that_is_there(script, capsys):
    """A line, and no traceback."""
    code, _, err = run_main(script, capsys, ["--preset", "critics", "--init-from", "nowhere"])
    assert code == 2
    assert "nowhere" in err
    assert "no run or checkpoint" in err


def test_a_python_without_docstrings_starts(script, monkeypatch):
    """`python -OO` leaves none."""
    monkeypatch.setattr(script, "__doc__", None)
    assert script.parse_args([]) == script.Args()


def test_training_does_not_evaluate(script, tmp_path):
    """`--evaluate` is read by the command line alone."""
    with pytest.raises(script.UsageError, match=r"--evaluate .*in Python use load_agent"):
        script.train(small_args(script, "Walk", evaluate=str(tmp_path)))


def test_atoms_lie_apart():
    """In float32, in which 1e8 and 1e8 + 1 are one number."""
    script = importlib.import_module("distributional_ppo_categorical")
    for low, high in ((5.0, -5.0), (1.0, 1.0), (1e8, 1e8 + 1)):
        with pytest.raises(script.UsageError, match="v_min < v_max"):
            script.ValueDistribution(script.Args(v_min=low, v_max=high))


@with_both_scripts
def test_presets_for_a_purpose_set_what_they_say(script):
    """Their flags by hand."""
    recurrent = "lstm" in script.__name__
    own = (
        {"kappa": 0.0, "num_quantiles": 51}
        if recurrent
        else {"target_encoding": "two_hot", "num_atoms": 201}
    )
    sampled = {"value_target": "sr_lambda", "twin_reduce": "mean"} | own
    assert script.PRESETS["calibrated"].flags == sampled
    assert script.PRESETS["averse"].flags == sampled | {"cvar_alpha": 0.1, "cvar_weight": 0.5}
    assert script.PRESETS["critics"].flags == {
        "total_timesteps": 200_000,
        "num_steps": 1000,
        "num_minibatches": 20,
        "update_epochs": 6,
        "learning_rate": 0.0,
        "critic_learning_rate": 1e-3,
        "gae_lambda": 1.0,
    } | ({"seq_len": 100} if recurrent else {})


def test_the_presets_for_memory_evaluate_samples():
    """Those of popgym and of MiniGrid alone. A game's LSTM has as many units as its other layer."""
    presets = importlib.import_module("distributional_ppo_lstm").PRESETS
    sampled = {name for name in presets if presets[name].flags.get("eval_sampled")}
    assert sampled == {"memory", "minigrid"}
    assert presets["atari"].flags["lstm_hidden_size"] == 128


@with_both_scripts
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gae_lambda", 1.01),
        ("learning_rate", -1e-3),
        ("num_minibatches", 0),
        ("total_timesteps", 0),
        ("hidden_size", 0),
        ("norm_returns_memory", 0),
    ],
)
def test_flags_with_other_defaults_have_the_same_ranges(script, name, value):
    """Ranges of the other flags are the same text in both scripts."""
    with pytest.raises(script.UsageError, match=f"^--{name.replace('_', '-')} {value}: must be"):
        script.Args(**{name: value})
