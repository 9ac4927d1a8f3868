"""What one field of a section says about itself: its flags, help, choices and what it affects."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Affects = Literal["model", "data", "free"]
Kind = Literal["switch", "number", "fraction", "text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """The metadata of a field.

    name: the flag shown in help; default `--field-name`. It sets the value (for a switch: True).
    off: the flag that sets a switch to False, when that is the one Megatron-LM has (`--no-save-optim`).
    aliases: other spellings of name. constants: flags without a value that set the field to a fixed one.
    later: values that Megatron-LM knows and this version does not offer.
    off_help: what `off` does, for a switch that is on by default: help shows that flag.
    words: how many words the flag takes: a number, or "+" for one or more.
    affects: what a resumed run with another value would change: the model, the data, or neither.
    same_name: two paths that end in the same name count as the same value on a resume.
    meaning: the property of the section that values are compared by on a resume; the value itself by default.
    """

    help: str
    name: str = ""
    off: str = ""
    aliases: tuple[str, ...] = ()
    constants: Mapping[str, object] = dataclasses.field(default_factory=dict)
    later: tuple[str, ...] = ()
    words: int | Literal["+"] = 1
    metavar: str = ""
    affects: Affects = "free"
    same_name: bool = False
    off_help: str = ""
    meaning: str = ""


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
        return self.flag.name or "--" + self.field.replace("_", "-")

    @property
    def off_name(self) -> str:
        """The flag that sets a switch to False; "" for other kinds."""
        if self.kind != "switch":
            return ""
        return self.flag.off or "--no-" + self.name.removeprefix("--")

    @property
    def shown(self) -> str:
        """The flag that help names: for a switch that is on by default, the one that turns it off."""
        return self.off_name if self.default is True else self.name

    @property
    def shown_help(self) -> str:
        """What the flag that help names does."""
        return self.flag.off_help if self.default is True else self.flag.help


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


def add_to_parser(parser: argparse.ArgumentParser | argparse._ArgumentGroup, options: Iterable[Option]) -> None:
    """Give a tool some options of a section, with the names, defaults and help that training has; no switches."""
    for option in options:
        parser.add_argument(
            option.name,
            *option.flag.aliases,
            dest=option.field,
            type=whole_number if option.kind == "number" else str,
            choices=option.choices or None,
            required=option.required,
            default=option.default,
            metavar=option.flag.metavar or None,
            help=option.flag.help,
        )


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


@functools.cache
def _readers() -> Mapping[str, tuple[Callable[[str], Any], str]]:
    return {
        "number": (whole_number, "a whole number"),
        "fraction": (finite_number, "a number"),
        "text": (str, "a word"),
    }


def read_words(option: Option, words: Sequence[str]) -> Any:
    """The value that the words after a flag mean.

    Raises ValueError with the rule that they break, without the name of the flag.
    """
    read, described = _readers()[option.kind]
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
