"""Run cases that ``make_cases.py`` made, and tell which of them do not come out as upstream expects.

A program that brings Metal source of its own comes out as expected when it is refused.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from cases import find_cases, run_case


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="where the folders of the cases are")
    return parser.parse_args()


def main() -> int:
    folders = [case for folder in arguments().folders for case in find_cases(folder)]
    if not folders:
        print("no cases found", file=sys.stderr)
        return 1
    outcomes, failures = Counter[str](), []
    began = time.perf_counter()
    for number, folder in enumerate(folders, 1):
        try:
            outcomes[run_case(folder)] += 1
        except Exception as error:
            failures.append((folder.name, " ".join(str(error).split()) or type(error).__name__))
        if number % 50 == 0:
            print(f"[{number}/{len(folders)}] {len(failures)} failed", flush=True)
    width = max((len(name) for name, _ in failures), default=0)
    for name, reason in failures:
        print(f"{name:{width}}  {reason[:200]}")
    print(
        f"{len(folders) - len(failures)} of {len(folders)} as expected in {time.perf_counter() - began:.0f} s: "
        f"{outcomes['ran']} ran, {outcomes['refused']} refused for the Metal source that they bring"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
