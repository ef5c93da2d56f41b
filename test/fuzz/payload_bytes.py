"""Fuzzes the reader and the verifier with bytes, by coverage; nothing is run.

    python test/fuzz/payload_bytes.py --minutes 30 --out out/fuzz-bytes
    python test/fuzz/payload_bytes.py --replay out/fuzz-bytes/FILE

Needs atheris (pip install atheris), for fuzzing but not for replaying. See docs/fuzzing.md.
"""

from __future__ import annotations

import argparse
import random
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

_PACKAGE = "executorch_mlx.backends.mlx.program"
HEADER_BYTES = 24
_WORDS = (0, 1, 2, 4, 8, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1, 0x7F800000, 0x7FC00000)
_SEEDS = 300
_SECONDS_PER_PAYLOAD = 10
_LIMIT_MIB = 2048


def check(payload: bytes) -> None:
    """Read a payload, verify what is read, write it and read it again.

    Raises:
        AssertionError: what was read again is something else.
        Exception: any other than ProgramError is a finding as well.
    """
    from executorch_mlx.backends.mlx.program import ProgramError, read_payload, verify_graph, write_payload

    try:
        graph = read_payload(payload)
        verify_graph(graph)
    except ProgramError:
        return
    again = read_payload(write_payload(graph))
    assert _shown(again) == _shown(graph), f"written and read again:\n{_shown(graph)}\n{_shown(again)}"


def _shown(graph: object) -> str:
    """Return a graph's text, in which floats that are no numbers equal themselves and no zero has a sign."""
    return re.sub(r"-0\.0\b(?!\d|e)", "0.0", repr(graph))


def write_seeds(folder: Path) -> None:
    """Write payloads to begin with: those of the programs' fuzzer."""
    from fuzz.cases import make_case
    from fuzz.choosers import SeededChooser

    folder.mkdir(parents=True, exist_ok=True)
    for index in range(_SEEDS):
        (folder / f"seed-{index}").write_bytes(make_case(SeededChooser(f"bytes:{index}")).payload)


def changed(data: bytes, max_size: int, seed: int) -> bytes:
    """Return a payload with up to four places changed as a faulty or hostile writer would, the header left alone."""
    chosen, out = random.Random(seed), bytearray(data)
    for _ in range(chosen.randint(1, 4)):
        last = len(out) - 4
        if last < HEADER_BYTES:
            break
        at, other = (chosen.randrange(HEADER_BYTES, last + 1) & ~3 for _ in range(2))
        how = chosen.randrange(6)
        if how == 0:
            out[at : at + 4] = struct.pack("<I", chosen.choice(_WORDS))
        elif how == 1:
            out[at : at + 4] = struct.pack("<I", chosen.randrange(16))
        elif how == 2:  # an offset to something else
            out[at : at + 4] = struct.pack("<I", (other - at) % 2**32)
        elif how == 3:
            out[at : at + 4] = out[other : other + 4]
        elif how == 4:
            out[at] = chosen.randrange(256)
        else:
            half = chosen.randrange(HEADER_BYTES, last + 1) & ~1
            out[half : half + 2] = struct.pack("<H", chosen.randrange(40))
    return bytes(out[:max_size])


def fuzz(minutes: float, seed: int, out: Path) -> None:
    """Fuzz until the time is over or there is a finding; does not return."""
    import atheris

    with atheris.instrument_imports(include=[_PACKAGE]):
        __import__(_PACKAGE)

    def mutated(data: bytes, max_size: int, seed: int) -> bytes:
        return atheris.Mutate(data, max_size) if seed % 4 == 0 else changed(data, max_size, seed)

    corpus = out / "corpus"
    write_seeds(corpus)
    options = {
        "max_total_time": round(60 * minutes),
        "seed": seed,
        "timeout": _SECONDS_PER_PAYLOAD,
        "rss_limit_mb": _LIMIT_MIB,
        "max_len": 1 << 16,
        "artifact_prefix": f"{out}/",
    }
    flags = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], check, custom_mutator=mutated)
    atheris.Fuzz()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/fuzz-bytes"), help="folder for corpus and findings")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="check one payload")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        check(options.replay.read_bytes())
    else:
        fuzz(options.minutes, options.seed, options.out)


if __name__ == "__main__":
    main()
