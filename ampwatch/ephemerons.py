"""A mapping whose values live as long as its keys, and no longer, also where they refer to them.

In a `WeakKeyDictionary` a value that refers to its key keeps it alive for as long as the dictionary is there: a
parameter that knows its optimizer, a module that knows it. So the values hang on the keys, where the garbage collector
sees the cycle. Modules are left as they are: of those it is a `WeakKeyDictionary`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Final, Generic, TypeVar, cast

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

Key = TypeVar("Key")
Value = TypeVar("Value")

_PLACE: Final = "_ampwatch"
_HANGS: Final = object()


class _Token:
    """Stands for a mapping on its keys."""


class _Attic:
    """What hangs on a key, by mapping. A copy of the key has none, and in a pickled one stands None."""

    def __init__(self, owner: object) -> None:
        self.owner = weakref.ref(owner)
        self.values: weakref.WeakKeyDictionary[_Token, object] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Ephemerons(Generic[Key, Value]):
    """Keys are told apart by identity, as torch's scaler tells optimizers: they need no hash, and may be equal.

    A value must not refer to the mapping: it would keep it for as long as its key.
    """

    def __init__(self) -> None:
        self._token = _Token()
        self._keys = WeakIdKeyDictionary()

    def __setitem__(self, key: Key, value: Value) -> None:
        if isinstance(key, nn.Module):
            self._keys[key] = value
            return
        place = vars(key)
        attic = place.get(_PLACE)
        if attic is None or attic.owner() is not key:  # a shallow copy has that of another
            attic = place[_PLACE] = _Attic(key)
        attic.values[self._token] = value
        self._keys[key] = _HANGS

    def __getitem__(self, key: Key) -> Value:
        value = self._keys[key]
        return cast(Value, vars(key)[_PLACE].values[self._token] if value is _HANGS else value)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def get(self, key: Key) -> Value | None:
        """The value of a key, None if it has none."""
        if key not in self._keys:
            return None
        return self[key]

    def values(self) -> Iterator[Value]:
        """All values."""
        return (self[key] for key in self)
