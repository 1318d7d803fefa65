"""Ledger: the service that leases tickets to cells, and forms batches from settled ones."""
