"""Every size that bounds a batch, a part or a buffer. None of them changes a result.

Read them as ``limits.NAME``, so that a test can make them small in one place.
"""

# Tokens of prompts and outputs in memory.
READ_TOKENS = 1 << 23
"""Turns that a file job reads at a time: rounded up to complete sessions."""
BATCH_TOKENS = 1 << 22
"""Rows of one record batch; a longer row has a batch of its own."""
PART_TOKENS = 1 << 25
"""Calls, or their rows, that one kernel call works on: rounded up to sessions."""
MIN_PART_TOKENS = 1 << 22
"""The smallest part that is worth a thread: a part costs about 0.7 ms by itself."""
DELTA_PART_FACTOR = 4
"""Parts in delta form are this much smaller: each of their tokens is new to the rows."""
HELD_ROW_TOKENS = 1 << 25
"""A part with larger rows is written batch by batch, as the batches are asked for."""
VERIFY_TOKENS = 1 << 24
"""Calls that `verify` compares with their rows at a time."""
STREAMING_STORE_TOKENS = 1 << 20
"""Batches from this size on are written past the cache."""
TURN_TOKENS = 256
"""What a turn costs in addition to its tokens, in tokens."""

# Bytes and rows that are read at a time.
READ_BYTES = 16 << 20
MIN_READ_ROWS, MAX_READ_ROWS = 16, 2048
SCANNED_ROWS = 256
"""The most rows of a batch of `scan_rows`."""
JSON_BYTES = 1 << 22
"""Text that is read at a time; the buffer doubles for a longer line."""
JSON_ROWS = 64
"""Lines that become one table."""
IMPORTED_RECORDS = 256
PAGE_BYTES = 1 << 20
"""Bytes of a Parquet column that are read at a time."""

# Files that are written.
FILE_TURNS = 1 << 15
"""A part file ends with the tables that bring it to this many turns."""
ROW_GROUP_BYTES = 8 << 20
"""A Parquet row group. While one is encoded, few more tables are made: larger groups make
reading and writing wait for each other."""
DICTIONARY_BYTES = 16 << 20
"""Distinct texts of a row group; beyond that each text is written in full."""

# Temporary files, from which scattered sessions are read.
BUCKET_BYTES = 32 << 20
"""Turns that are read back at a time: rounded to complete sessions."""
SPILL_BYTES = 16 << 20
"""Turns whose sessions are made contiguous at a time."""
