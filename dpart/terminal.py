"""What commands say: tables on standard output; progress on standard error, and only where that is a terminal."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_NARROWEST = 120


def tables() -> Console:
    """Tables as wide as the terminal; where there is none, wide enough for them."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _NARROWEST))


def say(console: Console, text: str) -> None:
    """A line as it is, of any length."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def say_next(console: Console, written: Path | None, *commands: str) -> None:
    """What was written, and what can be typed next."""
    if written is not None:
        say(console, f"\nWrote {written}")
    for command in commands:
        say(console, f"Next: {command}")


def word(text: object) -> str:
    """A text as one word of a shell's command."""
    return shlex.quote(str(text))


@contextmanager
def status(doing: str) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done; the function given adds what in particular."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(f"{doing} ...") as shown:
        yield lambda text: shown.update(f"{doing}: {text} ...")


@contextmanager
def bar(doing: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar; the function given takes how many are done, how many there are, and what is next."""
    console = Console(stderr=True)
    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=None)
        yield lambda done, total, name: shown.update(task, completed=done, total=total, description=name)
