"""Flags: derived sizes, bad input, help."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from command import undisturbed
from helpers import small_args

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
BAD = [
    ("--num-envs 0", "num-envs 0", "finite and in [1, inf]"),
    ("--num-steps -4", "num-steps -4", "finite and in [1, inf]"),
    ("--torch-threads 0", "torch-threads 0", "finite and in [1, inf]"),
    ("--eval-episodes 0", "eval-episodes 0", "finite and in [1, inf]"),
    ("--hidden-size 0", "hidden-size 0", "finite and in [1, inf]"),
    ("--num-minibatches 0", "num-minibatches 0", "finite and in [1, inf]"),
    ("--update-epochs 0", "update-epochs 0", "finite and in [1, inf]"),
    ("--seed -1", "seed -1", "finite and in [0, 4e+09]"),
    ("--eval-every -1", "eval-every -1", "finite and in [0, inf]"),
    ("--ent-coef -0.1", "ent-coef -0.1", "finite and in [0, inf]"),
    ("--ent-coef-final -0.1", "ent-coef-final -0.1", "finite and in [0, inf]"),
    ("--min-entropy-penalty -1", "min-entropy-penalty", "finite and in [0, inf]"),
    ("--min-entropy nan", "min-entropy nan", "finite"),
    ("--vf-coef -1", "vf-coef -1", "finite and in [0, inf]"),
    ("--norm-adv-memory -1", "norm-adv-memory -1", "finite and in [0, inf]"),
    ("--norm-returns-memory 0", "norm-returns-memory 0", "finite and in [1, inf]"),
    ("--value-from mean", "value-from", "mean_head"),
    ("--learning-rate 0", "learning-rate 0", "finite and in [1e-12, inf]"),
    ("--learning-rate nan", "learning-rate nan", "finite and in [1e-12, inf]"),
    ("--clip-coef 0", "clip-coef 0", "finite and in [1e-12, inf]"),
    ("--max-grad-norm inf", "max-grad-norm inf", "finite"),
    ("--target-kl 0", "target-kl 0", "finite and in [1e-12, inf]"),
    ("--vf-clip-coef 0", "vf-clip-coef 0", "finite and in [1e-12, inf]"),
    ("--checkpoint-every -1", "checkpoint-every -1", "finite and in [0, inf]"),
    ("--cvar-weight 1.5", "cvar-weight 1.5", "[0, 1]"),
    ("--value-target monte_carlo", "value-target", "sr_lambda"),
    ("--gamma 1.01", "gamma 1.01", "[0, 1]"),
    ("--gae-lambda -0.5", "gae-lambda -0.5", "[0, 1]"),
    ("--cvar-alpha 0", "cvar-alpha 0", "[0.001, 1]"),
    ("--log-std-init 3", "log-std-init 3", "[-5, 2]"),
    ("--num-envs 1 --num-steps 1", "num-steps 1", "needs 2 steps"),
    ("--total-timesteps 100", "total-timesteps 100", "rollout"),
    ("--num-minibatches 3", "num-minibatches 3", "divide"),
    pytest.param("--cuda", "cuda", "no GPU", marks=NO_GPU),
    ("--num-critics 3", "num-critics", "1"),
    ("--twin-reduce max", "twin-reduce", "min_quantile"),
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
    ("--init-from nowhere", "nowhere", "no run or checkpoint"),
    ("--env-id probes:Walk-v0 --capture-video", "capture-video", "renders rgb_array"),
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


def test_without_a_compiler(script, monkeypatch, capsys, tmp_path):
    """Torch tells it in its own ways, some pages long, when something is first compiled."""

    def find_nothing(function):
        def fail(x):
            raise RuntimeError("InvalidCxxCompiler: no working C++ compiler found")

        return fail

    monkeypatch.setattr(torch, "compile", find_nothing)
    check_refused(script, capsys, tmp_path, "--compile", ("--compile", "g++", "leave it out"))


WRONG = [  # from Python, where no parser stands ahead of the flags
    ("twin_reduce", "maen", "must be one of min, mean, min_quantile"),
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
    ("masked_obs", [0], "must be a tuple of integers"),
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
    ("name", "value"),
    [
        ("ent_coef_final", None),
        ("target_kl", None),
        ("target_kl", 1),
        ("learning_rate", 1),
        ("gamma", 1),
        ("min_entropy", -2),
        ("masked_obs", ()),
        ("masked_obs", (0, 2)),
        ("num_critics", 1),
        ("norm_obs", False),
        ("norm_adv_memory", 0),
    ],
)
def test_what_the_types_allow_is_taken_as_given(script, name, value):
    """Ours: an integer where a float is wanted, None where the flag may be unset."""
    taken = getattr(script.Args(**{name: value}), name)
    assert taken == value
    assert type(taken) is type(value)


def test_the_readme_lists_every_flag(script):
    """In its table of flags, those of one script alone with that script's number."""
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    table = text[text.index("| group | flags |") : text.index("(1) recurrent script only")]
    listed = {}
    for words, mark in re.findall(r"`([^`]*)`(\([12]\))?", table):
        *shared, last = words.split()
        listed |= dict.fromkeys(shared, "") | {last: mark}
    foreign = "(2)" if "lstm" in script.__name__ else "(1)"
    names = {field.name for field in dataclasses.fields(script.Args) if field.init}
    assert names == {name for name, mark in listed.items() if mark != foreign}


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
    """L is seq_len, or the rollout; M environments times sequences, which minibatches divide."""
    import distributional_ppo_lstm as script

    args = small_args(script, "Counter")
    assert (args.sequence_length, args.num_sequences) == (12, 4)
    args = small_args(script, "Counter", seq_len=3, num_minibatches=16)  # 4 envs x 4 sequences
    assert (args.sequence_length, args.num_sequences) == (3, 16)


def test_help_explains_every_flag(script, capsys):
    """One line with unit or range for each of the flags."""
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--anneal-lr, --no-anneal-lr" in text
    for field in dataclasses.fields(script.Args):
        assert (f"--{field.name.replace('_', '-')}" in text) == field.init, field.name


BAD_MORE = [
    ("--num-envs 2.5", "num-envs", "int"),
    ("--num-envs many", "num-envs", "int"),
    ("--num-steps 0", "num-steps 0", "[1, "),
    ("--torch-threads -2", "torch-threads -2", "[1, "),
    ("--eval-episodes -1", "eval-episodes -1", "[1, "),
    ("--checkpoint-every -1", "checkpoint-every -1", "[0, "),
    ("--hidden-size -64", "hidden-size -64", "[1, "),
    ("--seed 1.5", "seed", "int"),
    ("--seed 4294967296", "seed 4294967296", "[0, "),
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
    ("--vf-coef inf", "vf-coef inf", "finite"),
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
    ("--num-minibatches -2", "num-minibatches -2", "[1, "),
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
    ("--resume=", "no run or checkpoint", "No such file"),
    ("--resume no/such/run", "no/such/run", "No such file"),
    ("--evaluate no/such/checkpoint.pt", "no/such/checkpoint.pt", "No such file"),
    ("--no-such-flag", "no-such-flag", "help"),
    ("--gamma", "gamma", "Missing value"),
]
BAD_CATEGORICAL = [
    ("--num-atoms 1", "num-atoms 1", "[2, "),
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


def train_tiny(script, tmp_path):
    """Path of the checkpoint of a small run."""
    args = small_args(script, "Walk", total_timesteps=48, run_dir=str(tmp_path / "made"))
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
    for other in spoilt:
        torch.save(other, path)
        check_bad(script, capsys, tmp_path, [flag, str(path.parent)], ())
    path.write_bytes(whole)
    names = ("distributional_ppo_lstm", "distributional_ppo_categorical")
    (sibling,) = (importlib.import_module(name) for name in names if name != script.__name__)
    check_bad(
        sibling, capsys, tmp_path, [flag, str(path.parent)], ("unexpected keyword", str(path))
    )


def test_resume_wants_a_run_directory(script, capsys, tmp_path):
    """The file inside of it is not enough to go on."""
    path = train_tiny(script, tmp_path)
    capsys.readouterr()
    parts = ("--resume", "is not a run directory")
    check_bad(script, capsys, tmp_path, ["--resume", str(path)], parts)


def test_resume_and_evaluate_exclude_each_other(script, capsys, tmp_path):
    """Either, for a run that both could take."""
    path = str(train_tiny(script, tmp_path).parent)
    capsys.readouterr()
    line = ["--resume", path, "--evaluate", path]
    check_bad(script, capsys, tmp_path, line, ("--evaluate", "excludes --resume"))
