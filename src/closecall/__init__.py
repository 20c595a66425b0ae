"""closecall: when the top-k cut is a close call, look at more blocks."""

from importlib.metadata import version as _version

from .attention import attend, attention
from .certificate import Certificate, certify
from .certified_rule import Certified
from .integrations.transformers import Handle, attach
from .matched_rule import Even
from .policy import RULES, SCORERS, Policy, policy
from .rules import TRIGGERS, Rule, Trigger
from .scorers import Scorer
from .selection import Selection, select

__version__ = _version("closecall")

__all__ = [
    "RULES",
    "SCORERS",
    "TRIGGERS",
    "Certificate",
    "Certified",
    "Even",
    "Handle",
    "Policy",
    "Rule",
    "Scorer",
    "Selection",
    "Trigger",
    "__version__",
    "attach",
    "attend",
    "attention",
    "certify",
    "policy",
    "select",
]
