"""Triggers, one file each; `base` says what one is."""

from ..registry import scan as _scan

_scan(__name__, __path__)
