"""The parser of the command line: a mistake is one sentence, with the words that were meant."""

import argparse
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from largebatch.errors import nearest, printable
from largebatch.recipe.problems import meant_key, meant_words
from largebatch.recipe.recipe import Recipe

_LONGEST_LINE = 600
"""Characters of a line that are printed: what it quotes may be of any length."""

_NEAR_OPTION = 0.72
"""Similarity of an option that may have been meant: all have a `--`, which makes any two alike."""

_WITHOUT_TRAINING = {"batch.global_batch": "execution.device_batch"}
"""Keys of updates, and what their words mean to a command that makes none."""

_FIRST = ("train digits_96", "plan digits_96", "explain", "recipes", "init DIR")
"""Commands that show how to begin."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors have no usage before them; its subparsers are of its kind."""

    def parse_known_args(  # type: ignore[override]  # typeshed: also of a namespace of any type
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words of this command; what it does not know is an error."""
        words = list(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._describe_unknown(words, unknown))
        if not hasattr(parsed, "call"):
            *names, last = commands_of(self)
            self.error(f"give a command: {', '.join(names)} or {last}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """End the program with what is wrong about its arguments, which it may quote."""
        self.exit(2, f"{self.prog}: {cut(printable(message))}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401 -- argparse's
        """Refuse a command or a choice that there is not, with the nearest one."""
        if action.choices is None or value in action.choices:
            return
        known = list(action.choices)
        if isinstance(action, argparse._SubParsersAction):
            otherwise = f"`{self.prog} --help` lists them"
            hint = nearest(value, known, otherwise=otherwise, most=1)
            self.error(f"there is no command {value!r}; {hint}")
        hint = nearest(value, known, otherwise="", most=1)
        message = f"expected one of {', '.join(known)}, got {value!r}"
        raise argparse.ArgumentError(action, "; ".join(filter(None, [message, hint])))

    def _describe_unknown(self, words: Sequence[str], unknown: Sequence[str]) -> str:
        """Return what to write in place of the options that this command does not have."""
        options = [word for word in unknown if word.startswith("-") or "=" in word]
        if not options:
            return f"{unknown[0]!r} is one word too many; `{self.prog} --help` shows which it takes"
        following = dict(zip(words, [*words[1:], ""], strict=True))
        described: list[str] = []
        value = ""
        for word in options:
            if word == value:  # of the option before, though it begins with a minus
                continue
            name, equals, value = word.partition("=")
            if not equals and not following.get(word, "").startswith("--"):
                value = following.get(word, "")
            described.append(self._describe_option(name, value))
        return "; ".join(described)

    def _describe_option(self, name: str, value: str) -> str:
        """Return what to write in place of an option that there is not.

        A recipe's keys are for commands that read a recipe: a checkpoint has been trained already.
        """
        key = meant_key(name.lstrip("-"), Recipe)
        trains = any(action.dest in {"recipe", "recipes"} for action in self._actions)
        if key is not None and trains and "--set" in self._option_string_actions:
            hint = f": write {meant_words(key, value or 'VALUE', Recipe)}"
        elif key is not None and (own := self._own_option(key)):
            hint = f": write {own} {shlex.quote(value or 'VALUE')}"
        else:
            known = self._option_string_actions.keys() - {"-h", "--help"}
            otherwise = f"`{self.prog} --help` lists them"
            hint = f"; {nearest(name, known, otherwise=otherwise, most=1, cutoff=_NEAR_OPTION)}"
        return f"there is no option {name}{hint}"

    def _own_option(self, key: str) -> str | None:
        """Return this command's option, with a value, that stands for a key of a recipe."""
        keys = {key, _WITHOUT_TRAINING.get(key, key)}
        options = self._option_string_actions.items()
        valued = (option for option, action in options if action.nargs != 0)
        return next((each for each in valued if meant_key(each.lstrip("-"), Recipe) in keys), None)


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands below a command, by name."""
    actions = parser._actions  # argparse has no other list of them
    below = (each for each in actions if isinstance(each, argparse._SubParsersAction))
    return {name: command for each in below for name, command in each.choices.items()}


def print_overview(parser: argparse.ArgumentParser) -> None:
    """Print how to begin, and the names of all commands, on a terminal of 80 columns."""
    commands = commands_of(parser)
    print(f"{parser.description}\n")
    for words in _FIRST:
        print(f"  {parser.prog} {words:15}  {commands[words.split()[0]].description}")
    names = textwrap.fill(f"all commands: {', '.join(commands)}", 80, subsequent_indent="  ")
    print(f"\n{names}\n`{parser.prog} COMMAND --help` describes one.")


def cut(line: str) -> str:
    """Return a line without its middle if it is long: what is wrong often stands at its end."""
    half = _LONGEST_LINE // 2
    return line if len(line) <= _LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"
