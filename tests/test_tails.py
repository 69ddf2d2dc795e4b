"""Risky robots and the program that asks what aversion to risk buys on them."""

from __future__ import annotations

import contextlib
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))


@pytest.fixture
def risky_tasks():
    """The module that registers them."""
    pytest.importorskip("mujoco")
    return importlib.import_module("envs")


def iter_wrappers(env):
    """The environment and all that it wraps."""
    while True:
        yield env
        if not hasattr(env, "env"):
            return
        env = env.env


def paid(env, seed, risky, steps=2000):
    """What is taken from the reward of each step, what a hit would have cost, and the forward
    reward, where all steps are risky or none is."""
    taken = []
    env.reset(seed=seed)
    env.action_space.seed(seed)
    wrapper = next(one for one in iter_wrappers(env) if hasattr(one, "stakes"))
    wrapper.is_risky = lambda info: risky
    wrapper.stakes.clear()
    for _ in range(steps):
        _, reward, terminated, truncated, info = env.step(env.action_space.sample())
        own = sum(info[name] for name in ("reward_forward", "reward_ctrl", "reward_survive")
                  if name in info)  # fmt: skip
        taken.append((own - reward, wrapper.stakes[-1], info.get("reward_forward", 0.0)))
        if terminated or truncated:
            env.reset()
    assert len(wrapper.stakes) == steps
    return np.array(taken).T


@pytest.mark.parametrize(
    ("name", "probability", "cost", "forfeits"),
    [  # Urpi, Curi & Krause 2021, section 5 and appendix: B(p), the cost, and the forward reward
        ("RiskyHalfCheetah", 0.05, 70, True),
        pytest.param("RiskyHopper", 0.1, 50, False, marks=pytest.mark.slow),
        pytest.param("RiskyWalker2d", 0.1, 30, False, marks=pytest.mark.slow),
        pytest.param(
            "RareHalfCheetah", 0.01, 70, True, marks=pytest.mark.slow
        ),  # ours: a fifth of the probability
        ("RareHopper", 0.02, 50, False),
        pytest.param("RareWalker2d", 0.02, 30, False, marks=pytest.mark.slow),
        pytest.param("LimitHalfCheetah", 0.004, 175, True, marks=pytest.mark.slow),  # ours
    ],
)
def test_risky_robots_pay_as_in_the_paper(risky_tasks, name, probability, cost, forfeits):
    """With the probability of the paper, its cost and, for the cheetah, the forward reward; nothing
    in states that are not risky."""
    env = gym.make(f"{name}-v0")
    taken, stakes, forward = paid(env, 1, risky=True)
    hit = np.abs(taken) > 1e-3
    assert abs(hit.mean() - probability) < 4 * (probability / 2000) ** 0.5
    np.testing.assert_allclose(stakes, cost + forfeits * forward, atol=1e-4)
    np.testing.assert_allclose(taken[hit], stakes[hit], atol=1e-4)
    taken, stakes, _ = paid(env, 2, risky=False, steps=200)
    assert np.abs(taken).max() < 1e-4
    assert not stakes.any()


def test_a_penalty_comes_for_certain(risky_tasks):
    """3 at every risky step, and where there is a hit, 175 and the forward reward besides."""
    for robot in ("HalfCheetah", "Hopper", "Walker2d"):
        assert gym.make(f"Risky{robot}Penalty-v0").get_wrapper_attr("penalty") == 3
        assert gym.make(f"Risky{robot}-v0").get_wrapper_attr("penalty") == 0
    env = gym.make("LimitHalfCheetahPenalty-v0")
    taken, stakes, _ = paid(env, 1, risky=True)
    low = taken < 10
    assert 0 < (~low).sum() < 24
    np.testing.assert_allclose(taken[low], 3, atol=1e-4)
    np.testing.assert_allclose(taken[~low], 3 + stakes[~low], atol=1e-4)
    assert np.abs(paid(env, 2, risky=False, steps=200)[0]).max() < 1e-4


def test_when_a_robot_is_at_risk(risky_tasks):
    """Faster than 4, or 5; leaning beyond 0.1 (0.5) and up to 0.2 (1), where it falls. Episodes
    have 200 and 500 steps."""
    fast = risky_tasks.risky_cheetah()
    assert [fast.is_risky({"x_velocity": v}) for v in (-5, 3.9, 4.1)] == [False, False, True]
    fast = risky_tasks.risky_cheetah(**risky_tasks.LIMIT)
    assert [fast.is_risky({"x_velocity": v}) for v in (4.9, 5.1)] == [False, True]
    for make, lean in ((risky_tasks.risky_hopper, 0.1), (risky_tasks.risky_walker, 0.5)):
        env = make()
        env.reset(seed=0)
        found = []
        for angle in (0.9, -1.1, 1.9, 2.1):
            env.unwrapped.data.qpos[2] = angle * lean
            found.append(bool(env.is_risky({})))
        assert found == [False, True, True, False]
    for names in (risky_tasks.RISKY, risky_tasks.RARE):
        limits = [gym.spec(f"{name}-v0").max_episode_steps for name in names]
        assert limits == [200, 500, 500]
    for name in ("LimitHalfCheetah-v0", "LimitHalfCheetahPenalty-v0"):
        assert gym.spec(name).max_episode_steps == 200


def test_a_task_pays_up_to_a_total(risky_tasks):
    """Rewards 3, 4, -5, 6 and 2 with a limit of 6. The total goes to 3, 7, 2, 8 and 10, its part up
    to 6 to 3, 6, 2, 6 and 6: the task pays 3, 3, -4, 4 and 0, which sum to min(10, 6). After five
    steps its end is a true end, and the next episode starts anew."""
    rewards = [3.0, 4.0, -5.0, 6.0, 2.0]
    plain = gym.make("Pendulum-v1", disable_env_checker=True).unwrapped
    inner = plain.step
    given = iter(rewards * 2)
    plain.step = lambda action: (inner(action)[0], next(given), False, False, {})
    env = risky_tasks.UpTo(plain, goal=6, steps=5)
    for _ in range(2):
        obs, _ = env.reset(seed=1)
        assert obs.shape == env.observation_space.shape == (5,)
        assert (obs[-2:] == 0).all()
        steps = [env.step(np.zeros(1)) for _ in rewards]
        assert [step[1] for step in steps] == [3, 3, -4, 4, 0]
        assert [tuple(step[0][-2:]) for step in steps] == [(3, 1), (7, 2), (2, 3), (8, 4), (10, 5)]
        assert [step[2] for step in steps] == [False] * 4 + [True]
        assert not any(step[3] for step in steps)
        assert all(step[0] in env.observation_space for step in steps)
    assert env.earned == rewards * 2


def test_the_clock_changes_no_reward(risky_tasks):
    """Without a limit the rewards are those of the task; with 700 they sum to no more than that."""
    tasks = [gym.make(f"LimitHalfCheetah{name}-v0") for name in ("", "Clock", "UpTo700")]
    totals = []
    for env in tasks:
        env.reset(seed=3)
        env.action_space.seed(3)
        ends, rewards = (False, False), []
        while not any(ends):
            _, reward, *ends, _ = env.step(env.action_space.sample())
            rewards.append(reward)
        assert len(rewards) == 200
        assert ends == ([False, True] if env is tasks[0] else [True, False])
        totals.append(np.array(rewards))
    np.testing.assert_allclose(totals[1], totals[0])
    np.testing.assert_allclose(totals[2], totals[0])  # random actions earn nothing near 700
    assert tasks[2].get_wrapper_attr("goal") == 700
    assert gym.make("LimitHalfCheetahUpTo800-v0").get_wrapper_attr("goal") == 800


def test_tails_are_measured_and_reported(risky_tasks, monkeypatch, tmp_path, capsys):
    """A run of each variant at tiny size, in this process, and of a public task; every column has
    its number, and each task its panel."""
    pytest.importorskip("matplotlib")
    tails = importlib.import_module("tails")
    monkeypatch.setattr(tails, "EPISODES", 2)
    monkeypatch.setattr(tails, "MANY", 3)
    monkeypatch.setattr(tails, "RESULTS", tmp_path)
    table = tails.Table(tmp_path / "tails.csv", tails.COLUMNS, end="\n")
    monkeypatch.setattr(tails, "TABLE", table)
    small = " --total-timesteps 64 --num-steps 8 --num-minibatches 2 --no-compile"
    monkeypatch.setattr(tails, "PUBLIC", ("RiskyHopper",))
    monkeypatch.setattr(tails, "SHOWN_IN_PUBLIC", ("neutral", "penalty"))
    for cell in tails.cells(pilot=False):
        row = tails.run_one(tails.Run(replace(cell, flags=cell.flags + small), 8001))
        assert row.keys() == {*tails.COLUMNS}
        assert row["cvar_5"] <= row["cvar_10"] <= row["mean"]
        if cell.variant in (tails.STATIC, "clock"):  # they meet their hits
            assert row["safe_mean"] == row["safe_cvar_10"] == ""
        else:
            assert row["mean"] <= row["safe_mean"]
            assert row["cvar_10"] <= row["safe_cvar_10"]
        assert 0 <= row["risky_share"] <= 1
        assert row["length"] == 200 or cell.task == "RiskyHopper"
        table.append(row)
    titles = []
    save = tails.common.save

    def see(figure, path):
        titles.extend(axis.get_title(loc="left") for axis in figure.axes)
        save(figure, path)

    monkeypatch.setattr(tails.common, "save", see)
    tails.report()
    assert [title.split()[-1] for title in titles] == ["RiskyHopper", "LimitHalfCheetah"]
    text = (tmp_path / "tails.md").read_text()
    assert text.count("| LimitHalfCheetah |") == 5
    assert text.count("| RiskyHopper |") == 2
    assert (tmp_path / "tails.png").stat().st_size > 10_000


def test_an_evaluation_has_no_hits_and_knows_what_they_would_cost(risky_tasks, monkeypatch):
    """All steps are risky and all of them are hit in the task itself: a return without hits is that
    of HalfCheetah, and the mean with hits lies 200 times 175, and the forward reward, below."""
    tails = importlib.import_module("tails")
    monkeypatch.setattr(tails, "DRAWS", 3)
    script = importlib.import_module("distributional_ppo_categorical")
    certain = {"limit": -1000.0, "probability": 1.0, "cost": 175}
    gym.register(
        "CertainCheetah-v0", risky_tasks.risky_cheetah, max_episode_steps=200, kwargs=certain
    )
    monkeypatch.setattr(tails, "EPISODES", 2)
    args = script.Args(env_id="CertainCheetah-v0")
    envs = script.make_envs(args)
    agent = script.Agent(envs.single_observation_space, envs.single_action_space, args)
    envs.close()
    found = tails.measure(script, agent, args)
    plain = script.evaluate(agent, replace(args, env_id="HalfCheetah-v5", eval_episodes=2))
    gym.registry.pop("CertainCheetah-v0")
    assert found["risky_share"] == 1
    assert -200 < found["safe_mean"] < 200
    assert found["length"] == 200
    assert plain["eval/length_mean"] == 1000
    lost = found["safe_mean"] - found["mean"]
    assert abs(lost - 200 * 175) < 200  # the forward reward of 200 steps is small


def test_a_policy_that_sees_its_earnings_meets_its_hits(risky_tasks, monkeypatch):
    """All steps are hit; the task pays up to 10 and no more. The return is that of the wrapped
    task: 200 times -175 and little else, though no step of it was paid beyond."""
    tails = importlib.import_module("tails")
    monkeypatch.setattr(tails, "MANY", 3)
    monkeypatch.setattr(tails, "draw_hits", None)
    script = importlib.import_module("distributional_ppo_categorical")
    certain = {"limit": -1000.0, "probability": 1.0, "cost": 175}

    def make(**options):
        return risky_tasks.UpTo(risky_tasks.risky_cheetah(**certain, **options), 10, steps=200)

    gym.register("SeenCheetah-v0", make)
    args = script.Args(env_id="SeenCheetah-v0")
    envs = script.make_envs(args)
    agent = script.Agent(envs.single_observation_space, envs.single_action_space, args)
    envs.close()
    found = tails.measure(script, agent, args)
    gym.registry.pop("SeenCheetah-v0")
    assert found["safe_mean"] == found["safe_cvar_10"] == ""
    assert found["risky_share"] == 1
    assert found["length"] == 200
    assert abs(found["mean"] + 200 * 175) < 400
    assert found["cvar_5"] <= found["cvar_10"] <= found["mean"]


@pytest.fixture
def tails(monkeypatch, tmp_path):
    """The program, with a table of its own, and unable to run anything."""
    program = importlib.import_module("tails")
    table = replace(program.TABLE, path=tmp_path / "tails.csv")
    monkeypatch.setattr(program, "TABLE", table)
    monkeypatch.setattr(program, "RESULTS", tmp_path)
    monkeypatch.setattr(program, "run_one", None)
    monkeypatch.setattr(program.common, "require", lambda *_: None)
    return program


def test_hits_are_drawn_with_their_probability(tails):
    """Two episodes of 100 and 50 steps, a stake of 2 and of 4 at each; a tenth is hit: means of
    20 and 20, standard deviations of 2 sqrt(9) = 6 and 4 sqrt(4.5) = 8.5."""
    returns = tails.draw_hits(np.array([1.0, 2.0]), [np.full(100, 2.0), np.full(50, 4.0)], 0.1)
    assert returns.shape == (2, tails.DRAWS)
    np.testing.assert_allclose(returns.mean(1), [1 - 20, 2 - 20], atol=1)
    np.testing.assert_allclose(returns.std(1), [6, 8.5], rtol=0.1)
    none = tails.draw_hits(np.array([1.0]), [np.zeros(9)], 0.5)
    assert (none == 1).all()


def test_neutral_policies_differ_from_averse_ones_in_the_weight_alone(tails):
    """A weight of 0 turns one into the other. Penalties and totals are in the task; totals come
    with a discount of 1."""
    script = tails.common.load_script(tails.CATEGORICAL)
    for task, variants in ((tails.TASK, tails.VARIANTS), (tails.LANDER, tails.LANDERS)):
        cells = [cell for cell in tails.cells(True) if cell.task == task]
        args = {cell.variant: script.parse_args(cell.flags.split()) for cell in cells}
        assert args.keys() == variants.keys()
        assert (args["averse"].cvar_weight, args["averse 0.5"].cvar_weight) == (1, 0.5)
        for name, own in args.items():
            if name == "clock" or name.startswith("up to"):
                assert own.gamma == 1
                own = replace(own, gamma=args["neutral"].gamma)
            assert replace(own, cvar_weight=0.0) == args["neutral"]


def test_a_task_without_hits_is_measured_as_it_is(monkeypatch):
    """CartPole-v1, two episodes: nothing is drawn, and no step is risky."""
    tails = importlib.import_module("tails")
    monkeypatch.setattr(tails, "LANDER", "CartPole-v1")
    monkeypatch.setattr(tails, "EPISODES", 3)
    flags = "--total-timesteps 64 --num-steps 8"
    cell = tails.Cell("CartPole-v1", tails.CATEGORICAL, "", flags, range(1))
    row = tails.run_one(tails.Run(cell, 1))
    assert row["mean"] == row["safe_mean"] == row["length"]
    assert row["cvar_10"] == row["safe_cvar_10"] <= row["mean"]
    assert row["risky_share"] == 0


def test_a_penalty_is_trained_on_and_not_scored(tails, monkeypatch):
    """Its policy plays the task of the others. One that was paid up to a total plays its own task,
    since it has to see the total."""
    trained, played = [], []
    done = SimpleNamespace(directory="nowhere", seconds=1)

    def train(script, task, *given):
        trained.append(task)
        return contextlib.nullcontext(done)

    script = tails.common.load_script(tails.CATEGORICAL)
    monkeypatch.undo()  # the fixture's lack of run_one
    monkeypatch.setattr(tails.common, "trained", train)
    monkeypatch.setattr(
        script, "load_agent", lambda directory: (None, script.Args(env_id=trained[-1]))
    )
    monkeypatch.setattr(tails, "measure", lambda script, agent, args: played.append(args) or {})
    for cell in tails.cells(pilot=False):
        tails.run_one(tails.Run(cell, 8001))
    task = f"envs:{tails.TASK}"
    total = tails.STATIC.removeprefix("up to ")
    seen = (f"UpTo{total}", "Clock")
    assert trained[:5] == [f"{task}{own}-v0" for own in ("", "", *seen, "Penalty")]
    assert [args.env_id for args in played[:5]] == [
        f"{task}{own}-v0" for own in ("", "", *seen, "")
    ]
    public = [f"envs:{task}" for task in tails.PUBLIC]
    assert trained[5:] == [f"{task}{own}-v0" for task in public for own in ("", "", "Penalty")]
    assert [args.env_id for args in played[5:]] == [
        f"{task}-v0" for task in public for _ in range(3)
    ]


def test_the_worst_tenth_worked_by_hand(tails, monkeypatch):
    """Returns 0, 1 to 19, each of as many steps: the worst two have a mean of 0.5, the worst one
    0."""
    script = tails.common.load_script(tails.CATEGORICAL)
    monkeypatch.setattr(script, "make_eval_env", lambda args: gym.make("CartPole-v1"))
    monkeypatch.setattr(script, "play", lambda *given: [np.ones(n) for n in range(20)])
    found = tails.measure(script, None, script.Args())
    assert found["mean"] == found["safe_mean"] == found["length"] == 9.5
    assert (found["cvar_10"], found["cvar_5"], found["safe_cvar_10"]) == (0.5, 0, 0.5)


def rows_of_a_pilot(tails, safe, **better):
    """The table with a row for each variant, where the worst tenth has this without hits. `better`
    has the mean and the tail of one aversion."""
    for cell in tails.cells(pilot=True):
        row = dict.fromkeys(tails.COLUMNS, 1) | cell.setting._asdict() | {"flags": ""}
        numbers = {"seed": 1001, "mean": 100, "cvar_10": 40, "safe_cvar_10": safe}
        tails.TABLE.append(row | numbers | (better if cell.variant == "averse 0.5" else {}))


def test_reported_seeds_wait_for_a_pilot_with_a_tail(tails, monkeypatch):
    """First it has no rows; then hits take 4 of 100 from the tail; then they take 6, but another
    aversion has a better tail. At last that one is too dear."""
    monkeypatch.setattr(sys, "argv", ["tails.py"])
    monkeypatch.setattr(tails, "CHOSEN", "averse")
    monkeypatch.setattr(tails, "STATIC", "up to 700")
    for rows, error in (
        (None, "the pilot has not run"),
        ({"safe": 44}, r"LimitHalfCheetah: hits take 4\.0% of the mean"),
        ({"safe": 46, "mean": 86, "cvar_10": 50}, r"the pilot prefers averse 0\.5, and"),
    ):
        if rows:
            tails.TABLE.path.unlink(missing_ok=True)
            rows_of_a_pilot(tails, **rows)
        with pytest.raises(SystemExit, match=f"^error: {error}"):
            tails.main()
    tails.TABLE.path.unlink()
    rows_of_a_pilot(tails, 46, mean=84, cvar_10=50)
    assert tails.objection(tails.TABLE.rows()) == ""


def test_a_pilot_never_sees_a_reported_seed(tails):
    """Seeds that are named are some of the cells' own, and runs come seed by seed."""
    assert tails.missing(True, [], [8001]) == tails.missing(False, [], [1001]) == []
    assert [run.seed for run in tails.missing(True, [], [])] == [1001] * 10
    assert [run.seed for run in tails.missing(False, [], [])[:15]] == [8001] * 14 + [8002]
    assert len(tails.missing(False, [], [])) == 25 + 3 * 15
    assert len(tails.missing(False, ["penalty", "Hopper"], [8001, 1001])) == 1


def test_the_goal_is_a_better_tail_for_a_small_price():
    """The tail is better by far. A mean of 86 beside 100 is within 15 %, one of 84 is not."""
    tails = importlib.import_module("tails")
    same = {"task": "Task", "std": 1, "cvar_5": 0, "safe_cvar_10": "", "risky_share": 0.25}
    rows = [
        same | {"variant": variant, "mean": mean, "cvar_10": str(tail + noise)}
        for variant, mean, tail in (("neutral", 100, 0), ("cheap", 86, 50), ("dear", 84, 50))
        for noise in (0, 1)
    ]
    assert [line.split(" | ")[-1] for line in tails.lines_of(rows)[3:]] == ["met |", "missed |"]


def test_runs_that_never_reached_their_total_are_named():
    """They have what the run without a limit has, by mean and spread, on the same seed."""
    tails = importlib.import_module("tails")
    rows = [
        {"task": "Task", "variant": variant, "seed": seed, "mean": mean, "std": "1"}
        for variant, seed, mean in (
            ("clock", "1", "5"),
            ("clock", "2", "6"),
            ("up to 800", "1", "5"),
            ("up to 800", "2", "5"),
            ("neutral", "1", "5"),
        )
    ]
    told = "No episode of these reached its total, so they equal clock: up to 800 (seed 1)."
    assert tails.unlimited(rows) == [told]
    assert tails.unlimited(rows[1:]) == []


def test_the_tails_table_worked_by_hand():
    """Two seeds of 90 and 110, then 100 and 140: means 100 and 120, +20 %. CVaRs 0 and 20, then 60
    and 80: a difference of 60, with a standard error of sqrt(100 + 100), and t(2) = 4.303."""
    tails = importlib.import_module("tails")
    numbers = {"std": 1, "cvar_5": "0", "safe_cvar_10": "", "risky_share": 0.25, "length": 10}
    rows = [
        {"task": "Task", "variant": variant, "mean": mean, "cvar_10": str(tail), **numbers}
        for variant, mean, tail in (
            ("neutral", 90, 0),
            ("neutral", 110, 20),
            ("averse", 100, 60),
            ("averse", 140, 80),
        )
    ]
    line = tails.lines_of(rows)[-1]
    assert line == (
        "| Task | averse | 2 | 120 +- 254 | 70 +- 127 | 0 +- 0 |  | 25.0% | +20.0% "
        "| +60 (-1 to +121) | missed |"
    )
