"""Types of the values in a recipe, and the messages about wrong values. pydantic finds all mistakes at once."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from types import NoneType
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    Strict,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
    model_validator,
)
from pydantic.dataclasses import dataclass

from dsgpt.common.json_files import clipped, clipped_text
from dsgpt.common.problems import MOST_KEYS, did_you_mean

IN_A_FILE = "in a file"
"""The context of a validation of JSON: unknown keys and null are mistakes."""
WITHOUT_UNKNOWN_KEYS = "without unknown keys"
"""The context of a validation of JSON whose unknown keys were already reported: they are ignored."""
_NO_OBJECT = (NoneType, bool, int, float, str, list)
"""The types of JSON values other than objects."""
_MISSING = "is missing"
_AUTO = 'is "auto": write the value, or leave the key out for its default'


class Mistake(NamedTuple):
    """A value or key that is wrong."""

    place: tuple[int | str, ...]
    """The keys that lead to it."""
    text: str
    """What is wrong. A message puts the place before it."""


def mistakes_of(error: ValidationError) -> list[Mistake]:
    """All mistakes that a validation found."""
    return [Mistake(each["loc"], _text_of(each["type"], each["msg"])) for each in error.errors(include_url=False)]


def _text_of(kind: str, message: str) -> str:
    return _MISSING if kind == "missing" else message.removeprefix("Value error, ")


def must_be(words: str, cure: Callable[[Any], str] = lambda _: "") -> WrapValidator:
    """Reports a wrong value as ``must be WORDS, not VALUE``, followed by ``cure(VALUE)``."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """The value, converted to its type."""
        if value == "auto":
            raise ValueError(_AUTO)
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {words}, not {clipped(value)}{cure(value)}") from None

    return WrapValidator(check)


def one_of(*allowed: str) -> WrapValidator:
    """``must_be`` for a ``Literal`` of ``allowed``. It suggests the nearest of them."""
    return must_be(f"one of {', '.join(allowed)}", lambda value: did_you_mean(str(value), allowed))


def _whole(value: Any) -> Any:
    """The value, as an integer if it is a whole float such as 5e8. DeepSpeed accepts those too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Flag = Annotated[bool, Strict(), must_be("true or false")]
Text = Annotated[str, Strict(), must_be("a string")]
Positive = Annotated[int, Strict(), Field(ge=1), must_be("a whole number of at least 1")]
Elements = Annotated[
    int, Strict(), Field(ge=1, lt=2**63), BeforeValidator(_whole), must_be("a whole number of at least 1")
]
"""A number of elements, bytes or requests, of at least 1."""
Limit = Annotated[
    int, Strict(), Field(ge=0, lt=2**63), BeforeValidator(_whole), must_be("a whole number of at least 0")
]
Number = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False), must_be("a number of at least 0")]
Fraction = Annotated[float, Strict(), Field(ge=0, le=1), must_be("a number from 0 to 1")]


def _no_null(value: Any, info: ValidationInfo) -> Any:
    if value is None and info.context == IN_A_FILE:
        raise ValueError("is null: write the value, or leave the key out for its default")
    return value


no_null = BeforeValidator(_no_null)
"""Refuses JSON's ``null`` for a field whose ``None`` means that the key is absent."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Block:
    """An object in a recipe. Its fields are the keys that it may hold; all its mistakes are found together."""

    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Keys that DeepSpeed knows and that are refused here, with the reason and what to do."""
    MISSING: ClassVar[Mapping[str, str]] = {}
    """Text that is added to the message about a missing required key."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_all_mistakes(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        found: list[Mistake] = []
        if isinstance(value, dict):
            value, unknown = cls._flat(value)
            found = [] if info.context == WITHOUT_UNKNOWN_KEYS else unknown
        elif isinstance(value, _NO_OBJECT):
            raise ValueError(_AUTO if value == "auto" else f"must be an object in braces, not {clipped(value)}")
        try:
            block = handler(value)
        except ValidationError as error:
            found += [cls._moved(each) for each in mistakes_of(error)]
            raise _together(found) from None
        if found:
            raise _together(found)
        return block

    @classmethod
    def _flat(cls, value: dict[str, Any]) -> tuple[dict[str, Any], list[Mistake]]:
        """The keys that are fields, and a mistake for each of the others."""
        known = {each.name for each in fields(cls)}
        return {key: value[key] for key in value if key in known}, unknown_keys(value, known, refused=cls.REFUSED)

    @classmethod
    def _moved(cls, each: Mistake) -> Mistake:
        """A mistake in a field, at its place in the JSON."""
        hint = cls.MISSING.get(str(each.place[-1]), "") if each.text == _MISSING else ""
        return each._replace(text=each.text + hint)


@dataclass(frozen=True, kw_only=True)
class NamedBlock(Block):
    """A block ``{"type": NAME, "params": {...}}``, whose parameters are fields like ``type``."""

    PARAMS: ClassVar[Mapping[str, Collection[str]]] = {}
    """The allowed parameters for each ``type``."""

    @classmethod
    def _flat(cls, value: dict[str, Any]) -> tuple[dict[str, Any], list[Mistake]]:
        found, params = unknown_keys(value, ("type", "params")), value.get("params", {})
        if not isinstance(params, dict):
            found.append(Mistake(("params",), f"must be an object in braces, not {clipped(params)}"))
            raise _together(found)
        name = value.get("type")
        known = cls.PARAMS.get(name if isinstance(name, str) else "", set().union(*cls.PARAMS.values()))
        found += unknown_keys(params, known, inside=("params",))
        flat = {key: params[key] for key in params if key in known}
        return flat | {key: value[key] for key in ("type",) if key in value}, found

    @classmethod
    def _moved(cls, each: Mistake) -> Mistake:
        found = super()._moved(each)
        return found if found.place == ("type",) else found._replace(place=("params", *found.place))

    @model_serializer(mode="wrap")
    def _nested(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        params: dict[str, Any] = handler(self)
        return {"type": params.pop("type"), "params": params}


def unknown_keys(
    values: Mapping[str, Any],
    known: Collection[str],
    *,
    refused: Mapping[str, str] | None = None,
    inside: tuple[str, ...] = (),
) -> list[Mistake]:
    """A mistake for each key that is not ``known``, with the nearest known key or the reason if ``refused``."""
    unknown, refused = [key for key in values if key not in known], refused or {}
    found = []
    for key in unknown[:MOST_KEYS]:
        if key in refused:
            found.append(Mistake((*inside, key), f"is not supported: {refused[key]}"))
        else:
            found.append(Mistake((*inside, clipped_text(key)), f"is not a known key{did_you_mean(key, known)}"))
    if len(unknown) > MOST_KEYS:
        found.append(Mistake(inside, f"has {len(unknown) - MOST_KEYS:,} more unknown keys"))
    return found


def _together(found: list[Mistake]) -> ValidationError:
    """One error with all mistakes of a block. pydantic adds it to those of the other blocks."""
    return ValidationError.from_exception_data(
        "recipe",
        [
            {"type": "value_error", "loc": each.place, "input": None, "ctx": {"error": ValueError(each.text)}}
            for each in found
        ],
    )
