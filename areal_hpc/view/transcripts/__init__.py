"""Transcripts: recorded conversations of a run, searched and shown as text."""
