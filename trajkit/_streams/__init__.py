"""Streams of record batches: regrouped by session, read in step and ahead."""
