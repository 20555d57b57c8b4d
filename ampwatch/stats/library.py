"""The compiled library of native/, called through ctypes: its functions, and what of torch's they are given."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

import torch

LIBRARY: Final = Path(__file__).with_name("_cpu.so")

# As in native/pass.c.
INTERFACE: Final = 2
INSTRUCTIONS: Final = ("portable", "avx2", "avx512")
FORMATS: Final = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
LOOK_CLOSER: Final = 0x80  # native/dense.h

_DLPACK: Final = 1  # the version of its table


@cache
def available() -> bool:
    """Whether the library was built for this machine. Synchronisation: none."""
    try:
        return bool(functions().ampwatch_interface() == INTERFACE)
    except (OSError, AttributeError):
        return False


@cache
def functions() -> ctypes.CDLL:
    """What is called without the interpreter's lock. Errors: OSError where the library was not built."""
    library = ctypes.CDLL(str(LIBRARY))
    pointer, text, number, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int64
    library.ampwatch_pass.argtypes = (
        size, pointer, pointer, text, pointer, pointer, pointer, number, number, pointer,
    )  # fmt: skip
    return library


@cache
def functions_on_objects() -> ctypes.PyDLL:
    """What handles Python's objects: called with the lock, and raises what they raise."""
    library = ctypes.PyDLL(str(LIBRARY))
    pointer = ctypes.c_void_p
    library.ampwatch_describe.argtypes = (ctypes.py_object, ctypes.c_int64, *(pointer,) * 6)
    return library


class _Table(ctypes.Structure):
    """DLPackExchangeAPI of dlpack.h, version 1."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("export", ctypes.c_void_p),
        ("adopt", ctypes.c_void_p),
        ("describe", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


@cache
def describes_tensors() -> int | None:
    """Address of the function by which torch tells C where a tensor lies; None where it has none, before 2.10."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    table = _Table.from_address(pointer_of(capsule, b"dlpack_exchange_api"))
    return table.describe if table.major == _DLPACK else None


@cache
def item_of_list() -> int | None:
    """Address of PyList_GetItem."""
    return ctypes.cast(ctypes.pythonapi.PyList_GetItem, ctypes.c_void_p).value
