"""README tells what the scripts do and what the committed rows say. Links of all pages work."""

from __future__ import annotations

import csv
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
import pytest
import torch
from helpers import make_run

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
common = importlib.import_module("common")
learning = importlib.import_module("learning")
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [Path("README.md"), Path("tests/README.md")]
PAGES += sorted(path.relative_to(ROOT) for path in ROOT.glob("benchmarks/*.md"))
SCRIPTS = ("distributional_ppo_lstm", "distributional_ppo_categorical")
RECIPE = re.compile(
    r"\| [^|*]+ \| `python (\w+)\.py ?([^`]*)` \| (\w+) \| ([-\d.]+) \| ([-\d.]+) \| (\d+) "
    r"\| (\d+) \|"
)
MINUTES = (1, 2, 5, 10, 20, 30)


def rows_of(name: str) -> list[dict[str, str]]:
    """Rows of a committed table."""
    with open(RESULTS / name) as file:
        return list(csv.DictReader(file))


def tasks_of_today() -> list[str]:
    """Tasks whose default runs are of today's scripts, in the order of the alphabet."""
    return sorted(
        cell.task.split(":")[-1]
        for cell in learning.GRID
        if cell.script in SCRIPTS
        and cell.variant == "default"
        and learning.rows_of(cell)
        and learning.version_of(cell) == "today's"
    )


def default_runs(script: str, task: str) -> list[dict[str, str]]:
    """Runs of a preset, as the learning benchmark made them."""
    return learning.rows_of(learning.cell_of(script, task.removeprefix("benchmarks."), "default"))


# ---------------------------------------------------------------------------------- what scripts do
def test_the_table_of_tags_is_that_of_tensorboard():
    """Each tag of either script stands there once, with the words that TensorBoard shows."""
    recurrent = importlib.import_module("distributional_ppo_lstm").DESCRIPTIONS
    feed_forward = importlib.import_module("distributional_ppo_categorical").DESCRIPTIONS
    table = README.split("<summary>All tags</summary>")[1].split("</details>")[0]
    told = re.findall(r"^\| `([^`]+)`(\([12]\))? \| (.+) \|$", table, re.MULTILINE)
    marks = {"value/crossing_fraction": "(1)", "value/outside_support": "(2)"}
    expected = []
    for tag in sorted(recurrent | feed_forward):
        expected.append((tag, marks.get(tag, ""), (recurrent | feed_forward)[tag]))
    assert told == expected


def test_every_command_is_one_that_the_script_takes(monkeypatch, tmp_path):
    """Recipes parse, name tasks of presets, and the example of a task runs under the script."""
    commands = RECIPE.findall(README)
    assert len(commands) == 13
    for name, flags, *_ in commands:
        script = importlib.import_module(name)
        words = [word for word in shlex.split(flags) if word != "--compile"]
        assert script.parse_args(words).env_id


def train_recall(monkeypatch, tmp_path, **flags) -> float:
    """Train the defaults on README's own task, copied into a file. Returns the evaluation."""
    code = README.split("```python\nimport gymnasium\n")[1].split("```")[0]
    (tmp_path / "my_task.py").write_text("import gymnasium\n" + code)
    monkeypatch.syspath_prepend(tmp_path)
    script = importlib.import_module("distributional_ppo_lstm")
    args = script.Args(env_id="my_task:Recall-v0", run_dir=str(tmp_path / "runs"), **flags)
    return script.train(args)["eval/return_mean"]


def test_the_environment_of_the_readme_trains(monkeypatch, tmp_path):
    """It is trained for one rollout."""
    few = {"total_timesteps": 512, "num_steps": 64, "eval_episodes": 2, "save_envs": "never"}
    assert 0 <= train_recall(monkeypatch, tmp_path, **few) <= 1


@pytest.mark.slow
def test_the_defaults_learn_the_environment_of_the_readme(monkeypatch, tmp_path):
    """README says where a random policy is (one number in four) and where they end."""
    assert "A random policy scores 0.25. The defaults reach 1.0 within their 100,000" in README
    assert train_recall(monkeypatch, tmp_path) == 1.0


@pytest.mark.filterwarnings("ignore:No complete tensor")  # torch's own
def test_an_exported_policy_is_the_agents(monkeypatch, tmp_path):
    """The file gives what the agent gives, for any number of rows."""
    monkeypatch.chdir(tmp_path)
    agent = make_run(importlib.import_module(SCRIPTS[1]), "VectorBox").agent
    scope = {"torch": torch, "agent": agent}
    exec(block_with("torch.export.save"), scope)
    obs = torch.randn(7, *agent.obs_shape)
    told = torch.export.load("policy.pt2").module()(obs)
    assert torch.equal(told, scope["Policy"](agent)(obs))


def test_how_much_longer_the_same_runs_took():
    """Those of a task, with the same flags."""
    seconds: dict[tuple[str, ...], list[float]] = {}
    for row in rows_of("runs.csv"):
        setting = tuple(row[name] for name in ("task", "script", "variant", "steps"))
        if int(row["seed"]) > 8000:
            seconds.setdefault(setting, []).append(float(row["seconds"]))
    slower = max(max(own) / min(own) for own in seconds.values())
    assert "the same runs took up to ten times as long" in README
    assert round(slower) == 10


def test_the_length_of_the_scripts_is_told():
    """With the algorithm ahead of the middle."""
    for name in ("distributional_ppo_lstm", "distributional_ppo_categorical"):
        lines = (ROOT / f"{name}.py").read_text().splitlines()
        assert "Each has about 5,800 lines." in README
        assert "takes about 2,000 of them and ends before the middle" in README
        assert "| one file a script, about 5,800 lines |" in README
        assert abs(len(lines) - 5800) < 150
        end = lines.index("# Nothing below is about the algorithm.")
        assert end < len(lines) / 2
        assert abs(end - lines.index("def train(args: Args) -> dict[str, Any]:") - 2000) < 150


def test_the_torch_of_the_requirements_is_named():
    """For those who install it first."""
    pinned = (ROOT / "requirements.txt").read_text().split("torch==")[1].split()[0]
    assert f"install torch {pinned} from" in README


def block_with(text: str) -> str:
    """The Python of README that has this text."""
    [found] = [x.split("```")[0] for x in README.split("```python\n")[1:] if text in x]
    return found


def test_actions_without_bounds_are_wrapped_as_the_readme_says():
    """-1 and 1 become -10 and 10."""
    gym = pytest.importorskip("gymnasium")

    class Mine(gym.Env):
        observation_space = action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

        def step(self, action):
            return action, 0.0, False, False, {}

    scope = {"gymnasium": gym, "Mine": Mine}
    exec(block_with("TransformAction"), scope)
    env = scope["make"]()
    env.reset()
    assert env.step(np.float32([-1, 1]))[0].tolist() == [-10, 10]


def test_popart_of_the_readme_survives_rollouts_without_a_reward():
    """Returns of 0, of 0 again, then around 50: weights neither vanish nor grow, and what is
    predicted stays as soon as returns vary."""
    script = importlib.import_module("distributional_ppo_lstm")
    layer, moments = torch.nn.Linear(3, 1), script.RunningMoments()
    scope = {**vars(script), "last_layer": layer, "moments": moments}
    batches = [torch.zeros(64), torch.zeros(64), 50 + torch.randn(64), 80 + torch.randn(64)]
    before = layer.weight.clone()
    for returns in batches[:3]:
        exec(block_with("moments.update(returns)"), scope | {"returns": returns})
        assert torch.equal(layer.weight, before)

    def predicted():
        return float(moments.denormalize(layer(torch.ones(3)).double().detach()))

    told = predicted()
    exec(block_with("moments.update(returns)"), scope | {"returns": batches[3]})
    assert not torch.equal(layer.weight, before)
    assert predicted() == pytest.approx(told, rel=1e-5)


def test_python_of_the_readme_runs(monkeypatch, tmp_path):
    """Training, loading and acting, with fewer steps; the fan along an episode; the atoms."""
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    script = importlib.import_module("distributional_ppo_categorical")

    def quick(*names: str, **flags):
        few = {"total_timesteps": 512, "num_steps": 64, "num_minibatches": 4, "eval_episodes": 1}
        few |= {"run_dir": str(tmp_path), "save_envs": "never"}
        return script.Args(env_id="CartPole-v1", **few)

    monkeypatch.setattr(script, "preset_args", quick)
    blocks = README.split("```python\n")
    [training] = [x.split("```")[0] for x in blocks if "= train(" in x]
    scope = {}
    exec(training, scope)
    [resuming] = [x.split("```")[0] for x in blocks if "resume=" in x]
    resuming = resuming.replace("100_000", "1_024")
    exec(resuming.replace("RUN_DIR", scope["results"]["run_dir"]), {**vars(script)})
    [seeing] = [x.split("```")[0] for x in blocks if "get_wrapper_attr" in x]
    scope["obs"] = [0.1, 0.2, 0.3, 0.4]  # as a robot's program may have it
    exec(seeing.replace("RUN_DIR", scope["results"]["run_dir"]), scope)
    assert scope["action"] in (0, 1)
    [drawing] = [x.split("```")[0] for x in blocks if "plt.plot(fan)" in x]
    exec(drawing.replace("RUN_DIR", scope["results"]["run_dir"]), scope)
    plt.close("all")
    assert len(scope["fan"]) > 1
    assert len(scope["fan"][0]) == 9
    [raw] = [x.split("```")[0] for x in blocks if "task_atoms()" in x]
    exec(raw, scope)
    probs, atoms = scope["probs"], scope["atoms"]
    assert (probs.shape, atoms.shape) == ((2, 1, 51), (51,))
    assert scope["outputs"].shape == (2, 1, 52)
    assert scope["predicted"].shape == (1, 51)
    assert any(torch.allclose(scope["predicted"], one) for one in probs)
    agent = scope["agent"]
    means = agent.value_dist.mean(agent.value_outputs(scope["batch"])).detach()
    assert torch.allclose(probs.double() @ atoms, means)


def test_the_loss_of_the_readme_is_that_of_the_script():
    """To be edited: it computes what the feed-forward script does without value clipping."""
    script = importlib.import_module("distributional_ppo_categorical")
    [code] = [x.split("```")[0] for x in README.split("```python\n") if x.startswith("def loss(")]
    scope = {name: getattr(script, name) for name in ("squared_error", "categorical_cross_entropy")}
    scope["torch"] = torch
    exec(code, scope)
    dist = script.ValueDistribution(script.Args())
    outputs = torch.randn(2, 7, dist.num_outputs, requires_grad=True)
    targets, returns = torch.randn(7, 51).softmax(-1), torch.randn(7)
    found = []
    for loss in (dist.loss, lambda *inputs: scope["loss"](dist, *inputs)):
        losses, clipped = loss(outputs, targets, returns, torch.zeros(2, 7, 2))
        assert not clipped.any()
        found.append((losses, *torch.autograd.grad(losses.mean(), outputs)))
    assert all(map(torch.allclose, *found))


def test_the_loop_of_the_recurrent_script_runs():
    """Along an episode that is open: nine deciles for each of its steps."""
    import numpy as np

    script = importlib.import_module("distributional_ppo_lstm")
    args = script.Args()
    env = script.make_env(args)
    agent = script.Agent(env.observation_space, env.action_space, args)
    scope = {"agent": agent, "env": env, "np": np, "fan": [], "ended": False}
    scope["obs"], _ = env.reset(seed=1)
    blocks = README.split("```python\n")
    [loop] = [x.split("```")[0] for x in blocks if x.startswith("levels = ")]
    exec(loop, scope)
    assert np.shape(scope["fan"]) == (len(scope["fan"]), 9)
    assert len(scope["fan"]) > 1


def anchors_of(text: str) -> set[str]:
    """What GitHub makes of the headings of a page."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    """Files exist, and so do the headings that a link names."""
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        path = ROOT / page.parent / name if name else ROOT / page
        assert path.exists(), link
        assert not anchor or anchor in anchors_of(path.read_text()), link


# ------------------------------------------------------------------------------- what the rows say
@pytest.mark.parametrize("recipe", RECIPE.findall(README), ids=lambda recipe: recipe[1] or "none")
def test_recipes_tell_what_the_runs_had(recipe):
    """The steps of the preset; the mean and the worst evaluation of its runs, their number and
    median time, rounded up. All are of today's scripts."""
    name, flags, steps, expect, worst, seeds, minutes = recipe
    words = [word for word in shlex.split(flags) if word != "--compile"]
    args = importlib.import_module(name).parse_args(words)
    runs = default_runs(name, args.env_id)
    thousands = args.total_timesteps // 1000
    assert steps == (f"{thousands}k" if thousands < 1000 else f"{thousands // 1000}M")
    assert len(runs) == int(seeds)
    assert not any(map(common.is_older, runs))
    scores = [float(row["return_mean"]) for row in runs]
    for told, score in ((expect, mean(scores)), (worst, min(scores))):
        assert told in (f"{score:.0f}", f"{score:.1f}", f"{score:.2f}")
    taken = median(float(row["seconds"]) for row in runs) / 60
    assert int(minutes) == next(bound for bound in MINUTES if taken <= bound)


def test_the_first_commands_result():
    """How many of its seeds reach 475, and the worst one."""
    runs = default_runs("distributional_ppo_lstm", "CartPoleNoVel-v1")
    scores = [float(row["return_mean"]) for row in runs]
    good = sum(score >= 475 for score in scores)
    told = f"Of {len(runs)} seeds {good} reach at least 475, and the worst has {min(scores):.0f}."
    assert told in README


def test_the_speed_beside_the_recurrent_peer():
    """One ratio is that of the first line of the table of speeds; the range is of all."""
    tables = (RESULTS / "speed.md").read_text().split("\n\n")
    table = next(table for table in tables if table.startswith("| cell | steps/s "))
    lines = [x.split("|") for x in table.splitlines() if x.startswith("| recurrent")]
    ratios = {line[1].split(":")[0].strip(): line[4].split()[0] for line in lines}
    ratios.pop("recurrent-pong", None)
    low, high = min(ratios.values(), key=float), max(ratios.values(), key=float)
    assert len(ratios) > 5
    assert low == ratios["recurrent-episodes20"]
    assert f"The recurrent script makes {low} to {high} times as many steps per second" in README
    told = f"on CartPole it is {ratios['recurrent']} times as many, and {low} where all episodes"
    assert told in README


def test_known_processes_that_are_close_to_the_truth():
    """Of those that are judged, with tuned flags and with 201 atoms."""
    calibration = importlib.import_module("calibration")
    good = {}
    for row in calibration.counted():
        law = calibration.PROCESSES.get(row["task"])
        if law and law.judged:
            good.setdefault(row["variant"], []).append(calibration.reached(row))
    tuned, atoms = good["recommended"], good["201 atoms"]
    assert all(tuned)
    told = f"all {len(tuned)} runs with tuned flags come close to the truth, and {sum(atoms)} of "
    assert f"{told}{len(atoms)} with the preset's 201 atoms." in README


def test_the_road_of_samples():
    """The worst tenth of drives of the averse policy as it samples."""
    rows = importlib.import_module("risk").groups()[
        "road", "distributional_ppo_categorical", "weight 1"
    ]
    tail = mean(float(row["sampled_cvar"]) for row in rows)
    assert f"but where actions are sampled, the worst tenth has {tail:.1f} only." in README
    half = importlib.import_module("risk").groups()[
        "road", "distributional_ppo_categorical", "weight 0.5"
    ]
    tail, whole = (mean(float(row[name]) for row in half) for name in ("cvar", "mean"))
    assert f" to {tail:.1f}, and lowers the mean of all from " in README
    assert f" to {whole:.1f} (five runs" in README
    script = importlib.import_module("distributional_ppo_categorical")
    assert script.PRESETS["averse"].flags["cvar_weight"] == 0.5


def test_what_a_gpu_gains():
    """The ratios are those of its table: the largest two, and the range of those below 1."""
    lines = [x.split("|") for x in (RESULTS / "gpu.md").read_text().splitlines() if "|" in x]
    gains = {line[1].strip(): float(line[5].split()[0]) for line in lines[2:]}
    low = [gain for gain in gains.values() if gain < 1]
    told = (
        f"Pong is {gains['Atari Pong']} times as fast",
        f"64 environments {gains['recurrent, LSTM 512, 64 environments']} times.",
        f"slower there, {min(low)} to {max(low)} times",
    )
    assert all(words in README for words in told)
    threads = {
        line[1].strip(): [float(x.replace(",", "")) for x in line[2:4]] for line in lines[2:]
    }
    pong, large = (
        threads[name][1] / threads[name][0]
        for name in ("Atari Pong", "recurrent, LSTM 512, 64 environments")
    )
    told = f"Pong {pong:.1f} times and an LSTM of 512 units {large:.1f} times as fast"
    assert told in README


def test_the_price_of_a_tail_on_the_road():
    """Means over the seeds of the feed-forward script."""
    groups = importlib.import_module("risk").groups()
    found = {}
    for variant in ("neutral", "weight 1"):
        rows = groups["road", "distributional_ppo_categorical", variant]
        assert len(rows) == 5
        found[variant] = [mean(float(row[key]) for row in rows) for key in ("mean", "cvar")]
    (mean_before, cvar_before), (mean_after, cvar_after) = found.values()
    told = f"`averse` lifts the mean of the worst tenth of drives from {cvar_before:.1f} to"
    assert told in README
    assert f"the mean of all from {mean_before:.1f} to" in README
    assert f"With `--cvar-weight 1` they are {cvar_after:.1f} and {mean_after:.1f}, but" in README


def errors_by_chance(episodes: int) -> tuple[float, float]:
    """The mean decile error of a perfect prediction, and how often it is above 0.05. Returns then
    lie anywhere between the predicted quantiles with equal probability."""
    levels = np.arange(1, 10) / 10
    places = np.random.default_rng(0).random((10_000, episodes))
    shares = np.stack([(places < level).mean(1) for level in levels], 1)
    errors = np.abs(shares - levels).mean(1)
    return errors.mean(), (errors > 0.05).mean()


def test_what_chance_makes_of_a_perfect_prediction():
    """With few episodes it fails the check now and then."""
    (few, _), (usual, fails), (many, seldom) = map(errors_by_chance, (16, 64, 256))
    told = f"with `--episodes 256` it is {many:.2f} on average, and above 0.05 in {seldom:.0%} of "
    told += f"the checks. With 64 episodes, the default, it is {usual:.2f}, and above 0.05 in "
    assert f"{told}{fails:.0%}.".replace("%", " %") in README
    assert f"with 16 chance makes {few:.2f}, and 0.05 decides nothing." in README


def falls_beyond_chance(before: list[float], after: list[float]) -> bool:
    """Whether the 95 % interval of the mean difference of three pairs (Student's t) is below 0."""
    gaps = [late - early for early, late in zip(before, after, strict=True)]
    return mean(gaps) + 4.303 * stdev(gaps) / 3**0.5 < 0


def told_error(errors: list[float]) -> str:
    """The mean error of some runs, and how many have at most 0.05."""
    return f"{mean(errors):.3f} ({sum(error <= 0.05 for error in errors)} of {len(errors)})"


def test_how_good_presets_for_calibration_are():
    """Mean errors of the coverage of deciles, over the runs of a task, with the preset of the task,
    with `calibrated`, and after the critics were trained alone."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in importlib.import_module("calibration").counted():
        errors.setdefault((row["task"], row["variant"]), []).append(float(row["coverage"] or "nan"))
    columns = ("default", "presets", "critics")
    found = {}
    for name, task in (
        ("popgym HigherLowerEasy, `--preset memory`", "popgym:popgym-HigherLowerEasy-v0"),
        *((task, task) for task in ("PendulumNoVel-v1", "Hopper-v5", "LunarLander-v3")),
        ("the same with `--ent-coef 0.3 --ent-coef-final 0.3`", "CartPoleNoVel-v1"),
    ):
        found[task] = [errors.get((task, column), []) for column in columns]
        told = [told_error(own) if own else "-" for own in found[task]]
        if task == "CartPoleNoVel-v1":
            plain = [errors[task, f"{one}, no bonus"] for one in ("presets", "critics")]
            assert f"| {task} | {told[0]} | {' | '.join(map(told_error, plain))} |" in README
            assert mean(plain[0]) < mean(plain[1])
            told_of = "On CartPoleNoVel-v1 `critics` helped only with the entropy bonus"
            assert told_of in README
            first = errors[task, "presets, no bonus, before"]
            assert len(first) == 3
            assert min(first) > 0.05
            assert "The entropy bonus came after failures, too." in README
            told[0] = "-"
        assert f"| {name} | {' | '.join(told)} |" in README
    assert all(len(own) == 3 for _, *some in found.values() for own in some)
    before, after = ([mean(own[at]) for own in found.values()] for at in (1, 2))
    assert [sum(error <= 0.05 for error in some) for some in (before, after)] == [1, 2]
    assert all(later < earlier for earlier, later in zip(before, after))
    verdicts = {
        task: common.welch(*(np.array(errors[task, variant]) for variant in pair)).verdict
        for task in found
        for pair in [("presets, no bonus" if task == "CartPoleNoVel-v1" else "presets", "default")]
    }  # less error is better
    smaller = {task for task, verdict in verdicts.items() if verdict == "behind"}
    assert smaller == {"popgym:popgym-HigherLowerEasy-v0", "Hopper-v5"}
    assert sorted(verdicts.values()) == ["behind"] * 2 + ["undecided"] * 3
    plain = [
        [mean(errors[task, "default"])]
        + [
            mean(errors[task, f"{one}, no bonus" if task == "CartPoleNoVel-v1" else one])
            for one in ("presets", "critics")
        ]
        for task in found
    ]
    lowered = [sum(own[at] < own[at - 1] for own in plain) for at in (1, 2)]
    assert (lowered, len(plain)) == ([4, 4], 5)
    told = "The preset `calibrated` lowered the mean on four of five tasks, on HigherLowerEasy and"
    assert f"{told} Hopper-v5 by more than chance. `critics` lowered it on four, on" in README
    beyond = {task for task, own in found.items() if falls_beyond_chance(own[1], own[2])}
    assert beyond == {"PendulumNoVel-v1", "LunarLander-v3"}
    assert "on PendulumNoVel-v1 and LunarLander-v3 by more than chance" in README
    in_each = [
        sum(all(error <= 0.05 for error in own[at]) for own in found.values()) for at in (1, 2)
    ]
    assert in_each == [1, 2]
    passed = [{task for task, own in found.items() if max(own[at]) <= 0.05} for at in (1, 2)]
    assert passed == [
        {"popgym:popgym-HigherLowerEasy-v0"},
        {"popgym:popgym-HigherLowerEasy-v0", "CartPoleNoVel-v1"},
    ]
    pairs = [pair for own in found.values() for pair in zip(own[1], own[2])]
    needed = sum(before <= 0.05 or after <= 0.05 for before, after in pairs)
    told = f"Of {len(pairs)} runs on five tasks [{needed} pass our check](#how-good-it-is)"
    assert told in README
    told = f"If `critics` follows only a failed check, as advised above, {needed} pass."
    assert told in README
    few = [sum(error <= 0.05 for own in found.values() for error in own[at]) for at in (1, 2)]
    told = "{} of {} runs pass with `calibrated`, and {} after `critics`."
    assert told.format(few[0], len(pairs), few[1]) in README
    worse = [pair for pair in zip(*found["Hopper-v5"][1:]) if pair[1] > pair[0]]
    assert (len(worse), len(found["Hopper-v5"][1])) == (2, 3)
    assert "A single run may get worse, as two of three Hoppers did." in README
    earlier = [error for task in found for error in errors[task, "critics, before"]]
    high = sum(error > 0.05 for error in earlier)
    assert f"On the first ones {high} of {len(earlier)} runs had failed, and" in README
    default = [mean(errors[task, "default"]) for task in found]
    assert (sum(error > 0.22 for error in default), len(default)) == (2, 5)
    assert "On two of five tasks the default was worse than a single number at the true" in README
    script = importlib.import_module("distributional_ppo_lstm")
    assert script.PRESETS["critics"].flags["total_timesteps"] == 200_000


def test_what_compiling_brings():
    """The ratio to the same script without it, and the seconds of the first time."""
    tables = (RESULTS / "speed.md").read_text().split("\n\n")
    [table] = [table for table in tables if table.startswith("| cell, with `--compile`")]
    [line] = [x for x in table.splitlines() if x.startswith("| cheetah-8x256 ")]
    cells = [cell.strip() for cell in line.split("|")]
    gain, seconds = cells[4].split()[0], cells[6]
    assert f"eight HalfCheetahs: {gain} times as fast, after {seconds} s of compiling" in README
    assert f"a run of robots then takes about {gain} times as long." in README


def test_what_two_processes_bring():
    """The report computes it: with many large environments, and with few small ones."""
    page = (ROOT / "benchmarks" / "README.md").read_text()
    large, small = re.search(
        r"is ([\d.]+) \(.*?\) times as fast as one with 64 Humanoids, and ([\d.]+) \(", page
    ).groups()
    assert f"64 Humanoids are {large} times as fast, and 16 CartPoles {small} times" in README


def test_fast_drives_that_crash():
    """20 stretches with a grip in [0, 1] each: 0.06 (0.4 - 0.3 grip) has the mean 0.015 flat out,
    and 1 - 0.985^20 = 0.26. So do 2,000 drives."""
    road = importlib.import_module("risk").Road()
    crashes = 0
    for seed in range(2000):
        road.reset(seed=seed)
        crashes += any(road.step(np.ones(1))[1] < 0 for _ in range(20))
    assert abs(crashes / 2000 - 0.26) < 0.03
    assert "a fast drive crashes about one time in four" in README


def test_the_safe_speed_on_the_road():
    """0.6 + 0.3 grip on 20 stretches: a mean of 20 * 0.75 = 15, a deviation of 0.3 sqrt(20 / 12) =
    0.387. The mean of the worst tenth of a normal distribution is 1.755 deviations below: 14.3."""
    road = importlib.import_module("risk").Road()
    returns = []
    for seed in range(2000):
        obs, _ = road.reset(seed=seed)
        rewards = []
        for _ in range(20):
            speed = 0.6 + 0.3 * float(obs[0]) - 1e-4  # just below: float32 rounds
            obs, reward, *_ = road.step(np.array([2 * speed - 1]))
            rewards.append(reward)
        returns.append(sum(rewards))
    worst = np.sort(returns)[:200].mean()
    assert abs(worst - 14.3) < 0.05
    assert abs(np.mean(returns) - 15.0) < 0.05
    assert "to drive always at the safe speed has 14.3 and 15.0." in README


def test_numbers_that_the_report_computes():
    """The same ones stand there."""
    page = (ROOT / "benchmarks" / "README.md").read_text()
    best, sampled = re.search(
        r"LunarLander-v3\*\* has ([\d.]+) by the policy's likeliest action, but (\d+) where", page
    ).groups()
    told = f"on LunarLander-v3 episodes at the end of training have {sampled}, and evaluations by "
    assert f"{told}the likeliest action {best}." in README
    feed_forward = re.search(
        r"is ([\d.]+) \(.*?\) times as fast as SB3's PPO on CartPole-v1, ([\d.]+) \(", page
    ).groups()
    assert "is {1} to {0} times as fast as SB3's PPO [on Half".format(*feed_forward) in README


def test_what_the_preset_calibrated_costs_in_time():
    """Median seconds of three runs with it, over those of three without it, on five tasks."""
    calibration = importlib.import_module("calibration")
    groups = common.by_setting(calibration.counted())
    ratios = []
    for task, (script, _) in calibration.PRESETS.items():
        without, preset = (
            median(float(row["seconds"]) for row in groups[task, script, variant])
            for variant in ("default", "presets")
        )
        ratios.append(preset / without)
    assert len(ratios) == 5
    told = f"{min(ratios):.1f} to {max(ratios):.1f} times as long"
    assert f"Training with `calibrated` takes {told}. It may" in README
    assert f"Runs with it were {told} as those without" in README


def test_what_the_preset_calibrated_costs_in_return():
    """Means of three runs minus those of the plain preset; all four intervals reach across 0."""
    changes = {}
    for task, (script, _) in learning.CALIBRATED.items():
        with_preset, without = (
            learning.cell_of(script, task, variant) for variant in ("calibrated", "default")
        )
        if learning.version_of(with_preset) == "older":
            without = common.before_renewed_again(without)
        own, plain = (np.array(learning.scores_of(cell)) for cell in (with_preset, without))
        assert len(own) == 3
        if task == "Hopper-v5":
            of_hopper = plain.mean()
        changes[task] = common.welch(own, plain)
        assert changes[task].verdict == "undecided"
    pole, pendulum, hopper, lander = (change.mean for change in changes.values())
    about = f"about {round(of_hopper, -2):.0f}"
    told = f"mean of three runs was lower by {-hopper:.0f} than without it, {about}, which chance"
    assert told in README
    told = f"{-hopper:.0f} on Hopper-v5 (without it {about})"
    assert (
        f"lower by {told}, by {-lander:.0f} on LunarLander-v3 and by {-pendulum:.0f} on Pend"
        in README
    )
    assert f"on PendulumNoVel-v1, and higher by {pole:.0f} on CartPoleNoVel-v1." in README


def test_the_target_of_the_divergence():
    """The number is the preset's."""
    presets = importlib.import_module("distributional_ppo_categorical").PRESETS
    target = presets["mujoco"].flags["target_kl"]
    assert f"`--preset mujoco` has it at {target}." in README


def test_runs_on_known_distributions():
    """Those with the preset's flags on the processes that are judged reach all bounds."""
    reached = total = 0
    for line in (RESULTS / "calibration.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if cells[3:4] == ["calibrated, tuned"] and cells[-2].endswith(" of 3"):
            good, of = cells[-2].split(" of ")
            reached, total = reached + int(good), total + int(of)
    assert reached == total
    assert f"are known, all {total} runs with tuned flags come close" in README


def test_aversion_on_robots():
    """A line for each robot whose reported runs are all there: worst tenth and mean of five runs. A
    + marks what is better than the neutral policy by the interval of the difference, a - what is
    worse."""
    tails = importlib.import_module("tails")
    rows = tails.with_seeds(tails.TABLE.rows(), tails.REPORTED)
    marks = {"ahead": "+", "behind": "-", "undecided": ""}
    told = []
    for task in (*tails.PUBLIC, tails.TASK):
        ways = {
            variant: [tails.values(rows, task, variant, column) for column in ("cvar_10", "mean")]
            for variant in ("neutral", "averse 0.5", "penalty")
        }
        if any(len(own) < 5 for columns in ways.values() for own in columns):
            continue
        cells = []
        for variant, (tail, whole) in ways.items():
            verdict = common.welch(tail, ways["neutral"][0]).verdict if variant != "neutral" else ""
            cells.append(f"{tail.mean():.0f}{marks.get(verdict, '')} ({whole.mean():.0f})")
        told.append(f"| {task} | {' | '.join(cells)} |")
    assert re.findall(r"^\| (?:Risky|Limit)\w+ \| .* \|$", README, re.MULTILINE) == told


def test_the_chance_that_a_distribution_helps():
    """The report computes it, with intervals; the single critics and twins of V alone as well."""
    page = (ROOT / "benchmarks" / "README.md").read_text()
    told = re.search(
        r"one with scalar twins is ([\d.]+ \(.*?\)) on MuJoCo against those of the quantile script "
        r"\(undecided\), ([\d.]+ \(.*?\)) there against the same script with `--dist-coef 0` "
        r"\(undecided\), ([\d.]+) \(.*?\) on recurrent tasks \(undecided\) and ([\d.]+) \(.*?\) on "
        r"MinAtar \(undecided\)",
        page,
    )
    robots, same, recurrent, games = told.groups()
    told = f"with ten runs each, the chance is {same} beside the same script with `--dist-coef 0`, "
    assert f"{told}and {robots} beside another script." in README
    told = f"It is {recurrent} on recurrent tasks and {games} on MinAtar, with older versions."
    assert told in README
    [twins] = re.findall(r"beside a single scalar critic are undecided, (\S+ \(.*?\)), and", page)
    assert f"ends above a run with one with a chance of {twins}, which may be a tie." in README


def test_how_good_tuned_flags_for_calibration_are():
    """Whether all three runs reach the goal, with each task's own flags, and how many runs do."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in rows_of("calibration.csv"):
        if row["variant"] == "mean":
            errors.setdefault((row["script"], row["task"]), []).append(float(row["coverage"]))
    good = {script: [max(found) <= 0.05 for (name, _), found in errors.items() if name == script]
            for script in SCRIPTS}  # fmt: skip
    assert {script: (sum(good[script]), len(good[script])) for script in SCRIPTS} == {
        "distributional_ppo_lstm": (2, 3),
        "distributional_ppo_categorical": (1, 3),
    }
    runs = [error for found in errors.values() for error in found]
    few = sum(error <= 0.05 for error in runs)
    assert f"{few} of {len(runs)} runs reach 0.05 (older)" in README


def test_the_picture_of_one_run():
    """How many episodes it has, and which share of the returns lies between the outer deciles."""
    text = (RESULTS / "inspect.txt").read_text()
    episodes = re.search(r"of (\d+) episodes", text)[1]
    share = 100 * float(re.search(r"between deciles 1 and 9 ([\d.]+)", text)[1])
    assert f"above](#the-predicted-distribution), with {episodes} episodes." in README
    assert f"Of the returns {share:.0f} % lie between the first and the ninth decile" in README
    error = float(re.search(r"decile error ([\d.]+)", text)[1])
    calibration = importlib.import_module("calibration")
    others = [
        float(row["coverage"])
        for row in calibration.counted()
        if (row["task"], row["variant"]) == ("Hopper-v5", "presets")
    ]
    chance, _ = errors_by_chance(int(episodes))
    told = f"its decile error is {error:.2f} over {episodes} episodes, where chance alone makes "
    told += f"{chance:.2f}. Three other runs have {np.mean(others):.3f} [on average]"
    assert told in README
    assert error < np.mean(others)
    assert len(others) == 3


def test_slow_simulators():
    """The median ratio of the newest five pairs."""
    rows = [row for row in rows_of("scaling.csv") if row["kind"] == "slow"]
    newest = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    speed = {}
    for row in newest:
        speed.setdefault(row["processes"], []).append(float(row["value"]))
    ratios = [b / a for a, b in zip(speed["sync"][-5:], speed["async"][-5:])]
    assert f"were {median(ratios):.2f} times as fast on two cores" in README


MEAN = r"(\S+) ± (\S+) \((\d+)\)"
RESULT = re.compile(
    rf"^\| ([\w-]+)( \(older\))?, \w+ \| {MEAN} \| (\S+) \| {MEAN} \|(.*)$", re.MULTILINE
)
PEERS = ("sb3_contrib_recurrent_ppo", "stable_baselines3_ppo")


def scores_of(scripts: tuple[str, ...], task: str) -> list[float]:
    """Evaluations of the one of these programs that ran the task, by the first variant it has."""
    for variant in ("default", "zoo", "same_flags"):
        for cell in learning.GRID:
            is_meant = (learning.name_of(cell), cell.variant) == (task, variant)
            if cell.script in scripts and is_meant:
                return learning.scores_of(cell)
    raise LookupError(task)


def training_returns(task: str) -> list[float]:
    """Returns of every default run of the feed-forward script at the end of its training."""
    return learning.last_returns_of(learning.cell_of(SCRIPTS[1], task, "default"))


@pytest.mark.parametrize("row", RESULT.findall(README), ids=lambda row: row[0])
def test_results_are_those_of_the_runs(row):
    """Mean, 95 % interval and number of seeds, ours and the peer's, and the worst seed of ours."""
    task, older, ours, our_width, seeds, worst, peer, peer_width, peer_seeds, more = row
    todays = {one.replace("/", "-") for one in tasks_of_today()}
    assert bool(older) == (task not in todays)
    own, other = scores_of(SCRIPTS, task), scores_of(PEERS, task)
    assert (len(own), len(other)) == (int(seeds), int(peer_seeds))
    for told, value in (
        (ours, mean(own)),
        (our_width, common.half_width(np.array(own))),
        (worst, min(own)),
        (peer, mean(other)),
        (peer_width, common.half_width(np.array(other))),
    ):
        assert told in (f"{value:.0f}", f"{value:.1f}")
    for source, told in zip(
        ("rl-baselines3-zoo", "CleanRL"), re.findall(r"[^|\s][^|]*(?= \|)", more)
    ):
        found = [
            float(line["value"])
            for line in rows_of("published.csv")
            if (line["task"], line["source"]) == (task, source) and line["kind"] != "TRPO"
        ]
        told, *own_training = told.rstrip(")").split(" (")
        assert told == (f"{found[0]:.{told.count('.')}f}" if found else "-")
        for own in own_training:
            assert own == f"{mean(training_returns(task)):.{own.count('.')}f}"


def test_what_memory_buys_on_robots():
    """A row for each robot that both scripts have trained on: ours with and without memory where
    velocities are hidden, and where they are seen."""
    found = re.findall(r"^\| (\w+NoVel-v5) \| \S+ ± .+ \|$", README, re.MULTILINE)
    expected = []
    for task in learning.BLIND:
        cells = (
            learning.cell_of(SCRIPTS[0], task, "default"),
            learning.cell_of(SCRIPTS[1], task, "feed_forward"),
            learning.cell_of(SCRIPTS[1], task.replace("NoVel", ""), "default"),
        )
        own, control, seen = (np.array(learning.scores_of(cell)) for cell in cells)
        if len(own) and len(control):
            expected.append(task)
            assert {learning.version_of(cell) for cell in cells} == {"today's"}
            means = [
                f"{x.mean():.0f} ± {common.half_width(x):.0f} ({len(x)})"
                for x in (own, control, seen)
            ]
            told = [task, means[0], f"{own.min():.0f}", *means[1:]]
            assert f"| {' | '.join(told)} |" in README
    assert found == expected


def test_robots_without_velocities_beside_the_recurrent_peer():
    """With equal flags and fewer steps: means, and that both differences are undecided."""
    told = []
    for task in learning.SHORT_ROBOTS:
        cells = (learning.cell_of(script, task, "short") for script in (SCRIPTS[0], PEERS[0]))
        own, peer = (np.array(learning.scores_of(cell)) for cell in cells)
        assert len(own) == len(peer) == 3
        assert common.welch(own, peer).verdict == "undecided"
        told += [f"{x.mean():.0f} ± {common.half_width(x):.0f}" for x in (own, peer)]
    words = "On HalfCheetahNoVel-v5 ours has {} and the peer {}, on Walker2dNoVel-v5 {} and {}."
    assert words.format(*told) in README


def test_minatar_at_ten_million_steps():
    """Our means and numbers of runs; the highest that others have published of as many steps."""
    told, best = [], []
    for game, seeds in learning.LONG_GAMES.items():
        cell = learning.cell_of(SCRIPTS[1], f"envs:MinAtar/{game}-v1", "ten_million")
        own = learning.scores_of(cell)
        assert len(own) == len(seeds)
        runs = {1: "one run", 2: "two runs"}[len(own)]
        told.append(f"{mean(own):.1f} ({runs})")
        rows = [row for row in rows_of("published.csv") if row["steps"] == "10000000"]
        values = [row["value"] for row in rows if row["task"] == f"MinAtar-{game}-v1"]
        best.append(max(values, key=float))
    words = "MinAtar's Breakout has {}, Asterix {} and SpaceInvaders {}, all by"
    assert words.format(*told) in README
    told = "After as many steps gymnax-blines has published {}, {} and {}, in ports".format(*best)
    assert told in README


def published_by(source: str) -> dict[str, float]:
    """What it has published of PPO, by task."""
    return {row["task"]: float(row["value"]) for row in rows_of("published.csv")
            if row["source"] == source and row["kind"] != "TRPO"}  # fmt: skip


TASKS_OF_ZOO = (
    *("Pendulum-v1", "LunarLander-v3", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Swimmer-v5"),
    *("HalfCheetah-v5", "Acrobot-v1"),
)


def test_the_verdict_beside_tuned_flags():
    """Where our mean is above the zoo's run, and where not; CartPole-v1 is at its ceiling."""
    zoo = published_by("rl-baselines3-zoo")
    tasks = TASKS_OF_ZOO
    ours = {task: mean(scores_of(SCRIPTS, task)) for task in tasks}
    ahead = [ours[task] > zoo[task] for task in tasks]
    assert ahead == 6 * [True] + 2 * [False]
    told = (
        "tuned run on Pendulum, LunarLander, Hopper, Walker2d, Ant and Swimmer, and a lower one on "
    )
    assert f"{told}HalfCheetah and Acrobot." in README
    runs = {task: scores_of(SCRIPTS, task) for task in tasks}
    assert [task for task in tasks if zoo[task] < min(runs[task])] == ["Hopper-v5", "Ant-v5"]
    assert [task for task in tasks if zoo[task] > max(runs[task])] == ["Acrobot-v1"]
    assert (
        "The zoo's run lies outside the range of our runs on three tasks only. On Hopper" in README
    )
    assert "On Acrobot the zoo's is better than all of ours, after twice our steps." in README
    below = [
        task
        for task in ("Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")
        if zoo[task] < mean(scores_of(PEERS, task))
    ]
    assert below == ["Ant-v5", "Hopper-v5"]
    for task in below:  # within the interval of SB3's mean
        peer = np.array(scores_of(PEERS, task))
        assert abs(zoo[task] - peer.mean()) < common.half_width(peer)
    told = "On Hopper and Ant all our runs beat it. But the mean of SB3's untuned defaults is above"
    assert told in README
    for task in ("CartPoleNoVel-v1", "PendulumNoVel-v1", "MountainCarContinuousNoVel-v0"):
        pair = (np.array(scores_of(names, task)) for names in (SCRIPTS, PEERS))
        assert common.welch(*pair).verdict == "undecided"
    assert "RecurrentPPO do not differ measurably on three tasks" in README


def test_no_bad_comparison_is_left_out():
    """Each task on which the zoo's run is above the mean of ours has a row with both."""
    zoo = published_by("rl-baselines3-zoo")
    ours = {row[0] for row in RESULT.findall(README)}
    for task in zoo.keys() & set(TASKS_OF_ZOO):
        if zoo[task] > mean(scores_of(SCRIPTS, task)):
            assert task in ours


def test_every_row_of_results_is_read():
    """A row that looks otherwise would be no test."""
    assert len(RESULT.findall(README)) == 13


def test_the_screening_chose_the_newest_preset():
    """Its winner has the flags of today's preset, but for what V is since."""
    answers = importlib.import_module("answers")
    study = answers.screen.STUDIES["robots"]
    chosen = common.spelt_out(SCRIPTS[1], study.flags("BDFG"))
    preset = common.spelt_out(SCRIPTS[1], "--preset mujoco --compile")
    since = frozenset({"--mean-output value"})
    assert common.flag_parts(chosen) | since == common.flag_parts(preset)


def test_robots_beside_the_highest_published_scores():
    """Our means are below them: single runs, of the zoo."""
    rows = [row for row in rows_of("published.csv") if row["source"] == "rl-baselines3-zoo"]
    told = []
    for robot, kind in (
        ("Hopper", "TRPO"), ("Walker2d", "TRPO"), ("Ant", "TRPO"), ("HalfCheetah", "PPO"),
    ):  # fmt: skip
        ours = mean(float(row["return_mean"]) for row in default_runs(SCRIPTS[1], f"{robot}-v5"))
        own = [row for row in rows_of("published.csv") if row["task"] == f"{robot}-v5"]
        best = max(own, key=lambda row: float(row["value"]))
        assert best in rows
        assert ("TRPO" if best["kind"] == "TRPO" else "PPO") == kind
        assert ours < float(best["value"])
        told.append(best["value"])
    words = "found for Hopper, Walker2d and Ant, single runs of TRPO, are above our means: {}, {} "
    assert f"{words}and {{}} (HalfCheetah: {{}}, of PPO).".format(*told) in README


def test_the_table_of_defaults():
    """Each row has the default of both scripts, "-" where one has no such flag, and what three
    presets change. No flag of these is left out."""
    head = "| flag | recurrent | feed-forward | `mujoco` | `mujoco_novel` | `calibrated` |"
    table = README.split(head)[1]
    rows = [
        [x.strip() for x in line.split("|")[1:-1]]
        for line in table.split("\n\n")[0].splitlines()[2:]
    ]
    assert len(rows) > 20
    presets = [
        importlib.import_module(script).PRESETS[name].flags
        for script, name in ((SCRIPTS[1], "mujoco"), (SCRIPTS[0], "mujoco_novel"))
    ]
    both = [importlib.import_module(script).PRESETS["calibrated"].flags for script in SCRIPTS]
    assert all(both[0][flag] == both[1][flag] for flag in both[0].keys() & both[1].keys())
    presets.append(both[0] | both[1])
    told = set()
    for name, *columns, one, other, third, about in rows:
        assert about
        told.add(name.strip("`"))
        for script, column in zip(SCRIPTS, columns):
            flags = importlib.import_module(script).Args.__dataclass_fields__
            flag = flags.get(name.strip("`"))
            assert column == (str(flag.default) if flag else "-")
        cells = [str(preset.get(name.strip("`"), "")) for preset in presets]
        assert [one, other, third] == cells
    for preset in presets:
        assert {*preset} - told <= {"env_id"}


def test_the_example_of_gae():
    """delta = 1 + 0.99 * 4 - 0.5 = 4.46 at the end, 1 + 0.99 * 0.5 - 0.5 = 0.995 before, and
    A = 0.995 + 0.9405 * 4.46 = 5.18963, then 0.995 + 0.9405 * 5.18963 = 5.87585."""
    [code] = [x.split("```")[0] for x in README.split("```python\n") if "returns = gae(" in x]
    scope = {"gae": importlib.import_module(SCRIPTS[0]).gae, "torch": torch, "print": str}
    exec(code, scope)
    expected = torch.tensor([5.87585, 5.18963, 4.46])
    assert torch.allclose(scope["advantages"].flatten(), expected)
    assert "print(advantages.flatten())  # 5.8758, 5.1896, 4.4600" in code


def test_the_example_of_the_quantile_loss():
    """Above quantiles of 0 the weight is the level, and the levels have the mean 1 / 2.
    Huber's function of 1, 2, 3 and 4 is that minus 1 / 2, on average 2: (1 / 2) * 2 = 1."""
    [code] = [x.split("```")[0] for x in README.split("```python\n")
              if "= quantile_huber_loss(" in x]  # fmt: skip
    script = importlib.import_module(SCRIPTS[0])
    scope = {"torch": torch, "quantile_midpoints": script.quantile_midpoints,
             "quantile_huber_loss": script.quantile_huber_loss}  # fmt: skip
    exec(code, scope)
    assert scope["loss"].item() == pytest.approx(1)
    scope["loss"].backward()
    assert scope["predicted"].grad.shape == (4, 32)


def test_the_job_of_a_cluster_goes_on_with_its_run(tmp_path):
    """The first time it starts a run with a name, then it resumes the folder of that name."""
    [job] = [x.split("```")[0] for x in README.split("```bash\n") if "#SBATCH" in x]
    (tmp_path / "job.sh").write_text(job)
    stand_in = tmp_path / "bin" / "srun"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\necho "$@" >> asked\n')
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"

    def submit() -> str:
        command = ["bash", "job.sh"]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
        return (tmp_path / "asked").read_text().splitlines()[-1]

    first = submit()
    assert first == "python distributional_ppo_lstm.py --exp-name chain1"
    script = importlib.import_module(SCRIPTS[0])
    args = script.parse_args([*first.split()[2:], "--run-dir", str(tmp_path / "runs")])
    directory = script.make_run_dir(args)
    assert submit() == first  # it ended before its first checkpoint
    (directory / "checkpoint.pt").write_bytes(b"")
    assert submit() == f"python distributional_ppo_lstm.py --resume runs/{directory.name}"


def test_the_lines_above_a_copied_function():
    """They are what an empty module needs, by the test of contracts."""
    [code] = [x.split("```")[0] for x in README.split("```python\n")
              if x.startswith("from __future__")]  # fmt: skip
    scope = {}
    exec(code, scope)
    assert {"math", "torch", "Callable", "Tensor", "nn"} <= scope.keys()
