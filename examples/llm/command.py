"""What the commands have in common: errors in one line, and progress that stays off stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from executorch_mlx.extension.llm.cache import CacheError

EXPECTED_ERRORS = (ValueError, TypeError, LookupError, OSError, RuntimeError, CacheError)

console = Console(stderr=True, highlight=False)


def run(main: Callable[[], None]) -> None:
    """Run a command; an expected error is printed in one line and ends it with status 2."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except EXPECTED_ERRORS as error:
        show_error(error)
        sys.exit(2)


def show_error(error: BaseException) -> None:
    """Print an error in one line."""
    console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
