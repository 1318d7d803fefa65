"""Programs that test a model's program from outside its process.

Answer and tests run in two sandboxes that share a socket. It carries calls, literals, and numbers
that stand for objects of the answer, so the answer can send only values.
"""
