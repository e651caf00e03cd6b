"""Kinds of values of a recipe, and how a wrong one is reported; on pydantic, which finds every mistake at once."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Self

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
from pydantic_core import ArgsKwargs, InitErrorDetails, PydanticCustomError

from dsgpt.common.json_files import clipped, clipped_text
from dsgpt.common.problems import MOST_KEYS, did_you_mean

IN_A_FILE = "in a file"
"""The context of a validation whose values are JSON's."""


def mistake(text: str) -> PydanticCustomError:
    """The error of a validator whose message is ``text``; the value's place is put before it."""
    return PydanticCustomError("mistake", "{text}", {"text": text})


def _auto() -> PydanticCustomError:
    return mistake('is "auto": write the value, or leave the key out for its default')


def must_be(words: str, cure: Callable[[Any], str] = lambda _: "") -> WrapValidator:
    """Says ``must be WORDS, not VALUE`` for every way in which a value is not of its type; ``cure`` adds to it."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """The value, of its type."""
        if value == "auto":
            raise _auto()
        try:
            return handler(value)
        except ValidationError:
            raise mistake(f"must be {words}, not {clipped(value)}{cure(value)}") from None

    return WrapValidator(check)


def one_of(*allowed: str) -> WrapValidator:
    """``must_be`` for a ``Literal`` of ``allowed``, with the nearest of them."""
    return must_be(f"one of {', '.join(allowed)}", lambda value: did_you_mean(str(value), allowed))


def _whole(value: Any) -> Any:
    """DeepSpeed takes 5e8 for a number of elements, too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Flag = Annotated[bool, Strict(), must_be("true or false")]
Text = Annotated[str, Strict(), must_be("a text")]
Positive = Annotated[int, Strict(), Field(ge=1), must_be("a whole number of at least 1")]
Elements = Annotated[int, Strict(), Field(ge=1), BeforeValidator(_whole), must_be("a whole number of at least 1")]
"""A number of elements, bytes or requests, of at least 1."""
Limit = Annotated[int, Strict(), Field(ge=0), BeforeValidator(_whole), must_be("a whole number of at least 0")]
Number = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False), must_be("a number of at least 0")]
Fraction = Annotated[float, Strict(), Field(ge=0, le=1), must_be("a number from 0 to 1")]


def _no_null(value: Any, info: ValidationInfo) -> Any:
    if value is None and info.context == IN_A_FILE:
        raise mistake("is null: write the value, or leave the key out for its default")
    return value


no_null = BeforeValidator(_no_null)
"""Refuses JSON's ``null`` for a field whose ``None`` means that the key is absent."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Block:
    """An object in a recipe. Its fields are the keys that it may hold; all its mistakes are found together."""

    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Keys that DeepSpeed knows and that are refused here, with the reason and the cure."""
    MISSING: ClassVar[Mapping[str, str]] = {}
    """What to say of a required key besides that it is missing."""

    @model_validator(mode="wrap")
    @classmethod
    def _in_own_words(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, dict):
            value, found = cls._flat(value)
        elif isinstance(value, cls | ArgsKwargs):
            found = []
        else:
            raise _auto() if value == "auto" else mistake(f"must be an object in braces, not {clipped(value)}")
        try:
            block = handler(value)
        except ValidationError as error:
            for one in error.errors(include_url=False):
                text = (
                    f"is missing{cls.MISSING.get(str(one['loc'][-1]), '')}" if one["type"] == "missing" else one["msg"]
                )
                found.append(_detail(cls._place(one["loc"]), text))
            raise _together(found) from None
        if found:
            raise _together(found)
        return block

    @classmethod
    def _flat(cls, value: dict[str, Any]) -> tuple[dict[str, Any], list[InitErrorDetails]]:
        """The keys that are fields, and a mistake for each of the others."""
        known = {each.name for each in fields(cls)}
        return {key: value[key] for key in value if key in known}, unknown_keys(value, known, refused=cls.REFUSED)

    @classmethod
    def _place(cls, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
        """Where the JSON has what pydantic calls ``loc``."""
        return loc


@dataclass(frozen=True, kw_only=True)
class NamedBlock(Block):
    """A block ``{"type": NAME, "params": {...}}``, whose parameters are fields beside ``type``."""

    PARAMS: ClassVar[Mapping[str, Collection[str]]] = {}
    """The parameters of each name."""

    @classmethod
    def _flat(cls, value: dict[str, Any]) -> tuple[dict[str, Any], list[InitErrorDetails]]:
        found, params = unknown_keys(value, ("type", "params")), value.get("params", {})
        if not isinstance(params, dict):
            found.append(_detail(("params",), f"must be an object in braces, not {clipped(params)}"))
            raise _together(found)
        name = value.get("type")
        known = cls.PARAMS.get(name if isinstance(name, str) else "", set().union(*cls.PARAMS.values()))
        found += unknown_keys(params, known, inside=("params",))
        flat = {key: params[key] for key in params if key in known}
        return flat | {key: value[key] for key in ("type",) if key in value}, found

    @classmethod
    def _place(cls, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
        return loc if loc == ("type",) else ("params", *loc)

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
) -> list[InitErrorDetails]:
    """A mistake for each key that is not ``known``, with the nearest one, or for ``refused`` ones the reason."""
    unknown, refused = [key for key in values if key not in known], refused or {}
    found = []
    for key in unknown[:MOST_KEYS]:
        if key in refused:
            found.append(_detail((*inside, key), f"is not supported: {refused[key]}"))
        else:
            found.append(_detail((*inside, clipped_text(key)), f"is no known key{did_you_mean(key, known)}"))
    if len(unknown) > MOST_KEYS:
        found.append(_detail(inside, f"has {len(unknown) - MOST_KEYS:,} more keys that are not known"))
    return found


def _detail(place: tuple[int | str, ...], text: str) -> InitErrorDetails:
    return InitErrorDetails(type=mistake(text), loc=place, input=None)


def _together(found: list[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data("recipe", found)
