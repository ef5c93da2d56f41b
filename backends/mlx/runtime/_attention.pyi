"""csrc/attention.cpp: attention of single queries over paged keys and values, on the CPU."""

def attend(
    q: int,
    keys: int,
    values: int,
    out: int,
    tables: int,
    rows: int,
    dims: tuple[int, int, int, int, int, int, int, int, int],
    scale: float,
    threads: int,
    level: int = 2,
    /,
) -> None:
    """Write softmax(scale * q keys^T) values of every row and query head to `out`; the GIL is released.

    Key i of a row lies in slot tables[row, s // page] * page + s % page, with s = first + i; no other slot is read. A
    row's result depends neither on the other rows nor on `threads`.

    Args:
        q: Address of float32 [n, Hq, D], as all arrays C-contiguous and kept alive by the caller.
        keys: Address of [Hkv, slots, D]. Query head h reads head h // (Hq // Hkv) of keys and values.
        values: Address of [Hkv, slots, Dv].
        out: Address of float32 [n, Hq, Dv].
        tables: Address of int32 [n, width]: page numbers.
        rows: Address of int32 [n, 2]: first and length, of at least 1.
        dims: (n, Hq, Hkv, D, Dv, slots, page, width, storage); storage is of keys and values: 0 for float32, 1 for
            float16, 2 for bfloat16.
        scale: What the scores are multiplied by.
        threads: How many threads may compute, the caller included; fewer are used where there is little to read.
        level: The most that may be used of what the processor has: 0: what is portable, 1: AVX2, 2: AVX-512.

    Raises:
        ValueError: A row's keys lie out of its table or of the pool, or `dims` make no sense. Nothing was written.
    """
