"""Agents of OpenHands."""
