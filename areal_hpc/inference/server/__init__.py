"""SGLang server: command line, keys, patches, process, log, and files on its node."""
