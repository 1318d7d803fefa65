"""Broadcast of new weights from trainer ranks into running SGLang replicas."""
