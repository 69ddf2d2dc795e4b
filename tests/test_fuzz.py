"""Random flags: valid ones train, invalid ones give the clean error."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from command import run_main, undisturbed
from probes import ACTIONS, OBSERVATIONS

VALUES = {
    "--seed": ("0", "1", "12345", "4000000000"),
    "--torch-deterministic": ("", None),
    "--exp-name": ("trial", "a b", "x" * 60),
    "--eval-episodes": ("1", "2", "5"),
    "--eval-every": ("0", "1", "7"),
    "--eval-sampled": ("", None),
    "--checkpoint-every": ("0", "1", "2"),
    "--hidden-size": ("1", "5", "16"),
    "--activation": ("tanh", "relu"),
    "--log-std-init": ("-5", "-0.5", "2"),
    "--norm-obs": ("", None),
    "--learning-rate": ("1e-12", "1e-5", "1e-3", "0.05"),
    "--anneal-lr": ("", None),
    "--gamma": ("0", "0.5", "0.99", "1"),
    "--gae-lambda": ("0", "0.5", "0.95", "1"),
    "--update-epochs": ("1", "2", "3"),
    "--norm-adv": ("", None),
    "--norm-adv-memory": ("0", "1", "10"),
    "--norm-returns-memory": ("1", "10", "100"),
    "--clip-coef": ("1e-6", "0.2", "5"),
    "--ent-coef": ("0", "0.01", "1"),
    "--ent-coef-final": ("None", "0", "0.1"),
    "--min-entropy": ("-3", "0", "0.5"),
    "--min-entropy-penalty": ("0", "0.5"),
    "--critic-learning-rate": ("None", "1e-4", "0.1"),
    "--max-grad-norm": ("1e-3", "0.5", "100"),
    "--target-kl": ("None", "1e-6", "0.01", "10"),
    "--num-critics": ("1", "2"),
    "--value-from": ("distribution", "mean_head"),
    "--twin-reduce": ("min", "mean"),
    "--norm-returns": ("", None),
    "--vf-clip-coef": ("1e-3", "0.2", "10"),
    "--value-target": ("lambda_return", "sr_lambda"),
    "--cvar-alpha": ("0.001", "0.05", "0.5", "1"),
    "--cvar-weight": ("0", "0.3", "1"),
}
OWN = {
    "distributional_ppo_lstm": {
        "--lstm-hidden-size": ("1", "3", "12"),
        "--num-quantiles": ("1", "2", "9"),
        "--kappa": ("0", "0.1", "1"),
        "--vf-clip": ("none", "per_quantile", "mean_only", "mean_and_variance"),
    },
    "distributional_ppo_categorical": {
        "--num-atoms": ("2", "3", "21"),
        "--v-min": ("-5", "-0.5"),
        "--v-max": ("0.5", "20"),
        "--target-encoding": ("two_hot", "hl_gauss"),
        "--hl-gauss-sigma": ("0.1", "0.75", "100"),
        "--mean-output": ("correction", "value"),
        "--vf-clip": ("none", "mean_only"),
    },
}
NEEDS = {  # flag: the one it needs, the value without effect, one with an effect ("": the flag)
    "--norm-adv-memory": ("--norm-adv", None, ""),
    "--min-entropy": ("--min-entropy-penalty", "0", "0.5"),
    "--twin-reduce": ("--num-critics", "1", "2"),
    "--norm-returns-memory": ("--norm-returns", None, ""),
    "--vf-clip-coef": ("--vf-clip", "none", "mean_only"),
    "--cvar-weight": ("--cvar-alpha", "1", "0.5"),
    "--torch-deterministic": ("--cuda", None, ""),
    "--hl-gauss-sigma": ("--target-encoding", "two_hot", "hl_gauss"),
    "--mean-output": ("--value-from", "distribution", "mean_head"),
}
IDLE_BY_DEFAULT = {"--min-entropy-penalty", "--vf-clip", "--cuda"}
TASKS = [f"probes:{obs}{action}-v0" for obs in OBSERVATIONS for action in ACTIONS]
TASKS += ["CartPole-v1", "CartPoleNoVel-v1", "Pendulum-v1", "probes:Staggered-v0"]
TASKS += ["probes:Flicker-v0", "probes:QuadrantFloat32Last-v0"]
WRONG = {
    **dict.fromkeys(
        ("--seed", "--eval-every", "--checkpoint-every", "--norm-adv-memory"),
        ("-1", "0.5", "nan", "x"),
    ),
    **dict.fromkeys(
        ("--num-envs", "--num-steps", "--num-minibatches", "--hidden-size", "--update-epochs",
         "--torch-threads"), ("0", "-3", "1.5", "inf", ""),
    ),
    "--eval-episodes": ("-3", "1.5", "inf", ""), "--learning-rate": ("-1", "nan", "inf", "much"),
    **dict.fromkeys(
        ("--clip-coef", "--max-grad-norm", "--target-kl", "--vf-clip-coef"),
        ("0", "-1", "nan", "inf", "-inf", "much"),
    ),
    **dict.fromkeys(("--gamma", "--gae-lambda", "--cvar-weight"), ("-0.01", "1.01", "nan", "inf")),
    **dict.fromkeys(("--ent-coef", "--min-entropy-penalty"), ("-1", "nan", "inf")),
    **dict.fromkeys(
        ("--twin-reduce", "--activation", "--vf-clip", "--value-target", "--value-from"),
        ("", "Mean"),
    ),
    "--cvar-alpha": ("0", "0.0009", "1.1", "nan"), "--log-std-init": ("-5.1", "2.1", "nan"),
    "--env-id": ("", "CartPol", "probes:", "probes:Nothing-v0", "nowhere:CartPole-v1", "../x-v0"),
    "--masked-obs": ("-1", "999", "x"), "--num-critics": ("0", "3"), "--norm": ("1",),
    "--resume": ("nowhere",), "--evaluate": ("nowhere",), "--init-from": ("nowhere",),
    "--capture-video": ("",),  # none of the tasks is rendered without pygame
}  # fmt: skip


def settle(flags, idle):
    """Give each typed flag the one it needs, but for `idle`. What needs a GPU is left out."""
    for flag, (other, without, effective) in NEEDS.items():
        if flag not in flags or flag == idle:
            continue
        if other == "--cuda":
            del flags[flag]
        elif flags.get(other, without if other in IDLE_BY_DEFAULT else "") == without:
            flags[other] = effective


def leave_out_small_tails(flags):
    """Quantiles are too few for --cvar-weight with this --cvar-alpha: then it is not typed."""
    alpha = float(flags.get("--cvar-alpha", 0.05))
    if alpha * int(flags.get("--num-quantiles", 32)) < 1:
        flags.pop("--cvar-weight", None)


def draw_flags(script, draw):
    """Flags, as a dict from flag to text or to None for its negation, and steps of the run.

    Between them the flag that is wrong, if any is, and whether it is so by having no effect.
    """
    name = script.__name__
    rng = random.Random(f"{name} {draw}")
    num_envs, num_steps = rng.choice((1, 2, 3, 4)), rng.choice((2, 4, 6, 12))
    chunk = 1
    flags = {"--num-envs": num_envs, "--num-steps": num_steps, "--env-id": rng.choice(TASKS)}
    if "lstm" in name:
        chunk = rng.choice([n for n in (0, 1, 2, 3, 4, 6) if not n or num_steps % n == 0])
        flags["--seq-len"], chunk = chunk, chunk or num_steps
    columns = num_envs * num_steps // chunk
    flags["--num-minibatches"] = rng.choice([n for n in range(1, 13) if columns % n == 0])
    batch = num_envs * num_steps
    flags["--total-timesteps"] = 2 * batch + rng.randrange(batch)
    for flag, values in (VALUES | OWN[name]).items():
        if rng.random() < 0.4:
            flags[flag] = rng.choice(values)
    image = any(word in flags["--env-id"] for word in ("Image", "Flicker", "Quadrant"))
    if rng.random() < 0.3 and not image:
        flags["--masked-obs"] = rng.choice(("0", "0 1", "2"))
    wrong = rng.choice([*WRONG]) if rng.random() < 0.4 else ""
    if wrong:
        flags[wrong] = rng.choice(WRONG[wrong])
    idle = ""
    if not wrong and rng.random() < 0.15:
        idle = wrong = rng.choice([flag for flag in NEEDS if flag in VALUES | OWN[name]])
        flags.setdefault(idle, rng.choice((VALUES | OWN[name])[idle]))
    settle(flags, idle)
    if "lstm" in name and wrong in ("", "--init-from"):
        leave_out_small_tails(flags)
    if wrong == "--init-from":
        flags.pop("--log-std-init", None)  # without effect beside it, which is told first
    if idle and idle != "--torch-deterministic":
        other, without, _ = NEEDS[idle]
        flags[other] = without
    return flags, wrong, bool(idle), 2 * batch


def command_line(flags):
    """Words; an empty text is a flag without a value, None its negation."""
    line = []
    for flag, value in flags.items():
        if value is None:
            line.append(f"--no-{flag[2:]}")
        elif flag == "--exp-name":
            line += [flag, value]
        else:
            line += [flag, *str(value).split()]
    return line


def check_draw(script, capsys, tmp_path, monkeypatch, draw):
    """Two iterations and a checkpoint, or exit code 2 and a short message with the flag."""
    monkeypatch.chdir(tmp_path)
    flags, wrong, idle, steps = draw_flags(script, draw)
    line = [*command_line(flags), "--save-envs", "always"]
    with undisturbed():
        code, _, err = run_main(script, capsys, ["--run-dir", "runs", *line])
    assert "Traceback" not in err
    if not wrong:
        assert (code, err) == (0, ""), " ".join(line)
        (path,) = tmp_path.glob("runs/*/checkpoint.pt")
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["global_step"] == steps
        logged = pickle.loads(checkpoint["run"].numpy())["logged"]
        assert np.isfinite([*logged.values()]).all(), (" ".join(line), logged)
        return
    assert code == 2, " ".join(line)
    text = " ".join(err.replace("│", " ").split())
    name = "nowhere" if "nowhere" in WRONG.get(wrong, "") else wrong[2:]
    assert name in text, text
    assert ("has no effect" in text) == idle, text
    assert len(err) < 3000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("draw", range(1))
def test_random_flags(script, capsys, tmp_path, monkeypatch, draw):
    """One draw for each script."""
    check_draw(script, capsys, tmp_path, monkeypatch, draw)


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(1, 265))
def test_many_random_flags(script, capsys, tmp_path, monkeypatch, draw):
    """264 more for each script."""
    check_draw(script, capsys, tmp_path, monkeypatch, draw)
