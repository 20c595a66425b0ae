"""The field's selectors and ours, each a scorer that any rule can sit on, one short file each.

A file registers its scorers when it is imported, and imports nothing but `scorers`.
"""

from . import box, h2o, minference, moba, nsa, oracles, outliers, snapkv, xattention

__all__ = ["box", "h2o", "minference", "moba", "nsa", "oracles", "outliers", "snapkv", "xattention"]
