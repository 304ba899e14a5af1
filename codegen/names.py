"""Names that enter source text: checked, unique within their scope, and never hiding another one."""

import builtins
import keyword
import re

from dpart.runtime.errors import UserError

RESERVED = frozenset({"self", "torch", "nn", "F", "Tensor", "super", "__class__"})
_HIDDEN = frozenset(dir(builtins)) | frozenset(keyword.kwlist) | frozenset(keyword.softkwlist) | RESERVED


def checked(name: str, what: str) -> str:
    """The name itself, if it may stand in source as an attribute or a class.

    Raises:
        UserError: It is not an ASCII identifier, or it is a keyword.
    """
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        raise UserError(
            f"{what} is named {plain(name)!r}, which is no Python identifier and cannot be written into "
            "a stage's source; rename it in the model."
        )
    return name


def plain(text: str) -> str:
    """Text for a docstring or a comment: one line, without quotes or backslashes that could end it."""
    kept = "".join(c if c.isprintable() and c not in "\\\"'" else " " for c in text)
    return kept if len(kept) <= 120 else kept[:117] + "..."


def base_name(name: str) -> str:
    """The name without the number that made it unique: ``add_12`` is ``add``."""
    return re.sub(r"(_\d+)+$", "", name) or name


class Names:
    """Gives out names that are unique in one scope."""

    def __init__(self, *taken: str) -> None:
        self._taken = set(taken)

    def new(self, wish: str) -> str:
        """`wish`, made an identifier, with a number behind it if it is taken."""
        wish = re.sub(r"[^A-Za-z0-9_]", "_", wish).strip("_") or "value"
        wish = f"value_{wish}" if wish[0].isdigit() else wish
        if wish in _HIDDEN:
            wish = f"{wish}_value"
        name, number = wish, 2
        while name in self._taken or name in _HIDDEN:
            name = f"{wish}{number}" if wish[0].isupper() else f"{wish}_{number}"
            number += 1
        self._taken.add(name)
        return name
