"""The command `completion`: a script with which a shell completes commands. It prints."""

from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the script that completes commands, options and recipes after Tab.

    Args:
        shell: Shell that reads the script, from the folder of its completions.
    """
    from largebatch.cli.main import make_app

    print(make_app().generate_completion(shell=shell))
