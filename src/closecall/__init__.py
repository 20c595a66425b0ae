"""closecall: when the top-k cut is a close call, look at more blocks."""

from importlib.metadata import version as _version

from .api import attend, attention, select
from .certify.certificate import Certificate, certify
from .extensions import explain
from .hf.attach import Handle, attach
from .models.load import LoadedModel
from .models.load import load_model as load
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
