"""Write the other two combinations: feed-forward quantile and recurrent categorical PPO.

    python benchmarks/compose.py FOLDER

What belongs to the kind of value distribution stands in two marked blocks of each script: the flags
and the functions. This program exchanges the blocks of the two scripts and writes
ppo_lstm_categorical.py and ppo_quantile.py. It also exchanges the sentences outside the blocks that
speak of the kind, so that docstring and --help are true for what a script is.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"^# ---- value distribution: \w+ \((flags|functions)\)"
    r".*?^# ---- end of value distribution",
    re.MULTILINE | re.DOTALL,
)
SIBLING = re.compile(r" The sibling, .*?\.py, is\n.*?\.\n", re.DOTALL)
QUANTILES = {  # sentences of the kind, by what they are about
    "title": "twin critics predict quantiles of the return.",
    "learnt": """predicts quantiles of returns. By default they are quantiles of
                         lambda-returns. The presets `calibrated` and `averse` learn those of the
                         return itself. By default V, the value that advantages use, is not their
                         mean but one more output of the same head, the mean output
                         (`--value-from`). With `--cvar-weight` the policy learns from the tail of
                         the distribution.""",
    "value": """mean_head: the mean output, one more output.
    Squared error fits it, so V learns rare rewards, too.""",
    "K": "K   quantiles of a predicted distribution",
    "J": "J   samples of a target distribution: 1 by default, K with `sr_lambda`",
    "normalised": '"""Critics predict (return - running mean) / running std (PopArt)."""',
    "targets": "J) what the value distributions learn, normalised returns",
    "old": "K or K + 1) before the update, for value clipping",
    "moving": "# 3. The targets move the return statistics, and the value heads are rescaled.",
    "moved": "The value heads are rescaled at the same time.",
}
ATOMS = {
    "title": "twin critics predict categorical distributions of the return.",
    "learnt": """predicts probabilities of returns. By default it learns one
                         lambda-return for each state, blurred by HL-Gauss. The presets `calibrated`
                         and `averse` learn the distribution of the return itself. By default V,
                         the value that advantages use, is the mean of the predicted distribution
                         plus a tenth of one more output of the same head, the mean output
                         (`--value-from`, `--mean-output`). With `--cvar-weight` the policy learns
                         from the tail of the distribution.""",
    "value": """mean_head: V
    uses one more output, the mean output (--mean-output), and squared error fits V. Targets beyond
    the atoms are clamped to them, so the mean alone misses rare large rewards.""",
    "K": "K   atoms of a predicted distribution",
    "J": "J   weighted returns of a target distribution: 1 by default, K with `sr_lambda`",
    "normalised": '"""Critics predict (return - running mean) / running std."""',
    "targets": "K) what the value distributions learn",
    "old": "1 or 2) mean, and V, before the update, for value clipping",
    "moving": "# 3. The targets move the return statistics, and the mean outputs are rescaled.",
    "moved": (
        "The mean outputs are rescaled at the same time. (Atoms cannot be, see `move_statistics`.)"
    ),
}


def replace_once(text: str, old: str, new: str) -> str:
    """The text with one sentence in place of another. Raises ValueError if it is not there once."""
    if text.count(old) != 1:
        raise ValueError(f"{old!r} is there {text.count(old)} times")
    return text.replace(old, new)


def exchange(script: str, donor: str) -> str:
    """The source of `script` with the marked blocks of `donor`."""
    blocks = {match[1]: match[0] for match in BLOCK.finditer(donor)}
    if blocks.keys() != {"flags", "functions"} or len(BLOCK.findall(script)) != 2:
        raise ValueError("each script needs one block of flags and one of functions")
    return BLOCK.sub(lambda match: blocks[match[1]], script)


def retell(script: str, own: dict[str, str], new: dict[str, str], names: tuple[str, str]) -> str:
    """The source of `script` with the sentences of another kind and with another name."""
    for topic, sentence in own.items():
        script = replace_once(script, sentence, new[topic])
    script = SIBLING.sub("\n", script)
    short = re.search(r'exp_name: str = "(\w+)"', script)[1]
    script = replace_once(script, f'exp_name: str = "{short}"', f'exp_name: str = "{names[1]}"')
    return script.replace(*names)


def compose(folder: Path) -> list[Path]:
    """Write both combinations into `folder`. Returns their paths."""
    names = ["distributional_ppo_lstm", "distributional_ppo_categorical"]
    lstm, categorical = ((ROOT / f"{name}.py").read_text() for name in names)
    made = {
        "ppo_lstm_categorical": retell(
            exchange(lstm, categorical), QUANTILES, ATOMS, (names[0], "ppo_lstm_categorical")
        ),
        "ppo_quantile": retell(
            exchange(categorical, lstm), ATOMS, QUANTILES, (names[1], "ppo_quantile")
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in made.items():
        paths.append(folder / f"{name}.py")
        paths[-1].write_text(text)
    return paths


def main() -> None:
    """Compose, and print the paths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the two scripts are written")
    folder = parser.parse_args().folder
    for name in ("ppo_lstm_categorical", "ppo_quantile"):
        path = folder / f"{name}.py"
        if path.exists():
            sys.exit(f"error: {path}: exists, and may have been edited; name another folder")
    try:
        print(*compose(folder), sep="\n")
    except (ValueError, OSError) as error:
        hint = "the two scripts must have the blocks and sentences that this program exchanges"
        sys.exit(f"error: {error}" if isinstance(error, OSError) else f"error: {error}; {hint}")


if __name__ == "__main__":
    main()
