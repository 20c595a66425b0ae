"""Named parts: `Component`, what a scorer, rule or trigger is; `Registry`, where they are found by name."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar


def unknown(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """Makes the error for a name that nobody registered, with the nearest match and all known names."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}")


def must_define(part: object, what: str, returns: str) -> NotImplementedError:
    """Makes the error for a hook that a subclass did not define."""
    return NotImplementedError(f"{type(part).__name__} must define {what}, which returns {returns}")


class Setting(Protocol):
    """What a scorer or a rule may ask of the policy it becomes a part of."""

    @property
    def block(self) -> int: ...
    @property
    def tile(self) -> int: ...
    @property
    def pool(self) -> int: ...
    @property
    def share(self) -> str: ...
    @property
    def sinks(self) -> int: ...
    @property
    def aggregate(self) -> str: ...
    @property
    def most_forced(self) -> int: ...


@dataclass(frozen=True)
class Component:
    """A named, immutable part of a policy. Its dataclass fields are its parameters."""

    name: ClassVar[str]
    renamed: ClassVar[dict[str, str]] = {}  # parameters that older files call otherwise: {old name: new name}

    def to_dict(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"name": self.name} | {
            key: value.to_dict() if isinstance(value, Component) else value for key, value in fields.items()
        }

    def parameters(self) -> set[str]:
        """Names the overrides that have an effect: its own parameters and those of its parts."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        inner = (part.parameters() for part in own.values() if isinstance(part, Component))
        return set(own).union(*inner)

    def with_overrides(self: C, overrides: Mapping[str, Any]) -> C:
        """Itself with those overrides that are its parameters or its parts'."""
        taken = {f.name: overrides[f.name] for f in dataclasses.fields(self) if f.name in overrides}
        own = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.name not in taken)
        parts = {name: part.with_overrides(overrides) for name, part in own if isinstance(part, Component)}
        return dataclasses.replace(self, **parts, **taken)


C = TypeVar("C", bound=Component)


class Registry(Generic[C]):
    """Classes by name. `@SCORERS.register("mine")` above a frozen dataclass is all that a new scorer needs."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[C]] = {}

    def register(self, name: str) -> Callable[[type[C]], type[C]]:
        def add(cls: type[C]) -> type[C]:
            if name in self._classes:
                raise ValueError(f"{self.kind} {name!r} is registered already: choose another name")
            cls.name = name
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        return sorted(self._classes)

    def parameters(self) -> dict[str, list[str]]:
        """Maps every parameter to the names of the classes that have it."""
        owners: dict[str, list[str]] = {}
        for name, cls in sorted(self._classes.items()):
            for f in dataclasses.fields(cls):
                owners.setdefault(f.name, []).append(name)
        return owners

    def __getitem__(self, name: str) -> type[C]:
        if name not in self._classes:
            raise unknown(self.kind, name, self._classes)
        return self._classes[name]

    def check(self, part: C) -> None:
        """Raises unless the part's own class is registered: only then its policy has a name, and can be saved."""
        cls = type(part)
        if self._classes.get(getattr(cls, "name", "")) is not cls:
            raise TypeError(
                f'{self.kind} {cls.__name__} is not registered: put @closecall.{self.kind.upper()}S.register("a-name") '
                "above its class"
            )

    def make(self, name: str, params: dict[str, Any]) -> C:
        """Makes an instance, passing on the parameters that its class has."""
        cls = self[name]
        return cls(**{f.name: params[f.name] for f in dataclasses.fields(cls) if f.name in params})

    def from_dict(self, data: dict[str, Any]) -> C:
        if not isinstance(data, dict) or not isinstance(data.get("name"), str):
            raise ValueError(f"a {self.kind} is written as an object with its name and parameters, got {data!r}")
        params = dict(data)
        cls = self[params.pop("name")]
        params = {cls.renamed.get(key, key): value for key, value in params.items()}
        known = {f.name for f in dataclasses.fields(cls)}
        for key in params:
            if key not in known:
                raise unknown(f"parameter of {self.kind} {cls.name!r}", key, known)
        return cls(**params)


def scan(package: str, folder: Iterable[str]) -> None:
    """Imports every module of a package, so that what they register is known: a new part needs only its file."""
    for module in pkgutil.iter_modules(folder):
        importlib.import_module(f"{package}.{module.name}")
