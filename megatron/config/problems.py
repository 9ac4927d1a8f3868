"""What is wrong with a configuration, in words that say what would work."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MOST_LISTED = 20
_MOST_IN_A_LINE = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One violated rule.

    flags: the flags whose values the rule relates, the one to change first. A rule about a flag that could
    not be read is not reported: its value is unknown, and the reading error is reported already.
    """

    flags: tuple[str, ...]
    value: object = None
    rule: str
    works: str = ""

    def __str__(self) -> str:
        head = self.flags[0] if self.flags else ""
        if self.value is not None and self.value != "":
            head = f"{head}{'' if str(self.value).startswith(',') else ' '}{self.value}".strip()
        goes_on = self.rule.startswith("and ")  # with the flag as the subject of the sentence
        text = f"{head}{' ' if goes_on else ': '}{self.rule}" if head else self.rule
        return f"{text}\n      Works: {self.works}" if self.works else text


class UserError(ValueError):
    """What the user can mend: the text names what is wrong, the rule, and what would work.

    A program says it without a traceback. Any other exception, a plain `ValueError` too, is taken for a bug.
    """


class ConfigError(UserError):
    """All that is wrong with a configuration, at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1))
        super().__init__(f"{count} in the configuration:\n{lines}")


def without_flags(problems: Iterable[Problem], flags: Iterable[str]) -> list[Problem]:
    """The problems that relate none of the flags, each once."""
    left_out = set(flags)
    return [problem for problem in dict.fromkeys(problems) if not left_out.intersection(problem.flags)]


def without_flags_of(reported: Iterable[Problem], problems: Iterable[Problem]) -> list[Problem]:
    """The problems that relate no flag of those that are reported already."""
    return without_flags(problems, (flag for problem in reported for flag in problem.flags))


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [candidate for candidate in range(1, int(number**0.5) + 1) if number % candidate == 0]
    return small + [number // candidate for candidate in reversed(small) if candidate * candidate != number]


def near(candidates: Iterable[int], value: int, count: int = 3) -> str:
    """The `count` candidates nearest to value, ascending, as words: `4, 6 or 8`."""
    return words_or(sorted(sorted(set(candidates), key=lambda candidate: (abs(candidate - value), candidate))[:count]))


def multiples(value: int, of: int) -> list[int]:
    """The positive multiples of `of` just below and just above value."""
    below = value // of * of
    return [candidate for candidate in (below, below + of) if candidate > 0]


def nearest_name(typed: str, names: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The name that was most likely meant, whatever its capitals; None when no name is `likeness` of 1 alike."""
    folded = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(typed.lower(), list(folded), n=1, cutoff=likeness)
    return folded[matches[0]] if matches else None


def unknown_flag(typed: str, names: Iterable[str], *, shown: str = "") -> Problem:
    """A flag that is none of `names`, with the one that was most likely meant.

    Args:
        shown: how to speak of it, when it did not stand in the command line.
    """
    bare = {name.removeprefix("--"): name for name in names}  # the dashes would make all of them alike
    nearest = nearest_name(typed.lstrip("-").replace("_", "-"), bare, likeness=0.7)
    works = f"{bare[nearest]} is the nearest" if nearest else "--help lists all flags"
    return Problem(flags=(shown or typed,), rule="is not a known flag", works=works)


def listing(lines: Sequence[str]) -> str:
    """The lines, indented, the first twenty of them."""
    shown = [f"  {line}" for line in lines[:_MOST_LISTED]]
    if len(lines) > _MOST_LISTED:
        shown.append(f"  ... and {len(lines) - _MOST_LISTED} more")
    return "\n".join(shown)


def some_of(names: Sequence[str]) -> str:
    """The names in one line, the first five of them."""
    return ", ".join([*names[:_MOST_IN_A_LINE], *(["…"] if len(names) > _MOST_IN_A_LINE else [])])


def counted(number: int, noun: str) -> str:
    """`1 document`, `2,000 documents`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def words_or(values: Iterable[object]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}" if words else ""
