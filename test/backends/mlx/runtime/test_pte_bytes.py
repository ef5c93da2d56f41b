"""The ids of a program's delegates, read and changed in its bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from executorch_mlx.backends.mlx import PLUGIN_BACKEND_ID, UPSTREAM_BACKEND_ID, load_program
from executorch_mlx.backends.mlx.runtime.pte import delegate_ids, is_one_delegate, retag
from oracles.small_programs import (
    Function,
    affine,
    export,
    num_delegates,
    split_lm,
    tiny_lm,
)


def outside_only() -> bytes:
    """A program that has no delegate, and speaks of one in a constant method's value."""
    return export(
        {"forward": (Function(lambda x: torch.cdist(x, x)), (torch.zeros(2, 3),), None)},
        constant_methods={"get_name": UPSTREAM_BACKEND_ID},
    )


@pytest.mark.parametrize("backend_id", [UPSTREAM_BACKEND_ID, PLUGIN_BACKEND_ID])
def test_delegate_ids_of_a_program_name_its_backend_where_it_stands(backend_id: str) -> None:
    content = affine(backend_id)
    ((position, name),) = delegate_ids(content)
    assert name == backend_id.encode()
    assert content[position : position + len(name)] == name


@pytest.mark.parametrize("content", [tiny_lm, split_lm], ids=["several methods", "several delegates"])
def test_delegate_ids_of_several_delegates_are_all_found(content: Callable[[], bytes]) -> None:
    whole = content()
    found = list(delegate_ids(whole))
    assert num_delegates(whole) > 1
    assert [name for _, name in found] == [UPSTREAM_BACKEND_ID.encode()] * num_delegates(whole)


def test_delegate_ids_of_a_program_without_delegates_are_none() -> None:
    assert list(delegate_ids(outside_only())) == []


@pytest.mark.parametrize(
    ("content", "method", "expected"),
    [
        (affine, "forward", True),
        (tiny_lm, "forward", True),
        (tiny_lm, "get_vocab_size", False),
        (tiny_lm, "backward", False),
        (split_lm, "forward", False),
        (outside_only, "forward", False),
        (lambda: of_functions(lambda x: (x, x.exp())), "forward", False),
        (lambda: of_functions(lambda x: (x.exp(), x.exp().T.contiguous(), x.sin())), "forward", True),
        (lambda: of_functions(lambda x: torch.cdist(x.exp(), x)), "forward", False),
    ],
)
def test_is_one_delegate_says_what_a_method_is_made_of(
    content: Callable[[], bytes], method: str, expected: bool
) -> None:
    assert is_one_delegate(content(), method) == expected


def of_functions(function: Callable[..., Any]) -> bytes:
    return export({"forward": (Function(function), (torch.zeros(2, 3),), None)})


@pytest.mark.parametrize("content", [affine, tiny_lm, split_lm])
def test_retag_there_and_back_changes_the_ids_only(content: Callable[[], bytes]) -> None:
    whole = content()
    other = retag(whole, UPSTREAM_BACKEND_ID, PLUGIN_BACKEND_ID)
    assert {name for _, name in delegate_ids(other)} == {PLUGIN_BACKEND_ID.encode()}
    assert UPSTREAM_BACKEND_ID.encode() not in other
    assert len(other) == len(whole)
    assert retag(other, PLUGIN_BACKEND_ID, UPSTREAM_BACKEND_ID) == whole


def test_retag_when_no_delegate_has_the_id_changes_nothing() -> None:
    content = affine(PLUGIN_BACKEND_ID)
    assert retag(content, UPSTREAM_BACKEND_ID, PLUGIN_BACKEND_ID) == content
    plain = outside_only()
    assert UPSTREAM_BACKEND_ID.encode() in plain
    assert retag(plain, UPSTREAM_BACKEND_ID, PLUGIN_BACKEND_ID) == plain


def test_retagged_program_loads_and_tells_its_constants() -> None:
    program = load_program(retag(affine(), UPSTREAM_BACKEND_ID, PLUGIN_BACKEND_ID))
    program.load_method("forward")
    assert program.constants()["get_max_ctx_len"] == 32


def test_delegate_ids_of_truncated_or_random_bytes_raise_value_error_or_end() -> None:
    """They come before ExecuTorch's own check of the FlatBuffer, so nothing else may escape, nor may it run long."""
    generator = random.Random(5)
    whole = affine()
    damaged = [whole[:cut] for cut in range(0, len(whole), 9)]
    damaged += [generator.randbytes(size) for size in (0, 1, 3, 4, 5, 8, 100, 1000) for _ in range(20)]
    damaged += [whole[:4] + generator.randbytes(len(whole)) for _ in range(50)]
    for at in range(1200):
        damaged.append(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    for content in damaged:
        try:
            assert len(list(delegate_ids(content))) <= len(content)
        except ValueError as error:
            assert "damaged" in str(error)  # noqa: PT017
