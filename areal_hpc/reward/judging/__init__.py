"""Tests of a program that a model wrote, run in another process than the program.

The two are sandboxes of their own and share a socket. Over it go calls, literals, and numbers that
stand for objects of the answer; so nothing that the answer says can be more than a value.
"""
