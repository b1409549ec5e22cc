"""The options for text, which all commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from converter.text.sources import Text

_Command = TypeVar("_Command", bound=Callable[..., Any])


def token_bytes(command: _Command) -> _Command:
    """The option that says how wide the ids in a `.bin` are; it is read before the texts are, and heeded there."""
    return click.option(
        "--token-bytes",
        type=click.Choice(["1", "2", "4", "8"]),
        is_eager=True,
        expose_value=False,
        callback=lambda context, option, value: context.meta.update({__name__: value and int(value)}),
        help="Bytes of a token id in a .bin. Default: 2, or what a header of llm.c says.",
    )(command)


def as_texts(context: click.Context, option: click.Parameter, names: Sequence[str]) -> tuple[Text, ...]:
    """Names of texts, with the width of their ids where it is given."""
    width = context.meta.get(__name__)
    if not width:
        return tuple(names)
    from converter.text.sources import TokenFile

    return tuple(name if name.startswith("hub:") else TokenFile(name, width) for name in names)


def as_text(context: click.Context, option: click.Parameter, name: str | None) -> Text | None:
    """One text or none."""
    return None if name is None else as_texts(context, option, [name])[0]
