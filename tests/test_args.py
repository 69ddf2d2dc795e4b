"""Flags: derived sizes, bad input, help."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import pytest
import torch
from helpers import small_args

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
NO_VIDEO = pytest.mark.skipif(find_spec("moviepy") is not None, reason="moviepy is installed")
BAD = [
    ("--num-envs 0", "num-envs 0", "finite and in [1, inf]"),
    ("--num-steps -4", "num-steps -4", "finite and in [1, inf]"),
    ("--torch-threads 0", "torch-threads 0", "finite and in [1, inf]"),
    ("--eval-episodes 0", "eval-episodes 0", "finite and in [1, inf]"),
    ("--hidden-size 0", "hidden-size 0", "finite and in [1, inf]"),
    ("--num-minibatches 0", "num-minibatches 0", "finite and in [1, inf]"),
    ("--update-epochs 0", "update-epochs 0", "finite and in [1, inf]"),
    ("--seed -1", "seed -1", "finite and in [0, inf]"),
    ("--eval-every -1", "eval-every -1", "finite and in [0, inf]"),
    ("--ent-coef -0.1", "ent-coef -0.1", "finite and in [0, inf]"),
    ("--ent-coef-final -0.1", "ent-coef-final -0.1", "finite and in [0, inf]"),
    ("--min-entropy-penalty -1", "min-entropy-penalty", "finite and in [0, inf]"),
    ("--min-entropy nan", "min-entropy nan", "finite"),
    ("--vf-coef -1", "vf-coef -1", "finite and in [0, inf]"),
    ("--learning-rate 0", "learning-rate 0", "finite and in [1e-12, inf]"),
    ("--learning-rate nan", "learning-rate nan", "finite and in [1e-12, inf]"),
    ("--clip-coef 0", "clip-coef 0", "finite and in [1e-12, inf]"),
    ("--max-grad-norm inf", "max-grad-norm inf", "finite"),
    ("--target-kl 0", "target-kl 0", "finite and in [1e-12, inf]"),
    ("--vf-clip-coef 0", "vf-clip-coef 0", "finite and in [1e-12, inf]"),
    ("--checkpoint-every -1", "checkpoint-every -1", "finite and in [0, inf]"),
    ("--cvar-weight 1.5", "cvar-weight 1.5", "[0, 1]"),
    ("--cvar-limit nan", "cvar-limit nan", "finite"),
    ("--cvar-dual-lr 0", "cvar-dual-lr 0", "finite and in [1e-12, inf]"),
    ("--cvar-limit 1 --cvar-weight 0.5", "cvar-limit 1.0", "cvar-weight"),
    ("--cvar-limit 1 --cvar-alpha 1", "cvar-limit 1.0", "cvar-alpha"),
    ("--value-target monte_carlo", "value-target", "sr_lambda"),
    ("--gamma 1.01", "gamma 1.01", "[0, 1]"),
    ("--gae-lambda -0.5", "gae-lambda -0.5", "[0, 1]"),
    ("--cvar-alpha 0", "cvar-alpha 0", "[0.001, 1]"),
    ("--log-std-init 3", "log-std-init 3", "[-5, 2]"),
    ("--num-envs 1 --num-steps 1", "num-envs 1", "at least 2"),
    ("--total-timesteps 100", "total-timesteps 100", "rollout"),
    ("--num-minibatches 3", "num-minibatches 3", "divide"),
    pytest.param("--cuda", "cuda", "no GPU", marks=NO_GPU),
    pytest.param("--capture-video", "capture-video", "pip install moviepy", marks=NO_VIDEO),
    ("--num-critics 3", "num-critics", "1"),
    ("--twin-reduce max", "twin-reduce", "min_quantile"),
    ("--env-id CartPol-v1", "CartPol", "CartPole"),
    ("--env-id no_such_module:Task-v0", "no_such_module", "module"),
    ("--masked-obs 4", "masked-obs 4", "0..3"),
    ("--masked-obs -1", "masked-obs -1", "0..3"),
    ("--env-id probes:GraphObservation-v0", "GraphObservation", "cannot be flattened"),
    ("--env-id probes:TextAction-v0", "Text", "not supported"),
    ("--gama 0.9", "gama", "gamma"),
]
BAD_LSTM = [
    ("--lstm-hidden-size 0", "lstm-hidden-size 0", "finite and in [1, inf]"),
    ("--seq-len -1", "seq-len -1", "finite and in [0, inf]"),
    ("--seq-len 48", "seq-len 48", "divide"),
    ("--num-quantiles 0", "num-quantiles 0", "finite and in [1, inf]"),
    ("--kappa -0.5", "kappa -0.5", "finite and in [0, inf]"),
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


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gamma", (0.0, 1.0)),
        ("gae_lambda", (0.0, 1.0)),
        ("cvar_alpha", (1e-3, 1.0)),
        ("log_std_init", (-5.0, 2.0)),
        ("ent_coef", (0.0,)),
        ("vf_coef", (0.0,)),
        ("eval_every", (0,)),
        ("checkpoint_every", (0,)),
        ("cvar_weight", (0.0, 1.0)),
        ("seed", (0,)),
        ("torch_threads", (1,)),
    ],
)
def test_the_bounds_themselves_are_allowed(script, name, values):
    """Closed ranges are closed."""
    for value in values:
        assert getattr(script.Args(**{name: value}), name) == value


def test_sizes_are_derived_once(script):
    """batch = envs x steps; rollouts round down."""
    args = small_args(script, "Counter", num_envs=6, num_steps=20, total_timesteps=599)
    assert (args.batch_size, args.num_iterations) == (120, 4)


def test_sequence_sizes():
    """chunk_len is seq_len, or the rollout; columns are environments times chunks."""
    import distributional_ppo_lstm as script

    assert small_args(script, "Counter").chunk_len == 12
    args = small_args(script, "Counter", seq_len=3, num_minibatches=16)  # 4 envs x 4 chunks
    assert args.chunk_len == 3


def test_help_explains_every_flag(script, capsys):
    """One line with unit or range for each of the flags."""
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--anneal-lr, --no-anneal-lr" in text
    for field in dataclasses.fields(script.Args):
        assert (f"--{field.name.replace('_', '-')}" in text) == field.init, field.name
