"""No option is accepted and then forgotten: each field of each section is read by something that acts on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron
from megatron.config.megatron_config import all_options

PACKAGE = Path(megatron.__file__).parent


def attributes_read(tree: ast.AST) -> Iterator[str]:
    """Names of attributes whose value is taken; a method that is called is none."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in called:
            yield node.attr


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def readers() -> dict[str, set[str]]:
    """By file, the attributes that code reads to act on them.

    In `config/` that is what derives one value from others, and is itself read outside: checks of rules do not count.
    """
    found = {}
    derived: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        tree, name = ast.parse(file.read_text()), str(file.relative_to(PACKAGE))
        if not name.startswith("config/"):
            found[name] = set(attributes_read(tree)) | {
                node.func.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            } & {"model_vocab_size", "padded_vocab_size"}
            continue
        for function in functions(tree):
            if "problems" not in function.name and not function.name.startswith("_check"):
                derived.setdefault(function.name, set()).update(attributes_read(function))
    used = set().union(*found.values())
    called = {"pipeline_layout", "read_checkpoint"}  # by setup and by parse_arguments
    for _ in range(4):  # values that are derived from derived ones
        for function, reads in derived.items():
            if function in used | called or function.startswith("_"):
                used |= reads
    found["config"] = used
    return found


READERS = readers()


@pytest.mark.parametrize("option", all_options("bert"), ids=lambda option: f"{option.section}.{option.field}")
def test_each_field_is_read(option) -> None:  # type: ignore[no-untyped-def]
    assert any(option.field in names for names in READERS.values()), (
        f"nothing reads {option.section}.{option.field}: honour {option.name} or refuse it"
    )


def test_the_check_sees_a_field_that_nothing_reads() -> None:
    assert not any("no_such_field" in names for names in READERS.values())
    assert any("skip_train" in names for name, names in READERS.items() if name.startswith("training/"))
