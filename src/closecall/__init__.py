"""closecall: when the top-k cut is a close call, look at more blocks."""

import importlib
import sys
from importlib.metadata import version as _version
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import attend, attention, select
    from .certify.certificate import Certificate, certify
    from .extensions import explain
    from .hf.attach import Handle, attach
    from .models.load import LoadedModel, load
    from .policy import Policy, policy
    from .ranking import Decision, Ranked
    from .rules.base import RULES, Rule
    from .rules.certified import Certified
    from .rules.even import Even
    from .rules.fill import Fill
    from .rules.last_tile import LastTile
    from .rules.max_ratio import MaxRatio
    from .rules.top_p import TopP
    from .scorers.base import SCORERS, Scorer
    from .selection import Selection
    from .summaries import Summaries
    from .triggers.base import TRIGGERS, Trigger
    from .triggers.calibrated import Calibrated

__version__ = _version("closecall")

_HOMES = {
    "api": ("attend", "attention", "select"),
    "certify.certificate": ("Certificate", "certify"),
    "extensions": ("explain",),
    "hf.attach": ("Handle", "attach"),
    "models.load": ("LoadedModel", "load"),
    "policy": ("Policy", "policy"),
    "ranking": ("Decision", "Ranked"),
    "rules.base": ("RULES", "Rule"),
    "rules.certified": ("Certified",),
    "rules.even": ("Even",),
    "rules.fill": ("Fill",),
    "rules.last_tile": ("LastTile",),
    "rules.max_ratio": ("MaxRatio",),
    "rules.top_p": ("TopP",),
    "scorers.base": ("SCORERS", "Scorer"),
    "selection": ("Selection",),
    "summaries": ("Summaries",),
    "triggers.base": ("TRIGGERS", "Trigger"),
    "triggers.calibrated": ("Calibrated",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "RULES",
    "SCORERS",
    "TRIGGERS",
    "Calibrated",
    "Certificate",
    "Certified",
    "Decision",
    "Even",
    "Fill",
    "Handle",
    "LastTile",
    "LoadedModel",
    "MaxRatio",
    "Policy",
    "Ranked",
    "Rule",
    "Scorer",
    "Selection",
    "Summaries",
    "TopP",
    "Trigger",
    "__version__",
    "attach",
    "attend",
    "attention",
    "certify",
    "explain",
    "load",
    "policy",
    "select",
]


class _Package(ModuleType):
    """Loads a public name on its first use: `import closecall` and `closecall --help` need no torch."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_HOME[name]}", self.__name__), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing `closecall.policy` binds the module here, where `closecall.policy` is the function.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
