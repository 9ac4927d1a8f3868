"""Draw the loss curve of one or several `--log-json` files as a PNG.

python tools/plot_loss.py run.jsonl --output loss.png --line 'bigram entropy=3.2'
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def read_curves(path: Path) -> dict[str, dict[int, float]]:
    """Each loss by iteration. An iteration that was run again after a resume counts as it was run last."""
    curves: dict[str, dict[int, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the line that a killed run was writing
            continue
        for name, value in row.items():
            if "loss" in name and name != "loss_scale":
                curves.setdefault(name, {})[row["iteration"]] = float(value)
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path, help="files written by --log-json")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), help="the picture (default loss.png)")
    parser.add_argument("--line", action="append", default=[], help="a horizontal line, as 'name=value'")
    options = parser.parse_args()
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for path in options.logs:
        try:
            curves = read_curves(path)
        except (OSError, UnicodeDecodeError) as error:
            sys.exit(f"plot_loss.py: error: {path} can not be read: {error}")
        if not curves:
            sys.exit(f"plot_loss.py: error: {path} holds no loss; it must be a file written by --log-json")
        for name, curve in curves.items():
            label = name if len(options.logs) == 1 else f"{path.stem}: {name}"
            style = {"marker": "o", "linewidth": 2.0} if "validation" in name or "test" in name else {"linewidth": 0.8}
            axes.plot(list(curve), list(curve.values()), label=label, **style)
    for line in options.line:
        name, _, value = line.partition("=")
        axes.axhline(float(value), linestyle="--", color="gray")
        axes.text(0.0, float(value), f" {name} {float(value):.3f}", va="bottom", transform=axes.get_yaxis_transform())
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(options.output, dpi=150)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
