"""What the commands have in common: errors in one line, Ctrl-C between tokens, and progress that stays off stdout."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console

from executorch_mlx.backends.mlx import backend_info
from executorch_mlx.extension.llm.cache import CacheError

EXPECTED_ERRORS = (ValueError, TypeError, LookupError, OSError, RuntimeError, CacheError)

console = Console(stderr=True, highlight=False)


def run(main: Callable[[], None]) -> None:
    """Run a command; an expected error is printed in one line and ends it with status 2."""
    # What torch copies while it exports uses what torch warns of.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read the output has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except EXPECTED_ERRORS as error:
        show_error(error)
        sys.exit(2)


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Give a function that names the stage which begins: beside a spinner on a terminal, in lines elsewhere."""
    with console.status("") as status:

        def begin(stage: str) -> None:
            status.update(stage)
            if not console.is_terminal:
                console.print(stage)

        yield begin


class DeferredInterrupt:
    """Inside, Ctrl-C waits for ``check``, so that no step is torn in the middle; pressed again, it waits no longer."""

    def __enter__(self) -> DeferredInterrupt:
        self.is_pending = False
        self._previous: Any = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self.is_pending:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.check()
        self.is_pending = True


def device() -> str:
    """Describe what MLX computes on."""
    info = backend_info()
    return f"{info.device}, {info.blas}" if info.blas else info.device


def show_error(error: BaseException) -> None:
    """Print an error in one line."""
    console.print(f"error: {' '.join(str(error).split())}", style="bold red", markup=False, soft_wrap=True)
