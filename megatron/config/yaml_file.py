"""A configuration file: YAML whose keys are flag names, flat or in sections, read as flags and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.config.problems import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One `key: value` of a file. key is spelled as in the file; section is "" for a key outside sections."""

    key: str
    value: Any
    section: str
    origin: str


class _Loader(yaml.SafeLoader):
    """Leaves numbers and dates as written, so that a key reads them as its flag does: to YAML, 010 is 8, 1:30 is 90."""


def _as_written(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    return str(node.value)


for _tag in ("int", "float", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _as_written)


def read_yaml(path: str, sections: Mapping[str, object]) -> tuple[list[Entry], list[Problem]]:
    """The entries of a file in order, and what cannot be read.

    A top-level key that names a section and holds a mapping is that section; everything else is an entry. A
    key that comes twice, in whichever spelling, is a problem: YAML itself would drop the first in silence.
    """
    file = Path(path)
    if not file.is_file():
        rule = "is a folder" if file.is_dir() else "no such file"
        return [], [Problem(flags=("--config",), value=path, rule=rule, works="a YAML file")]
    try:
        loader = _Loader(file.read_text(encoding="utf-8"))
    except OSError as error:
        return [], [Problem(flags=("--config",), value=path, rule=f"cannot be read: {error.strerror}")]
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        rule = f"is not text in UTF-8: {' '.join(str(error).split())}"
        return [], [Problem(flags=("--config",), value=path, rule=rule, works="a YAML file saved as UTF-8")]
    try:
        root = loader.get_single_node()
        if root is None:
            return [], []
        if not isinstance(root, yaml.MappingNode):
            rule = "must hold keys and values, `num_layers: 24`"
            return [], [Problem(flags=("--config",), value=path, rule=rule)]
        entries = list(_entries(loader, root, file.name, sections, ""))
    except RecursionError:
        return [], [Problem(flags=("--config",), value=path, rule="is nested too deeply")]
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        return [], [Problem(flags=("--config",), value=path, rule=f"is not YAML{where}: {error.problem}")]
    finally:
        loader.dispose()
    return _without_duplicates(entries)


def _entries(
    loader: yaml.SafeLoader, node: yaml.MappingNode, file: str, sections: Mapping[str, object], section: str
) -> Iterator[Entry]:
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            problem = "a list or a mapping stands where a key must"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        key = str(key_node.value)
        if not section and key in sections and isinstance(value_node, yaml.MappingNode):
            yield from _entries(loader, value_node, file, sections, key)
            continue
        yield Entry(
            key=key,
            value=loader.construct_object(value_node, deep=True),
            section=section,
            origin=f"{file}:{key_node.start_mark.line + 1}",
        )


def _without_duplicates(entries: list[Entry]) -> tuple[list[Entry], list[Problem]]:
    first: dict[str, Entry] = {}
    problems = []
    for entry in entries:
        name = normal_key(entry.key)
        if name in first:
            problems.append(
                Problem(
                    flags=(f"{entry.origin} {entry.key}",),
                    rule=f"is given already, at {first[name].origin}",
                    works="each key once",
                )
            )
        else:
            first[name] = entry
    return list(first.values()), problems


def normal_key(key: str) -> str:
    """One spelling for dashes and underscores."""
    return key.removeprefix("--").replace("_", "-")


def value_words(value: Any) -> list[str]:
    """The words that would follow a flag to say the same."""
    values = value if isinstance(value, list) else [value]
    return [repr(item) if isinstance(item, float) else str(item) for item in values]


def dump_yaml(values: Mapping[str, Mapping[str, Any]], origins: Mapping[tuple[str, str], str]) -> str:
    """Sections and fields as YAML, each field with a comment that says where its value comes from."""
    lines = []
    for section, fields in values.items():
        lines.append(f"{section}:")
        for field, value in fields.items():
            text = yaml.safe_dump([value], default_flow_style=True, width=10_000).strip()[1:-1]
            lines.append(f"  {f'{field}: {text}':<58} # {origins[section, field]}")
    return "\n".join(lines) + "\n"
