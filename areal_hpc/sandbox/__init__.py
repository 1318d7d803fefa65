"""Isolation of programs that a model wrote: namespaces by bubblewrap, seccomp, limits."""
