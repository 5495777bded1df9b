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


_ELSEWHERE = {
    "compare": "to compare runs: largebatch report A B",
    "resume": "to go on with a run: largebatch train RECIPE --out RUN --resume",
}
"""Words that are tried as commands, and what does that here."""

_OF_TRAIN = {"--data", "--out", "--profile", "--resume"}
"""What of a `train` line is copied to another command."""

_REQUIRED = "the following arguments are required: "
"""The start of argparse's message."""

_FEW = 5
"""Options that a message lists at most."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors have no usage before them; its subparsers are of its kind."""

    _words: Sequence[str] = ()
    """What it parses."""

    def parse_known_args(  # type: ignore[override]  # typeshed: also of a namespace of any type
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words of this command; what it does not know is an error."""
        words = self._words = list(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._describe_unknown(words, unknown))
        if not hasattr(parsed, "call"):
            *names, last = commands_of(self)
            self.error(f"give a command: {', '.join(names)} or {last}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """End the program with what is wrong about its arguments, which it may quote."""
        if message.startswith(_REQUIRED):
            message = self._describe_required(message)
        self.exit(2, f"{self.prog}: {cut(printable(message))}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401 -- argparse's
        """Refuse a command or a choice that there is not, with the nearest one."""
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
        """Return what is missing with what it stands for, after the options that there are not."""
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
        return (
            f"{self._describe_unknown(self._words, unknown)}; {required}" if unknown else required
        )

    def _describe_unknown(self, words: Sequence[str], unknown: Sequence[str]) -> str:
        """Return what to write in place of the options that this command does not have."""
        options = [word for word in unknown if word.startswith("-") or "=" in word]
        if not options:
            return f"{unknown[0]!r} is one word too many; `{self.prog} --help` shows which it takes"
        following = dict(zip(words, [*words[1:], ""], strict=True))
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
        """Return what follows an option that there is not: what to write, or what there is.

        A recipe's keys are for commands that read a recipe: a checkpoint has been trained already.
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
