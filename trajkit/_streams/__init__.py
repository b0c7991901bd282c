"""Streams of record batches, session by session, and the threads that read them."""
