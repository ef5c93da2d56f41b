"""Export ExecuTorch's own MLX operator tests with ExecuTorch's own exporter, one folder each.

A folder holds ``model.pte``, delegated to ``MLXBackend``, and ``case.pt``, which ``cases.read_case`` reads: inputs,
what eager PyTorch makes of them, and upstream's tolerances. Sources and operator tests are the installed wheel's.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import itertools
import logging
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from upstream import exporter


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="where the folders of the cases go")
    parser.add_argument("--match", default="*", metavar="PATTERN", help="only names like this: 'conv*' (default: all)")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N of them, spread over the operators")
    parser.add_argument("--seed", type=int, default=0, help="which ones --limit takes (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the names, export nothing")
    return parser.parse_args()


def configurations() -> dict[str, Any]:
    """Return upstream's operator tests by name, in upstream's order; to be called within ``exporter``."""
    from executorch.backends.mlx.test import test_ops  # noqa: F401  registers them
    from executorch.backends.mlx.test.test_utils import get_all_test_configs

    named, seen = {}, Counter[str]()
    for name, configuration in get_all_test_configs():
        seen[name] += 1
        named[name if seen[name] == 1 else f"{name}__{seen[name]}"] = configuration
    return named


def spread(names: list[str], limit: int | None, seed: int) -> list[str]:
    """Return one of each ``limit`` equal stretches of the names; what is tested together stands together in them."""
    if limit is None or limit >= len(names):
        return names
    choice = random.Random(seed)
    bounds = [index * len(names) // limit for index in range(limit + 1)]
    return [names[choice.randrange(start, end)] for start, end in itertools.pairwise(bounds)]


def export(configuration: Any, folder: Path) -> None:
    """Let upstream export a configuration, and keep what its own runner would be given."""
    from executorch.backends.mlx.test.test_utils import count_mlx_delegate_segments, load_tensors_from_bin

    torch.compiler.reset()
    program, inputs, expected = configuration.generate_test_files()
    segments = count_mlx_delegate_segments(program)
    if segments != configuration.expected_mlx_segments:
        raise ValueError(f"upstream expects {configuration.expected_mlx_segments} delegates, exported {segments}")
    case = {
        "inputs": load_tensors_from_bin(inputs),
        "expected": load_tensors_from_bin(expected),
        "rtol": configuration.rtol,
        "atol": configuration.atol,
        "kv_cache": configuration.kv_cache,
        "skip": configuration.skip_comparison,
        "segments": segments,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.pte").write_bytes(program.read_bytes())
    torch.save(case, folder / "case.pt")


def main() -> int:
    given = arguments()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with exporter():
        every = configurations()
        names = spread([name for name in every if fnmatch.fnmatch(name, given.match)], given.limit, given.seed)
        if given.list:
            print(*names, sep="\n")
            return 0
        failures = 0
        began = time.perf_counter()
        for number, name in enumerate(names, 1):
            said, start = io.StringIO(), time.perf_counter()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    export(every[name], given.output_dir / name)
            except Exception as error:
                failures += 1
                (reason, *_) = traceback.format_exception_only(error)[-1].strip().splitlines()
                print(f"[{number}/{len(names)}] {name}: FAILED: {reason}", flush=True)
            else:
                print(f"[{number}/{len(names)}] {name}: {time.perf_counter() - start:.1f} s", flush=True)
        print(f"{len(names) - failures} of {len(names)} exported in {time.perf_counter() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
