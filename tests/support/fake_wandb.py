"""A fake of the wandb package that records its calls and can fail in any of them."""

from types import SimpleNamespace
from typing import Any


class FakeWandb:
    """`wandb` and the run that its init returns in one; the call `fails` raises ConnectionError."""

    def __init__(self, fails: str = "", *, at_key: str = "") -> None:
        self.fails, self.at_key = fails, at_key
        self.calls: list[str] = []
        self.offline = False
        self.step = 0
        self.resumes: list[str | None] = []
        self.modes: list[str | None] = []
        """What each init was given."""

        self.summary = SimpleNamespace(update=self._summary)
        self.Settings = Settings

    def _call(self, name: str, keys: object = "") -> None:
        self.calls.append(name)
        if name == self.fails and self.at_key in str(keys):
            raise ConnectionError(f"{name} of the fake\nand more lines")

    def login(self, **_: object) -> bool:
        self._call("login")
        return True

    def init(self, **words: Any) -> "FakeWandb":  # noqa: ANN401 -- whatever init takes
        self._call("init", words["mode"])
        self.modes.append(words["mode"])
        self.resumes.append(words["resume"])
        self.offline = words["mode"] == "offline"
        return self

    def define_metric(self, *_: object, **__: object) -> None:
        self._call("define_metric")

    def log(self, values: dict[str, object], **_: object) -> None:
        self._call("log", list(values))

    def alert(self, *_: object, **__: object) -> None:
        self._call("alert")

    def _summary(self, _: object) -> None:
        self._call("summary")

    def finish(self, **_: object) -> None:
        self._call("finish")


class Settings:
    """Takes any setting."""

    def __init__(self, **_: object) -> None:
        pass
