"""One module per HTTP dialect an agent may speak.

Every parameter of a request is honored, accepted without effect because it is a hint (`hints`), or
refused by name. `model` is any name: a cell serves one model, whatever an agent calls it.
"""
