"""The factorial design of benchmarks/screen.py, and what its report says of made rows."""

import importlib
import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

TASK = {"study": "cartpole_novel", "task": "CartPoleNoVel-v1"}


@pytest.fixture
def screen():
    """The program as a module."""
    return importlib.import_module("screen")


def levels_of(screen):
    """(16, 8): +1 where a setting makes a change, -1 where it does not."""
    settings = screen.design()
    return np.array([[1 if x in setting else -1 for x in screen.LETTERS] for setting in settings])


def test_no_effect_is_mixed_with_another_or_with_a_pair(screen):
    """Resolution IV: each column is orthogonal to every other and to each product of two others,
    and each change is made in half of the settings."""
    levels = levels_of(screen)
    assert levels.shape == (16, 8)
    assert len(set(screen.design())) == 16
    assert (levels.sum(axis=0) == 0).all()
    assert (levels.T @ levels == 16 * np.eye(8)).all()
    for one, other in itertools.combinations(range(8), 2):
        pair = levels[:, one] * levels[:, other]
        assert not (levels.T @ pair).any()


def test_the_first_setting_is_the_line_and_the_last_makes_every_change(screen):
    settings = screen.design()
    assert settings[0] == ""
    assert settings[-1] == screen.LETTERS
    study = screen.STUDIES["robots"]
    assert study.flags("") == study.line
    assert study.flags("AH").endswith(f"{study.changes[0]} {study.changes[7]}")


def test_effects_are_differences_of_means(screen):
    """With orthogonal columns, least squares gives the mean of the runs with a change minus the
    mean of those without. What is left over has 16 - 9 = 7 degrees of freedom, and an effect is a
    difference of two means of eight runs, so its variance is s^2 (1/8 + 1/8)."""
    settings = screen.design()
    values = np.random.default_rng(1).normal(0.8, 0.2, 16)
    effects = screen.effects_of(settings, values)
    levels = levels_of(screen)
    expected = [values[column > 0].mean() - values[column < 0].mean() for column in levels.T]
    assert effects.changes == pytest.approx(expected)
    assert effects.mean == pytest.approx(values.mean())
    left = values - values.mean() - levels @ np.array(expected) / 2
    assert effects.error == pytest.approx(np.sqrt(left @ left / 7 * (1 / 8 + 1 / 8)))


def test_a_design_that_is_not_whole_tells_no_effect(screen):
    """Where one setting lacks a run, columns are mixed with each other and with pairs. A second
    run of each other setting does not mend that."""
    first = [TASK | {"setting": x, "return_mean": 0, "share_lost": ""} for x in screen.design()]
    assert list(screen.effects_by_measure(first)) == ["evaluation"]
    assert screen.effects_by_measure(first[1:] * 2) == {}
    for name, study in screen.STUDIES.items():
        has_own_line = study.line_rows == screen.NO_ROWS
        waits = [f"{name}: not all settings have a row."] if has_own_line else []
        assert screen.report(name, []) == waits


def test_the_score_of_robots_has_the_error_of_its_own_means(screen):
    """A pair of changes, A with B, is worth 0.1 on all four robots, and nothing else happens. Each
    robot's error is that of what the fit leaves over, and the same is left over of their mean:
    robots are no independent witnesses. The mean of four independent errors would be half of it."""
    rows = [
        {"task": task, "setting": x, "return_mean": best * (0.7 + 0.1 * ("A" in x and "B" in x))}
        for task, best in screen.BEST.items()
        for x in screen.design()
    ]
    told = screen.effects_by_measure(rows)
    assert list(told) == [*screen.BEST, "score"]
    assert told["score"].error == pytest.approx(told["Ant-v5"].error)
    assert told["score"].error > 0.01
    assert list(screen.effects_by_measure(rows[:48])) == [*screen.BEST][:3]


def test_the_report_of_robots_averages_their_scores(screen):
    """Change A is worth 0.2 of the best on Ant and 0.1 on Hopper; others are worth nothing, and
    there is no noise: +0.075 over four robots, without an error. Half of the runs make it, so the
    means are 0.7 + 0.1 and 0.7 + 0.05."""
    worth = {"Ant-v5": 0.2, "Hopper-v5": 0.1, "Walker2d-v5": 0, "HalfCheetah-v5": 0}
    rows = [
        {
            "study": "robots",
            "task": task,
            "setting": setting,
            "return_mean": best * score,
            "seed": 0,
        }
        for task, gain in worth.items()
        for best in [screen.BEST[task]]
        for setting in screen.design()
        for score in [0.7 + gain * ("A" in setting)]
    ]
    other = [row | {"study": "pendulum_novel"} for row in rows]
    told = screen.report("robots", rows + other)
    assert told[0] == "| change | Ant-v5 | Hopper-v5 | Walker2d-v5 | HalfCheetah-v5 | score |"
    assert told[2] == "| mean of all runs | 0.800 | 0.750 | 0.700 | 0.700 | 0.738 |"
    first = screen.STUDIES["robots"].changes[0]
    assert told[3].startswith(f"| `{first}` | +0.200 ± 0.000 | +0.100 ± 0.000 | ")
    assert told[3].endswith(" | +0.075 ± 0.000 |")
    assert all(re.search(r"\| [+-]0.000 ± 0.000 \|$", line) for line in told[4:])


def test_the_report_of_a_task_with_a_threshold_tells_when_and_how_firmly(screen):
    """Change B halves the steps, from 60,000 to 30,000. One that is never there counts 100,000."""
    rows = [
        TASK
        | {"setting": setting, "seed": "0"}
        | {"return_mean": "500", "share_lost": "0.1"}
        | {"steps_to_threshold": "30000" if "B" in setting else "60000"}
        for setting in screen.design()
    ]
    told = screen.report("cartpole_novel", rows)
    assert told[0] == "| change | evaluation | thousand steps | share lost |"
    assert told[2] == "| mean of all runs | 500.0 | 45.0 | 0.100 |"
    assert "| -30.0 ± 0.0 |" in told[4]
    never = screen.effects_by_measure([rows[0] | {"steps_to_threshold": "inf"}, *rows[1:]])
    assert never["thousand steps"].mean == pytest.approx(45 + 40 / 16)


@pytest.mark.parametrize("name", ["robots", "cartpole_novel", "pendulum_novel"])
def test_every_setting_is_a_line_of_flags_that_the_script_takes(screen, name):
    """Each task has sixteen settings with seeds of their own, and no run is told twice. A change
    moves the flags that it names and no other."""
    study = screen.STUDIES[name]
    script = screen.common.load_script(study.script)
    runs = screen.all_runs(study)
    assert len(runs) == len({(run.cell.task, run.seed) for run in runs})
    assert len(runs) == 16 * study.seeds * len(study.tasks)
    line = script.parse_args(study.line.split())
    every = script.parse_args(study.flags(screen.LETTERS).split())
    assert (line.twin_reduce, every.twin_reduce) == ("min", "mean")
    for letter, change in zip(screen.LETTERS, study.changes, strict=True):
        alone = script.parse_args(study.flags(letter).split())
        differ = {x for x in vars(line) if getattr(line, x) != getattr(alone, x)}
        named = {word[2:].replace("-", "_") for word in change.split() if word.startswith("--")}
        assert differ == named


def made_study(screen, monkeypatch):
    """A study with two candidates and two seeds in its second stage."""
    study = screen.STUDIES["cartpole_novel"]._replace(
        second_seeds=range(2100, 2102), candidates=("D", "AB")
    )
    monkeypatch.setitem(screen.STUDIES, "cartpole_novel", study)
    return study


def test_the_second_stage_runs_candidates_and_the_line_seed_by_seed(screen, monkeypatch):
    """So that an interrupted one has compared like with like."""
    study = made_study(screen, monkeypatch)
    monkeypatch.setattr(screen.Table, "rows", lambda self: [])
    runs = screen.missing("cartpole_novel", stage="second")
    assert [(run.seed, run.cell.variant) for run in runs] == [
        (seed, setting) for seed in (2100, 2101) for setting in ("", "D", "AB")
    ]
    assert runs[1].cell.flags == study.flags("D")


def test_the_second_stage_is_told_beside_the_line(screen, monkeypatch):
    """Its rows are no part of the effects. The candidate's mean is 500, the line's 475 with a
    standard error of 25. Welch's interval has one degree of freedom: 25 +- 12.71 x 25 = 318."""
    made_study(screen, monkeypatch)
    rows = []
    for setting, values in (("", (450, 500)), ("D", (500, 500)), ("AB", (400, 474))):
        for seed, value in zip((2100, 2101), values, strict=True):
            own = {"setting": setting, "seed": seed, "return_mean": value}
            told = {"steps_to_threshold": 30000 + value, "share_lost": value / 5000}
            rows.append(TASK | own | told)
    even = {"return_mean": 500, "steps_to_threshold": 30000, "share_lost": "0.1", "seed": 2000}
    first = [TASK | {"setting": x} | even for x in screen.design()]
    assert screen.report("cartpole_novel", rows + first) == screen.report("cartpole_novel", first)
    told = screen.second_report("cartpole_novel", rows)
    assert told[2] == "| the line | 2 | 475.0 | 450.0 | 1 | 30,475 | 0.095 | - |"
    assert told[3].startswith(
        "| `--target-kl 0.02` | 2 | 500.0 | 500.0 | 0 | 30,500 | 0.100 | +25.0 ("
    )
    assert "(-292.7 to +342.7)" in told[3]
    assert "| 437.0 | 400.0 | 2 |" in told[4]
    assert screen.second_report("cartpole_novel", rows[:4]) == told[:4]
    assert screen.second_report("cartpole_novel", rows[:2]) == []


def test_the_second_stage_of_robots_worked_by_hand(screen, monkeypatch):
    """The line has 0.8 and 1.2 of the best on Ant and 0.4 twice on the three others: the means are
    1 and 0.4, three times, so the score is 0.55. Ant's mean has an error of sqrt(0.08 / 2) = 0.2,
    the others' none, so the score's is 0.2 / 4 = 0.05. Six of eight runs are below a half. The
    candidate has half of everything, and the difference an error of sqrt(0.05^2 + 0.025^2)."""
    study = screen.STUDIES["robots"]._replace(candidates=("H",))
    monkeypatch.setitem(screen.STUDIES, "robots", study)
    rows = []
    for task, best in screen.BEST.items():
        for seed, score in enumerate((0.8, 1.2) if task == "Ant-v5" else (0.4, 0.4), 2100):
            for setting, times in (("", 1.0), ("H", 0.5)):
                row = {"study": "robots", "task": task, "setting": setting, "seed": seed}
                rows.append(row | {"return_mean": score * times * best})
    told = screen.second_report("robots", rows)
    names = " | ".join(screen.BEST)
    head = f"| second stage | runs | {names} | score ± standard error | below half "
    head += "| score minus the line's ± standard error |"
    assert told[0] == head
    means = [best * (1.0 if task == "Ant-v5" else 0.4) for task, best in screen.BEST.items()]
    cells = " | ".join(f"{mean:.0f}" for mean in means)
    assert told[2] == f"| the line | 8 | {cells} | 0.550 ± 0.050 | 75% | - |"
    assert told[3].startswith("| `--twin-reduce mean` | 8 | ")
    assert told[3].endswith(" | 0.275 ± 0.025 | 88% | -0.275 ± 0.056 |")
    assert screen.second_report("robots", rows[::2]) == []


def test_runs_with_a_row_are_not_missing(screen, monkeypatch):
    """Those of another study are."""
    line = screen.STUDIES["robots"].line
    row = {"study": "robots", "task": "Ant-v5", "flags": line, "seed": "2000"}
    monkeypatch.setattr(screen.Table, "rows", lambda self: [row, row | {"study": "other"}])
    left = screen.missing("robots", ["Ant-v5"])
    assert len(left) == 15
    assert all(run.cell.variant for run in left)
    assert len(screen.missing("robots")) == 63
    assert len(screen.missing("pendulum_novel")) == 16
    row["flags"] += " --hidden-size 9"  # of a line that was another one
    assert len(screen.missing("robots")) == 64


def test_the_order_of_runs_has_nothing_to_do_with_the_changes(screen):
    """What drifts during a study shall be no effect. Each change is made by a quarter to three
    quarters of the first half of the runs."""
    runs = screen.all_runs(screen.STUDIES["robots"])
    for letter in screen.LETTERS:
        assert 8 <= sum(letter in run.cell.variant for run in runs[:32]) <= 24
    assert runs == screen.all_runs(screen.STUDIES["robots"])


def test_rows_of_a_candidate_that_is_none_any_more_are_left_out(screen, monkeypatch):
    """Two of the line and two of each candidate; one of them is taken from the list."""
    study = made_study(screen, monkeypatch)
    rows = [
        TASK
        | {"setting": x, "seed": seed, "return_mean": 1, "steps_to_threshold": 1}
        | {"share_lost": 0.5}
        for x in ("", *study.candidates)
        for seed in (2100, 2101)
    ]
    assert len(screen.second_report("cartpole_novel", rows)) == 5
    monkeypatch.setitem(screen.STUDIES, "cartpole_novel", study._replace(candidates=("D",)))
    assert len(screen.second_report("cartpole_novel", rows)) == 4


def test_robots_with_too_few_runs_are_not_told(screen, monkeypatch):
    """Two runs of each setting at least: one alone has no standard error."""
    study = screen.STUDIES["robots"]._replace(candidates=("H",))
    monkeypatch.setitem(screen.STUDIES, "robots", study)
    rows = [
        {"study": "robots", "task": "Ant-v5", "setting": x, "seed": seed, "return_mean": 3554}
        for x in ("", "H")
        for seed in (2100, 2101)
    ]
    hopper = rows[0] | {"task": "Hopper-v5"}
    told = screen.second_report("robots", [*rows, hopper])
    assert told[2] == "| the line | 2 | 3554 | 1.000 ± 0.000 | 0% | - |"
    assert screen.second_report("robots", rows[1:]) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["robots", "--second"], "--second: robots has no candidates yet, see STUDIES"),
        (["robots", "--tasks", "Ant"], "--tasks Ant: robots has Hopper-v5 Walker2d-v5 Ant-v5"),
        (["cartpole_novel", "--parts"], "--parts: cartpole_novel has none, see STUDIES"),
        (
            ["robots", "--parts", "--tasks", "Hopper-v5"],
            "--tasks Hopper-v5: robots has Ant-v5 HalfCheetah-v5",
        ),
    ],
)
def test_what_cannot_run_is_said_in_a_line(screen, monkeypatch, capsys, words, line):
    """Ahead of any run."""
    study = screen.STUDIES["robots"]._replace(candidates=())
    monkeypatch.setitem(screen.STUDIES, "robots", study)
    monkeypatch.setattr(sys, "argv", ["screen.py", *words])
    with pytest.raises(SystemExit, match="2"):
        screen.main()
    assert line in capsys.readouterr().err


def test_pairs_tell_the_changes_of_a_candidate_apart(screen, monkeypatch):
    """Twelve runs: six pairs of four changes on two robots, each a line that the script takes."""
    monkeypatch.setattr(screen.Table, "rows", lambda table: [])
    runs = screen.missing("robots", stage="parts")
    assert len(runs) == 12
    for run in runs:
        screen.common.load_script(run.cell.script).parse_args(run.cell.flags.split())
    assert {run.cell.variant for run in runs} == {"BD", "BF", "BG", "DF", "DG", "FG"}
    assert {run.cell.task for run in runs} == {"Ant-v5", "HalfCheetah-v5"}
    settings = ["", *screen.pairs_of("BDFG"), "BDFG"]
    levels = np.array([[1 if x in setting else -1 for x in "BDFG"] for setting in settings])
    assert (levels.T @ levels == 8 * np.eye(4)).all()
    for one, other in itertools.combinations(range(4), 2):
        assert not (levels.T @ (levels[:, one] * levels[:, other])).any()


def test_effects_of_parts_worked_by_hand(screen):
    """The line has 1 and 3, the candidate 6, every pair 4, but those with B have 5. Means: 2, 6, 5
    (BD, BF, BG), 4 (DF, DG, FG). B: (6 + 5 + 5 + 5 - 2 - 4 - 4 - 4) / 4 = 7 / 4. D, of BD, DF, DG:
    (6 + 5 + 4 + 4 - 2 - 5 - 5 - 4) / 4 = 3 / 4. The variance of a run is that of the line, 2, with
    one degree of freedom; the effects' is 2 (1/2 + 7) / 16."""
    groups = {"": np.array([1.0, 3.0]), "BDFG": np.array([6.0])}
    groups |= {pair: np.array([5.0 if "B" in pair else 4.0]) for pair in screen.pairs_of("BDFG")}
    effects, error = screen.effects_on_score(groups, "BDFG")
    assert effects.tolist() == [1.75, 0.75, 0.75, 0.75]
    assert error == pytest.approx((2 * 7.5 / 16) ** 0.5)


def test_the_report_of_parts_waits_for_every_setting(screen):
    """Then it has a line for each change, in scores: Ant's best is 3554, HalfCheetah's 4628."""
    study = screen.STUDIES["robots"]
    settings = ["", "", *screen.pairs_of("BDFG"), "BDFG"]
    rows = [
        {
            "study": "robots",
            "task": task,
            "setting": setting,
            "seed": str(2100 + index % 6 if setting in ("", "BDFG") else 2200),
            "return_mean": str(screen.BEST[task] * ("F" in setting)),
        }
        for task in study.part_tasks
        for index, setting in enumerate(settings)
    ]
    assert screen.part_report("robots", rows[:-1]) == []
    head, _, *lines = screen.part_report("robots", rows)
    assert head == "| effect on the score | Ant-v5 | HalfCheetah-v5 | mean |"
    assert [line.split("|")[1].strip() for line in lines] == [study.told(x) for x in "BDFG"]
    assert [line.count("+1.000 ± 0.000") for line in lines] == [0, 0, 3, 0]
    assert screen.part_report("cartpole_novel", rows) == []
    only_first = [row | {"study": "robots", "seed": "2000"} for row in rows]
    assert screen.report("robots", [*only_first, *rows]) == screen.report("robots", only_first)


def test_a_candidate_that_has_stopped_runs_no_further(screen, monkeypatch):
    """Its rows are told all the same; a new candidate without runs is left out."""
    study = screen.STUDIES["robots"]._replace(candidates=("H", "B"), stopped=("H",))
    monkeypatch.setitem(screen.STUDIES, "robots", study)
    rows = [
        {"study": "robots", "task": "Ant-v5", "setting": x, "seed": seed, "return_mean": 3554}
        for x in ("", "H")
        for seed in (2100, 2101)
    ]
    assert {run.cell.variant for run in screen.second_runs(study)} == {"", "B"}
    assert len(screen.second_report("robots", rows)) == 4


def test_eight_settings_tell_five_changes_apart(screen):
    """Resolution III: the columns are orthogonal to each other. The line is one of the settings."""
    settings = screen.design(5)
    assert settings[0] == ""
    levels = np.array([[1 if x in setting else -1 for x in "ABCDE"] for setting in settings])
    assert (levels.T @ levels == 8 * np.eye(5)).all()
    assert (levels.sum(axis=0) == 0).all()


def test_a_candidate_of_another_study_is_the_line_and_runs_no_more(screen, monkeypatch):
    """Its rows of the second stage count. Rows of other stages, and of its other settings, do not.
    Change B doubles the best score of every robot, 1, and each robot has two runs of the line."""
    monkeypatch.setattr(screen.Table, "rows", lambda table: [])
    study = screen.STUDIES["robots_again"]
    runs = screen.missing("robots_again")
    assert len(runs) == 7 * 4
    assert "" not in {run.cell.variant for run in runs}
    assert study.line == screen.STUDIES["robots"].flags("BDFG")
    rows = [
        {
            "study": "robots_again",
            "task": run.cell.task,
            "setting": run.cell.variant,
            "seed": str(run.seed),
            "return_mean": str(screen.BEST[run.cell.task] * (1 + ("B" in run.cell.variant))),
        }
        for run in runs
    ]
    for task in study.tasks:
        old = {"study": "robots", "task": task, "return_mean": str(screen.BEST[task])}
        rows += [old | {"setting": "BDFG", "seed": seed} for seed in ("2100", "2101")]
        rows += [old | {"setting": "BDFG", "seed": "2005", "return_mean": "0"}]
        rows += [old | {"setting": "BFG", "seed": "2100", "return_mean": "0"}]
    assert screen.again_report("robots", rows) == []
    assert screen.again_report("robots_again", rows[1:]) == []
    head, _, *lines = screen.again_report("robots_again", rows)
    assert head == "| effect on the score | " + " | ".join([*study.tasks, "mean"]) + " |"
    assert [line.split("|")[1].strip() for line in lines] == [study.told(x) for x in "ABCDE"]
    assert [line.count("+1.000 ± 0.000") for line in lines] == [0, 5, 0, 0, 0]


def test_a_candidate_of_robots_again_meets_the_line_of_robots(screen, monkeypatch):
    """Which runs no more: a candidate has four runs on each robot. Both have half of the best, and
    the rows of another candidate, of another stage and of the study's own line do not count."""
    study = screen.STUDIES["robots_again"]._replace(candidates=("B",))
    monkeypatch.setitem(screen.STUDIES, "robots_again", study)
    assert [run.cell.variant for run in screen.second_runs(study)] == ["B"] * 16
    rows = []
    for task, best in screen.BEST.items():
        old = {"study": "robots", "task": task, "return_mean": str(best / 2)}
        rows += [old | {"setting": "", "seed": seed} for seed in ("2100", "2101")]
        rows += [old | {"setting": "BDFG", "seed": "2100", "return_mean": "0"}]
        rows += [old | {"setting": "", "seed": "2000", "return_mean": "0"}]
        new = old | {"study": "robots_again"}
        rows += [new | {"setting": "B", "seed": seed} for seed in ("2400", "2401")]
        rows += [new | {"setting": "B", "seed": "2301", "return_mean": "0"}]
    told = screen.second_report("robots_again", rows)
    assert len(told) == 4
    assert told[2].startswith("| the line | 8 | ")
    assert "| 0.500 ± 0.000 | 0% |" in told[2]
    assert told[3].startswith("| `--critic-hidden-size 256` | 8 | ")
    assert told[3].endswith("| +0.000 ± 0.000 |")


def test_a_study_without_candidates_left_runs_no_line(screen):
    """As `cartpole_novel`, whose candidate has stopped."""
    assert screen.second_runs(screen.STUDIES["cartpole_novel"]) == []
    robots = screen.STUDIES["robots"]
    assert screen.second_runs(robots) != []
    assert screen.second_runs(robots._replace(stopped=robots.candidates)) == []


def test_flags_that_the_script_lacks_are_said_ahead_of_any_run(screen, monkeypatch, capsys):
    """The trial flags are those of another commit."""
    monkeypatch.setattr(sys, "argv", ["screen.py", "robots_again"])
    monkeypatch.setattr(screen.Table, "rows", lambda table: [])
    monkeypatch.setattr(screen.common, "run_all", None)
    with pytest.raises(SystemExit):
        screen.main()
    assert "--recompute-advantages" in capsys.readouterr().err


def test_rows_of_a_study_that_was_changed_are_not_told(screen, monkeypatch):
    """A setting is a few letters, whose flags the study may change; and a study may have gone."""
    study = screen.STUDIES["robots"]
    same = {"study": "robots", "setting": "AB", "flags": study.flags("AB")}
    rows = [same, same | {"flags": "--gamma 0.5"}, same | {"study": "robots_third"}]
    monkeypatch.setattr(screen.Table, "rows", lambda table: rows)
    assert screen.rows_told() == [same]
