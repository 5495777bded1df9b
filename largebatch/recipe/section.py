"""The base of all sections, the types and bounds they share, and how to walk through their keys."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Self,
    TypeGuard,
    get_args,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from largebatch import registry
from largebatch.errors import RecipeError

if TYPE_CHECKING:
    from largebatch.recipe.keys import Keys

MAX_UPDATES = 2_000_000
"""Updates of a run: four times those of ResNet-50's 90 epochs in batches of 256. Planning computes
every learning rate, which takes some seconds for these."""

MAX_EPOCHS = 1_000_000
"""Epochs of a run; the limit is high because a data set may be tiny. MAX_UPDATES holds too."""

MAX_SAMPLES = 2**25
"""Samples of a split: twice ImageNet-21k's. Every worker holds their order, 1 GB for these."""

MAX_BATCH = 2**24
"""Samples in one update: more than ImageNet-21k has. Their divisors are tried one by one."""

LARGEST = 3e38
"""Bounds learning rates and coefficients: fp32 holds no larger ones, and torch refuses them."""

Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Samples = Annotated[int, Field(gt=0, le=MAX_SAMPLES)]
Batch = Annotated[int, Field(gt=0, le=MAX_BATCH)]
Updates = Annotated[int, Field(gt=0, le=MAX_UPDATES)]
Epochs = Annotated[float, Field(gt=0, le=MAX_EPOCHS)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]

CHOOSERS = ("kind", "source")
"""Keys whose values choose one section of a union; `source` is that of `data`."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are not coerced, nothing mutates."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        # Built when the first recipe is read: then the modules of this package are imported, and
        # so the sections of other packages may import any of them.
        defer_build=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **words: Any) -> None:  # noqa: ANN401 -- pydantic's
        """Show plain types in the signature, without pydantic's bounds."""
        super().__pydantic_init_subclass__(**words)
        cls._show_plain_types()

    @classmethod
    def __pydantic_on_complete__(cls) -> None:
        """Show them again: pydantic has set a signature of its own."""
        super().__pydantic_on_complete__()
        cls._show_plain_types()

    @classmethod
    def _show_plain_types(cls) -> None:
        hints = get_type_hints(cls)  # drops Annotated, and with it the bounds
        cls.__signature__ = Signature(
            [
                Parameter(
                    name,
                    Parameter.KEYWORD_ONLY,
                    default=Parameter.empty if field.is_required() else field.get_default(),
                    annotation=hints[name],
                )
                for name, field in cls.model_fields.items()
            ]
        )


class Choice(Section):
    """Base of the bases of sections that a recipe chooses between by `kind`.

    `Optimizer`, `Decay`, `Stage` and `Protocol` are such bases: their `kind` is any word, and they
    name their group. A subclass with words of its own for `kind` is one of the sections. Those of
    this package are declared beside their base; those of another package are entry points.
    """

    group: ClassVar[registry.Group]

    builder: ClassVar[str]
    """The function that builds what the section describes, as `module:function`. It is imported
    when a run needs it, so that a recipe is read without PyTorch."""

    kind: str

    def build(self, *arguments: Any, **words: Any) -> Any:  # noqa: ANN401 -- as the group's builders
        """Call the section's builder with itself and these arguments.

        Raises RecipeError if the builder is of another package, and that is broken.
        """
        package = type(self).__module__.partition(".")[0]
        return registry.resolve(self.builder, package=package)(self, *arguments, **words)

    def conflicts(self, recipe: "Keys") -> Iterator[str]:  # noqa: ARG002 -- for subclasses
        """Yield conflicts with other sections of the recipe, a sentence for each."""
        yield from ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401 -- pydantic's
        """Return the schema of a section; of a base, that of the choice between its sections."""
        if not is_base(cls):
            return handler(source)
        choices = dict[str, CoreSchema]()
        for kind, section in alternatives(cls).items():
            try:
                choices[kind] = handler.generate_schema(section)
            except PydanticUserError as error:  # such as a key of a type that no recipe can hold
                if section.__module__ == cls.__module__:
                    raise
                reason = str(error).partition("\n")[0].partition(". Set `")[0]
                registry.refuse(
                    cls.group,
                    kind,
                    f"{_name_of(section)} has a key that cannot be read: {reason}; repair or "
                    "uninstall that package",
                )
        # pydantic cannot derive what writes a value where there is no section to choose.
        writer = None if choices else core_schema.plain_serializer_function_ser_schema(dict)
        return core_schema.tagged_union_schema(choices, "kind", serialization=writer)


@dataclass(frozen=True, slots=True)
class Named:
    """Marks the type of a key whose value is the name of a part: `Annotated[str, Named(...)]`."""

    group: registry.Group
    ours: tuple[str, ...]
    """The names of this package."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema of the names that are known when the first recipe is read."""
        names = dict.fromkeys([*self.ours, *registry.installed(self.group)])
        for name in list(names):
            try:
                registry.require_one_owner(self.group, name, ours=self.ours)
            except RecipeError as error:
                registry.refuse(self.group, name, str(error))
                del names[name]
        return core_schema.literal_schema(list(names))


class Duration(Section):
    """A stretch of training, in epochs or in steps."""

    epochs: Epochs | None = None
    steps: Updates | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self


def sections_of(annotation: object) -> list[type[Section]]:
    """Return the sections that a field may hold: one, or several for a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        if not is_base(annotation):
            return [annotation]
        return list(dict.fromkeys(alternatives(annotation).values()))  # some have several kinds
    return [section for inner in get_args(annotation) for section in sections_of(inner)]


def group_of(field: FieldInfo) -> registry.Group | None:
    """Return the group of the parts that a field chooses between; None if it has none."""
    # pydantic moves what is around the type of a field into its metadata; inside of a list or a
    # union it stays in the annotation.
    every = [field.annotation, *field.metadata]
    for annotation in every:
        if isinstance(annotation, Named):
            return annotation.group
        if isinstance(annotation, type) and issubclass(annotation, Choice):
            return annotation.group
        every += get_args(annotation)  # what is inside of a union or a list
    return None


def is_base(section: type[Section]) -> TypeGuard[type[Choice]]:
    """Return True for the base of a group of sections, which has no word for `kind` itself."""
    return issubclass(section, Choice) and "group" in vars(section)


@cache
def alternatives(base: type[Choice]) -> Mapping[str, type[Choice]]:
    """Return the sections of a base by kind: those beside it, then those of installed packages."""
    # A subclass in another module is a package's, or a test's: it counts if it has an entry point.
    ours: dict[str, type[Choice]] = {
        kind: section
        for section in base.__subclasses__()
        if section.__module__ == base.__module__
        for kind in kinds_of(section)
    }
    sections = dict(ours)
    for name in registry.installed(base.group):
        # A broken package must not stop recipes that do not name it: its reason is kept until one
        # does.
        try:
            section = registry.load(base.group, name, ours=ours)
            sections[name] = _require_section(base, name, section)
        except RecipeError as error:
            registry.refuse(base.group, name, str(error))
            sections.pop(name, None)
    return MappingProxyType(sections)


def _require_section(base: type[Choice], name: str, section: object) -> type[Choice]:
    """Return a section of another package; raise RecipeError if it is none of this base."""
    entry = f"the entry point {name} of {registry.PREFIX}{base.group}"
    if not (isinstance(section, type) and issubclass(section, base)):
        got = _name_of(section) if isinstance(section, type) else repr(section)
        raise RecipeError(f"{entry} must be a subclass of {_name_of(base)}, got {got}")
    if kinds_of(section) != (name,):
        raise RecipeError(f"{entry}: {_name_of(section)} needs kind: Literal[{name!r}]")
    if not isinstance(getattr(section, "builder", None), str):
        raise RecipeError(
            f"{entry}: {_name_of(section)} needs builder: ClassVar = 'module:function'"
        )
    return section


def _name_of(section: type) -> str:
    return f"{section.__module__}.{section.__qualname__}"


def kinds_of(section: type[Section]) -> tuple[str, ...]:
    """Return the values that choose this section in its union; none if it is in no union."""
    chooser = chooser_of(section)
    return () if chooser is None else get_args(section.model_fields[chooser].annotation)


def chooser_of(section: type[Section]) -> str | None:
    """Return the key that chooses this section in its union; None if it is in no union."""
    return next((key for key in CHOOSERS if key in section.model_fields), None)


def every_field(
    section: type[Section], prefix: str = "", *, above: tuple[type[Section], ...] = ()
) -> Iterator[tuple[str, type[Section], FieldInfo]]:
    """Yield the dotted key of every field of a section and of those below it, and its owner.

    `above` are the sections that it is in.
    """
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        yield dotted, section, field
        for below in sections_of(field.annotation):
            # An optimizer that wraps another one can be in itself, without an end.
            if below not in (*above, section):
                yield from every_field(below, f"{dotted}.", above=(*above, section))
