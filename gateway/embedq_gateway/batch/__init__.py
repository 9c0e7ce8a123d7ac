"""Batches: lines of an uploaded file become runs of the bulk lane, and their results become files."""
