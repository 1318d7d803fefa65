"""Batches: from a ledger's manifest to packed rows with their advantages, and their metrics."""
