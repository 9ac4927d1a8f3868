"""The command line: flags derived from the fields of the sections, over a YAML file; all errors at once."""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.help_text import CONFIG, PRINT_CONFIG, flag_help, help_text, metavar, usage
from megatron.config.megatron_config import (
    PROGRAMS,
    MegatronConfig,
    Purpose,
    Task,
    all_options,
    section_classes,
    section_problems,
)
from megatron.config.megatron_flags import FUSION_FLAG, KnownFlag, known_flag, known_names
from megatron.config.options import Option, read_words, shown_flag
from megatron.config.problems import ConfigError, Problem, nearest_name, unknown_flag, without_flags
from megatron.config.tokenizer import TOKENIZER_FILES
from megatron.config.yaml_file import Entry, dump_yaml, normal_key, read_yaml, value_words

ExtraArgsProvider = Callable[[argparse.ArgumentParser], "argparse.ArgumentParser | None"]
# The configuration that the checkpoint to be loaded was saved with; None where there is none and none is needed.
SavedConfig = Callable[[CheckpointConfig], MegatronConfig | None]

# What --use-checkpoint-args takes besides the tokenizer and what decides the function of the model: as Megatron-LM.
_TAKEN_TOO = {"hidden_dropout", "attention_dropout", "apply_query_key_layer_scaling", "seq_length"}


def parse_arguments(
    argv: Sequence[str] | None = None,
    extra_args_provider: ExtraArgsProvider | None = None,
    defaults: Mapping[str, Any] | None = None,
    *,
    task: Task = "gpt",
    world_size: int | None = None,
    launched: bool = True,
    purpose: Purpose = "training",
    check_files: bool = True,
    machine_problems: Callable[[MegatronConfig], Iterable[Problem]] = lambda config: (),
    comment: Callable[[MegatronConfig], str] = lambda config: "",
    saved_config: SavedConfig = lambda wanted: None,
    say: Callable[[str], object] = print,
) -> tuple[MegatronConfig, argparse.Namespace]:
    """The configuration that a command line describes, and the values of a program's own arguments.

    From weak to strong: the defaults of the fields, `defaults` of the program (by flag or field name), the checkpoint
    with `--use-checkpoint-args`, the file of `--config`, the flags. A flag given twice counts as given last.
    `--print-config` prints the result and exits.

    Args:
        argv: words after the program's name; those of the process when None.
        extra_args_provider: adds a program's own arguments to the parser that it is given.
        task: what is trained: it decides which sections there are.
        world_size: number of processes, when it is known.
        launched: whether a launcher has started them. A single process that was not launched may print the
            configuration of any layout: the rules of `--world-size` hold then, or none where it is not given.
        purpose: which rules must hold; to print the groups of another world, those of the layout do.
        check_files: whether tokenizer files and corpora must be there.
        machine_problems: what this machine lacks for a configuration that is to run on it, not only to be printed.
        comment: what there is to say of a configuration that is printed, and keeps the rules.
        saved_config: reads the configuration of the checkpoint, which is of the same task, for `--use-checkpoint-args`.
        say: receives the lines about flags that need a word, and the printed configuration; silent ranks pass another.

    Raises:
        ConfigError: with every problem, those of reading and those of the rules.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    extra = _extra_parser(extra_args_provider)
    if "-h" in words or "--help" in words:
        say(help_text(extra, task))
        raise SystemExit(0)
    reader = _Reader(task=task, extra_options=_extra_options(extra, task))
    reader.read_entries([Entry(key=k, value=v, section="", origin="program") for k, v in (defaults or {}).items()])
    flags, config_files, print_config = _take_own_flags(_split(words))
    if len(config_files) > 1:
        rule = "are several files, and a run has one"
        raise ConfigError([Problem(flags=(CONFIG,), value=" ".join(config_files), rule=rule, works="one of them")])
    for config_file in config_files:
        entries, problems = read_yaml(config_file, section_classes())
        if any(problem.flags == (CONFIG,) for problem in problems):
            raise ConfigError(problems)  # alone: what else is missing may stand in the file
        reader.problems += problems
        reader.read_entries(entries)
    reader.read_flags(flags)
    extra_values = reader.read_extra(extra)
    reader.read_checkpoint(saved_config)
    if not launched and reader.value("print_parallel_groups") and reader.value("world_size") not in (None, world_size):
        purpose, world_size = "layout", None  # another world is printed, and nothing run
    if print_config and not launched:
        world_size = None
    config = reader.build(purpose)
    if world_size is not None:
        config = reader.on(config, world_size)
    problems = reader.all_problems(config, purpose=purpose, check_files=check_files)
    if print_config:
        say(dump_yaml(config.to_dict(), reader.origins()).rstrip("\n"))
    elif purpose != "layout":
        problems += without_flags(machine_problems(config), reader.broken)
    if problems:
        raise ConfigError(problems)
    if print_config:
        for line in comment(config).splitlines():
            say(f"# {line}")
        raise SystemExit(0)
    for line in reader.start_lines(config, purpose):
        say(line)
    return config, extra_values


# ---- spellings: every flag name that sets a field ----


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spelling:
    option: Option
    sets: Literal["value", "constant", "file"]
    value: Any = None


def _normal(name: str) -> str:
    return name.replace("_", "-")


@functools.cache
def _spellings(task: Task | None = None) -> Mapping[str, _Spelling]:
    """How each flag of a task, or any task, with dashes, sets its field."""
    table: dict[str, _Spelling] = {}
    for option in all_options(task):
        field_name = "--" + _normal(option.field)
        if option.kind == "switch":
            on, off = _Spelling(option=option, sets="constant", value=True), [option.off_name]
            off += [f"--no-{field_name[2:]}", f"--disable-{field_name[2:]}"]
            for name in (option.name, field_name, *option.flag.aliases):
                table[_normal(name)] = on
            for name in off:
                table.setdefault(_normal(name), _Spelling(option=option, sets="constant", value=False))
        else:
            for name in (option.name, field_name, *option.flag.aliases):
                table[_normal(name)] = _Spelling(option=option, sets="value")
        for name in option.flag.file_flags:
            table[name] = _Spelling(option=option, sets="file")
        for name, value in option.flag.constants.items():
            table[name] = _Spelling(option=option, sets="constant", value=value)
    return table


# ---- words to groups ----


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """A flag and the words after it. name is as the user spelled it; origin is where: "flag" or file:line."""

    name: str
    words: list[str]
    origin: str = "flag"

    @property
    def shown(self) -> str:
        return self.name if self.origin == "flag" else f"{self.origin} {self.name.removeprefix('--')}"


def _split(words: Iterable[str]) -> list[_Group]:
    """Words as flags with what follows them. There are no positional words, so this is never ambiguous."""
    groups: list[_Group] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            groups.append(_Group(name=name, words=[value] if equals else []))
        elif re.match(r"-[A-Za-z]", word) or not groups:
            groups.append(_Group(name=word, words=[]))
        else:
            groups[-1].words.append(word)
    return groups


def _take_own_flags(groups: list[_Group]) -> tuple[list[_Group], list[str], bool]:
    """What is left without --config FILE and --print-config, the files, and whether to print."""
    rest, config_files, print_config = [], [], False
    for group in groups:
        if _normal(group.name) == CONFIG and len(group.words) == 1:
            config_files.append(group.words[0])
        elif _normal(group.name) == PRINT_CONFIG and not group.words:
            print_config = True
        else:
            rest.append(group)
    return rest, config_files, print_config


# ---- reading ----


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    value: Any
    flag: str
    origin: str


@dataclass(kw_only=True, slots=True)
class _Reader:
    """Collects values, problems and notes over all sources, the weakest source first.

    broken: flags without a known value. disputed: options that a source gives several values, each but the first here.
    """

    task: Task
    extra_options: Mapping[str, str]
    given: dict[str, _Given] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    disputed: list[tuple[Option, Any]] = field(default_factory=list)
    extra_words: list[str] = field(default_factory=list)
    accepted: list[tuple[KnownFlag, str]] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)

    @property
    def spellings(self) -> Mapping[str, _Spelling]:
        return _spellings(self.task)

    def read_flags(self, groups: Iterable[_Group]) -> None:
        """One source: values in it override those of weaker sources, and must not contradict each other."""
        source: dict[str, _Given] = {}
        exact_gelu: _Group | None = None
        for group in groups:
            name = _normal(group.name)
            known = known_flag(name)
            if name in self.extra_options:
                self.extra_words += [self.extra_options[name], *group.words]
            elif name in self.spellings and self.spellings[name].sets == "file":
                self._read_words_of_file(group, source)
            elif name in self.spellings:
                self._read_value(group, self.spellings[name], source)
            elif name in _spellings():
                rule = f"belongs to {PROGRAMS['bert']}: GPT has nothing of the kind"
                self._refuse_together(group.shown, " ".join(group.words), rule, f"leave it out, or {PROGRAMS['bert']}")
            elif name == FUSION_FLAG and not group.words:
                exact_gelu = group
            elif known is not None:
                self._read_known(group, name, known)
            else:
                self.problems.append(_unknown(group, [*self.spellings, *known_names(), *self.extra_options]))
        if exact_gelu is not None:
            if "activation" in source or "activation" in self.given:
                self.notes.append(exact_gelu.name)
            else:
                source["activation"] = _Given(value="gelu", flag=exact_gelu.name, origin=exact_gelu.origin)
                self.renamed[exact_gelu.name] = "--activation gelu"
        self.given |= source

    def read_entries(self, entries: Iterable[Entry]) -> None:
        """One source of keys and values."""
        self.read_flags([group for entry in entries if (group := self._entry_group(entry)) is not None])

    def _entry_group(self, entry: Entry) -> _Group | None:
        """The flag that says the same as a key and its value; None when there is nothing to say."""
        name = "--" + normal_key(entry.key)
        spelling = self.spellings.get(name)
        shown = f"{entry.origin} {entry.key}"
        group = _Group(name=f"--{entry.key.removeprefix('--')}", words=[], origin=entry.origin)
        option = spelling.option if spelling is not None else None
        if option is not None and entry.section not in ("", option.section):
            rule = f"belongs to the section {option.section}, not {entry.section}"
            self._refuse((shown,), rule, option)
            return None
        elsewhere = self.extra_options.keys() | _spellings().keys() | {FUSION_FLAG}
        known = option is not None or name in elsewhere or known_flag(name) is not None
        if not known and not isinstance(entry.value, dict):
            return group  # which is refused as unknown, also where its value asks for nothing
        if entry.value is None:
            if option is not None and option.default is not None:
                self._refuse((shown,), "needs a value", option)
            return None
        if isinstance(entry.value, bool):
            if spelling is not None and spelling.sets != "constant":
                self._refuse((shown,), "needs a value, not yes or no", spelling.option)
                return None
            if entry.value:
                return group
            opposite = option is not None and option.kind == "switch" and spelling is not None
            if not opposite or option is None or spelling is None:
                return None
            return replace(group, name=option.off_name if spelling.value else option.name)
        if isinstance(entry.value, dict):
            self.problems.append(
                Problem(
                    flags=(shown,), rule="holds keys, and is no section", works=", ".join(section_classes(self.task))
                )
            )
            return None
        if spelling is not None and spelling.sets == "constant":
            self._refuse((shown,), f"is true or false, {entry.value!r} is neither", spelling.option)
            return None
        if entry.value == [] and option is not None and option.default == ():
            return None
        words = value_words(entry.value)
        if option is not None and option.flag.words == "+" and not option.many:
            words = [",".join(words)]  # `split: [98, 2, 0]`
        return replace(group, words=words)

    def _read_value(self, group: _Group, spelling: _Spelling, source: dict[str, _Given]) -> None:
        option = spelling.option
        value = spelling.value
        if spelling.sets == "constant" and group.words:
            self._refuse((group.shown,), f"takes no word after it, {group.words[0]!r} given", option)
            return
        if spelling.sets == "value":
            try:
                value = read_words(option, group.words)
            except ValueError as error:
                self._refuse((group.shown,), str(error), option, " ".join(group.words))
                return
            if option.choices and value not in option.choices:
                self._refuse_choice(group, option, value)
                return
        before = source.get(option.field)
        same_flag = before is not None and _normal(before.flag) == _normal(group.name)
        if before is not None and not same_flag and before.value != value and option.kind != "switch":
            rule = f"and {before.flag} give {option.name.removeprefix('--')} different values"
            works = f"one of the two; {option.name} says the same in full"
            given = " ".join(group.words)
            self.problems.append(Problem(flags=(group.shown, before.flag), value=given, rule=rule, works=works))
            self.disputed.append((option, value))
            return
        source[option.field] = _Given(value=value, flag=group.name, origin=group.origin)
        if _normal(group.name) in option.flag.aliases:
            self.renamed[group.name] = option.name

    def _read_words_of_file(self, group: _Group, source: dict[str, _Given]) -> None:
        """What a file gives one or several options, as if the words stood behind the flag of each."""
        name = _normal(group.name)
        options = [option for option in all_options(self.task) if name in option.flag.file_flags]
        keys = [option.flag.file_flags[name] for option in options]
        try:
            if len(group.words) != 1:
                raise ValueError(f"takes one file, {len(group.words) or 'none'} given")
            words_of = _words_of_file(Path(group.words[0]), keys)
        except ValueError as error:
            works = f"{name} FILE of {_form_of_file(keys)}"
            self.problems.append(
                Problem(flags=(group.shown,), value=" ".join(group.words), rule=str(error), works=works)
            )
            self.broken |= {flag for option in options for flag in option.names}
            return
        for option, key in zip(options, keys, strict=True):
            if words_of[key]:
                spelling = _Spelling(option=option, sets="value")
                self._read_value(replace(group, words=words_of[key]), spelling, source)

    def _read_known(self, group: _Group, name: str, known: KnownFlag) -> None:
        if known.already_so(group.words):
            self.notes.append(" ".join([group.name, *group.words]))
            self.accepted.append((known, " ".join(group.words)))
            return
        reason, works = known.reason, known.instead
        if known.is_switch:
            reason = f"takes no word after it, {group.words[0]!r} given"
            works = f"{name} alone; it asks for what is so already ({known.already})"
        words = " ".join(group.words[:4]) + (" ..." if len(group.words) > 4 else "")
        self._refuse_together(group.shown, words, reason, works)

    def _refuse_together(self, flag: str, words: str, reason: str, works: str) -> None:
        """Flags that are refused for one reason make one problem."""
        for index, problem in enumerate(self.problems):
            if (problem.rule, problem.works) == (reason, works) and flag not in problem.flags:
                value = f"{problem.value}, {flag} {words}".rstrip()
                merged = replace(problem, flags=(*problem.flags, flag), value=value)
                self.problems[index] = merged
                return
        self.problems.append(Problem(flags=(flag,), value=words, rule=reason, works=works))

    def _refuse(self, flags: tuple[str, ...], rule: str, option: Option, value: str = "") -> None:
        self.problems.append(Problem(flags=flags, value=value, rule=rule, works=usage(option)))
        self.broken |= option.names

    def _refuse_choice(self, group: _Group, option: Option, value: Any) -> None:
        if value in option.flag.later:
            rule = "is not available in this version"
        else:
            known = [*option.choices, *option.flag.later]
            nearest = nearest_name(str(value), known)
            rule = "is not a known value" + (f"; nearest: {nearest}" if nearest else "")
        works = f"{option.name} {' | '.join(option.choices)}"
        self.problems.append(Problem(flags=(group.shown,), value=value, rule=rule, works=works))
        self.broken |= option.names

    def read_checkpoint(self, saved_config: SavedConfig) -> None:
        """Take from the checkpoint what `--use-checkpoint-args` asks for, where no flag and no file gives it.

        Raises ConfigError where what names the checkpoint is wrong: what else is missing may stand there.
        """
        options = [
            option for option in all_options(self.task) if option.section == "checkpoint" and option.field in self.given
        ]
        wanted = CheckpointConfig(**{option.field: self.given[option.field].value for option in options})
        if not wanted.use_checkpoint_args:
            return
        problems = without_flags(section_problems(wanted), self.broken)
        if problems or not self.broken.isdisjoint(("--load", "--ckpt-step")):
            raise ConfigError(self.problems + problems)
        saved = saved_config(wanted)
        if saved is None:
            return
        same_tokenizer = self.value("tokenizer_type") in (None, saved.tokenizer.tokenizer_type)
        for option in all_options(self.task):
            before = self.given.get(option.field)
            if option.section == "tokenizer":
                files = option.field not in TOKENIZER_FILES or wanted.use_tokenizer_model_from_checkpoint_args
                takes = same_tokenizer and files
            else:
                takes = option.of_model or option.field in _TAKEN_TOO
            if takes and (before is None or before.origin == "program"):
                value = getattr(getattr(saved, option.section), option.field)
                self.given[option.field] = _Given(value=value, flag="--use-checkpoint-args", origin="checkpoint")
                if value != option.default:
                    self.taken.append(shown_flag(option, value))

    def read_extra(self, parser: argparse.ArgumentParser) -> argparse.Namespace:
        try:
            return parser.parse_args(self.extra_words)
        except ValueError as error:
            self.problems.append(Problem(flags=(), rule=str(error)))
            return argparse.Namespace()

    # ---- the result ----

    def value(self, name: str) -> Any:
        """The value given for a field, None when none was."""
        return self.given[name].value if name in self.given else None

    def build(self, purpose: Purpose) -> MegatronConfig:
        """The configuration; what is missing or unreadable has a stand-in, and is among the problems."""
        sections: dict[str, dict[str, Any]] = {name: {} for name in section_classes(self.task)}
        for option in all_options(self.task):
            if option.field in self.given:
                sections[option.section][option.field] = self.given[option.field].value
            elif option.required:
                sections[option.section][option.field] = _stand_in(option)
                if purpose != "layout" and option.name not in self.broken:
                    rule = f"must be given: {option.flag.help}"
                    self.problems.append(Problem(flags=(option.name,), rule=rule, works=usage(option)))
                self.broken |= option.names
        built = {name: section(**sections[name]) for name, section in section_classes(self.task).items()}
        return MegatronConfig(**built)

    def on(self, config: MegatronConfig, world_size: int) -> MegatronConfig:
        """The configuration on the started processes; as it is, with a problem, when it names another number."""
        try:
            return config.on(world_size)
        except ConfigError as error:
            self.problems += error.problems
            return config

    def all_problems(self, config: MegatronConfig, *, purpose: Purpose, check_files: bool) -> list[Problem]:
        """Problems of reading, then those of the rules whose flags could all be read.

        A rule about a flag with several values is broken where it is with each of them.
        """
        broken_rules = without_flags(self._rules(config, purpose, check_files), self.broken)
        for option, value in self.disputed:
            section = replace(getattr(config, option.section), **{option.field: value})
            rules = self._rules(replace(config, **{option.section: section}), purpose, check_files=False)
            also = {problem.flags for problem in rules}
            broken_rules = [
                problem for problem in broken_rules if option.names.isdisjoint(problem.flags) or problem.flags in also
            ]
        return self.problems + broken_rules

    def _rules(self, config: MegatronConfig, purpose: Purpose, check_files: bool) -> list[Problem]:
        rules = config.problems(purpose=purpose, check_files=check_files)
        for known, words in self.accepted:
            rules += known.unmet(words, config)
        return rules

    def start_lines(self, config: MegatronConfig, purpose: Purpose) -> Iterator[str]:
        """What a user should know about the flags that were given, and about those that were not."""
        if self.notes:
            yield "Accepted, and already so in this version: " + ", ".join(dict.fromkeys(self.notes))
        if self.taken:
            yield "Not given, so as in the checkpoint (--use-checkpoint-args): " + ", ".join(self.taken)
        if self.renamed:
            names = (f"{old} as {new}" for old, new in self.renamed.items())
            yield "Accepted, and read under the names of this version: " + ", ".join(names)
        silent = {"hidden_dropout": config.model.hidden_dropout, "attention_dropout": config.model.attention_dropout}
        silent = {name: value for name, value in silent.items() if name not in self.given and value > 0}
        if silent and purpose == "training":
            flags = {f"--{name.replace('_', '-')}": value for name, value in silent.items()}
            yield (
                f"Not given, so at Megatron-LM's default: {', '.join(f'{name} {p}' for name, p in flags.items())}; "
                f"{' '.join(f'{name} 0' for name in flags)} turns it off"
            )

    def origins(self) -> dict[tuple[str, str], str]:
        """Where the value of each field comes from."""
        return {
            (option.section, option.field): self.given[option.field].origin if option.field in self.given else "default"
            for option in all_options(self.task)
        }


def _words_of_file(path: Path, keys: Sequence[str]) -> dict[str, list[str]]:
    """The words of each key; of the only one, "", where the file is no JSON. Raises ValueError with the rule."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can not be read: {error.strerror if isinstance(error, OSError) else error}") from None
    if list(keys) == [""]:
        if not text.split():
            raise ValueError("holds no word")
        return {"": text.split()}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(content, dict) or not content.keys() <= set(keys):
        raise ValueError(f"must hold the keys {', '.join(keys)}, or some of them, and no other")
    if not any(content.values()):
        raise ValueError("holds no word")
    return {key: _words_of_key(key, content.get(key)) for key in keys}


def _words_of_key(key: str, value: object) -> list[str]:
    if isinstance(value, str):
        return value.split()
    words = [] if value is None else value
    if not isinstance(words, list) or not all(type(word) in (str, int, float) for word in words):
        raise ValueError(f"must hold a list of words and numbers under {key!r}")
    return [str(word) for word in words]


def _form_of_file(keys: Sequence[str]) -> str:
    if list(keys) == [""]:
        return "words between blanks or in lines"
    return "JSON, {" + ", ".join(f'"{key}": [...]' for key in keys) + "}"


def _unknown(group: _Group, names: Sequence[str]) -> Problem:
    if not group.name.startswith("-"):
        rule = "stands alone: every word belongs to a flag before it"
        return Problem(flags=(repr(group.name),), rule=rule, works="--flag value; quote a value with blanks")
    name = "--" + _normal(group.name).removeprefix("--no-")
    undone = _spellings().get(name)
    if undone is not None and undone.option.kind != "switch" and undone.sets == "constant":
        option = undone.option
        rule = f"is no flag: {name} is no switch, but {option.name} {undone.value}"
        return Problem(flags=(group.shown,), rule=rule, works=f"{option.name} {option.default}; or leave out {name}")
    return unknown_flag(group.name, names, shown=group.shown)


def _stand_in(option: Option) -> Any:
    """A value that lets the other rules be checked while this one is missing."""
    return {"number": 1, "fraction": 1.0, "text": (*option.choices, "")[0]}[option.kind]


# ---- a program's own arguments ----


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _extra_parser(provider: ExtraArgsProvider | None) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(add_help=False, allow_abbrev=False)
    if provider is not None:
        parser = provider(parser) or parser
    return parser


def _extra_options(parser: argparse.ArgumentParser, task: Task) -> dict[str, str]:
    """The program's own flags: with dashes, and as the program spells them."""
    options = {_normal(name): name for action in parser._actions for name in action.option_strings}
    taken = sorted(name for name in options if name in _spellings(task))
    if taken:
        raise ValueError(f"extra_args_provider adds {', '.join(taken)}, which every program has: rename")
    return options


# ---- a tool's flags ----


def add_to_parser(parser: argparse.ArgumentParser | argparse._ArgumentGroup, options: Iterable[Option]) -> None:
    """Give a tool some options of a section, which it reads and explains as a training does.

    What a value is allowed to be is for `section_problems` to say, with the rules between fields.
    """
    for option in options:
        if option.kind == "switch":
            for name in (option.name, option.off_name):
                parser.add_argument(
                    name,
                    dest=option.field,
                    action="store_true" if name == option.name else "store_false",
                    default=option.default,
                    help=flag_help(option) if name == option.shown else argparse.SUPPRESS,
                )
            continue
        if option.many:
            parser.add_argument(
                option.name,
                dest=option.field,
                nargs="+",
                action=_ReadWords,
                option=option,
                default=option.default,
                metavar=metavar(option).removesuffix(" ..."),
                help=flag_help(option),
            )
            continue
        parser.add_argument(
            option.name,
            *option.flag.aliases,
            dest=option.field,
            type=functools.partial(_read_word, option),
            choices=option.choices or None,
            required=option.required,
            default=option.default,
            metavar=metavar(option),
            help=flag_help(option),
        )


class _ReadWords(argparse.Action):
    """Reads the words after a flag that takes several."""

    def __init__(self, *, option: Option, **settings: Any) -> None:
        super().__init__(**settings)
        self._option = option

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        try:
            setattr(namespace, self.dest, read_words(self._option, values))
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def _read_word(option: Option, word: str) -> Any:
    try:
        return read_words(option, [word])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
