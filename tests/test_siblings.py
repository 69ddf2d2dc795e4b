"""The two scripts are the same but for listed seams, and their value distributions exchange."""

from __future__ import annotations

import ast
import functools
import importlib.util
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from types import ModuleType

import pytest
from command import run_main
from helpers import small_args

ROOT = Path(__file__).resolve().parents[1]
LSTM, CATEGORICAL = "distributional_ppo_lstm.py", "distributional_ppo_categorical.py"
SEAMS = {  # defined in both, different on purpose
    "SCRIPT": "its name",
    "CALIBRATED": "flags of quantiles or of atoms",
    "ROBOTS": "a flag of atoms, or nothing",
    "TaskArgs": "the default task",
    "NetworkArgs": "the width of the LSTM",
    "PPOArgs": "the length of training sequences, other defaults",
    "CriticArgs": "atoms have no PopArt, another default",
    "ValueDistributionArgs": "flags of quantiles or of atoms",
    "RunArgs": "the name of the experiment",
    "MachineArgs": "only the feed-forward one has something to compile",
    "Args": "the length of training sequences",
    "Rollout": "the recurrent one books where episodes open and the states ahead of sequences",
    "Batch": "sequences with the states ahead of them, or rows",
    "train": "hands on the carry and the critics' state, or the observations to act on",
    "collect_rollout": "the actor's state goes along and is zeroed where an episode opens",
    "run_critics": "a pass over time, cut at time limits, or every observation on its own",
    "prepare_batch": "the critics' state is carried on, and time is cut into sequences",
    "minibatches": "shuffled sequences, or shuffled rows",
    "policy_loss": "networks get states and episode starts; tensors have two axes, or one",
    "value_loss": "networks get states and episode starts; tensors have two axes, or one",
    "train_actor": "the feed-forward one may compile its loss",
    "train_critics": "the feed-forward one may compile its loss",
    "ValueDistribution": "quantiles or atoms, behind the same methods",
    "layer_init": "the recurrent one initialises LSTM layers, too",
    "make_encoder": "an LSTM comes after it, or a second layer",
    "Agent": "an LSTM's methods take and give states, others look at one observation",
    "PRESETS": "other tasks, and flags of quantiles or of atoms",
    "open_episodes": "gives the carry and the critics' state, or the observations to act on",
    "start": "the feed-forward one looks for a compiler",
    "run_episode": "the agent remembers, or not",
    "check_sizes": "what minibatches must divide",
}
# Methods of one ValueDistribution alone, which nothing but the class itself calls.
OF_ONE = {
    LSTM: set(),
    CATEGORICAL: {
        "describe_statistics",
        "normalized_mean",
        "normalized_value",
        "outside_support",
        "probs",
        "task_atoms",
    },
}
# What training does, in the order in which it does it.
ORDER = """
train collect_rollout run_critics gae prepare_batch minibatches policy_loss value_loss update
train_actor train_critics with_gradient take_step
clipped_policy_loss ValueDistribution make_encoder Agent
make_env describe_critics Run evaluate average UsageError main
""".split()
RULE = "# Nothing below is about the algorithm."
# Words of processes, terminals and files. Above the rule only `average` and `own` are allowed.
BELOW = """
RANK WORLD_SIZE distributed isatty print open Path pickle signal SummaryWriter gather
gather_objects
""".split()


@functools.cache
def source(name: str) -> str:
    """Text of a script."""
    return (ROOT / name).read_text()


@functools.cache
def definitions(text: str) -> dict[str, str]:
    """Top-level functions, classes and constants by name, with their text and decorators."""
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        body = "\n".join(lines[start - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = body
        elif isinstance(node, ast.Assign):
            found[node.targets[0].id] = body
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = body
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.If):
            found[body] = body
    return found


def test_what_both_define_is_identical_but_for_the_seams():
    """Copies that nobody guards drift: equality of sets, so that a healed seam fails too."""
    one, two = definitions(source(LSTM)), definitions(source(CATEGORICAL))
    shared = [name for name in one if name in two]
    assert {name for name in shared if one[name] != two[name]} == set(SEAMS)
    assert shared == [name for name in two if name in one]  # and in the same order
    assert len(shared) > 60


DIFFERENT = {  # members of classes that are seams, other than what one script has alone
    "TaskArgs": {"env_id", "total_timesteps"},
    "NetworkArgs": {"hidden_size", "activation"},
    "PPOArgs": {"learning_rate", "gae_lambda", "num_minibatches"},
    "CriticArgs": {"value_from", "norm_returns", "norm_returns_memory"},
    "ValueDistributionArgs": {"vf_clip"},
    "RunArgs": {"exp_name"},
    "MachineArgs": set(),
    "Args": set(),
    "Rollout": set(),
    "Agent": {
        *("__init__", "second_thread_pays", "policy_params", "numpy_policy", "value_outputs"),
        *("act", "predict_returns", "value"),
    },
}  # Batch and ValueDistribution differ throughout


def members(text: str, name: str) -> dict[str, str]:
    """Flags with their docstrings, methods and fields of a class, as text by name."""
    lines = text.splitlines()
    body = next(node for node in ast.parse(text).body if getattr(node, "name", None) == name).body
    found = {}
    for node, after in zip(body, [*body[1:], None]):
        target = getattr(node, "target", None)
        label = target.id if target is not None else getattr(node, "name", None)
        if label is None:
            continue
        last = after if isinstance(after, ast.Expr) else node  # a flag's docstring stands below it
        start = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        found[label] = "\n".join(lines[start - 1 : last.end_lineno])
    return found


@pytest.mark.parametrize("name", DIFFERENT)
def test_members_of_a_seam_are_identical_but_for_these(name):
    """Ranges, help and properties as well: tests of one script count for both."""
    one, two = members(source(LSTM), name), members(source(CATEGORICAL), name)
    shared = [label for label in one if label in two]
    assert {label for label in shared if one[label] != two[label]} == DIFFERENT[name]
    assert shared


def test_sections_are_the_same_in_the_same_order():
    """Who knows one script finds the way in the other."""
    marks = re.compile(r"^# -{4,} (?:value distribution: \w+ )?(.*?)[ -]*$", re.MULTILINE)
    one, two = (marks.findall(source(name)) for name in (LSTM, CATEGORICAL))
    assert one == two
    assert len(one) > 8


@pytest.mark.parametrize("name", OF_ONE)
def test_parts_stand_in_the_order_in_which_they_run(name):
    """The algorithm comes first. Helpers come after what they help."""
    names = list(definitions(source(name)))
    assert [names.index(part) for part in ORDER] == sorted(names.index(part) for part in ORDER)


@pytest.mark.parametrize("name", OF_ONE)
def test_nothing_stands_between_the_types_and_train(name):
    """A reader meets the training loop as soon as he knows what flows through it."""
    names = list(definitions(source(name)))
    assert names[names.index("Batch") + 1] == "train"


@pytest.mark.parametrize("name", OF_ONE)
def test_the_algorithm_knows_nothing_of_processes_terminals_and_files(name):
    """Plumbing stands below the rule."""
    above, _ = source(name).split(RULE)
    names = set()
    for node in ast.walk(ast.parse(above)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        if isinstance(node, ast.Attribute) and node.attr != "gather":  # torch's method
            names.add(node.attr)
    assert names & set(BELOW) == set()
    assert {"average", "own"} <= names


def methods(text: str, name: str) -> dict[str, str]:
    """Signatures of the methods of a class."""
    node = next(n for n in ast.parse(text).body if getattr(n, "name", None) == name)
    functions = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    found = {n.name: f"{ast.unparse(n.args)} -> {ast.unparse(n.returns)}" for n in functions}
    # what the targets of a rollout are is the kind's own affair
    return {key: text.replace("WeightedReturns", "Tensor") for key, text in found.items()}


def test_value_distributions_have_the_same_methods_and_signatures():
    """Behind this seam anything may differ, but not how it is called: the classes are exchanged."""
    shared = []
    for name, own in OF_ONE.items():
        tree = ast.parse(source(name))
        inside = next(n for n in tree.body if getattr(n, "name", None) == "ValueDistribution")
        found = methods(source(name), "ValueDistribution")
        assert own <= found.keys()
        for method in own:
            assert uses(tree, method) == uses(inside, method) > 0
        shared.append({key: found[key] for key in found if key not in own})
    assert shared[0] == shared[1]


def uses(tree: ast.AST, attribute: str) -> int:
    """How often an attribute of that name is taken."""
    return sum(isinstance(n, ast.Attribute) and n.attr == attribute for n in ast.walk(tree))


TRACES = re.compile("state|episode_start|sequence|chunk|recurrent|lstm", re.IGNORECASE)
FOREIGN = """
state_dict load_state_dict
getstate setstate get_state set_state __getstate__ __setstate__
get_rng_state set_rng_state get_rng_state_all set_rng_state_all
SeedSequence generate_state errstate
""".split()  # names of torch, NumPy and Python
SIBLING = re.compile(r"The\s+sibling,\s+distributional_ppo_lstm\.py,[^.]*\.")


def test_the_feed_forward_script_has_no_trace_of_recurrence():
    """Its reader copies it without the sibling, which one sentence names."""
    text, number = SIBLING.subn("", source(CATEGORICAL))
    assert number == 1
    found, before = [], ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        allowed = token.string in FOREIGN
        allowed |= token.string in ("chunk", "state") and before == "."  # torch's own names
        if token.type != tokenize.NAME:  # prose: the state s_t, understates
            allowed = not TRACES.search(re.sub(r"\b(under)?states?\b", "", token.string))
        if TRACES.search(token.string) and not allowed:
            found.append((token.start[0], token.string[:80]))
        before = token.string
    assert found == []


def test_papers_that_are_cited_are_in_the_bibliography():
    """Every author and year of a docstring is a key of the table, which has nothing else."""
    authors = r"(?:van )?[A-Z][a-z]+(?: et al\.| & [A-Z][A-Za-z]+)"
    cited = {
        " ".join(key.split())
        for name in (LSTM, CATEGORICAL)
        for key in re.findall(rf"{authors}\s+\d{{4}}[a-z]?", source(name))
    }
    table = (ROOT / "tests" / "README.md").read_text().split("## Papers")[1]
    keys = set(re.findall(r"^\| ([^|]+? \d{4}[a-z]?) \|", table, re.MULTILINE))
    by_others = {"Agarwal et al. 2021", "Dabney et al. 2018b"}  # of benchmarks; named by its year
    assert cited == keys - by_others
    assert len(re.findall(r"\| (?:arXiv|doi):[\w./]+ \|$", table, re.MULTILINE)) == len(keys)


def test_the_table_of_formulas_names_what_there_is():
    """Each row has a formula, functions of the scripts that it marks, a source and files."""
    text = (ROOT / "tests" / "README.md").read_text().split("## Papers")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    names = {mark: known_names(source(name)) for mark, name in (("1", LSTM), ("2", CATEGORICAL))}
    for row in rows:
        formula, functions, _, files = row
        for label, mark in re.findall(r"`([\w.]+)`(?:\(([12])\))?", functions):
            for number in mark or "12":
                assert label.split(".")[-1] in names[number], (formula, label)
        for file in re.findall(r"`(\w+)`", files):
            assert (ROOT / "tests" / f"{file}.py").exists(), (formula, file)
        assert "test_" in files, formula


def known_names(text: str) -> set[str]:
    """Of all functions and classes of a script, methods too."""
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)}


@pytest.fixture(scope="module")
def composed(tmp_path_factory) -> list[Path]:
    """The two composed scripts."""
    spec = importlib.util.spec_from_file_location("compose", ROOT / "benchmarks" / "compose.py")
    compose = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compose)
    return compose.compose(tmp_path_factory.mktemp("composed"))


def test_a_composed_script_is_not_written_over(tmp_path):
    """It may have been edited. A folder that is a file costs one line, too."""
    command = [sys.executable, str(ROOT / "benchmarks" / "compose.py")]
    edited = tmp_path / "ppo_quantile.py"
    edited.write_text("mine")
    for folder, words in ((tmp_path, "may have been edited"), (edited, "error: ")):
        asked = subprocess.run([*command, str(folder)], capture_output=True, text=True)
        assert asked.returncode == 1
        assert words in asked.stderr
        assert "Traceback" not in asked.stderr
    assert edited.read_text() == "mine"
    assert not (tmp_path / "ppo_lstm_categorical.py").exists()


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A composed script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, script)  # dataclasses look their module up
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("index", [0, 1])
def test_texts_of_composed_scripts_are_true_for_what_they_are(composed, index, monkeypatch, capsys):
    """Docstring and help of a composed script do not speak of the script it was made from."""
    path = composed[index]
    code, shown, _ = run_main(loaded(path, monkeypatch), capsys, ["--help"])
    assert code == 0
    text = ast.get_docstring(ast.parse(path.read_text())) + shown
    wrong, right = (("quantile", "atoms"), ("atoms", "quantile"))[index]
    assert wrong not in text.lower()
    assert right in text.lower()
    assert ("categorical" in text.replace(path.stem, "").lower()) == (index == 0)
    assert path.stem in text
    assert "distributional_ppo" not in path.read_text()


@pytest.mark.parametrize("index", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_exchanged_value_distributions_learn_cartpole(composed, tmp_path, index, monkeypatch):
    """Recurrent categorical and feed-forward quantile PPO are one paste away, and they learn."""
    script = loaded(composed[index], monkeypatch)
    flags = {"num_envs": 8, "num_steps": 64, "total_timesteps": 10_240, "update_epochs": 8}
    flags |= {"hidden_size": 32, "lstm_hidden_size": 32, "num_quantiles": 16, "num_atoms": 31}
    known = script.Args.__dataclass_fields__
    flags = {k: v for k, v in flags.items() if k in known}
    args = small_args(script, "", env_id="CartPole-v1", run_dir=str(tmp_path), **flags)
    assert script.train(args)["eval/return_mean"] > 150
