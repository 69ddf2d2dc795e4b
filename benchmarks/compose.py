"""The other two combinations: feed-forward quantile and recurrent categorical PPO.

    python benchmarks/compose.py FOLDER

What belongs to the kind of value distribution stands in two marked blocks of each script, the flags
inside `Args` and the functions. This exchanges the blocks of the two scripts and writes
ppo_lstm_categorical.py and ppo_quantile.py.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"^ *# ---- value distribution: \w+ \((flags|functions)\)"
    r".*?^ *# ---- end of value distribution",
    re.MULTILINE | re.DOTALL,
)


def exchange(script: str, donor: str) -> str:
    """The source of `script` with the marked blocks of `donor`."""
    blocks = {match[1]: match[0] for match in BLOCK.finditer(donor)}
    if blocks.keys() != {"flags", "functions"} or len(BLOCK.findall(script)) != 2:
        raise ValueError("each script needs one block of flags and one of functions")
    return BLOCK.sub(lambda match: blocks[match[1]], script)


def compose(folder: Path) -> list[Path]:
    """Write both combinations into `folder`; returns their paths."""
    lstm = (ROOT / "distributional_ppo_lstm.py").read_text()
    categorical = (ROOT / "distributional_ppo_categorical.py").read_text()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "ppo_lstm_categorical.py", folder / "ppo_quantile.py"]
    paths[0].write_text(exchange(lstm, categorical))
    paths[1].write_text(exchange(categorical, lstm))
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(*compose(Path(sys.argv[1])), sep="\n")
