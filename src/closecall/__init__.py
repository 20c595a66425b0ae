"""closecall: when the top-k cut is a close call, look at more blocks."""

from importlib.metadata import version as _version

from .attention import attend, attention
from .calibrated import Calibrated
from .certificate import Certificate, certify
from .integrations.transformers import Handle, attach
from .policy import RULES, SCORERS, Policy, policy
from .rules import TRIGGERS, Rule, Trigger
from .scorers import Scorer
from .selection import Selection, select
from .selectors.certified_rule import Certified
from .selectors.even_rule import Even
from .selectors.fill_rule import Fill
from .selectors.last_tile_rule import LastTile
from .selectors.max_ratio_rule import MaxRatio
from .selectors.top_p_rule import TopP
from .summaries import Summaries

__version__ = _version("closecall")

__all__ = [
    "RULES",
    "SCORERS",
    "TRIGGERS",
    "Calibrated",
    "Certificate",
    "Certified",
    "Even",
    "Fill",
    "Handle",
    "LastTile",
    "MaxRatio",
    "Policy",
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
    "policy",
    "select",
]
