"""Agents for gyms and tool servers, whose packages run in environments of their own."""
