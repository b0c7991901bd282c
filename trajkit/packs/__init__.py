"""Rows as packs: trees of tokens that share prefixes, cut to size and filled up."""
