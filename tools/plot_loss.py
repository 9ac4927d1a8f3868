"""Draw the loss curve of one or several `--log-json` files as a PNG.

python tools/plot_loss.py run.jsonl --output loss.png --line 'bigram entropy=3.2'
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from command_line import Parser, run_tool, say
from text_tools import prepare_output
from training_log import read_losses

from megatron.config.problems import UserError
from megatron.core.whole_file import whole_file

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes


def horizontal_line(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name and a number, such as 'bigram entropy=3.2'") from None


def lines_of(path: Path) -> list[tuple[str, float]]:
    """The names and values of a JSON file.

    Raises:
        UserError: the file cannot be read, or holds anything else.
    """
    try:
        return [(name, float(value)) for name, value in json.loads(path.read_bytes()).items()]
    except OSError as error:
        raise UserError(f"--lines-from {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"--lines-from {path}: holds no names with numbers; bigram_entropy.py writes them") from None


def draw(axes: Axes, logs: Sequence[Path], lines: Sequence[tuple[str, float]]) -> None:
    """The curves of the logs, and horizontal lines with their names in the legend, where no curve crosses them."""
    for path in logs:
        for name, curve in read_losses(path).items():
            label = name if len(logs) == 1 else f"{path.stem}: {name}"
            style = {"marker": "o", "linewidth": 2.0} if "validation" in name or "test" in name else {"linewidth": 0.8}
            axes.plot(list(curve), list(curve.values()), label=label, **style)
    for name, value in lines:
        axes.axhline(value, linestyle="--", color="gray", label=f"{name} {value:.3f}")
    axes.set_title(", ".join(map(str, logs)), wrap=True)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("logs", nargs="+", type=Path, help="files written by --log-json")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), help="the picture (default loss.png)")
    parser.add_argument(
        "--line", action="append", type=horizontal_line, default=[], help="a horizontal line, as 'name=value'"
    )
    parser.add_argument("--lines-from", type=Path, help="JSON file of such lines, written by bigram_entropy.py")
    options = parser.read()
    lines = options.line + (lines_of(options.lines_from) if options.lines_from is not None else [])
    figure, axes = pyplot.subplots(figsize=(8, 5))
    kinds = figure.canvas.get_supported_filetypes()
    kind = options.output.suffix.removeprefix(".")
    if kind not in kinds:
        raise UserError(f"--output {options.output}: must end in .png, or another of .{', .'.join(kinds)}")
    prepare_output(options.output, flag="--output")
    draw(axes, options.logs, lines)
    figure.tight_layout()
    with whole_file(options.output) as file:
        figure.savefig(file, format=kind, dpi=150)
    say(f"wrote {options.output}")


if __name__ == "__main__":
    run_tool(main)
