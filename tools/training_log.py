"""Reads what a training writes with `--log-json`."""

import json
import operator
from pathlib import Path

from command_line import say

from megatron.config.problems import UserError, counted


def read_losses(path: Path) -> dict[str, dict[int, float]]:
    """Each loss by iteration. An iteration that was run again after a resume counts as it was run last.

    Raises:
        UserError: the file cannot be read, or holds no loss.
    """
    curves: dict[str, dict[int, float]] = {}
    skipped = 0
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    for line in lines:
        try:
            row = json.loads(line)
            iteration = operator.index(row["iteration"])
            losses = {name: float(row[name]) for name in row if "loss" in name and name != "loss_scale"}
            for name, loss in losses.items():
                curves.setdefault(name, {})[iteration] = loss
        except (ValueError, TypeError, KeyError):
            skipped += 1
    if not curves:
        raise UserError(f"{path}: holds no loss; it must be a file written by --log-json")
    if skipped:
        say(f"{path}: {counted(skipped, 'line')} left out, no row of a log, as a killed run may leave them")
    return curves
