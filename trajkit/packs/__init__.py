"""Rows as packs: trees of tokens that share prefixes, cut to size and filled up."""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.packs.segments import Varlen as Varlen
    from trajkit.packs.segments import varlen as varlen
else:
    __getattr__, __dir__ = lazy_names(__name__)
