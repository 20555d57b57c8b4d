"""What is known of gradients before a kernel has them: asked at once and one by one, the answers are the same."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ampwatch.stats.dense import Dense, can_ask_at_once

ASKED = [
    Dense.ask_one_by_one,
    pytest.param(
        Dense.ask_at_once,
        marks=pytest.mark.skipif(not can_ask_at_once(), reason="torch or the library is without it"),
    ),
]


@pytest.fixture(params=ASKED)
def ask(request):
    return request.param


def told(ask, *tensors):
    dense = Dense(tensors)
    assert ask(dense)
    return dense


def test_addresses_sizes_and_formats(ask):
    tensors = [torch.zeros(shape) for shape in ((3, 2), (0,), (5,), (2, 3, 4))]
    dense = told(ask, *tensors)
    assert dense.addresses.tolist() == [t.data_ptr() for t in tensors]
    assert (dense.numels.tolist(), dense.formats, dense.place) == ([6, 0, 5, 24], b"\2\2\2\2", -1)


def test_every_real_dtype(ask):
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    dense = told(ask, *(torch.zeros(2, dtype=dtype) for dtype in dtypes))
    assert (dense.formats, dense.dtypes) == (b"\0\1\2\3", frozenset(dtypes))


DENSE = {
    "one element": torch.zeros(1),
    "no dimension": torch.zeros(()),
    "channels last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.zeros(3, 4).t(),
    "a part": torch.zeros(10)[3:7],
    "a parameter": torch.nn.Parameter(torch.zeros(4)),
}


@pytest.mark.parametrize("name", DENSE)
def test_what_fills_its_memory_in_any_order_is_taken(ask, name):
    dense = told(ask, torch.zeros(2), DENSE[name])
    assert dense.addresses[1] == DENSE[name].data_ptr()


def nested():
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)


OTHERS = {
    "gaps": lambda: torch.zeros(4, 4)[:, :2],
    "repeats": lambda: torch.zeros(1).expand(4),
    "negated": lambda: torch.zeros(1, dtype=torch.complex64).conj().imag,
    "complex": lambda: torch.zeros(3, dtype=torch.complex64),
    "whole numbers": lambda: torch.zeros(3, dtype=torch.int32),
    "sparse": lambda: torch.zeros(3, 3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "without memory": lambda: torch.empty(3, device="meta"),
    "all zero, without memory": lambda: torch._efficientzerotensor(3),
    "nested": nested,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_not(ask, name):
    with suppress(RuntimeError):
        assert not ask(Dense([torch.zeros(2), OTHERS[name]()]))
    assert Dense.of([torch.zeros(2), OTHERS[name]()]) is None


def test_subclasses_and_no_tensors_are_not_asked():
    with FakeTensorMode():
        fake = torch.zeros(3)
    assert (Dense.of([]), Dense.of([fake])) == (None, None)
