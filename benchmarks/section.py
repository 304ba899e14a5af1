"""`Section`: a part of docs/benchmarks.md, and where the inputs of the published planners are.

They are in the folder DPART_PEERS, with what their own programs returned (``expected.json``).
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Say = Callable[[str], None]


class MissingError(Exception):
    """The inputs of a section are not there; the message says which."""


@dataclass(frozen=True)
class Section:
    """What a section shows.

    Attributes:
        lines: Of markdown.
        targets: What was aimed at, what came, and whether it was met.
        agrees: Whether no value is worse than the published one.
    """

    lines: Sequence[str]
    targets: Sequence[tuple[str, str, bool]]
    agrees: bool = True


def expected(folder: str) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a published planner's inputs, and the records of its program.

    Raises:
        MissingError: It is not there.
    """
    if "DPART_PEERS" not in os.environ:
        raise MissingError("DPART_PEERS is unset, and the published inputs are not part of this project.")
    path = Path(os.environ["DPART_PEERS"]) / folder
    if not (path / "expected.json").exists():
        raise MissingError(f"the folder DPART_PEERS has no {folder}/expected.json.")
    return path, json.loads((path / "expected.json").read_text(encoding="utf-8"))
