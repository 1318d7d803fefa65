"""One SGLang server: command line, keys, log, process, and what a killed one leaves behind."""
