"""What one field of a section says about itself: its flags, help, choices and what it affects."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

Affects = Literal["tensors", "model", "input", "data", "training", "free"]
Kind = Literal["switch", "number", "fraction", "text"]

# The largest value of a number whose field names none: whole numbers up to it are exact in JSON and in float64.
LARGEST_WHOLE = 2**53
# Limits that fields share: some ten times what the largest models and clusters need. Heads also bound what divides
# them, and samples the iterations that take at least one.
MOST_LAYERS = 10_000
MOST_HEADS = 100_000
LARGEST_VOCABULARY = 100_000_000
LONGEST_SEQUENCE = 1_000_000_000
MOST_PROCESSES = 10_000_000
LARGEST_BATCH = 1_000_000
MOST_SAMPLES = 100_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """The metadata of a field.

    name: the flag shown in help; default `--field-name`. It sets the value (for a switch: True).
    file_flags: flags that take a file with the words of this one, by name; the value is the key of the words in a file
    of JSON, "" for a file that holds nothing else.
    off: the flag that sets a switch to False, when that is the one Megatron-LM has (`--no-save-optim`).
    aliases: other spellings of name. constants: flags without a value that set the field to a fixed one.
    later: values that Megatron-LM knows and this version does not offer.
    off_help: what `off` does, for a switch that is on by default: help shows that flag.
    words: how many words the flag takes: a number, or "+" for one or more.
    affects: what a resumed run with another value would change: the tensors of the model (no change of it leaves all
    their names and shapes as they were), the model otherwise, what an id means or the model sees of a text (input), the
    data otherwise, what the training makes of these (as each field of the optimizer's section does, without saying so),
    or nothing but rounding.
    same_name: two paths that end in the same name count as the same value, on a resume and on two ranks.
    node_local: the ranks of one run may have different values: a path on a disk of the node's own.
    meaning: the property of the section that values are compared by on a resume; the value itself by default.
    at_least, above, at_most, below: the limits of a number, or of each of several. Every number has a lower one. Sizes
    that are counted through or allocated have an upper one too, some ten times what the largest model or cluster needs.
    usual: what to advise beyond an open end (above, below), next to which there is no nearest value; the default of the
    field when not given.
    """

    help: str
    name: str = ""
    off: str = ""
    aliases: tuple[str, ...] = ()
    constants: Mapping[str, object] = dataclasses.field(default_factory=dict)
    file_flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    later: tuple[str, ...] = ()
    words: int | Literal["+"] = 1
    metavar: str = ""
    affects: Affects = "free"
    same_name: bool = False
    node_local: bool = False
    off_help: str = ""
    meaning: str = ""
    at_least: int | None = None
    above: int | None = None
    at_most: int | None = None
    below: int | None = None
    usual: float | None = None


def flag(help: str, **settings: Any) -> dict[str, Flag]:
    """Field metadata; settings are the fields of Flag."""
    return {"flag": Flag(help=help, **settings)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A field of a section, as flags and files see it."""

    section: str
    field: str
    flag: Flag
    kind: Kind
    choices: tuple[str, ...]
    optional: bool
    many: bool
    required: bool
    default: Any

    @property
    def name(self) -> str:
        """The flag that sets the value (for a switch: True), with dashes."""
        return self.flag.name or flag_name(self.field)

    @property
    def off_name(self) -> str:
        """The flag that sets a switch to False; "" for other kinds."""
        if self.kind != "switch":
            return ""
        return self.flag.off or "--no-" + self.name.removeprefix("--")

    @property
    def names(self) -> frozenset[str]:
        """Every flag that sets the field."""
        return frozenset(
            (self.name, self.off_name, *self.flag.aliases, *self.flag.constants, *self.flag.file_flags)
        ) - {""}

    @property
    def affects(self) -> Affects:
        """What a resumed run with another value would change."""
        return "training" if self.section == "optimizer" else self.flag.affects

    @property
    def of_model(self) -> bool:
        """Whether it is a part of what the model is."""
        return self.affects in ("tensors", "model")

    @property
    def limits(self) -> str:
        """The limits that the field names, in words; "" for none."""
        ends = {"at least": self.flag.at_least, "more than": self.flag.above}
        ends |= {"at most": self.flag.at_most, "less than": self.flag.below}
        return " and ".join(f"{word} {spelled(end)}" for word, end in ends.items() if end is not None)

    def can_be(self, value: Any) -> bool:
        """Whether a value, or a list of values where the field has several, is of the kind of the field."""
        if value is None:
            return self.optional
        if self.many != isinstance(value, list | tuple):
            return False
        if self.many and self.flag.words not in ("+", len(value)):
            return False
        kinds = {"switch": (bool,), "number": (int,), "fraction": (int, float), "text": (str,)}[self.kind]
        return all(type(each) in kinds for each in (value if self.many else (value,)))

    def rule(self, value: Any) -> str:
        """What a value breaks: the limits of a number, or the choice among words; "" for what is allowed."""
        if value == self.nearest(value):
            return ""
        if self.choices:
            return "is not a known value"
        if self.kind == "text":
            return "is empty, as a shell variable that is not set is"
        if self.flag.at_most is None and self.flag.below is None and max(_each(value)) > self._largest:
            return f"must be at most {spelled(self._largest)}"
        return f"must {'each ' if self.many else ''}be {self.limits}"

    def nearest(self, value: Any) -> Any:
        """The allowed value nearest to one: itself where it is allowed, the first choice for a word that is not.

        A text without choices is a path or a list, and to an empty one the nearest is that it is not given: an empty
        path would be the current folder.
        """
        if value is None:
            return None
        if self.choices:
            return value if value in self.choices else self.choices[0]
        if self.kind == "switch":
            return value
        if self.kind == "text":
            words = tuple(word for word in _each(value) if word.strip())
            return words if self.many else (*words, self.default)[0]
        numbers = tuple(map(self._nearest_number, _each(value)))
        return numbers if self.many else numbers[0]

    def _nearest_number(self, value: float) -> float:
        flag = self.flag
        # A comparison with NaN is false, so each asks for what must hold.
        if flag.at_least is not None and not value >= flag.at_least:
            return flag.at_least
        beyond = (flag.above is not None and not value > flag.above) or (flag.below is not None and value >= flag.below)
        if beyond:
            usual: float = self.default if flag.usual is None else flag.usual
            return usual
        return min(value, self._largest)

    @property
    def _largest(self) -> float:
        if self.flag.at_most is not None:
            return self.flag.at_most
        return LARGEST_WHOLE if self.kind == "number" else sys.float_info.max

    @property
    def shown(self) -> str:
        """The flag that help names: for a switch that is on by default, the one that turns it off."""
        return self.off_name if self.default is True else self.name

    @property
    def shown_help(self) -> str:
        """What the flag that help names does."""
        return self.flag.off_help if self.default is True else self.flag.help


def flag_name(field: str) -> str:
    """The flag that a field has when it names no other."""
    return "--" + field.replace("_", "-")


def spelled(number: float) -> str:
    """A number as a flag takes it, short enough to read."""
    if not isinstance(number, int):
        return str(number)
    if abs(number) >= 10**30:  # more digits than anyone counts, and maybe more than a float can be
        return f"{Decimal(number).normalize():.6g}"
    return f"{number:_}" if abs(number) >= 10_000 else str(number)


def shown_flag(option: Option, value: Any) -> str:
    """What gives an option a value on a command line."""
    if option.kind == "switch":
        return option.name if value else option.off_name
    return f"{option.name} {shown_value(value)}"


def shown_value(value: Any) -> str:
    """A number or word, or several, as a flag takes them."""
    return " ".join(spelled(each) if isinstance(each, int | float) else str(each) or '""' for each in _each(value))


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def section_options(section: str, config_class: type) -> list[Option]:
    """The options of a section, in the order of its fields."""
    hints = typing.get_type_hints(config_class)
    options = []
    for field in dataclasses.fields(config_class):
        kind, choices, optional, many = _kind(hints[field.name])
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        options.append(
            Option(
                section=section,
                field=field.name,
                flag=field.metadata["flag"],
                kind=kind,
                choices=choices,
                optional=optional,
                many=many,
                required=required,
                default=None if required else field.default,
            )
        )
    return options


def _kind(annotation: Any) -> tuple[Kind, tuple[str, ...], bool, bool]:
    """kind, choices, None allowed, several values."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        kind, choices, _, many = _kind(inner)
        return kind, choices, True, many
    if origin is tuple:
        kind, choices, _, _ = _kind(arguments[0])
        return kind, choices, False, True
    if origin is Literal:
        return "text", tuple(str(argument) for argument in arguments), False, False
    kinds: dict[type, Kind] = {bool: "switch", int: "number", float: "fraction", str: "text"}
    return kinds[annotation], (), False, False


def whole_number(text: str) -> int:
    """An int from `12`, `146_484_375` or `5e9`; ValueError for anything else."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


_READERS: Mapping[Kind, tuple[Callable[[str], Any], str]] = {
    "number": (whole_number, "a whole number"),
    "fraction": (finite_number, "a number"),
    "text": (str, "a word"),
}


def read_words(option: Option, words: Sequence[str]) -> Any:
    """The value that the words after a flag mean.

    Raises ValueError with the rule that they break, without the name of the flag.
    """
    read, described = _READERS[option.kind]
    if option.many and option.flag.words != "+" and len(words) == 1:
        words = [word for word in words[0].strip("()[]").replace(",", " ").split() if word]
    expected = option.flag.words
    if expected == "+":
        if not words:
            raise ValueError("needs at least one word after it")
        if not option.many:
            words = [" ".join(words)]
    elif len(words) != expected:
        raise ValueError(f"takes {_count(expected)} ({described}), {len(words) or 'none'} given")
    values = []
    for word in words:
        try:
            values.append(read(word.strip()))
        except (ValueError, OverflowError):
            raise ValueError(f"must be {described}, {word!r} is not") from None
    return tuple(values) if option.many else values[0]


def _count(number: int) -> str:
    return "one word" if number == 1 else f"{number} words"
