"""Weights in a program: their bytes, and that each is stored once."""

from __future__ import annotations

import copy
import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.exir._serialize._cord import Cord
from executorch.exir._serialize._named_data_store import NamedDataStore, _tensor_to_bytes
from executorch.exir._serialize._program import deserialize_pte_binary
from torch import nn

from executorch_mlx.backends.mlx import MLXPartitioner, load_program
from executorch_mlx.backends.mlx.weights import TensorBytes, Weights
from oracles.small_programs import Affine, export, rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.int8)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "plain": numbers(3, 5, dtype=dtype),
        "no_dimensions": numbers(dtype=dtype, seed=2),
        "empty": numbers(0, 4, dtype=dtype),
        "one_dimension": numbers(257, dtype=dtype),
        "transposed": numbers(3, 5, dtype=dtype).t(),
        "strided": numbers(6, 10, dtype=dtype)[1::2, ::3],
        "tail_of_another": numbers(6, 4, dtype=dtype)[4:],
        "expanded": numbers(1, 5, dtype=dtype).expand(4, 5),
        "channels_last": numbers(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=torch.channels_last),
    }


CASES = [(dtype, name) for dtype in DTYPES for name in tensors(torch.float32)]


@pytest.mark.parametrize(("dtype", "name"), CASES, ids=[f"{str(dtype)[6:]}-{name}" for dtype, name in CASES])
def test_tensor_bytes_are_those_of_executorch(dtype: torch.dtype, name: str) -> None:
    tensor = tensors(dtype)[name]
    expected = _tensor_to_bytes(tensor.contiguous())
    given = TensorBytes(tensor)
    assert len(given) == len(expected) == tensor.numel() * tensor.element_size()
    assert given.to_bytes() == expected
    for size in (0, 1, 7, 32, len(expected), len(expected) + 9):
        assert given.prefix(size) == expected[:size]
    # Twice: the second answer is a remembered one.
    assert [given.sha256(), given.sha256()] == [hashlib.sha256(expected).digest()] * 2
    with io.BytesIO() as file:
        file.write(b"before")
        given.write_to_file(file)
        assert file.getvalue() == b"before" + expected
    duplicate = copy.deepcopy({"entry": given})["entry"]
    assert (duplicate.to_bytes(), duplicate.sha256()) == (expected, hashlib.sha256(expected).digest())


def test_tensor_bytes_of_a_parameter_outlive_it_and_its_closing() -> None:
    parameter = nn.Parameter(numbers(64, 64))
    expected = _tensor_to_bytes(parameter.detach().contiguous())
    given = TensorBytes(parameter)
    del parameter
    with given as entered:
        assert entered.to_bytes() == expected
    given.close()
    # Memory of the same size that is taken now must not be theirs.
    others = [torch.zeros(64, 64) for _ in range(8)]
    assert given.to_bytes() == expected
    assert all(not other.any() for other in others)


def test_tensor_bytes_in_a_cord_are_written_in_their_place(tmp_path: Path) -> None:
    first, second = numbers(5), numbers(3, dtype=torch.bfloat16)
    expected = b"head" + _tensor_to_bytes(first) + b"between" + _tensor_to_bytes(second)
    cord = Cord(b"head")
    cord.append(TensorBytes(first))
    cord.append(b"between")
    cord.append(TensorBytes(second))
    assert len(cord) == len(expected)
    assert bytes(cord) == expected
    path = tmp_path / "data"
    with path.open("wb") as file:
        cord.write_to_file(file)
    assert path.read_bytes() == expected


def test_tensor_bytes_in_a_store_meet_equal_bytes_only() -> None:
    store = NamedDataStore()
    tensor = numbers(100)
    # The first bytes and the length are the same, the end is not.
    other = tensor.clone()
    other[-1] += 1
    store.add_named_data("a", TensorBytes(tensor))
    store.add_named_data("b", TensorBytes(tensor.clone()))
    store.add_named_data("c", _tensor_to_bytes(tensor))
    store.add_named_data("d", TensorBytes(other))
    store.add_named_data("a", TensorBytes(tensor.clone()))
    output = store.get_named_data_store_output()
    assert [output.pte_data[key].buffer_index for key in "abcd"] == [0, 0, 0, 1]
    assert [bytes(Cord(buffer)) for buffer in output.buffers] == [_tensor_to_bytes(tensor), _tensor_to_bytes(other)]
    with pytest.raises(ValueError, match="Duplicate key a"):
        store.add_named_data("a", TensorBytes(other))


def test_weights_hash_a_tensor_once_and_tell_others_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, tensor = Weights(), numbers(8, 8)
    expected = hashlib.sha256(_tensor_to_bytes(tensor)).hexdigest()
    hashed = []
    original = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data: hashed.append(len(data)) or original(data))
    assert expected.startswith(weights.digest(tensor))
    assert len(weights.digest(tensor)) == 16
    assert weights.bytes_of(tensor) is weights.bytes_of(tensor)
    assert len(hashed) == 1
    assert weights.digest(tensor.clone()) == weights.digest(tensor)
    assert weights.digest(tensor + 1) != weights.digest(tensor)


def test_weights_of_tensors_that_come_and_go_are_never_mistaken() -> None:
    weights = Weights()
    for seed in range(50):
        tensor = numbers(16, seed=seed)
        assert weights.bytes_of(tensor).to_bytes() == _tensor_to_bytes(tensor)
        del tensor


# -- programs -----------------------------------------------------------------------------


class Wide(nn.Module):
    """A layer whose weights are most of a program."""

    def __init__(self, linear: nn.Linear, *, negates: bool = False) -> None:
        super().__init__()
        self.linear = linear
        self._negates = negates

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return -out if self._negates else out


def wide_linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(128, 128, bias=False)


WIDE_BYTES = 128 * 128 * 4


def method(module: nn.Module, width: int) -> tuple[nn.Module, tuple[Any, ...], Any]:
    return module, (torch.zeros(2, width),), ({0: rows()},)


def executed(content: bytes, name: str, x: torch.Tensor) -> torch.Tensor:
    (out,) = load_program(content).load_method(name).execute([x])
    return out


def test_methods_that_share_weights_store_them_once() -> None:
    shared = wide_linear(0)
    modules = {"forward": Wide(shared), "negated": Wide(shared, negates=True)}
    content = export({name: method(module, 128) for name, module in modules.items()})
    assert content.count(_tensor_to_bytes(shared.weight.detach())) == 1
    assert WIDE_BYTES < len(content) < 1.5 * WIDE_BYTES
    x = numbers(3, 128) / 100
    for name, module in modules.items():
        torch.testing.assert_close(executed(content, name, x), module(x).detach())


def test_methods_with_equal_weights_of_their_own_store_them_once() -> None:
    modules = {"forward": Wide(wide_linear(0)), "negated": Wide(wide_linear(0), negates=True)}
    content = export({name: method(module, 128) for name, module in modules.items()})
    assert WIDE_BYTES < len(content) < 1.5 * WIDE_BYTES
    x = numbers(3, 128) / 100
    for name, module in modules.items():
        torch.testing.assert_close(executed(content, name, x), module(x).detach())


def test_methods_with_equal_names_of_different_weights_are_both_right() -> None:
    modules = {"forward": Wide(wide_linear(0)), "other": Wide(wide_linear(1))}
    content = export({name: method(module, 128) for name, module in modules.items()})
    assert [content.count(_tensor_to_bytes(module.linear.weight.detach())) for module in modules.values()] == [1, 1]
    assert len(content) > 2 * WIDE_BYTES
    x = numbers(3, 128) / 100
    for name, module in modules.items():
        torch.testing.assert_close(executed(content, name, x), module(x).detach())


class Buffers(nn.Module):
    """One buffer per dtype, in layouts that a file does not keep."""

    def __init__(self) -> None:
        super().__init__()
        for index, dtype in enumerate(DTYPES):
            self.register_buffer(f"table_{index}", numbers(3, 8, dtype=dtype, seed=index)[:, ::2])
        self.register_buffer("turned", numbers(4, 3, seed=9).t())
        self.register_buffer("factor", torch.tensor(-7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, dtype in enumerate(DTYPES):
            table = getattr(self, f"table_{index}")
            x = torch.where(table, x, -x) if dtype is torch.bool else x + table
        return (x + self.turned) * self.factor


@pytest.mark.parametrize("outline", [True, False])
def test_constants_of_a_program_hold_their_tensors_bytes_by_name(outline: bool) -> None:
    module, x = Buffers(), numbers(3, 4) / 10
    program = torch.export.export(module, (x,))
    edge = to_edge_transform_and_lower(program, partitioner=[MLXPartitioner(outline=outline)])
    content = bytes(edge.to_executorch().buffer)
    named = deserialize_pte_binary(content).named_data
    stored = {
        key.split(":")[0]: bytes(Cord(named.buffers[entry.buffer_index])) for key, entry in named.pte_data.items()
    }
    for name, tensor in module.named_buffers():
        assert stored[name] == _tensor_to_bytes(tensor.contiguous())
    torch.testing.assert_close(executed(content, "forward", x), module(x))


def test_constant_without_elements_is_stored_and_read() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("nothing", torch.empty(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, self.nothing]) * 2

    x = numbers(3, 4)
    content = export({"forward": (Joined(), (x,), None)})
    torch.testing.assert_close(executed(content, "forward", x), x * 2)


def test_program_written_to_a_file_is_that_of_its_buffer(tmp_path: Path) -> None:
    module = Affine()
    program = torch.export.export(module, (torch.zeros(2, 4),))
    lowered = to_edge_transform_and_lower(program, partitioner=[MLXPartitioner()]).to_executorch()
    path = tmp_path / "program.pte"
    with path.open("wb") as file:
        lowered.write_to_file(file)
    assert path.read_bytes() == bytes(lowered.buffer)
    x = numbers(2, 4) / 100
    (out,) = load_program(path).load_method("forward").execute([x])
    torch.testing.assert_close(out, module(x).detach())


@pytest.mark.parametrize("read", [lambda data: data.to_bytes(), lambda data: data.write_to_file(io.BytesIO())])
def test_weight_changed_after_it_was_lowered_is_an_error(read: Any) -> None:
    tensor = torch.ones(3)
    weights = Weights()
    weights.digest(tensor)
    read(weights.bytes_of(tensor))
    tensor.zero_()
    with pytest.raises(RuntimeError, match="a weight was changed after it was lowered"):
        read(weights.bytes_of(tensor))
