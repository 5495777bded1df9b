"""The argument parser: an error is one sentence with the nearest valid word."""

import argparse
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from largebatch.errors import nearest, printable
from largebatch.formatting import aligned
from largebatch.recipe.problems import meant_key, meant_words
from largebatch.recipe.recipe import Recipe

_LONGEST_LINE = 600
"""Longest line in characters: what it quotes may be of any length."""

_NEAR_OPTION = 0.72
"""Least similarity of a suggested option; high, because all options start with `--`."""

_WITHOUT_TRAINING = {"batch.global_batch": "execution.device_batch"}
"""Keys of training, and the keys that they stand for in commands without updates."""

_FIRST = ("train digits_96", "plan digits_96", "explain", "recipes", "init DIR")
"""Example commands for a first start."""

_ELSEWHERE = {
    "compare": "to compare runs: largebatch report A B",
    "resume": "to resume a run: largebatch train RECIPE --out RUN --resume",
}
"""Commands of other tools, and the command that does the same here."""

_OF_TRAIN = {"--data", "--out", "--profile", "--resume"}
"""Options of `train` that users copy to other commands."""

_REQUIRED = "the following arguments are required: "
"""Start of argparse's message on missing arguments."""

_FEW = 5
"""Largest number of options that a message lists."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line without usage; its subparsers are alike."""

    _words: Sequence[str] = ()
    """Words that are being parsed."""

    def parse_known_args(  # type: ignore[override]  # typeshed: also of a namespace of any type
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words of this command; an unknown word is an error."""
        words = self._words = list(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._describe_unknown(unknown))
        if not hasattr(parsed, "call"):
            *names, last = commands_of(self)
            self.error(f"give a command: {', '.join(names)} or {last}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and a message, which may quote the arguments."""
        if message.startswith(_REQUIRED):
            message = self._describe_required(message)
        self.exit(2, f"{self.prog}: {cut(printable(message))}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401 -- argparse's
        """Refuse an unknown command or choice, with the nearest valid one."""
        if action.choices is None or value in action.choices:
            return
        known = list(action.choices)
        if isinstance(action, argparse._SubParsersAction):
            otherwise = f"`{self.prog} --help` lists them"
            hint = _ELSEWHERE.get(value) or nearest(value, known, otherwise=otherwise, most=1)
            self.error(f"there is no command {value!r}; {hint}")
        hint = nearest(value, known, otherwise="", most=1)
        message = f"expected one of {', '.join(known)}, got {value!r}"
        raise argparse.ArgumentError(action, "; ".join(filter(None, [message, hint])))

    def _describe_required(self, message: str) -> str:
        """Describe the missing arguments, after any unknown options."""
        missing = message.removeprefix(_REQUIRED).split(", ")
        described = []
        for action in self._actions:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            if name in missing:
                value = f" {action.metavar}" if action.option_strings and action.metavar else ""
                described.append(f"{name}{value}" + (f" ({action.help})" if action.help else ""))
        required = _REQUIRED + ", ".join(described or missing)
        known = self._option_string_actions
        options = [word.partition("=")[0] for word in self._words if word.startswith("--")]
        unknown = [word for word in options if not any(one.startswith(word) for one in known)]
        return f"{self._describe_unknown(unknown)}; {required}" if unknown else required

    def _describe_unknown(self, unknown: Sequence[str]) -> str:
        """Describe unknown options, with what to write instead."""
        options = [word for word in unknown if word.startswith("-") or "=" in word]
        if not options:
            return f"{unknown[0]!r} is one word too many; `{self.prog} --help` shows which it takes"
        following = dict(zip(self._words, [*self._words[1:], ""], strict=True))
        by_hint: dict[str, list[str]] = {}
        value = ""
        for word in options:
            if word == value:  # of the option before, though it begins with a minus
                continue
            name, equals, value = word.partition("=")
            if not equals and not following.get(word, "").startswith("--"):
                value = following.get(word, "")
            by_hint.setdefault(self._hint(name, value), []).append(name)
        return "; ".join(f"there is no option {' or '.join(n)}{h}" for h, n in by_hint.items())

    def _hint(self, name: str, value: str) -> str:
        """Return what to write instead of an unknown option, or which options there are.

        Keys of a recipe are suggested only to commands that read a recipe.
        """
        if name in _OF_TRAIN:
            return f"; it is one of `{self.prog.partition(' ')[0]} train`, and of no use here"
        key = meant_key(name.lstrip("-"), Recipe)
        trains = any(action.dest in {"recipe", "recipes"} for action in self._actions)
        if key is not None and trains and "--set" in self._option_string_actions:
            return f": write {meant_words(key, value or 'VALUE', Recipe)}"
        if key is not None and (own := self._own_option(key)):
            return f": write {own} {shlex.quote(value or 'VALUE')}"
        known = [option for option in self._option_string_actions if option not in {"-h", "--help"}]
        if 0 < len(known) <= _FEW:
            return f"; it has {', '.join(known)}"
        otherwise = f"`{self.prog} --help` lists them"
        return f"; {nearest(name, known, otherwise=otherwise, most=1, cutoff=_NEAR_OPTION)}"

    def _own_option(self, key: str) -> str | None:
        """Return this command's option for a key of a recipe; None if there is none."""
        keys = {key, _WITHOUT_TRAINING.get(key, key)}
        options = self._option_string_actions.items()
        valued = (option for option, action in options if action.nargs != 0)
        return next((each for each in valued if meant_key(each.lstrip("-"), Recipe) in keys), None)


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a command's subcommands by name."""
    actions = parser._actions  # argparse has no other list of them
    below = (each for each in actions if isinstance(each, argparse._SubParsersAction))
    return {name: command for each in below for name, command in each.choices.items()}


def print_overview(parser: argparse.ArgumentParser) -> None:
    """Print how to start, and the names of all commands, in 80 columns."""
    commands = commands_of(parser)
    print(f"{parser.description}\n")
    rows = [
        (f"  {parser.prog} {words}", commands[words.split()[0]].description or "")
        for words in _FIRST
    ]
    print(aligned(rows))
    names = textwrap.fill(f"all commands: {', '.join(commands)}", 80, subsequent_indent="  ")
    print(f"\n{names}\n`{parser.prog} COMMAND --help` describes one.")


def cut(line: str) -> str:
    """Shorten a long line in its middle: its end often says what is wrong."""
    half = _LONGEST_LINE // 2
    return line if len(line) <= _LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"
